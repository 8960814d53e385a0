"""`ssdprof run`, and `capture` without the comparison: from a model or stored captures to a report.

locate -> fetch -> build prompts -> load -> capture each layer -> compare on it -> compare answers,
if requested
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ssdprof import kernels, operators, settings
from ssdprof.capture import store as captures
from ssdprof.capture.layers import CapturedLayer, OnLayer
from ssdprof.capture.provenance import Provenance
from ssdprof.capture.recording import open_recording
from ssdprof.core.base import DType
from ssdprof.core.case import call_size
from ssdprof.core.report import Report, Requested
from ssdprof.core.target import (
    CallRef,
    CaptureManifest,
    CheckpointRef,
    LayerRef,
    Prompt,
    Serving,
    drafted_call,
    split_prompt,
)
from ssdprof.core.words import plural, words
from ssdprof.environment.machine import collect
from ssdprof.environment.toolchain import unusable_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import limits
from ssdprof.jobs.answers import Precisions, compare_answers
from ssdprof.jobs.options import AnswersOptions, CaptureOptions, RunOptions
from ssdprof.jobs.plan import Loaded, load, sources, stored_dims
from ssdprof.jobs.reading import STEPS
from ssdprof.jobs.replay import Planned, Planner, replaying
from ssdprof.jobs.target import Stored, Target, refuse_larger
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.domain import doubts
from ssdprof.operators.implementations import Resolve, own_precisions, required, resolver
from ssdprof.operators.operator import Operator
from ssdprof.operators.tensors import dtype_name, requested_precisions
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import load as load_report
from ssdprof.store.reports import opened

# the expected number of calls -> a context that compares on each: see `replaying`
Replaying = Callable[[int], AbstractContextManager[OnLayer]]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The implementations of a job, by name.

    names, baseline_name: as they were typed.
    requested: of each operator, in the requested order.  baselines: of each operator.
    decode: whether there are decode steps, for which alone kernels that work in place are then.
    """

    resolve: Resolve
    names: tuple[str, ...]
    baseline_name: str
    requested: tuple[Implementation, ...]
    baselines: tuple[Implementation, ...]
    decode: bool = False

    @property
    def all(self) -> tuple[Implementation, ...]:
        return (*self.requested, *self.baselines)

    @property
    def baseline(self) -> str:
        """Its name in reports."""
        return self.baselines[0].name

    @property
    def absent(self) -> tuple[str, ...]:
        """A sentence for each unavailable implementation."""
        return tuple(dict.fromkeys(filter(None, (known.absent for known in self.all))))

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the available implementations; the baseline only if it was named among them."""
        return tuple(dict.fromkeys(known.name for known in self.requested if not known.absent))

    def plan(
        self, precisions: Precisions, operator: Operator, dtype: DType, call: CallRef | None
    ) -> list[Planned]:
        """`planned` for a call of an operator: decode steps have implementations of their own."""
        names, baseline, wanted = self.names, self.baseline_name, precisions(dtype)
        resolve = partial(self.resolve, operator.name)
        by_name = {name: resolve(name) for name in names}
        in_place = [
            name for name, kernel in by_name.items() if kernel.kind != "bundled" and kernel.in_place
        ]
        # computed in fp32, whatever the precision of the prompt
        if call is not None and call.kind == "decode":
            names, baseline, wanted = (*STEPS, *in_place), STEPS[0], (Precision(),)
        elif self.decode:
            names = tuple(name for name in names if name not in in_place)
        compared = [
            replace(kernel, named=kernel.kind == "library")
            for kernel in map(resolve, names)
            if not kernel.absent
        ]
        return planned(compared, resolve(baseline), wanted, dtype)


def planned(
    compared: Sequence[Implementation],
    baseline: Implementation,
    wanted: Sequence[Precision],
    dtype: DType,
) -> list[Planned]:
    """Every case of a call; baselines come first, compared or not.

    wanted: precisions of those that have none of their own.  dtype: of the inputs.
    baseline: runs at exact intermediates and equal states; if its own precisions lack these, at
        the first of them.
    """
    flexible = [known for known in compared if known.precisions is None]
    cases: list[tuple[Implementation, Precision]] = []
    for precision in wanted:
        cases += [(known, precision) for known in flexible]
    for known in compared:
        if known.precisions is not None:
            cases += [(known, precision) for precision in own_precisions(known, dtype, ())]
    # by the precision of the baseline
    groups: dict[Precision, dict[tuple[str, Precision], Implementation]] = {}

    def group(precision: Precision) -> dict[tuple[str, Precision], Implementation]:
        exact = replace(precision, intermediates="exact")
        available = own_precisions(baseline, dtype, (exact,))
        base = exact if exact in available else next(iter(available), exact)
        return groups.setdefault(base, {(baseline.name, base): baseline})

    for precision in wanted:
        group(precision)
    for known, precision in cases:
        group(precision)[known.name, precision] = known
    plans: list[Planned] = []
    for base, members in groups.items():
        plans += [(known, precision, base) for (_, precision), known in members.items()]
    return plans


def resolve_implementations(
    names: Sequence[str], baseline: str, layers: Sequence[LayerRef], *, decode: bool = False
) -> Resolved:
    """Resolve the names for the operators of the layers.  decode: see `Resolved`.

    Raises BadInputError for an unknown name and an own kernel that cannot be imported,
    MissingCapabilityError if the baseline is unavailable, or all that would be compared with it.
    """
    resolve = resolver(limits.device())
    names_of_operators = dict.fromkeys(layer.operator for layer in layers)
    requested: list[Implementation] = []
    for operator in names_of_operators:
        requested += [resolve(operator, name) for name in names]
    baselines = [resolve(operator, baseline) for operator in names_of_operators]
    others = [known for known in requested if known.name != baselines[0].name]
    for known in baselines:
        required(known)
    if all(known.absent for known in others):
        for known in others:
            required(known)
    return Resolved(
        resolve=resolve,
        names=tuple(names),
        baseline_name=baseline,
        requested=tuple(requested),
        baselines=tuple(baselines),
        decode=decode,
    )


def check(target: Target | Stored, options: RunOptions, ranks: Ranks | None = None) -> Resolved:
    """Resolve the implementations.  Raises if this machine cannot replay the target; `--dry-run`
    calls it too.

    ranks: processes that share the layers.
    Loads nothing.  `plan.choose` decides whether a model's weights fit.
    """
    if ranks is not None and ranks.count > len(target.layers):
        raise BadInputError(
            f"{ranks.count} ranks cannot share {plural(len(target.layers), 'layer')}.",
            f"Start torchrun --nproc-per-node {len(target.layers)}, or take more layers.",
        )
    for name in dict.fromkeys(layer.operator for layer in target.layers):
        if target.serving.decode and not set(STEPS) <= set(kernels.names(name)):
            raise BadInputError(
                f"Decode steps of {name} cannot be replayed.", "Leave out --decode."
            )
    whole = target.serving == Serving() and (
        isinstance(target, Target) or target.manifest.prompts[0].kind != "recorded"
    )
    if options.verify and not (whole and options.verify < min(target.seqlens)):
        raise BadInputError(
            f"--verify {options.verify} needs prompts of more tokens, each in one call.",
            "Give fewer tokens, or a capture without --packed, --chunked-prefill and --decode.",
        )
    resolved = resolve_implementations(
        options.implementations, options.baseline, target.layers, decode=bool(target.serving.decode)
    )
    limits.check_replay(target.seqlens, target.batch)
    _check_sizes(target, options.tensor_parallel)
    return resolved


def _check_sizes(target: Target | Stored, ranks: int) -> None:
    """BadInputError for layers that are too large, or that `ranks` cannot share."""
    if isinstance(target, Stored):
        of_layers = [(capture.layer, stored_dims(capture).sizes) for capture in target.chosen]
        for layer, sizes in of_layers:
            refuse_larger(target.ref, layer, sizes)
    elif ranks > 1:
        of_layers = [(layer, target.located.sizes(layer)) for layer in target.layers]
    if ranks > 1:
        for layer, sizes in of_layers:
            refuse_sharding(target.ref, layer, sizes, ranks)


def refuse_sharding(
    ref: CheckpointRef, layer: LayerRef, sizes: Mapping[str, int], ranks: int
) -> None:
    """BadInputError for a layer of these sizes whose heads a server could not divide among
    `ranks`.
    """
    operator = operators.get(layer.operator)
    refusal = operator.refusal
    fitting: list[int] = []
    if refusal is None:
        why = f"{operator.layers} layers cannot be divided here"
    elif why := refusal(sizes, ranks):
        fitting = [
            number for number in range(2, max(sizes.values()) + 1) if not refusal(sizes, number)
        ]
    if why:
        raise BadInputError(
            f"--tensor-parallel {ranks} does not fit {ref.repo_id}: {why}.",
            f"Give {words(map(str, fitting), 'or')}."
            if fitting
            else "Leave out --tensor-parallel.",
        )


def run(
    target: Target | Stored, options: RunOptions, watcher: Watcher, ranks: Ranks | None = None
) -> tuple[Path, Report]:
    """Capture a model's layers on each prompt, or open stored captures, and compare implementations
    on them.

    ranks: processes that share the layers.  The first one returns the report of all.
    Returns the run's folder and its report.
    """
    if not torch.cuda.is_available():
        conditions = settings.without_speed(
            options.conditions, options.gate or (), "--gate", "this machine", watcher.say
        )
        options = replace(options, conditions=conditions)
    if why := unusable_gpu():
        watcher.say(f"This run uses the CPU.  {why}")
    resolved = check(target, options, ranks)
    layers = ranks.share(target.layers) if ranks else target.layers
    source = target if isinstance(target, Stored) else load(target, watcher)
    dtype, prompts, header = _source_fields(source)
    precisions = partial(
        requested_precisions, intermediates=options.intermediates, states=options.states
    )
    planner = partial(resolved.plan, precisions)
    cast = None if options.dtype == dtype else options.dtype
    with opened(
        options.out,
        watcher,
        ranks,
        partial(sources, target, resolved.all),
        sampler=options.sampler,
        kind="run",
        target=target.ref.repo_id,
        command=options.command,
        model=target.ref,
        environment=collect(),
        prompts=prompts,
        requested=tuple(_requested(target, prompts, planner, cast or dtype, options.verify)),
        conditions=options.conditions,
        baseline=resolved.baseline,
        matched_with=resolved.baseline,
        smallest_difference=options.smallest_difference,
        cast=(dtype, cast) if cast else None,
        laws=options.laws,
        tensor_parallel=options.tensor_parallel,
        absent=resolved.absent,
        samplers=options.processes if limits.device().type == "cuda" else 1,
        **header,
    ) as writer:
        replay = partial(replaying, writer, options, planner, cast, watcher)
        if isinstance(source, Stored):
            _replay_stored(source, layers, replay)
        else:
            mine = replace(source, target=replace(source.target, layers=layers))
            _replay_captured(mine, writer.captures if options.save_captures else None, replay)
            # with --decode the model is whole, but none are compared
            if source.target.whole and not source.target.serving.decode:
                compared = (known.name for known in resolved.requested if known.kind != "library")
                asked = AnswersOptions(
                    model=options.model,
                    implementations=tuple(dict.fromkeys(compared)),
                    weights="own",
                )
                compare_answers(source, asked, precisions, watcher, writer)
    return load_report(writer.folder)


def _source_fields(source: Stored | Loaded) -> tuple[DType, tuple[Prompt, ...], dict[str, object]]:
    """The model's dtype, the prompts, and other fields of the report."""
    if isinstance(source, Stored):
        manifest = source.manifest
        return (
            stored_dims(source.chosen[0]).dtype,
            tuple(manifest.prompts),
            {"segment_length": manifest.segment_length, "capture_complete": manifest.complete},
        )
    return (
        dtype_name(source.model.dtype),
        source.prompts,
        {
            "segment_length": max(source.segment_lengths),
            "placement": source.placement,
            "notes": tuple(source.target.located.caveats),
        },
    )


