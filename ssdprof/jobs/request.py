"""The user's request, as plain values.  Options are checked here, without knowledge of models and machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

from ssdprof.capture.prompt import parse_packed, parse_seq
from ssdprof.core.base import SMALLEST_DIFFERENCE, DType, PlacementKind, PrecisionRecord, precisions_for
from ssdprof.core.report import Condition
from ssdprof.core.subject import Cast
from ssdprof.errors import BadInputError
from ssdprof.operators.generate import Cell, InputDType, InputGenerator, Layout, Shape, Tokens

K = TypeVar("K")
Dtypes = Literal["exact", "relaxed", "all"]
Reference = Literal["auto", "oracle", "unfused"]
Weights = Literal["auto", "own", "fp32"]
COMPARED = ("unfused", "fused")  # implementations; the first is the baseline
STEPS = ("unfused_step", "recurrent")  # of decode steps; always exact with fp32 states
STATE_DTYPES: tuple[DType, ...] = ("fp32", "fp16", "bf16")
INPUT_DTYPES: tuple[InputDType, ...] = ("bf16", "fp16", "fp32")
CHUNK_SIZES = (16, 32, 64, 128, 256)  # every implementation with a chunk size supports these


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """The layers to capture, the model, the prompt, and how it is served (`docs/serving.md`).

    model: hub id, folder, family name, "demo" or "demo-gdn".  revision, tokenizer: None takes the model's own.
    text: "default", "random" or a file.  seqlens: tokens of each prompt; None: depends on the machine.
    batch: number of prompts.  packed: packed sequences of random lengths, instead of prompts.
    chunk: tokens per call of a chunked prefill.  decode: tokens to generate after each prompt.
    layers: "all", "first:N", "3,7" or "every:K".  segment_length: tokens per forward call; None: chosen by capture.
    placement: where the weights are; None: depends on the machine.
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    text: Path | Literal["default", "random"] = "default"
    seqlens: tuple[int, ...] | None = None
    batch: int = 1
    packed: Tokens | None = None
    chunk: int | None = None
    decode: int = 0
    layers: str = "all"
    segment_length: int | None = None
    placement: PlacementKind | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """What to compare, the conditions on it, and how the run is stored.

    states: dtypes of the inter-chunk states; None: the defaults of `core.base.precisions_for`.
    implementations, baseline: names, as `operators.implementations` resolves them.
    first_call_s: time limit of the first call of a user's kernel.
    thorough: test the laws in every case, and not once for each kind of layer.
    smallest_difference: the smallest relative difference of times that counts.
    cast: the dtype in which captured inputs are replayed; None: the model's own.
    tensor_parallel: ranks among which the heads are divided; the first one's share is replayed.
    out: the run's folder; None: a new one under runs/.  command: as typed.
    """

    intermediates: Dtypes = "all"
    states: tuple[DType, ...] | None = None
    implementations: tuple[str, ...] = COMPARED
    baseline: str = COMPARED[0]
    first_call_s: float = 180.0
    thorough: bool = False
    smallest_difference: float = SMALLEST_DIFFERENCE
    cast: DType | None = None
    tensor_parallel: int = 1
    conditions: tuple[Condition, ...] = ()
    out: Path | None = None
    save_captures: bool = False
    command: tuple[str, ...] = ()

    def cast_from(self, dtype: DType) -> Cast | None:
        """The cast of inputs of this dtype; None if there is none."""
        return Cast(source=dtype, to=self.cast) if self.cast not in (None, dtype) else None

    def precisions(self, dtype: DType) -> tuple[PrecisionRecord, ...]:
        """dtype: of the operators' inputs."""
        return precisions_for(dtype, self.intermediates, self.states)


@dataclass(frozen=True, kw_only=True)
class AnswersRequest:
    """The implementations that replace a model's operators, and their reference.

    precisions: the requested ones, by dtype of the model.
    reference: "auto" is the fp64 oracle unless it takes too long, then unfused exact.
    weights: the dtype that the model runs in; "auto" is its own on a GPU and fp32 without one.
    per_layer: each layer alone, too.  generate: greedy tokens after the prompt.
    out, command: as of `ReplayRequest`.
    """

    precisions: Callable[[DType], tuple[PrecisionRecord, ...]]
    implementations: tuple[str, ...] = COMPARED
    reference: Reference = "auto"
    weights: Weights = "auto"
    per_layer: bool = False
    generate: int = 0
    conditions: tuple[Condition, ...] = ()
    out: Path | None = None
    command: tuple[str, ...] = ()


def parse_states(states: str) -> tuple[DType, ...]:
    """ "fp32,bf16" -> ("fp32", "bf16"); "all" is every one."""
    if states == "all":
        return STATE_DTYPES
    return _known("--states", states.split(","), STATE_DTYPES, ", separated by commas, or all")


def parse_implementations(option: str, words: str) -> tuple[str, ...]:
    """ "fused,unfused" -> names without duplicates.  option: for messages.

    Whether they exist depends on the operator, and is not checked here.
    """
    names = tuple(dict.fromkeys(word.strip() for word in words.split(",")))
    if "" in names:
        raise BadInputError(f"{option} has an empty name: {words!r}.", f"Give one or more of {', '.join(COMPARED)}.")
    return names


