"""Ratios of two independent measurements, with intervals and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from ssdprof.schema import Interval
from ssdprof.schema.comparison import Change
from ssdprof.schema.rows import Measured


def change(above: Measured, below: Measured, smallest_difference: float) -> Change:
    """above / below.

    Intervals are symmetric in the logarithm.  The two are independent, so the squares of their half-widths add up.
    """
    width = math.hypot(_half_width(above[1]), _half_width(below[1]))
    return _judged(math.log(above[0] / below[0]), width, smallest_difference)


def mean(changes: Sequence[Change], smallest_difference: float) -> Change:
    """The geometric mean.  Its bounds are the means of the bounds of all ratios."""
    ratio = fmean(math.log(one.ratio) for one in changes)
    width = fmean(_half_width(one.interval) for one in changes)
    return _judged(ratio, width, smallest_difference)


def _judged(log_ratio: float, half_width: float, smallest_difference: float) -> Change:
    interval = Interval(low=math.exp(log_ratio - half_width), high=math.exp(log_ratio + half_width))
    return Change(ratio=math.exp(log_ratio), interval=interval, verdict=interval.verdict(smallest_difference))


def _half_width(interval: Interval) -> float:
    return math.log(interval.high / interval.low) / 2
