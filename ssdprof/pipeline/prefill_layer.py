"""Calls each contender on single operators, in a prefill that ends there, so that kernels are compiled and tuned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.measure.bench import Bench
from ssdprof.measure.call import call_of
from ssdprof.measure.engine import device_times
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.statistics import median_us
from ssdprof.pipeline.prefill_contender import Contender, Prompted
from ssdprof.pipeline.prefill_found import Found, judging
from ssdprof.pipeline.step_clock import StepClock

ALONE = SamplingPlan(min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf)


class _Enough(Exception):
    """Ends a prefill when nothing more is needed from it."""


def try_operators(found: Mapping[Contender, Found], prompted: Prompted, bench: Bench, clock: StepClock) -> None:
    """Call each contender once, on the inputs of the first operator, and time it on those of `prompted.layer`.

    found: contenders with the same surroundings; sets status, reason, compiled, plan and alone_us.
    The inputs are the model's own tensors, while the model waits.  If the model fails before its operator, nothing
    is set.
    """
    tried = False

    def passed() -> list[Contender]:
        return [contender for contender, own in found.items() if own.status == "passed"]

    def compute(call: OperatorCall) -> Result:
        nonlocal tried
        if not tried:
            tried = True
            for contender, own in found.items():
                _first_call(contender, own, call, bench.device, clock)
        if not passed():
            raise _Enough
        if call.mixer.layer_index != prompted.layer.index:
            return passed()[0].compute(call)
        with clock.step("one layer's operator alone"):
            _time_alone(passed(), found, call, bench)
        raise _Enough

    first = next(iter(found))
    with judging(Found(), bench.device, first.label), suppress(_Enough), prompted.running(first, compute):
        prompted.first_token_logits()


def _first_call(contender: Contender, own: Found, call: OperatorCall, device: torch.device, clock: StepClock) -> None:
    with clock.step(f"{contender.name}: first call of the operator"), judging(own, device, contender.label):
        own.plan = contender.plan(call)
        contender.rehearse(call)
        contender.compute(call)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        own.compiled = True


def _time_alone(
    contenders: Sequence[Contender], found: Mapping[Contender, Found], call: OperatorCall, bench: Bench
) -> None:
    calls = {
        one: [call_of(one.implementation(call), call.inputs, one.precision, label=one.label)] for one in contenders
    }
    for contender, samples in device_times(calls, bench, ALONE).items():
        found[contender].alone_us = median_us(samples)
