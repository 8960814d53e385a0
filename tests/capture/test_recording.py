"""What a server recorded becomes a capture, and what it computed a case: FlashInfer's recorder and
safetensors.

`flashinfer.tar.xz` was written by FlashInfer 0.7.2 on an H100: two layers, a warm-up call of each,
40 tokens, and one layer's call on two sequences with states in a pool of three slots, of which it
uses the last and the first.
"""

import json
import math
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Answer, ending, passing
from safetensors.torch import save_file

from ssdprof.capture import recording
from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.manifest import read_manifest
from ssdprof.capture.recording import MANIFEST, open_recording
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


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "flashinfer.tar.xz") as archive:
        archive.extractall(tmp_path / "dump", filter="data")
    return tmp_path / "dump"


def call(dump: Path, number: int) -> Path:
    return next(dump.glob(f"*_call{number:04d}"))


def edit(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = place / "metadata.jsonl"
    first, last = file.read_text().splitlines()
    said = json.loads(last)
    change(said)
    file.write_text(f"{first}\n{json.dumps(said)}\n")


def repack(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    found = torch.load(file, weights_only=True)
    change(found)
    torch.save(found, file)


def close(layer: CapturedLayer) -> bool:
    """Whether what was served is the operator of the inputs."""
    assert layer.served
    exact = gdn_recurrence(layer.inputs)
    return all(
        float((one - other).norm() / other.norm()) < 5e-3
        for one, other in zip(layer.served, exact, strict=True)
    )


def test_a_recording_of_flashinfer_becomes_a_capture_with_what_it_computed(dump: Path) -> None:
    found = open_recording(dump, "flashinfer")
    assert found.left_out == "Left out: 2 calls of a warm-up."
    assert [len(one) for one in found.passes] == [2, 1]
    layers = list(found.layers())
    assert [(one.layer.index, str(one.call), one.inputs.length) for one in layers] == [
        (0, "in 1 packed sequence, pass 1 of 2", 40),
        (1, "in 1 packed sequence, pass 1 of 2", 40),
        (0, "in 2 packed sequences, pass 2 of 2", 33),
    ]
    assert all(map(close, layers))
    pool = torch.load(call(dump, 7) / "outputs.pt", weights_only=True)["result_1"]
    slots = torch.load(call(dump, 7) / "inputs.pt", weights_only=True)[
        "kwarg_state_indices"
    ].tolist()
    assert layers[-1].served
    for sequence, slot in enumerate(slots):
        assert torch.equal(layers[-1].served[1][sequence], pool[slot].mT)
    given = torch.load(call(dump, 3) / "inputs.pt", weights_only=True)
    assert torch.equal(layers[0].inputs.tensors["g"][0].exp(), given["kwarg_g"].log().exp())
    assert not layers[0].inputs.scalars["use_qk_l2norm"]
    # stored and read again, bit for bit
    answer = passing("capture", "--from", "flashinfer", str(dump), "--out", "captures")
    assert "Left out: 2 calls of a warm-up." in answer.err
    manifest = read_manifest(Path("captures"))
    assert manifest.complete
    for layer, stored in zip(layers, manifest.layers, strict=True):
        again = read_layer(Path("captures"), stored)
        assert all(
            torch.equal(one, again.inputs.tensors[name])
            for name, one in layer.inputs.tensors.items()
        )
        assert again.served
        assert layer.served
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
def test_faults_that_servers_had_are_found(dump: Path, plant: Callable[..., Any]) -> None:
    *_, last = open_recording(dump, "flashinfer").layers()
    assert last.served
    found = {}
    for name, output in (("right", last.served), ("wrong", plant(*last.served, last.inputs))):
        candidate = Candidate(output=output, precision=Precision(), name=name)
        found[name] = "; ".join(
            one.reason for one in compare(last.inputs, {name: candidate})[name] if one.reason
        )
    assert not found["right"]
    assert found["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_what_a_server_computed_is_judged(dump: Path, wrong: bool) -> None:
    """A pool that is read with V and K exchanged is one of the faults that servers had."""
    if wrong:
        repack(
            call(dump, 7) / "outputs.pt",
            lambda found: found.update(result_1=found["result_1"].mT.contiguous()),
        )
    assert (
        Answer(
            "capture", "--from", "flashinfer", str(dump), "--out", "captures", "--layers", "0"
        ).code
        == 0
    )
    answer = Answer("run", "captures", "--dtypes", "exact", "--out", "run")
    _, report = reports.load("run")
    served = {case.seqlen: case.result for case in report.cases if case.implementation == "served"}
    assert served == {40: "passed", 33: "inaccurate" if wrong else "passed"}
    assert answer.code == int(wrong), answer.out
    assert ("served" in answer.out.partition("FAILED")[2]) is wrong
    assert "served may be used" not in answer.out
    for words in (("accuracy", "run"), ("export", "run", "--format", "csv")):
        assert "served" in Answer(*words).out


def test_argument_names_come_from_the_signature_and_defaults_are_absent(dump: Path) -> None:
    def renamed(said: dict[str, Any]) -> None:
        said["input_metadata"]["arg_5"] = 0.5  # scale, positional
        said["input_metadata"]["kwarg_use_qk_l2norm_in_kernel"] = True

    edit(call(dump, 3), renamed)
    layer = next(open_recording(dump, "flashinfer").layers())
    given = layer.inputs.scalars
    assert (given["scale"], given["use_qk_l2norm"]) == (0.5, True)


@pytest.mark.parametrize("numbers", [(0.0, -math.inf), (1.0, 0.0)])
def test_decays_become_logarithms(dump: Path, numbers: tuple[float, float]) -> None:
    repack(call(dump, 3) / "inputs.pt", lambda found: found["kwarg_g"].fill_(numbers[0]))
    layer = next(open_recording(dump, "flashinfer").layers())
    assert set(layer.inputs.tensors["g"].flatten().tolist()) == {numbers[1]}


def test_calls_of_other_functions_in_graphs_and_without_outputs_are_told(dump: Path) -> None:
    for number, (name, graph) in enumerate([("trtllm_attention", False), (PREFILL, True)], 8):
        place = dump / f"20261127_000000_000_pid609_{name}_call{number:04d}"
        shutil.copytree(call(dump, 7), place)
        edit(
            place,
            lambda said, name=name, graph=graph: said.update(
                function_name=name, graph_capture=graph
            ),
        )
    (call(dump, 7) / "outputs.pt").unlink()
    found = open_recording(dump, "flashinfer")
    assert found.left_out == (
        "Left out: 1 call inside CUDA graphs, 1 call of trtllm_attention and 2 calls of a warm-up."
    )
    *_, last = found.layers()
    assert last.served is None
    assert last.remark == "No output of recorded layer 0 was recorded in pass 2."


def test_every_process_has_its_own_passes(dump: Path) -> None:
    for number in (1, 2, 3, 4):
        place = dump / f"other_call{number:04d}"
        shutil.copytree(call(dump, number), place)
        edit(place, lambda said: said.update(process_id=610))
    found = open_recording(dump, "flashinfer")
    assert [[one.process for one in each] for each in found.passes] == [
        ["609"] * 2,
        ["609"],
        ["610"] * 2,
    ]
    assert found.left_out == "Left out: 4 calls of a warm-up."


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def with_code(file: Path) -> None:
    torch.save({"arg_0": Path}, file)


def states_of_another_slot(file: Path) -> None:
    repack(file, lambda found: found["kwarg_state_indices"].fill_(3))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, "call0007 cannot be used"),
        (flipped, "call0007 cannot be used: the checksum of"),
        (with_code, "call0007 cannot be used"),
        (Path.unlink, "call0007 cannot be used: it has no inputs.pt"),
        (states_of_another_slot, "state_indices names slots outside of a pool of 3"),
        (
            lambda file: repack(file, lambda found: found.pop("kwarg_cu_seqlens")),
            "cannot be used: KeyError: 'cu_seq",
        ),
        (
            lambda file: repack(file, lambda found: found["kwarg_cu_seqlens"].fill_(34)),
            "cu_seqlens must rise from 0",
        ),
        (
            lambda file: repack(file, lambda found: found["kwarg_g"].neg_()),
            "g is not a decay between 0 and 1",
        ),
        (
            lambda file: repack(file, lambda found: found.update(arg_1=found["arg_1"][:, :, 1:])),
            "k must have shape",
        ),
        (lambda file: torch.save([1], file), "inputs.pt holds no table of tensors"),
        (lambda file: truncated(file.parent / "outputs.pt"), "call0007 cannot be used"),
        (
            lambda file: edit(file.parent, lambda said: said.pop("tensor_details")),
            "is not what FlashInfer's recorder",
        ),
        (
            lambda file: edit(file.parent, lambda said: said.update(function_signature="(q)")),
            "is not what FlashInfer",
        ),
        (
            lambda file: (file.parent / "metadata.jsonl").write_text("{"),
            "is not what FlashInfer's recorder writes",
        ),
    ],
)
def test_a_damaged_recording_is_refused(
    dump: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(call(dump, 7) / "inputs.pt")
    answer = ending(2, "capture", "--from", "flashinfer", str(dump), "--out", "captures")
    assert words in answer.err
    assert "docs/serving.md" in answer.err
    assert "internal" not in answer.err


def test_huge_foreign_and_empty_recordings_are_refused(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nothing", "foreign"):
        Path(name).mkdir()
    (Path("foreign") / "session.jsonl").write_text("{}\n")
    for name in ("nothing", "foreign", "absent"):
        with pytest.raises(BadInputError, match=f"{name} holds no recording of FlashInfer"):
            open_recording(Path(name), "flashinfer")
        assert Answer("capture", "--from", "safetensors", name).code == 2
    for number in (1, 2, 3, 4, 7):
        edit(call(dump, number), lambda said: said.update(graph_capture=True))
    with pytest.raises(
        BadInputError, match=r"no call that can be replayed.  Left out: 5 calls inside CUDA graphs"
    ):
        open_recording(dump, "flashinfer")
    answer = Answer("capture", "--from", "flashinfer", str(dump), "--seq", "16")
    assert (answer.code, "seqlens cannot be given" in answer.err) == (2, True)
    for number in (1, 2, 3, 4, 7):
        edit(call(dump, number), lambda said: said.update(graph_capture=False))
    monkeypatch.setattr(recording, "host_memory", lambda: 1 << 17)
    with pytest.raises(MissingCapabilityError, match=r"which main memory of .* cannot hold twice"):
        list(open_recording(dump, "flashinfer").layers())
    answer = ending(3, "capture", "--from", "flashinfer", str(dump), "--out", "huge")


def record(folder: Path, operator: str, *calls: dict[str, torch.Tensor], **arguments: Any) -> Path:
    """A folder in the generic form, of two processes."""
    folder.mkdir()
    (folder / MANIFEST).write_text(
        json.dumps({"operator": operator, "source": "mine", "arguments": arguments})
    )
    for process in (10, 9):
        for number, one in enumerate(calls):
            save_file(
                {name: tensor.contiguous() for name, tensor in one.items()},
                folder / f"{process}_{number:06d}.safetensors",
            )
    return folder


def gdn(length: int, *bounds: int) -> dict[str, torch.Tensor]:
    packed = {"cu_seqlens": torch.tensor(bounds)} if bounds else {}
    count = max(1, len(bounds) - 1)
    given = {
        "q": torch.randn(1, length, 1, 16),
        "k": torch.randn(1, length, 1, 16),
        "v": torch.randn(1, length, 2, 8),
        "g": -torch.rand(1, length, 2),
        "beta": torch.rand(1, length, 2),
        "initial_state": torch.randn(count, 2, 16, 8),
        **packed,
    }
    out, final_states = gdn_recurrence(GDNInputs(**given, use_qk_l2norm=True))
    return {**given, "out": out.float(), "final_states": final_states.float()}


def test_a_folder_of_safetensors_becomes_a_capture(tmp_path: Path) -> None:
    passes = [gdn(70), gdn(70), gdn(12, 0, 5, 5, 12), gdn(12, 0, 5, 5, 12), gdn(9), gdn(9)]
    found = open_recording(
        record(tmp_path / "r", "gdn", *passes, use_qk_l2norm=True), "safetensors"
    )
    assert (found.ref.model_type, len(found.ref.layers), len(found.passes)) == (
        "recorded by mine",
        2,
        6,
    )
    assert all(map(close, found.layers()))
    assert [one.inputs.sequences for one in found.layers("1")] == [1, 3, 1] * 2
    ssd = {
        "x": torch.randn(1, 7, 4, 8),
        "dt": torch.rand(1, 7, 4),
        "A": -torch.rand(4),
        "B": torch.randn(1, 7, 1, 16),
        "C": torch.randn(1, 7, 1, 16),
        "D": torch.rand(4),
    }
    folder = record(tmp_path / "s", "ssd", ssd, chunk_size=64, dt_softplus=True)
    one, _ = open_recording(folder, "safetensors").layers()
    expected = SSDInputs(**ssd, chunk_size=64, dt_softplus=True)
    assert torch.equal(ssd_recurrence(one.inputs)[0], ssd_recurrence(expected)[0])
    assert one.served is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / MANIFEST).write_text("[]"), "recording.json cannot be used"),
        (
            lambda folder: (folder / MANIFEST).write_text('{"operator": "mamba"}'),
            "there is no operator 'mamba'",
        ),
        (
            lambda folder: (folder / MANIFEST).write_text(
                '{"operator": "gdn", "arguments": {"chunk": 1}}'
            ),
            "'chunk'",
        ),
        (
            lambda folder: truncated(folder / "9_000001.safetensors"),
            "9_000001.safetensors cannot be used",
        ),
        (
            lambda folder: save_file({"q": torch.ones(1)}, folder / "9_000001.safetensors"),
            "cannot be used",
        ),
        (
            lambda folder: save_file(
                {**gdn(9), "gate": torch.ones(1)}, folder / "9_000001.safetensors"
            ),
            "'gate'",
        ),
        (
            lambda folder: save_file(
                {**gdn(9), "out": torch.ones(1, 9, 2, 7)}, folder / "9_000001.safetensors"
            ),
            "out is (1, 9, 2, 7), not (1, 9, 2, 8)",
        ),
        (
            lambda folder: [one.unlink() for one in folder.glob("*.safetensors")],
            "holds no call that can be replayed",
        ),
    ],
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = record(tmp_path / "r", "gdn", gdn(9), gdn(9))
    damage(folder)
    answer = ending(2, "capture", "--from", "safetensors", str(folder), "--out", "captures")
    assert words in answer.err
    assert "internal" not in answer.err
