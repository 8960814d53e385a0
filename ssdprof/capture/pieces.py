"""Cuts one text into several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdprof.capture.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, ids: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], str]:
    """Pieces of a text's `ids` with these lengths, and a phrase that says how they were cut.

    They follow each other in the text.  If it is too short for that, they begin at equal distances and overlap.
    Every piece begins with the special tokens that the tokenizer puts before a text.
    """
    if len(lengths) == 1:
        return list(ids[: lengths[0]]), ""
    opening = _opening(tokenizer, ids)
    body = ids[len(opening) :]
    inside = [max(length - len(opening), 0) for length in lengths]
    starts = [0, *accumulate(inside[:-1])]
    together, longest = sum(inside), max(inside)
    overlap = together > len(body)
    if overlap:
        starts = [start * (len(body) - longest) // (together - longest) for start in starts]
    cut = [
        token
        for start, length, whole in zip(starts, inside, lengths, strict=True)
        for token in (*opening[:whole], *body[start : start + length])
    ]
    how = "that overlap, because the text is too short for all of them" if overlap else "one after the other"
    return cut, f", {len(lengths)} pieces of it {how}"


def _opening(tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """The special tokens with which a text begins; a tokenizer may put others behind it."""
    alone = tokenizer.encode("")
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False))]
