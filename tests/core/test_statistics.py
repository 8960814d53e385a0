"""Medians, ratios, their intervals and verdicts, of plain arrays."""

import math

import numpy as np
import pytest

from ssdprof.core import statistics
from ssdprof.core.statistics import (
    Estimate,
    mean,
    median,
    median_error,
    quotient,
    ratio,
    settled,
    steady,
)


def noisy(median: float, spread: float, seed: int = 0, *, placement: float = 0.0) -> np.ndarray:
    """(5, 8).  spread: of rounds.  placement: of recordings."""
    draw = np.random.default_rng(seed)
    return median * (
        1 + placement * draw.standard_normal((5, 1)) + spread * draw.standard_normal((5, 8))
    )


@pytest.mark.parametrize("degrees", [1, 2, 4, 10, 20])
def test_the_quantiles_are_student_s(degrees):
    """97.5 % of the density's area lies below."""
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    steps = np.linspace(0, statistics._T[degrees - 1], 20_001)
    density = scale * (1 + steps**2 / degrees) ** (-(degrees + 1) / 2)
    assert 0.5 + np.trapezoid(density, steps) == pytest.approx(0.975, abs=2e-5)


def test_95_of_100_intervals_hold_the_true_median_wherever_recordings_lie():
    intervals = [median(noisy(100, 0.005, seed, placement=0.01)) for seed in range(400)]
    covered = sum(interval.low <= 100 <= interval.high for interval in intervals)
    assert 368 <= covered <= 392


@pytest.mark.parametrize("clock", statistics.SPREAD)
def test_95_of_100_intervals_of_three_processes_hold_the_truth_where_processes_differ_as_expected(
    clock,
):
    """Student's t with two degrees of freedom would be twice as wide, and often useless."""
    draw = np.random.default_rng(0)
    spread = statistics.SPREAD[clock]
    found = [
        [Estimate(x, x, x) for x in np.exp(spread * draw.standard_normal(3))] for _ in range(400)
    ]
    with_it, without = (
        [statistics.of_processes(one, expected) for one in found] for expected in (spread, None)
    )
    for intervals in (with_it, without):
        assert 368 <= sum(one.low <= 1 <= one.high for one in intervals) <= 396
    widths = [
        np.quantile([math.log(one.high / one.low) for one in several], 0.9)
        for several in (with_it, without)
    ]
    assert 2 * widths[0] < widths[1]
    wide = [Estimate(x, x, x) for x in (1.0, 1.0 + 20 * spread, 1.0 + 40 * spread)]
    assert statistics.of_processes(wide, spread) == statistics.of_processes(wide), (
        "what was expected does not hold"
    )


def test_more_rounds_of_the_same_recordings_do_not_narrow_the_interval():
    """All rounds of a recording share the effect of its place in memory."""
    few = noisy(100, 0.0, placement=0.01)
    assert median(np.tile(few, 100)) == median(few)


def test_the_median_of_rounds_ignores_an_interrupted_one():
    samples = np.full((5, 4), 100.0)
    samples[:, 0] = 500
    assert median(samples).value == pytest.approx(100)


def test_the_ratio_is_the_baseline_over_the_other():
    baseline = noisy(200, 0.002, 1)
    other = noisy(100, 0.002, 2)
    interval = ratio(baseline, other)
    assert interval.low < 2 < interval.high
    assert interval.high - interval.low < 0.02
    assert interval.value == pytest.approx(median(baseline).value / median(other).value)


