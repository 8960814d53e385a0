"""What `ssdprof compare` finds: two runs, benches or records of prefill times, case by case.

Ratios are BASE's time over NEW's, so that a ratio above 1 says that NEW is faster.
"""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import PrecisionRecord, Record
from ssdprof.schema.gating import Broken
from ssdprof.schema.machine import Environment
from ssdprof.schema.rows import Row
from ssdprof.schema.speed import Interval, Verdict

COMPARISON_VERSION = 1
TotalBy = Literal["device time", "call time", "speedup"]
TotalOver = Literal["layer", "call", "length"]


class Side(Record):
    """One of the two.  name: as the user gave it.  subject: a model, or the operator of a bench.
    unfinished: why it is not whole, in a sentence; empty if it is.
    """

    name: str
    kind: Literal["run", "bench", "prefill"]
    created: str
    ssdprof_version: str
    subject: str
    environment: Environment
    unfinished: str = ""


class Difference(Record):
    """What differs between the machines, so that absolute times do not compare."""

    what: str  # "GPU", "driver", "Triton"
    base: str
    new: str

    def __str__(self) -> str:
        return f"other {self.what}: {self.base}, now {self.new}"


class Change(Record):
    """interval: 95 %, of the spread within each of the two; what differs from run to run is not in it."""

    ratio: float
    interval: Interval
    verdict: Verdict


class Pair(Record):
    """A case of both, or of one of them.

    time, call: of device and call times, both of the call time for a prefill; None if the times do not compare or there
        are none.
    over_baseline: the speedup of NEW over its baseline, over that of BASE over its own.
    incomparable: why absolute times do not compare.
    other_inputs: why errors do not compare; empty if both had the same inputs.
    """

    base: Row | None
    new: Row | None
    time: Change | None = None
    call: Change | None = None
    over_baseline: Change | None = None
    incomparable: tuple[str, ...] = ()
    other_inputs: str = ""

    @property
    def row(self) -> Row:
        found = self.new or self.base
        assert found is not None
        return found

    @property
    def judged_by(self) -> Change | None:
        """Times where they compare, else the ratio of the speedups."""
        return self.time or self.over_baseline

    @property
    def verdict(self) -> str:
        """ "faster", "slower", "no difference", "not comparable", "not timed", "only in BASE", "only in NEW"."""
        if self.base is None or self.new is None:
            return "only in NEW" if self.base is None else "only in BASE"
        if self.judged_by is not None:
            return self.judged_by.verdict
        timed = self.base.time is not None and self.new.time is not None
        return "not comparable" if timed else "not timed"

    @property
    def apart(self) -> tuple[str, ...]:
        """Why nothing of the two was compared, neither times nor errors; empty if something was."""
        if self.base is None or self.new is None:
            return (self.verdict,)
        if self.time or self.call or self.over_baseline:
            return ()
        return self.incomparable if self.row.prefill else tuple(filter(None, [self.other_inputs]))


class Total(Record):
    """Cases of one implementation and precision together: the geometric mean of their ratios.

    Its interval takes every case at its own bound, as if all erred the same way.
    """

    # "131,072 tokens", "chunks of 8 tokens of 40 tokens"; of a bench a shape and a dtype; of prefills "prefill, bundled
    # surroundings"
    where: str
    over: TotalOver  # what its cases are
    implementation: str
    precision: PrecisionRecord
    cases: int
    by: TotalBy
    change: Change


class StageChange(Record):
    """A stage's part of an implementation's busy time, by ncu.  None: not in that one."""

    implementation: str
    stage: str
    base_pct: float | None
    new_pct: float | None
    base_us: float | None = None
    new_us: float | None = None


class Condition(Record):
    """A --fail-if: as given, and the rows that violate it."""

    text: str
    offenders: tuple[Broken, ...]


class Comparison(Record):
    comparison_version: int = COMPARISON_VERSION
    base: Side
    new: Side
    smallest_difference: float
    machine: tuple[Difference, ...]
    pairs: tuple[Pair, ...]
    totals: tuple[Total, ...]
    stalls: tuple[StageChange, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @property
    def nothing_compared(self) -> str:
        """Why; empty if some case was compared."""
        if any(not pair.apart for pair in self.pairs):
            return ""
        both = [pair for pair in self.pairs if pair.base and pair.new]
        return "; ".join(dict.fromkeys(why for pair in both for why in pair.apart)) or "no case is in both"

    @property
    def passed(self) -> bool:
        return not self.nothing_compared and not any(condition.offenders for condition in self.conditions)
