"""Parses the text of options into values, without knowledge of models and machines."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from ssdprof.core.base import LONGEST_SEQLEN, DType
from ssdprof.errors import BadInputError
from ssdprof.jobs.options import COMPARED
from ssdprof.kernels.state_formats import StateFormat
from ssdprof.operators.decode_states import parse_state_format
from ssdprof.operators.generate import (
    MOST_STEP_TOKENS,
    Cell,
    InputDType,
    InputGenerator,
    Layout,
    Shape,
    Tokens,
)
from ssdprof.operators.operator import Operator

K = TypeVar("K")
# implementations of decode steps, the baseline first; they are exact, with fp32 states
STEPS = ("unfused_step", "recurrent")
STATE_DTYPES: tuple[DType, ...] = ("fp32", "fp16", "bf16")
INPUT_DTYPE_NAMES: tuple[InputDType, ...] = ("bf16", "fp16", "fp32")
UNITS = {"": 1, "k": 1024, "m": 1024**2}
# every implementation that takes its chunk size from the inputs supports these
CHUNK_SIZES = (16, 32, 64, 128, 256)


def both(
    first: str, second: str, reason: str = "", hint: str = "Give one of them."
) -> BadInputError:
    """The error for two options that cannot be given together.

    first, second: the options as they are typed, perhaps with their values.
    reason: why, as the end of a sentence; empty if that is plain.
    """
    because = f": {reason}" if reason else ""
    return BadInputError(f"{first} and {second} cannot be combined{because}.", hint)


def parse_seq(seq: str) -> int:
    """Number of tokens: "16384", "16k" (16,384) or "1m" (1,048,576).  Raises BadInputError."""
    match = re.fullmatch(r"([0-9]{1,9})([km]?)", seq.strip().lower())
    seqlen = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= seqlen <= LONGEST_SEQLEN:
        raise BadInputError(
            f"{seq!r} is not a possible number of tokens.",
            f"Give a number of tokens from 1 to {LONGEST_SEQLEN:,}, such as 16384 or 128k "
            "(131,072).",
        )
    return seqlen


def parse_seqs(seqs: str) -> tuple[int, ...]:
    """Prompt lengths of a list such as "1k,16k", in its order and without duplicates.  Raises
    BadInputError.
    """
    return tuple(dict.fromkeys(parse_seq(seq) for seq in seqs.split(",")))


def parse_packed(word: str) -> Tokens:
    """Packed sequences of random lengths: "64x1k-4k" is 64 of 1,024 to 4,096 tokens.  Raises
    BadInputError.
    """
    if match := re.fullmatch(r"([1-9]\d{0,5})x(\w+)-(\w+)", word):
        shortest = parse_seq(match[2])
        longest = parse_seq(match[3])
        if shortest <= longest:
            return Tokens(sequences=int(match[1]), seqlen=longest, shortest=shortest)
    raise BadInputError(
        f"{word!r} does not describe packed sequences.",
        "Give COUNTxSHORTEST-LONGEST, such as 64x1k-4k.",
    )


def parse_states(states: str) -> tuple[DType, ...]:
    """ "fp32,bf16" -> ("fp32", "bf16"), without duplicates; "all" -> all dtypes.  Raises
    BadInputError for other words, and for "all" beside others.
    """
    if states == "all":
        return STATE_DTYPES
    return _known("--states", states, STATE_DTYPES, ", separated by commas, or all")


def parse_state_formats(words: str) -> tuple[StateFormat, ...]:
    """ "fp32,int8" -> the formats that these words name, each word once.  Raises BadInputError.

    Imports the module of a format that is the user's MODULE:FUNCTION.
    """
    return tuple(map(parse_state_format, dict.fromkeys(_split(words))))


def parse_implementations(words: str) -> tuple[str, ...]:
    """ "fused,unfused" -> names without duplicates.  Raises BadInputError for an empty name.

    Whether the implementations exist depends on the operator, and is not checked here.
    """
    names = tuple(dict.fromkeys(_split(words)))
    if "" in names:
        raise BadInputError(
            f"--impl has an empty name: {words!r}.", f"Give one or more of {', '.join(COMPARED)}."
        )
    return names


# --- the cells of a bench: shape, dtype and layout of tokens


def parse_tokens(
    seqs: str, batches: str, extra: str, packed: str, *, max_tokens: float = math.inf
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...]]:
    """The layouts of tokens to measure, and those that are left out because they have more than
    `max_tokens` tokens.

    seqs, batches: lists like "1k,...,256k" and "1,8", of which every pair with at most `max_tokens`
        tokens is measured; "": none.
    extra: pairs like "8x4k,32x1k", measured at any size; "": none.
    packed: sequences of random lengths like "64x1k-4k", measured at any size; "": none.

    Raises BadInputError for other texts, and if nothing is left to measure.
    """
    pairs = [
        Tokens(sequences=batch, seqlen=seqlen)
        for batch, seqlen in product(_batches(batches), lengths(seqs))
    ]
    fitting = [pair for pair in pairs if pair.sequences * pair.seqlen <= max_tokens]
    wanted = dict.fromkeys(
        [*fitting, *map(_pair, _words(extra)), *map(parse_packed, _words(packed))]
    )
    if not wanted and not pairs:
        raise BadInputError("There are no lengths, or no batches.", "Give --seq and --batch.")
    if not wanted:
        raise BadInputError(
            f"No pair of --batch and --seq has {max_tokens:,} tokens or less.",
            "Raise --max-tokens, or ask for less.",
        )
    return tuple(wanted), tuple(pair for pair in pairs if pair not in wanted)


def parse_kept(
    verify: str, every: str, batches: str, tokens: tuple[Tokens, ...]
) -> tuple[Tokens, ...]:
    """Layouts of tokens for calls that also return states inside of the sequences.

    verify: numbers of drafted tokens, "4,8", whose states are returned after each token; "": none.
    every: distances, "64,1k": each of `tokens` is taken once for each distance, and its states are
        returned after every so many tokens; "": none.
    batches: of the drafted tokens: see `parse_tokens`.  tokens: of no effect with `verify`.

    Raises BadInputError for other texts, for too many drafted tokens, and if both are given.
    """
    if not verify:
        pairs = product(tokens, lengths(every))
        return tuple(replace(laid_out, state_every=distance) for laid_out, distance in pairs)
    drafted = lengths(verify)
    if every or max(drafted) > MOST_STEP_TOKENS:
        raise BadInputError(
            f"--verify keeps the state after each of at most {MOST_STEP_TOKENS} tokens.",
            "Give 2 to 8 tokens, or --seq and --state-every.",
        )
    return tuple(
        Tokens(sequences=batch, seqlen=seqlen, state_every=1)
        for batch, seqlen in product(_batches(batches), drafted)
    )


def with_pool(slots: int, tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
    """The same layouts, whose sequences begin with slots of a pool.

    Raises BadInputError for fewer slots than sequences.
    """
    needed = max(laid_out.sequences for laid_out in tokens)
    if slots < needed:
        raise BadInputError(
            f"A pool of {slots:,} slots has too few for {needed:,} sequences.",
            f"Give --pool {needed} or more.",
        )
    return tuple(replace(laid_out, pool=slots) for laid_out in tokens)


def lengths(words: str) -> tuple[int, ...]:
    """ "1k,4k" -> (1024, 4096); "1k,...,6k" doubles up to the last: (1024, 2048, 4096, 6144).

    Without duplicates; none in an empty text.  Raises BadInputError.
    """
    parsed: list[int] = []
    remaining = iter(_words(words))
    for word in remaining:
        if word != "...":
            parsed.append(parse_seq(word))
            continue
        last = parse_seq(next(remaining, ""))
        if not parsed or last <= parsed[-1]:
            raise BadInputError(
                f"In {words!r}, '...' does not lead to a longer length.",
                "Write it between two lengths: 1k,...,256k.",
            )
        while 2 * parsed[-1] < last:
            parsed.append(2 * parsed[-1])
        parsed.append(last)
    return tuple(dict.fromkeys(parsed))


def expand(
    shapes: Sequence[Shape],
    dtypes: Sequence[InputDType],
    tokens: Sequence[Tokens],
    layout: Layout,
    ways: tuple[str, ...] = (),
) -> tuple[Cell, ...]:
    """The cells of all shapes, dtypes and layouts of tokens, in an order in which neighbours share
    compiled kernels.

    ways: words of --draw, which say how inputs are generated.
    """
    return tuple(
        Cell(shape=shape, dtype=dtype, layout=layout, tokens=laid_out, ways=ways)
        for shape, dtype, laid_out in product(shapes, dtypes, tokens)
    )


def parse_dtypes(words: str) -> tuple[InputDType, ...]:
    """ "bf16,fp16" -> ("bf16", "fp16"), without duplicates.  Raises BadInputError."""
    return _known("--dtype", words, INPUT_DTYPE_NAMES)


def parse_chunk_sizes(words: str) -> tuple[int, ...]:
    """ "64,128" -> (64, 128), without duplicates; "best" -> (), which stands for the operator's
    usual ones.  Raises BadInputError.
    """
    return () if words == "best" else _known("--chunk-size", words, CHUNK_SIZES)


def _known(option: str, words: str, known: Sequence[K], more: str = "") -> tuple[K, ...]:
    """The values that the words name, without duplicates.  Raises BadInputError for other words,
    and for an empty text.

    option, more: the option's name, and the end of the hint, for messages.
    """
    by_word = {str(value): value for value in known}
    listed = _split(words)
    for word in listed:
        if word not in by_word:
            raise BadInputError(
                f"{option} does not know {word!r}.",
                f"Give one or more of {', '.join(by_word)}{more}.",
            )
    return tuple(dict.fromkeys(by_word[word] for word in listed))


def _batches(words: str) -> tuple[int, ...]:
    """ "1,8" -> (1, 8), without duplicates; none in an empty text.  Raises BadInputError."""
    batches = _words(words)
    for word in batches:
        if not re.fullmatch(r"[1-9]\d{0,5}", word):
            raise BadInputError(
                f"{word!r} is not a batch.", "Give numbers of sequences, such as 1,8,32."
            )
    return tuple(dict.fromkeys(map(int, batches)))


def _pair(word: str) -> Tokens:
    """ "8x4k" -> 8 sequences of 4,096 tokens.  Raises BadInputError."""
    match = re.fullmatch(r"([1-9]\d{0,5})x(\w+)", word)
    if match is None:
        raise BadInputError(
            f"{word!r} is not a pair of batch x length.", "Give pairs such as 8x4k or 32x1k."
        )
    return Tokens(sequences=int(match[1]), seqlen=parse_seq(match[2]))


def _words(text: str) -> list[str]:
    """The words between commas; none in an empty text."""
    return _split(text) if text else []


def _split(text: str) -> list[str]:
    """The words between commas, some of which may be empty; an empty one in an empty text."""
    return [word.strip() for word in text.split(",")]


def parse_shapes(generator: InputGenerator, words: str | None) -> tuple[Shape, ...]:
    """ "mamba2-2.7b,80x64x128x1" -> the shape of each word, each word once.  Raises BadInputError
    for other words, for sizes that are impossible or too large, and for an empty text.

    generator: the operator's, which has the shapes of models.  words: "all" means all models, and
    None the first one.
    """
    if words is None:
        words = next(iter(generator.shapes))
    names = list(generator.shapes) if words == "all" else _split(words)
    return tuple(dict.fromkeys(_shape(generator, name) for name in names))


def _shape(generator: InputGenerator, name: str) -> Shape:
    """The shape of a model, or of the sizes in `name`.  Raises BadInputError."""
    shape = generator.shapes.get(name) or generator.parse(name)
    if shape is None:
        raise BadInputError(
            f"{name!r} is not a known shape.",
            f"Known are {', '.join(generator.shapes)} and all; or give {generator.grammar}.",
        )
    return shape


def parse_ways(operator: Operator, words: str) -> tuple[str, ...]:
    """ "normalised,quarter-ungated" -> the words, without duplicates, in the operator's order.
    Empty words are ignored.

    Raises BadInputError for words that the operator's generator does not know.
    """
    known = operator.generated.ways
    wanted = _words(words)
    unknown = [word for word in wanted if word and word not in known]
    if unknown:
        meanings = ", ".join(f"{name} ({meaning})" for name, meaning in known.items())
        raise BadInputError(
            f"--draw does not know {unknown[0]!r}.",
            f"For {operator.name} there are: {meanings or 'none'}.",
        )
    return tuple(word for word in known if word in wanted)
