"""`ssdprof run`, and `capture` without the comparison: from a model or stored captures to a report.

locate -> fetch -> build prompts -> load -> capture each layer -> compare on it -> compare answers,
if requested
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ssdprof import kernels, operators, settings
from ssdprof.capture import store as captures
from ssdprof.capture.layers import CapturedLayer
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
from ssdprof.jobs import limits, states
from ssdprof.jobs.answers import compare_answers
from ssdprof.jobs.options import AnswersOptions, CaptureOptions, RunOptions
from ssdprof.jobs.plan import Loaded, load, sources, stored_dims
from ssdprof.jobs.reading import STEPS
from ssdprof.jobs.replay import Replay, Resolved, resolve_implementations
from ssdprof.jobs.target import Sizes, Stored, Target, refuse_large
from ssdprof.operators.domain import doubts
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import load as load_report
from ssdprof.store.reports import opened
from ssdprof.store.tuned import use_saved


def check(options: RunOptions, target: Target | Stored, ranks: Ranks | None) -> Resolved:
    """Resolve the implementations, and raise an error if the options do not apply to the target, or
    if this machine cannot replay it.

    Loads nothing; `--dry-run` calls it for its errors.  `plan.choose` decides whether a model's
    weights fit.

    ranks: processes that share the layers.  Raises BadInputError and MissingCapabilityError.
    """
    if ranks is not None and ranks.count > len(target.layers):
        raise BadInputError(
            f"{ranks.count} ranks cannot share {plural(len(target.layers), 'layer')}.",
            f"Start torchrun --nproc-per-node {len(target.layers)}, or take more layers.",
        )
    names = tuple(dict.fromkeys(layer.operator for layer in target.layers))
    for name in names:
        if target.serving.decode and not set(STEPS) <= set(kernels.names(name)):
            raise BadInputError(
                f"Decode steps of {name} cannot be replayed.", "Leave out --decode."
            )
    is_recorded = isinstance(target, Stored) and target.prompts[0].kind == "recorded"
    one_call_each = target.serving == Serving() and not is_recorded
    if options.verify and not (one_call_each and options.verify < min(target.seqlens)):
        raise BadInputError(
            f"--verify {options.verify} needs prompts of more tokens, each in one call.",
            "Give fewer tokens, or a capture without --packed, --chunked-prefill and --decode.",
        )
    if options.decode_states and not one_call_each:
        raise BadInputError(
            "--decode-states needs prompts that are one call each.",
            "Give a capture without --packed, --chunked-prefill and --decode.",
        )
    resolved = resolve_implementations(options, names, decode=bool(target.serving.decode))
    limits.check_replay(target.seqlens, target.batch)
    if isinstance(target, Stored):
        sizes_of_layers: Sizes = [
            (capture.layer, stored_dims(capture).sizes) for capture in target.chosen
        ]
        refuse_large(target.ref, sizes_of_layers)
    else:
        sizes_of_layers = target.sizes
    if options.tensor_parallel > 1:
        refuse_sharding(target.ref, sizes_of_layers, options.tensor_parallel)
    return resolved


def refuse_sharding(ref: CheckpointRef, sizes_of_layers: Sizes, ranks: int) -> None:
    """Raises BadInputError for a layer whose heads a server could not divide among `ranks`.

    The hint lists the numbers of ranks that would fit this layer.
    """
    for layer, sizes in sizes_of_layers:
        operator = operators.get(layer.operator)
        refusal = operator.refusal
        hint = "Leave out --tensor-parallel."
        if refusal is None:
            reason = f"{operator.layers} layers cannot be divided here"
        else:
            reason = refusal(sizes, ranks)
            possible = range(2, max(sizes.values()) + 1)
            fitting = [str(number) for number in possible if not refusal(sizes, number)]
            if fitting:
                hint = f"Give {words(fitting, 'or')}."
        if reason:
            raise BadInputError(
                f"--tensor-parallel {ranks} does not fit {ref.repo_id}: {reason}.", hint
            )


def run(
    options: RunOptions, target: Target | Stored, ranks: Ranks | None, watcher: Watcher
) -> tuple[Path, Report]:
    """Capture a model's layers on each prompt, or open stored captures; compare implementations on
    them, and the model's answers if requested.  Returns the run's folder and its report.
    ranks: processes that share the layers.  The first one returns the report of all.
    """
    options = _for_this_machine(options, watcher)
    resolved = check(options, target, ranks)
    if not options.no_tuned:
        use_saved(watcher.say)
    source = target if isinstance(target, Stored) else load(target, watcher)
    dtype = source.dtype if isinstance(source, Loaded) else stored_dims(source.chosen[0]).dtype
    cast = None if options.dtype == dtype else options.dtype  # None: inputs stay in their dtype
    requested = _requested(target, source.prompts, resolved, cast or dtype, options)
    with opened(
        options.out,
        watcher,
        ranks,
        partial(sources, target, resolved.all),
        sampler=options.sampler,
        kind="run",
        command=options.command,
        environment=collect(),
        requested=tuple(requested),
        conditions=options.conditions,
        baseline="" if options.decode_states else resolved.baseline,
        matched_with="" if options.decode_states else resolved.baseline,
        smallest_difference=options.smallest_difference,
        cast=(dtype, cast) if cast else None,
        laws=options.laws,
        tensor_parallel=options.tensor_parallel,
        absent=resolved.absent,
        samplers=options.processes if limits.device().type == "cuda" else 1,
        **source.header,
    ) as writer:
        began = time.monotonic()
        storing: AbstractContextManager[captures.CaptureWriter | None] = nullcontext()
        if options.save_captures and isinstance(source, Loaded):
            storing = source.stored_in(writer.captures, overwrite=True)
        if ranks:
            source = source.take_share(ranks)
        replay = Replay(writer, options, resolved.plan, cast, watcher)
        if isinstance(source, Stored):
            _replay_stored(source, replay)
        else:
            with storing as store, replay.calls(source.target.call_count, store) as on_layer:
                source.run(on_layer)
        if options.answers and isinstance(source, Loaded):
            compared = [known.name for known in resolved.requested if known.kind != "library"]
            answers = AnswersOptions(
                model=options.model,
                implementations=tuple(dict.fromkeys(compared)),
                intermediates=options.intermediates,
                states=options.states,
                weights="own",
            )
            writer.update(seconds=writer.report.first.seconds + time.monotonic() - began)
            compare_answers(source, answers, watcher, writer)
    return load_report(writer.folder)


def _replay_stored(source: Stored, replay: Replay) -> None:
    """Read each chosen capture, and compare implementations on it."""
    _, read = captures.load(source.folder)
    with replay.calls(len(source.chosen)) as on_layer:
        for capture in source.chosen:
            on_layer(read(capture, limits.device()))


def _for_this_machine(options: RunOptions, watcher: Watcher) -> RunOptions:
    """The options; without a GPU, where nothing is timed, without gates on speed that the settings
    file has.

    The watcher shows why a GPU of this machine cannot be used, and which gates are left out.

    Raises MissingCapabilityError without a GPU if the command line has a gate on speed.
    """
    if reason := unusable_gpu():
        watcher.say(f"This run uses the CPU.  {reason}")
    if torch.cuda.is_available():
        return options
    conditions = settings.without_speed(
        options.conditions, options.gate or (), "--gate", "this machine", watcher.say
    )
    return replace(options, conditions=conditions)


def _requested(
    target: Target | Stored,
    prompts: Sequence[Prompt],
    resolved: Resolved,
    dtype: DType,
    options: RunOptions,
) -> Iterator[Requested]:
    """The cases that the run is to measure: for every call of every layer, each implementation and
    precision, or each format of decoded states.

    Cases of a server's recorded outputs are not among them, because not every call has one.
    """
    for prompt in prompts:
        for layer in target.layers:
            if options.decode_states:
                size = call_size(prompt.seqlen, prompt.batch, None)
                yield from states.requested(f"layer {layer.index}", size, options)
                continue
            operator = operators.get(layer.operator)
            for seqlen, batch, call in _calls(target, prompt, layer, options.verify):
                case_key = f"layer {layer.index}, {call_size(seqlen, batch, call)}"
                for implementation, precision, _ in resolved.plan(operator, dtype, call):
                    yield case_key, implementation.name, str(precision)


def _calls(
    target: Target | Stored, prompt: Prompt, layer: LayerRef, verify: int
) -> Iterator[tuple[int, int, CallRef | None]]:
    """The calls of a layer on a prompt, each as tokens of a row, number of rows, and the call; None
    in place of the call if it is on the whole prompt.  Packed sequences are one row, but sequences
    of drafted tokens in a server's recording are a row each.

    verify: number of drafted tokens; 0: none.
    """
    if prompt.kind == "recorded" and isinstance(target, Stored):
        for capture in target.chosen:
            call = capture.call
            if call and capture.layer == layer and call.prompt_seqlen == prompt.seqlen:
                yield capture.seqlen, prompt.seqlen // capture.seqlen, call
    elif verify:
        yield verify, prompt.batch, drafted_call(prompt.seqlen, prompt.batch)
    else:
        for served_call in prompt.serving.calls(prompt.seqlen, prompt.batch):
            yield _seqlen(prompt, served_call), prompt.batch, served_call


def _seqlen(prompt: Prompt, call: CallRef | None) -> int:
    """Tokens of each sequence in a call of `Serving.calls`; of packed sequences, the tokens of all
    together.
    """
    if call is None or call.kind == "packed":
        return prompt.seqlen
    if call.kind == "decode":
        return 1
    assert prompt.serving.chunk is not None
    start, stop = split_prompt(prompt.seqlen, prompt.serving.chunk)[call.number - 1]
    return stop - start


# --- captures without a comparison


def check_capture(out: Path | None, *, overwrite: bool) -> None:
    """Raise the error of `capture` for a folder that it refuses, or a GPU for which Triton cannot
    compile kernels.

    `--dry-run` calls it, too.  out, overwrite: see `capture`.
    """
    captures.check_folder(out, overwrite=overwrite)
    limits.check_capture()


def capture_recording(
    options: CaptureOptions, watcher: Watcher, name: str = ""
) -> tuple[Path, CaptureManifest]:
    """Store the calls that a server recorded.  Returns the folder and manifest of the capture.

    With --dry-run, everything is read and nothing is stored, so that the manifest lists no calls.
    name: the name of the recording; by default that of its folder.

    Warns of inputs that no model has, and of states that do not fit those of the call before.
    """
    assert options.recorded
    captures.check_folder(options.out, overwrite=options.force)
    recording = open_recording(Path(options.model).expanduser(), options.recorded, name)
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
    storing = nullcontext() if options.dry_run else writer
    provenance = Provenance(rows_are_sequences=False)
    warnings: dict[str, None] = {}
    with limits.memory_errors(), storing as store, watcher.step("Reading calls", calls) as advance:
        for captured in recording.layers(options.layers):
            if store is not None:
                store.add(captured)
            operator = operators.get(captured.layer.operator)
            for text in doubts(operator, captured.inputs):
                warnings[f"Inputs that no model has: {text}"] = None
            if text := provenance.state_break(captured):
                name = captured.layer.name
                warnings[f"States between calls that do not fit: {name}, {text}"] = None
            advance(1)
    for text in warnings:
        watcher.say(text)
    return folder, writer.manifest


def capture(
    target: Target, out: Path | None, *, overwrite: bool, watcher: Watcher
) -> tuple[Path, CaptureManifest]:
    """Store the inputs of a model's layers.  Returns the folder and manifest of the capture.

    out: the folder; None: one in the cache.  overwrite: replace a complete capture in it.

    If it is interrupted by Ctrl-C, the calls that are stored stay, and KeyboardInterrupt says
    where; but if the folder has an earlier complete capture, that stays in their place.
    """
    check_capture(out, overwrite=overwrite)
    if reason := unusable_gpu():
        watcher.say(f"This capture uses the CPU.  {reason}")
    loaded = load(target, watcher)
    folder = out or captures.default_folder(target.ref, loaded.prompts, target.layers)
    writer = loaded.stored_in(folder, overwrite=overwrite)
    try:
        with (
            limits.memory_errors(),
            writer,
            watcher.step("Capturing layers", target.call_count) as advance,
        ):

            def add(captured: CapturedLayer) -> None:
                writer.add(captured)
                advance(1)

            loaded.run(add)
    except KeyboardInterrupt:
        if writer.kept or not writer.manifest.layers:  # an earlier capture stays, or nothing does
            raise
        done = f"{len(writer.manifest.layers):,} of {plural(target.call_count, 'call')}"
        raise KeyboardInterrupt(
            f"What was captured is kept in {folder}, marked as incomplete: {done}."
        ) from None
    return folder, writer.manifest
