"""A layer through every implementation: statuses, comparisons, order, interruption and timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ssdprof.measure.bench import Recording
from ssdprof.measure.call import Run
from ssdprof.pipeline import replay
from ssdprof.pipeline.replay import LayerReplay, ReplayOptions, replay_layer
from ssdprof.pipeline.request import STATE_DTYPES
from ssdprof.schema import EXACT_FP32, CaseResult, Ceilings, LayerRef, PrecisionRecord, precisions_for

from ssdprof import kernels
from ssdprof.errors import BadInputError
from ssdprof.kernels import UnsupportedError, registry
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure import engine
from ssdprof.measure.sampling import SamplingPlan

LAYER = LayerRef(index=3, name="model.layers.3.mamba", operator="ssd")
PRECISIONS = precisions_for("fp32", "all", STATE_DTYPES)
RunSSD = Callable[[SSDInputs, Precision], SSDOutput]


@pytest.fixture
def inputs() -> SSDInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return SSDInputs(
        x=normal(1, 40, 2, 16),
        dt=normal(1, 40, 2),
        A=torch.tensor([-1.0, -4.0]),
        B=normal(1, 40, 1, 16),
        C=normal(1, 40, 1, 16),
        D=torch.ones(2),
        chunk_size=16,
        dt_softplus=True,
    )


@pytest.fixture
def register(registries_of_its_own: None) -> Callable[[str, RunSSD], None]:  # noqa: ARG001
    """Adds an implementation until the test ends."""

    def add(name: str, run: RunSSD) -> None:
        plan = Plan(variant="stand-in", launches=1, config={"block": 16})
        registry.register(Implementation(operator="ssd", name=name, run=run, plan=lambda _i, _p: plan))

    return add


def right(inputs: SSDInputs, _precision: Precision) -> SSDOutput:
    return kernels.get("ssd", "reference").run(inputs, Precision())


def skipless(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    return right(replace(inputs, D=None), precision)


def raising(error: BaseException) -> RunSSD:
    def run(_inputs: SSDInputs, _precision: Precision) -> SSDOutput:
        raise error

    return run


def options(*implementations: str, **changes: object) -> ReplayOptions:
    settings = {"precisions": (EXACT_FP32,), "implementations": implementations, "baseline": "reference"} | changes
    return ReplayOptions(**settings)  # type: ignore[arg-type]


def by_name(results: tuple[CaseResult, ...]) -> dict[str, CaseResult]:
    return {result.implementation: result for result in results}


# --- statuses


def test_the_bundled_baseline_passes_at_all_six_precisions(inputs: SSDInputs) -> None:
    results = replay_layer(LAYER, inputs, ReplayOptions(precisions=PRECISIONS, implementations=("unfused",)))
    assert [result.status for result in results] == ["passed"] * 6, [result.reason for result in results]
    assert {result.precision for result in results} == set(PRECISIONS)
    for result in results:
        assert result.layer == LAYER
        assert result.dims.sizes["nheads"] == 2
        assert result.variant != ""
        assert result.plan != ""
        assert result.launches != ()
        assert [accuracy.tensor for accuracy in result.accuracy] == ["out", "final_states"]
        against = None if result.precision.intermediates == "exact" else f"unfused exact, {_state(result)} states"
        for accuracy in result.accuracy:
            assert (accuracy.vs_baseline and accuracy.vs_baseline.against) == against


def _state(result: CaseResult) -> str:
    return result.precision.state_dtype


def test_what_goes_wrong_is_a_status_with_a_reason(inputs: SSDInputs, register: Callable[[str, RunSSD], None]) -> None:
    def nan(inputs: SSDInputs, precision: Precision) -> SSDOutput:
        output = right(inputs, precision)
        output.out[0, 5, 1, 2] = float("nan")
        return output

    def transposed(inputs: SSDInputs, precision: Precision) -> SSDOutput:
        return SSDOutput(right(inputs, precision).out.transpose(1, 2), right(inputs, precision).final_states)

    register("wrong", skipless)
    register("nan", nan)
    register("refusing", raising(UnsupportedError("refusing: z is not supported")))
    register("large", raising(torch.OutOfMemoryError("tried to allocate 80 GiB\nand more")))
    register("broken", raising(RuntimeError("illegal memory access")))
    register("transposed", transposed)
    names = ("wrong", "nan", "refusing", "large", "broken", "transposed")
    found = by_name(replay_layer(LAYER, inputs, options(*names)))
    assert {name: found[name].status for name in ("reference", *names)} == {
        "reference": "passed",
        "wrong": "inaccurate",
        "nan": "nonfinite",
        "refusing": "refused",
        "large": "out of memory",
        "broken": "failed",
        "transposed": "failed",
    }
    assert found["wrong"].reason.startswith("out, head ")
    assert "(0, 5, 1, 2)" in found["nan"].reason
    assert found["refusing"].reason == "refusing: z is not supported"
    assert found["large"].reason == "tried to allocate 80 GiB"
    assert found["broken"].reason == "RuntimeError: illegal memory access"
    assert "out must be torch.bfloat16 of shape" in found["transposed"].reason


def test_without_its_baseline_a_case_is_still_judged(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None]
) -> None:
    register("refusing", raising(UnsupportedError("no")))
    found = by_name(replay_layer(LAYER, inputs, options("reference", baseline="refusing")))
    assert found["refusing"].status == "refused"
    assert found["reference"].status == "passed"
    assert found["reference"].accuracy[0].vs_baseline is None


def test_an_unknown_implementation_is_bad_input(inputs: SSDInputs) -> None:
    with pytest.raises(BadInputError, match="'warp9'") as caught:
        replay_layer(LAYER, inputs, options("warp9"))
    assert "unfused" in caught.value.hint


def test_an_oracle_without_memory_is_said_of_every_case(inputs: SSDInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_args: object, **_kwargs: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 4 GiB")

    monkeypatch.setattr(engine, "compare", no_memory)
    (result,) = replay_layer(LAYER, inputs, options())
    assert result.status == "out of memory"
    assert result.reason == "while compared with the oracle: tried to allocate 4 GiB"


def test_nan_weights_fail_every_case_and_are_told_from_a_kernel_that_fails(inputs: SSDInputs) -> None:
    broken = replace(inputs, D=torch.tensor([1.0, float("nan")]))
    (result,) = replay_layer(LAYER, broken, options())
    assert result.status == "nonfinite"
    assert "is itself not finite" in result.reason


# --- batches


def test_little_memory_changes_nothing_but_the_number_of_passes(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    register("a", right)
    register("wrong", skipless)
    wanted = options("a", "wrong", precisions=PRECISIONS)
    roomy = replay_layer(LAYER, inputs, wanted)
    passes: list[int] = []
    compare = engine.compare

    def counted(*args: object, **kwargs: object) -> object:
        passes.append(len(args[1]))  # type: ignore[arg-type]
        return compare(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "compare", counted)
    monkeypatch.setattr(replay, "outputs_that_fit", lambda _: 2)
    finished: list[CaseResult] = []
    tight = replay_layer(LAYER, inputs, replace(wanted, on_case=finished.append))
    assert tight == roomy
    assert passes == [2] * 12
    assert sorted(map(str, finished)) == sorted(map(str, tight))


def test_a_baseline_that_fails_when_run_again_keeps_its_first_result(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []

    def once(inputs: SSDInputs, precision: Precision) -> SSDOutput:
        calls.append(None)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("later")
        return right(inputs, precision)

    monkeypatch.setattr(replay, "outputs_that_fit", lambda _: 2)
    register("once", once)
    register("a", right)
    register("b", right)
    found = by_name(replay_layer(LAYER, inputs, options("a", "b", baseline="once")))
    assert {name: result.status for name, result in found.items()} == {"once": "passed", "a": "passed", "b": "passed"}
    assert found["a"].accuracy[0].vs_baseline is not None
    assert found["b"].accuracy[0].vs_baseline is None


# --- interruption


def test_an_interruption_keeps_what_is_finished(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "outputs_that_fit", lambda _: 2)
    register("a", right)
    register("stopped", raising(KeyboardInterrupt()))
    finished: list[CaseResult] = []
    with pytest.raises(KeyboardInterrupt):
        replay_layer(LAYER, inputs, options("a", "stopped", on_case=finished.append))
    assert [(result.implementation, result.status) for result in finished] == [("reference", "passed"), ("a", "passed")]


# --- timing


class FakeBench:
    """A call takes its implementation's time, and the device half of it."""

    device = torch.device("cpu")

    def __init__(self, times: dict[str, float], stop_at: int | None = None) -> None:
        self.times, self.stop_at, self.calls = times, stop_at, 0
        self.spoil: Callable[[SSDOutput], object] = lambda _: None

    def _time(self, run: Run) -> float:
        return self.times[next(name for name in self.times if kernels.get("ssd", name).run is run.func)]  # type: ignore[attr-defined]

    def relocate(self, _generator: np.random.Generator) -> None:
        """Does nothing: there is no memory to move."""

    def record(self, run: Run) -> Recording:
        return Recording(graph=run, output=run())

    def call_us(self, run: Run) -> float:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        return self._time(run)

    def device_us(self, recording: Recording) -> float:
        self.spoil(recording.output)
        return self._time(recording.graph) / 2

    def warm_us(self, run: Run) -> float:
        return self._time(run) / 8


