"""`ssdprof run`, and `capture` without the comparison: from a model or stored captures to a report.

locate -> fetch -> build prompts -> load -> capture each layer -> compare on it -> compare answers, if requested
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssdprof import kernels, operators
from ssdprof.capture import store as captures
from ssdprof.capture.layers import CapturedLayer, OnLayer, token_major
from ssdprof.capture.manifest import read_manifest
from ssdprof.core.base import EXACT_FP32, DType, PrecisionRecord
from ssdprof.core.case import Case, call_size
from ssdprof.core.report import Report, Requested
from ssdprof.core.subject import CallRef, CaptureManifest, CheckpointRef, LayerRef, Prompt, split_prompt
from ssdprof.core.words import plural, words
from ssdprof.environment.machine import ClockWatch, collect
from ssdprof.environment.toolchain import unusable_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import limits
from ssdprof.jobs.answers import compare_answers
from ssdprof.jobs.compare import Comparer, Entry, wanted_pairs
from ssdprof.jobs.plan import load, stored_dims
from ssdprof.jobs.request import COMPARED, STEPS, AnswersRequest, ReplayRequest
from ssdprof.jobs.subject import Stored, Subject, refuse_larger
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.first_run import Call, forget_peak, peak_bytes
from ssdprof.measure.isolate import IsolatedFirstCall
from ssdprof.measure.probes import Prober
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.dtypes import dtype_name, dtype_named, precision_of
from ssdprof.operators.implementations import ImplementationCache, own_precisions, required
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import Writer, draft, opened
from ssdprof.store.reports import load as load_report


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The implementations of a job, by name.

    found: of each operator, in the requested order.  baselines: of each operator.
    """

    cache: ImplementationCache
    found: tuple[Implementation, ...]
    baselines: tuple[Implementation, ...]

    @property
    def baseline(self) -> str:
        """Its name in reports."""
        return self.baselines[0].name

    @property
    def absent(self) -> tuple[str, ...]:
        """A sentence for each unavailable implementation."""
        return tuple(dict.fromkeys(one.absent for one in (*self.found, *self.baselines) if one.absent))

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the available implementations; the baseline only if it was named among them."""
        return tuple(dict.fromkeys(one.name for one in self.found if not one.absent))

    def pairs(
        self, operator: str, dtype: DType, replay: ReplayRequest, call: CallRef | None
    ) -> list[tuple[Implementation, PrecisionRecord, PrecisionRecord]]:
        """`wanted_pairs` of a call of an operator, with the implementations: decode steps have their own."""
        names, baseline, wanted = replay.implementations, replay.baseline, replay.precisions(dtype)
        if call is not None and call.kind == "decode":  # computed in fp32, whatever the precision of the prompt
            names, baseline, wanted = STEPS, STEPS[0], (EXACT_FP32,)
        compared = [one for one in (self.cache.get(operator, name) for name in names) if not one.absent]
        first = self.cache.get(operator, baseline)
        known = {one.name: one for one in (*compared, first)}
        fixed = {name: own_precisions(one, dtype, ()) for name, one in known.items() if one.precisions is not None}
        pairs = wanted_pairs(wanted, [one.name for one in compared], first.name, fixed)
        return [(known[name], precision, base) for name, precision, base in pairs]


def resolve_implementations(names: Sequence[str], baseline: str, layers: Sequence[LayerRef]) -> Resolved:
    """Resolve the names for the operators of the layers.

    Raises BadInputError for an unknown name and an own kernel that cannot be imported, MissingCapabilityError if the
    baseline is unavailable, or all that would be compared with it.
    """
    cache = ImplementationCache(limits.device())
    of = dict.fromkeys(layer.operator for layer in layers)
    found = [cache.get(operator, word) for operator in of for word in names]
    baselines = [cache.get(operator, baseline) for operator in of]
    compared = [one for one in found if one.name != baselines[0].name]
    for one in baselines if any(not one.absent for one in compared) else [*baselines, *compared]:
        required(one)
    return Resolved(cache=cache, found=tuple(found), baselines=tuple(baselines))


def unsupported_reason(operator: str, implementations: Sequence[str] = COMPARED) -> str:
    """Why the operator cannot be replayed; empty if it can."""
    if operators.get(operator).oracle is None:
        return "ssdprof cannot judge what its kernels compute"
    missing = [name for name in implementations if name not in kernels.names(operator)]
    return f"there is no {' or '.join(map(repr, missing))} implementation of {operator}" if missing else ""


def check(found: Subject | Stored, replay: ReplayRequest, ranks: Ranks | None = None) -> Resolved:
    """Resolve the implementations.  Raises if this machine cannot replay the subject; `--dry-run` calls it too.

    ranks: processes that share the layers.
    Loads nothing.  `plan.choose` decides whether a model's weights fit.
    """
    if ranks is not None and ranks.count > (layers := len(found.layers)):
        raise BadInputError(
            f"{ranks.count} ranks cannot share {layers} layer{'s' * (layers != 1)}.",
            f"Start torchrun --nproc-per-node {layers}, or take more layers.",
        )
    for name in dict.fromkeys(layer.operator for layer in found.layers):
        if why := unsupported_reason(name):
            raise BadInputError(
                f"{found.ref.repo_id} has {operators.get(name).layers} layers: their inputs can be captured, but "
                f"not be replayed yet, because {why}.",
                "Use 'ssdprof capture' for now, or run a model with other layers.",
            )
        if found.serving.decode and (why := unsupported_reason(name, STEPS)):
            raise BadInputError(f"Decode steps cannot be replayed: {why}.", "Leave out --decode.")
    resolved = resolve_implementations(replay.implementations, replay.baseline, found.layers)
    limits.check_replay(found.seqlens, found.batch)
    if isinstance(found, Stored):
        of_layers = [(capture.layer, stored_dims(capture).sizes) for capture in found.chosen]
        for layer, sizes in of_layers:
            refuse_larger(found.ref, layer, sizes)
    elif replay.tensor_parallel > 1:
        of_layers = [(layer, found.located.sizes(layer)) for layer in found.layers]
    for layer, sizes in of_layers if replay.tensor_parallel > 1 else ():
        refuse_sharding(found.ref, layer, sizes, replay.tensor_parallel)
    return resolved


def refuse_sharding(ref: CheckpointRef, layer: LayerRef, sizes: Mapping[str, int], ranks: int) -> None:
    """BadInputError for a layer of these sizes whose heads a server could not divide among `ranks`."""
    refusal = operators.get(layer.operator).refusal
    fitting: list[int] = []
    if refusal is None:
        why = f"{operators.get(layer.operator).layers} layers cannot be divided here"
    elif why := refusal(sizes, ranks):
        fitting = [number for number in range(2, max(sizes.values()) + 1) if not refusal(sizes, number)]
    if why:
        raise BadInputError(
            f"--tensor-parallel {ranks} does not fit {ref.repo_id}: {why}.",
            f"Give {words(map(str, fitting), 'or')}." if fitting else "Leave out --tensor-parallel.",
        )


def run(
    found: Subject | Stored, replay: ReplayRequest, watcher: Watcher, ranks: Ranks | None = None
) -> tuple[Path, Report]:
    """Capture a model's layers on each prompt, or open stored captures, and compare implementations on them.

    ranks: processes that share the layers.  The first one returns the report of all.
    Returns the run's folder and its report.
    """
    if why := unusable_gpu():
        watcher.say(f"This run uses the CPU.  {why}")
    resolved = check(found, replay, ranks)
    layers = ranks.share(found.layers) if ranks else found.layers
    fields: dict[str, Any]
    if isinstance(found, Stored):
        manifest, load_layer = captures.load(found.folder)
        dtype, prompts = stored_dims(found.chosen[0]).dtype, manifest.prompts
        fields = {"segment_length": manifest.segment_length, "capture_complete": manifest.complete}
        calls = sum(capture.layer in layers for capture in found.chosen)
    else:
        loaded = load(found, watcher)
        dtype, prompts = dtype_name(loaded.model.dtype), loaded.prompts
        fields = {"segment_length": max(loaded.segment_lengths), "placement": loaded.placement}
        mine = replace(loaded, subject=replace(found, layers=layers))
        calls = mine.subject.calls
    cast = replay.cast_from(dtype)
    report = draft(
        "run",
        found.ref.repo_id,
        replay.command,
        model=found.ref,
        environment=collect(),
        prompts=tuple(prompts),
        requested=tuple(_requested(found.layers, prompts, replay, resolved, cast.to if cast else dtype)),
        conditions=replay.conditions,
        baseline=resolved.baseline,
        matched_with=resolved.baseline,
        smallest_difference=replay.smallest_difference,
        cast=cast,
        tensor_parallel=replay.tensor_parallel,
        absent=resolved.absent,
        **fields,
    )
    with opened(replay.out, report, watcher, ranks) as writer:
        with _replaying(writer, replay, resolved, cast.to if cast else None, watcher, calls) as on_layer:
            if isinstance(found, Stored):
                for capture in found.chosen:
                    if capture.layer in layers:
                        on_layer(load_layer(capture, limits.device()))
            elif replay.save_captures:
                with mine.stored_in(writer.captures) as kept:
                    mine.run(lambda captured: (kept.add(captured), on_layer(captured)))
            else:
                mine.run(on_layer)
        # with --decode the model is whole, but none are compared
        if isinstance(found, Subject) and found.whole and not found.serving.decode:
            names = tuple(dict.fromkeys(one.name for one in resolved.found if one.kind != "library"))
            wanted = AnswersRequest(precisions=replay.precisions, implementations=names, weights="own")
            compare_answers(loaded, wanted, watcher, writer)
    return load_report(writer.folder)


def _requested(
    layers: Sequence[LayerRef], prompts: Sequence[Prompt], replay: ReplayRequest, resolved: Resolved, dtype: DType
) -> Iterator[Requested]:
    """Every implementation at every precision, in every call of every layer, on every prompt."""
    for prompt in prompts:
        for layer in layers:
            for call in prompt.serving.calls(prompt.seqlen, prompt.batch):
                size = call_size(_seqlen(prompt, call), prompt.batch, call)
                for implementation, precision, _ in resolved.pairs(layer.operator, dtype, replay, call):
                    yield Requested(f"layer {layer.index}, {size}", implementation.name, str(precision))


def _seqlen(prompt: Prompt, call: CallRef | None) -> int:
    """Tokens of each sequence in the call; of all packed sequences together."""
    if call is None or call.kind == "packed":
        return prompt.seqlen
    if call.kind == "decode":
        return 1
    assert prompt.serving.chunk is not None
    start, stop = split_prompt(prompt.seqlen, prompt.serving.chunk)[call.number - 1]
    return stop - start


@contextmanager
def _replaying(
    writer: Writer, wanted: ReplayRequest, resolved: Resolved, cast_to: DType | None, watcher: Watcher, calls: int
) -> Iterator[OnLayer]:
    """The context's value compares implementations on a layer.  calls: expected number."""
    gpu = limits.device() if limits.device().type == "cuda" else None
    isolated = IsolatedFirstCall(wanted.first_call_s)
    prober = Prober(isolated, thorough=wanted.thorough)
    inputs_of = {(prompt.seqlen, prompt.batch): prompt.token_sha256 for prompt in writer.report.prompts}
    with (
        limits.memory_errors(),
        # In the interpreter NumPy would warn about masked lanes.  Outputs are checked for NaN in any case.
        np.errstate(invalid="ignore", over="ignore"),
        ClockWatch() as clocks,
        watcher.step("Replaying", calls, unit="calls") as advance,
    ):
        if gpu:
            writer.update(ceilings=measure_ceilings(gpu))
            forget_peak(gpu)
        comparer = Comparer(
            timer=CudaTimer(gpu) if gpu and not INTERPRETED else None,
            ceilings=writer.report.ceilings,
            sampling=SamplingPlan(smallest_difference=wanted.smallest_difference),
            process=writer.process,
            isolated=isolated,
            watcher=watcher,
        )

        def replay(captured: CapturedLayer) -> None:
            layer, call = captured.layer, captured.call
            inputs, lost = cast_inputs(first_rank(captured.inputs, wanted.tensor_parallel), cast_to)
            where = f"{layer.name}, {call}" if call else layer.name
            writer.note(captured.remark)
            writer.note(lost and f"{where}: {lost}")
            if zero := zeros(inputs):
                writer.note(f"{where}: 0 everywhere in {words(zero, 'and')}, so that wrong kernels may pass.")
            judged = operators.get(inputs.operator).judged
            dims, work = judged.cost(inputs)
            prompt = (dims.seqlen, dims.batch)
            if call is not None:
                prompt = (call.prompt_seqlen, 1 if call.kind == "packed" else call.sequences)
            common = {
                "layer": layer, "call": call, "dims": dims, "batch": dims.batch, "seqlen": dims.seqlen,
                "inputs": inputs_of.get(prompt, ""), **work,
            }  # fmt: skip
            pairs = resolved.pairs(layer.operator, dims.dtype, wanted, call)
            for case in comparer.compare(entries_of(inputs, common, pairs, prober), layer.name):
                writer.case(case)
                if case.samples:
                    clocks.poll()
            del inputs
            if gpu:
                writer.update(clocks=clocks.clocks)
                writer.peaked(peak_bytes(gpu))
            advance(1)

        yield replay


