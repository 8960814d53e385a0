"""Options -> what a command is asked to do.  Wrong options are refused here, before torch is imported.

Every function raises BadInputError; those that find a model, ModelUnavailableError if it is not there.
"""

from __future__ import annotations

from dataclasses import replace

from ssdprof import operators, settings
from ssdprof.checkpoint.names import check_layers
from ssdprof.commands import options as declared
from ssdprof.core.base import DType, PrecisionRecord, precisions_for
from ssdprof.core.conditions import of_options, parse_percent
from ssdprof.core.report import Condition
from ssdprof.environment.child import started
from ssdprof.errors import BadInputError
from ssdprof.files import check_target
from ssdprof.jobs import request as wanted
from ssdprof.jobs.request import (
    AnswersRequest,
    BenchRequest,
    CaptureRequest,
    PrefillRequest,
    ReplayRequest,
    StallRequest,
    expand,
    lengths,
    parse_chunk_sizes,
    parse_dtypes,
    parse_implementations,
    parse_seq,
    parse_seqs,
    parse_shapes,
    parse_tokens,
    parse_ways,
)
from ssdprof.jobs.subject import Stored, Subject, captures_of, find, find_to_replay, refuse_large
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.implementations import refuse_two_checkouts, refuse_unknown
from ssdprof.store.ranks import Ranks, follows, join
from ssdprof.store.reports import check_folder


def refuse_ranks(*what: str) -> None:
    """BadInputError if torchrun started several processes.  what: the options or command that they cannot share."""
    if what and (count := started()) > 1:
        raise BadInputError(
            f"{count} ranks cannot share {' and '.join(what)}.", "Start a single process, without torchrun."
        )


def both(one: str, other: str, why: str = "", hint: str = "Give one of them.") -> BadInputError:
    """The error for two options of which a user may give one."""
    return BadInputError(f"{one} and {other} cannot be combined{why and f': {why}'}.", hint)


def on_model(options: declared.ModelOptions) -> CaptureRequest:
    if options.prompt_file is not None and options.prompt == "random":
        raise both("--prompt random", "--prompt-file")
    check_layers(options.layers)
    request = CaptureRequest(
        model=options.model,
        revision=options.revision,
        tokenizer=options.tokenizer,
        text=options.prompt_file or options.prompt,
        seqlens=None if options.seq is None else parse_seqs(options.seq),
        layers=options.layers,
        segment_length=None if options.segment is None else parse_seq(options.segment),
        placement=getattr(options, "placement", None),
    )
    return _served(options, request) if isinstance(options, declared.ServedModelOptions) else request


def _served(options: declared.ServedModelOptions, request: CaptureRequest) -> CaptureRequest:
    """The request with how a server runs the prompt."""
    chunk = None if options.chunked_prefill is None else parse_seq(options.chunked_prefill)
    if options.packed is not None:
        for option, given in (
            ("--seq", options.seq is not None),
            ("--batch", options.batch > 1),
            ("--chunked-prefill", chunk is not None),
            ("--decode", options.decode > 0),
        ):
            if given:
                why = "packed sequences are one call of their own lengths"
                raise both("--packed", option, why, f"Leave out {option}, or give --batch instead of --packed.")
    if chunk is not None and options.segment is not None:
        raise both("--chunked-prefill", "--segment", "the chunks are the segments", "Leave out --segment.")
    if chunk == 1:
        raise BadInputError(
            "--chunked-prefill 1 would be decoding: models compute single tokens by another function.",
            "Give 2 or more tokens, such as 8k, or use --decode.",
        )
    packed = None if options.packed is None else wanted.parse_packed(options.packed)
    return replace(request, batch=options.batch, packed=packed, chunk=chunk, decode=options.decode)


def _states(options: declared.RunOptions | declared.AnswersOptions | declared.BenchOptions) -> tuple[DType, ...] | None:
    return None if options.states is None else wanted.parse_states(options.states)


