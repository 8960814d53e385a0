"""Options -> what a command is asked to do, and its target.

Runs before torch is imported, so that wrong options, names and layers are refused at once.  Every
function raises BadInputError; those that find a model, ModelUnavailableError if it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from ssdprof import operators, settings
from ssdprof.capture.manifest import AGAIN, is_capture, read_manifest
from ssdprof.checkpoint.model import Model, open_model
from ssdprof.checkpoint.names import check_layers, select_indices
from ssdprof.core.base import LONGEST_SEQLEN
from ssdprof.core.conditions import KEPT_STEPS, Condition, parse_gate, parse_percent
from ssdprof.core.target import (
    CaptureManifest,
    CheckpointRef,
    LayerCapture,
    LayerRef,
    Prompt,
    Serving,
)
from ssdprof.core.words import words
from ssdprof.environment.child import started
from ssdprof.errors import BadInputError
from ssdprof.files import check_target
from ssdprof.jobs import options as declared
from ssdprof.jobs import reading
from ssdprof.operators.generate import Cell, Tokens, boundaries
from ssdprof.operators.implementations import refuse_two_checkouts, refuse_unknown
from ssdprof.store.ranks import Ranks, follows, join
from ssdprof.store.reports import CAPTURES, HEADER, RUNS, check_folder

Options = TypeVar("Options")
# of the operators of layers, by the operators' names for them
Sizes = Sequence[tuple[LayerRef, Mapping[str, int]]]
_READ: dict[str, Callable[[str], Any]] = {  # fields that are declared by `options.words`
    "seqlens": reading.parse_seqs,
    "seqlen": reading.parse_seq,
    "segment_length": reading.parse_seq,
    "packed": reading.parse_packed,
    "chunk": reading.parse_seq,
    "states": reading.parse_states,
    "decode_states": reading.parse_state_formats,
    "implementations": partial(reading.parse_implementations, "--impl"),
    "smallest_difference": partial(parse_percent, "--smallest-difference"),
}
SEED = 0  # of the lengths of packed sequences
# options that change nothing where states are decoded
_NOT_DECODED = {
    "implementations",
    "baseline",
    "against",
    "match_with",
    "intermediates",
    "states",
    "check",
    "verify",
    "decode",
    "packed",
    "chunk",
    "state_every",
    "pool",
    "chunk_size",
    "laws",
    "answers",
    "prefill",
    "stalls",
    "trace",
    "processes",
}
# of a config's layer_types
_WITHOUT_OPERATOR = ("attention", "full_attention", "sliding_attention", "mlp", "moe")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a request: a checkpoint, its selected layers, and the prompt lengths.

    seqlens: tokens of each row of a prompt; of all sequences together if they are packed.
    whole: the whole model is needed, with its language-model head; else only the layers up to the
    last selected one.
    head: the language-model head is needed; it is, if `whole`.
    dtype: in which the weights are loaded, named as in torch; None: the checkpoint's own.
    """

    request: declared.ModelOptions
    located: Model
    layers: tuple[LayerRef, ...]
    seqlens: tuple[int, ...]
    serving: Serving = field(default_factory=Serving)
    whole: bool = False
    head: bool = False
    dtype: str | None = None

    @property
    def ref(self) -> CheckpointRef:
        return self.located.ref

    @property
    def batch(self) -> int:
        return self.request.batch

    @property
    def sizes(self) -> Sizes:
        pairs = zip(self.located.layers, self.located.mixers, strict=True)
        return [(layer, mixer.sizes) for layer, mixer in pairs if layer in self.layers]

    @property
    def deepest_layer(self) -> int | None:
        return None if self.whole else max(layer.index for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the needed weights, once loaded."""
        return self.located.weight_bytes(self.deepest_layer, head=self.head, dtype=self.dtype)

    @property
    def calls(self) -> int:
        """Expected number of captures: all layers on all prompts."""
        return len(self.layers) * sum(
            len(self.serving.calls(seqlen, self.batch)) for seqlen in self.seqlens
        )


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The target of a request for stored captures: the selected layers of each prompt."""

    request: declared.ModelOptions
    folder: Path
    manifest: CaptureManifest
    chosen: tuple[LayerCapture, ...]

    @property
    def ref(self) -> CheckpointRef:
        return self.manifest.checkpoint

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        return tuple(dict.fromkeys(capture.layer for capture in self.chosen))

    @property
    def seqlens(self) -> tuple[int, ...]:
        """The distinct lengths of the prompts in tokens."""
        lengths = (
            capture.call.prompt_seqlen if capture.call else capture.seqlen
            for capture in self.chosen
        )
        return tuple(dict.fromkeys(lengths))

    @property
    def batch(self) -> int:
        return self.manifest.prompts[0].batch

    @property
    def serving(self) -> Serving:
        """How each prompt is served; it is the same for all."""
        return self.manifest.prompts[0].serving

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.manifest.prompts

    @property
    def header(self) -> dict[str, Any]:
        """The fields of a report's header that the captures determine."""
        return {
            "target": self.ref.repo_id,
            "model": self.ref,
            "prompts": self.prompts,
            "segment_length": self.manifest.segment_length,
            "capture_complete": self.manifest.complete,
        }

    def shared(self, ranks: Ranks) -> Stored:
        """With the layers of this rank."""
        layers = ranks.share(self.layers)
        return replace(
            self, chosen=tuple(capture for capture in self.chosen if capture.layer in layers)
        )


def captures_of(where: str) -> Path | None:
    """The folder of stored captures, if it is named, or a run that stored them."""
    folder = Path(where).expanduser()
    places = (folder, folder / CAPTURES, RUNS / folder / CAPTURES)
    return next(filter(is_capture, places), None)


def find(request: declared.ModelOptions, *, whole: bool = False, head: bool = False) -> Target:
    """Locate the model and select its layers; downloads small files.  whole, head: see
    `Target`.
    """
    located = open_model(request.model, revision=request.revision, tokenizer=request.tokenizer)
    kinds = located.config.get("layer_types")
    if isinstance(kinds, list) and {"mamba", "linear_attention"} & set(map(str, kinds)):
        # a wrong layer is refused before torch is imported
        select_indices(
            request.layers, [i for i, kind in enumerate(kinds) if kind not in _WITHOUT_OPERATOR]
        )
    chosen = select_indices(request.layers, [layer.index for layer in located.layers])
    layers = tuple(layer for layer in located.layers if layer.index in chosen)
    from ssdprof.jobs import limits  # imports torch, so after all other checks

    whole = whole or request.decode > 0  # a model that generates tokens
    lengths: tuple[int, ...] = ()
    if request.packed is not None:
        # drawing a million lengths takes seconds
        _refuse_too_many(request.packed.sequences * (request.packed.shortest or 0))
        lengths = tuple(stop - start for start, stop in pairwise(boundaries(request.packed, SEED)))
    seqlens = (sum(lengths),) if lengths else request.seqlens or limits.default_seqlens()
    _refuse_too_many(request.batch * max(seqlens))
    serving = Serving(packed=lengths, chunk=request.chunk, decode=request.decode)
    return Target(
        request=request,
        located=located,
        layers=layers,
        seqlens=seqlens,
        serving=serving,
        whole=whole,
        head=whole or head,
    )


def _refuse_too_many(tokens: int) -> None:
    if tokens > LONGEST_SEQLEN:
        raise BadInputError(
            f"{tokens:,} tokens are too many for one call.",
            f"Give fewer or shorter sequences, of {LONGEST_SEQLEN:,} tokens together.",
        )


def find_to_replay(request: declared.RunOptions) -> Target | Stored:
    """As `find`, or the wanted layers of stored captures.

    BadInputError for options that do not apply to stored captures, and for a model whose layers are
    too large for every implementation.
    """
    folder = captures_of(request.model)
    if folder is None:
        target = find(request, whole=request.answers)
        refuse_large(target.ref, target.sizes)
        return target
    if request.answers:
        raise BadInputError(
            f"{folder} holds stored captures, and answers need the model.", "Name the model."
        )
    if _model_options(request) - {"model", "layers"} or request.save_captures:
        raise BadInputError(
            f"{folder} holds stored captures: their model, prompt and segments cannot be changed.",
            "--layers is the only model option that applies to stored captures.",
        )
    manifest = read_manifest(folder)
    if not manifest.prompts:
        raise BadInputError(f"The manifest in {folder} is damaged: it names no prompt.", AGAIN)
    indices = select_indices(
        request.layers, tuple(dict.fromkeys(stored.layer.index for stored in manifest.layers))
    )
    chosen = tuple(stored for stored in manifest.layers if stored.layer.index in indices)
    if not chosen:
        raise BadInputError(
            f"{folder} holds no layer: its capture was interrupted.", "Capture again."
        )
    return Stored(request=request, folder=folder, manifest=manifest, chosen=chosen)


def _model_options(request: declared.ServedModelOptions) -> set[str]:
    """Names of the options of a model that were given."""
    return {
        option.name
        for option in fields(declared.ServedModelOptions)
        if "derived" not in option.metadata and getattr(request, option.name) != option.default
    }


def refuse_large(ref: CheckpointRef, sizes_of_layers: Sizes) -> None:
    """BadInputError for a layer with a size above the maximum of the bundled implementations
    (`largest` of the operator's outline).
    """
    for layer, sizes in sizes_of_layers:
        for name, most in operators.get(layer.operator).generated.largest.items():
            if sizes[name] > most:
                raise BadInputError(
                    f"{ref.repo_id} has {name} = {sizes[name]} in layer {layer.index}; kernels "
                    f"take at most {most}.",
                    "Choose a model with smaller layers.",
                )


# --- options


def read(options: Options) -> Options:
    """The options with the values of what was typed as words, and with their conditions.

    Refuses options of a model that exclude each other.
    """
    known = {each.name: each.metadata for each in fields(options)}  # type: ignore[arg-type]
    typed = {
        name: getattr(options, name) for name, metadata in known.items() if "typed" in metadata
    }
    if isinstance(options, declared.ModelOptions):
        if options.prompt_file is not None and options.prompt == "random":
            raise reading.both("--prompt random", "--prompt-file")
        check_layers(options.layers)
    values: dict[str, Any] = {
        name: _READ[name](word) for name, word in typed.items() if isinstance(word, str)
    }
    if "conditions" in known:
        values["conditions"] = _conditions(options)
    request: Options = replace(options, **values)  # type: ignore[type-var]
    if isinstance(request, declared.ServedModelOptions):
        _refuse_contradictions(request)
    return request


def _conditions(options: Any) -> tuple[Condition, ...]:
    """The conditions on the command line, then those of the settings file, if the command reads
    it.
    """
    gates = tuple(map(parse_gate, getattr(options, "gate", None) or ()))
    if not hasattr(options, "config"):
        return gates
    return settings.gates(
        options.config, gates, prefill=isinstance(options, declared.PrefillOptions)
    )


def _check_decoded(options: declared.RunOptions | declared.BenchOptions) -> Any:
    """The options of a run or a bench that decodes states: with its own gates alone.  Refuses
    others that would change nothing.
    """
    if not options.decode_states:
        if options.decode_step > 1:
            raise BadInputError("--decode-step needs --decode-states.", "Give both, or neither.")
        return options
    defaults = {option.name: option.default for option in fields(options)}
    for _, flag, parameter in declared.flags(type(options)):
        name = parameter.name
        if name in _NOT_DECODED and getattr(options, name) != defaults[name]:
            why = "it decodes by 'recurrent', and times nothing"
            raise reading.both("--decode-states", flag, why, f"Leave out {flag}.")
    gates = [gate for gate in options.conditions if gate.metric == KEPT_STEPS]
    for text in options.gate or ():
        if text not in [gate.text for gate in gates]:
            raise reading.both(
                "--decode-states", f"--gate {text}", "", "Write kept-steps@int8:1000."
            )
    return replace(options, conditions=tuple(gates))


def _refuse_contradictions(options: declared.ServedModelOptions) -> None:
    """BadInputError for contradicting options on how a server runs the prompt."""
    if options.packed is not None:
        for option, is_given in (
            ("--seq", options.seqlens is not None),
            ("--batch", options.batch > 1),
            ("--chunked-prefill", options.chunk is not None),
            ("--decode", options.decode > 0),
        ):
            if is_given:
                why = "packed sequences are one call of their own lengths"
                raise reading.both(
                    "--packed",
                    option,
                    why,
                    f"Leave out {option}, or give --batch instead of --packed.",
                )
    if options.chunk is not None and options.segment_length is not None:
        raise reading.both(
            "--chunked-prefill", "--segment", "the chunks are the segments", "Leave out --segment."
        )
    if options.chunk == 1:
        raise BadInputError(
            "--chunked-prefill 1 would be decoding: models compute single tokens by another "
            "function.",
            "Give 2 or more tokens, such as 8k, or use --decode.",
        )


def refuse_ranks(*what: str) -> None:
    """BadInputError if torchrun started several processes.  what: the options or command that they
    cannot share.
    """
    if what and (count := started()) > 1:
        raise BadInputError(
            f"{count} ranks cannot share {' and '.join(what)}.",
            "Start a single process, without torchrun.",
        )


# --- the commands


def run(options: declared.RunOptions) -> tuple[declared.RunOptions, Target | Stored, Ranks | None]:
    """The request, what is replayed, and the processes that share it."""
    request = _check_decoded(read(options))
    if request.verify:
        request = _with_drafted_tokens(request)
    parts = [f"--{name}" for name in ("answers", "prefill", "stalls") if getattr(request, name)]
    _refuse_exclusive(request, parts)
    if request.trace is not None:
        goes_on = (
            request.out is not None and (request.out / HEADER).exists()
        )  # perhaps with its trace
        check_target(request.trace, replace=goes_on, hint="Name another file.")
    alone = {
        "--save-captures": request.save_captures,
        "--processes": request.processes > 1,
        "--trace": request.trace,
    }
    refuse_ranks(*parts, *(name for name, wanted in alone.items() if wanted))
    ranks = join()
    if (ranks is None or ranks.first) and not request.sampler:
        check_folder(request.out)
    return request, find_to_replay(request), ranks


def _with_drafted_tokens(request: declared.RunOptions) -> declared.RunOptions:
    """The options of --verify: in fp32, as decode steps are computed.  `fused`, which takes single
    steps, is the baseline of `recurrent` unless implementations are named.
    """
    step = "fused"
    names = request.implementations
    return replace(
        request,
        implementations=(step, "recurrent") if names == declared.COMPARED else names,
        baseline=step if request.baseline == declared.COMPARED[0] else request.baseline,
        intermediates="exact",
        states=("fp32",),
    )


def _refuse_exclusive(request: declared.RunOptions, parts: Sequence[str]) -> None:
    """BadInputError for options of a run that exclude each other.

    parts: those of "--answers", "--prefill" and "--stalls" that are asked for.
    """
    if request.dtype is not None and parts:
        raise reading.both("--dtype", parts[0], "--dtype changes the inputs of the replay alone")
    if request.stalls and request.tensor_parallel > 1:
        raise reading.both("--stalls", "--tensor-parallel", "--stalls profiles all heads")
    in_one_call = request.packed is None and request.chunk is None and not request.decode
    if request.verify and not in_one_call:
        raise BadInputError(
            "--verify is of prompts in one call.",
            "Leave out --packed, --chunked-prefill and --decode.",
        )
    one_sequence = in_one_call and request.batch == 1 and not request.verify
    if (request.answers or request.prefill) and not (one_sequence and request.tensor_parallel == 1):
        raise BadInputError(
            f"{parts[0]} runs one whole sequence through all heads of the model.",
            "Leave out --batch, --packed, --chunked-prefill, --decode, --tensor-parallel and "
            "--verify.",
        )
    if request.prefill and (folder := captures_of(request.model)) is not None:
        raise BadInputError(
            f"{folder} holds stored captures, and --prefill runs the model.", "Name the model."
        )


def capture(options: declared.CaptureOptions) -> tuple[declared.CaptureOptions, Target | None]:
    """The options, and the target of a capture; None if a recording of a server is captured."""
    refuse_ranks("ssdprof capture")
    request = read(options)
    if request.recorded is None:
        return request, find(request)
    if refused := _model_options(request) - {"model", "layers"}:
        raise BadInputError(
            f"A recording has its own model and prompts: {words(sorted(refused))} cannot be given.",
            "--layers is the only model option that applies to it.",
        )
    return request, None


def answers(options: declared.AnswersOptions) -> tuple[declared.AnswersOptions, Target]:
    """The request, and the whole model, with its weights in fp32 if they are asked for."""
    refuse_ranks("ssdprof answers")
    request = read(options)
    check_folder(request.out)
    target = find(request, whole=True)
    refuse_large(target.ref, target.sizes)
    from ssdprof.jobs import limits  # imports torch, as in `find`

    if request.weights == "auto":
        # no model is served in 16 bit without a GPU: only the operators' error remains
        on_gpu = limits.device().type == "cuda"
        request = replace(request, weights="own" if on_gpu else "fp32")
    if request.weights == "fp32":
        target = replace(target, dtype="float32")
    return request, target


def prefill(options: declared.PrefillOptions) -> declared.PrefillOptions:
    refuse_ranks("ssdprof prefill")
    request = read(options)
    check_folder(request.out)
    refuse_unknown("--impl", request.implementations)
    refuse_unknown("--baseline", (request.baseline,))
    return request


def bench(
    options: declared.BenchOptions,
) -> tuple[declared.BenchOptions, tuple[str, ...], tuple[Tokens, ...], Ranks | None]:
    """The request, the names of all implementations, other libraries first, cells that --max-tokens
    leaves out, and the processes that share the others.
    """
    if options.processes and options.processes > 1:
        refuse_ranks("--processes")
    request = _check_decoded(read(options))
    operator = operators.get(options.operator)
    tokens, too_large = _tokens_of_bench(options)
    if options.verify:  # `fused` takes single steps
        request = replace(request, match_with=request.match_with or "fused")
        if request.implementations == declared.COMPARED:
            request = replace(request, implementations=("fused",))
    shapes = reading.parse_shapes(operator.generated, options.shape)
    against = filter(None, map(str.strip, options.against.split(",")))
    libraries = tuple(dict.fromkeys(against))
    baseline = "fused" if options.verify else operator.baseline
    sizes = reading.parse_chunk_sizes(options.chunk_size)
    if not (options.sampler or follows()):
        check_folder(options.out)
    if sizes and not operator.generated.chunk_sizes:
        raise BadInputError(
            f"--chunk-size does not apply to {operator.name}: its kernels choose their own.",
            "Leave it out.",
        )
    ways = reading.parse_ways(operator, options.draw)
    request = replace(
        request,
        measured=reading.expand(
            shapes, reading.parse_dtypes(options.dtype), tokens, options.layout, ways
        ),
        baseline=options.baseline or next(iter(libraries), baseline),
        sizes=sizes or operator.generated.chunk_sizes,
    )
    return request, (*libraries, *request.implementations), too_large, join()


def _tokens_of_bench(
    options: declared.BenchOptions,
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...]]:
    """The layouts of tokens that are measured, and those that --max-tokens leaves out."""
    most = reading.parse_seq(options.max_tokens)
    tokens, too_large = reading.parse_tokens(
        options.seq, options.batch, options.cells, options.packed, max_tokens=most
    )
    if options.verify or options.state_every:
        option = "--verify" if options.verify else "--state-every"
        others = {"--packed": options.packed, "--cells": options.verify and options.cells}
        if other := next((name for name, typed in others.items() if typed), ""):
            raise reading.both(option, other)
        tokens = reading.parse_kept(options.verify, options.state_every, options.batch, tokens)
    if options.pool:
        tokens = reading.in_pool(options.pool, tokens)
    if options.verify:
        too_large = ()
    return tokens, too_large


