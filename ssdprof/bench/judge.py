"""Is an entry's output right?  Nothing is timed before it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssdprof import operators
from ssdprof.bench.contenders import Entry
from ssdprof.bench.first_call import Patience, TimeIsUp, first_call
from ssdprof.bench.schema import Error, FirstCall
from ssdprof.measure.accuracy import Comparison
from ssdprof.measure.attempt import Attempt, attempt
from ssdprof.measure.cases import batches_of
from ssdprof.measure.engine import Verified, verify
from ssdprof.measure.fingerprint import fingerprint
from ssdprof.measure.memory import outputs_that_fit
from ssdprof.operators.operator import Output
from ssdprof.schema import Status


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
    """An entry that was run.  first_call: None if it broke."""

    entry: Entry
    verified: Verified
    verdict: Verdict
    first_call: FirstCall | None


def judge(
    entries: Sequence[Entry],
    on_progress: Callable[[int], None] = lambda _: None,
    patience: Patience = Patience(),  # noqa: B008
) -> list[Judged]:
    """Run every entry and compare it with the oracle and with its baseline (`baselines_of`); the entries' inputs differ
    in their chunk size only.

    One pass over the oracle serves as many outputs as fit into memory together.  The chunk size of the comparison is
    the smallest one: more chunks round 16-bit states more often, and no entry shall be held to fewer.

    Raises BudgetSpent.
    """
    inputs = min(entries, key=_chunk_size).call.inputs
    baselines = baselines_of(entries, operators.of(inputs).baseline)
    groups: dict[Entry, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(baselines.get(entry, entry), []).append(entry)
    whole = [tuple(dict.fromkeys((first, *rest))) for first, rest in groups.items()]
    judged: dict[Entry, Judged] = {}
    for batch in batches_of(whole, outputs_that_fit(inputs)):
        for one in _judge_together(batch, baselines, inputs, on_progress, patience):
            judged.setdefault(one.entry, one)  # a baseline runs again in every batch that needs it
    return [judged[entry] for entry in entries]


def baselines_of(entries: Iterable[Entry], baseline: str) -> dict[Entry, Entry]:
    """Entry -> the entry whose output its own is matched with: that of `baseline` with exact intermediates, equal
    states, and the same chunk size or else the smallest.  An entry without such a one is left out."""
    known = [
        one for one in entries if one.contender.name == baseline and one.contender.precision.intermediates == "exact"
    ]
    found = {}
    for entry in entries:
        states = entry.contender.precision.state_dtype
        own = [one for one in known if one.contender.precision.state_dtype == states]
        if own and entry.contender.name != baseline:
            found[entry] = min(own, key=lambda one: (one.chunk_size != entry.chunk_size, _chunk_size(one)))
    return found


def run_unjudged(
    entries: Sequence[Entry],
    verdicts: Mapping[Hashable, Verdict],
    patience: Patience = Patience(),  # noqa: B008
) -> list[Judged]:
    """Run every entry; what is right was found on other inputs.  An output that is not finite is wrong anyway.

    verdicts: by `Entry.key`.  Raises BudgetSpent.
    """
    judged = []
    for entry in entries:
        tried, first = _attempt(entry, patience)
        verdict, bits = verdicts[entry.key], None
        if tried.output is None:
            verdict = Verdict(status=tried.status, reason=tried.reason)
        else:
            bits = fingerprint(*tried.output)
            if not all(bool(tensor.isfinite().all()) for tensor in tried.output):
                verdict = Verdict(status="nonfinite", reason="some element is not finite")
        verified = Verified(call=entry.call, attempt=replace(tried, output=None), bits=bits)
        judged.append(Judged(entry=entry, verified=verified, verdict=verdict, first_call=first))
    return judged


def objection_to(entry: Entry) -> Callable[[Comparison], str]:
    """Why an output of the entry may not be timed; empty if it may."""

    def why(comparison: Comparison) -> str:
        verdict = _verdict(comparison, ours=entry.contender.ours)
        return "" if verdict.status == "passed" else verdict.reason

    return why


def _chunk_size(entry: Entry) -> float:
    return entry.chunk_size or math.inf


def _judge_together(
    entries: Sequence[Entry],
    baselines: Mapping[Entry, Entry],
    inputs: Any,
    on_progress: Callable[[int], None],
    patience: Patience,
) -> list[Judged]:
    tried = {entry: _attempt(entry, patience) for entry in entries}
    attempts = {entry.call: attempted for entry, (attempted, _) in tried.items()}
    against = {entry.call: baselines[entry].call for entry in entries if entry in baselines}
    verified = verify(attempts, inputs, baselines=against, on_progress=on_progress)
    judged = []
    for entry, (attempted, first) in tried.items():
        one = verified[entry.call]
        if one.comparison is not None:
            verdict = _verdict(one.comparison, ours=entry.contender.ours)
        else:
            verdict = Verdict(status=attempted.status, reason=attempted.reason)
        judged.append(Judged(entry=entry, verified=one, verdict=verdict, first_call=first))
    return judged


def _attempt(entry: Entry, patience: Patience) -> tuple[Attempt, FirstCall | None]:
    call, first = entry.call, None

    def run() -> Output:
        nonlocal first
        if first is not None:
            return call.run()
        output, first = first_call(call.run, call.device, patience)
        return output

    try:
        tried = attempt(call, run)
    except TimeIsUp:
        if patience.exhausted:
            raise BudgetSpent(f" in the first call of {call.label}") from None
        return Attempt(status="failed", reason=f"its first call was stopped after {patience.most:g} s"), None
    if tried.output is not None and not entry.contender.ours:
        # a library that tunes itself launched and allocated for that too, and may have left anything in its output
        tried = attempt(call, run)
    return tried, first


def _verdict(comparison: Comparison, *, ours: bool) -> Verdict:
    out, states = comparison.tensors
    error = Error(
        out=out.vs_oracle.rms_ratio,
        out_floor=out.floor.rms_ratio,
        final_states=states.vs_oracle.rms_ratio,
        final_states_floor=states.floor.rms_ratio,
        matches=out.vs_baseline.matches if out.vs_baseline else (),
    )
    if comparison.sloppy and not ours:
        return Verdict(status="passed", sloppy=comparison.reason, error=error)
    return Verdict(status=comparison.status, reason=comparison.reason, error=error)