def _gates(options: declared.RunOptions | declared.BenchOptions) -> tuple[Condition, ...]:
    given = of_options(
        min_speedup=options.min_speedup,
        min_match=options.min_match or (),
        max_rms_ratio=options.max_rms_ratio,
        gates=options.gate or (),
    )
    return settings.gates(options.config, given)


# --- run, capture, answers, prefill


def run(options: declared.RunOptions) -> tuple[ReplayRequest, Subject | Stored, Ranks | None]:
    request = on_model(options)
    replay = ReplayRequest(
        intermediates=options.dtypes,
        states=_states(options),
        implementations=parse_implementations("--impl", options.impl),
        baseline=options.baseline,
        first_call_s=options.first_call,
        thorough=options.thorough,
        smallest_difference=parse_percent("--smallest-difference", options.smallest_difference),
        cast=options.cast,
        tensor_parallel=options.tensor_parallel,
        conditions=_gates(options),
        out=options.out,
        save_captures=options.save_captures,
    )
    given = [f"--{name}" for name in ("answers", "prefill", "stalls") if getattr(options, name)]
    if options.cast is not None and given:
        raise both("--cast", given[0], "--cast changes the inputs of the replay alone")
    if options.stalls and options.tensor_parallel > 1:
        raise both("--stalls", "--tensor-parallel", "--stalls profiles all heads")
    served = (request.batch, request.packed, request.chunk, request.decode) != (1, None, None, 0)
    served = served or options.tensor_parallel > 1
    if served and (options.answers or options.prefill):
        raise BadInputError(
            f"{given[0]} runs one whole sequence through all heads of the model.",
            "Leave out --batch, --packed, --chunked-prefill, --decode and --tensor-parallel.",
        )
    if options.prefill and (folder := captures_of(request)) is not None:
        raise BadInputError(f"{folder} holds stored captures, and --prefill runs the model.", "Name the model.")
    refuse_ranks(*given, *(["--save-captures"] if options.save_captures else []))
    ranks = join()
    if ranks is None or ranks.first:
        check_folder(options.out)
    return replay, find_to_replay(request, save_captures=options.save_captures, whole=options.answers), ranks


def capture(options: declared.CaptureOptions) -> Subject:
    refuse_ranks("ssdprof capture")
    return find(on_model(options))


def answers(options: declared.AnswersOptions) -> tuple[AnswersRequest, Subject]:
    refuse_ranks("ssdprof answers")
    request, states = on_model(options), _states(options)

    def precisions(dtype: DType) -> tuple[PrecisionRecord, ...]:
        return precisions_for("bf16" if dtype == "fp32" else dtype, options.dtypes, states)

    asked = AnswersRequest(
        precisions=precisions,
        implementations=parse_implementations("--impl", options.impl),
        reference=options.reference,
        weights=options.weights,
        per_layer=options.per_layer,
        generate=options.generate,
        conditions=of_options(
            max_kl=options.max_kl,
            min_top1=options.min_top1,
            max_perplexity_increase=options.max_perplexity_increase,
            gates=options.gate or (),
        ),
        out=options.out,
    )
    check_folder(options.out)
    subject = find(request, whole=True)
    refuse_large(subject)
    return asked, subject


def prefill(options: declared.PrefillOptions) -> tuple[PrefillRequest, tuple[str, ...]]:
    """The request, and the names of all implementations."""
    refuse_ranks("ssdprof prefill")
    names = parse_implementations("--impl", f"{options.impl},{options.against}" if options.against else options.impl)
    given = of_options(min_speedup=options.min_speedup, gates=options.gate or ())
    request = PrefillRequest(
        model=on_model(options),
        batch=options.batch,
        precision=PrecisionRecord(intermediates=options.dtypes, state_dtype=options.states),
        conv_and_norm=("model", "bundled") if options.conv_and_norm == "bundled" else ("model",),
        first_call_s=options.first_call,
        seconds=options.seconds,
        budget=options.budget,
        smallest_difference=parse_percent("--smallest-difference", options.smallest_difference),
        conditions=settings.gates(options.config, given, prefill=True),
        out=options.out,
    )
    check_folder(options.out)
    refuse_unknown("--impl", names)
    refuse_unknown("--baseline", (options.baseline,))
    return request, names


