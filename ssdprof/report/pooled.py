"""Pools the errors of several layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ssdprof.schema import CallRef, CaseResult, Deviation, LayerRef, TensorAccuracy

TensorName = Literal["out", "final_states"]


@dataclass(frozen=True)
class Pooled:
    """Pooled deviations of several layers: all elements, and the worst maximum.

    `largest` is the deviation that holds max_abs, of `layer` and its `call`; rms_ratio is that of the worst call.
    """

    elements: int
    rms_ratio: float
    max_abs: float
    largest: Deviation
    layer: LayerRef
    call: CallRef | None
    parts: tuple[Deviation, ...]

    @property
    def scale_max_abs(self) -> float | None:
        """The largest value of the tensor with the error `max_abs`; None if it was not recorded."""
        return self.largest.scale_max_abs

    def match_pct(self, tolerance: float) -> float | None:
        """Share of all elements that match; 100 only if all do."""
        shares = [
            (match.match_pct, part.elements)
            for part in self.parts
            for match in part.matches
            if match.tolerance == tolerance
        ]
        total = sum(elements for _, elements in shares)
        if not total:
            return None
        if all(share == 100.0 for share, _ in shares):
            return 100.0
        pooled = math.fsum(share * elements for share, elements in shares) / total
        return min(pooled, math.nextafter(100.0, 0.0))


def pool(
    cases: Iterable[CaseResult], tensor: TensorName, which: Callable[[TensorAccuracy], Deviation | None]
) -> Pooled | None:
    """The deviations that `which` picks out of every case that has one; None if none has."""
    found = [
        (case, deviation)
        for case in cases
        for accuracy in case.accuracy
        if accuracy.tensor == tensor and (deviation := which(accuracy)) is not None
    ]
    if not found:
        return None
    worst, largest = max(found, key=lambda pair: nan_is_worst(pair[1].max_abs))
    return Pooled(
        elements=sum(deviation.elements for _, deviation in found),
        rms_ratio=max((deviation.rms_ratio for _, deviation in found), key=nan_is_worst),
        max_abs=largest.max_abs,
        largest=largest,
        layer=worst.layer,
        call=worst.call,
        parts=tuple(deviation for _, deviation in found),
    )


def nan_is_worst(value: float) -> float:
    """A key to sort errors by."""
    return math.inf if math.isnan(value) else value
