"""What a server recorded becomes a capture, and what it computed a case: FlashInfer's recorder and
safetensors.

`flashinfer.tar.xz` was written by FlashInfer 0.7.2 on an H100: two layers, a warm-up call of each,
40 tokens, and one layer's call on two sequences with states in a pool of three slots, of which it
uses the last and the first.
"""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.recordings import Tensors, gdn_call, record
from command_line import Answer, ending, passing
from fakes import flip_a_bit
from safetensors.torch import save_file

from ssdprof.capture import recording
from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.manifest import read_manifest
from ssdprof.capture.recording import DESCRIPTION, open_recording
from ssdprof.capture.store import read_layer
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.kernels import GDNInputs, SSDInputs
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.store import reports

pytestmark = pytest.mark.usefixtures("in_empty_folder")
PREFILL = "chunk_gated_delta_rule"
Change = Callable[[Tensors], object]
Damage = Callable[[Path], object]


@pytest.fixture
def dump(tmp_path) -> Path:
    shutil.unpack_archive(Path(__file__).parent / "flashinfer.tar.xz", tmp_path / "dump")
    return tmp_path / "dump"


def call(dump: Path, number: int) -> Path:
    return next(dump.glob(f"*_call{number:04d}"))


def tensors_of(dump: Path, number: int, which: str = "inputs") -> Tensors:
    return torch.load(call(dump, number) / f"{which}.pt", weights_only=True)


def edit(place: Path, change: Callable[[dict[str, Any]], object]):
    file = place / "metadata.jsonl"
    first, last = file.read_text().splitlines()
    metadata = json.loads(last)
    change(metadata)
    file.write_text(f"{first}\n{json.dumps(metadata)}\n")


def repack(file: Path, change: Change):
    tensors = torch.load(file, weights_only=True)
    change(tensors)
    torch.save(tensors, file)


def ssd_call(length: int) -> Tensors:
    return {
        "x": torch.randn(1, length, 4, 8),
        "dt": torch.rand(1, length, 4),
        "A": -torch.rand(4),
        "B": torch.randn(1, length, 1, 16),
        "C": torch.randn(1, length, 1, 16),
        "D": torch.rand(4),
    }


def close(layer: CapturedLayer) -> bool:
    """Whether what was served is the operator of the inputs."""
    exact = gdn_recurrence(layer.inputs)
    return all(
        float((actual - expected).norm() / expected.norm()) < 5e-3
        for actual, expected in zip(layer.served, exact, strict=True)
    )


def test_a_recording_of_flashinfer_becomes_a_capture_with_what_it_computed(dump: Path):
    recorded = open_recording(dump, "flashinfer")
    assert recorded.left_out == "Left out: 2 calls of a warm-up."
    assert [len(calls) for calls in recorded.passes] == [2, 1]
    layers = list(recorded.layers())
    assert [(layer.layer.index, str(layer.call), layer.inputs.length) for layer in layers] == [
        (0, "in 1 packed sequence, pass 1 of 2", 40),
        (1, "in 1 packed sequence, pass 1 of 2", 40),
        (0, "in 2 packed sequences, pass 2 of 2", 33),
    ]
    assert all(map(close, layers))
    pool = tensors_of(dump, 7, "outputs")["result_1"]
    slots = tensors_of(dump, 7)["kwarg_state_indices"]
    assert torch.equal(layers[-1].served[1], pool[slots].mT)
    decays = tensors_of(dump, 3)["kwarg_g"]
    assert torch.equal(layers[0].inputs.tensors["g"][0].exp(), decays.log().exp())
    assert not layers[0].inputs.scalars["use_qk_l2norm"]
    # stored and read again, bit for bit
    answer = passing(f"capture --from flashinfer {dump} --out captures")
    assert "Left out: 2 calls of a warm-up." in answer.err
    manifest = read_manifest(Path("captures"))
    assert manifest.complete
    for layer, stored in zip(layers, manifest.layers, strict=True):
        again = read_layer(Path("captures"), stored)
        for name, tensor in layer.inputs.tensors.items():
            assert torch.equal(tensor, again.inputs.tensors[name])
        assert all(map(torch.equal, again.served, layer.served))


