"""Checks and parses the options of each command, and finds the model or the captures they name.

Checks what it can before it imports torch, so that most wrong options, names and layers are refused
at once.  Every function may raise BadInputError; functions that find a model raise
ModelUnavailableError if it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from ssdprof import operators, settings
from ssdprof.capture.manifest import CAPTURE_HINT, is_capture, read_manifest
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
from ssdprof.core.words import plural, words
from ssdprof.environment.child import rank_count
from ssdprof.errors import BadInputError
from ssdprof.files import check_target
from ssdprof.jobs import options as declared
from ssdprof.jobs import reading
from ssdprof.operators.generate import Cell, Tokens, boundaries
from ssdprof.operators.implementations import refuse_two_checkouts, refuse_unknown
from ssdprof.record.settings import CALLS, PASSED
from ssdprof.store.ranks import Ranks, follows, join
from ssdprof.store.reports import CAPTURES, HEADER, RUNS, check_folder

Options = TypeVar("Options")
Sizes = Sequence[tuple[LayerRef, Mapping[str, int]]]  # layers, and the sizes of their operators
# name of a field that is declared by `options.words` -> the parser of its text
_PARSERS: dict[str, Callable[[str], Any]] = {
    "seqlens": reading.parse_seqs,
    "seqlen": reading.parse_seq,
    "segment_length": reading.parse_seq,
    "packed": reading.parse_packed,
    "chunk": reading.parse_seq,
    "states": reading.parse_states,
    "decode_states": reading.parse_state_formats,
    "implementations": reading.parse_implementations,
    "smallest_difference": partial(parse_percent, "--smallest-difference"),
}
SEED = 0  # for the random lengths of packed sequences
# Fields of a run or a bench whose options have no effect together with --decode-states, and are
# refused.  --no-tuned is not among them: a run captures inputs with tuned kernels.
_NO_EFFECT_ON_DECODING = {
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
    "budget",
    "first_call_s",
    "smallest_difference",
}
# names in a config's layer_types for layers without an operator that ssdprof measures
_WITHOUT_OPERATOR = ("attention", "full_attention", "sliding_attention", "mlp", "moe")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model that a request names: a checkpoint, its selected layers, and the prompt lengths.

    request: the options that name the model.
    located: the checkpoint.
    layers: the selected layers.
    seqlens: for each prompt, the tokens of one row; of all sequences together if they are packed.
    serving: how a server would run each prompt.
    whole: whether all layers and the language-model head are needed; else only the layers up to the
        last selected one are.
    head: whether the language-model head is needed; always if `whole`.
    dtype: the dtype in which the weights are loaded, named as in torch; None: the checkpoint's own.
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
        """The selected layers, each with the sizes of its operator."""
        pairs = zip(self.located.layers, self.located.mixers, strict=True)
        return [(layer, mixer.sizes) for layer, mixer in pairs if layer in self.layers]

    @property
    def deepest_layer(self) -> int | None:
        """The index of the last decoder layer that is needed; None: all layers are."""
        return None if self.whole else max(layer.index for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the needed weights in memory."""
        return self.located.weight_bytes(self.deepest_layer, head=self.head, dtype=self.dtype)

    @property
    def call_count(self) -> int:
        """Expected number of captures: of all calls of all selected layers on all prompts."""
        return len(self.layers) * sum(
            len(self.serving.calls(seqlen, self.batch)) for seqlen in self.seqlens
        )


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The stored captures that a request names.

    request: the options that name them.
    folder, manifest: their folder, and the record of everything in it, which names a prompt.
    chosen: the captures of the selected layers, of every prompt; at least one.
    """

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
        """The distinct lengths of the prompts in tokens; of packed sequences, of all together."""
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
        """How a server runs each prompt; it is the same for all.  The default for a recording."""
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

    def take_share(self, ranks: Ranks) -> Stored:
        """The same captures, but only those of this rank's share of the layers.  Sets
        `Ranks.divided`.
        """
        layers = ranks.share(self.layers)
        return replace(
            self, chosen=tuple(capture for capture in self.chosen if capture.layer in layers)
        )


def captures_of(name: str) -> Path | None:
    """The folder of stored captures that a name means: the folder itself, or one in a run that
    stored captures; None if there is none.
    """
    folder = Path(name).expanduser()
    for place in (folder, folder / CAPTURES, RUNS / folder / CAPTURES):
        if is_capture(place):
            return place
    return None


def find(request: declared.ModelOptions, *, whole: bool = False, head: bool = False) -> Target:
    """Locate the model and select its layers; downloads small files.

    whole, head: see `Target`.  With --decode, both hold in any case.
    """
    located = open_model(request.model, revision=request.revision, tokenizer=request.tokenizer)
    kinds = located.config.get("layer_types")
    if isinstance(kinds, list) and {"mamba", "linear_attention"} & set(map(str, kinds)):
        # The config says which layers have an operator, so that a wrong --layers is refused here,
        # before `located.layers` imports torch.
        select_indices(
            request.layers, [i for i, kind in enumerate(kinds) if kind not in _WITHOUT_OPERATOR]
        )
    chosen = select_indices(request.layers, [layer.index for layer in located.layers])
    layers = tuple(layer for layer in located.layers if layer.index in chosen)
    lengths = _packed_lengths(request)
    if lengths:
        seqlens: tuple[int, ...] = (sum(lengths),)
    else:
        from ssdprof.jobs import limits  # imports torch, so not at the top of the file

        seqlens = request.seqlens or limits.default_seqlens()
    _refuse_too_many(request.batch * max(seqlens))
    whole = whole or request.decode > 0  # a model generates tokens with all layers and its head
    return Target(
        request=request,
        located=located,
        layers=layers,
        seqlens=seqlens,
        serving=Serving(packed=lengths, chunk=request.chunk, decode=request.decode),
        whole=whole,
        head=whole or head,
    )


def _packed_lengths(request: declared.ModelOptions) -> tuple[int, ...]:
    """The random length of each packed sequence; none without --packed."""
    if request.packed is None:
        return ()
    # checked first, because generating a million lengths takes seconds
    shortest = request.packed.shortest
    assert shortest is not None  # because the sequences are packed
    _refuse_too_many(request.packed.sequences * shortest)
    return tuple(stop - start for start, stop in pairwise(boundaries(request.packed, SEED)))


def _refuse_too_many(tokens: int) -> None:
    """BadInputError for more tokens than a call may have."""
    if tokens > LONGEST_SEQLEN:
        raise BadInputError(
            f"{tokens:,} tokens are too many for one call.",
            f"Give fewer or shorter sequences, of {LONGEST_SEQLEN:,} tokens together.",
        )


def find_to_replay(request: declared.RunOptions) -> Target | Stored:
    """The target of `run`: a model, as `find` returns it, or stored captures.

    Raises BadInputError for options that do not apply to stored captures, for a damaged manifest,
    for a capture without a layer, for an unfinished recording, and for a model whose layers are too
    large for the bundled implementations.
    """
    folder = captures_of(request.model)
    if folder is None:
        _refuse_unfinished(Path(request.model).expanduser() / CALLS)
        target = find(request, whole=request.answers)
        refuse_large(target.ref, target.sizes)
        return target
    if request.answers:
        raise BadInputError(
            f"{folder} holds stored captures, and answers need the model.", "Name the model."
        )
    if _model_options(request) - {"model", "layers"} or request.save_captures:
        raise BadInputError(
            f"{folder} holds stored captures: their model, prompt and segments cannot be changed, "
            "and they are not stored again.",
            "--layers is the only model option that applies to stored captures.",
        )
    manifest = read_manifest(folder)
    if not manifest.prompts:
        raise BadInputError(
            f"The manifest in {folder} is damaged: it names no prompt.", CAPTURE_HINT
        )
    stored_indices = dict.fromkeys(capture.layer.index for capture in manifest.layers)
    indices = select_indices(request.layers, tuple(stored_indices))
    chosen = tuple(capture for capture in manifest.layers if capture.layer.index in indices)
    if not chosen:
        raise BadInputError(
            f"{folder} holds no layer: its capture was interrupted.", "Capture again."
        )
    return Stored(request=request, folder=folder, manifest=manifest, chosen=chosen)


def _refuse_unfinished(calls: Path) -> None:
    """BadInputError if `calls` is the folder of calls of an `ssdprof record` that still runs, or
    that was killed.
    """
    if (calls / PASSED).exists():
        count = len(list(calls.glob("*_*.safetensors")))
        hint = "Record again, with --force."
        if count:
            hint = f"Make a capture of it: ssdprof capture --from safetensors {calls} --out DIR."
        raise BadInputError(
            f"{calls.parent} holds an unfinished recording of {plural(count, 'call')}.", hint
        )


def _model_options(request: declared.ServedModelOptions) -> set[str]:
    """The names of the fields of `ServedModelOptions` that differ from their defaults; `model` has
    none, and is always among them.
    """
    return {
        option.name
        for option in fields(declared.ServedModelOptions)
        if "derived" not in option.metadata and getattr(request, option.name) != option.default
    }


def refuse_large(ref: CheckpointRef, sizes_of_layers: Sizes) -> None:
    """BadInputError for a layer with a size above the maximum of the bundled implementations
    (`InputGenerator.largest`).
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
    """The options, with the text of each `words` field parsed, and with their conditions.

    A value that is no text is a default or has been parsed before, and stays.

    Raises BadInputError for text that cannot be parsed, a wrong gate or settings file, and options
    of a model that exclude each other.
    """
    if isinstance(options, declared.ModelOptions):
        if options.prompt_file is not None and options.prompt == "random":
            raise reading.both("--prompt random", "--prompt-file")
        check_layers(options.layers)
    values: dict[str, Any] = {}
    for option in fields(options):  # type: ignore[arg-type]
        text = getattr(options, option.name)
        if "typed" in option.metadata and isinstance(text, str):
            values[option.name] = _PARSERS[option.name](text)
    if hasattr(options, "conditions"):
        values["conditions"] = _conditions(options)
    request: Options = replace(options, **values)  # type: ignore[type-var]
    if isinstance(request, declared.ServedModelOptions):
        _refuse_contradictions(request)
    return request


