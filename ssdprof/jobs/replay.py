"""Replays captured calls, for `run` and `ssdprof.compare`.

A captured call is cut to the first rank's share, cast to another dtype, and cut to drafted tokens,
if the options say so.  Then each implementation and precision gets an entry, and `jobs.compare`
compares them, unless an interrupted run did that before.  With --decode-states, `jobs.states`
decodes the call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdprof import kernels, operators
from ssdprof.capture.layers import CapturedLayer, OnLayer, token_major
from ssdprof.capture.provenance import Provenance
from ssdprof.capture.store import CaptureWriter
from ssdprof.core.base import MEMORIES, DType
from ssdprof.core.case import LayerCall
from ssdprof.core.target import CallRef, LayerRef, drafted_call
from ssdprof.environment.machine import read_clocks
from ssdprof.jobs import limits
from ssdprof.jobs.compare import NOT_TIMED, Comparer, Entry
from ssdprof.jobs.failures import keeping
from ssdprof.jobs.options import PrefillOptions, RunOptions
from ssdprof.jobs.reading import STEPS
from ssdprof.jobs.states import decode, head_memories
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure import trace
from ssdprof.measure.first_run import forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import IsolatedFirstCall, while_it_runs
from ssdprof.measure.probes import Prober
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.domain import doubts
from ssdprof.operators.implementations import Resolve, own_precisions, required, resolver
from ssdprof.operators.operator import Operator, drafted
from ssdprof.operators.tensors import dtype_named, requested_precisions
from ssdprof.progress import Watcher
from ssdprof.store.reports import Writer

# an implementation, its precision, and the precision of the baseline that it is compared with
Planned = tuple[Implementation, Precision, Precision]
Precisions = Callable[[DType], tuple[Precision, ...]]  # the argument is the dtype of the inputs
# (operator, dtype of the inputs, call) -> the cases of the call, a baseline before those that are
# compared with it.  The call is None if the whole prompt is one call.
Planner = Callable[[Operator, DType, CallRef | None], Sequence[Planned]]


# --- what is compared on a call


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The implementations of a job.

    resolve: gives an implementation of an operator by its name.
    names, baseline_name: the names of the implementations as they were typed.
    precisions: gives the requested precisions, for implementations that declare none of their own.
    requested: the implementations of `names` for each operator, one operator after another.
    baselines: the baseline of each operator.
    decode: whether there are decode steps; then users' kernels and libraries that work in place run
        on these only.

    `requested` may have unavailable implementations.
    """

    resolve: Resolve
    names: tuple[str, ...]
    baseline_name: str
    precisions: Precisions
    requested: tuple[Implementation, ...]
    baselines: tuple[Implementation, ...]
    decode: bool = False

    @property
    def all(self) -> tuple[Implementation, ...]:
        """The requested implementations and the baselines."""
        return (*self.requested, *self.baselines)

    @property
    def baseline(self) -> str:
        """The baseline's name in reports."""
        return self.baselines[0].name

    @property
    def absent(self) -> tuple[str, ...]:
        """The sentence of each unavailable implementation (`Implementation.absent`)."""
        return tuple(dict.fromkeys(known.absent for known in self.all if known.absent))

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the implementations that are available for an operator; the baseline only if it
        was named among them.
        """
        return tuple(dict.fromkeys(known.name for known in self.requested if not known.absent))

    def plan(self, operator: Operator, dtype: DType, call: CallRef | None) -> list[Planned]:
        """The cases of a call of an operator; see `planned`.

        dtype: dtype of the inputs.  call: None if the whole prompt is one call.

        Decode steps are computed by `STEPS`, exactly and with fp32 states, and by users' kernels
        and libraries that work in place, which may declare other precisions.  The requested
        precisions are those of the prompt.
        """
        names = self.names
        baseline = self.baseline_name
        wanted = self.precisions(dtype)
        resolve_name = partial(self.resolve, operator.name)
        in_place = [name for name in names if _works_in_place(resolve_name(name))]
        if call is not None and call.kind == "decode":
            names = (*STEPS, *in_place)
            baseline = STEPS[0]
            wanted = (Precision(),)
        elif self.decode:
            names = tuple(name for name in names if name not in in_place)
        compared = [
            replace(kernel, named=kernel.kind == "library")
            for kernel in map(resolve_name, names)
            if not kernel.absent
        ]
        return planned(compared, resolve_name(baseline), wanted, dtype)


def _works_in_place(kernel: Implementation) -> bool:
    """Whether it is a user's kernel or a library that can write new states over the old ones."""
    return kernel.kind != "bundled" and bool(kernel.in_place)


