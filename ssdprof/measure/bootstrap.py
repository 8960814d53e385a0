"""A confidence interval of the mean of an autocorrelated series."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ssdprof.schema import Interval

RESAMPLES = 2000
_SEED = 0


def mean_interval(values: NDArray[np.float64]) -> Interval:
    """95 % interval of the mean of values (n,), n >= 1, by a circular block bootstrap.

    Blocks are sqrt(n) long, because predictions of neighbouring tokens are correlated: resampling single values would
    make the interval too narrow.  Source: Politis and Romano 1992, "A circular block-resampling procedure
    for stationary data".
    """
    count = len(values)
    length = max(1, round(math.sqrt(count)))
    sums = np.cumsum(np.concatenate([[0.0], values, values[: length - 1]]))
    block_means = (sums[length:] - sums[:-length]) / length  # (n,), of the blocks that begin at each value
    generator = np.random.default_rng(_SEED)
    starts = generator.integers(count, size=(RESAMPLES, math.ceil(count / length)))
    low, high = np.quantile(block_means[starts].mean(axis=1), (0.025, 0.975))
    return Interval(low=float(low), high=float(high))
