"""Verifies implementations on one call, then times in turns those that are right: for run, bench and tune.

    first_run -> verify, against the fp64 oracle -> the fastest chunk size -> sample, with a check of what they compute

Only what passed is timed, and what it computes while it is timed is checked again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from triton.runtime.interpreter import interpreter_builder

from ssdprof.core import statistics
from ssdprof.core.base import DType, PrecisionRecord, Probe
from ssdprof.core.case import Case, ChunkTrial
from ssdprof.core.subject import Ceilings
from ssdprof.environment import child
from ssdprof.measure.accuracy import Candidate, fingerprint
from ssdprof.measure.accuracy import compare as compare_with_oracle
from ssdprof.measure.first_run import Call, Deadline, Run, TimeIsUp, blaming, completed, first_line, refuse_if_lost
from ssdprof.measure.isolate import GuardedInputs, IsolatedFirstCall, while_it_runs
from ssdprof.measure.roofline import SMLimits, with_occupancy
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.sampling import Samples as Recordings
from ssdprof.measure.timing import Recording, Timer, time_in_turns
from ssdprof.operators import tensors
from ssdprof.operators.operator import Output
from ssdprof.progress import Unwatched, Watcher

K = TypeVar("K")
Verdicts = Mapping[Hashable, Case]  # by `Entry.key`, of the same entries on other inputs
NOT_TIMED = "interrupted before it was timed"  # stands in a case until it is timed: an end of any kind leaves it
TRIALS = SamplingPlan(min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3, seconds=math.inf)


class BudgetSpent(Exception):
    """The time of the whole job ended during a first call.  The message names it."""


@dataclass(kw_only=True, eq=False)
class Entry:
    """One implementation at one precision and chunk size, on one call.

    case: what is known before it runs.  baseline: whose output it is also compared with; None: nobody's.
    turns: entries with equal ones are timed together.
    probes: (whether Triton's interpreter ran it) -> the laws that it obeys, tested after it was found correct.
    bits: the fingerprint of its first output.
    """

    case: Case
    call: Call
    baseline: Entry | None = None
    turns: Hashable = None
    probes: Callable[[bool], tuple[Probe, ...]] = lambda _: ()
    bits: tuple[int, ...] = ()

    @property
    def key(self) -> Hashable:
        """Equal for the same entry on other inputs."""
        return self.case.implementation, self.case.precision, self.case.chunk_size


@dataclass(kw_only=True)
class Comparer:
    """Compares entries of one call after another.

    timer: None: nothing is timed.  process: the name of this one in the samples.
    ceilings: of this GPU, by which no time is too short.
    isolated: makes first calls of users' kernels, which then get copies of the inputs; None: they run as others do.
    oracle_must_fit: raise torch.OutOfMemoryError if the oracle does not fit; else the cases say so.
    """

    timer: Timer | None = None
    ceilings: Ceilings | None = None
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
    process: str = ""
    deadline: Deadline = field(default_factory=Deadline)
    isolated: IsolatedFirstCall | None = None
    watcher: Watcher = field(default_factory=Unwatched)
    oracle_must_fit: bool = False

    def compare(self, entries: Sequence[Entry], label: str, verdicts: Verdicts | None = None) -> Iterator[Case]:
        """Every case as soon as it is verified, and again with its samples or with a fault.

        entries: of inputs that differ in their chunk size only.  label: of the call, for the progress.
        verdicts: outputs are not compared, and have these; an output that is not finite fails.
        Raises BudgetSpent, and MissingCapabilityError if a fault made the GPU unusable.
        """
        copies: dict[str, GuardedInputs] = {}
        for entry in entries:
            if self.isolated and entry.case.kind == "own":
                name = entry.case.implementation
                copies[name] = copies.get(name) or GuardedInputs(entry.call.inputs)
                entry.call = self.isolated.guarded(entry.call, copies[name], entry.case.precision)
        cases: dict[Entry, Case] = {}
        for batch in _batches(entries):
            for entry, case in self._verified(batch, label, verdicts).items():
                if entry in cases:  # a baseline runs for every batch that needs it
                    continue
                cases[entry] = case
                if self.timer is None or case.chunk_size is None:
                    yield case if self.timer is None else _untimed(case)
        if self.timer is None:
            return
        for each in dict.fromkeys(_alternatives(entry, entries) for entry in entries):
            found = {entry: cases.pop(entry) for entry in each}
            entry, case = self._fastest(found, self.timer)
            cases[entry] = case
            if case.trials:
                yield _untimed(case)
        rivals = {entry.case.rated_against for entry in entries}
        # a baseline outside its budget is timed, because the verdict is on the others
        timed = {
            entry: case
            for entry, case in cases.items()
            if case.result == "passed" or (case.only_outside and (case.place, case.implementation) in rivals)
        }
        for turns in dict.fromkeys(entry.turns for entry in timed):
            with self.watcher.step(f"{label}: timing"):
                group = {entry: case for entry, case in timed.items() if entry.turns == turns}
                yield from self._sampled(group, self.timer)

    # --- accuracy

    def _verified(self, entries: Sequence[Entry], label: str, verdicts: Verdicts | None) -> dict[Entry, Case]:
        """Run the entries, whose outputs fit in memory together, and compare them with the oracle in one pass."""
        runs: dict[Entry, tuple[Output | None, dict[str, Any], bool]] = {}
        with self.watcher.step(f"{label}: running", len(entries), unit="cases") as advance:
            for entry in entries:
                runs[entry] = self._first_run(entry)
                advance(1)
        outputs = {entry: output for entry, (output, _, _) in runs.items() if output is not None}
        if verdicts is None:
            found = self._accuracies(outputs, label)
        else:
            found = {entry: _borrowed(verdicts[entry.key], runs[entry][1], output) for entry, output in outputs.items()}
        for entry, output in outputs.items():
            entry.bits = entry.bits or fingerprint(*output)
        cases = {
            entry: Case(**(entry.case.own | fields | found.get(entry, {}))) for entry, (_, fields, _) in runs.items()
        }
        interpreted = {entry: one for entry, (_, _, one) in runs.items()}
        if verdicts is None:
            del outputs, runs  # the probes need memory
            with self.watcher.step(f"{label}: testing laws", len(cases), unit="cases") as advance:
                for entry, case in cases.items():
                    with while_it_runs(case):
                        if case.result == "passed" and (probes := entry.probes(interpreted[entry])):
                            cases[entry] = case.changed(probes=probes)
                    advance(1)
        return cases

    def _first_run(self, entry: Entry) -> tuple[Output | None, dict[str, Any], bool]:
        """The output, fields of the case, and whether Triton's interpreter ran a kernel."""
        call = entry.call
        interpreter_builder.grid_idx = None  # of the program that runs
        try:
            with while_it_runs(entry.case):
                output, fields = call.first_run(self.deadline.seconds)
        except TimeIsUp:
            if self.deadline.exhausted:
                raise BudgetSpent(f" in the first call of {call.label}") from None
            reason = f"its first call was stopped after {self.deadline.most:g} s"
            return None, {"status": "failed", "reason": reason}, False
        first = fields.pop("first_call", None)
        if output is not None and entry.case.kind == "library":
            # a library that tunes itself has launches and allocations of its own, and may leave any values behind
            output, fields = call.first_run()
        if call.device.type == "cuda":
            limits = SMLimits.of(call.device)
            launches = tuple(with_occupancy(launch, limits) for launch in fields.get("launches", ()))
            fields |= {"first_call": first, "launches": launches}
        return output, fields, interpreter_builder.grid_idx is not None

    def _accuracies(self, outputs: Mapping[Entry, Output], label: str) -> dict[Entry, dict[str, Any]]:
        """Fields of the cases."""
        if not outputs:
            return {}
        # more chunks round 16-bit states more often, and the budget must cover the entry with the most
        inputs = min(outputs, key=lambda entry: entry.case.chunk_size or math.inf).call.inputs
        candidates = {
            entry: Candidate(
                output=output,
                precision=entry.call.precision,
                baseline=entry.baseline if entry.baseline in outputs else None,
                name=entry.call.label,
                cuts=entry.call.implementation.cuts_operands,
            )
            for entry, output in outputs.items()
        }
        case = next(iter(outputs)).case
        try:
            with self.watcher.step(
                f"{label}: comparing with the fp64 oracle", case.batch * case.seqlen, unit="tokens"
            ) as advance:
                found = compare_with_oracle(inputs, candidates, on_progress=advance)
        except torch.OutOfMemoryError as error:
            if self.oracle_must_fit:
                raise
            reason = f"while compared with the oracle: {first_line(error)}"
            return {entry: {"status": "out of memory", "reason": reason} for entry in outputs}
        return {entry: {"accuracy": accuracy} for entry, accuracy in found.items()}

    # --- speed

    def _fastest(self, cases: Mapping[Entry, Case], timer: Timer) -> tuple[Entry, Case]:
        """The fastest chunk size that passed; without one, the first entry, which says why.

        Several are compared by a few replays in turns.
        """
        passed = [entry for entry, case in cases.items() if case.result == "passed"]
        samples = device_times({one: [one.call] for one in passed}, timer, TRIALS) if len(passed) > 1 else {}
        times = {entry: statistics.median(values).value for entry, values in samples.items()}
        best = min(passed, key=lambda entry: times.get(entry, math.inf), default=next(iter(cases)))
        trials = tuple(
            ChunkTrial(
                chunk_size=case.chunk_size,
                result=case.result,
                reason=case.why,
                device_us=times.get(entry),
                first_call=case.first_call,
            )
            for entry, case in cases.items()
            if case.chunk_size is not None
        )
        return best, cases[best].changed(trials=trials) if trials else cases[best]

    def _sampled(self, group: Mapping[Entry, Case], timer: Timer) -> Iterator[Case]:
        """Time verified entries in turns, and check what they compute then."""
        named = {entry.call.label: entry for entry in group}
        remarks: dict[str, str] = {}

        def outside(name: str, output: Output) -> str:
            """Why an output is worse than the one that was judged."""
            known, call = group[named[name]], named[name].call
            candidate = Candidate[str](output=output, precision=call.precision, cuts=call.implementation.cuts_operands)
            accuracy = compare_with_oracle(call.inputs, {name: candidate})[name]
            again = known.changed(accuracy=accuracy)
            return "" if again.result == known.result else again.outside_budget

        def check(name: str, run: Run) -> str:
            call = named[name].call
            _poison(run(), call.inputs)
            output, late = completed(lambda: call.judged_output(run()), call.device)
            if words := late or call.out_of_bounds():
                return words
            if fingerprint(*output) != named[name].bits:
                if words := outside(name, output):
                    return words
                remarks[name] = "repeated calls differ in their bits, within the budget"
            with suppress(torch.OutOfMemoryError):
                if scale:
                    return follows(name, run, output, scale)
            remarks[name] = "not tried with other numbers at the inputs' addresses: out of memory"
            return ""

        def follows(name: str, run: Run, output: Output, scale: Callable[[float], None]) -> str:
            """Why the output is wrong with other numbers at the addresses of the inputs."""
            call = named[name].call
            factor = 0.5 if _has_fp16(call) else 2.0
            expected = [tensor * factor for tensor in output]
            _poison(output, call.inputs)
            try:
                scale(factor)
                output = call.judged_output(run())
                words = "" if all(map(torch.equal, output, expected)) else outside(name, output)
            finally:
                scale(1.0)
            return words and f"with other numbers at the same addresses of the inputs, {words}"

        calls = [entry.call for entry in group]
        owns = next((case for case in group.values() if case.kind == "own"), None)
        with while_it_runs(owns), _changeable(calls) as scale:
            session = time_in_turns(
                {name: entry.call.run for name, entry in named.items()},
                timer,
                self.sampling,
                check=check,
                change=_never_the_same(scale, any(map(_has_fp16, calls))),
            )
        for name, case in zip(named, group.values(), strict=True):
            if name in remarks:
                case = case.changed(reason=remarks[name])
            if failed := session.failed_later.get(name):
                fields = {"status": "failed", "reason": failed.reason} if failed.status == "failed" else {}
                yield case.changed(**(fields or {"later_fault": failed.reason}))
            elif untimed := session.untimed.get(name):
                yield case.changed(reason=untimed)
            else:
                timed = case.changed(samples=session.sampled[name].records(self.process))
                yield case.changed(**unmeasured) if (unmeasured := _above_roof(timed, self.ceilings)) else timed


def _untimed(case: Case) -> Case:
    """The case for as long as it is not timed."""
    return case.changed(reason=NOT_TIMED) if case.result == "passed" else case


def _poison(output: Output, inputs: Any) -> None:
    """Fill an output with NaN, unless it lies in memory of the inputs: what a later run leaves there is its own."""
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors.tensors(inputs).values()}
    for tensor in output:
        if tensor.untyped_storage().data_ptr() not in given:
            tensor.fill_(math.nan)