def test_a_drift_that_both_saw_does_not_widen_the_ratio():
    # the clock falls to half while sampling
    drift = np.linspace(1, 2, 5)[:, None] * np.ones((1, 8))
    both = ratio(200 * drift, 100 * drift)
    apart = ratio(200 * drift, 100 * drift[::-1])
    assert both == pytest.approx((2, 2, 2))
    assert apart.high - apart.low > 0.1


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.011, 1.2, "faster"),
        (0.8, 0.989, "slower"),
        (0.99, 1.01, "no difference"),
        (1.009, 1.2, "no difference"),
        (0.8, 0.991, "no difference"),
    ],
)
def test_a_difference_counts_if_the_whole_interval_is_beyond_the_smallest(low, high, expected):
    interval = Estimate(math.sqrt(low * high), low, high)
    assert interval.verdict(0.01) == expected
    opposite = {"faster": "slower", "slower": "faster"}
    assert interval.inverse.verdict(0.01) == opposite.get(expected, expected)


def test_without_a_smallest_difference_any_proven_one_counts():
    assert Estimate(1.0, 1.0001, 1.2).verdict(0.0) == "faster"
    assert Estimate(1.0, 0.8, 0.9999).verdict(0.0) == "slower"
    assert Estimate(1.0, 1.0, 1.2).verdict(0.0) == "no difference"


def test_settled_asks_every_pair():
    steady_one = noisy(100, 0.001, 1)
    shaky = noisy(100, 0.1, 2)
    assert settled([steady_one, noisy(300, 0.001, 3)], 0.01)
    assert not settled([steady_one, noisy(300, 0.001, 3), shaky], 0.01)


@pytest.mark.parametrize(
    ("log_ratio", "half_width", "expected"),
    [
        (0.0, 0.019, True),  # a difference of 2 % is ruled out
        (0.0, 0.021, False),
        (-0.009, 0.012, False),
        (0.03, 0.013, True),  # faster, with half a half width to spare
        (-0.03, 0.014, False),
        (0.7, 0.029, True),
        (0.7, 0.031, False),  # certainly faster, by an uncertain amount
        (0.015, 0.006, False),  # near the smallest difference
        (0.015, 0.0049, True),
    ],
)
def test_it_is_settled_what_the_verdict_is(log_ratio, half_width, expected):
    spread = half_width * math.sqrt(5) / statistics._T[3]
    logs = log_ratio + spread * np.array([-1, -1, 0, 1, 1])
    medians = 100 * np.exp(logs)[:, None]
    baseline = np.full((5, 1), 100.0)
    interval = ratio(medians, baseline)
    assert math.log(interval.high / interval.low) / 2 == pytest.approx(half_width)
    assert settled([medians, baseline], 0.01) is expected


def test_without_a_smallest_difference_nothing_noisy_is_settled():
    assert not settled([noisy(100, 0.001, 1), noisy(300, 0.001, 2)], 0.0)


def test_more_rounds_make_a_recording_steady():
    draw = np.random.default_rng(0)
    one, other = draw.normal(100, 3, (2, 128))
    assert not steady([one[:8], other[:8]], 0.005)
    assert steady([one, other], 0.005)


def test_a_single_implementation_is_compared_with_itself():
    draw = np.random.default_rng(0)
    assert not steady([draw.normal(100, 10, 8)], 0.01)
    assert steady([draw.normal(100, 1, 8)], 0.01)


def test_the_error_of_a_median_is_that_of_repeated_medians():
    draw = np.random.default_rng(0)
    medians = np.median(draw.normal(0, 2, (4000, 32)), axis=1)
    said = [median_error(draw.normal(0, 2, 32)) for _ in range(200)]
    assert np.mean(said) == pytest.approx(np.std(medians), rel=0.1)


def test_two_measurements_apart_add_the_squares_of_their_widths():
    found = quotient(Estimate(100, 100 / 1.03, 103), Estimate(50, 50 / 1.04, 52))
    width = math.hypot(math.log(1.03), math.log(1.04))
    assert found == pytest.approx((2, 2 * math.exp(-width), 2 * math.exp(width)))


def test_a_mean_of_ratios_is_geometric_with_the_mean_of_all_bounds():
    found = mean([Estimate(1, 0.5, 2), Estimate(4, 4, 4)])
    assert found == pytest.approx((2, 2 / math.sqrt(2), 2 * math.sqrt(2)))