def planned(
    compared: Sequence[Implementation],
    baseline: Implementation,
    wanted: Sequence[Precision],
    dtype: DType,
) -> list[Planned]:
    """Every case of a call, as it is planned.

    The cases are grouped by the precision of the baseline.  Each group begins with the baseline
    itself, whether or not it is in `compared`.  With `compared` = (fused,), the baseline `unfused`,
    and `wanted` = exact and relaxed, both with fp32 states, the cases are

        (unfused, exact, exact), (fused, exact, exact), (fused, relaxed, exact)

    wanted: the precisions of implementations that declare none of their own.
    dtype: dtype of the inputs.
    """
    # precision of the baseline -> (name, precision) -> implementation
    groups: dict[Precision, dict[tuple[str, Precision], Implementation]] = {}

    def group_of(precision: Precision) -> dict[tuple[str, Precision], Implementation]:
        """The group of implementations at `precision`, which are compared with the baseline with
        exact intermediates and the same states; with the baseline at its first precision if it
        declares precisions and that is none of them.
        """
        exact = replace(precision, intermediates="exact")
        available = own_precisions(baseline, dtype, (exact,)) or (exact,)
        base = exact if exact in available else available[0]
        return groups.setdefault(base, {(baseline.name, base): baseline})

    for precision in wanted:
        group = group_of(precision)
        for known in compared:
            if known.precisions is None:
                group[known.name, precision] = known
    for known in compared:  # without precisions of their own, they are in a group already
        for precision in own_precisions(known, dtype, ()):
            group_of(precision)[known.name, precision] = known
    plans: list[Planned] = []
    for base, members in groups.items():
        plans += [(known, precision, base) for (_, precision), known in members.items()]
    return plans


def resolve_implementations(
    options: RunOptions | PrefillOptions, operator_names: Sequence[str], *, decode: bool = False
) -> Resolved:
    """Resolve the implementations that the options name.

    operator_names: the operators of the layers.  decode: see `Resolved`.

    Raises BadInputError for an unknown name and for a user's kernel that cannot be imported.
    Raises MissingCapabilityError if the baseline is unavailable for one of the operators, or if all
    implementations that would be compared with it are, for all of them.
    """
    resolve = resolver(limits.device())
    requested: list[Implementation] = []
    for operator in operator_names:
        requested += [resolve(operator, name) for name in options.implementations]
    baselines = [resolve(operator, options.baseline) for operator in operator_names]
    others = [known for known in requested if known.name != baselines[0].name]
    needed = list(baselines)
    if all(known.absent for known in others):
        needed += others
    for known in needed:
        required(known)
    return Resolved(
        resolve=resolve,
        names=options.implementations,
        baseline_name=options.baseline,
        precisions=partial(
            requested_precisions, intermediates=options.intermediates, states=options.states
        ),
        requested=tuple(requested),
        baselines=tuple(baselines),
        decode=decode,
    )


# --- the replay


