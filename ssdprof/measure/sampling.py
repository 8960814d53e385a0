"""Taking turns: A B A B, until the medians are known well enough or the time is up.  No GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ssdprof.measure.statistics import Samples, settled

Sampler = Callable[[], float]  # runs once, returns microseconds


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How long to sample.  seconds: of wall clock, for all samplers together, after the warm-up."""

    warmup_rounds: int = 5
    min_rounds: int = 20
    max_rounds: int = 640
    seconds: float = 3.0
    half_width: float = 0.005  # stop when every median is known to half a percent

    def __post_init__(self) -> None:
        if not 2 <= self.min_rounds <= self.max_rounds:
            raise ValueError(f"2 <= min_rounds <= max_rounds does not hold: {self.min_rounds}, {self.max_rounds}")


def sample_in_turns(
    samplers: Mapping[str, Sampler], plan: SamplingPlan, *, now: Callable[[], float] = time.monotonic
) -> dict[str, Samples]:
    """Every round calls every sampler once, in order; element i of each result is from round i.

    Warm-up rounds are thrown away.  The medians are looked at when the number of rounds has doubled, so that looking
    costs little and cannot pick a lucky moment.  After min_rounds the time budget ends the sampling at any round.
    """
    for _ in range(plan.warmup_rounds):
        for sampler in samplers.values():
            sampler()
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    deadline = now() + plan.seconds
    look_at = plan.min_rounds
    for rounds in range(1, plan.max_rounds + 1):
        for name, sampler in samplers.items():
            taken[name].append(sampler())
        if rounds < plan.min_rounds:
            continue
        if now() >= deadline:
            break
        if rounds == look_at:
            look_at *= 2
            if settled(_arrays(taken), plan.half_width):
                break
    return _arrays(taken)


def _arrays(taken: Mapping[str, list[float]]) -> dict[str, Samples]:
    return {name: np.array(values) for name, values in taken.items()}
