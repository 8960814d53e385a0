"""Medians, their intervals, and when to stop sampling.  Plain arrays; no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ssdprof.schema import Interval

Samples = NDArray[np.float64]  # one implementation's, in microseconds, in the order of the rounds

_RESAMPLES = 2000
_SEED = 0  # fixed, so that a stored run gives the same interval again


def median_interval(samples: Samples) -> Interval:
    """95 % percentile bootstrap interval of the median."""
    return _interval(_resampled_medians(samples[None])[0])


def ratio_interval(baseline: Samples, other: Samples) -> Interval:
    """95 % percentile bootstrap interval of median(baseline) / median(other): above 1, `other` is faster.

    Both were sampled in the same rounds and a resample takes whole rounds, so that a drift of the machine that both saw
    does not widen the interval.
    """
    medians = _resampled_medians(np.stack([baseline, other]))
    return _interval(medians[0] / medians[1])


def verdict(ratio: Interval) -> Literal["faster", "slower", "no difference"]:
    """What an interval of the ratio allows to say."""
    if ratio.low > 1:
        return "faster"
    if ratio.high < 1:
        return "slower"
    return "no difference"


def settled(samples: Mapping[str, Samples], half_width: float) -> bool:
    """Whether every median is known to within `half_width`, relative."""
    return all(_relative_half_width(median_interval(values)) <= half_width for values in samples.values())


def _relative_half_width(interval: Interval) -> float:
    return (interval.high - interval.low) / (interval.high + interval.low)


def _resampled_medians(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """(series, rounds) -> (series, resamples); every series is resampled at the same rounds."""
    rounds = samples.shape[1]
    chosen = np.random.default_rng(_SEED).integers(0, rounds, (_RESAMPLES, rounds))
    medians: NDArray[np.float64] = np.median(samples[:, chosen], axis=-1)
    return medians


def _interval(values: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(low=float(low), high=float(high))