def _conditions(options: Any) -> tuple[Condition, ...]:
    """The gates of the command line; then, if the command reads a settings file, the gates of the
    file on other values.
    """
    gates = tuple(map(parse_gate, getattr(options, "gate", None) or ()))
    if not hasattr(options, "config"):
        return gates
    return settings.gates(
        options.config, gates, prefill=isinstance(options, declared.PrefillOptions)
    )


def _check_decoded(options: declared.RunOptions | declared.BenchOptions) -> Any:
    """The options of a run or a bench, which `read` has parsed.  With --decode-states, gates of the
    settings file on anything but kept steps are left out.

    Raises BadInputError for options and for gates on the command line that have no effect: with
    --decode-states, for those of `_NO_EFFECT_ON_DECODING`, and for gates on another metric or on a
    format that it does not name; without it, for --decode-step and for gates on kept steps.
    """
    if not options.decode_states:
        needing = [f"--gate {text}" for text in options.gate or () if text.startswith(KEPT_STEPS)]
        if options.decode_step > 1:
            needing.append("--decode-step")
        if needing:
            raise BadInputError(f"{needing[0]} needs --decode-states.", "Give both, or neither.")
        return options
    defaults = {option.name: option.default for option in fields(options)}
    for _, flag, parameter in declared.flags(type(options)):
        name = parameter.name
        if name in _NO_EFFECT_ON_DECODING and getattr(options, name) != defaults[name]:
            reason = "it decodes by 'recurrent', and times nothing"
            raise reading.both("--decode-states", flag, reason, f"Leave out {flag}.")
    formats = [state_format.name for state_format in options.decode_states]
    gates = [gate for gate in options.conditions if gate.metric == KEPT_STEPS]
    texts = [gate.text for gate in gates if gate.at in ("", *formats)]
    for text in options.gate or ():
        if text not in texts:
            decoded = f"--decode-states {','.join(formats)}"
            hint = f"Write kept-steps@{formats[0]}:1000."
            raise reading.both(decoded, f"--gate {text}", hint=hint)
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
                reason = "packed sequences are one call of their own lengths"
                hint = f"Leave out {option}, or give --batch instead of --packed."
                raise reading.both("--packed", option, reason, hint)
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
    """BadInputError if torchrun started several processes.

    what: the options, or the command, that several processes cannot share; without any, there may
    be several.

    Raises what `rank_count` raises, too.
    """
    count = rank_count()
    if what and count > 1:
        raise BadInputError(
            f"{count} ranks cannot share {' and '.join(what)}.",
            "Start a single process, without torchrun.",
        )


