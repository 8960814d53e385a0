"""Verify, then time: calls are the keys, not their labels.  The comparator is real, the stopwatch is fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fakes import RAN, FakeBench
from ssdprof.measure.attempt import attempt
from ssdprof.measure.call import Call, UnfitError
from ssdprof.measure.engine import device_times, time_verified, verify

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Plan
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import Spoilt

PLAN = SamplingPlan(warmup_rounds=1, min_rounds=5, max_rounds=5)


def right(inputs: SSDInputs) -> SSDOutput:
    exact = ssd_chunked(inputs)
    return SSDOutput(exact.out.to(inputs.x.dtype), exact.final_states.float())


def call(inputs: SSDInputs, cost: float, spoil: Callable[[SSDOutput], SSDOutput] = lambda output: output) -> Call:
    """All calls have the same label."""

    def run() -> SSDOutput:
        RAN.append(("scan", cost))
        return spoil(right(inputs))

    return Call(
        implementation="scan",
        label="scan",
        inputs=inputs,
        precision=Precision(),
        run=run,
        plan=lambda: Plan(variant="torch", launches=1),
    )


@pytest.fixture
def inputs(make_inputs: Callable[..., SSDInputs]) -> SSDInputs:
    return make_inputs(seqlen=40)


def test_calls_of_one_label_are_kept_apart(inputs: SSDInputs) -> None:
    slow, fast = call(inputs, 300.0), call(inputs, 100.0)
    verified = verify({one: attempt(one) for one in (slow, fast)}, inputs, baselines={fast: slow})
    comparison = verified[fast].comparison
    assert comparison is not None
    assert comparison.tensors[0].vs_baseline is not None
    timed = time_verified(list(verified.values()), FakeBench(), PLAN)
    medians = [one.sampled.timing().device_median_us for one in (timed[slow], timed[fast]) if one.sampled]
    assert medians == [300.0, 100.0]


def test_a_call_without_an_output_is_verified_to_nothing(inputs: SSDInputs) -> None:
    def broken(_output: SSDOutput) -> SSDOutput:
        raise RuntimeError("no")

    one = call(inputs, 1.0, broken)
    verified = verify({one: attempt(one)}, inputs)[one]
    assert (verified.attempt.status, verified.comparison, verified.bits) == ("failed", None, None)


def test_an_output_that_changes_is_told_from_one_that_wavers(inputs: SSDInputs) -> None:
    def after_the_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[SSDOutput], SSDOutput]:
        seen: list[None] = []

        def spoil(output: SSDOutput) -> SSDOutput:
            seen.append(None)
            return output if len(seen) == 1 else SSDOutput(change(output.out), output.final_states)

        return spoil

    def one_bit(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out.view(torch.int16)[0, 0, 0, 0] ^= 1
        return out

    wavering, changing = (
        call(inputs, 1.0, after_the_first(one_bit)),
        call(inputs, 1.0, after_the_first(lambda out: -out)),
    )
    verified = verify({one: attempt(one) for one in (wavering, changing)}, inputs)
    timed = time_verified(list(verified.values()), FakeBench(), PLAN)
    assert (timed[wavering].wavered, timed[wavering].spoilt) == (True, None)
    assert timed[wavering].sampled is not None
    spoilt = timed[changing].spoilt
    assert spoilt is not None
    assert "out, head" in spoilt.reason
    assert timed[changing].sampled is None


def test_a_call_that_damages_its_inputs_has_no_output_and_no_time(inputs: SSDInputs) -> None:
    looks: list[None] = []

    def damaged_when_timed() -> str:
        looks.append(None)
        return "it changes its inputs: x" if len(looks) > 1 else ""

    at_once = replace(call(inputs, 1.0), damage=lambda: "it changes its inputs: B")
    assert attempt(at_once).status == "failed"
    assert attempt(at_once).reason == "it changes its inputs: B"
    later = replace(call(inputs, 1.0), damage=damaged_when_timed)
    verified = verify({later: attempt(later)}, inputs)
    timed = time_verified(list(verified.values()), FakeBench(), PLAN)[later]
    assert (timed.sampled, timed.spoilt) == (None, Spoilt("inaccurate", "after it was timed: it changes its inputs: x"))


def test_a_call_that_is_unfit_is_not_made(inputs: SSDInputs) -> None:
    def unfit() -> None:
        raise UnfitError("failed", "it hangs")

    RAN.clear()
    tried = attempt(replace(call(inputs, 1.0), rehearse=unfit))
    assert (tried.status, tried.reason, tried.output, RAN) == ("failed", "it hangs", None, [])


def test_device_times_are_geometric_means_and_leave_out_what_cannot_be_recorded(inputs: SSDInputs) -> None:
    def broken(_output: SSDOutput) -> SSDOutput:
        raise RuntimeError("no kernel")

    untimed: dict[str, str] = {}
    calls = {"both": [call(inputs, 100.0), call(inputs, 400.0)], "broken": [call(inputs, 1.0, broken)]}
    times = device_times(calls, FakeBench(), PLAN, on_untimed=lambda key, error: untimed.update({key: str(error)}))
    assert list(times) == ["both"]
    assert times["both"] == pytest.approx([200.0] * 5)
    assert untimed == {"broken": "no kernel"}
