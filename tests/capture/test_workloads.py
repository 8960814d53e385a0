"""Workloads of flashinfer-bench: written from captures, and read as captures."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.recordings import Tensors, gdn_call, record
from command_line import ending, passing
from safetensors.torch import load_file, save_file

from ssdprof.capture.recording import open_recording
from ssdprof.kernels import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.operators.gdn_definitions import write

pytestmark = pytest.mark.usefixtures("in_empty_folder")
EXPORT = "export --format flashinfer-bench -o bench"
TAKE = "capture --from flashinfer-bench bench --out taken"
PREFILL = "gdn_prefill_qk1_v2_d16_k_last"
DEFINITION = Path("bench/definitions/gdn", f"{PREFILL}.json")
WORKLOADS = Path("bench/workloads/gdn", f"{PREFILL}.jsonl")
ROUNDING = 2**-8  # relative, of a number in bf16


def layers(folder: str = "bench", kind="flashinfer-bench") -> list[Any]:
    return list(open_recording(Path(folder), kind).layers())


def gdn(length: int, *bounds: int) -> Tensors:
    """A call on one key head and two value heads."""
    q, k, v = (torch.randn(1, length, heads, 16).bfloat16() for heads in (1, 1, 2))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -10 * torch.rand(1, length, 2) ** 4
    beta = torch.rand(1, length, 2)
    g[0, 1], beta[0, 1] = torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, 1.0])
    states = torch.randn(len(bounds) - 1, 2, 16, 16)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return tensors | {"cu_seqlens": torch.tensor(bounds), "initial_state": states}


@pytest.fixture(params=[True])
def bench(request) -> str:
    """Prefills, and a step of two sequences.  Returns what was said.  param: use_qk_l2norm."""
    torch.manual_seed(0)
    calls = [gdn(13, 0, 5, 5, 13), gdn(9, 0, 2, 9), gdn(2, 0, 1, 2)]
    record(Path("recorded"), "gdn", calls, (7,), use_qk_l2norm=request.param)
    passing("capture --from safetensors recorded --out captured")
    return passing(EXPORT, "captured").err


@pytest.mark.parametrize("bench", [True, False], indirect=True)
def test_captures_travel_there_and_back(bench):
    """Only gates, and q and k that had to be normalised, are rounded."""
    assert "changes g by up to" in bench
    again = {layer.inputs.length: layer.inputs for layer in layers()}
    for layer in layers("recorded", "safetensors"):
        before = layer.inputs
        after = again[layer.inputs.length]
        logs = {"g": before.g.neg().expm1().log(), "beta": before.beta.logit()}
        for name, raw in logs.items():
            old = getattr(before, name)
            new = getattr(after, name)
            close = (new / old).log().abs() <= ROUNDING * raw.abs() + 1e-5
            assert bool((close | (new == old)).all())
        for name in ("q", "k"):
            old = getattr(before, name).float()
            new = getattr(after, name).float()
            if before.use_qk_l2norm:
                old = torch.nn.functional.normalize(old, dim=-1)
            bound = ROUNDING * before.use_qk_l2norm
            assert bool(((new - old).abs() <= 1.001 * bound * old.abs()).all())
        assert torch.equal(before.v, after.v)
        assert torch.equal(before.initial_state, after.initial_state)
    passing(TAKE)
    asked = "--dtypes exact --impl reference --baseline reference"
    assert "Suspect" not in passing("run taken", asked).out


def test_the_reference_is_the_oracle_and_our_kernels_solve_it(bench: str):
    named = {layer.layer.name.split()[1]: layer.inputs for layer in layers()}
    for name in (PREFILL, PREFILL.replace("prefill", "decode")):
        lines = WORKLOADS.with_stem(name).read_text().splitlines()
        workload = json.loads(lines[-1])["workload"]
        out, states = gdn_recurrence(named[workload["uuid"]])
        file = f"bench/blob/workloads/gdn/{name}/{workload['uuid']}.safetensors"
        tensors = load_file(file) | {"scale": workload["inputs"]["scale"]["value"]}
        texts = [json.loads(DEFINITION.with_stem(name).read_text())["reference"]]
        for solution in Path("bench/solutions/gdn", name).iterdir():
            texts.append(json.loads(solution.read_text())["sources"][0]["content"])
        assert len(texts) == 3
        for text in texts:
            module = {}
            exec(text, module)
            actual = module["run"](*(tensors[key] for key in workload["inputs"]))
            assert [tensor.dtype for tensor in actual] == [torch.bfloat16, torch.float32]
            for tensor, expected in zip(actual, (out, states.mT), strict=True):
                error = tensor.double() - expected.reshape(tensor.shape)
                assert error.norm() < 5e-3 * expected.norm()


def test_rows_of_a_batch_follow_each_other():
    packed = gdn(6, 0, 3, 6)
    states = packed["initial_state"]
    rows = {name: packed[name].unflatten(1, (2, 3))[0] for name in ("q", "k", "v", "g", "beta")}
    batch = write(GDNInputs(**rows, initial_state=states))
    for name, tensor in write(GDNInputs(**packed)).items():
        assert torch.equal(tensor, batch[name])


def test_calls_that_are_not_defined_are_left_out():
    outputs = ("out", "final_states")
    different = {name: tensor for name, tensor in gdn_call(9).items() if name not in outputs}
    long = gdn(5, 0, 5) | {"beta": torch.full((1, 5, 2), 1.5)}
    record(Path("gdn"), "gdn", [gdn(7, 0, 3, 7), different, long], (7,))
    record(Path("kda"), "kda", [different | {"g": -torch.rand(1, 9, 2, 16)}], (7,))
    for name in ("gdn", "kda"):
        passing(f"capture --from safetensors {name} --out of_{name}")
    words = "1 call of GDN (K and V differ) and 1 call of GDN (beta is not between 0 and 1)."
    assert f"Left out: {words}" in passing(EXPORT, "of_gdn").err
    answer = ending(2, EXPORT, "--force of_kda")
    assert "no call to write. Left out: 1 call of KDA (ssdprof writes no definition" in answer.err
    assert "is not empty" in ending(2, EXPORT, "of_gdn").err


def define(name: str, tensors: Tensors, drawn: Sequence[str] = (), **tokens: int):
    """A definition, and a workload in which some inputs are random."""
    axes = {f"{key}{dim}": size for key in tensors for dim, size in enumerate(tensors[key].shape)}
    inputs = {
        key: {
            "shape": [f"{key}{dim}" for dim in range(tensor.ndim)],
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for key, tensor in tensors.items()
    }
    sizes = {axis: {"type": "const", "value": size} for axis, size in (axes | tokens).items()}
    sources = {
        key: {"type": "safetensors", "path": f"{name}.bin", "tensor_key": key}
        for key in tensors.keys() - set(drawn)
    }
    entry = {"definition": name, "workload": {"uuid": "7", "axes": {}, "inputs": sources}}
    documents = {
        f"definitions/{name}.json": {"name": name, "axes": sizes, "inputs": inputs},
        f"workloads/{name}.jsonl": entry,
    }
    for path, document in documents.items():
        file = Path("bench", path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, f"bench/{name}.bin")


def test_drafted_tokens_begin_in_a_pool_and_random_inputs_are_always_the_same():
    key = torch.ones(2, 3, 1, 8)
    gate = torch.zeros(2, 3, 2)
    head = torch.zeros(2)
    pool = torch.randn(4, 2, 8, 8)
    slots = torch.tensor([3, 0], dtype=torch.int32)
    tensors = {"q": key, "k": key + 1, "v": torch.ones(2, 3, 2, 8), "initial_state": pool}
    tensors |= {"initial_state_indices": slots, "A_log": head, "dt_bias": head + 1}
    name = "gdn_mtp_qk1_v2_d8_k_last"
    gates = {"a": gate, "b": gate + 1}
    define(name, tensors | gates, ("q", "k", "v", "a", "A_log"), batch_size=2, seq_len=3)
    define("gemm_n8", {"A": head})
    define(name.replace("k_last", "v_last"), tensors | gates)
    words = "1 call of gdn_mtp_qk1_v2_d8_v_last and 1 call of gemm_n8."
    assert f"Left out: {words}" in passing(TAKE).err
    [inputs], [again] = ([layer.inputs for layer in layers()] for _ in range(2))
    assert torch.equal(inputs.initial_state, pool[[3, 0]].mT)
    assert (inputs.sequences, inputs.length) == (2, 6)
    assert all(map(torch.equal, inputs.tensors.values(), again.tensors.values()))
    assert torch.allclose(inputs.k.norm(dim=-1), torch.ones(()))
    assert not torch.equal(inputs.q, inputs.k)


def test_steps_of_ssd_begin_in_a_pool():
    x = torch.randn(2, 2, 4)
    dt = torch.randn(2, 2, 1)
    A = -torch.rand(2, 1, 1)
    B = torch.randn(2, 1, 8)
    C = torch.randn(2, 1, 8)
    D = torch.randn(2, 1)
    pool = torch.randn(3, 2, 4, 8)
    slots = torch.tensor([2, 0])
    tensors = {"state": pool, "x": x, "dt": dt.expand(2, 2, 4), "A": A.expand(2, 4, 8), "B": B}
    tensors |= {"C": C, "D": D.expand(2, 4), "dt_bias": D.expand(2, 4)}
    name = "mamba_ssu_decode_h2_d4_s8_ng1"
    of_steps = Path("bench", f"{name}.bin")
    define(name, tensors | {"state_batch_indices": slots}, batch_size=2)
    [layer] = layers()
    step = torch.nn.functional.softplus(dt + D)[..., None]
    states = pool[slots] * (step * A).exp() + step * x[..., None] * B[:, :, None]
    out, new = ssd_recurrence(layer.inputs)
    assert torch.allclose(new.float(), states, atol=1e-5)
    assert torch.allclose(out[0].float(), (states * C[:, :, None]).sum(-1) + D * x, atol=1e-5)
    for padding in (-1, 3):
        save_file(
            load_file(of_steps) | {"state_batch_indices": torch.tensor([2, padding])}, of_steps
        )
        assert "slots are named outside of a pool of 3" in ending(2, TAKE).err


def edit(file: Path, old: str, new: str):
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def blob() -> Path:
    return sorted(Path("bench/blob/workloads/gdn", PREFILL).iterdir())[0]


def repack(name: str, tensor: torch.Tensor):
    save_file(load_file(blob()) | {name: tensor}, blob())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda: edit(WORKLOADS, "}\n", "\n"), "cannot be used"),
        (lambda: edit(WORKLOADS, PREFILL, "gdn"), "there is no 'gdn'."),
        (lambda: edit(WORKLOADS, '"num_seqs": 3', '"num_seqs": 0'), "13 tokens of 0 sequences"),
        (lambda: edit(WORKLOADS, '"num_seqs": 3', '"num_seqs": 2'), "not (2, 2, 16, 16)"),
        (lambda: edit(WORKLOADS, '"value": 0.25', '"value": [1]'), "must be real number"),
        (lambda: edit(WORKLOADS, "blob/", "../blob/"), "is outside of the folder"),
        (lambda: edit(WORKLOADS, '"safetensors"', '"random"'), "random integers are no cu_seqlens"),
        (lambda: edit(DEFINITION, '"int64"', '"int32"'), "torch.int64, not"),
        (lambda: DEFINITION.write_text("{"), "cannot be used"),
        (lambda: blob().unlink(), "No such file"),
        (lambda: torch.save({"q": Path}, blob()), "cannot be used"),
        (lambda: repack("cu_seqlens", 1 + load_file(blob())["cu_seqlens"]), "cu_seqlens must rise"),
        (lambda: repack("q", torch.ones(3, 1, 8)), "q is (3, 1, 8) torch.float32, not"),
        (lambda: shutil.rmtree("bench/workloads"), "holds no workloads"),
    ],
)
def test_a_damaged_folder_is_refused(bench: str, damage: Callable[[], object], words):
    damage()
    assert words in ending(2, TAKE).err
