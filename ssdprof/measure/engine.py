"""Verifies calls, then times them, for replay, bench and tuning.

    attempt (attempt.py) -> verify -> time_verified, or device_times for a first look

Calls are the keys of all results.  Only calls that passed are timed, and their outputs are checked again afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ssdprof.measure.accuracy import Candidate, Comparison, compare
from ssdprof.measure.attempt import Attempt
from ssdprof.measure.bench import Bench, Recording
from ssdprof.measure.call import Call
from ssdprof.measure.faults import blaming, refuse_if_lost
from ssdprof.measure.fingerprint import fingerprint
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.statistics import Samples
from ssdprof.measure.timing import Sampled, Spoilt, time_in_turns
from ssdprof.operators.operator import Output

K = TypeVar("K")
Objection = Callable[[Comparison], str]


def objection(comparison: Comparison) -> str:
    """The reason why an output may not be timed; empty if it passed."""
    return "" if comparison.status == "passed" else comparison.reason or comparison.status


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A call that was attempted and, if it had an output, compared with the oracle.

    attempt: without its output.  comparison, bits (the output's fingerprint): None if there was no output.
    """

    call: Call
    attempt: Attempt
    comparison: Comparison | None = None
    bits: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The result of timing a call.

    sampled: None if it was not timed; then `untimed` is the reason, and the output stays valid.
    spoilt: an error after the first call; then there is no time.
    wavered: a later output had different bits, and also passed.
    """

    sampled: Sampled | None = None
    untimed: str = ""
    spoilt: Spoilt | None = None
    wavered: bool = False


def verify(
    attempts: Mapping[Call, Attempt],
    inputs: Any,
    *,
    baselines: Mapping[Call, Call] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> dict[Call, Verified]:
    """Compare every output with the oracle on `inputs`, and with the output of its baseline if it has one, in one pass.

    inputs: those of the calls, which may differ in their chunk size.
    """
    outputs = {call: tried.output for call, tried in attempts.items() if tried.output is not None}
    candidates = {
        call: Candidate(
            output=output,
            precision=call.precision,
            baseline=baseline if (baseline := (baselines or {}).get(call)) in outputs else None,
            name=call.label,
        )
        for call, output in outputs.items()
    }
    comparisons = compare(inputs, candidates, on_progress=on_progress) if candidates else {}
    return {
        call: Verified(
            call=call,
            attempt=replace(tried, output=None),
            comparison=comparisons.get(call),
            bits=fingerprint(*outputs[call]) if call in outputs else None,
        )
        for call, tried in attempts.items()
    }


def time_verified(
    verified: Sequence[Verified],
    bench: Bench,
    plan: SamplingPlan,
    *,
    objections: Mapping[Call, Objection] | None = None,
) -> dict[Call, Timed]:
    """Time calls that passed, in turns.

    objections: for some calls, functions that check an output whose bits have changed; the others use `objection`.
    Raises MissingCapabilityError if a fault in a call made the GPU unusable.
    """
    named = _named(verified)
    wavered: set[Call] = set()

    def check(name: str, output: Output) -> str:
        known = named[name]
        if damage := known.call.damage():
            return damage
        output = known.call.judged_output(output)
        if fingerprint(*output) == known.bits:
            return ""
        candidate = Candidate[str](output=output, precision=known.call.precision)
        why = (objections or {}).get(known.call, objection)(compare(known.call.inputs, {name: candidate})[name])
        if not why:
            wavered.add(known.call)
        return why

    session = time_in_turns({name: one.call.run for name, one in named.items()}, bench, plan, check=check)
    return {
        one.call: Timed(
            sampled=session.sampled.get(name),
            untimed=session.untimed.get(name, ""),
            spoilt=session.spoilt.get(name),
            wavered=one.call in wavered,
        )
        for name, one in named.items()
    }


def device_times(
    calls: Mapping[K, Sequence[Call]],
    bench: Bench,
    plan: SamplingPlan,
    *,
    on_untimed: Callable[[K, Exception], object] = lambda _key, _error: None,
) -> dict[K, Samples]:
    """Device times in turns, in microseconds; for each key the geometric mean over its calls.

    Keys with a call that cannot be recorded are left out, and passed to `on_untimed`.
    """
    numbered = {str(number): key for number, key in enumerate(calls)}
    untimed: set[str] = set()

    def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
        bench.relocate(generator)
        samplers: dict[Name, Sampler] = {}
        for number, key in numbered.items():
            if number in untimed:
                continue
            label = calls[key][0].label
            try:
                kept = [blaming(bench.device, call.label, partial(_recorded, call, bench)) for call in calls[key]]
            except Exception as error:  # the compiler's or CUDA's, of any kind: this key is not timed
                refuse_if_lost(bench.device, label, error)
                untimed.add(number)
                on_untimed(key, error)
            else:
                samplers["device", number] = partial(blaming, bench.device, label, partial(_mean_us, bench, kept))
        return samplers

    return {numbered[number]: samples for (_, number), samples in sample_in_turns(set_up, plan).items()}


def _recorded(call: Call, bench: Bench) -> Recording:
    """The call as a recording without its output, whose memory the next recording reuses."""

    def run() -> Output:
        out, final_states = call.run()
        return out.new_empty(0), final_states.new_empty(0)

    return bench.record(run)


def _mean_us(bench: Bench, recordings: Sequence[Recording]) -> float:
    return math.prod(bench.device_us(recording) for recording in recordings) ** (1 / len(recordings))


def _named(verified: Sequence[Verified]) -> dict[str, Verified]:
    """Calls by label, for messages; calls with equal labels also get a number."""
    named: dict[str, Verified] = {}
    for one in verified:
        label, number = one.call.label, 2
        while label in named:
            label, number = f"{one.call.label} ({number})", number + 1
        named[label] = one
    return named