def parse_serving(
    batch: int, packed: str | None, chunk: str | None, decode: int, *, seq: str | None, segment: str | None
) -> tuple[Tokens | None, int | None]:
    """`packed` and `chunk` of a request.  Raises BadInputError for invalid options and combinations."""
    if packed is not None:
        for option, given in (
            ("--seq", seq is not None),
            ("--batch", batch > 1),
            ("--chunked-prefill", chunk is not None),
            ("--decode", decode > 0),
        ):
            if given:
                raise BadInputError(
                    f"--packed and {option} cannot be combined: packed sequences are one call of their own lengths.",
                    f"Leave out {option}, or give --batch instead of --packed.",
                )
    if chunk is not None and segment is not None:
        raise BadInputError(
            "--chunked-prefill and --segment cannot be combined: the chunks are the segments.", "Leave out --segment."
        )
    length = None if chunk is None else parse_seq(chunk)
    if length == 1:
        raise BadInputError(
            "--chunked-prefill 1 would be decoding: models compute single tokens by another function.",
            "Give 2 or more tokens, such as 8k, or use --decode.",
        )
    return None if packed is None else parse_packed(packed), length


# --- the cells of a bench: shape, dtype and layout of tokens


def parse_tokens(
    seqs: str, batches: str, extra: str, packed: str, *, max_tokens: int
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...]]:
    """The layouts of tokens to measure, and those left out because they have more than `max_tokens` tokens.

    seqs, batches: lists like "1k,...,256k" and "1,8"; every pair with at most `max_tokens` is measured
    extra: pairs like "8x4k,32x1k", measured at any size; "" for none
    packed: sequences of random lengths like "64x1k-4k"; "" for none
    """
    pairs = [Tokens(sequences=b, seqlen=l) for b, l in product(_batches(batches), lengths(seqs))]
    fitting = [pair for pair in pairs if pair.at_most <= max_tokens]
    wanted = dict.fromkeys([*fitting, *map(_pair, _words(extra)), *map(parse_packed, _words(packed))])
    if not wanted:
        raise BadInputError(f"Every cell has more than {max_tokens:,} tokens.", "Raise --max-tokens, or ask for less.")
    return tuple(wanted), tuple(pair for pair in pairs if pair not in wanted)


def lengths(words: str) -> tuple[int, ...]:
    """ "1k,4k" -> (1024, 4096); "1k,...,8k" doubles: (1024, 2048, 4096, 8192)."""
    found: list[int] = []
    rest = iter(_words(words))
    for word in rest:
        if word != "...":
            found.append(parse_seq(word))
            continue
        last = parse_seq(next(rest, ""))
        if not found or last <= found[-1]:
            raise BadInputError(
                f"In {words!r}, '...' does not lead to a longer length.", "Write it between two lengths: 1k,...,256k."
            )
        found += _doubled(found[-1], last)
    return tuple(dict.fromkeys(found))


def expand(
    shapes: Sequence[Shape],
    dtypes: Sequence[InputDType],
    tokens: Sequence[Tokens],
    layout: Layout,
    drawn: tuple[str, ...] = (),
) -> tuple[Cell, ...]:
    """Shape by shape; in each, dtype by dtype, so that neighbours share compiled kernels."""
    return tuple(
        Cell(shape=shape, dtype=dtype, layout=layout, tokens=laid_out, drawn=drawn)
        for shape, dtype, laid_out in product(shapes, dtypes, tokens)
    )


def parse_dtypes(words: str) -> tuple[InputDType, ...]:
    """ "bf16,fp16" -> ("bf16", "fp16").  Raises BadInputError."""
    return _known("--dtype", _words(words), INPUT_DTYPES)


def parse_chunk_sizes(words: str) -> tuple[int, ...]:
    """ "64,128" -> (64, 128); "best" -> (): those of the operator.  Raises BadInputError."""
    return () if words == "best" else _known("--chunk-size", words.split(","), CHUNK_SIZES)


def _known(option: str, words: Sequence[str], known: Sequence[K], more: str = "") -> tuple[K, ...]:
    """The values that the words name, each once."""
    named = {str(value): value for value in known}
    for word in map(str.strip, words):
        if word not in named:
            raise BadInputError(f"{option} does not know {word!r}.", f"Give one or more of {', '.join(named)}{more}.")
    return tuple(dict.fromkeys(named[word.strip()] for word in words))


def _doubled(first: int, last: int) -> Iterator[int]:
    length = 2 * first
    while length < last:
        yield length
        length *= 2
    yield last


def _batches(words: str) -> Iterable[int]:
    for word in _words(words):
        if not re.fullmatch(r"[1-9]\d{0,5}", word):
            raise BadInputError(f"{word!r} is not a batch.", "Give numbers of sequences, such as 1,8,32.")
        yield int(word)


def _pair(word: str) -> Tokens:
    match = re.fullmatch(r"([1-9]\d{0,5})x(\w+)", word)
    if match is None:
        raise BadInputError(f"{word!r} is not a cell.", "Give sequences x length, such as 8x4k or 32x1k.")
    return Tokens(sequences=int(match[1]), seqlen=parse_seq(match[2]))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def parse_shapes(known: InputGenerator[Any], words: str | None) -> tuple[Shape, ...]:
    """ "mamba2-2.7b,80x64x128x1" -> shapes, each once; "all" is every model, None the first.  Raises BadInputError."""
    if words is None:
        words = next(iter(known.shapes))
    names = tuple(known.shapes) if words == "all" else tuple(word.strip() for word in words.split(","))
    return tuple(dict.fromkeys(_shape(known, name) for name in names))


def _shape(known: InputGenerator[Any], name: str) -> Shape:
    found = known.shapes.get(name) or known.parse(name)
    if found is None:
        raise BadInputError(
            f"{name!r} is not a known shape.", f"Known are {', '.join(known.shapes)} and all; or give {known.grammar}."
        )
    return found