QUICK = SamplingPlan(warmup_rounds=0, min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3)


def test_cases_that_passed_are_timed_against_the_baseline(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None]
) -> None:
    register("twice", right)
    register("wrong", skipless)
    timed: list[str] = []
    finished: list[CaseResult] = []
    wanted = options(
        "twice",
        "wrong",
        sampling=QUICK,
        ceilings=Ceilings(copy_gb_per_s=4000, matmul_tflops=700),
        on_timed=lambda: timed.append("group"),
        on_case=finished.append,
    )
    bench = FakeBench({"reference": 200.0, "twice": 100.0, "wrong": 1.0})
    found = by_name(LayerReplay(LAYER, inputs, wanted, bench).run())
    baseline, twice, wrong = found["reference"], found["twice"], found["wrong"]
    assert baseline.timing is not None
    assert (baseline.timing.call_median_us, baseline.timing.device_median_us) == (200, 100)
    assert baseline.speedup is None
    assert twice.speedup is not None
    assert (twice.speedup.baseline, twice.speedup.device_ratio) == ("reference exact, fp32 states", 2)
    assert (twice.speedup.verdict, twice.speedup.smallest_difference) == ("faster", QUICK.smallest_difference)
    assert twice.roofline is not None
    assert twice.roofline.floor_pct == pytest.approx(100 * twice.roofline.floor_us / 50)
    assert (wrong.status, wrong.timing) == ("inaccurate", None)
    assert timed == ["group"]
    assert [result.implementation for result in finished] == ["wrong", "reference", "twice"]