# --- the commands


def run(options: declared.RunOptions) -> tuple[declared.RunOptions, Target | Stored, Ranks | None]:
    """The request, the target to replay, and the processes that share it (None: this one alone)."""
    request = _check_decoded(read(options))
    if request.verify:
        request = _with_drafted_tokens(request)
    parts = [f"--{name}" for name in ("answers", "prefill", "stalls") if getattr(request, name)]
    _refuse_exclusive(request, parts)
    if request.trace is not None:
        # an interrupted run, which goes on now, may have written its trace
        goes_on = request.out is not None and (request.out / HEADER).exists()
        check_target(request.trace, replace=goes_on, hint="Name another file.")
    # the given options that are for a single process
    single = list(parts)
    if request.save_captures:
        single.append("--save-captures")
    if request.processes > 1:
        single.append("--processes")
    if request.trace:
        single.append("--trace")
    refuse_ranks(*single)
    ranks = join()
    if (ranks is None or ranks.is_first) and not request.sampler:
        check_folder(request.out)
    return request, find_to_replay(request), ranks


def _with_drafted_tokens(request: declared.RunOptions) -> declared.RunOptions:
    """The request with what --verify implies: exact intermediates and fp32 states, as for decode
    steps.

    In place of the default implementations, `fused`, which computes the drafted tokens step by
    step, is compared with `recurrent`; in place of the default baseline, it is the baseline.
    """
    names = request.implementations
    baseline = request.baseline
    return replace(
        request,
        implementations=("fused", "recurrent") if names == declared.COMPARED else names,
        baseline="fused" if baseline == declared.COMPARED[0] else baseline,
        intermediates="exact",
        states=("fp32",),
    )