def entries_of(
    inputs: Any,
    common: Mapping[str, Any],
    pairs: Sequence[tuple[Implementation, PrecisionRecord, PrecisionRecord]],
    prober: Prober,
) -> list[Entry]:
    """An entry for each pair of `Resolved.pairs`; those with one baseline are timed together.

    common: the fields that all cases have in common.
    """
    baseline = pairs[0][0].name
    entries: dict[tuple[str, PrecisionRecord], Entry] = {}
    for one, precision, group in pairs:
        first = entries.get((baseline, group))
        own = dict(common, implementation=one.name, kind=one.kind, version=one.version, precision=precision)
        case = Case(**own, baseline=baseline if first else "", status="ran")
        label = f"{one.name} {precision}"
        call = Call(implementation=one, inputs=inputs, precision=precision_of(precision), label=label)
        entry = Entry(case=case, call=call, baseline=first, turns=group)
        if one.kind in prober.kinds:
            entry.probes = partial(prober.probe, one, inputs, precision)
        entries[one.name, precision] = entry
    return list(entries.values())


# --- what is done to captured inputs


def first_rank(inputs: Any, ranks: int) -> Any:
    """The first rank's share of an operator's inputs, in the layout of the rank's own projection."""
    if ranks == 1:
        return inputs
    return token_major(operators.get(inputs.operator).first_rank(inputs, ranks))


