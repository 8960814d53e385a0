"""Describes how prompts were run."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.report import format as fmt
from ssdprof.schema import Serving


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
