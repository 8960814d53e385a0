"""How prompts are run, and references to single operator calls.  `docs/serving.md` describes the options."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record


class CallRef(Record):
    """One call of a layer's operator, if a prompt makes several calls or several sequences share one.

    kind: "packed": packed sequences.  "chunk": a piece of a chunked prefill, which begins with the states of the
        previous piece.  "decode": one token of each sequence, after the prompt.
    number: of the call among the `count` calls of its kind, from 1.
    prompt_seqlen: tokens of each sequence's prompt; of all sequences together if packed.
    sequences: independent sequences in the call.
    """

    kind: Literal["packed", "chunk", "decode"]
    number: int
    count: int
    prompt_seqlen: int
    sequences: int


class Serving(Record):
    """How the model runs prompts.  The default: all of a prompt in one call of every operator, and no decoding.

    packed: lengths of sequences that are packed into one call; empty: a batch of equal lengths.
    chunk: tokens per call of a chunked prefill; None: no chunked prefill.
    decode: tokens that the model generates after the prompt, one call of every operator for each.
    """

    packed: tuple[int, ...] = ()
    chunk: int | None = None
    decode: int = 0

    def calls(self, seqlen: int, batch: int = 1) -> tuple[CallRef | None, ...]:
        """Every call of one layer's operator on a prompt of `seqlen` tokens; None: the whole prompt in one call."""
        found: list[CallRef | None] = []
        if self.packed:
            found.append(CallRef(kind="packed", number=1, count=1, prompt_seqlen=seqlen, sequences=len(self.packed)))
        elif self.chunk is not None:
            count = len(split_prompt(seqlen, self.chunk))
            found += _numbered("chunk", count, seqlen, batch)
        else:
            found.append(None)
        return (*found, *_numbered("decode", self.decode, seqlen, batch))


def _numbered(kind: Literal["chunk", "decode"], count: int, seqlen: int, batch: int) -> list[CallRef]:
    return [
        CallRef(kind=kind, number=number, count=count, prompt_seqlen=seqlen, sequences=batch)
        for number in range(1, count + 1)
    ]


def split_prompt(seqlen: int, segment_length: int) -> list[tuple[int, int]]:
    """Start and stop of each segment.

    A last segment of a single token joins the one before it, because models call a different function for one token.
    """
    starts = list(range(0, seqlen, segment_length))
    if len(starts) > 1 and seqlen - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], seqlen], strict=True))
