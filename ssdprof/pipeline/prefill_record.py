"""Builds the report of prefill times, and stores it after every step, so that an interruption loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ssdprof.core.report import StepTime
from ssdprof.pipeline.prefill_length import LengthTimer
from ssdprof.schema.prefill import LeftOutLength, PrefillLength, PrefillReport, Surroundings  # TODO

Keep = Callable[[PrefillReport], object]


class GrowingReport:
    """draft: the empty report.  keep: called with the partial report after each step."""

    def __init__(self, draft: PrefillReport, keep: Keep) -> None:
        self._report, self._keep = draft, keep
        self._timers: list[LengthTimer] = []
        self._left_out: list[LeftOutLength] = []
        self._steps: list[StepTime] = []

    def begin(self, timer: LengthTimer) -> None:
        """From now on the report includes the results of the timer."""
        self._timers.append(timer)

    def leave_out(
        self, seqlen: int, surroundings: Surroundings, reason: str, implementations: Sequence[str] = ()
    ) -> None:
        self._left_out.append(
            LeftOutLength(
                seqlen=seqlen, surroundings=surroundings, implementations=tuple(implementations), reason=reason
            )
        )
        self.keep()

    def step(self, step: StepTime) -> None:
        self._steps.append(step)
        self.keep()

    def keep(self, **fields: Any) -> PrefillReport:
        """Update the report, also with these fields, and store it."""
        prefill = self._report.prefill.model_copy(
            update={
                "lengths": _merged([timer.result() for timer in self._timers]),
                "left_out": tuple(self._left_out),
                "steps": tuple(self._steps),
            }
        )
        self._report = self._report.model_copy(update={"prefill": prefill} | fields)
        self._keep(self._report)
        return self._report


def _merged(lengths: Sequence[PrefillLength]) -> tuple[PrefillLength, ...]:
    """One record for each length, with the cases of all surroundings."""
    merged: dict[int, PrefillLength] = {}
    for length in lengths:
        if length.cases:
            before = merged.get(length.seqlen)
            cases = (*(before.cases if before else ()), *length.cases)
            merged[length.seqlen] = length.model_copy(update={"cases": cases})
    return tuple(merged.values())
