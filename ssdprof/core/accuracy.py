"""How far an output is from the oracle, and what was concluded from it."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ssdprof.core.base import (
    SLICES,
    TOLERANCES,
    Count,
    DType,
    NotNegative,
    Percent,
    Position,
    Record,
    Size,
    TensorName,
    Text,
)


class Deviation(Record):
    """The difference between two tensors.  Positions index the tensor's own shape.

    matches: percent of the elements, at each of `TOLERANCES`.
    matches_rms: the same at `TOLERANCES[1:]` times the RMS of the tensor; None in old records.
    scale_max_abs: the largest magnitude of the other tensor, for comparison with max_abs; None in
    old records.
    along: rms_ratio in slices of equal length of the positions (see `SLICES`), first to last; empty
        for a tensor without a position axis, and in a bench.
    """

    against: Text  # "fp64 oracle", "unfused exact, fp16 states", ...
    elements: Size
    matches: tuple[Percent, Percent, Percent]
    matches_rms: tuple[Percent, Percent] | None = None
    rms_ratio: NotNegative | None  # rms(out - other) / rms(other); None: it is infinite
    max_abs: NotNegative
    worst_head: Count
    worst_position: Position
    nonfinite: Count
    first_nonfinite: Position | None = None
    scale_max_abs: NotNegative | None = None
    along: Annotated[tuple[NotNegative | None, ...], Field(max_length=SLICES)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Deviation:
        for position in filter(None, (self.worst_position, self.first_nonfinite)):
            if math.prod(index + 1 for index in position) > self.elements:
                raise ValueError(f"{position} is not within {self.elements} elements")
        if self.nonfinite > self.elements or (self.nonfinite > 0) != (
            self.first_nonfinite is not None
        ):
            raise ValueError(
                "first_nonfinite is the first of the nonfinite ones among the elements"
            )
        return self

    def match_pct(self, tolerance: float) -> float:
        """The share with |a - b| <= tolerance (1 + |b|)."""
        return self.matches[TOLERANCES.index(tolerance)]

    def match_rms_pct(self, tolerance: float) -> float | None:
        """The share with |a - b| <= tolerance (rms + |b|), which depends on no unit of the
        tensor.
        """
        return self.matches_rms[TOLERANCES.index(tolerance) - 1] if self.matches_rms else None


class BudgetUse(Record):
    """An error of the head that uses most of its budget, in one norm.  position: of the head's
    largest difference.
    """

    norm: Literal["max", "rms"]
    head: Count
    error: NotNegative
    budget: Annotated[float, Field(gt=0)]
    position: Position


TestName = Literal["gain", "mean gain", "rms", "column", "slice", "period"]


class ErrorTest(Record):
    """The part of an output tensor where its error uses most of what rounding can explain
    (measure/rounding_tests.py).

    head: 0 for a mean over heads.  value: of gains the relative deviation, with its sign; else the
    relative RMS error.  position: a column, a slice (see `SLICES`), or a position modulo `period`;
    None for a whole head.
    """

    test: TestName
    head: Count
    position: Count | None = None
    period: Size | None = None
    value: float
    limit: Annotated[float, Field(gt=0)]

    @property
    def used(self) -> float:
        """The share of the limit; above 1 the test fails."""
        return abs(self.value) / self.limit

    @property
    def words(self) -> str:
        """ "head 3: gain 1.005, where rounding explains 1 +- 0.0004"."""
        where = {
            "column": f", column {self.position}",
            "slice": f", slice {self.position} of {SLICES}",
            "period": f", position {self.position} of each {self.period}",
        }.get(self.test, "")
        if "gain" in self.test:
            heads = f"head {self.head}: gain" if self.test == "gain" else "mean over heads: gain"
            return f"{heads} {1 + self.value:.5f}, where rounding explains 1 ± {self.limit:.2g}"
        return (
            f"head {self.head}{where}: relative RMS error {self.value:.3g}, where rounding "
            f"explains {self.limit:.3g}"
        )


def _explains_most(test: ErrorTest) -> tuple[bool, float]:
    """A gain explains all other errors, and a whole head those of its parts, unless one of them
    is far worse.
    """
    return test.test == "gain", test.used * (2 if test.test == "rms" else 1)


class Accuracy(Record):
    """One output tensor.

    budget: an entry for each norm.
    checks: of outputs with 16-bit inputs, what each test of the errors found.
    coarser: the dtype in which all states of a head can be stored, although a finer one is claimed;
    else None.
    dtype: of the tensor.
    remark: what else is known of an output that does not pass (measure/diagnosis.py).
    """

    tensor: TensorName
    dtype: DType
    vs_oracle: Deviation
    vs_baseline: Deviation | None  # None for the baseline itself
    floor: Deviation  # the oracle rounded to the output dtype, against the oracle
    budget: tuple[BudgetUse, ...]
    checks: tuple[ErrorTest, ...] = ()
    coarser: DType | None = None
    claimed: DType | None = None  # of states
    remark: Text = ""

    @property
    def reason(self) -> str:
        """Why it does not pass, in a sentence, with the remark; empty if it does."""
        fault = self._fault
        return f"{fault}; {self.remark}" if fault and self.remark else fault

    @property
    def _fault(self) -> str:
        """The reason without the remark; empty if it passes."""
        if self.vs_oracle.nonfinite:
            return self._nonfinite_reason()
        for use in self.budget:
            if use.error > use.budget:
                return (
                    f"{self.tensor}, head {use.head}: {use.norm}|ours - oracle| is "
                    f"{use.error:.3g}, its budget {use.budget:.3g}; the largest difference is at "
                    f"{use.position}"
                )
        if failed := [test for test in self.checks if test.used > 1]:
            return f"{self.tensor}, {max(failed, key=_explains_most).words}"
        if self.coarser:
            return (
                f"{self.tensor}: {self.claimed} states are claimed, but a head has only "
                f"{self.coarser} numbers"
            )
        return ""

    def _nonfinite_reason(self) -> str:
        """Elements that are not finite, and whether the exact answer is."""
        error = self.vs_oracle
        floor = self.floor
        where = (
            f"{self.tensor}: {error.nonfinite} elements are not finite, the first at "
            f"{error.first_nonfinite}"
        )
        if not floor.nonfinite:
            return f"{where}; the exact answer is finite everywhere"
        return (
            f"{where}; the exact answer, rounded to {self.dtype}, is itself not finite in "
            f"{floor.nonfinite} elements, the first at {floor.first_nonfinite}"
        )

    @property
    def over_floor(self) -> float | None:
        """The RMS error over that of the rounded oracle; None if the oracle needs no rounding."""
        if not self.floor.rms_ratio or self.vs_oracle.rms_ratio is None:
            return None
        return self.vs_oracle.rms_ratio / self.floor.rms_ratio