@pytest.mark.parametrize(
    "plant",
    [
        lambda out, states, _: (out, states.roll(1, 0)),  # another slot
        lambda out, states, _: (out, states.mT.contiguous()),
        # a snapshot that was never written
        lambda out, _, inputs: (out, inputs.initial_state.clone()),
        lambda out, states, _: (out.roll(1, 1), states),
        lambda out, states, _: (out.roll(1, 2), states),
    ],
    ids=["slot", "layout", "snapshot", "token", "head"],
)
def test_faults_that_servers_had_are_found(dump: Path, plant: Callable[..., Any]):
    *_, last = open_recording(dump, "flashinfer").layers()
    for output, fails in ((last.served, False), (plant(*last.served, last.inputs), True)):
        candidate = Candidate(output=output, precision=Precision(), name="it")
        accuracies = compare(last.inputs, {"it": candidate})["it"]
        assert any(accuracy.reason for accuracy in accuracies) is fails


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_served_outputs_are_a_case_of_the_run(dump: Path, wrong):
    """A pool that is read with V and K exchanged is one of the faults that servers had."""
    if wrong:
        repack(
            call(dump, 7) / "outputs.pt",
            lambda tensors: tensors.update(result_1=tensors["result_1"].mT.contiguous()),
        )
    passing(f"capture --from flashinfer {dump} --out captures --layers 0")
    answer = Answer("run captures --dtypes exact --out run")
    _, report = reports.load("run")
    served = {case.seqlen: case.result for case in report.cases if case.implementation == "served"}
    assert served == {40: "passed", 33: "inaccurate" if wrong else "passed"}
    assert answer.code == int(wrong), answer.out
    assert ("served" in answer.out.partition("FAILED")[2]) is wrong
    assert "served may be used" not in answer.out
    for words in ("accuracy run", "export run --format csv"):
        assert "served" in Answer(words).out


def test_argument_names_come_from_the_signature_and_defaults_are_absent(dump: Path):
    def renamed(metadata: dict[str, Any]):
        metadata["input_metadata"]["arg_5"] = 0.5  # scale, positional
        metadata["input_metadata"]["kwarg_use_qk_l2norm_in_kernel"] = True

    edit(call(dump, 3), renamed)
    scalars = next(open_recording(dump, "flashinfer").layers()).inputs.scalars
    assert (scalars["scale"], scalars["use_qk_l2norm"]) == (0.5, True)


@pytest.mark.parametrize(("decay", "logarithm"), [(0.0, -math.inf), (1.0, 0.0)])
def test_decays_become_logarithms(dump: Path, decay, logarithm):
    repack(call(dump, 3) / "inputs.pt", lambda tensors: tensors["kwarg_g"].fill_(decay))
    layer = next(open_recording(dump, "flashinfer").layers())
    assert set(layer.inputs.tensors["g"].flatten().tolist()) == {logarithm}


def test_calls_of_other_functions_in_graphs_and_without_outputs_are_counted(dump: Path):
    for number, (name, graph) in enumerate([("trtllm_attention", False), (PREFILL, True)], 8):
        place = dump / f"20261127_000000_000_pid609_{name}_call{number:04d}"
        shutil.copytree(call(dump, 7), place)
        edit(
            place,
            lambda metadata, name=name, graph=graph: metadata.update(
                function_name=name, graph_capture=graph
            ),
        )
    (call(dump, 7) / "outputs.pt").unlink()
    recorded = open_recording(dump, "flashinfer")
    assert recorded.left_out == (
        "Left out: 1 call inside CUDA graphs, 1 call of trtllm_attention and 2 calls of a warm-up."
    )
    *_, last = recorded.layers()
    assert last.served is None
    assert last.remark == "No output of recorded layer 0 was recorded in pass 2."


def test_every_process_has_its_own_passes(dump: Path):
    for number in (1, 2, 3, 4):
        place = dump / f"other_call{number:04d}"
        shutil.copytree(call(dump, number), place)
        edit(place, lambda metadata: metadata.update(process_id=610))
    recorded = open_recording(dump, "flashinfer")
    assert [[call.process for _, call in calls] for calls in recorded.passes] == [
        ["609"] * 2,
        ["609"],
        ["610"] * 2,
    ]
    assert recorded.left_out == "Left out: 4 calls of a warm-up."


def truncated(file: Path):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def with_code(file: Path):
    torch.save({"arg_0": Path}, file)


