"""Verifies implementations on one call, then times in turns those that are right: for run, bench
and tune.

    first_run -> verify, against the fp64 oracle -> the fastest chunk size -> sample, with a check
    of what they compute

Only what passed is timed, and what it computes while it is timed is checked again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import interpreter_builder

from ssdprof import kernels, operators
from ssdprof.capture.layers import CapturedLayer, OnLayer, token_major
from ssdprof.core import statistics
from ssdprof.core.base import MEMORIES, DType, Probe, grouped
from ssdprof.core.case import Case, LayerCall
from ssdprof.core.subject import CallRef, Ceilings, drafted_call
from ssdprof.environment import child
from ssdprof.environment.machine import watch_clocks
from ssdprof.jobs import limits
from ssdprof.jobs.options import RunOptions
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import sequences
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure import trace
from ssdprof.measure.accuracy import Candidate, fingerprint
from ssdprof.measure.accuracy import compare as compare_with_oracle
from ssdprof.measure.diagnosis import diagnosed
from ssdprof.measure.first_run import (
    Call,
    Run,
    TimeIsUp,
    completed,
    first_line,
    forget_peak,
    peak_bytes,
    status_of,
)
from ssdprof.measure.isolate import GuardedInputs, IsolatedFirstCall, while_it_runs
from ssdprof.measure.probes import Prober
from ssdprof.measure.roofline import measure_ceilings, with_occupancy
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer, time_in_turns
from ssdprof.operators.domain import doubts
from ssdprof.operators.operator import Operator, Output, drafted
from ssdprof.operators.tensors import dtype_named
from ssdprof.progress import Watcher
from ssdprof.store.reports import Writer

# what runs, at which precision, that of its baseline
Pair = tuple[Implementation, Precision, Precision]
# of a call of an operator; baselines first
Pairs = Callable[[str, DType, CallRef | None], Sequence[Pair]]
Verdicts = Mapping[Hashable, Case]  # by `Entry.key`, of the same entries on other inputs
# stands in a case until it is timed: an end of any kind leaves it
NOT_TIMED = "interrupted before it was timed"
TRIALS = SamplingPlan(
    min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3, seconds=math.inf
)


@dataclass(kw_only=True, eq=False)
class Entry:
    """One implementation at one precision and chunk size, on one call.

    case: what is known before it runs.  baseline: whose output it is also compared with; None:
    nobody's.
    turns: entries with equal ones are timed together.
    probes: (whether Triton's interpreter ran it) -> the laws that it obeys, tested after it was
    found correct.
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
    isolated: makes first calls of users' kernels and of named libraries, which then get copies of
        the inputs; None: they run as others do.
    first_call_s: seconds for each first call.  until: the end of the bench, by time.monotonic.
    oracle_must_fit: raise torch.OutOfMemoryError if the oracle does not fit; else the cases say so.
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

    def compare(
        self, entries: Sequence[Entry], label: str, verdicts: Verdicts | None = None
    ) -> Iterator[Case]:
        """Every case as soon as it is verified, and again with its samples or with a fault.

        entries: of inputs that differ in their chunk size only.  label: of the call, for the
        progress.
        verdicts: outputs are not compared, and have these; an output that is not finite fails.
        Raises TimeIsUp after `until`, and MissingCapabilityError if a fault made the GPU unusable.
        """
        copies: dict[str, GuardedInputs] = {}
        for entry in entries:
            if self.isolated and entry.call.implementation.isolated:
                name = entry.case.implementation
                copies[name] = copies.get(name) or GuardedInputs(entry.call.inputs)
                entry.call = self.isolated.guarded(entry.call, copies[name])
        cases: dict[Entry, Case] = {}
        rivals = {entry.case.rated_against for entry in entries}

        def to_time(case: Case) -> bool:
            """Not what a server computed; also a baseline outside its budget, because the verdict
            is on the others.
            """
            rival = case.only_outside and (case.place, case.implementation) in rivals
            return case.kind != "served" and (case.result == "passed" or rival)

        for batch in _batches(entries):
            for entry, case in self._verified(batch, label, verdicts).items():
                if entry in cases:  # a baseline runs for every batch that needs it
                    continue
                cases[entry] = case
                if self.timer is None or case.chunk_size is None:
                    yield case.changed(reason=NOT_TIMED) if self.timer and to_time(case) else case
        if self.timer is None:
            return
        for own in grouped(
            entries, lambda entry: (entry.case.implementation, entry.case.precision)
        ).values():
            found = {entry: cases.pop(entry) for entry in own}
            entry, case = self._fastest(found, self.timer)
            cases[entry] = case
            if case.trials:
                yield case.changed(reason=NOT_TIMED) if to_time(case) else case
        timed = {entry: case for entry, case in cases.items() if to_time(case)}
        for turns in dict.fromkeys(entry.turns for entry in timed):
            with self.watcher.step(f"{label}: timing"):
                group = {entry: case for entry, case in timed.items() if entry.turns == turns}
                yield from self._sampled(group, self.timer)

    def sample_again(
        self, entries: Sequence[Entry], label: str, earlier: Mapping[str, Case]
    ) -> Iterable[Case]:
        """The samples of this process, for entries that another one has verified and timed."""
        known = {one: earlier.get(one.case.name) for one in entries}
        timed = [
            one
            for one, case in known.items()
            if case and case.samples and case.chunk_size == one.case.chunk_size
        ]
        for one in timed:
            one.baseline, one.probes = None, lambda _: ()
        if not timed:
            return ()
        found = self.compare(timed, label, {one.key: case for one, case in known.items() if case})
        return [
            case.changed(accuracy=(), probes=())
            for case in {case.name: case for case in found}.values()
        ]

    # --- accuracy

    def _verified(
        self, entries: Sequence[Entry], label: str, verdicts: Verdicts | None
    ) -> dict[Entry, Case]:
        """Run the entries, whose outputs fit in memory together, and compare them with the oracle
        in one pass.
        """
        runs: dict[Entry, tuple[Output | None, dict[str, Any], bool]] = {}
        with self.watcher.step(f"{label}: running", len(entries), unit="cases") as advance:
            for entry in entries:
                runs[entry] = self._first_run(entry)
                advance(1)
        outputs = {entry: output for entry, (output, _, _) in runs.items() if output is not None}
        if verdicts is None:
            found = self._accuracies(outputs, label)
        else:
            found = {
                entry: _borrowed(verdicts[entry.key], runs[entry][1], output)
                for entry, output in outputs.items()
            }
        for entry, output in outputs.items():
            entry.bits = entry.bits or fingerprint(*output)
        cases = {
            entry: Case(**(entry.case.own | fields | found.get(entry, {})))
            for entry, (_, fields, _) in runs.items()
        }
        interpreted = {entry: one for entry, (_, _, one) in runs.items()}
        del outputs, runs  # the probes need memory
        with self.watcher.step(f"{label}: testing laws", len(cases), unit="cases") as advance:
            for entry, case in cases.items():
                with while_it_runs(case):
                    if case.result == "passed" and (probes := entry.probes(interpreted[entry])):
                        cases[entry] = case.changed(probes=(*case.probes, *probes))
                advance(1)
        return cases

    def _first_run(self, entry: Entry) -> tuple[Output | None, dict[str, Any], bool]:
        """The output, fields of the case, and whether Triton's interpreter ran a kernel."""
        call = entry.call
        interpreter_builder.grid_idx = None  # of the program that runs
        try:
            with while_it_runs(entry.case):
                output, fields = call.first_run(
                    max(0.0, min(self.first_call_s, self.until - time.monotonic()))
                )
        except TimeIsUp:
            if time.monotonic() >= self.until:
                raise TimeIsUp(f" in the first call of {call.label}") from None
            reason = f"its first call was stopped after {self.first_call_s:g} s"
            return None, {"status": "failed", "reason": reason}, False
        first = fields.pop("first_call", None)
        if output is not None and entry.case.kind == "library":
            # a library that tunes itself has launches and allocations of its own, and may leave any
            # values behind
            output, fields = call.first_run()
        if call.device.type == "cuda":
            launches = tuple(
                with_occupancy(launch, call.device) for launch in fields.get("launches", ())
            )
            fields |= {"first_call": first, "launches": launches}
        return output, fields, interpreter_builder.grid_idx is not None

    def _accuracies(
        self, outputs: Mapping[Entry, Output], label: str
    ) -> dict[Entry, dict[str, Any]]:
        """Fields of the cases."""
        if not outputs:
            return {}
        # more chunks round 16-bit states more often, and the budget must cover the entry with the
        # most
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
        return {
            entry: {"accuracy": diagnosed(inputs, candidates[entry], accuracy)}
            for entry, accuracy in found.items()
        }

    # --- speed

    def _fastest(self, cases: Mapping[Entry, Case], timer: CudaTimer) -> tuple[Entry, Case]:
        """The fastest chunk size that passed, by a few replays in turns; else the first entry,
        which says why.
        """
        passed = [entry for entry, case in cases.items() if case.result == "passed"]
        times: dict[Entry, float] = {}
        if len(passed) > 1:
            runs = {str(number): one.call.run for number, one in enumerate(passed)}
            timed = time_in_turns(runs, timer, TRIALS, check=None, clocks=("device",))
            samples = {
                passed[int(number)]: one["samples"]
                for number, one in timed.items()
                if "samples" in one
            }
            times = {
                entry: statistics.median(of_device.us).value
                for entry, (of_device,) in samples.items()
            }
        best = min(passed, key=lambda entry: times.get(entry, math.inf), default=next(iter(cases)))
        trials = {
            case.chunk_size: times.get(entry)
            for entry, case in cases.items()
            if case.chunk_size is not None
        }
        found = cases[best]
        if not trials:
            return best, found
        firsts = (case.first_call.compiled for case in cases.values() if case.first_call)
        compiled = {name: seconds for one in firsts for name, seconds in one.items()}
        first = found.first_call and found.first_call.changed(compiled=compiled)
        return best, found.changed(trials=trials, first_call=first)

    def _sampled(self, group: Mapping[Entry, Case], timer: CudaTimer) -> Iterator[Case]:
        """Time verified entries in turns, and check what they compute then."""
        named = {entry.call.label: entry for entry in group}
        remarks: dict[str, str] = {}

        def outside(name: str, output: Output) -> str:
            """Why an output is worse than the one that was judged."""
            known, call = group[named[name]], named[name].call
            candidate = Candidate(
                output=output, precision=call.precision, cuts=call.implementation.cuts_operands
            )
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
        owns = next((case for case in group.values() if case.kind == "own" or case.named), None)
        with while_it_runs(owns), _changeable(calls) as scale:
            found = time_in_turns(
                {name: entry.call.run for name, entry in named.items()},
                timer,
                self.sampling,
                check=check,
                change=_never_the_same(scale, any(map(_has_fp16, calls))),
                process=self.process,
            )
        for name, case in zip(named, group.values(), strict=True):
            if name in remarks:
                case = case.changed(reason=remarks[name])
            timed = case.changed(**found[name])
            yield (
                case.changed(**unmeasured)
                if (unmeasured := _above_roof(timed, self.ceilings))
                else timed
            )


def _poison(output: Output, inputs: Inputs) -> None:
    """Fill an output with NaN, unless it lies in memory of the inputs: what a later run leaves
    there is its own.
    """
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs.tensors.values()}
    for tensor in output:
        if tensor.untyped_storage().data_ptr() not in given:
            tensor.fill_(math.nan)


