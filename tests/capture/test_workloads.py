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
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.ssd.reference import ssd_recurrence

pytestmark = pytest.mark.usefixtures("in_empty_folder")
EXPORT = ("export", "--format", "flashinfer-bench", "-o", "bench")
TAKE = ("capture", "--from", "flashinfer-bench", "bench", "--out", "taken")
PREFILL = "gdn_prefill_qk1_v2_d16_k_last"
DEFINITION = Path("bench/definitions/gdn", f"{PREFILL}.json")
WORKLOADS = Path("bench/workloads/gdn", f"{PREFILL}.jsonl")
ROUNDING = 2**-8  # relative, of a number in bf16


def layers(folder: str = "bench", kind: Any = "flashinfer-bench") -> list[Any]:
    return list(open_recording(Path(folder), kind).layers())


def gdn(length: int, *bounds: int) -> Tensors:
    """A call on one key head and two value heads."""
    q, k, v = (torch.randn(1, length, heads, 16).bfloat16() for heads in (1, 1, 2))
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -10 * torch.rand(1, length, 2) ** 4, torch.rand(1, length, 2)
    g[0, 1], beta[0, 1] = torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, 1.0])
    call = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if bounds:
        call["cu_seqlens"] = torch.tensor(bounds)
        call["initial_state"] = torch.randn(len(bounds) - 1, 2, 16, 16)
    return call


def write(folder: Path, **arguments: bool) -> str:
    """Packed sequences, a whole prompt, and a step of two sequences: `recorded`, `captured` and
    `bench`.  Returns what was said.
    """
    torch.manual_seed(0)
    calls = [gdn(13, 0, 5, 5, 13), gdn(12), gdn(2, 0, 1, 2)]
    recorded = record(folder / "recorded", "gdn", calls, (7,), **arguments)
    captured = str(folder / "captured")
    passing("capture", "--from", "safetensors", str(recorded), "--out", captured)
    return passing(*EXPORT[:-1], str(folder / "bench"), captured).err


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write(folder)
    return folder


@pytest.fixture
def bench(written: Path) -> None:
    shutil.copytree(written, ".", dirs_exist_ok=True)


@pytest.mark.parametrize("norm", [True, False])
def test_captures_travel_there_and_back(norm: bool) -> None:
    """Only gates, and q and k that had to be normalised, are rounded."""
    assert "changes g by up to" in write(Path(), use_qk_l2norm=norm)
    again = {layer.inputs.length: layer.inputs for layer in layers()}
    for layer in layers("recorded", "safetensors"):
        before, after = layer.inputs, again[layer.inputs.length]
        logs = {"g": before.g.neg().expm1().log(), "beta": before.beta.logit()}
        for name, raw in logs.items():
            old, new = getattr(before, name), getattr(after, name)
            close = (new / old).log().abs() <= ROUNDING * raw.abs() + 1e-5
            assert bool((close | (new == old)).all())
        for name in ("q", "k"):
            old, new = getattr(before, name).float(), getattr(after, name).float()
            if norm:
                old = torch.nn.functional.normalize(old, dim=-1)
            bound = ROUNDING * norm
            assert bool(((new - old).abs() <= 1.001 * bound * old.abs()).all())
        assert torch.equal(before.v, after.v)
        states = before.initial_state
        assert torch.equal(
            after.initial_state, states if states is not None else 0 * after.initial_state
        )
    passing(*TAKE)
    ran = passing(
        "run", "taken", "--dtypes", "exact", "--impl", "reference", "--baseline", "reference"
    )
    assert "Suspect" not in ran.out


def inputs_of(name: str) -> tuple[dict[str, Any], list[Any]]:
    """A definition, and the inputs of its first workload."""
    definition = json.loads(Path(f"bench/definitions/gdn/{name}.json").read_text())
    line = Path(f"bench/workloads/gdn/{name}.jsonl").read_text().splitlines()[0]
    sources = json.loads(line)["workload"]["inputs"].values()
    return definition, [
        source["value"]
        if source["type"] == "scalar"
        else load_file(Path("bench") / source["path"])[source["tensor_key"]]
        for source in sources
    ]