def _refuse_exclusive(request: declared.RunOptions, parts: Sequence[str]) -> None:
    """BadInputError for options of a run that exclude each other.

    parts: the given ones of "--answers", "--prefill" and "--stalls".
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
    folder = captures_of(request.model)
    if request.prefill and folder is not None:
        raise BadInputError(
            f"{folder} holds stored captures, and --prefill runs the model.", "Name the model."
        )


def capture(options: declared.CaptureOptions) -> tuple[declared.CaptureOptions, Target | None]:
    """The request, and the model to capture; None if a server's recording is read."""
    refuse_ranks("ssdprof capture")
    request = read(options)
    if request.recorded is None:
        return request, find(request)
    if changed := _model_options(request) - {"model", "layers"}:
        refused = [
            flag
            for _, flag, parameter in declared.flags(type(request))
            if parameter.name in changed
        ]
        raise BadInputError(
            f"A recording has its own model and prompts: {words(refused)} cannot be given.",
            "--layers is the only model option that applies to it.",
        )
    return request, None


def answers(options: declared.AnswersOptions) -> tuple[declared.AnswersOptions, Target]:
    """The request, and the whole model, with its weights in the requested dtype."""
    refuse_ranks("ssdprof answers")
    request = read(options)
    check_folder(request.out)
    target = find(request, whole=True)
    refuse_large(target.ref, target.sizes)
    from ssdprof.jobs import limits  # imports torch, as in `find`

    if request.weights == "auto":
        # No model is served in 16 bit without a GPU.  fp32 leaves only the operators' error.
        on_gpu = limits.device().type == "cuda"
        request = replace(request, weights="own" if on_gpu else "fp32")
    if request.weights == "fp32":
        target = replace(target, dtype="float32")
    return request, target


