"""The engine of run, bench, prefill and tune: verifies implementations on one call, then times in
turns those that are right.

    first run -> compare with the fp64 oracle -> test laws -> choose the fastest chunk size
    -> sample in turns

Only implementations that passed are timed, and baselines that are outside of their budget or break
a law (`_may_be_timed`).  Their outputs are checked again after the samples.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from triton.runtime.interpreter import interpreter_builder

from ssdprof.core import statistics
from ssdprof.core.base import Probe, grouped
from ssdprof.core.case import Case
from ssdprof.core.target import Ceilings
from ssdprof.environment import child
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import Candidate, fingerprint
from ssdprof.measure.accuracy import compare as compare_with_oracle
from ssdprof.measure.diagnosis import diagnosed
from ssdprof.measure.first_run import Call, Fields, Run, TimeIsUp, completed, first_line
from ssdprof.measure.isolate import GuardedInputs, IsolatedFirstCall, while_it_runs
from ssdprof.measure.roofline import with_occupancy
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer, time_in_turns
from ssdprof.operators.operator import OutputPair
from ssdprof.progress import Watcher

Verdicts = Mapping[Hashable, Case]  # by `Entry.key`: verified cases of the same entries
Baselines = set[tuple[str, str] | None]  # case key and implementation: see `Case.rated_against`
# The reason in a verified case that is to be timed.  It stays only if the process ends before that,
# because the case with samples does not have it.
NOT_TIMED = "interrupted before it was timed"
# how the chunk sizes of one implementation are timed to find the fastest
TRIALS = SamplingPlan(
    min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3, seconds=math.inf
)


@dataclass(kw_only=True, eq=False)
class Entry:
    """One implementation at one precision and chunk size, on one call.

    case: the fields that are known before the call.
    baseline: the entry with whose output this one's is also compared; None: there is none.
    turns: entries with equal values are timed together.
    probes: tests laws, after the output was found correct, and returns the results.  Its argument
        is `interpreted`.  None: no law is tested.
    bits: the fingerprint of the first output; empty before the entry ran, and if it gave none.
    interpreted: whether Triton's interpreter ran a kernel in the latest first run; False before it.
    """

    case: Case
    call: Call
    baseline: Entry | None = None
    turns: Hashable = None
    probes: Callable[[bool], tuple[Probe, ...]] | None = None
    bits: tuple[int, ...] = ()
    interpreted: bool = False

    @classmethod
    def of(
        cls,
        implementation: Implementation,
        inputs: Inputs,
        precision: Precision,
        /,
        *,
        label: str = "",
        **case: Any,
    ) -> Entry:
        """The entry of an implementation.

        label: shown for the call; by default the implementation's name and precision.
        case: the fields of the case that do not follow from the implementation.
        """
        call = Call(
            implementation=implementation,
            inputs=inputs,
            precision=precision,
            label=label or f"{implementation.name} {precision}",
        )
        known = Case(
            implementation=implementation.name,
            kind=implementation.kind,
            named=implementation.named,
            version=implementation.version,
            precision=str(precision),
            status="ran",
            **case,
        )
        return cls(case=known, call=call)

    @property
    def key(self) -> Hashable:
        """Names the entry among those of one call; equal for the same entry on other inputs."""
        return self.case.implementation, self.case.precision, self.case.chunk_size

    def candidate(self, output: OutputPair, baseline: Entry | None = None) -> Candidate:
        """An output of the call, to be compared with the oracle's and, unless `baseline` is None,
        with that of the entry `baseline`.
        """
        return Candidate(
            output=output,
            precision=self.call.precision,
            baseline=baseline,
            name=self.call.label,
            cuts=self.call.implementation.cuts_operands,
        )


# Arguments: the entry; the law that it broke, empty if its call failed or gave a wrong output; the
# inputs; the output, None if there is none.
OnFault: TypeAlias = "Callable[[Entry, str, Inputs, OutputPair | None], object]"


@dataclass(kw_only=True)
class Comparer:
    """Compares entries of one call after another.

    timer: None: nothing is timed.
    ceilings: measured limits of this GPU, which give the shortest time that is possible; None: any
        time is accepted.
    sampling: how the entries are timed, after their chunk sizes were chosen by `TRIALS`.
    process: the name of this process in the samples.
    first_call_s: limit in seconds for each first call.
    until: the end of the bench, by `time.monotonic`, at which a first call is stopped.  The second
        call of a library, and timing, are not.
    isolated: makes first calls of users' kernels and of named libraries in another process, and
        gives them copies of the inputs; None: they are called as bundled kernels are.
    oracle_must_fit: raise torch.OutOfMemoryError if the oracle does not fit in memory; else the
        cases say so.
    on_fault: called with each entry whose call failed or gave a wrong output, but not if the call
        was refused or out of memory.  `Entry.probes` calls a function of its own for broken laws.
        None: not called.
    """

    timer: CudaTimer | None = None
    ceilings: Ceilings | None = None
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
    process: str = ""
    first_call_s: float = math.inf
    until: float = math.inf
    isolated: IsolatedFirstCall | None = None
    watcher: Watcher = field(default_factory=Watcher)
    oracle_must_fit: bool = False
    on_fault: OnFault | None = None

    def compare(
        self, entries: Sequence[Entry], label: str, verdicts: Verdicts | None = None
    ) -> Iterator[Case]:
        """Every case as soon as it is verified, and, if it is timed, again with its samples or with
        a fault.

        With a timer, entries that differ only in their chunk size give one case, that of the
        fastest, as soon as it is known; that of the first of them if none passed.

        entries: their inputs differ in the chunk size only.
        label: names the call in the progress display.
        verdicts: the verdicts of the entries, whose outputs are then not compared; None: outputs
            are compared.  In both cases an output that is not finite fails.

        Raises TimeIsUp if `until` comes before the end of a first call, and MissingCapabilityError
        if a fault made the GPU unusable.
        """
        self._guard(entries)
        baselines = {entry.case.rated_against for entry in entries}
        cases: dict[Entry, Case] = {}
        for entry, case in self._verified_once(entries, label, verdicts):
            cases[entry] = case
            if self.timer is None:
                yield case
            elif case.chunk_size is None:  # with a chunk size it is one of several trials
                yield _until_timed(case, baselines)
        if self.timer is None:
            return

        to_time: dict[Entry, Case] = {}
        groups = grouped(entries, lambda entry: (entry.case.implementation, entry.case.precision))
        for alternatives in groups.values():  # entries that differ in their chunk size
            entry, case = self._fastest({entry: cases[entry] for entry in alternatives}, self.timer)
            if case.trials:
                yield _until_timed(case, baselines)
            if _may_be_timed(case, baselines):
                to_time[entry] = case

        for group in grouped(to_time, lambda entry: entry.turns).values():
            with self.watcher.step(f"{label}: timing"):
                yield from self._sampled({entry: to_time[entry] for entry in group}, self.timer)

    def sample_again(
        self, entries: Sequence[Entry], label: str, earlier: Mapping[str, Case]
    ) -> Iterable[Case]:
        """The cases with samples of this process, for entries that another process has verified
        and timed.  They are without errors and laws, which the other process's cases have, and so
        the entries lose their baselines and probes.

        label: names the call in the progress display.
        earlier: the other process's cases, by name.  Entries that have no samples there, at their
            chunk size, are left out.
        """
        timed: list[Entry] = []
        verdicts: dict[Hashable, Case] = {}
        for entry in entries:
            case = earlier.get(entry.case.name)
            if case and case.samples and case.chunk_size == entry.case.chunk_size:
                verdicts[entry.key] = case
                entry.baseline = entry.probes = None
                timed.append(entry)
        if not timed:
            return ()
        latest = {case.name: case for case in self.compare(timed, label, verdicts)}
        return [case.changed(accuracy=(), probes=()) for case in latest.values()]

    # --- accuracy

    def _guard(self, entries: Sequence[Entry]) -> None:
        """Give a copy of the inputs to each implementation that is not trusted to leave them alone
        (`Implementation.isolated`).  Its entries share the copy, because none of them has a chunk
        size to try.
        """
        copies: dict[str, GuardedInputs] = {}
        for entry in entries:
            if self.isolated and entry.call.implementation.isolated:
                name = entry.case.implementation
                if name not in copies:
                    copies[name] = GuardedInputs(entry.call.inputs)
                entry.call = self.isolated.guarded(entry.call, copies[name])

    def _verified_once(
        self, entries: Sequence[Entry], label: str, verdicts: Verdicts | None
    ) -> Iterator[tuple[Entry, Case]]:
        """Each entry, once, with its verified case.

        A baseline runs in each batch (`_batches`) whose entries are compared with it.  The case of
        its first run counts.
        """
        seen: set[Entry] = set()
        for batch in _batches(entries):
            for entry, case in self._verified(batch, label, verdicts).items():
                if entry not in seen:
                    seen.add(entry)
                    yield entry, case

    def _verified(
        self, entries: Sequence[Entry], label: str, verdicts: Verdicts | None
    ) -> dict[Entry, Case]:
        """Run the entries, compare their outputs with the oracle in one pass, and test their laws.
        Returns their cases.  Calls `on_fault` for the entries that gave a wrong output or failed.

        The outputs of all these entries are in memory together.

        verdicts: as in `compare`.
        """
        outputs: dict[Entry, OutputPair] = {}
        fields: dict[Entry, Fields] = {}
        with self.watcher.step(f"{label}: running", len(entries), unit="cases") as advance:
            for entry in entries:
                output, fields[entry] = self._first_run(entry)
                if output is not None:
                    outputs[entry] = output
                advance(1)
        if verdicts is None:
            verified = self._accuracies(outputs, label)
        else:
            verified = {
                entry: _borrowed(verdicts[entry.key], fields[entry], output)
                for entry, output in outputs.items()
            }
        for entry, output in outputs.items():
            entry.bits = entry.bits or fingerprint(*output)
        cases: dict[Entry, Case] = {}
        for entry in entries:
            fields[entry].update(verified.get(entry, {}))
            cases[entry] = entry.case.changed(**fields[entry])
        # "refused" and "out of memory" are left out: a stored call would show nothing more.
        for entry, case in cases.items():
            if self.on_fault and case.result in ("inaccurate", "nonfinite", "failed"):
                # "": no law was broken
                self.on_fault(entry, "", entry.call.inputs, outputs.get(entry))
        del output, outputs  # the laws need memory
        self._test_laws(cases, label)
        return cases

    def _test_laws(self, cases: dict[Entry, Case], label: str) -> None:
        """Test the laws of the cases that passed, and add the results to these cases."""
        with self.watcher.step(f"{label}: testing laws", len(cases), unit="cases") as advance:
            for entry, case in cases.items():
                with while_it_runs(case):
                    if case.result == "passed" and entry.probes:
                        probes = (*case.probes, *entry.probes(entry.interpreted))
                        cases[entry] = case.changed(probes=probes)
                advance(1)

    def _first_run(self, entry: Entry) -> tuple[OutputPair | None, Fields]:
        """Make the first call.  Returns the output, None unless it ran, and the fields of the case.

        A library is called twice: the fields are those of the second call, but for `first_call`.
        A call that takes longer than `first_call_s` fails.  Raises TimeIsUp at the end of the
        bench.  On the CPU the fields have no `first_call`, because nothing is timed there.
        """
        call = entry.call
        interpreter_builder.grid_idx = None  # Triton's interpreter sets it when it runs a program
        limit_s = min(self.first_call_s, self.until - time.monotonic())
        try:
            with while_it_runs(entry.case):
                output, fields = call.first_run(max(0.0, limit_s))
        except TimeIsUp:
            if time.monotonic() >= self.until:
                raise TimeIsUp(f" in the first call of {call.label}") from None
            reason = f"its first call was stopped after {self.first_call_s:g} s"
            return None, {"status": "failed", "reason": reason}
        first_call = fields.pop("first_call", None)
        if output is not None and entry.case.kind == "library":
            # In its first call a library may tune itself, which launches other kernels, allocates
            # more memory and may leave other values in the output.
            output, fields = call.first_run()
        if call.device.type == "cuda":
            launches = tuple(
                with_occupancy(launch, call.device) for launch in fields.get("launches", ())
            )
            fields |= {"first_call": first_call, "launches": launches}
        entry.interpreted = interpreter_builder.grid_idx is not None
        return output, fields

    def _accuracies(
        self, outputs: Mapping[Entry, OutputPair], label: str
    ) -> dict[Entry, dict[str, object]]:
        """For each entry, the fields of its case that hold the comparison of its output, or that
        say that there is no memory for it.
        """
        if not outputs:
            return {}
        # Shorter chunks round 16-bit states more often.  The budget must cover the entry with the
        # shortest chunks.
        shortest = min(outputs, key=lambda entry: entry.case.chunk_size or math.inf)
        inputs = shortest.call.inputs
        candidates: dict[Entry, Candidate] = {}
        for entry, output in outputs.items():
            baseline = entry.baseline if entry.baseline in outputs else None
            candidates[entry] = entry.candidate(output, baseline)
        case = shortest.case
        try:
            with self.watcher.step(
                f"{label}: comparing with the fp64 oracle", case.batch * case.seqlen, unit="tokens"
            ) as advance:
                accuracies = compare_with_oracle(inputs, candidates, on_progress=advance)
        except torch.OutOfMemoryError as error:
            if self.oracle_must_fit:
                raise
            reason = f"while compared with the oracle: {first_line(error)}"
            return {entry: {"status": "out of memory", "reason": reason} for entry in outputs}
        return {
            entry: {"accuracy": diagnosed(inputs, candidates[entry], accuracy)}
            for entry, accuracy in accuracies.items()
        }

    # --- speed

    def _fastest(self, cases: Mapping[Entry, Case], timer: CudaTimer) -> tuple[Entry, Case]:
        """The entry with the fastest chunk size that passed, by a few replays in turns, and its
        case; if none passed, the first entry.

        cases: entries of one implementation and precision, one for each chunk size.  The returned
            case has the times of all chunk sizes (`trials`; None for one that was not timed, as
            when there is no other that passed), and what their kernels took to compile.  A single
            entry without a chunk size keeps its case.
        timer: times the replays.
        """
        passed = [entry for entry, case in cases.items() if case.result == "passed"]
        times = _trial_times(passed, timer) if len(passed) > 1 else {}
        best = min(passed, key=lambda entry: times.get(entry, math.inf), default=next(iter(cases)))
        case = cases[best]
        trials = {
            tried.chunk_size: times.get(entry)
            for entry, tried in cases.items()
            if tried.chunk_size is not None
        }
        if not trials:
            return best, case
        compiled: dict[str, float] = {}  # kernel -> seconds; the longest if it is in several trials
        for tried in cases.values():
            if tried.first_call:
                for kernel, seconds in tried.first_call.compiled.items():
                    compiled[kernel] = max(seconds, compiled.get(kernel, 0.0))
        first_call = case.first_call
        if first_call:
            first_call = first_call.changed(compiled=compiled)
        return best, case.changed(trials=trials, first_call=first_call)

    def _sampled(self, group: Mapping[Entry, Case], timer: CudaTimer) -> Iterator[Case]:
        """Time verified entries in turns, and check their outputs afterwards.

        Gives each case with its samples, or with the fault that was found.
        """
        calls = [entry.call for entry in group]
        # The first of these is blamed if the process ends: users' kernels, and libraries that the
        # user named.
        risky = [case for case in group.values() if case.kind == "own" or case.named]
        with while_it_runs(risky[0] if risky else None), _changeable(calls) as scale:
            timed = _Timed(
                entries={entry.call.label: entry for entry in group},
                cases={entry.call.label: case for entry, case in group.items()},
                scale=scale,
            )
            fields = time_in_turns(
                {label: entry.call.run for label, entry in timed.entries.items()},
                timer,
                self.sampling,
                check=timed.check,
                change=_never_the_same(scale, any(map(_has_fp16, calls))),
                process=self.process,
            )
        for label, case in timed.cases.items():
            sampled = case.changed(**fields[label])
            impossible = _above_roof(sampled, self.ceilings)
            yield case.changed(**impossible) if impossible else sampled


@dataclass(kw_only=True)
class _Timed:
    """Checks the outputs of verified entries after their samples.

    entries, cases: by the label of the call.  A remark of a check becomes the case's reason.
    scale: see `_changeable`; None: there is no memory to change the inputs.
    """

    entries: Mapping[str, Entry]
    cases: dict[str, Case]
    scale: Callable[[float], None] | None

    def check(self, label: str, run: Run) -> str:
        """The reason why the output of `run` is wrong now; empty if it is right.

        The inputs are the verified ones; then, as a second test, these times a factor.  If there is
        no memory for the second test, the case has a remark.
        """
        entry = self.entries[label]
        call = entry.call
        _poison(run(), call.inputs)

        def run_once() -> OutputPair:
            return call.as_fp32(run())

        output, late = completed(run_once, call.device)
        if fault := late or call.out_of_bounds():
            return fault
        if fingerprint(*output) != entry.bits:
            if fault := self._outside(label, output):
                return fault
            self._remark(label, "repeated calls differ in their bits, within the budget")
        with suppress(torch.OutOfMemoryError):
            if self.scale:
                return self._scaled_fault(label, run, output, self.scale)
        self._remark(label, "not tried with other numbers at the inputs' addresses: out of memory")
        return ""

    def _scaled_fault(
        self, label: str, run: Run, output: OutputPair, scale: Callable[[float], None]
    ) -> str:
        """The reason why the output is wrong with other numbers at the addresses of the inputs;
        empty if it is right.

        The linear inputs are multiplied by a power of two, so that a right output is `output` times
        the same power, bit by bit or within its budget.
        """
        call = self.entries[label].call
        factor = 0.5 if _has_fp16(call) else 2.0
        expected = [tensor * factor for tensor in output]
        _poison(output, call.inputs)
        try:
            scale(factor)
            output = call.as_fp32(run())
            fault = "" if all(map(torch.equal, output, expected)) else self._outside(label, output)
        finally:
            scale(1.0)
        if not fault:
            return ""
        return f"with other numbers at the same addresses of the inputs, {fault}"

    def _outside(self, label: str, output: OutputPair) -> str:
        """The reason why an output of the inputs as they are now is outside its budget; empty if it
        is within.  Empty, too, if the case is that of a baseline whose verified output was outside,
        and this one is finite.
        """
        entry = self.entries[label]
        known = self.cases[label]
        (accuracy,) = compare_with_oracle(
            entry.call.inputs, {label: entry.candidate(output)}
        ).values()
        again = known.changed(accuracy=accuracy)
        return "" if again.result == known.result else again.accuracy_faults

    def _remark(self, label: str, text: str) -> None:
        self.cases[label] = self.cases[label].changed(reason=text)


def _may_be_timed(case: Case, baselines: Baselines) -> bool:
    """Whether a verified case may be timed.

    A baseline is timed even if it is outside its budget or breaks a law, because the verdicts are
    on the others.  An output that a server has recorded cannot be timed.
    """
    tolerated = case.is_only_inaccurate and (case.case_key, case.implementation) in baselines
    return case.kind != "served" and (case.result == "passed" or tolerated)


def _until_timed(case: Case, baselines: Baselines) -> Case:
    """The case to store until it is timed; see `NOT_TIMED`."""
    return case.changed(reason=NOT_TIMED) if _may_be_timed(case, baselines) else case


def _trial_times(entries: Sequence[Entry], timer: CudaTimer) -> dict[Entry, float]:
    """The median device time, in microseconds, of each entry that could be timed.

    Raises MissingCapabilityError, with the entry's label, if an entry makes the GPU unusable.
    """
    runs = {entry.call.label: entry.call.run for entry in entries}
    timed = time_in_turns(runs, timer, TRIALS, check=None, clocks=("device",))
    times: dict[Entry, float] = {}
    for entry in entries:
        fields = timed[entry.call.label]
        if "samples" in fields:
            (device_samples,) = fields["samples"]
            times[entry] = statistics.median(device_samples.us).value
    return times


def _poison(output: OutputPair, inputs: Inputs) -> None:
    """Fill an output with NaN, so that a later run that reuses its memory must write all of it.

    A tensor in memory of the inputs keeps its values, which a later run reads.
    """
    input_storages = {tensor.untyped_storage().data_ptr() for tensor in inputs.tensors.values()}
    for tensor in output:
        if tensor.untyped_storage().data_ptr() not in input_storages:
            tensor.fill_(math.nan)


@contextmanager
def _changeable(calls: Sequence[Call]) -> Iterator[Callable[[float], None] | None]:
    """The context's value is a function that writes the original linear inputs of all calls
    (`Inputs.linear`), times a number, to their addresses; None if there is no memory for copies.

    At the end the inputs are restored.
    """
    by_address: dict[int, torch.Tensor] = {}  # once, although calls share inputs
    for call in calls:
        linear = call.inputs.linear.values()
        for tensor in (*linear, *call.implementation.copies(call.inputs)):
            by_address[tensor.data_ptr()] = tensor
    try:
        before = [tensor.clone() for tensor in by_address.values()]
    except torch.OutOfMemoryError:
        yield None
        return

    def scale(factor: float) -> None:
        for tensor, original in zip(by_address.values(), before, strict=True):
            torch.mul(original, factor, out=tensor)

    try:
        yield scale
    finally:
        scale(1.0)


def _never_the_same(scale: Callable[[float], None] | None, fp16: bool) -> Callable[[bool], None]:
    """A function that scales the inputs by another factor before each sample, so that no
    implementation can reuse an earlier result.

    The timer calls it with True before each sample.  A call with False, at the end, restores the
    inputs.  scale: see `_changeable`; None: the inputs stay.  fp16: a call has fp16 numbers, which
    might overflow.
    """
    numbers = itertools.count(1)

    def change(sampling: bool) -> None:
        """Scale the inputs by the next factor, or by 1 when sampling is over."""
        child.alive()
        if scale is None:
            return
        factor = 1.0
        if sampling:
            # The 128 mantissas of bf16, times 8 powers of two, are 1,024 factors from 0.5 to 127.5,
            # which then come again.  With fp16 there are only the 128 factors below 1.
            exponents, mantissa = divmod(next(numbers), 128)
            exponent = 0 if fp16 else exponents % 8
            factor = (1 + mantissa / 128) * 2.0**exponent / 2
        scale(factor)

    return change


def _has_fp16(call: Call) -> bool:
    """Whether the call has inputs or states in fp16, which might overflow if they were doubled."""
    tensors = (*call.inputs.tensors.values(), *call.implementation.copies(call.inputs))
    return torch.float16 in (call.precision.state_dtype, *(tensor.dtype for tensor in tensors))


def _above_roof(case: Case, ceilings: Ceilings | None) -> dict[str, object]:
    """The fields that fail a case whose device time is shorter than its work can take on this GPU;
    empty for any other case, and if no ceilings are known.

    Such a time says that the timer missed some of the work.
    """
    share = case.floor_pct(ceilings)
    time = case.device_us
    if share is None or time is None or share <= 100:
        return {}
    reason = (
        f"the measurement failed: {time.value:.4g} us of device time would be {share:.4g}% "
        "of the roofline"
    )
    return {"status": "failed", "reason": f"{reason}, so that not all of its work was timed"}


def _borrowed(verdict: Case, fields: Mapping[str, Any], output: OutputPair) -> dict[str, object]:
    """The fields of a case whose output is not compared: those of the same entry's verdict, and
    `nonfinite` if the output is not finite.

    fields, output: from this entry's first run, which gave an output.  The slower of the two first
    calls is reported: it is the one that compiled the kernels.
    """
    if verdict.status != "ran":
        return {"status": verdict.status, "reason": verdict.reason}
    first_calls = (verdict.first_call, fields.get("first_call"))
    slower = max(first_calls, key=lambda first: first.seconds if first else 0.0)
    borrowed = {"accuracy": verdict.accuracy, "probes": verdict.probes, "first_call": slower}
    if not all(bool(tensor.isfinite().all()) for tensor in output):
        borrowed["nonfinite"] = True
    return borrowed


def _batches(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries in lists whose outputs fit in memory together.

    Every list has the baselines of its entries, so that a baseline may be in several lists.  If
    memory has no room for two outputs, each entry is alone, without its baseline.
    """
    capacity = entries[0].call.outputs_that_fit if entries else 0
    if capacity < 2:
        return [[entry] for entry in entries]
    groups: dict[Entry, list[Entry]] = {}  # by baseline; the baseline itself comes first
    for entry in entries:
        baseline = entry.baseline or entry
        group = groups.setdefault(baseline, [baseline])
        if entry is not baseline:
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