@contextmanager
def _changeable(calls: Sequence[Call]) -> Iterator[Callable[[float], None] | None]:
    """Writes the linear inputs, times a number, to their addresses, restored at the end.  None: no
    memory for it.
    """
    own: dict[int, torch.Tensor] = {}
    for call in calls:
        given = call.inputs.tensors
        linear = [given[name] for name in call.inputs.LINEAR if name in given]
        own |= {
            tensor.data_ptr(): tensor
            for tensor in (*linear, *call.implementation.copies(call.inputs))
        }
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
    """Called with True before each sample, so that nothing can be taken from an earlier call; with
    False at the end.
    """
    numbers = itertools.count(1)

    def change(sampling: bool) -> None:
        child.alive()
        if scale is not None:
            number = next(numbers)
            scale(
                (1 + number % 128 / 128) * 2.0 ** (0 if fp16 else number // 128 % 8) / 2
                if sampling
                else 1.0
            )

    return change


def _has_fp16(call: Call) -> bool:
    """Whether doubled numbers might overflow."""
    given = (*call.inputs.tensors.values(), *call.implementation.copies(call.inputs))
    return torch.float16 in (call.precision.state_dtype, *(tensor.dtype for tensor in given))


def _above_roof(case: Case, ceilings: Ceilings | None) -> dict[str, str]:
    """Fields of a case whose device time is shorter than this GPU can be: its work was not what was
    timed.
    """
    share, time = case.floor_pct(ceilings), case.device_us
    if share is None or time is None or share <= 100:
        return {}
    reason = (
        f"the measurement failed: {time.value:.4g} us of device time would be {share:.4g}% "
        "of the roofline"
    )
    return {"status": "failed", "reason": f"{reason}, so that not all of its work was timed"}


def _borrowed(verdict: Case, own: dict[str, Any], output: Output) -> dict[str, Any]:
    """Fields as of the same entry on other inputs; the slower first call counts, as the other found
    its kernels.
    """
    if verdict.status != "ran":
        return {"status": verdict.status, "reason": verdict.reason}
    first_calls = (verdict.first_call, own.get("first_call"))
    slower = max(first_calls, key=lambda first: first.seconds if first else 0.0)
    finite = all(bool(tensor.isfinite().all()) for tensor in output)
    borrowed = {"accuracy": verdict.accuracy, "probes": verdict.probes, "first_call": slower}
    return borrowed | ({} if finite else {"nonfinite": True})


def _batches(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries whose outputs are in memory together, each with its baseline; without, if two outputs
    do not fit.
    """
    capacity = entries[0].call.outputs_that_fit if entries else 0
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


# --- captured layers


@contextmanager
def replaying(
    writer: Writer,
    wanted: RunOptions,
    pairs: Pairs,
    cast_to: DType | None,
    watcher: Watcher,
    calls: int,
) -> Iterator[OnLayer]:
    """The context's value compares implementations on a layer.

    cast_to: see `cast_inputs`.  calls: expected number.
    """
    gpu = limits.device() if limits.device().type == "cuda" else None
    isolated = IsolatedFirstCall(wanted.first_call_s)
    prober = Prober(isolated, thorough=wanted.thorough)
    inputs_of = {
        (prompt.seqlen, prompt.batch): prompt.token_sha256 for prompt in writer.report.prompts
    }
    with (
        limits.memory_errors(),
        # In the interpreter NumPy would warn about masked lanes.  Outputs are checked for NaN in
        # any case.
        np.errstate(invalid="ignore", over="ignore"),
        watcher.step("Replaying", calls, unit="calls") as advance,
    ):
        clocks = watch_clocks()
        if gpu:
            writer.update(ceilings=writer.report.ceilings or measure_ceilings(gpu))
            forget_peak(gpu)
        comparer = Comparer(
            timer=CudaTimer(gpu) if gpu and not INTERPRETED else None,
            ceilings=writer.report.ceilings,
            sampling=SamplingPlan(smallest_difference=wanted.smallest_difference),
            process=writer.process,
            isolated=isolated,
            watcher=watcher,
        )

        # that of a run that goes on exists
        untraced = [one for one in (wanted.trace,) if one and not one.is_file()]

        def once(entry: Entry) -> None:
            """For the trace; a call that fails there fails its case."""
            try:
                with while_it_runs(entry.case):
                    entry.call.run()
            except Exception as error:
                status, reason = status_of(error, entry.call.device, entry.case.implementation)
                writer.case(entry.case.changed(status=status, reason=f"in its trace: {reason}"))

        def replay(captured: CapturedLayer) -> None:
            layer, call = captured.layer, captured.call
            operator = operators.get(layer.operator)
            inputs = first_rank(operator, captured.inputs, wanted.tensor_parallel)
            inputs, lost = cast_inputs(operator, inputs, cast_to)
            if wanted.verify:
                call = drafted_call(*inputs.values.shape[1::-1])
                inputs = token_major(drafted(inputs, operator.binding, wanted.verify))
            where = f"{layer.name}, {call}" if call else layer.name
            writer.note(captured.remark)
            writer.note(lost and f"{where}: {lost}")
            writer.doubt(layer.index, doubts(operator, inputs))
            dims, work = operator.judged.cost(inputs)
            prompt = (dims.seqlen, dims.batch)
            if call is not None:
                prompt = (call.prompt_seqlen, 1 if call.kind == "packed" else call.sequences)
            common = {
                "task": LayerCall(kind="layer", layer=layer, call=call, dims=dims),
                "batch": dims.batch,
                "seqlen": dims.seqlen,
                "inputs": inputs_of.get(prompt, ""),
                **work,
            }
            compared = list(pairs(layer.operator, dims.dtype, call))
            if captured.served and inputs is captured.inputs:  # neither cast nor a rank's share
                by = writer.report.model.model_type if writer.report.model else ""
                compared.append((*served(captured, by), compared[0][1]))
            entries = entries_of(operator, inputs, common, compared, prober)
            if wanted.sampler:
                for sampled in comparer.sample_again(entries, layer.name, writer.earlier):
                    writer.case(sampled)
                advance(1)
                return
            earlier = [writer.earlier.get(entry.case.name) for entry in entries]
            # of an interrupted run that goes on
            if all(case and case.reason != NOT_TIMED for case in earlier):
                writer.captured(layer)
                for entry, known in zip(entries, earlier, strict=True):
                    if known and known.probes:
                        prober.probed(entry.call.implementation, inputs)
                writer.remembers(layer.index, partial(forgetting, operator, inputs))
                advance(1)
                return
            for case in comparer.compare(entries, layer.name):
                writer.case(case)
                if case.samples:
                    writer.update(clocks=clocks())
            if wanted.trace and untraced:  # the first layer
                untraced.clear()
                calls_of = {
                    entry.call.label: partial(once, entry) for entry in entries if entry.bits
                }
                trace.write(wanted.trace, calls_of, limits.device())
                watcher.say(
                    f"Wrote {wanted.trace}: {len(calls_of)} cases of {where}, one call of each."
                )
            writer.remembers(layer.index, partial(forgetting, operator, inputs))
            del inputs
            if gpu:
                writer.peaked(peak_bytes(gpu))
            advance(1)

        yield replay


def entries_of(
    operator: Operator,
    inputs: Inputs,
    common: Mapping[str, Any],
    pairs: Sequence[Pair],
    prober: Prober,
) -> list[Entry]:
    """An entry for each pair; those with one baseline are timed together.

    common: the fields that all cases have in common.
    """
    baseline = pairs[0][0].name
    entries: dict[tuple[str, Precision], Entry] = {}
    for one, precision, group in pairs:
        first = entries.get((baseline, group))
        own = dict(
            common,
            implementation=one.name,
            kind=one.kind,
            named=one.named,
            version=one.version,
            precision=str(precision),
        )
        case = Case(**own, baseline=baseline if first else "", status="ran")
        label = f"{one.name} {precision}"
        call = Call(
            operator=operator, implementation=one, inputs=inputs, precision=precision, label=label
        )
        entry = Entry(case=case, call=call, baseline=first, turns=group)
        if one.kind in prober.kinds:
            entry.probes = partial(prober.probe, one, inputs, precision)
        entries[one.name, precision] = entry
    return list(entries.values())


def served(captured: CapturedLayer, by: str) -> tuple[Implementation, Precision]:
    """What a server computed, as an implementation that returns it, and its precision: that of its
    states.
    """
    assert captured.served
    out, final_states = captured.served
    one = Implementation(
        operator=captured.layer.operator,
        name="served",
        kind="served",
        version=by,
        run=lambda *_: kernels.Output(out.clone(), final_states.clone()),
        plan=lambda *_: Plan(variant="served", launches=0, reason=by),
    )
    return one, Precision(state_dtype=final_states.dtype)


def first_rank(operator: Operator, inputs: Inputs, ranks: int) -> Inputs:
    """The first rank's share of an operator's inputs, in the layout of the rank's own
    projection.
    """
    if ranks == 1:
        return inputs
    return token_major(operator.first_rank(inputs, ranks))


def cast_inputs(operator: Operator, inputs: Inputs, to: DType | None) -> tuple[Inputs, str]:
    """The inputs with the model's activations (`CallBinding.activations`) in dtype `to`, in the
    layout of such a model.

    The second value is a sentence for the report on elements that `to` cannot represent; empty if
    there are none.
    to: None changes nothing.
    """
    if to is None:
        return inputs, ""
    given = operator.binding.activations(inputs)
    changed = {name: tensor.to(dtype_named(to)) for name, tensor in given.items()}
    lost = [
        phrase for name, tensor in changed.items() for phrase in _lost(name, given[name], tensor)
    ]
    remark = f"The cast to {to} changed some elements: {'; '.join(lost)}." if lost else ""
    return token_major(replace(inputs, **changed)), remark


def forgetting(operator: Operator, inputs: Inputs) -> tuple[int, ...]:
    """Heads whose mean decays leave 1/1000 of the state after 64, 1K or 16K tokens, and later or
    never.
    """
    bounds = getattr(inputs, "cu_seqlens", None)  # an operator need not have packed sequences
    spans = [
        span
        for span in sequences(len(inputs.values), inputs.values.shape[1], bounds)
        if span.length
    ]
    decays = torch.stack(
        [operator.judged.gate(inputs, span).exponents[..., -1].sum(0) for span in spans]
    ).sum(0)
    each = decays / sum(span.length for span in spans)
    within = [0, *(int((each * length <= math.log(1e-3)).sum()) for length in MEMORIES), len(each)]
    return tuple(after - before for before, after in itertools.pairwise(within))


def _lost(name: str, before: torch.Tensor, after: torch.Tensor) -> Iterator[str]:
    """A phrase on numbers that became infinite or 0."""
    infinite = int((before.isfinite() & ~after.isfinite()).sum())
    zero = int(((before != 0) & (after == 0)).sum())
    if infinite:
        yield f"{infinite:,} of {name} became infinite"
    if zero:
        yield f"{zero:,} of {name} became 0"
