"""Takes samples of several runs in turns, until the ratios of their times are known well enough or
the time is over.  Needs no GPU.

A round calls every run once.  A recording is several rounds with the same memory addresses.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdprof.core.base import grouped
from ssdprof.core.statistics import settled, steady

Recordings = list[NDArray[np.float64]]  # for each recording its samples in microseconds, (rounds)
Name = tuple[str, Any]  # the clock, "call" or "device", and the key of the run
Sampler = Callable[[], float]  # runs once, and returns microseconds
Rounds = dict[Name, NDArray[np.float64]]  # the samples of one recording in microseconds, (rounds)
SetUp = Callable[[np.random.Generator], Mapping[Name, Sampler]]


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How long to sample.

    smallest_difference: the smallest relative difference that counts.  Sampling ends when every
        ratio of two call times or of two device times is known well enough for a verdict.
    min_recordings, max_recordings: numbers of recordings.
    warmup_rounds: rounds at the start of each recording whose samples are dropped.
    min_rounds, max_rounds: numbers of rounds of a recording.  A noisy recording doubles its rounds,
        and later recordings start with that number; call and device times each have their own.
    seconds: wall-clock time for all samplers together.  At least `min_recordings` of `min_rounds`
        are taken; another recording begins only if it is expected to end in time.
    seed: seed of the order of turns and of the memory addresses of recordings.
    """

    smallest_difference: float = 0.01
    min_recordings: int = 5
    max_recordings: int = 20
    warmup_rounds: int = 1
    min_rounds: int = 4
    max_rounds: int = 128
    seconds: float = 1.5
    seed: int = 0


# few rounds, however long they take: a first comparison, which others follow where it matters
FIRST_LOOK = SamplingPlan(
    min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf
)


def sample_in_turns(
    set_up: SetUp, plan: SamplingPlan, *, now: Callable[[], float] = time.monotonic
) -> dict[Name, Recordings]:
    """Sample in several recordings, each made by a call of `set_up`.

    set_up(generator): new samplers at new addresses; the generator is for random choices.  The
        samplers of the previous recording are freed before.  A name that it leaves out is dropped.

    A recording takes rounds of all samplers of one clock ("call"), then of the next ("device").
    Every round calls every sampler of its clock once, so element j of recording i is from the same
    round in all results of a clock.  The order within a round is random, and every second round,
    warm-up included, reverses it, so that each sampler comes before each other one about as often
    as after it.
    """
    generator = np.random.default_rng(plan.seed)
    began = now()
    taken: dict[Name, Recordings] = {}
    rounds: dict[str, int] = {}  # of the latest recording, by clock
    for count in range(1, plan.max_recordings + 1):
        recording_began = now()
        samplers = set_up(generator)
        clocks = sorted({clock for clock, _ in samplers})
        recorded: Rounds = {}
        for number, clock in enumerate(clocks, start=1):
            # additional rounds may use the time up to this share of `plan.seconds`
            share = min(1.0, (count - 1 + number / len(clocks)) / plan.min_recordings)
            times = _record(
                {name: sampler for name, sampler in samplers.items() if name[0] == clock},
                replace(plan, min_rounds=rounds.get(clock, plan.min_rounds)),
                generator,
                until=began + share * plan.seconds,
                now=now,
            )
            rounds[clock] = len(next(iter(times.values())))
            recorded |= times
        del samplers  # frees their memory before the next recording
        taken = {name: [*taken.get(name, ()), times] for name, times in recorded.items()}
        if count < plan.min_recordings:
            continue
        next_end = 2 * now() - recording_began  # if the next recording takes as long as this one
        by_clock = grouped(taken, lambda name: name[0]).values()
        is_settled = all(
            settled([taken[name] for name in names], plan.smallest_difference) for names in by_clock
        )
        if is_settled or next_end > began + plan.seconds:
            break
    return taken


def _record(
    samplers: Mapping[Name, Sampler],
    plan: SamplingPlan,
    generator: np.random.Generator,
    *,
    until: float,
    now: Callable[[], float],
) -> Rounds:
    """The samples of one recording.

    It begins with `min_rounds` rounds, and doubles them until the times are steady, the next
    doubling would exceed `max_rounds`, or the time `until` has come.
    """
    turns = _turns(list(samplers), generator)
    _take(samplers, islice(turns, plan.warmup_rounds))
    rounds = plan.min_rounds
    recorded = _take(samplers, islice(turns, rounds))
    while (
        2 * rounds <= plan.max_rounds
        and now() < until
        and not steady(recorded.values(), plan.smallest_difference)
    ):
        more = _take(samplers, islice(turns, rounds))
        recorded = {name: np.concatenate([times, more[name]]) for name, times in recorded.items()}
        rounds *= 2
    return recorded


def _turns(names: list[Name], generator: np.random.Generator) -> Iterator[list[Name]]:
    """The order of the samplers in each round: a random one, its reverse, and so on without end."""
    while True:
        order = [names[index] for index in generator.permutation(len(names))]
        yield order
        yield order[::-1]


def _take(samplers: Mapping[Name, Sampler], turns: Iterator[list[Name]]) -> Rounds:
    """Run the rounds with the orders in `turns`.  Returns the samples, (rounds) of each sampler."""
    taken: dict[Name, list[float]] = {name: [] for name in samplers}
    for order in turns:
        for name in order:
            taken[name].append(samplers[name]())
    return {name: np.array(values) for name, values in taken.items()}