def test_an_output_that_changes_while_timed_has_no_timing(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None]
) -> None:
    register("racy", right)
    bench = FakeBench({"reference": 200.0, "racy": 100.0})
    bench.spoil = lambda output: output.out[0, 9, 1].zero_()
    found = by_name(LayerReplay(LAYER, inputs, options("racy", sampling=QUICK), bench).run())
    assert found["racy"].status == "inaccurate"
    assert found["racy"].reason.startswith("after it was timed: out, head 1")
    assert found["racy"].timing is None


def test_an_output_that_changes_within_its_budget_is_timed_and_said(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None]
) -> None:
    register("atomic", right)
    bench = FakeBench({"reference": 200.0, "atomic": 100.0})
    bench.spoil = lambda output: output.out[0, 9, 1].mul_(1.004)
    found = by_name(LayerReplay(LAYER, inputs, options("atomic", sampling=QUICK), bench).run())
    assert found["atomic"].timing is not None
    assert found["atomic"].reason == "repeated calls differ in their bits, within the budget"


def test_an_interruption_of_timing_keeps_the_judgements(
    inputs: SSDInputs, register: Callable[[str, RunSSD], None]
) -> None:
    register("a", right)
    finished: list[CaseResult] = []
    precisions = (EXACT_FP32, PrecisionRecord(intermediates="exact", state_dtype="fp16"))
    wanted = options("a", precisions=precisions, sampling=QUICK, on_case=finished.append)
    bench = FakeBench({"reference": 200.0, "a": 100.0}, stop_at=13)
    with pytest.raises(KeyboardInterrupt):
        LayerReplay(LAYER, inputs, wanted, bench).run()
    assert [(result.precision.state_dtype, result.timing is not None) for result in finished] == [
        ("fp32", True),
        ("fp32", True),
        ("fp16", False),
        ("fp16", False),
    ]
    assert {result.status for result in finished} == {"passed"}
    assert finished[-1].reason == "interrupted before it was timed"


def test_on_a_cpu_nothing_is_timed(inputs: SSDInputs) -> None:
    (result,) = replay_layer(LAYER, inputs, options())
    assert (result.status, result.timing, result.memory, result.reason) == ("passed", None, None, "")


@pytest.mark.gpu
def test_on_a_gpu_everything_is_measured(inputs: SSDInputs) -> None:
    tensors = {name: value.cuda() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    wanted = ReplayOptions(precisions=PRECISIONS[:1], implementations=("unfused",), sampling=SamplingPlan(seconds=0.5))
    (result,) = replay_layer(LAYER, replace(inputs, **tensors), wanted)
    assert result.status == "passed", result.reason
    assert result.timing is not None, result.reason
    assert result.timing.call_median_us > result.timing.device_median_us > 0
    assert result.memory is not None
    assert result.memory.peak_bytes > result.memory.workspace_bytes > 0
    assert {launch.kernel for launch in result.launches} >= {"_chunk_scan_kernel", "_state_passing_kernel"}
    assert all(launch.registers for launch in result.launches)