@pytest.mark.parametrize("name", [PREFILL, PREFILL.replace("prefill", "decode")])
def test_the_reference_is_the_oracle_and_our_kernels_solve_it(bench: None, name: str) -> None:
    definition = json.loads(Path(f"bench/definitions/gdn/{name}.json").read_text())
    workload = json.loads(WORKLOADS.with_stem(name).read_text().splitlines()[0])["workload"]
    tensors = load_file(next(Path("bench/blob/workloads/gdn", name).glob(f"{workload['uuid']}*")))
    values = [tensors.get(key, source.get("value")) for key, source in workload["inputs"].items()]
    inputs = next(layer.inputs for layer in layers() if layer.layer.name.startswith(name))
    out, states = gdn_recurrence(inputs)
    texts = [definition["reference"]]
    for file in Path("bench/solutions/gdn", name).iterdir():
        texts += [source["content"] for source in json.loads(file.read_text())["sources"]]
    assert len(texts) == 3
    for text in texts:
        module: dict[str, Any] = {}
        exec(text, module)
        actual = module["run"](*values)
        for tensor, expected in zip(actual, (out, states.mT), strict=True):
            error = (tensor.double() - expected.reshape(tensor.shape)).norm() / expected.norm()
            assert error < 5e-3
        assert [str(tensor.dtype) for tensor in actual] == ["torch.bfloat16", "torch.float32"]


def test_calls_that_it_does_not_define_are_left_out() -> None:
    different = {name: tensor for name, tensor in gdn_call(9).items() if "f" not in name}
    calls = [gdn(7, 0, 3, 7), different, gdn(5) | {"beta": torch.full((1, 5, 2), 1.5)}]
    record(Path("gdn"), "gdn", calls, (7,))
    record(Path("kda"), "kda", [different | {"g": -torch.rand(1, 9, 2, 16)}], (7,))
    for name in ("gdn", "kda"):
        passing("capture", "--from", "safetensors", name, "--out", f"of_{name}")
    words = "1 call of GDN (K and V differ) and 1 call of GDN (beta is not between 0 and 1)."
    assert f"Left out: {words}" in passing(*EXPORT, "of_gdn").err
    answer = ending(2, *EXPORT[:-1], "other", "of_kda")
    assert "no call to write. Left out: 1 call of KDA (ssdprof writes no definition" in answer.err
    assert "is not empty" in ending(2, *EXPORT, "of_gdn").err
    assert "holds no captures" in ending(2, *EXPORT[:-1], "other", "bench").err


def define(name: str, tensors: Tensors, drawn: Sequence[str] = (), **tokens: int) -> None:
    """A definition, and a workload in which some inputs are random."""
    axes = {f"{key}{dim}": size for key in tensors for dim, size in enumerate(tensors[key].shape)}
    document = {
        "name": name,
        "axes": {axis: {"type": "const", "value": size} for axis, size in (axes | tokens).items()},
        "inputs": {
            key: {
                "shape": [f"{key}{dim}" for dim in range(tensor.ndim)],
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for key, tensor in tensors.items()
        },
    }
    sources = {
        key: {"type": "safetensors", "path": f"{name}.bin", "tensor_key": key}
        for key in tensors.keys() - set(drawn)
    }
    entry = {"definition": name, "workload": {"uuid": "7", "axes": {}, "inputs": sources}}
    for file, content in ("definitions/of.json", document), ("workloads/of.jsonl", entry):
        place = Path("bench", file).with_stem(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(content))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, f"bench/{name}.bin")