def _replay_stored(source: Stored, layers: Sequence[LayerRef], replay: Replaying) -> None:
    """Compare on stored captures."""
    _, read = captures.load(source.folder)
    chosen = [capture for capture in source.chosen if capture.layer in layers]
    with replay(len(chosen)) as on_layer:
        for capture in chosen:
            on_layer(read(capture, limits.device()))


def _replay_captured(loaded: Loaded, folder: Path | None, replay: Replaying) -> None:
    """Compare while the model runs.  folder: where captures are stored too; None: nowhere."""
    store = nullcontext() if folder is None else loaded.stored_in(folder, overwrite=True)
    with replay(loaded.target.calls) as on_layer, store as writer:

        def on_capture(captured: CapturedLayer) -> None:
            if writer is not None:
                writer.add(captured)
            on_layer(captured)

        loaded.run(on_capture)


def _requested(
    target: Target | Stored, prompts: Sequence[Prompt], planner: Planner, dtype: DType, verify: int
) -> Iterator[Requested]:
    """Every implementation and precision in every call of every layer; what a server recorded is
    told there.
    """
    for prompt in prompts:
        for layer in target.layers:
            calls = prompt.serving.calls(prompt.seqlen, prompt.batch)
            if verify:
                calls = (drafted_call(prompt.seqlen, prompt.batch),)
            if prompt.kind == "recorded" and isinstance(target, Stored):
                calls = tuple(
                    capture.call
                    for capture in target.chosen
                    if (capture.layer, capture.seqlen) == (layer, prompt.seqlen)
                )
            for call in calls:
                size = call_size(verify or _seqlen(prompt, call), prompt.batch, call)
                case_key = f"layer {layer.index}, {size}"
                operator = operators.get(layer.operator)
                for implementation, precision, _ in planner(operator, dtype, call):
                    yield case_key, implementation.name, str(precision)


