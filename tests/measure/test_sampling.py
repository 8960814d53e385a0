"""The order of samples, the content of a recording, and the end of sampling."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import numpy as np
import pytest

from ssdprof.core.case import Samples
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns

A = ("device", "a")
B = ("device", "b")
Samplers = dict[Name, Sampler]


class Clock:
    """Time passes only while something is sampled."""

    def __init__(self):
        self.seconds = 0.0
        self.calls: list[Name] = []
        self.recordings = 0

    def now(self) -> float:
        return self.seconds

    def set_up(self, **microseconds: list[float]) -> Callable[[np.random.Generator], Samplers]:
        """A sampler per name that returns the given times in a cycle."""
        values = {name: cycle(times) for name, times in microseconds.items()}

        def sample(name: str) -> float:
            self.calls.append(("device", name))
            value = next(values[name])
            self.seconds += value / 1e6
            return value

        def record(_generator: np.random.Generator) -> Samplers:
            self.recordings += 1
            return {("device", name): partial(sample, name) for name in values}

        return record


def plan(**fields: float) -> SamplingPlan:
    return SamplingPlan(**({"min_recordings": 3, "warmup_rounds": 0, "min_rounds": 4} | fields))


def shape(samples: Samples) -> list[int]:
    """The number of rounds of each recording."""
    return [len(rounds) for rounds in samples]


def test_every_round_has_every_sampler_once_and_the_warm_up_is_thrown_away():
    clock = Clock()
    samples = sample_in_turns(
        clock.set_up(a=[9, 1, 1, 1, 1], b=[10]), plan(warmup_rounds=1), now=clock.now
    )
    rounds = [set(clock.calls[first : first + 2]) for first in range(0, len(clock.calls), 2)]
    assert rounds == [{A, B}] * 15
    assert [rounds.tolist() for rounds in samples[A]] == [[1] * 4] * 3
    assert shape(samples[B]) == [4, 4, 4]


def test_whoever_comes_first_comes_last_in_the_next_round():
    clock = Clock()
    sample_in_turns(clock.set_up(a=[1], b=[1], c=[1]), plan(), now=clock.now)
    rounds = [clock.calls[first : first + 3] for first in range(0, len(clock.calls), 3)]
    assert all(rounds[number + 1] == rounds[number][::-1] for number in range(0, 12, 2))
    assert len({tuple(order) for order in rounds}) > 2


DISAGREEING = [value for value in (100.0, 104, 98, 103, 99, 105) for _ in range(4)]


@pytest.mark.parametrize(
    ("a", "b", "given", "recordings"),
    [
        ([100.0], [50.0], SamplingPlan(), 5),  # steady: the fewest
        (DISAGREEING, [100.0], plan(max_recordings=12), 12),
        ([1.0, 2.0], [1.0], plan(seconds=0), 3),  # the fewest, although no time is left
    ],
)
def test_recordings_that_disagree_are_followed_by_more(
    a: list[float], b: list[float], given: SamplingPlan, recordings
):
    clock = Clock()
    assert (
        shape(sample_in_turns(clock.set_up(a=a, b=b), given, now=clock.now)[A]) == [4] * recordings
    )


def test_noisy_rounds_make_recordings_longer_and_not_more():
    clock = Clock()
    times = (100 * (1 + 0.06 * np.random.default_rng(0).standard_normal(10_000))).tolist()
    samples = sample_in_turns(
        clock.set_up(a=times, b=[50.0]), plan(max_recordings=20), now=clock.now
    )
    assert len(samples[A]) < 10
    assert 32 <= max(shape(samples[A])) <= 128
    assert shape(samples[A]) == shape(samples[B]) == sorted(shape(samples[A]))


def by_clock(call: Sampler) -> Samplers:
    """Two samplers of calls, and two of steady replays."""
    return {("call", key): call for key in "ab"} | dict.fromkeys((A, B), lambda: 50.0)


def test_noisy_calls_do_not_make_more_replays():
    draw = np.random.default_rng(0)
    noisy = by_clock(lambda: float(draw.normal(100, 6)))
    samples = sample_in_turns(lambda _: noisy, plan(seconds=float("inf")))
    assert max(shape(samples["call", "a"])) >= 32
    assert set(shape(samples[A])) == {4}


def test_rounds_that_drift_together_are_not_noisy():
    """A change of the clock during a recording changes both times, but not their ratio."""
    clocks = iter(np.repeat(np.random.default_rng(0).normal(100, 10, 1000), 2))

    def set_up(_generator: np.random.Generator) -> Samplers:
        return {name: lambda: float(next(clocks)) for name in (A, B)}

    assert shape(sample_in_turns(set_up, plan())[A]) == [4, 4, 4]


def test_call_times_are_not_compared_with_device_times():
    """Each is steady relative to times of its own kind, while the two kinds drift apart."""
    drift = iter(np.linspace(1, 2, 1000))

    def set_up(_generator: np.random.Generator) -> Samplers:
        now = float(next(drift))
        return by_clock(lambda: now)

    samples = sample_in_turns(set_up, plan())
    assert shape(samples["call", "a"]) == [4, 4, 4]


def test_the_time_budget_ends_the_sampling():
    clock = Clock()
    shaky = [value for value in (20_000, 60_000, 35_000) for _ in range(4)]
    samples = sample_in_turns(clock.set_up(a=shaky, b=[1000]), plan(seconds=1.0), now=clock.now)
    assert 3 < len(samples[A]) == len(samples[B]) < 20
    assert 0.7 < clock.seconds <= 1.0


def test_what_a_later_recording_leaves_out_is_given_up():
    clock = Clock()
    both = clock.set_up(a=[1], b=[1])
    alone = clock.set_up(a=[1])

    def set_up(generator: np.random.Generator) -> Samplers:
        return both(generator) if clock.recordings < 2 else alone(generator)

    samples = sample_in_turns(set_up, plan(), now=clock.now)
    assert list(samples) == [A]
    assert shape(samples[A]) == [4, 4, 4]


def test_nothing_to_sample_is_no_error():
    assert sample_in_turns(lambda _: {}, SamplingPlan()) == {}
