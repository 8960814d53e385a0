"""Medians, ratios and their intervals, from samples.  Plain arrays; no GPU.

Samples come in recordings.  Within a recording, graph, workspace and output keep their addresses;
the next recording allocates them again.  Rounds of one recording therefore share an error that more
rounds do not reduce, and the interval of a time is Student's t over recordings; over processes, if
there are several, because call times differ by more from process to process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# (rounds,) microseconds of each recording
RecordedTimes = Sequence[Sequence[float]] | Sequence[NDArray[np.float64]]
Faster = Literal["faster", "slower", "no difference"]

# 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom: as many as a case
# has recordings (`SamplingPlan.max_recordings`).  It has fewer processes.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
)
# By clock, the standard deviation between processes of the logarithm of a ratio of times.  It was
# measured in five benches of two shapes at 4K and 16K tokens on an H100.  The variances of these
# four sizes differ as if each had 8 degrees of freedom.  Half as many are assumed, because other
# machines differ more.
SPREAD: dict[str, float] = {"device": 0.0041, "call": 0.029}
_SPREAD_FREEDOM = 4
# The expected variance is not used if the measured one is this many times as large, which happens
# by chance to three processes in 1 of 40 cases.
_BEYOND_EXPECTED = 3.7


class Estimate(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def verdict(self, smallest_difference: float) -> Faster:
        """The verdict on an implementation, for the ratio of the baseline's time to its time.

        A difference counts if the whole interval lies beyond it.  If A is faster than B, then B is
        slower than A.
        """
        if self.low > 1 + smallest_difference:
            return "faster"
        return "slower" if self.high < 1 / (1 + smallest_difference) else "no difference"

    @property
    def inverse(self) -> Estimate:
        """The estimate of 1 / value."""
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)


def median(samples: RecordedTimes) -> Estimate:
    """The geometric mean over recordings of the median over rounds, with its interval."""
    return _estimate(_medians(samples))


def ratio(baseline: RecordedTimes, other: RecordedTimes) -> Estimate:
    """How many times as fast `other` is: `median(baseline) / median(other)`.

    Both were sampled in the same rounds.  The ratio is computed for each recording, so that a drift
    of the machine between recordings, which affects both, does not widen the interval.
    """
    return _estimate(_medians(baseline) / _medians(other))


def of_processes(estimates: Sequence[Estimate], spread: float | None = None) -> Estimate:
    """The geometric mean of the estimates of several processes, with Student's t interval over
    processes.  A single estimate is returned as it is.  There are at most 17.

    spread: the standard deviation of logarithms that is expected between processes; None if it is
        not known.  It counts as `_SPREAD_FREEDOM` more degrees of freedom (moderated t: Smyth 2004,
        doi:10.2202/1544-6115.1027), unless the processes differ by far more.
    """
    if len(estimates) == 1:
        return estimates[0]
    return _estimate(np.array([estimate.value for estimate in estimates]), spread)


def quotient(above: Estimate, below: Estimate) -> Estimate:
    """above / below, for two independent measurements.

    The squares of the half-widths of their logarithms add up.
    """
    half_width = math.hypot(_log_half_width(above), _log_half_width(below))
    log = math.log(above.value / below.value)
    return Estimate(math.exp(log), math.exp(log - half_width), math.exp(log + half_width))


def difference(minuend: Estimate, subtrahend: Estimate) -> Estimate:
    """minuend - subtrahend, for two independent measurements.

    The squares of the half-widths on each side of the value add up.
    """
    value = minuend.value - subtrahend.value
    below = math.hypot(minuend.value - minuend.low, subtrahend.high - subtrahend.value)
    above = math.hypot(minuend.high - minuend.value, subtrahend.value - subtrahend.low)
    return Estimate(value, value - below, value + above)


def mean(ratios: Sequence[Estimate]) -> Estimate:
    """The geometric mean of the ratios, with bounds that are the geometric means of their bounds.

    ratios: at least one.  The value of each must be the geometric mean of its own two bounds.
    """
    log = fmean(math.log(ratio.value) for ratio in ratios)
    half_width = fmean(map(_log_half_width, ratios))
    return Estimate(math.exp(log), math.exp(log - half_width), math.exp(log + half_width))


def exponent(steps: Sequence[int], values: Sequence[float]) -> Estimate | None:
    """The exponent p of values that grow as steps^p; None for fewer than three points.

    There are at most 22 points, and all values are above 0.  It is the slope of log(value) over
    log(step) by least squares, with Student's t interval from the residuals.
    """
    if len(steps) < 3:
        return None
    x = np.log(steps) - np.mean(np.log(steps))
    y = np.log(values)
    slope = float(x @ y / (x @ x))
    freedom = len(steps) - 2
    residuals = y - np.mean(y) - slope * x
    half_width = _T[freedom - 1] * math.sqrt(residuals @ residuals / freedom / (x @ x))
    return Estimate(slope, slope - half_width, slope + half_width)


def settled(samples: Iterable[RecordedTimes], smallest_difference: float) -> bool:
    """Whether more recordings would hardly change the verdict on any pair of implementations.

    samples: of each implementation, at least two recordings each.  True for a single
        implementation.  See `_decided`.
    """
    medians = [_medians(recordings) for recordings in samples]
    ratios = [first / second for first, second in combinations(medians, 2)]
    return all(
        _decided(math.log(_mean(values)), _half_width(values), smallest_difference)
        for values in ratios
    )


def _decided(log_ratio: float, half_width: float, smallest_difference: float) -> bool:
    """Whether the interval of a ratio is as narrow as its verdict needs.

    log_ratio, half_width: the logarithm of the ratio, and half the width of its 95 % interval.

    One of three conditions is enough.
    Below: the whole interval is within twice the smallest difference of 1, which rules out a larger
        difference.
    Beyond: the whole interval is a difference that counts, even if it were half as wide again, and
        the ratio is known to within three times the smallest difference.
    Narrow: the ratio, which is then near the smallest difference, is known to within half of it.

    The interval is checked after each recording.  Without the margin of one half, equal times would
    sooner or later have an interval beyond the difference by chance, and a false verdict.
    """
    distance = abs(log_ratio)
    is_below = distance + half_width <= 2 * smallest_difference
    is_beyond = (
        distance - 1.5 * half_width > math.log1p(smallest_difference)
        and half_width <= 3 * smallest_difference
    )
    is_narrow = half_width <= smallest_difference / 2
    return is_below or is_beyond or is_narrow


def steady(rounds: Iterable[NDArray[np.float64]], smallest_difference: float) -> bool:
    """Whether a recording has enough rounds.

    It has if the error of the median of the ratio of any two implementations is at most the
    smallest difference.

    rounds: (rounds,) microseconds of each implementation.  Element j of every array is from the
        same round, so a change of the clock that affects all implementations is not noise.  A
        single implementation is compared with its own median.
    """
    logs = [np.log(times) for times in rounds]
    ratios = [first - second for first, second in combinations(logs, 2)]
    if len(logs) == 1:
        ratios = [logs[0] - np.median(logs[0])]
    return all(median_error(values) <= smallest_difference for values in ratios)


def median_error(values: NDArray[np.float64]) -> float:
    """The standard error of the median of normally distributed values.

    It is computed from the median absolute deviation, on which a few interrupted samples have
    little influence.
    """
    # a standard deviation is 1.4826 median absolute deviations
    sigma = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    # the standard error of a median is sqrt(pi / 2) = 1.2533 times that of a mean
    return 1.2533 * sigma / math.sqrt(len(values))


def _medians(samples: RecordedTimes) -> NDArray[np.float64]:
    """(recordings,) microseconds: the median time of each recording."""
    return np.array([float(np.median(rounds)) for rounds in samples])


def _mean(values: NDArray[np.float64]) -> float:
    """The geometric mean.  If all values are equal, it is exactly their value."""
    first = float(values[0])
    return first * math.exp(float(np.mean(np.log(values / first))))


def _estimate(values: NDArray[np.float64], spread: float | None = None) -> Estimate:
    """The geometric mean of values with its interval.  spread: see `of_processes`."""
    factor = math.exp(_half_width(values, spread))
    value = _mean(values)
    return Estimate(value, value / factor, value * factor)


def _half_width(values: NDArray[np.float64], spread: float | None = None) -> float:
    """Half the width of the 95 % interval of the mean logarithm.

    values: (recordings,), or a value for each process; at least two.  spread: see `of_processes`.
    """
    freedom = len(values) - 1
    variance = float(np.var(np.log(values), ddof=1))
    if spread is not None and variance < _BEYOND_EXPECTED * spread**2:
        variance = (freedom * variance + _SPREAD_FREEDOM * spread**2) / (freedom + _SPREAD_FREEDOM)
        freedom += _SPREAD_FREEDOM
    return _T[freedom - 1] * math.sqrt(variance / len(values))


def _log_half_width(estimate: Estimate) -> float:
    """Half the width of the interval of the logarithm."""
    return math.log(estimate.high / estimate.low) / 2