def tune(options: declared.TuneOptions) -> tuple[declared.TuneOptions, tuple[Cell, ...]]:
    """The cells to search for; none to clear what was found."""
    refuse_ranks("ssdprof tune")
    if options.clear:
        return options, ()
    tokens, _ = reading.parse_tokens(options.seq, options.batch, "", "", max_tokens=2**31)
    shapes = reading.parse_shapes(operators.get(options.operator).generated, options.shape)
    dtypes = reading.parse_dtypes(options.dtype)
    return options, reading.expand(shapes, dtypes, tokens, "contiguous")


def stalls(options: declared.StallsOptions) -> declared.StallsOptions:
    """The request; its model or run is found by `jobs.stalls`."""
    refuse_ranks("ssdprof stalls")
    if options.where is not None and not options.where.strip():
        raise BadInputError(
            "The name is empty.",
            "Name a run, a model or captures, or leave it out for the latest run.",
        )
    for file in filter(None, (options.markdown, options.html)):
        check_target(file, replace=options.force)
    request = read(options)
    if request.files and any(
        option is not None for option in (request.where, request.layer, request.seqlen, request.out)
    ):
        raise BadInputError(
            "--from reads existing reports and profiles nothing.",
            "Leave out the run or model, --layer, --seq and --out.",
        )
    refuse_two_checkouts(request.implementations)
    refuse_unknown("--impl", request.implementations, besides=("reference",))
    return request