class Replay:
    """Compares implementations on one captured call after another."""

    def __init__(
        self,
        writer: Writer,
        options: RunOptions,
        planner: Planner,
        cast_to: DType | None,
        watcher: Watcher,
    ) -> None:
        """On a GPU, measures its ceilings, unless the report has them, writes the ceilings and the
        clocks to the report, and begins to observe the peak of memory anew.

        planner: gives the cases of a call.  cast_to: the dtype to which inputs are cast; None: they
        stay as captured.

        Without a GPU, and in Triton's interpreter, outputs are compared and nothing is timed.
        """
        self._writer = writer
        self._options = options
        self._planner = planner
        self._cast_to = cast_to
        self._watcher = watcher
        self._device = limits.device()
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            with limits.memory_errors():
                ceilings = writer.report.ceilings or measure_ceilings(self._device)
            writer.update(ceilings=ceilings, clocks=read_clocks())
            forget_peak(self._device)
        # The file to which the first call is traced; None once it is written.  An interrupted run,
        # which goes on now, may have written it.
        self._untraced = options.trace if options.trace and not options.trace.is_file() else None
        # `Provenance` checks the states between calls.  A prompt in one call has none.  Processes
        # that only add samples read calls that were checked before.
        recorded = [prompt.kind == "recorded" for prompt in writer.report.prompts]
        servings = [prompt.serving for prompt in writer.report.prompts]
        has_states = any(recorded) or any(serving.chunk or serving.decode for serving in servings)
        self._provenance: Provenance | None = None
        if has_states and not options.sampler:
            self._provenance = Provenance(rows_are_sequences=not any(recorded))
        isolated = IsolatedFirstCall(options.first_call_s)
        # The tensors of `ssdprof.compare` come from no model, and its report is in no folder.
        self._keep = keeping(writer.folder) if options.model else None
        self._prober = Prober(isolated, laws=options.laws)
        self._comparer = Comparer(
            timer=CudaTimer(self._device) if on_gpu and not INTERPRETED else None,
            ceilings=writer.report.ceilings,
            sampling=SamplingPlan(smallest_difference=options.smallest_difference),
            process=writer.process,
            isolated=isolated,
            watcher=watcher,
            on_fault=self._keep,
        )

    @contextmanager
    def calls(self, count: int, store: CaptureWriter | None = None) -> Iterator[OnLayer]:
        """The context's value is a function that compares implementations on a captured call.

        count: expected number of calls.  store: also stores the captures; None: they are not
        stored.  Raises MissingCapabilityError if memory runs out outside of a case.
        """
        with (
            limits.memory_errors(),
            self._watcher.step("Replaying", count, unit="calls") as advance,
        ):

            def on_layer(captured: CapturedLayer) -> None:
                if store is not None:
                    store.add(captured)
                self._compare_on(captured)
                advance(1)

            yield on_layer

    def _compare_on(self, captured: CapturedLayer) -> None:
        """Compare the implementations on a captured call, or decode its states, and write the
        cases.
        """
        layer = captured.layer
        writer = self._writer
        operator = operators.get(layer.operator)
        call, inputs = self._prepared(operator, captured)
        state_break = self._provenance.state_break(captured) if self._provenance else ""
        if self._options.decode_states:
            dims = operator.oracle.dims(inputs)
            task = LayerCall(kind="layer", layer=layer, dims=dims, state_break=state_break)
            prompt_hash = self._hash_of(dims.seqlen, dims.batch)
            decode(operator, inputs, task, self._options, writer, self._watcher, prompt_hash)
            writer.note_gates(layer.index, partial(heads_by_memory, operator, inputs))
            return
        entries = self._entries(operator, captured, call, inputs, state_break)
        if self._options.sampler:
            for case in self._comparer.sample_again(entries, layer.name, writer.earlier):
                writer.case(case)
            return
        if self._is_done(entries):
            writer.captured(layer)
            # Later layers of the kind then do not test the implementations' laws again.
            for entry in entries:
                if writer.earlier[entry.case.name].probes:
                    self._prober.probed(entry.call.implementation, inputs)
        else:
            self._compare(entries, layer)
        writer.note_gates(layer.index, partial(heads_by_memory, operator, inputs))

    def _prepared(
        self, operator: Operator, captured: CapturedLayer
    ) -> tuple[CallRef | None, Inputs]:
        """The call and its inputs as they are replayed: the first rank's share, cast, and the
        drafted tokens alone, each if the options ask for it.

        Remarks and doubts about the inputs go to the report.
        """
        call = captured.call
        verify = self._options.verify
        inputs = first_rank(operator, captured.inputs, self._options.tensor_parallel)
        inputs, lost = cast_inputs(operator, inputs, self._cast_to)
        if verify:
            batch, seqlen = inputs.values.shape[:2]
            call = drafted_call(seqlen, batch)
            inputs = token_major(drafted(inputs, operator.binding, verify))
        self._writer.note(captured.remark)
        if lost:
            name = captured.layer.name
            self._writer.note(f"{name}, {call}: {lost}" if call else f"{name}: {lost}")
        self._writer.doubt(captured.layer.index, doubts(operator, inputs))
        return call, inputs

    def _entries(
        self,
        operator: Operator,
        captured: CapturedLayer,
        call: CallRef | None,
        inputs: Inputs,
        state_break: str,
    ) -> list[Entry]:
        """An entry for each implementation and precision of the call, and for the output that a
        server recorded, if its inputs are replayed as they were recorded.
        """
        dims, work = operator.oracle.cost(inputs)
        plans = list(self._planner(operator, dims.dtype, call))
        # neither cast, nor a rank's share, nor drafted tokens alone
        unchanged = inputs is captured.inputs
        if captured.served and unchanged:
            _, baseline_precision, _ = plans[0]
            implementation, precision = served(captured)
            plans.append((implementation, precision, baseline_precision))
        prompt_seqlen = dims.seqlen
        prompt_batch = dims.batch
        if call is not None:
            prompt_seqlen = call.prompt_seqlen
            prompt_batch = 1 if call.kind == "packed" else call.sequences
        fields = {
            "task": LayerCall(
                kind="layer", layer=captured.layer, call=call, dims=dims, state_break=state_break
            ),
            "batch": dims.batch,
            "seqlen": dims.seqlen,
            "inputs": self._hash_of(prompt_seqlen, prompt_batch),
            **work,
        }
        return self._by_baseline(inputs, plans, fields)

    def _by_baseline(
        self, inputs: Inputs, plans: Sequence[Planned], fields: Mapping[str, Any]
    ) -> list[Entry]:
        """An entry for each planned case.  Those that are compared with the same precision of the
        baseline are timed together.

        plans: of a call, the baseline's case before those that are compared with it.
        fields: the fields that all cases share.
        """
        first_implementation, *_ = plans[0]
        name = first_implementation.name  # of the baseline
        entries: dict[tuple[str, Precision], Entry] = {}
        for implementation, precision, baseline_precision in plans:
            baseline = entries.get((name, baseline_precision))  # None: this is the baseline
            entry = Entry.of(
                implementation, inputs, precision, baseline=name if baseline else "", **fields
            )
            entry.baseline = baseline
            entry.turns = baseline_precision
            if implementation.kind in self._prober.kinds:
                probe = partial(self._prober.probe, implementation, inputs, precision)
                keep = partial(self._keep, entry) if self._keep else None
                entry.probes = partial(probe, keep=keep)
            entries[implementation.name, precision] = entry
        return list(entries.values())

    def _hash_of(self, seqlen: int, batch: int) -> str:
        """The hash of the tokens of the prompt of this size; empty if there is no such prompt."""
        prompts = self._writer.report.prompts
        hashes = {(prompt.seqlen, prompt.batch): prompt.token_sha256 for prompt in prompts}
        return hashes.get((seqlen, batch), "")

    def _is_done(self, entries: Sequence[Entry]) -> bool:
        """Whether an interrupted run, which goes on now, has compared and timed all entries of the
        call.
        """
        earlier = [self._writer.earlier.get(entry.case.name) for entry in entries]
        return all(case and case.reason != NOT_TIMED for case in earlier)

    def _compare(self, entries: Sequence[Entry], layer: LayerRef) -> None:
        """Compare the entries, and write each case as soon as it is known.

        Also traces the entries once, if --trace requests it and no earlier call was traced, and
        notes clocks and peak memory in the report.
        """
        for case in self._comparer.compare(entries, layer.name):
            self._writer.case(case)
            if case.samples:
                self._writer.update(clocks=read_clocks())
        if self._untraced:
            self._trace(entries, self._untraced)
            self._untraced = None
        self._writer.peaked(peak_bytes(self._device))

    def _trace(self, entries: Sequence[Entry], file: Path) -> None:
        """Write a trace of one call of each entry that gave an output."""
        calls = {
            entry.call.label: partial(self._run_once, entry) for entry in entries if entry.bits
        }
        trace.write(file, calls, self._device)
        case_key = entries[0].case.case_key
        self._watcher.say(f"Wrote {file}: {len(calls)} cases of {case_key}, one call of each.")

    def _run_once(self, entry: Entry) -> None:
        """Run an entry for the trace.  If the call fails here, its case fails."""
        try:
            with while_it_runs(entry.case):
                entry.call.run()
        except Exception as error:
            status, reason = status_of(error, entry.call.device, entry.case.implementation)
            self._writer.case(entry.case.changed(status=status, reason=f"in its trace: {reason}"))