def cast_inputs(inputs: Any, to: DType | None) -> tuple[Any, str]:
    """The inputs with the model's activations in dtype `to`, in the layout that a model of that dtype would give them.

    Activations are the tensors with a position that the model computed in its own dtype.  Tensors of the
    whole call (A, D, dt_bias, initial states), and those that every model computes in fp32, are not changed.
    The second value is a sentence for the report on elements that `to` cannot represent; empty if there are none.
    to: None changes nothing.
    """
    if to is None:
        return inputs, ""
    given = operators.get(inputs.operator).binding.activations(inputs)
    changed = {name: tensor.to(dtype_named(to)) for name, tensor in given.items()}
    lost = [phrase for name, tensor in changed.items() for phrase in _lost(name, given[name], tensor)]
    remark = f"The cast to {to} changed some elements: {'; '.join(lost)}." if lost else ""
    return token_major(replace(inputs, **changed)), remark


def zeros(inputs: Any) -> list[str]:
    """The activations that are 0 everywhere."""
    return [name for name in operators.get(inputs.operator).binding.views if not getattr(inputs, name).any()]


def _lost(name: str, before: torch.Tensor, after: torch.Tensor) -> Iterator[str]:
    """A phrase on numbers that became infinite or 0."""
    infinite = int((before.isfinite() & ~after.isfinite()).sum())
    zero = int(((before != 0) & (after == 0)).sum())
    if infinite:
        yield f"{infinite:,} of {name} became infinite"
    if zero:
        yield f"{zero:,} of {name} became 0"


