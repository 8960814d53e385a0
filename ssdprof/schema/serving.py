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

    def __str__(self) -> str:
        """ "chunk 2 of 5 of 40 tokens", "decode step 1 of 4 after 40 tokens", "in 3 packed sequences"."""
        if self.kind == "packed":
            return f"in {self.sequences:,} packed sequence{'s' * (self.sequences != 1)}"
        prompt = tokens(self.prompt_seqlen, self.sequences)
        if self.kind == "chunk":
            return f"chunk {self.number:,} of {self.count:,} of {prompt}"
        return f"decode step {self.number:,} of {self.count:,} after {prompt}"


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


def tokens(seqlen: int, batch: int = 1) -> str:
    """ "131,072 tokens", "32 x 1,024 tokens", as in the tables of a report."""
    noun = "token" if seqlen == 1 else "tokens"
    return f"{seqlen:,} {noun}" if batch == 1 else f"{batch} x {seqlen:,} {noun}"


def call_words(call: CallRef | None, seqlen: int, batch: int) -> str:
    """Where a number was measured, with its preposition: "at 131,072 tokens", "in decode steps after 512 tokens"."""
    size = tokens(seqlen, batch)
    if call is None:
        return f"at {size}"
    if call.kind == "packed":
        return f"at {size} {call}"
    prompt = prompt_words(call, seqlen, batch)
    return f"in chunks of {size} of {prompt}" if call.kind == "chunk" else f"in decode steps after {prompt}"


def prompt_words(call: CallRef | None, seqlen: int, batch: int) -> str:
    """The tokens of the prompt that a call of this size belongs to; of all packed sequences together."""
    if call is None or call.kind == "packed":
        return tokens(seqlen, batch)
    return tokens(call.prompt_seqlen, call.sequences)


def split_prompt(seqlen: int, segment_length: int) -> list[tuple[int, int]]:
    """Start and stop of each segment.

    A last segment of a single token joins the one before it, because models call a different function for one token.
    """
    starts = list(range(0, seqlen, segment_length))
    if len(starts) > 1 and seqlen - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], seqlen], strict=True))
