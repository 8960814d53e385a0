# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Where the chunks of a call lie: by arithmetic for a batch, by a table made on the device for packed sequences.

A chunk never crosses a sequence.  ceil(l / chunk_size) + sequences chunks are always enough for packed sequences, so
that nothing has to be read on the host; those that are not needed are empty and stand at the end of the table.

Grid of the table's kernel: (sequences).  One program writes the spans of its sequence's chunks; the last one also those
of the empty chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

import ssdprof.kernels._triton  # noqa: F401  chooses the interpreter or a GPU before a kernel is defined
from ssdprof.kernels._launch import launch

_BLOCK = 128  # sequences or chunks per loop turn

STAGES = {"chunk_span": "caller", "_chunk_table_kernel": "setup"}


class Sequences(Protocol):
    """The part of an operator's inputs that says where its sequences lie."""

    @property
    def length(self) -> int:
        """Positions of one row of the batch."""

    @property
    def sequences(self) -> int: ...

    @property
    def chunk_size(self) -> int: ...

    @property
    def cu_seqlens(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks of one call.

    count: per row of the batch; an upper bound if packed
    spans: (count, 2) int64, first position and the one after the last; None for a batch
    bounds: (sequences + 1) int64: chunks bounds[i] .. bounds[i+1]-1 are those of sequence i; None for a batch
    """

    size: int
    count: int
    sequences: int
    spans: torch.Tensor | None = None
    bounds: torch.Tensor | None = None

    @classmethod
    def of(cls, inputs: Sequences) -> Chunks:
        size, count, sequences = inputs.chunk_size, chunk_count(inputs), inputs.sequences
        if inputs.cu_seqlens is None:
            return cls(size=size, count=count, sequences=sequences)
        spans = torch.empty(count, 2, dtype=torch.int64, device=inputs.cu_seqlens.device)
        bounds = torch.empty(sequences + 1, dtype=torch.int64, device=inputs.cu_seqlens.device)
        launch(
            _chunk_table_kernel,
            sequences,
            (inputs.cu_seqlens, spans, bounds),
            (inputs.cu_seqlens.stride(0), sequences, count),
            CHUNK_SIZE=size,
            BLOCK=_BLOCK,
        )
        return cls(size=size, count=count, sequences=sequences, spans=spans, bounds=bounds)


def chunk_count(inputs: Sequences) -> int:
    """Chunks per row of the batch; if packed, at most so many are needed."""
    whole = triton.cdiv(inputs.length, inputs.chunk_size)
    return int(whole if inputs.cu_seqlens is None else whole + inputs.sequences)


@triton.jit
def chunk_span(spans_ptr, i_c, seqlen, CHUNK_SIZE: tl.constexpr):
    """(start, length) of chunk i_c in its row, in int64 and int32; length <= 0 for a chunk that is not needed."""
    if spans_ptr is None:
        start = tl.cast(i_c, tl.int64) * CHUNK_SIZE
        length = seqlen - start
    else:
        start = tl.load(spans_ptr + 2 * i_c)
        length = tl.load(spans_ptr + 2 * i_c + 1) - start
    return start, tl.minimum(CHUNK_SIZE, length).to(tl.int32)


@triton.jit
def _chunk_table_kernel(
    cu_seqlens_ptr, spans_ptr, bounds_ptr,
    cu_seqlens_stride, sequences, count,
    CHUNK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # --- chunks of the sequences before mine
    i_s = tl.program_id(0)
    first = tl.zeros((), tl.int64)
    for block_start in range(0, i_s, BLOCK):
        o_s = block_start + tl.arange(0, BLOCK)
        m_s = o_s < i_s
        p = cu_seqlens_ptr + o_s.to(tl.int64) * cu_seqlens_stride
        begin = tl.load(p, mask=m_s, other=0)
        end = tl.load(p + cu_seqlens_stride, mask=m_s, other=0)
        first += tl.sum(tl.cdiv(end - begin, CHUNK_SIZE).to(tl.int64))

    # --- mine
    p = cu_seqlens_ptr + i_s.to(tl.int64) * cu_seqlens_stride
    begin = tl.load(p).to(tl.int64)
    end = tl.load(p + cu_seqlens_stride).to(tl.int64)
    after = first + tl.cdiv(end - begin, CHUNK_SIZE)
    tl.store(bounds_ptr + i_s, first)
    for block_start in range(first, after, BLOCK):
        o_c = block_start + tl.arange(0, BLOCK)
        start = begin + (o_c - first) * CHUNK_SIZE
        tl.store(spans_ptr + 2 * o_c, start, mask=o_c < after)
        tl.store(spans_ptr + 2 * o_c + 1, tl.minimum(start + CHUNK_SIZE, end), mask=o_c < after)

    # --- nobody's
    if i_s == sequences - 1:
        tl.store(bounds_ptr + sequences, after)
        for block_start in range(after, count, BLOCK):
            o_c = block_start + tl.arange(0, BLOCK)
            tl.store(spans_ptr + 2 * o_c, end, mask=o_c < count)
            tl.store(spans_ptr + 2 * o_c + 1, end, mask=o_c < count)
