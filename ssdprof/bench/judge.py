"""Is an entry's output right?  Nothing is timed before it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssdprof.bench.contenders import Entry, widened
from ssdprof.bench.first_call import Patience, TimeIsUp, first_call
from ssdprof.bench.schema import Error, FirstCall
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.accuracy import Candidate, Comparison, compare
from ssdprof.measure.attempt import Attempt, attempt_call
from ssdprof.measure.fingerprint import fingerprint
from ssdprof.measure.memory import outputs_that_fit
from ssdprof.schema import Launch, Memory, Status

SLOPPY = 0.01  # RMS error of another library that is outside the budget, and still computes the same thing


class BudgetSpent(Exception):
    """The bench's time was up in a first call.  The message says in whose."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the comparison with the oracle said.  sloppy: see `schema.BenchCase`."""

    status: Status
    reason: str = ""
    sloppy: str = ""
    error: Error | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An entry that was run.  bits: its output's fingerprint, None if it has none.  first_call: None if it broke."""

    entry: Entry
    verdict: Verdict
    variant: str
    plan: str
    memory: Memory | None
    launches: tuple[Launch, ...]
    bits: tuple[int, ...] | None
    first_call: FirstCall | None


def judge(
    entries: Sequence[Entry],
    on_progress: Callable[[int], None] = lambda _: None,
    patience: Patience = Patience(),  # noqa: B008
) -> list[Judged]:
    """Run every entry and compare it with the oracle; the entries' inputs differ in their chunk size only.

    One pass over the oracle serves as many outputs as fit into memory together.  The chunk size of the comparison is
    the smallest one: more chunks round 16-bit states more often, and no entry shall be held to fewer.

    Raises BudgetSpent.
    """
    inputs = min((entry.inputs for entry in entries), key=lambda inputs: inputs.chunk_size)
    capacity = max(1, outputs_that_fit(inputs))
    judged: list[Judged] = []
    for first in range(0, len(entries), capacity):
        judged += _judge_together(entries[first : first + capacity], inputs, on_progress, patience)
    return judged


def run_unjudged(
    entries: Sequence[Entry],
    verdicts: dict[str, Verdict],
    patience: Patience = Patience(),  # noqa: B008
) -> list[Judged]:
    """Run every entry; what is right was found on other inputs.  An output that is not finite is wrong anyway.

    Raises BudgetSpent.
    """
    judged = []
    for entry in entries:
        tried, first = _attempt(entry, patience)
        verdict = verdicts[entry.label]
        if tried.output is None:
            verdict = Verdict(status=tried.status, reason=tried.reason)
        elif not all(bool(tensor.isfinite().all()) for tensor in tried.output):
            verdict = Verdict(status="nonfinite", reason="some element is not finite")
        judged.append(_judged(entry, tried, first, verdict))
    return judged


def still_right(judged: Judged, output: SSDOutput) -> str:
    """Empty if the output has the bits that were judged, or passes as well; else what is wrong with it."""
    if fingerprint(*widened(output)) == judged.bits:
        return ""
    entry = judged.entry
    candidate = Candidate(output=widened(output), precision=entry.precision)
    verdict = _verdict(compare(entry.inputs, {entry.label: candidate})[entry.label], ours=entry.contender.ours)
    return "" if verdict.status == "passed" else verdict.reason


def _judge_together(
    entries: Sequence[Entry], inputs: SSDInputs, on_progress: Callable[[int], None], patience: Patience
) -> list[Judged]:
    tried = {entry.label: _attempt(entry, patience) for entry in entries}
    candidates = {
        entry.label: Candidate(output=output, precision=entry.precision)
        for entry in entries
        if (output := tried[entry.label][0].output) is not None
    }
    comparisons = compare(inputs, candidates, on_progress=on_progress) if candidates else {}
    judged = []
    for entry in entries:
        attempt, first = tried[entry.label]
        if entry.label in comparisons:
            verdict = _verdict(comparisons[entry.label], ours=entry.contender.ours)
        else:
            verdict = Verdict(status=attempt.status, reason=attempt.reason)
        judged.append(_judged(entry, attempt, first, verdict))
    return judged


def _attempt(entry: Entry, patience: Patience) -> tuple[Attempt, FirstCall | None]:
    device = entry.inputs.x.device
    first = None

    def run() -> SSDOutput:
        nonlocal first
        if first is not None:
            return widened(entry.run())
        output, first = first_call(entry.run, device, patience)
        return widened(output)

    try:
        tried = attempt_call(entry.contender.name, entry.plan, run, entry.inputs)
    except TimeIsUp:
        if patience.exhausted:
            raise BudgetSpent(f" in the first call of {entry.label}") from None
        return Attempt(status="failed", reason=f"its first call was broken off after {patience.most:g} s"), None
    if tried.output is not None and not entry.contender.ours:
        # a library that tunes itself launched and allocated for that too, and may have left anything in its output
        tried = attempt_call(entry.contender.name, entry.plan, run, entry.inputs)
    return tried, first


def _judged(entry: Entry, tried: Attempt, first: FirstCall | None, verdict: Verdict) -> Judged:
    return Judged(
        entry=entry,
        verdict=verdict,
        variant=tried.variant,
        plan=tried.plan.reason if tried.plan else "",
        memory=tried.memory,
        launches=tried.launches,
        bits=None if tried.output is None else fingerprint(*tried.output),
        first_call=first,
    )


def _verdict(comparison: Comparison, *, ours: bool) -> Verdict:
    out, states = comparison.tensors
    error = Error(
        out=out.vs_oracle.rms_ratio,
        out_floor=out.floor.rms_ratio,
        final_states=states.vs_oracle.rms_ratio,
        final_states_floor=states.floor.rms_ratio,
    )
    close = max(error.out, error.final_states) <= SLOPPY
    if comparison.status == "inaccurate" and close and not ours:
        return Verdict(status="passed", sloppy=comparison.reason, error=error)
    return Verdict(status=comparison.status, reason=comparison.reason, error=error)
