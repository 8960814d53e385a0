"""One cell: verify every contender on the same inputs, then time the correct ones in turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssdprof.bench.contenders import Contender
from ssdprof.bench.judge import Judged, objection_to
from ssdprof.bench.schema import BenchCase, ChunkTrial, Kernel
from ssdprof.measure.bench import Bench
from ssdprof.measure.engine import Timed, device_times, time_verified
from ssdprof.measure.occupancy import Limits, occupancy
from ssdprof.measure.roofline import roofline
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.statistics import median_us
from ssdprof.measure.timing import Sampled
from ssdprof.schema import Ceilings, Launch, Speedup

TRIALS = SamplingPlan(min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3, seconds=math.inf)


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """The tools that time a cell.  limits: None if those of the GPU are unknown."""

    bench: Bench
    sampling: SamplingPlan
    ceilings: Ceilings
    limits: Limits | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A contender's fastest entry that passed; without one, its first entry, which says why."""

    contender: Contender
    judged: Judged
    trials: tuple[ChunkTrial, ...]


def time_cell(
    inputs: Any, contenders: Sequence[Contender], judged: Sequence[Judged], watch: Stopwatch
) -> tuple[BenchCase, ...]:
    """One case for each contender, in the same order.  judged: all their entries, run on `inputs`."""
    choices = [_choose(contender, judged, watch.bench) for contender in contenders]
    passed = [choice for choice in choices if choice.judged.verdict.status == "passed"]
    timed = time_verified(
        [choice.judged.verified for choice in passed],
        watch.bench,
        watch.sampling,
        objections={choice.judged.entry.call: objection_to(choice.judged.entry) for choice in passed},
    )
    sampled = {
        choice.contender: found for choice in passed if (found := timed[choice.judged.entry.call].sampled) is not None
    }
    return tuple(_timed_case(choice, timed.get(choice.judged.entry.call), sampled, inputs, watch) for choice in choices)


def _timed_case(
    choice: Choice, timed: Timed | None, sampled: Mapping[Contender, Sampled], inputs: Any, watch: Stopwatch
) -> BenchCase:
    """timed: None for a choice that did not pass.  sampled: every contender that was sampled."""
    case = _case(choice, watch.limits)
    if timed is None:
        return case
    if timed.spoilt:
        return _updated(case, status=timed.spoilt.status, reason=timed.spoilt.reason)
    if timed.sampled is None:
        return _updated(case, reason=timed.untimed)
    timing, smallest = timed.sampled.timing(), watch.sampling.smallest_difference
    return _updated(
        case,
        timing=timing,
        speedups=_speedups(choice.contender, timed.sampled, _fastest(sampled), smallest),
        over_exact=_over_exact(choice.contender, sampled, smallest),
        roofline=roofline(inputs, watch.ceilings, timing.device_median_us),
    )


def _choose(contender: Contender, judged: Sequence[Judged], bench: Bench) -> Choice:
    """The fastest of the contender's entries.  Several entries are compared by a few replays in turns."""
    own = [candidate for candidate in judged if candidate.entry.contender is contender]
    passed = [candidate for candidate in own if candidate.verdict.status == "passed"]
    calls = {candidate.entry: [candidate.entry.call] for candidate in passed}
    samples = device_times(calls, bench, TRIALS) if len(passed) > 1 else {}
    times = {entry: median_us(values) for entry, values in samples.items()}
    trials = tuple(
        ChunkTrial(
            chunk_size=candidate.entry.chunk_size,
            status=candidate.verdict.status,
            reason=candidate.verdict.reason,
            device_us=times.get(candidate.entry),
            first_call=candidate.first_call,
        )
        for candidate in own
        if candidate.entry.chunk_size is not None
    )
    best = min(passed, key=lambda candidate: times.get(candidate.entry, math.inf), default=own[0])
    return Choice(contender=contender, judged=best, trials=trials)


def _fastest(sampled: Mapping[Contender, Sampled]) -> dict[str, Sampled]:
    """The fastest case of each implementation that was timed, by device time."""
    fastest: dict[str, Sampled] = {}
    for contender, own in sorted(sampled.items(), key=lambda item: median_us(item[1].device)):
        fastest.setdefault(contender.name, own)
    return fastest


def _speedups(
    contender: Contender, sampled: Sampled, fastest: Mapping[str, Sampled], smallest_difference: float
) -> tuple[Speedup, ...]:
    """Speedups over each other implementation, for ssdprof's own cases only."""
    if not contender.ours:
        return ()
    return tuple(
        sampled.speedup(other, name, smallest_difference) for name, other in fastest.items() if name != contender.name
    )


def _over_exact(
    contender: Contender, sampled: Mapping[Contender, Sampled], smallest_difference: float
) -> Speedup | None:
    """The speedup of relaxed over exact intermediates of the same implementation and states, if both were timed."""
    own = contender.precision
    exact = own.model_copy(update={"intermediates": "exact"})
    for other, times in sampled.items():
        if own != exact and (other.name, other.precision) == (contender.name, exact):
            return sampled[contender].speedup(times, f"{other.name} {exact}", smallest_difference)
    return None


def _case(choice: Choice, limits: Limits | None) -> BenchCase:
    judged = choice.judged
    return BenchCase(
        implementation=choice.contender.name,
        variant=judged.verified.attempt.variant,
        precision=choice.contender.precision,
        chunk_size=judged.entry.chunk_size,
        status=judged.verdict.status,
        reason=judged.verdict.reason,
        sloppy=judged.verdict.sloppy,
        plan=judged.verified.attempt.why_this_plan,
        trials=choice.trials,
        error=judged.verdict.error,
        accuracy=judged.verdict.accuracy,
        memory=judged.verified.attempt.memory,
        first_call=judged.first_call,
        kernels=tuple(_kernel(launch, limits) for launch in judged.verified.attempt.launches),
    )


def _kernel(launch: Launch, limits: Limits | None) -> Kernel:
    return Kernel(launch=launch, occupancy=None if limits is None else occupancy(launch, limits))


def _updated(case: BenchCase, **fields: object) -> BenchCase:
    return BenchCase.model_validate(dict(case) | fields)