# --- captures without a comparison


def check_capture(out: Path | None, *, overwrite: bool) -> None:
    """Raise if `capture` would refuse the folder or this machine; `--dry-run` calls it too."""
    captures.check_folder(out, overwrite=overwrite)
    limits.check_capture()


def capture(subject: Subject, out: Path | None, *, overwrite: bool, watcher: Watcher) -> tuple[Path, CaptureManifest]:
    """Store the inputs of a model's SSD and GDN layers.  Returns their folder and manifest."""
    check_capture(out, overwrite=overwrite)
    if why := unusable_gpu():
        watcher.say(f"This capture uses the CPU.  {why}")
    loaded = load(subject, watcher)
    folder = out or captures.default_folder(subject.ref, loaded.prompts, subject.layers)
    writer = loaded.stored_in(folder, overwrite=overwrite)
    try:
        with limits.memory_errors(), writer, watcher.step("Capturing layers", subject.calls) as advance:
            loaded.run(lambda captured: (writer.add(captured), advance(1)))
    except KeyboardInterrupt:
        kept = read_manifest(folder)
        if kept.complete or not kept.layers:
            raise
        where = f"What was captured is kept in {folder}, marked as incomplete"
        done = f"{len(kept.layers):,} of {plural(subject.calls, 'call')}"
        raise KeyboardInterrupt(f"{where}: {done}.") from None
    return folder, writer.manifest
