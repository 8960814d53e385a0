"""The results of a contender, filled in step by step, and its record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ssdprof.core.base import Status
from ssdprof.core.case import PartTime
from ssdprof.errors import BadInputError
from ssdprof.kernels.registry import Plan
from ssdprof.measure.amdahl import predicted_speedup
from ssdprof.measure.faults import status_of
from ssdprof.measure.statistics import Samples, median_interval, median_us, ratio, ratio_interval
from ssdprof.pipeline.prefill_contender import Contender
from ssdprof.schema.prefill import CallTime, PrefillCase, PrefillSpeedup  # TODO


@dataclass(kw_only=True)
class Found:
    """status: "passed" until an error.  compiled: one call of the operator has ended.

    logits: (b, vocabulary), fp32, on the CPU.  alone_us: device time of one layer's operator.
    """

    status: Status = "passed"
    reason: str = ""
    compiled: bool = False
    plan: Plan | None = None
    logits: torch.Tensor | None = None
    peak_bytes: int | None = None
    alone_us: float | None = None
    parts: tuple[PartTime, ...] = ()
    samples: Samples | None = None

    @property
    def busy_us(self) -> float:
        """The GPU's work in one prefill; 0 if it is unknown."""
        return sum(part.gpu_us for part in self.parts)


@contextmanager
def judging(found: Found, device: torch.device, label: str) -> Iterator[None]:
    """Turn errors of an implementation into a status and a reason.

    Passes BadInputError on, and raises MissingCapabilityError, with the label, if the GPU is unusable.
    """
    try:
        yield
    except BadInputError:
        raise
    except Exception as error:
        found.status, found.reason = status_of(error, device, label)


def case_of(contender: Contender, found: Found, left_to_model: tuple[str, ...]) -> PrefillCase:
    return PrefillCase(
        implementation=contender.name,
        version=contender.version,
        variant=found.plan.variant if found.plan else "",
        plan=found.plan.reason if found.plan else "",
        surroundings=contender.surroundings,
        precision=contender.precision,
        status=found.status,
        reason=found.reason,
        call=None if found.samples is None else _call_time(found.samples),
        alone_us=found.alone_us,
        parts=found.parts,
        peak_bytes=found.peak_bytes,
        left_to_model=left_to_model if contender.surroundings == "bundled" else (),
    )


def compared(
    case: PrefillCase, own: Found, base: Found, *, operator_calls: int, smallest_difference: float
) -> PrefillCase:
    """The case with its answer and time compared with the baseline's; without a speedup if it is the baseline."""
    if own.logits is None or base.logits is None:
        return case
    difference = float((own.logits - base.logits).norm() / base.logits.norm())
    same = bool((own.logits.argmax(-1) == base.logits.argmax(-1)).all())
    speedup = None if own is base else _speedup(own, base, operator_calls, smallest_difference)
    return case.model_copy(update={"logits_rms": difference, "same_token": same, "speedup": speedup})


def _speedup(own: Found, base: Found, operator_calls: int, smallest_difference: float) -> PrefillSpeedup | None:
    if base.samples is None or own.samples is None:
        return None
    interval = ratio_interval(base.samples, own.samples)
    predicted = None
    if base.alone_us is not None and own.alone_us is not None:
        whole_us = median_us(base.samples)
        predicted = predicted_speedup(whole_us, operator_calls * base.alone_us, operator_calls * own.alone_us)
    return PrefillSpeedup(
        ratio=ratio(base.samples, own.samples),
        interval=interval,
        verdict=interval.verdict(smallest_difference),
        predicted=predicted,
    )


def _call_time(samples: Samples) -> CallTime:
    return CallTime(
        median_us=median_us(samples),
        interval_us=median_interval(samples),
        recordings=len(samples),
        samples=sum(map(len, samples)),
    )
