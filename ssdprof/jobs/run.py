"""`ssdprof run`, and `capture` without the comparison: from a model or stored captures to a report.

locate -> fetch -> build prompts -> load -> capture each layer -> compare on it -> compare answers,
if requested
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdprof import kernels, operators, settings
from ssdprof.capture import store as captures
from ssdprof.capture.recording import open_recording
from ssdprof.core.base import DType
from ssdprof.core.case import call_size
from ssdprof.core.report import Report, Requested
from ssdprof.core.subject import (
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
from ssdprof.jobs.compare import Pair, Pairs, replaying
from ssdprof.jobs.options import AnswersOptions, CaptureOptions, RunOptions
from ssdprof.jobs.plan import load, sources, stored_dims
from ssdprof.jobs.reading import STEPS
from ssdprof.jobs.subject import Stored, Subject, refuse_larger
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.domain import doubts
from ssdprof.operators.implementations import Resolve, own_precisions, required, resolver
from ssdprof.operators.tensors import dtype_name, requested_precisions
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import load as load_report
from ssdprof.store.reports import opened


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The implementations of a job, by name.

    names, baseline_name: as they were typed.
    found: of each operator, in the requested order.  baselines: of each operator.
    decode: whether there are decode steps, for which alone kernels that work in place are then.
    """

    resolve: Resolve
    names: tuple[str, ...]
    baseline_name: str
    found: tuple[Implementation, ...]
    baselines: tuple[Implementation, ...]
    decode: bool = False

    @property
    def baseline(self) -> str:
        """Its name in reports."""
        return self.baselines[0].name

    @property
    def absent(self) -> tuple[str, ...]:
        """A sentence for each unavailable implementation."""
        return tuple(
            dict.fromkeys(one.absent for one in (*self.found, *self.baselines) if one.absent)
        )

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the available implementations; the baseline only if it was named among them."""
        return tuple(dict.fromkeys(one.name for one in self.found if not one.absent))

    def pairs(
        self, precisions: Precisions, operator: str, dtype: DType, call: CallRef | None
    ) -> list[Pair]:
        """`paired` for a call of an operator: decode steps have implementations of their own."""
        names, baseline, wanted = self.names, self.baseline_name, precisions(dtype)
        words = ((word, self.resolve(operator, word)) for word in names)
        in_place = [word for word, one in words if one.kind == "own" and one.in_place is not None]
        # computed in fp32, whatever the precision of the prompt
        if call is not None and call.kind == "decode":
            names, baseline, wanted = (*STEPS, *in_place), STEPS[0], (Precision(),)
        elif self.decode:
            names = tuple(name for name in names if name not in in_place)
        resolved = (self.resolve(operator, name) for name in names)
        compared = [replace(one, named=one.kind == "library") for one in resolved if not one.absent]
        first = self.resolve(operator, baseline)
        return paired(compared, first, wanted, dtype)


def paired(
    compared: Sequence[Implementation],
    first: Implementation,
    wanted: Sequence[Precision],
    dtype: DType,
) -> list[Pair]:
    """Every case: what runs, at which precision, and that of the baseline; baselines come first,
    compared or not.

    wanted: precisions of those that have none of their own.  dtype: of the inputs.
    first: the baseline.  It runs at exact intermediates and equal states; if its own precisions
        lack these, at the first of them.
    """
    own = {
        one.name: own_precisions(one, dtype, ())
        for one in (*compared, first)
        if one.precisions is not None
    }
    cases = [(one, precision) for precision in wanted for one in compared if one.name not in own]
    cases += [(one, precision) for one in compared for precision in own.get(one.name, ())]
    known = own.get(first.name, ())
    groups: dict[Precision, dict[tuple[str, Precision], Implementation]] = {}

    def group(precision: Precision) -> dict[tuple[str, Precision], Implementation]:
        base = replace(precision, intermediates="exact")
        if known and base not in known:
            base = known[0]
        return groups.setdefault(base, {(first.name, base): first})

    for precision in wanted:
        group(precision)
    for one, precision in cases:
        group(precision)[one.name, precision] = one
    return [
        (one, precision, base) for base, of in groups.items() for (_, precision), one in of.items()
    ]


def resolve_implementations(
    names: Sequence[str], baseline: str, layers: Sequence[LayerRef], *, decode: bool = False
) -> Resolved:
    """Resolve the names for the operators of the layers.  decode: see `Resolved`.

    Raises BadInputError for an unknown name and an own kernel that cannot be imported,
    MissingCapabilityError if the baseline is unavailable, or all that would be compared with it.
    """
    resolve = resolver(limits.device())
    of = dict.fromkeys(layer.operator for layer in layers)
    found = [resolve(operator, word) for operator in of for word in names]
    baselines = [resolve(operator, baseline) for operator in of]
    compared = [one for one in found if one.name != baselines[0].name]
    for one in baselines if any(not one.absent for one in compared) else [*baselines, *compared]:
        required(one)
    return Resolved(
        resolve=resolve,
        names=tuple(names),
        baseline_name=baseline,
        found=tuple(found),
        baselines=tuple(baselines),
        decode=decode,
    )


def check(found: Subject | Stored, replay: RunOptions, ranks: Ranks | None = None) -> Resolved:
    """Resolve the implementations.  Raises if this machine cannot replay the subject; `--dry-run`
    calls it too.

    ranks: processes that share the layers.
    Loads nothing.  `plan.choose` decides whether a model's weights fit.
    """
    if ranks is not None and ranks.count > (layers := len(found.layers)):
        raise BadInputError(
            f"{ranks.count} ranks cannot share {layers} layer{'s' * (layers != 1)}.",
            f"Start torchrun --nproc-per-node {layers}, or take more layers.",
        )
    for name in dict.fromkeys(layer.operator for layer in found.layers):
        if found.serving.decode and not set(STEPS) <= set(kernels.names(name)):
            raise BadInputError(
                f"Decode steps of {name} cannot be replayed.", "Leave out --decode."
            )
    whole = found.serving == Serving() and (
        isinstance(found, Subject) or found.manifest.prompts[0].kind != "recorded"
    )
    if replay.verify and not (whole and replay.verify < min(found.seqlens)):
        raise BadInputError(
            f"--verify {replay.verify} needs prompts of more tokens, each in one call.",
            "Give fewer tokens, or a capture without --packed, --chunked-prefill and --decode.",
        )
    resolved = resolve_implementations(
        replay.implementations, replay.baseline, found.layers, decode=bool(found.serving.decode)
    )
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
    found: Subject | Stored, replay: RunOptions, watcher: Watcher, ranks: Ranks | None = None
) -> tuple[Path, Report]:
    """Capture a model's layers on each prompt, or open stored captures, and compare implementations
    on them.

    ranks: processes that share the layers.  The first one returns the report of all.
    Returns the run's folder and its report.
    """
    if not torch.cuda.is_available():
        conditions = settings.without_speed(
            replay.conditions, replay.gate or (), "--gate", "this machine", watcher.say
        )
        replay = replace(replay, conditions=conditions)
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
        fields |= {"notes": tuple(found.located.caveats)}
        mine = replace(loaded, subject=replace(found, layers=layers))
        calls = mine.subject.calls
    precisions = partial(
        requested_precisions, intermediates=replay.intermediates, states=replay.states
    )
    pairs = partial(resolved.pairs, precisions)
    cast = None if replay.dtype == dtype else replay.dtype
    with opened(
        replay.out,
        watcher,
        ranks,
        partial(sources, found, (*resolved.found, *resolved.baselines)),
        sampler=replay.sampler,
        kind="run",
        subject=found.ref.repo_id,
        command=replay.command,
        model=found.ref,
        environment=collect(),
        prompts=tuple(prompts),
        requested=tuple(_requested(found, prompts, pairs, cast or dtype, replay.verify)),
        conditions=replay.conditions,
        baseline=resolved.baseline,
        matched_with=resolved.baseline,
        smallest_difference=replay.smallest_difference,
        cast=(dtype, cast) if cast else None,
        tensor_parallel=replay.tensor_parallel,
        absent=resolved.absent,
        samplers=replay.processes if limits.device().type == "cuda" else 1,
        **fields,
    ) as writer:
        with replaying(writer, replay, pairs, cast, watcher, calls) as on_layer:
            if isinstance(found, Stored):
                for capture in found.chosen:
                    if capture.layer in layers:
                        on_layer(load_layer(capture, limits.device()))
            elif replay.save_captures:
                with mine.stored_in(writer.captures, overwrite=True) as kept:
                    mine.run(lambda captured: (kept.add(captured), on_layer(captured)))
            else:
                mine.run(on_layer)
        # with --decode the model is whole, but none are compared
        if isinstance(found, Subject) and found.whole and not found.serving.decode:
            names = tuple(
                dict.fromkeys(one.name for one in resolved.found if one.kind != "library")
            )
            wanted = AnswersOptions(model=replay.model, implementations=names, weights="own")
            compare_answers(loaded, wanted, precisions, watcher, writer)
    return load_report(writer.folder)


def _requested(
    found: Subject | Stored, prompts: Sequence[Prompt], pairs: Pairs, dtype: DType, verify: int
) -> Iterator[Requested]:
    """Every implementation and precision in every call of every layer; what a server recorded is
    told there.
    """
    for prompt in prompts:
        for layer in found.layers:
            calls = prompt.serving.calls(prompt.seqlen, prompt.batch)
            if verify:
                calls = (drafted_call(prompt.seqlen, prompt.batch),)
            if prompt.kind == "recorded" and isinstance(found, Stored):
                own = (
                    one for one in found.chosen if (one.layer, one.seqlen) == (layer, prompt.seqlen)
                )
                calls = tuple(one.call for one in own)
            for call in calls:
                size = call_size(verify or _seqlen(prompt, call), prompt.batch, call)
                for implementation, precision, _ in pairs(layer.operator, dtype, call):
                    yield f"layer {layer.index}, {size}", implementation.name, str(precision)


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
    kept = nullcontext() if options.dry_run else writer
    found: dict[str, None] = {}
    with limits.memory_errors(), kept as out, watcher.step("Reading calls", calls) as advance:
        for captured in recording.layers(options.layers):
            if out is not None:
                out.add(captured)
            for text in doubts(operators.get(captured.layer.operator), captured.inputs):
                found[text] = None
            advance(1)
    for text in found:
        watcher.say(f"Suspect the recording: {text}")
    return folder, writer.manifest


def capture(
    subject: Subject, out: Path | None, *, overwrite: bool, watcher: Watcher
) -> tuple[Path, CaptureManifest]:
    """Store the inputs of a model's layers.  Returns their folder and manifest."""
    check_capture(out, overwrite=overwrite)
    if why := unusable_gpu():
        watcher.say(f"This capture uses the CPU.  {why}")
    loaded = load(subject, watcher)
    folder = out or captures.default_folder(subject.ref, loaded.prompts, subject.layers)
    writer = loaded.stored_in(folder, overwrite=overwrite)
    try:
        with (
            limits.memory_errors(),
            writer,
            watcher.step("Capturing layers", subject.calls) as advance,
        ):
            loaded.run(lambda captured: (writer.add(captured), advance(1)))
    except KeyboardInterrupt:
        if writer.kept or not writer.manifest.layers:
            raise
        where = f"What was captured is kept in {folder}, marked as incomplete"
        done = f"{len(writer.manifest.layers):,} of {plural(subject.calls, 'call')}"
        raise KeyboardInterrupt(f"{where}: {done}.") from None
    return folder, writer.manifest
