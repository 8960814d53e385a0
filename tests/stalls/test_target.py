"""The process that ncu watches, without ncu and without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from kernels.ssd_cases import Case
from stalls.captures import store_layers

from ssdprof import kernels, operators
from ssdprof.capture.store import CapturedLayer, CaptureWriter, strides
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError
from ssdprof.kernels import UnsupportedError
from ssdprof.operators.named import Named
from ssdprof.schema import EXACT_FP32, CheckpointRef, LayerRef, PrecisionRecord, Serving
from ssdprof.schema.stalls import Launched, Refusal
from ssdprof.stalls import target


@pytest.fixture(autouse=True)
def _no_hook_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls, in order."""
    seen: list[str] = []
    real = kernels.get("ssd", "fused")

    def run(inputs: object, precision: object) -> object:
        seen.append("run")
        return real.run(inputs, precision)

    named = Named(name="fused", kind="bundled", implementation=replace(real, run=run))
    monkeypatch.setattr(target, "resolve", lambda *_: named)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return store_layers(tmp_path / "captures", Case(seqlen=32, dtype=torch.bfloat16))


def test_a_decode_step_is_not_taken_for_a_prompt_of_one_token(tmp_path: Path) -> None:
    prompt, step = (Case(seqlen=1, dtype=torch.bfloat16, initial_states=states).inputs() for states in (False, True))
    (call,) = Serving(decode=1).calls(64)[1:]
    layer = LayerRef(index=5, name="layers.5", operator="ssd")
    checkpoint = CheckpointRef(
        requested="x", source="local", repo_id="x", revision=None, model_type="m", layers=(layer,), layer_count=8
    )
    with CaptureWriter(tmp_path, checkpoint=checkpoint, prompts=(), segment_length=64) as writer:
        for inputs, which in ((step, call), (prompt, None)):
            writer.add(CapturedLayer(layer=layer, inputs=inputs, model_strides=strides(inputs), call=which))
    assert target.load(tmp_path, 5, 1, "cpu").initial_states is None


def test_one_call_is_profiled_and_those_before_it_are_not(
    folder: Path, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "launched.json"
    words = [str(folder), "--layer", "5", "--seqlen", "32", "--implementation", "fused", "--launched", str(out)]
    monkeypatch.setattr("sys.argv", ["target", *words])
    monkeypatch.setattr(target, "DEVICE", "cpu")
    target.main()
    assert calls == ["run", "run", "wait", "push ssdprof", "run", "wait", "pop"]
    assert triton.knobs.runtime.add_stages_inspection_hook is not None  # before the first call, nothing was compiled
    launched = Launched.model_validate_json(out.read_text())
    assert (launched.implementation, launched.variant) == ("fused", "interpreter")


def test_a_layer_that_is_not_there_ends_the_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = tmp_path / "launched.json"
    words = [str(folder), "--layer", "4", "--seqlen", "32", "--implementation", "fused", "--launched", str(launched)]
    monkeypatch.setattr("sys.argv", ["target", *words])
    monkeypatch.setattr(target, "DEVICE", "cpu")
    with pytest.raises(SystemExit, match=r"Error: .* holds no layer 4 of 32 tokens"):
        target.main()
    refusal = Refusal.model_validate_json(launched.read_text())
    assert refusal.exit_code == ExitCode.BAD_INPUT
    assert refusal.hint == "Capture it first."


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (UnsupportedError("fused: dstate must be a power of two"), "fused: dstate must be", ExitCode.BAD_INPUT),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "do not fit into the GPU's memory", 3),
        (MissingCapabilityError("There is no such thing here.", "Get one."), "no such thing", 3),
    ],
)
def test_whose_fault_it_is_decides_the_exit_code(error: Exception, message: str, code: int) -> None:
    refusal = target.refusal_of(error)
    assert message in refusal.message
    assert refusal.message.endswith(".")
    assert refusal.hint
    assert refusal.exit_code == code


def test_the_tensors_are_those_of_the_layer(folder: Path) -> None:
    inputs = target.load(folder, 7, 32, "cpu")
    assert torch.equal(inputs.x, Case(seqlen=32, dtype=torch.bfloat16).inputs().x)
    with pytest.raises(BadInputError, match="no layer 7 of 64 tokens"):
        target.load(folder, 7, 64, "cpu")


def test_nothing_is_left_of_the_warm_up(folder: Path, calls: list[str]) -> None:
    inputs = target.load(folder, 2, 32, "cpu")
    named = target.resolve(operators.get("ssd"), "fused")
    launched = target.warm_up(named, target.call_at(named, inputs, EXACT_FP32))
    assert calls == ["run", "run"]
    assert launched.launch_count == 0  # Triton's interpreter launches nothing


def test_an_implementation_that_lacks_the_precision_runs_at_the_one_that_is_most_alike(folder: Path) -> None:
    """A library has a fixed set of precisions.  A missing library gives an error."""
    inputs = target.load(folder, 2, 32, "cpu")
    both = tuple(PrecisionRecord(intermediates="exact", state_dtype=states) for states in ("bf16", "fp32"))
    library = Named(name="them", kind="library", implementation=kernels.get("ssd", "fused"), fixed=lambda _: both)
    assert target.call_at(library, inputs, EXACT_FP32).precision.state_dtype == torch.float32
    fixed = replace(library, fixed=lambda dtype: (PrecisionRecord(intermediates="exact", state_dtype=dtype),))
    call = target.call_at(fixed, inputs, EXACT_FP32)
    assert call.precision.state_dtype == torch.bfloat16
    launched = target.warm_up(fixed, call)
    assert (launched.implementation, str(launched.precision)) == ("them", "exact, bf16 states")
    with pytest.raises(MissingCapabilityError, match="is not there"):
        target.call_at(replace(library, implementation=None, absent="It is not there."), inputs, EXACT_FP32)


def test_a_library_has_tuned_itself_before_its_launches_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = kernels.get("ssd", "fused"), []

    def run(inputs: object, precision: object) -> object:
        seen.append("run")
        return real.run(inputs, precision)

    @contextmanager
    def counting() -> Iterator[list[str]]:
        seen.append("count")
        yield seen

    monkeypatch.setattr(target, "counted_launches", counting)
    library = Named(name="them", kind="library", implementation=replace(real, run=run))
    inputs = target.load(folder, 2, 32, "cpu")
    target.warm_up(library, target.call_at(library, inputs, EXACT_FP32))
    assert seen == ["run", "count", "run"]