# --- bench, tune, stalls


def bench(options: declared.BenchOptions) -> tuple[BenchRequest, tuple[str, ...], tuple[Tokens, ...]]:
    """The request, the names of all implementations, other libraries first, and cells that --max-tokens leaves out."""
    operator = operators.get(options.operator)
    most = parse_seq(options.max_tokens)
    tokens, too_large = parse_tokens(options.seq, options.batch, options.cells, options.packed, max_tokens=most)
    shapes = parse_shapes(operator.generated, options.shape)
    against = [word.strip() for word in options.against.split(",") if word.strip()]
    if options.published is not None:  # gives one of them its checkout
        against = [*(name for name in against if name != "published"), f"published={options.published}"]
    libraries = tuple(dict.fromkeys(against))
    also = parse_implementations("--also", options.also) if options.also else ()
    states, sizes = _states(options), parse_chunk_sizes(options.chunk_size)
    if not follows():
        check_folder(options.out)
    if sizes and not operator.generated.chunk_sizes:
        raise BadInputError(
            f"--chunk-size does not apply to {operator.name}: its kernels choose their own.", "Leave it out."
        )
    drawn = parse_ways(operator, options.draw)
    request = BenchRequest(
        operator=operator,
        cells=expand(shapes, parse_dtypes(options.dtype), tokens, options.layout, drawn),
        precisions=lambda dtype: precisions_for(dtype, options.dtypes, states),
        baseline=options.baseline or next(iter(libraries), operator.baseline),
        match_with=options.match_with or operator.baseline,
        chunk_sizes=sizes or operator.generated.chunk_sizes,
        check=options.check,
        budget=options.budget,
        first_call=options.first_call,
        smallest_difference=parse_percent("--smallest-difference", options.smallest_difference),
        conditions=_gates(options),
        out=options.out,
    )
    return request, (*libraries, *parse_implementations("--impl", options.impl), *also), too_large


def tune(options: declared.TuneOptions) -> tuple[tuple[Cell, ...], tuple[int, ...] | None]:
    """The cells of drawn inputs, or none and the lengths of captured ones."""
    refuse_ranks("ssdprof tune")
    if options.clear:
        return (), None
    if options.out is not None:
        check_target(options.out, replace=options.force)
    known = operators.get(options.operator).generated
    if options.where is not None:
        if options.shape is not None or options.batch is not None or options.dtype is not None:
            raise BadInputError(
                "Captured inputs have their own shape, batch and dtype.", "Leave out --shape, --batch and --dtype."
            )
        return (), None if options.seq is None else lengths(options.seq)
    tokens, _ = parse_tokens(options.seq or "1k,8k,64k", options.batch or "1", "", "", max_tokens=2**31)
    dtypes = parse_dtypes(options.dtype or "bf16")
    return expand(parse_shapes(known, options.shape), dtypes, tokens, "contiguous"), None


def stalls(options: declared.StallsOptions) -> StallRequest:
    refuse_ranks("ssdprof stalls")
    if options.where is not None and not options.where.strip():
        raise BadInputError(
            "The name is empty.", "Name a run, a model or captures, or leave it out for the latest run."
        )
    if options.markdown is not None:
        check_target(options.markdown, replace=options.force)
    implementations = parse_implementations("--impl", options.impl)
    seqlen = None if options.seq is None else parse_seq(options.seq)
    if options.files and any(one is not None for one in (options.where, options.layer, seqlen, options.out)):
        raise BadInputError(
            "--from reads existing reports and profiles nothing.",
            "Leave out the run or model, --layer, --seq and --out.",
        )
    refuse_two_checkouts(implementations)
    refuse_unknown("--impl", implementations, besides=("reference",))
    return StallRequest(
        where=options.where,
        layer=options.layer,
        seqlen=seqlen,
        implementations=implementations,
        precision=PrecisionRecord(intermediates=options.dtypes, state_dtype=options.states),
        timeout_s=options.timeout,
        out=options.out,
        overwrite=options.force,
    )