def repacked(change: Change) -> Damage:
    return lambda file: repack(file, change)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, "call0007 cannot be used"),
        (flip_a_bit, "call0007 cannot be used: the checksum of"),
        (with_code, "call0007 cannot be used"),
        (Path.unlink, "call0007 cannot be used: it has no inputs.pt"),
        (
            repacked(lambda tensors: tensors["kwarg_state_indices"].fill_(3)),
            "slots are named outside of a pool of 3",
        ),
        (
            repacked(lambda tensors: tensors.pop("kwarg_cu_seqlens")),
            "cannot be used: there is no 'cu_seq",
        ),
        (
            repacked(lambda tensors: tensors["kwarg_cu_seqlens"].fill_(34)),
            "cu_seqlens must rise from 0",
        ),
        (repacked(lambda tensors: tensors["kwarg_g"].neg_()), "g is not a decay between 0 and 1"),
        (
            repacked(lambda tensors: tensors.update(arg_1=tensors["arg_1"][:, :, 1:])),
            "k must have shape",
        ),
        (lambda file: torch.save([1], file), "inputs.pt holds no table of tensors"),
        (lambda file: truncated(file.parent / "outputs.pt"), "call0007 cannot be used"),
        (
            lambda file: edit(file.parent, lambda metadata: metadata.pop("tensor_details")),
            "metadata.jsonl cannot be used: there is no 'tensor_details'",
        ),
        (
            lambda file: edit(
                file.parent, lambda metadata: metadata.update(function_signature="(q)")
            ),
            "metadata.jsonl cannot be used",
        ),
        (
            lambda file: (file.parent / "metadata.jsonl").write_text("{"),
            "metadata.jsonl cannot be used",
        ),
    ],
)
def test_a_damaged_recording_is_refused(dump: Path, damage: Damage, words):
    damage(call(dump, 7) / "inputs.pt")
    answer = ending(2, f"capture --from flashinfer {dump} --out captures")
    assert words in answer.err
    assert "docs/from-a-server.md" in answer.err


def test_huge_foreign_and_empty_recordings_are_refused(dump: Path, monkeypatch):
    for name in ("nothing", "foreign"):
        Path(name).mkdir()
    (Path("foreign") / "session.jsonl").write_text("{}\n")
    for name in ("nothing", "foreign", "absent"):
        with pytest.raises(BadInputError, match=f"{name} holds no recording of FlashInfer"):
            open_recording(Path(name), "flashinfer")
        ending(2, "capture --from safetensors", name)

    def in_graphs(yes: bool):
        for number in (1, 2, 3, 4, 7):
            edit(call(dump, number), lambda metadata: metadata.update(graph_capture=yes))

    in_graphs(True)
    with pytest.raises(
        BadInputError, match=r"no call that can be replayed.  Left out: 5 calls inside CUDA graphs"
    ):
        open_recording(dump, "flashinfer")
    answer = ending(2, f"capture --from flashinfer {dump} --seq 16")
    assert "prompts: --seq cannot be given" in answer.err
    in_graphs(False)
    monkeypatch.setattr(recording, "host_memory", lambda: 1 << 17)
    with pytest.raises(MissingCapabilityError, match=r"which main memory of .* cannot hold twice"):
        list(open_recording(dump, "flashinfer").layers())
    ending(3, f"capture --from flashinfer {dump} --out huge")


def test_a_folder_of_safetensors_becomes_a_capture(tmp_path):
    states = torch.randn(3, 2, 16, 8)
    shapes: list[tuple[int, tuple[int, ...]]] = [(70, ()), (12, (0, 5, 5, 12)), (9, ())]
    passes = [
        gdn_call(length, bounds, states[: max(1, len(bounds) - 1)])
        for length, bounds in shapes
        for _ in range(2)
    ]
    recorded = open_recording(record(tmp_path / "r", "gdn", passes), "safetensors")
    assert recorded.ref.model_type == "recorded by mine"
    assert (len(recorded.ref.layers), len(recorded.passes)) == (2, 6)
    assert all(map(close, recorded.layers()))
    assert [layer.inputs.sequences for layer in recorded.layers("1")] == [1, 3, 1] * 2
    ssd = ssd_call(7)
    folder = record(tmp_path / "s", "ssd", [ssd], chunk_size=64, dt_softplus=True)
    first, _ = open_recording(folder, "safetensors").layers()
    expected = SSDInputs(**ssd, chunk_size=64, dt_softplus=True)
    assert torch.equal(ssd_recurrence(first.inputs)[0], ssd_recurrence(expected)[0])
    assert first.served is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("", [(0, "gdn"), (1, "gdn"), (2, "ssd")]), ("7", [(0, "gdn"), (1, "ssd")])],
)
def test_layers_of_two_operators_differ_even_if_their_names_do_not(tmp_path, name, expected):
    """Without names, those of each operator are counted."""
    folder = tmp_path / "r"
    folder.mkdir()
    for number, operator in enumerate(("gdn", "ssd", "gdn") * 2):
        length = 9 + number // 3
        call = {"operator": operator, "source": "mine", "layer": name}
        tensors = gdn_call(length) if operator == "gdn" else ssd_call(length)
        file = folder / f"1_{number + 7}.safetensors"  # 10 comes after 9
        save_file(tensors, file, {"call": json.dumps(call)})
    recorded = open_recording(folder, "safetensors")
    assert recorded.passes[-1][0][1].shape == (10, 1)
    assert [(layer.index, layer.operator) for layer in recorded.ref.layers] == expected
    for layer in recorded.layers():
        assert layer.inputs.operator == layer.layer.operator


