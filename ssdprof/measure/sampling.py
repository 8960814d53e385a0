"""Samples in turns, in several recordings, until ratios are known well enough or the time is over.
No GPU.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdprof.core.statistics import settled, steady

Recordings = list[NDArray[np.float64]]  # microseconds: (rounds) of each recording
Name = tuple[str, Any]  # the clock, "call" or "device", and the key of the run
Sampler = Callable[[], float]  # runs once, returns microseconds
Rounds = dict[Name, NDArray[np.float64]]  # microseconds, of one recording
SetUp = Callable[[np.random.Generator], Mapping[Name, Sampler]]


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How long to sample.

    smallest_difference: the smallest relative difference that counts.  Sampling ends when every
        ratio of two call times or of two device times is known well enough for a verdict.
    warmup_rounds: of each recording, for calls and for replays.
    min_rounds, max_rounds: of each recording; a noisy recording doubles its rounds, and later
        recordings start with that number.  Calls and replays have numbers of their own.
    seconds: of wall clock, for all samplers together.  A recording begins only if it is expected to
        end in time.  At least min_recordings of min_rounds are taken in any case.
    seed: of the order of turns and of the memory addresses of recordings.
    """

    smallest_difference: float = 0.01
    min_recordings: int = 5
    max_recordings: int = 20
    warmup_rounds: int = 1
    min_rounds: int = 4
    max_rounds: int = 128
    seconds: float = 1.5
    seed: int = 0


# a first look: the fewest rounds that give an interval, however long they take
FIRST_LOOK = SamplingPlan(
    min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf
)


def sample_in_turns(
    set_up: SetUp, plan: SamplingPlan, *, now: Callable[[], float] = time.monotonic
) -> dict[Name, Recordings]:
    """Sample in several recordings, each made by a call of `set_up`.

    set_up(generator): new samplers at new addresses; the generator is for random choices.  The
        samplers of the previous recording are freed before.  A name that it leaves out is dropped.

    A recording takes rounds of all samplers of one kind ("call"), then of the next ("device").
    Every round calls every sampler of its kind once, so element j of recording i is from the same
    round in all results of a kind.  The order within a round is random, and every second round
    reverses it, so that each sampler comes before and after each other one equally often.
    """
    generator = np.random.default_rng(plan.seed)
    began = now()
    taken: dict[Name, list[NDArray[np.float64]]] | None = None
    rounds: dict[str, int] = {}
    for count in range(1, plan.max_recordings + 1):
        recording_began = now()
        samplers = set_up(generator)
        kinds = sorted({kind for kind, _ in samplers})
        recorded: Rounds = {}
        for number, kind in enumerate(kinds, start=1):
            share = min(1.0, (count - 1 + number / len(kinds)) / plan.min_recordings)
            times = _record(
                {name: sampler for name, sampler in samplers.items() if name[0] == kind},
                replace(plan, min_rounds=rounds.get(kind, plan.min_rounds)),
                generator,
                until=began + share * plan.seconds,
                now=now,
            )
            rounds[kind] = len(next(iter(times.values())))
            recorded |= times
        del samplers  # frees the recording
        before = taken if taken is not None else {name: [] for name in recorded}
        taken = {name: [*before[name], times] for name, times in recorded.items()}
        if count < plan.min_recordings:
            continue
        another_ends = 2 * now() - recording_began  # assuming the duration of this one
        by_kind = [
            [recordings for name, recordings in taken.items() if name[0] == kind] for kind in kinds
        ]
        if another_ends > began + plan.seconds or all(
            settled(recordings, plan.smallest_difference) for recordings in by_kind
        ):
            break
    return dict(taken or {})


def _record(
    samplers: Mapping[Name, Sampler],
    plan: SamplingPlan,
    generator: np.random.Generator,
    *,
    until: float,
    now: Callable[[], float],
) -> Rounds:
    """The rounds of one recording: the fewest, doubled until they are steady, or the most, or it is
    time.
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
        recorded = {name: np.concatenate([before, more[name]]) for name, before in recorded.items()}
        rounds *= 2
    return recorded


def _turns(names: list[Name], generator: np.random.Generator) -> Iterator[list[Name]]:
    """The order of each round, without end."""
    while True:
        order = [names[index] for index in generator.permutation(len(names))]
        yield order
        yield order[::-1]


def _take(samplers: Mapping[Name, Sampler], turns: Iterator[list[Name]]) -> Rounds:
    taken: dict[Name, list[float]] = {name: [] for name in samplers}
    for order in turns:
        for name in order:
            taken[name].append(samplers[name]())
    return {name: np.array(values) for name, values in taken.items()}
