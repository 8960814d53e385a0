"""The number of tokens of a prompt, as users write it.  Imports no torch: a wrong --seq is refused before that."""

from __future__ import annotations

import re

from ssdprof.core.base import LONGEST_SEQLEN
from ssdprof.errors import BadInputError
from ssdprof.operators.generate import Tokens

UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_seq(seq: str) -> int:
    """Number of tokens: "16384", "16k" (16,384) or "1m" (1,048,576).  Raises BadInputError."""
    match = re.fullmatch(r"([0-9]{1,9})([km]?)", seq.strip().lower())
    seqlen = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= seqlen <= LONGEST_SEQLEN:
        raise BadInputError(
            f"{seq!r} is not a number of tokens.",
            f"Give a number of tokens from 1 to {LONGEST_SEQLEN:,}, such as 16384 or 128k (131,072).",
        )
    return seqlen


def parse_seqs(seqs: str) -> tuple[int, ...]:
    """Prompt lengths of a list such as "1k,16k", in order and without duplicates.  Raises BadInputError."""
    return tuple(dict.fromkeys(parse_seq(seq) for seq in seqs.split(",")))


def parse_packed(word: str) -> Tokens:
    """Packed sequences of random lengths: "64x1k-4k".  Raises BadInputError."""
    match = re.fullmatch(r"([1-9]\d{0,5})x(\w+)-(\w+)", word)
    tokens = match and Tokens(sequences=int(match[1]), seqlen=parse_seq(match[3]), shortest=parse_seq(match[2]))
    if not tokens or tokens.shortest is None or tokens.shortest > tokens.seqlen:
        raise BadInputError(
            f"{word!r} does not describe packed sequences.", "Give COUNTxSHORTEST-LONGEST, such as 64x1k-4k."
        )
    return tokens