def described(text: str) -> Damage:
    return lambda folder: (folder / DESCRIPTION).write_text(text)


def holding(tensors: Tensors, call: str = "") -> Damage:
    return lambda folder: save_file(tensors, folder / "9_000001.safetensors", {"call": call})


def verification(lengths: Sequence[int]) -> Tensors:
    """Drafted tokens of sequences, and the state after each."""
    bounds = [0, *accumulate(lengths)]
    call = gdn_call(bounds[-1], bounds, torch.randn(len(lengths), 2, 16, 8))
    states = []
    for row, (start, end) in enumerate(pairwise(bounds)):
        for stop in range(start + 1, end + 1):
            tokens = {name: call[name][:, start:stop] for name in ("q", "k", "v", "g", "beta")}
            initial = call["initial_state"][row : row + 1]
            states.append(gdn_recurrence(GDNInputs(**tokens, initial_state=initial))[1].float())
    return call | {"final_states": torch.cat(states)}


def test_a_verification_is_replayed_as_a_batch_if_its_lengths_are_equal(tmp_path):
    """And else token by token of the pack, by kernels that return final states alone."""
    calls = [verification((3, 3, 3)), verification((1, 3, 0, 2)), verification((1, 0))]
    record(tmp_path / "r", "gdn", calls, (1,), state_every=1)
    passing("capture --from safetensors r --out captures")
    passing("run captures --impl fused,recurrent --dtypes exact --out run")
    _, report = reports.load("run")
    assert {case.size for case in report.cases} == {
        "3 x 3 tokens drafted, pass 1 of 3",
        "6 tokens in 4 packed sequences, pass 2 of 3",
        "1 token in 2 packed sequences, pass 3 of 3",
    }
    names = {case.implementation for case in report.cases}
    assert names == {"unfused", "fused", "recurrent", "served"}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (described("[]"), "recording.json cannot be used"),
        (described('{"operator": "mamba"}'), "there is no operator 'mamba'"),
        (described('{"operator": "gdn", "arguments": {"chunk": 1}}'), "'chunk'"),
        (described('{"operator": "gdn", "arguments": 1}'), "recording.json cannot be used"),
        (described('{"operator": "gdn", "arguments": {"scale": NaN}}'), "scale is nan"),
        (
            lambda folder: truncated(folder / "9_000001.safetensors"),
            "9_000001.safetensors cannot be used",
        ),
        (holding({"q": torch.ones(1)}), "cannot be used"),
        (holding({**gdn_call(9), "gate": torch.ones(1)}), "'gate'"),
        (
            holding({**gdn_call(9), "out": torch.ones(1, 9, 2, 7)}),
            "out is (1, 9, 2, 7), not (1, 9, 2, 8)",
        ),
        (
            holding(gdn_call(9), '{"operator": "gdn", "number": "1"}'),
            "a value has another type than expected",
        ),
        (
            lambda folder: [file.unlink() for file in folder.glob("*.safetensors")],
            "holds no call that can be replayed",
        ),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage: Damage, words):
    folder = record(tmp_path / "r", "gdn", [gdn_call(9), gdn_call(9)])
    damage(folder)
    answer = ending(2, f"capture --from safetensors {folder} --out captures")
    assert words in answer.err
