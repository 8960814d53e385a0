"""Intervals, ratios and verdicts of plain arrays."""

import numpy as np
import pytest

from ssdprof.measure.statistics import median_interval, ratio_interval, settled, verdict
from ssdprof.schema import Interval


def noisy(median: float, spread: float, rounds: int = 100, seed: int = 0) -> np.ndarray:
    return median * (1 + spread * np.random.default_rng(seed).standard_normal(rounds))


def test_the_median_lies_in_its_interval_which_shrinks_with_more_samples() -> None:
    few, many = (noisy(100, 0.05, rounds) for rounds in (25, 400))
    interval = median_interval(few)
    assert interval.low < np.median(few) < interval.high
    narrow = median_interval(many)
    assert narrow.high - narrow.low < 0.5 * (interval.high - interval.low)


def test_95_of_100_intervals_hold_the_true_median() -> None:
    intervals = [median_interval(noisy(100, 0.1, 50, seed)) for seed in range(200)]
    covered = sum(interval.low <= 100 <= interval.high for interval in intervals)
    assert 180 <= covered <= 199


def test_the_interval_is_the_same_every_time() -> None:
    samples = noisy(100, 0.05)
    assert median_interval(samples) == median_interval(samples.copy())


def test_the_ratio_is_the_baseline_over_the_other() -> None:
    interval = ratio_interval(noisy(200, 0.02, seed=1), noisy(100, 0.02, seed=2))
    assert interval.low < 2 < interval.high
    assert interval.high - interval.low < 0.05


def test_a_drift_that_both_saw_does_not_widen_the_ratio() -> None:
    drift = np.linspace(1, 2, 100)  # the clock falls to half while sampling
    baseline, other = 200 * drift, 100 * drift
    both = ratio_interval(baseline, other)
    apart = ratio_interval(baseline, np.random.default_rng(0).permutation(other))
    assert (both.low, both.high) == pytest.approx((2, 2))
    assert apart.high - apart.low > 0.1


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.01, 1.2, "faster"),
        (0.8, 0.99, "slower"),
        (0.99, 1.01, "no difference"),
        (1.0, 1.2, "no difference"),
        (0.8, 1.0, "no difference"),
    ],
)
def test_no_difference_is_a_verdict(low: float, high: float, expected: str) -> None:
    assert verdict(Interval(low=low, high=high)) == expected


def test_identical_implementations_rarely_differ() -> None:
    verdicts = [
        verdict(ratio_interval(noisy(100, 0.03, 60, 2 * seed), noisy(100, 0.03, 60, 2 * seed + 1)))
        for seed in range(100)
    ]
    assert verdicts.count("no difference") >= 88


def test_settled_asks_every_series() -> None:
    steady, shaky = np.full(20, 100.0), noisy(100, 0.2, 20)
    assert settled({"a": steady}, 0.005)
    assert not settled({"a": steady, "b": shaky}, 0.005)
