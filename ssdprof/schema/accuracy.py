"""Records of accuracy."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record

TOLERANCES: tuple[float, ...] = (0.0, 1e-3, 1e-2)
SLICES = (
    32  # of the positions of a prompt: slice i holds those p with p * slices // seqlen == i; a position each if fewer
)


class Match(Record):
    tolerance: float  # atol = rtol
    match_pct: float


class Deviation(Record):
    """The difference between two tensors.  Positions index the tensor's own shape.

    scale_max_abs: the largest magnitude of the other tensor, for comparison with max_abs.
    along: rms_ratio in slices of equal length of the positions (see `SLICES`), first to last; of a tensor without a
        position axis it is empty.
    """

    against: str  # "fp64 oracle", "unfused exact, fp16 states", ...
    elements: int
    matches: tuple[Match, ...]
    rms_ratio: float  # rms(out - other) / rms(other)
    max_abs: float
    worst_head: int
    worst_position: tuple[int, ...]
    nonfinite: int
    first_nonfinite: tuple[int, ...] | None = None
    scale_max_abs: float | None = None
    along: tuple[float, ...] = ()


class TensorAccuracy(Record):
    tensor: Literal["out", "final_states"]
    vs_oracle: Deviation
    vs_baseline: Deviation | None  # None for the baseline itself
    floor: Deviation  # the oracle rounded to the output dtype, against the oracle
    passed: bool
    reason: str = ""  # the reason if it did not pass
