"""The errors of output tensors: deviations from the fp64 oracle and the baseline, error budgets,
and tests whether rounding explains an error.
"""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

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
from ssdprof.core.words import plural

# A share of matches is judged and shown only if the largest value of the tensor is at least this
# many times the tolerance.  With smaller values the tolerance is a large part of most elements, and
# the share says little.
LEAST_VALUE: Final = 50


class Deviation(Record):
    """The deviation of a tensor from another one.  A position has an index for each of its axes.

    against: the other tensor, in words.
    matches: the percentage of elements within each of `TOLERANCES`: see `match_pct`.
    matches_rms: the same for `TOLERANCES[1:]`, relative to an RMS: see `match_rms_pct`.  None in
        old records.
    max_abs: the largest absolute difference, which is at `worst_position`.
    worst_head: the head with the largest ratio of its RMS error to its RMS.  `worst_position` may
        be in another head.
    nonfinite: the number of elements whose difference is not finite; `first_nonfinite` is the first
        of them.  Errors leave them out.
    scale_max_abs: the largest magnitude of the other tensor, for comparison with `max_abs`; None in
        old records.
    along: `rms_ratio` in each slice of the positions (see `SLICES`).  Empty for a tensor without an
        axis of positions, and in a bench.
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
        has_nonfinite = self.nonfinite > 0
        has_first = self.first_nonfinite is not None
        if self.nonfinite > self.elements:
            raise ValueError(f"nonfinite is above {self.elements} elements")
        if has_nonfinite != has_first:
            raise ValueError("first_nonfinite is given exactly if nonfinite is above 0")
        return self

    @property
    def rms_of_all(self) -> float:
        """`rms_ratio`; infinite if that is None, or if an element is not finite."""
        return math.inf if self.nonfinite or self.rms_ratio is None else self.rms_ratio

    def match_pct(self, tolerance: float) -> float:
        """The percentage of elements with |a - b| <= tolerance (1 + |b|), b of the other tensor.

        tolerance: one of `TOLERANCES`.
        """
        return self.matches[TOLERANCES.index(tolerance)]

    def match_rms_pct(self, tolerance: float) -> float | None:
        """The percentage of elements with |a - b| <= tolerance (rms + |b|), which does not change
        if both tensors are scaled alike.  None if it was not recorded.

        rms: of the first of the outputs that were compared together, the same for all of them.
        tolerance: one of `TOLERANCES[1:]`.
        """
        return self.matches_rms[TOLERANCES.index(tolerance) - 1] if self.matches_rms else None


class BudgetUse(Record):
    """The error, in one norm, of the head that uses most of its budget.

    position: that of the largest difference in this head.
    """

    norm: Literal["max", "rms"]
    head: Count
    error: NotNegative
    budget: Annotated[float, Field(gt=0)]
    position: Position


TestName = Literal["gain", "mean gain", "rms", "column", "slice", "period"]


class ErrorTest(Record):
    """The result of a test whether rounding explains an error, in the part of the tensor where the
    error uses most of its limit (measure/rounding_tests.py).

    head: the head of this part; 0 for a mean over heads.
    position: a column, a slice (see `SLICES`), or a position modulo `period`, according to the
        test; None for a whole head.
    value: in tests of gains, the deviation of the gain, with its sign, from the middle of the range
        that rounding explains, which is near 1; otherwise the relative RMS error.
    limit: the largest magnitude of the value that rounding explains.
    """

    test: TestName
    head: Count
    position: Count | None = None
    period: Size | None = None
    value: float
    limit: Annotated[float, Field(gt=0)]

    @property
    def used(self) -> float:
        """The error as a share of its limit.  The test fails above 1."""
        return abs(self.value) / self.limit

    @property
    def words(self) -> str:
        """The result in words: "head 3: gain 1.00500, where rounding explains 1 ± 0.0004"."""
        where = {
            "column": f", column {self.position}",
            "slice": f", slice {self.position} of {SLICES}",
            "period": f", position {self.position} of each {self.period}",
        }.get(self.test, "")
        gain = f"gain {1 + self.value:.5f}, where rounding explains 1 ± {self.limit:.2g}"
        if self.test == "gain":
            return f"head {self.head}: {gain}"
        if self.test == "mean gain":
            return f"mean over heads: {gain}"
        return (
            f"head {self.head}{where}: relative RMS error {self.value:.3g}, where rounding "
            f"explains {self.limit:.3g}"
        )


def _explanation_key(test: ErrorTest) -> tuple[bool, float]:
    """The key by which failed tests are ordered: the one with the largest key is reported.

    A wrong gain of a head ("gain") explains all other errors, so its key is larger than any other.
    All other tests, "mean gain" included, are ordered by the share of their limits that is used.  A
    wrong head explains the errors of its parts unless one of them is far worse, so the share of a
    whole head ("rms") counts double.
    """
    weight = 2 if test.test == "rms" else 1
    return test.test == "gain", test.used * weight


class Accuracy(Record):
    """The errors of one output tensor.

    dtype: of the tensor.
    vs_baseline: None if the tensor is the baseline's own.
    floor: the deviation of the oracle rounded to `dtype` from the oracle itself, which is the
        smallest possible error.
    budget: the use of the error budget in each norm.
    checks: the tests whether rounding explains the error; only if the inputs have 16 bits.
    coarser: a dtype that can represent all states of some head exactly, although the precision
        claims the finer dtype `claimed`; None if there is no such head.
    claimed: the dtype of the states at the case's precision; None for outputs.
    remark: what is known of the cause if the tensor does not pass (measure/diagnosis.py).
    """

    tensor: TensorName
    dtype: DType
    vs_oracle: Deviation
    vs_baseline: Deviation | None
    floor: Deviation
    budget: tuple[BudgetUse, ...]
    checks: tuple[ErrorTest, ...] = ()
    coarser: DType | None = None
    claimed: DType | None = None
    remark: Text = ""

    @property
    def reason(self) -> str:
        """Why the tensor does not pass, with the remark; empty if it passes."""
        fault = self._fault
        return f"{fault}; {self.remark}" if fault and self.remark else fault

    @property
    def _fault(self) -> str:
        """Why the tensor does not pass, without the remark; empty if it passes."""
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
            return f"{self.tensor}, {max(failed, key=_explanation_key).words}"
        if self.coarser:
            return (
                f"{self.tensor}: {self.claimed} states are claimed, but a head has only "
                f"{self.coarser} numbers"
            )
        return ""

    def _nonfinite_reason(self) -> str:
        """The number of elements that are not finite, and whether the exact answer is finite."""
        error = self.vs_oracle
        floor = self.floor
        where = (
            f"{self.tensor}: not finite in {plural(error.nonfinite, 'element')}, the first at "
            f"{error.first_nonfinite}"
        )
        if not floor.nonfinite:
            return f"{where}; the exact answer is finite everywhere"
        return (
            f"{where}; the exact answer, rounded to {self.dtype}, is itself not finite in "
            f"{plural(floor.nonfinite, 'element')}, the first at {floor.first_nonfinite}"
        )

    @property
    def over_floor(self) -> float | None:
        """The RMS error over that of the rounded oracle, infinite if an element is not finite; None
        if the oracle needs no rounding, or if rounding makes its error infinite.
        """
        floor = self.floor.rms_ratio
        return self.vs_oracle.rms_of_all / floor if floor else None
