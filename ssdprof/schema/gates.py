"""Limits that a user sets for a run or a bench."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from ssdprof.schema.accuracy import TOLERANCES
from ssdprof.schema.base import Record

Tolerance = Literal["0", "1e-3", "1e-2"]
TOLERANCE_NAMES: dict[str, float] = dict(zip(get_args(Tolerance), TOLERANCES, strict=True))
_Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Percent = Annotated[float, Field(ge=0, le=100)]


class Gates(Record):
    """A gate holds if every case of the compared implementations meets it.

    min_speedup: over the baseline, by device time.
    min_match: tolerance -> least share of the output's elements that match the baseline's, in percent.
    max_rms_ratio: RMS error of the output against the fp64 oracle, over that of the oracle rounded to its dtype.
    """

    min_speedup: _Limit | None = None
    min_match: dict[Tolerance, _Percent] = Field(default_factory=dict)
    max_rms_ratio: _Limit | None = None

    def __bool__(self) -> bool:
        return self != NO_GATES


NO_GATES = Gates()
