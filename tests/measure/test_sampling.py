"""Whose turn it is, and when it ends."""

from collections.abc import Callable
from itertools import cycle

import pytest

from ssdprof.measure.sampling import SamplingPlan, sample_in_turns


class Clock:
    """Time passes only while something is sampled."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: list[str] = []

    def now(self) -> float:
        return self.seconds

    def sampler(self, name: str, *microseconds: float) -> Callable[[], float]:
        values = cycle(microseconds)

        def sample() -> float:
            self.calls.append(name)
            value = next(values)
            self.seconds += value / 1e6
            return value

        return sample


def test_samplers_take_turns_and_the_warm_up_is_thrown_away() -> None:
    clock = Clock()
    plan = SamplingPlan(warmup_rounds=2, min_rounds=4, max_rounds=4)
    samples = sample_in_turns({"a": clock.sampler("a", 1, 2), "b": clock.sampler("b", 10)}, plan, now=clock.now)
    assert clock.calls == ["a", "b"] * 6
    assert samples["a"].tolist() == [1, 2, 1, 2]
    assert samples["b"].tolist() == [10] * 4


def test_steady_samples_end_after_the_fewest_rounds() -> None:
    clock = Clock()
    samples = sample_in_turns({"a": clock.sampler("a", 100)}, SamplingPlan(min_rounds=20), now=clock.now)
    assert len(samples["a"]) == 20


def test_shaky_samples_go_on_until_the_time_is_up() -> None:
    clock = Clock()
    plan = SamplingPlan(warmup_rounds=0, min_rounds=10, seconds=1.0)
    shaky = clock.sampler("a", 20_000, 60_000, 35_000)
    samples = sample_in_turns({"a": shaky, "b": clock.sampler("b", 1000)}, plan, now=clock.now)
    assert 10 < len(samples["a"]) == len(samples["b"]) < plan.max_rounds
    assert 1.0 <= clock.seconds < 1.1


def test_the_time_budget_never_cuts_below_the_fewest_rounds() -> None:
    clock = Clock()
    plan = SamplingPlan(min_rounds=20, seconds=0.0)
    assert len(sample_in_turns({"a": clock.sampler("a", 1, 2)}, plan, now=clock.now)["a"]) == 20


def test_shaky_samples_end_at_the_most_rounds() -> None:
    clock = Clock()
    plan = SamplingPlan(min_rounds=10, max_rounds=50, seconds=1e9)
    assert len(sample_in_turns({"a": clock.sampler("a", 1, 9)}, plan, now=clock.now)["a"]) == 50


def test_a_plan_needs_two_rounds() -> None:
    with pytest.raises(ValueError, match="min_rounds"):
        SamplingPlan(min_rounds=1)
    with pytest.raises(ValueError, match="min_rounds"):
        SamplingPlan(min_rounds=20, max_rounds=10)