@contextmanager
def _changeable(calls: Sequence[Call]) -> Iterator[Callable[[float], None] | None]:
    """The value writes the inputs in which the operator is linear, times a number, to their addresses.

    They are as before at the end.  None: there is no memory for a copy of them.
    """
    own: dict[int, torch.Tensor] = {}
    for call in calls:
        given = tensors.tensors(call.inputs)
        linear = [given[name] for name in call.inputs.LINEAR if name in given]
        own |= {tensor.data_ptr(): tensor for tensor in (*linear, *call.implementation.copies(call.inputs))}
    try:
        before = [tensor.clone() for tensor in own.values()]
    except torch.OutOfMemoryError:
        yield None
        return

    def scale(factor: float) -> None:
        for tensor, original in zip(own.values(), before, strict=True):
            torch.mul(original, factor, out=tensor)

    try:
        yield scale
    finally:
        scale(1.0)


def _never_the_same(scale: Callable[[float], None] | None, fp16: bool) -> Callable[[bool], None]:
    """Called with True before each sample, so that nothing can be taken from an earlier call; with False at the end."""
    numbers = itertools.count(1)

    def change(sampling: bool) -> None:
        child.alive()
        if scale is not None:
            number = next(numbers)
            scale((1 + number % 128 / 128) * 2.0 ** (0 if fp16 else number // 128 % 8) / 2 if sampling else 1.0)

    return change


def _has_fp16(call: Call) -> bool:
    """Whether doubled numbers might overflow."""
    given = (*tensors.tensors(call.inputs).values(), *call.implementation.copies(call.inputs))
    return torch.float16 in (call.precision.state_dtype, *(tensor.dtype for tensor in given))


def _above_roof(case: Case, ceilings: Ceilings | None) -> dict[str, str]:
    """Fields of a case whose device time is shorter than this GPU can be: its work was not what was timed."""
    share, time = case.floor_pct(ceilings), case.device_us
    if share is None or time is None or share <= 100:
        return {}
    reason = f"the measurement failed: {time.value:.4g} us of device time would be {share:.4g}% of the roofline"
    return {"status": "failed", "reason": f"{reason}, so that not all of its work was timed"}


def _borrowed(verdict: Case, own: dict[str, Any], output: Output) -> dict[str, Any]:
    """Fields of a case that is not compared: those of the same entry on other inputs.

    The slower of its two first calls counts, because the other found its kernels in Triton's cache.
    """
    if verdict.status != "ran":
        return {"status": verdict.status, "reason": verdict.reason}
    first_calls = (verdict.first_call, own.get("first_call"))
    slower = max(first_calls, key=lambda first: first.seconds if first else 0.0)
    finite = all(bool(tensor.isfinite().all()) for tensor in output)
    return {"accuracy": verdict.accuracy, "first_call": slower} | ({} if finite else {"nonfinite": True})


def _alternatives(entry: Entry, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The entries of the same case, with other chunk sizes."""
    return tuple(one for one in entries if one.key[:2] == entry.key[:2])  # type: ignore[index]


def _batches(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries whose outputs are in memory together, each with its baseline; a baseline may be in several.

    If two outputs do not fit, no entry is compared with a baseline.
    """
    capacity = entries[0].call.outputs_that_fit
    if capacity < 2:
        return [[entry] for entry in entries]
    groups: dict[Entry, list[Entry]] = {}
    for entry in entries:
        first = entry.baseline or entry
        group = groups.setdefault(first, [first])
        if entry is not first:
            group.append(entry)
    batches: list[list[Entry]] = []
    current: list[Entry] = []
    for baseline, *others in groups.values():
        if current and len(current) + 1 + len(others) > capacity:
            batches.append(current)
            current = []
        if 1 + len(others) <= capacity:
            current = [*current, baseline, *others]
            continue
        step = capacity - 1
        batches += [[baseline, *others[i : i + step]] for i in range(0, len(others), step)]
    return [*batches, current] if current else batches


# --- who is compared with whom


def wanted_pairs(
    precisions: Sequence[PrecisionRecord],
    implementations: Sequence[str],
    baseline: str,
    fixed: Mapping[str, Sequence[PrecisionRecord]] = {},
) -> list[tuple[str, PrecisionRecord, PrecisionRecord]]:
    """(implementation, precision, the baseline's precision) of every case; baselines first, requested or not.

    The baseline runs at exact intermediates and equal states.
    fixed: implementations with precisions of their own.  If the baseline is one of them and lacks the states of a
        case, it runs at the first of its own precisions.
    """
    wanted = [(name, one) for one in precisions for name in implementations if name not in fixed]
    wanted += [(name, one) for name in implementations for one in fixed.get(name, ())]
    own = fixed.get(baseline)

    def first(state_dtype: DType) -> PrecisionRecord:
        exact = PrecisionRecord(intermediates="exact", state_dtype=state_dtype)
        return exact if own is None or exact in own else own[0]

    groups: dict[PrecisionRecord, dict[tuple[str, PrecisionRecord], None]] = {}
    for one in precisions:
        group = first(one.state_dtype)
        groups.setdefault(group, {(baseline, group): None})
    for name, precision in wanted:
        group = first(precision.state_dtype)
        groups.setdefault(group, {(baseline, group): None})[name, precision] = None
    return [(name, precision, group) for group, cases in groups.items() for name, precision in cases]


# --- times without a check


def device_times(
    calls: Mapping[K, Sequence[Call]],
    timer: Timer,
    plan: SamplingPlan,
    *,
    on_untimed: Callable[[K, Exception], object] = lambda _key, _error: None,
) -> dict[K, Recordings]:
    """Device times in turns, in microseconds; for each key the geometric mean over its calls.

    Keys with a call that cannot be recorded are left out, and passed to `on_untimed`.
    """
    numbered = {str(number): key for number, key in enumerate(calls)}
    untimed: set[str] = set()

    def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
        timer.reallocate(generator)
        samplers: dict[Name, Sampler] = {}
        for number, key in numbered.items():
            if number in untimed:
                continue
            label = calls[key][0].label
            try:
                kept = [blaming(timer.device, call.label, partial(_recorded, call, timer)) for call in calls[key]]
            except Exception as error:  # the compiler's or CUDA's, of any kind: this key is not timed
                refuse_if_lost(timer.device, label, error)
                untimed.add(number)
                on_untimed(key, error)
            else:
                samplers["device", number] = partial(blaming, timer.device, label, partial(_mean_us, timer, kept))
        return samplers

    return {numbered[number]: samples for (_, number), samples in sample_in_turns(set_up, plan).items()}


def _recorded(call: Call, timer: Timer) -> Recording:
    """The call as a recording without its output, whose memory the next recording reuses."""

    def run() -> Output:
        out, final_states = call.run()
        return out.new_empty(0), final_states.new_empty(0)

    return timer.record(run)


def _mean_us(timer: Timer, recordings: Sequence[Recording]) -> float:
    return math.prod(timer.device_us(recording) for recording in recordings) ** (1 / len(recordings))