def test_drafted_tokens_begin_in_a_pool_and_random_inputs_are_always_the_same() -> None:
    tensors = {
        "q": torch.ones(2, 3, 1, 8),
        "k": torch.ones(2, 3, 1, 8),
        "v": torch.ones(2, 3, 2, 8),
        "initial_state": torch.randn(4, 2, 8, 8),
        "initial_state_indices": torch.tensor([3, 0], dtype=torch.int32),
        "A_log": torch.zeros(2),
        "a": torch.zeros(2, 3, 2),
        "dt_bias": torch.zeros(2),
        "b": torch.zeros(2, 3, 2),
    }
    name = "gdn_mtp_qk1_v2_d8_k_last"
    define(name, tensors, ("q", "k", "v", "a", "A_log"), batch_size=2, seq_len=3)
    define("gemm_n8", {"A": torch.ones(1)})
    define(name.replace("k_last", "v_last"), tensors)
    words = "1 call of gdn_mtp_qk1_v2_d8_v_last and 1 call of gemm_n8."
    assert f"Left out: {words}" in passing(*TAKE).err
    [layer], [again] = layers(), layers()
    inputs = layer.inputs
    assert torch.equal(inputs.initial_state, tensors["initial_state"][[3, 0]].mT)
    assert (inputs.sequences, inputs.length) == (2, 6)
    assert all(map(torch.equal, inputs.tensors.values(), again.inputs.tensors.values()))
    assert torch.allclose(inputs.k.norm(dim=-1), torch.ones(()))
    assert not torch.equal(inputs.q, inputs.k)


def test_steps_of_ssd_begin_in_a_pool() -> None:
    x, B, C, state = torch.randn(2, 2, 4), *torch.randn(2, 2, 1, 8), torch.randn(3, 2, 4, 8)
    dt, A = torch.randn(2, 2, 1).expand(2, 2, 4), -torch.rand(2, 1, 1).expand(2, 4, 8)
    D, dt_bias = torch.randn(2, 2, 1).expand(2, 2, 4)
    slots = torch.tensor([2, 0])
    tensors = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
    define("mamba_ssu_decode_h2_d4_s8_ng1", tensors | {"state_batch_indices": slots}, batch_size=2)
    [layer] = layers()
    step = torch.nn.functional.softplus(dt + dt_bias)[..., None]
    states = state[slots] * (step * A).exp() + step * x[..., None] * B[:, :, None]
    out, new = ssd_recurrence(layer.inputs)
    assert torch.allclose(new.float(), states, atol=1e-5)
    assert torch.allclose(out[0].float(), (states * C[:, :, None]).sum(-1) + D * x, atol=1e-5)


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def blob() -> Path:
    files = Path("bench/blob/workloads/gdn", PREFILL).iterdir()
    return next(file for file in files if len(load_file(file)["q"]) == 13)


def repack(**changes: torch.Tensor) -> None:
    save_file(load_file(blob()) | changes, blob())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda: edit(WORKLOADS, "}\n", "\n"), "cannot be used"),
        (lambda: edit(WORKLOADS, PREFILL, "gdn"), "KeyError: 'gdn'"),
        (lambda: edit(WORKLOADS, '"num_seqs": 3', '"num_seqs": 0'), "13 tokens of 0 sequences"),
        (lambda: edit(WORKLOADS, '"num_seqs": 3', '"num_seqs": 2'), "state is (3, 2, 16, 16)"),
        (lambda: edit(WORKLOADS, "blob/", "../blob/"), "is outside of the folder"),
        (lambda: edit(WORKLOADS, '"safetensors"', '"random"'), "random integers are no cu_seqlens"),
        (lambda: edit(DEFINITION, '"int64"', '"int32"'), "cu_seqlens is (4,) torch.int64, not"),
        (lambda: DEFINITION.write_text("{"), "cannot be used"),
        (lambda: blob().unlink(), "No such file"),
        (lambda: torch.save({"q": Path}, blob()), "cannot be used"),
        (lambda: blob().write_bytes(blob().read_bytes()[:999]), "cannot be used"),
        (lambda: repack(q=torch.ones(13, 1, 8)), "q is (13, 1, 8) torch.float32, not"),
        (lambda: repack(cu_seqlens=torch.tensor([0, 9, 5, 13])), "cu_seqlens must rise"),
        (lambda: shutil.rmtree("bench/workloads"), "holds no workloads"),
    ],
)
def test_a_damaged_folder_is_refused(bench: None, damage: Callable[[], object], words: str) -> None:
    damage()
    answer = ending(2, *TAKE)
    assert words in answer.err
