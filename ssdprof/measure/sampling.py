"""Taking turns, in several recordings, until ratios are known well enough or the time is up.  No GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ssdprof.measure.statistics import MAX_RECORDINGS, Samples, median_error, settled

Name = tuple[str, str]  # what is timed, "call" or "device", and of which run
Sampler = Callable[[], float]  # runs once, returns microseconds
SetUp = Callable[[np.random.Generator], Mapping[Name, Sampler]]


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How long to sample.

    smallest_difference: the relative difference that counts.  Sampling ends when every ratio of two call times or of
        two device times is known to within it.
    warmup_rounds: of each recording.
    min_rounds, max_rounds: of each recording; a noisy one doubles them, and those after it take as many.
    seconds: of wall clock, for all samplers together.  At least min_recordings of min_rounds are taken in any case.
    seed: of the order of turns, and of where recordings lie.
    """

    smallest_difference: float = 0.01
    min_recordings: int = 5
    max_recordings: int = 20
    warmup_rounds: int = 1
    min_rounds: int = 4
    max_rounds: int = 128
    seconds: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.min_recordings <= self.max_recordings <= MAX_RECORDINGS:
            raise ValueError(
                f"2 <= min_recordings <= max_recordings <= {MAX_RECORDINGS} does not hold: "
                f"{self.min_recordings}, {self.max_recordings}"
            )
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(f"1 <= min_rounds <= max_rounds does not hold: {self.min_rounds}, {self.max_rounds}")
        if self.smallest_difference < 0:
            raise ValueError(f"smallest_difference is negative: {self.smallest_difference}")


def sample_in_turns(
    set_up: SetUp, plan: SamplingPlan, *, now: Callable[[], float] = time.monotonic
) -> dict[Name, Samples]:
    """Sample in several recordings, each made by a call of `set_up`.

    set_up(generator): every sampler anew, in a place of its own; the generator is for random choices.  The samplers of
        the recording before are gone by then.  A name that it leaves out is given up.

    Every round calls every sampler once, so element j of recording i is from the same round in every result.  The order
    within a round is random, and every other round reverses the order of the one before, so that each sampler comes
    before and after each other one equally often.  What ends the sampling depends on the widths of intervals and not
    on where they lie.
    """
    generator = np.random.default_rng(plan.seed)
    began = now()
    taken: dict[Name, list[NDArray[np.float64]]] | None = None
    rounds = plan.min_rounds
    for count in range(1, plan.max_recordings + 1):
        samplers = set_up(generator)
        turns = _turns(list(samplers), generator)
        _take(samplers, islice(turns, plan.warmup_rounds))
        recorded = _take(samplers, islice(turns, rounds))
        share = began + plan.seconds * count / plan.min_recordings
        while 2 * rounds <= plan.max_rounds and now() < share and _noisy(recorded, plan.smallest_difference / 2):
            more = _take(samplers, islice(turns, rounds))
            recorded = {name: np.concatenate([own, more[name]]) for name, own in recorded.items()}
            rounds *= 2
        del samplers  # and with them the recording
        before = taken if taken is not None else {name: [] for name in recorded}
        taken = {name: [*before[name], own] for name, own in recorded.items()}
        if count < plan.min_recordings:
            continue
        if now() >= began + plan.seconds or _settled(taken, plan.smallest_difference):
            break
    return dict(taken or {})


def _turns(names: list[Name], generator: np.random.Generator) -> Iterator[list[Name]]:
    """The order of each round, without end."""
    while True:
        order = [names[place] for place in generator.permutation(len(names))]
        yield order
        yield order[::-1]


def _take(samplers: Mapping[Name, Sampler], turns: Iterator[list[Name]]) -> dict[Name, NDArray[np.float64]]:
    taken: dict[Name, list[float]] = {name: [] for name in samplers}
    for order in turns:
        for name in order:
            taken[name].append(samplers[name]())
    return {name: np.array(values) for name, values in taken.items()}


def _noisy(recorded: Mapping[Name, NDArray[np.float64]], most: float) -> bool:
    return any(median_error(rounds) > most for rounds in recorded.values())


def _settled(taken: Mapping[Name, Samples], half_width: float) -> bool:
    kinds = {kind for kind, _ in taken}
    return all(settled([own for name, own in taken.items() if name[0] == kind], half_width) for kind in kinds)