def _seqlen(prompt: Prompt, call: CallRef | None) -> int:
    """Tokens of each sequence in the call; of all packed sequences together."""
    if call is None or call.kind == "packed":
        return prompt.seqlen
    if call.kind == "decode":
        return 1
    assert prompt.serving.chunk is not None
    start, stop = split_prompt(prompt.seqlen, prompt.serving.chunk)[call.number - 1]
    return stop - start


# --- captures without a comparison


def check_capture(out: Path | None, *, overwrite: bool) -> None:
    """Raise if `capture` would refuse the folder or this machine; `--dry-run` calls it too."""
    captures.check_folder(out, overwrite=overwrite)
    limits.check_capture()


def capture_recording(options: CaptureOptions, watcher: Watcher) -> tuple[Path, CaptureManifest]:
    """Store what a server recorded.  Returns the folder and manifest of the capture.

    --dry-run reads everything and stores nothing.
    """
    assert options.recorded
    captures.check_folder(options.out, overwrite=options.force)
    recording = open_recording(Path(options.model).expanduser(), options.recorded)
    layers = recording.ref.layers
    folder = options.out or captures.default_folder(recording.ref, recording.prompts, layers)
    writer = captures.CaptureWriter(
        folder,
        checkpoint=recording.ref,
        prompts=recording.prompts,
        segment_length=recording.prompts[0].seqlen,
        overwrite=options.force,
    )
    calls = sum(map(len, recording.passes))
    watcher.say(
        f"{plural(calls, 'call')} of {plural(len(layers), 'layer')}.  {recording.left_out}".rstrip()
    )
    store = nullcontext() if options.dry_run else writer
    provenance = Provenance(rows_are_sequences=False)
    suspicions: dict[str, None] = {}
    with limits.memory_errors(), store as out, watcher.step("Reading calls", calls) as advance:
        for captured in recording.layers(options.layers):
            if out is not None:
                out.add(captured)
            operator = operators.get(captured.layer.operator)
            for text in (*doubts(operator, captured.inputs), *provenance.faults(captured)):
                suspicions[text] = None
            advance(1)
    for text in suspicions:
        watcher.say(f"Suspect the recording: {text}")
    return folder, writer.manifest


def capture(
    target: Target, out: Path | None, *, overwrite: bool, watcher: Watcher
) -> tuple[Path, CaptureManifest]:
    """Store the inputs of a model's layers.  Returns their folder and manifest."""
    check_capture(out, overwrite=overwrite)
    if why := unusable_gpu():
        watcher.say(f"This capture uses the CPU.  {why}")
    loaded = load(target, watcher)
    folder = out or captures.default_folder(target.ref, loaded.prompts, target.layers)
    writer = loaded.stored_in(folder, overwrite=overwrite)
    try:
        with (
            limits.memory_errors(),
            writer,
            watcher.step("Capturing layers", target.calls) as advance,
        ):

            def add(captured: CapturedLayer) -> None:
                writer.add(captured)
                advance(1)

            loaded.run(add)
    except KeyboardInterrupt:
        if writer.kept or not writer.manifest.layers:
            raise
        where = f"What was captured is kept in {folder}, marked as incomplete"
        done = f"{len(writer.manifest.layers):,} of {plural(target.calls, 'call')}"
        raise KeyboardInterrupt(f"{where}: {done}.") from None
    return folder, writer.manifest
