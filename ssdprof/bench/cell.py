"""One cell: every contender on the same inputs, right first, then how fast, all in turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ssdprof.bench.contenders import Contender
from ssdprof.bench.judge import Judged, still_right
from ssdprof.bench.schema import BenchCase, Kernel, Trial
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.faults import blaming
from ssdprof.measure.occupancy import Limits, occupancy
from ssdprof.measure.roofline import roofline
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.statistics import median_us
from ssdprof.measure.timing import Bench, CaptureError, Sampled, time_in_turns
from ssdprof.schema import Ceilings, Launch, Speedup

TRIALS = SamplingPlan(min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3, seconds=math.inf)


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """What times a cell.  limits: None where the GPU's are not known."""

    bench: Bench
    sampling: SamplingPlan
    ceilings: Ceilings
    limits: Limits | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A contender's fastest entry that passed; without one, its first entry, which says why."""

    contender: Contender
    judged: Judged
    trials: tuple[Trial, ...]


def time_cell(
    inputs: SSDInputs, contenders: Sequence[Contender], judged: Sequence[Judged], watch: Stopwatch
) -> tuple[BenchCase, ...]:
    """A case for each contender, in their order.  judged: every entry of theirs, on `inputs`."""
    choices = [_choose(contender, judged, watch.bench) for contender in contenders]
    passed = {choice.judged.entry.label: choice for choice in choices if choice.judged.verdict.status == "passed"}

    def check(label: str, output: SSDOutput) -> str:
        return still_right(passed[label].judged, output)

    runs = {label: choice.judged.entry.run for label, choice in passed.items()}
    session = time_in_turns(runs, watch.bench, watch.sampling, check=check)
    fastest = _fastest({label: choice.contender for label, choice in passed.items()}, session.sampled)
    cases = []
    for choice in choices:
        label = choice.judged.entry.label
        case = _case(choice, watch.limits)
        if label in session.changed:
            case = _updated(case, status="inaccurate", reason=f"after it was timed: {session.changed[label]}")
        elif label in session.untimed:
            case = _updated(case, reason=session.untimed[label])
        elif label in session.sampled:
            timing = session.sampled[label].timing()
            case = _updated(
                case,
                timing=timing,
                speedups=_speedups(
                    choice.contender, session.sampled[label], fastest, watch.sampling.smallest_difference
                ),
                roofline=roofline(inputs, watch.ceilings, timing.device_median_us),
            )
        cases.append(case)
    return tuple(cases)


def _choose(contender: Contender, judged: Sequence[Judged], bench: Bench) -> Choice:
    """The fastest of the contender's entries, by a few replays in turns, if there is a choice."""
    own = [candidate for candidate in judged if candidate.entry.contender is contender]
    passed = [candidate for candidate in own if candidate.verdict.status == "passed"]
    times = _trial_times(passed, bench) if len(passed) > 1 else {}
    trials = tuple(
        Trial(
            chunk_size=candidate.entry.chunk_size,
            status=candidate.verdict.status,
            reason=candidate.verdict.reason,
            device_us=times.get(candidate.entry.label),
            first_call=candidate.first_call,
        )
        for candidate in own
        if candidate.entry.chunk_size is not None
    )
    best = min(passed, key=lambda candidate: times.get(candidate.entry.label, math.inf), default=own[0])
    return Choice(contender=contender, judged=best, trials=trials)


def _trial_times(candidates: Sequence[Judged], bench: Bench) -> dict[str, float]:
    """Device time of each that can be captured; `time_in_turns` says why one cannot."""

    def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
        bench.relocate(generator)
        samplers: dict[Name, Sampler] = {}
        for candidate in candidates:
            label = candidate.entry.label
            try:
                recording = blaming(bench.device, label, partial(bench.record, candidate.entry.run))
            except (CaptureError, torch.OutOfMemoryError):
                continue
            samplers["device", label] = partial(blaming, bench.device, label, partial(bench.device_us, recording))
        return samplers

    return {label: median_us(samples) for (_, label), samples in sample_in_turns(set_up, TRIALS).items()}


def _fastest(contenders: Mapping[str, Contender], sampled: Mapping[str, Sampled]) -> dict[str, Sampled]:
    """The fastest case of each implementation that was timed, by device time."""
    fastest: dict[str, Sampled] = {}
    for label, own in sorted(sampled.items(), key=lambda item: median_us(item[1].device)):
        fastest.setdefault(contenders[label].name, own)
    return fastest


def _speedups(
    contender: Contender, sampled: Sampled, fastest: Mapping[str, Sampled], smallest_difference: float
) -> tuple[Speedup, ...]:
    """Over each other implementation; only ours are compared."""
    if not contender.ours:
        return ()
    return tuple(
        sampled.speedup(other, name, smallest_difference) for name, other in fastest.items() if name != contender.name
    )


def _case(choice: Choice, limits: Limits | None) -> BenchCase:
    judged = choice.judged
    return BenchCase(
        implementation=choice.contender.name,
        variant=judged.variant,
        precision=choice.contender.precision,
        chunk_size=judged.entry.chunk_size,
        status=judged.verdict.status,
        reason=judged.verdict.reason,
        sloppy=judged.verdict.sloppy,
        plan=judged.plan,
        trials=choice.trials,
        error=judged.verdict.error,
        memory=judged.memory,
        first_call=judged.first_call,
        kernels=tuple(_kernel(launch, limits) for launch in judged.launches),
    )


def _kernel(launch: Launch, limits: Limits | None) -> Kernel:
    return Kernel(launch=launch, occupancy=None if limits is None else occupancy(launch, limits))


def _updated(case: BenchCase, **fields: object) -> BenchCase:
    return BenchCase.model_validate(dict(case) | fields)
