"""Describes how prompts were run."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.report import format as fmt
from ssdprof.schema import CallRef, Serving


def serving_words(serving: Serving, *, batch: int = 1, tensor_parallel: int = 1) -> str:
    """ "8 prompts side by side; 4 decode steps"; empty for a single prompt in one call on one GPU."""
    return "; ".join(_parts(serving, batch, tensor_parallel))


def _parts(serving: Serving, batch: int, tensor_parallel: int) -> Iterator[str]:
    if batch > 1:
        yield f"{batch} prompts side by side"
    if lengths := serving.packed:
        yield (
            f"{len(lengths)} packed sequences of {min(lengths):,} to {max(lengths):,} tokens, run one by one and "
            "concatenated"
        )
    if serving.chunk is not None:
        yield f"chunked prefill, {serving.chunk:,} tokens a call"
    if serving.decode:
        yield f"{fmt.plural(serving.decode, 'decode step')}, computed by the whole model"
    if tensor_parallel > 1:
        yield f"the first of {tensor_parallel} tensor-parallel ranks"


def call_words(call: CallRef | None, seqlen: int, batch: int) -> str:
    """The kind of call, with its preposition: "at 131,072 tokens", "in decode steps after 512 tokens"."""
    size = fmt.tokens(seqlen, batch)
    if call is None:
        return f"at {size}"
    if call.kind == "packed":
        return f"at {size} in {fmt.plural(call.sequences, 'packed sequence')}"
    prompt = fmt.tokens(call.prompt_seqlen, call.sequences)
    return f"in chunks of {size} of {prompt}" if call.kind == "chunk" else f"in decode steps after {prompt}"
