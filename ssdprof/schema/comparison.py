"""Records of `ssdprof compare`: two runs, benches or prefill results, case by case.

Ratios are BASE's time over NEW's, so a ratio above 1 means that NEW is faster.
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
    unfinished: why it is incomplete, in a sentence; empty if it is complete.
    """

    name: str
    kind: Literal["run", "bench", "prefill"]
    created: str
    ssdprof_version: str
    subject: str
    environment: Environment
    unfinished: str = ""


class Difference(Record):
    """A difference between the machines, which prevents a comparison of absolute times."""

    what: str  # "GPU", "driver", "Triton"
    base: str
    new: str

    def __str__(self) -> str:
        return f"other {self.what}: {self.base}, now {self.new}"


class Change(Record):
    """interval: 95 %, from the spread within each of the two, without differences from run to run."""

    ratio: float
    interval: Interval
    verdict: Verdict


class Pair(Record):
    """A case of both, or of one of them.

    time, call: of device and call times, both of the call time for a prefill; None if the times cannot be compared or
        do not exist.
    over_baseline: the speedup of NEW over its baseline, over that of BASE over its own.
    incomparable: why absolute times cannot be compared.
    other_inputs: why errors cannot be compared; empty if both had the same inputs.
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
        """The ratio of times if they can be compared, else the ratio of speedups."""
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
        """Why neither times nor errors of the two were compared; empty if something was."""
        if self.base is None or self.new is None:
            return (self.verdict,)
        if self.time or self.call or self.over_baseline:
            return ()
        return self.incomparable if self.row.prefill else tuple(filter(None, [self.other_inputs]))


class Total(Record):
    """Cases of one implementation and precision together: the geometric mean of their ratios.

    Its interval assumes that all cases are at the same end of their intervals.
    """

    # "131,072 tokens", "chunks of 8 tokens of 40 tokens"; of a bench a shape and a dtype; of prefills "prefill, bundled
    # surroundings"
    where: str
    over: TotalOver  # the unit of its cases
    implementation: str
    precision: PrecisionRecord
    cases: int
    by: TotalBy
    change: Change


class StageChange(Record):
    """A stage's share of an implementation's busy time, by ncu.  None: missing in that run."""

    implementation: str
    stage: str
    base_pct: float | None
    new_pct: float | None
    base_us: float | None = None
    new_us: float | None = None


class Condition(Record):
    """A condition of --fail-if as given, and the rows that violate it."""

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
        """The reason why nothing was compared; empty if some case was."""
        if any(not pair.apart for pair in self.pairs):
            return ""
        both = [pair for pair in self.pairs if pair.base and pair.new]
        return "; ".join(dict.fromkeys(why for pair in both for why in pair.apart)) or "no case is in both"

    @property
    def passed(self) -> bool:
        return not self.nothing_compared and not any(condition.offenders for condition in self.conditions)
