"""The cells to measure: shape, dtype and layout of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from ssdprof.capture.prompt import parse_packed, parse_seq
from ssdprof.errors import BadInputError
from ssdprof.operators.generate import Cell, InputDType, InputGenerator, Layout, Shape, Tokens

INPUT_DTYPES: tuple[InputDType, ...] = ("bf16", "fp16", "fp32")
CHUNK_SIZES = (16, 32, 64, 128, 256)  # every implementation with a chunk size supports these


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
    return tuple(dict.fromkeys(_input_dtype(word) for word in _words(words)))


def parse_chunk_sizes(words: str) -> tuple[int, ...]:
    """ "64,128" -> (64, 128); "best" -> (): those of the operator.  Raises BadInputError."""
    return () if words == "best" else tuple(dict.fromkeys(_chunk_size(word.strip()) for word in words.split(",")))


def _chunk_size(word: str) -> int:
    found = next((size for size in CHUNK_SIZES if word == str(size)), None)
    if found is None:
        raise BadInputError(
            f"--chunk-size does not know {word!r}.", f"Give one or more of {', '.join(map(str, CHUNK_SIZES))}."
        )
    return found


def _input_dtype(word: str) -> InputDType:
    for dtype in INPUT_DTYPES:
        if word == dtype:
            return dtype
    raise BadInputError(f"--dtype does not know {word!r}.", f"Give one or more of {', '.join(INPUT_DTYPES)}.")


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