def prefill(options: declared.PrefillOptions) -> declared.PrefillOptions:
    """The request; `jobs.prefill` finds its model."""
    refuse_ranks("ssdprof prefill")
    request = read(options)
    check_folder(request.out)
    refuse_unknown("--impl", request.implementations)
    refuse_unknown("--baseline", (request.baseline,))
    return request


def bench(
    options: declared.BenchOptions,
) -> tuple[declared.BenchOptions, tuple[str, ...], tuple[Tokens, ...], Ranks | None]:
    """The request, the names of all implementations with those of --against first, the layouts of
    tokens that --max-tokens leaves out, and the processes that share the cells (None: this one
    alone).
    """
    if options.processes and options.processes > 1:
        refuse_ranks("--processes")
    request = _check_decoded(read(options))
    operator = operators.get(options.operator)
    tokens, too_large = tokens_of_bench(options)
    baseline = operator.baseline
    if options.verify:  # drafted tokens are compared with `fused`, which computes step by step
        baseline = "fused"
        request = replace(request, match_with=request.match_with or "fused")
        if request.implementations == declared.COMPARED:
            request = replace(request, implementations=("fused",))
    shapes = reading.parse_shapes(operator.generated, options.shape)
    names = filter(None, map(str.strip, options.against.split(",")))
    against = tuple(dict.fromkeys(names))
    chunk_sizes = reading.parse_chunk_sizes(options.chunk_size)
    if not (options.sampler or follows()):
        check_folder(options.out)
    if chunk_sizes and not operator.generated.chunk_sizes:
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
        baseline=options.baseline or next(iter(against), baseline),
        chunk_sizes=chunk_sizes or operator.generated.chunk_sizes,
    )
    return request, (*against, *request.implementations), too_large, join()


def tokens_of_bench(
    options: declared.BenchOptions,
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...]]:
    """The layouts of tokens that are measured, and those that --max-tokens leaves out.

    With --verify, which takes the place of --seq, none is left out.
    """
    tokens: tuple[Tokens, ...] = ()
    too_large: tuple[Tokens, ...] = ()
    if not options.verify:
        most = reading.parse_seq(options.max_tokens)
        tokens, too_large = reading.parse_tokens(
            options.seq, options.batch, options.cells, options.packed, max_tokens=most
        )
    elif options.cells:
        raise reading.both("--verify", "--cells")
    if options.verify or options.state_every:
        if options.packed:
            option = "--verify" if options.verify else "--state-every"
            raise reading.both(option, "--packed")
        tokens = reading.parse_kept(options.verify, options.state_every, options.batch, tokens)
    if options.pool:
        tokens = reading.with_pool(options.pool, tokens)
    return tokens, too_large


def tune(options: declared.TuneOptions) -> tuple[declared.TuneOptions, tuple[Cell, ...]]:
    """The request, and the cells for which configurations are searched; none with --clear."""
    refuse_ranks("ssdprof tune")
    if options.clear:
        return options, ()
    # of any size: what does not fit in memory is left out later
    tokens, _ = reading.parse_tokens(options.seq, options.batch, "", "")
    shapes = reading.parse_shapes(operators.get(options.operator).generated, options.shape)
    dtypes = reading.parse_dtypes(options.dtype)
    return options, reading.expand(shapes, dtypes, tokens, "contiguous")


def stalls(options: declared.StallsOptions) -> declared.StallsOptions:
    """The request; `jobs.stalls` finds the run, the model or the captures."""
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