def served(captured: CapturedLayer) -> tuple[Implementation, Precision]:
    """An implementation that returns the output that a server recorded, and its precision, which
    says the dtype of its states.  It has no version: the header of the report says by what the
    calls were recorded.
    """
    assert captured.served
    out, final_states = captured.served

    def run(_inputs: object, _precision: object) -> kernels.Output:
        return kernels.Output(out.clone(), final_states.clone())

    def plan(_inputs: object, _precision: object) -> Plan:
        return Plan(variant="served", launches=0)

    implementation = Implementation(
        operator=captured.layer.operator,
        name="served",
        kind="served",
        run=run,
        plan=plan,
        keeps=lambda _inputs: True,
    )
    return implementation, Precision(state_dtype=final_states.dtype)


def first_rank(operator: Operator, inputs: Inputs, ranks: int) -> Inputs:
    """The first rank's share of an operator's inputs, in the layout of the rank's own projection;
    the inputs themselves if there is one rank.
    """
    if ranks == 1:
        return inputs
    return token_major(operator.first_rank(inputs, ranks))


def cast_inputs(operator: Operator, inputs: Inputs, to: DType | None) -> tuple[Inputs, str]:
    """The inputs with the model's activations (`CallBinding.activations`) cast to dtype `to`, and
    a sentence for the report on elements that `to` cannot represent; it is empty if there are none.

    The tensors get the layout that they would have in a model of that dtype.  to: None returns the
    inputs themselves.
    """
    if to is None:
        return inputs, ""
    activations = operator.binding.activations(inputs)
    changed = {name: tensor.to(dtype_named(to)) for name, tensor in activations.items()}
    lost: list[str] = []
    for name, tensor in changed.items():
        lost += _lost(name, activations[name], tensor)
    remark = f"The cast to {to} changed some elements: {'; '.join(lost)}." if lost else ""
    return token_major(replace(inputs, **changed)), remark


def _lost(name: str, original: torch.Tensor, cast: torch.Tensor) -> Iterator[str]:
    """Phrases on the elements of the tensor `name` that the cast made infinite or 0: at most two.

    original, cast: the tensor before and after it.
    """
    infinite = int((original.isfinite() & ~cast.isfinite()).sum())
    zero = int(((original != 0) & (cast == 0)).sum())
    if infinite:
        yield f"{infinite:,} of {name} became infinite"
    if zero:
        yield f"{zero:,} of {name} became 0"


def heads_by_memory(operator: Operator, inputs: Inputs) -> tuple[int, ...]:
    """Numbers of heads by the length of their memory: element i counts the heads for which
    `head_memories` is i, from 0 to `len(MEMORIES)`.
    """
    memories = head_memories(operator, inputs)
    return tuple(map(memories.count, range(len(MEMORIES) + 1)))
