"""Verifies the output of each entry.  Only verified entries are timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from ssdprof.schema import Status, TensorAccuracy


class BudgetSpent(Exception):
    """The bench's time ended during a first call.  The message names the entry."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the comparison with the oracle.  sloppy, accuracy: see `schema.BenchCase`."""

    status: Status
    reason: str = ""
    sloppy: str = ""
    error: Error | None = None
    accuracy: tuple[TensorAccuracy, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An entry that was run.  first_call: None if that call failed."""

    entry: Entry
    verified: Verified
    verdict: Verdict
    first_call: FirstCall | None


def judge(
    entries: Sequence[Entry],
    on_progress: Callable[[int], None] = lambda _: None,
    patience: Patience = Patience(),  # noqa: B008
    *,
    match_with: str = "",
) -> list[Judged]:
    """Run every entry and compare it with the oracle; the entries' inputs differ in their chunk size only.

    match_with: outputs are also compared with that of this implementation: see `reference_of`.

    All outputs that fit into memory together share one pass over the oracle.  The chunk size of the comparison is
    the smallest one: more chunks round 16-bit states more often, and the budget must cover the entry with the most.

    Raises BudgetSpent.
    """
    inputs = min(entries, key=lambda entry: entry.chunk_size or math.inf).call.inputs
    references = {entry: reference_of(entry, entries, match_with) for entry in entries}
    judged: dict[Entry, Judged] = {}
    for batch in _batches(references, outputs_that_fit(inputs)):
        for one in _judge_together(batch, references, inputs, on_progress, patience):
            judged.setdefault(one.entry, one)  # a reference runs again for every batch that needs it
    return [judged[entry] for entry in entries]


def reference_of(entry: Entry, entries: Sequence[Entry], name: str) -> Entry | None:
    """The entry of the implementation `name` that is most like `entry`: with exact intermediates, the same states, the
    same chunk size, in this order.  None if that is `entry` itself, or if there is none.
    """

    def likeness(other: Entry) -> tuple[bool, bool, bool]:
        ours, theirs = entry.contender.precision, other.contender.precision
        same_states = ours.state_dtype == theirs.state_dtype
        return theirs.intermediates == "exact", same_states, entry.chunk_size == other.chunk_size

    found = max((other for other in entries if other.contender.name == name), key=likeness, default=None)
    return None if found is entry else found


def _batches(references: Mapping[Entry, Entry | None], capacity: int) -> list[list[Entry]]:
    """Entries whose outputs are in memory together.  If two do not fit, no matches are computed."""
    if capacity < 2:
        return [[entry] for entry in references]
    groups: dict[Entry, list[Entry]] = {}
    for entry, reference in references.items():
        group = groups.setdefault(reference or entry, [reference or entry])
        if reference:
            group.append(entry)
    return batches_of([tuple(group) for group in groups.values()], capacity)


def run_unjudged(
    entries: Sequence[Entry],
    verdicts: Mapping[Hashable, Verdict],
    patience: Patience = Patience(),  # noqa: B008
) -> list[Judged]:
    """Run every entry without the oracle, with the verdicts of other inputs.  An output that is not finite fails.

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


def _judge_together(
    entries: Sequence[Entry],
    references: Mapping[Entry, Entry | None],
    inputs: Any,
    on_progress: Callable[[int], None],
    patience: Patience,
) -> list[Judged]:
    tried = {entry: _attempt(entry, patience) for entry in entries}
    attempts = {entry.call: attempted for entry, (attempted, _) in tried.items()}
    baselines = {entry.call: reference.call for entry in entries if (reference := references[entry])}
    verified = verify(attempts, inputs, baselines=baselines, on_progress=on_progress)
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
        # tuning has launches and allocations of its own, and may leave any values in the output
        tried = attempt(call, run)
    return tried, first


def _verdict(comparison: Comparison, *, ours: bool) -> Verdict:
    out, states = comparison.tensors
    error = Error(
        out=out.vs_oracle.rms_ratio,
        out_floor=out.floor.rms_ratio,
        final_states=states.vs_oracle.rms_ratio,
        final_states_floor=states.floor.rms_ratio,
    )
    if comparison.sloppy and not ours:
        return Verdict(status="passed", sloppy=comparison.reason, error=error, accuracy=comparison.tensors)
    return Verdict(status=comparison.status, reason=comparison.reason, error=error, accuracy=comparison.tensors)
