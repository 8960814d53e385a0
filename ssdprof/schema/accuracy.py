"""How exact an output is."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record

TOLERANCES: tuple[float, ...] = (0.0, 1e-3, 1e-2)


class Match(Record):
    tolerance: float  # atol = rtol
    match_pct: float


class Deviation(Record):
    """How one tensor differs from another.  Positions index the tensor's own shape."""

    against: str  # "fp64 oracle", "unfused exact, fp16 states", ...
    elements: int
    matches: tuple[Match, ...]
    rms_ratio: float  # rms(out - other) / rms(other)
    max_abs: float
    worst_head: int
    worst_position: tuple[int, ...]
    nonfinite: int
    first_nonfinite: tuple[int, ...] | None = None


class TensorAccuracy(Record):
    tensor: Literal["out", "final_states"]
    vs_oracle: Deviation
    vs_baseline: Deviation | None  # None for the baseline itself
    floor: Deviation  # the oracle rounded to the output dtype, against the oracle
    passed: bool
    reason: str = ""  # why not
