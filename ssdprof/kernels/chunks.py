"""Where the chunks of a call begin and end.  Kernels compute this for a batch, and read it from a
table on the device for packed sequences.

A chunk has at most `power_of_two_chunk` positions, and never crosses the boundary of two sequences.
For packed sequences the host reads no lengths: ceil(l / chunk) + sequences chunks are always
enough.  Unused chunks are empty and at the end of the table.  An empty sequence has no chunk.

Grid of the table's kernel: (sequences).  A program writes the spans of its sequence's chunks and
the sequence's number in `Chunks.bounds`; the last program also writes the spans of the unused
chunks and the end of `bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# its import chooses the interpreter or a GPU before a kernel is defined
import ssdprof.kernels.functions  # noqa: F401
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import strides_of_each

_BLOCK = 128  # sequences or chunks in each iteration of the table's kernel

# stages of functions: `stalls/attribute.py`
STAGES = {"_chunk_table_kernel": "setup"}


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks of one call.

    size: positions of a chunk; the last chunk of a sequence may have fewer.
    count: number of chunks per row of the batch; an upper bound for packed sequences.
    spans: (count, 2) int64: the first position of each chunk, and the position after its last;
        None for a batch.
    bounds: (sequences + 1) int64: sequence i has chunks bounds[i] to bounds[i + 1] - 1; None for a
        batch.
    """

    inputs: Inputs
    size: int
    count: int
    spans: Tensor | None = None
    bounds: Tensor | None = None

    @classmethod
    def of(cls, inputs: Inputs) -> Chunks:
        """The chunks of a call.  For packed sequences a launch writes the table, so that the host
        does not wait for the lengths.
        """
        size, count, sequences = inputs.power_of_two_chunk, inputs.chunk_count, inputs.sequences
        if inputs.cu_seqlens is None:
            return cls(inputs=inputs, size=size, count=count)
        spans = torch.empty((count, 2), dtype=torch.int64, device=inputs.device)
        bounds = torch.empty(sequences + 1, dtype=torch.int64, device=inputs.device)
        launch(
            _chunk_table_kernel,
            sequences,
            (inputs.cu_seqlens, spans, bounds),
            (inputs.cu_seqlens.stride(0), sequences, count),
            CHUNK_SIZE=size,
            BLOCK=_BLOCK,
        )
        return cls(inputs=inputs, size=size, count=count, spans=spans, bounds=bounds)

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor (batch, count, *sizes), with arbitrary values."""
        return torch.empty(
            self.inputs.values.shape[0], self.count, *sizes, dtype=dtype, device=self.inputs.device
        )

    def launch(
        self,
        kernel: Any,
        programs_per_chunk: int,
        heads: int,
        read: tuple[Tensor | None, ...],
        written: tuple[Tensor, ...],
        *scalars: object,
        **options: object,
    ) -> None:
        """Launch a stage's kernel.

        Its arguments are the tensors that it reads, `spans`, the tensors that it writes; the
        strides of the tensors that it reads and writes, without those of `spans`; the numbers of
        positions, heads and chunks of a row of the batch; and the scalars.

        options: compile-time arguments and launch options.
        """
        launch(
            kernel,
            self.inputs.values.shape[0] * self.count * programs_per_chunk,
            (*read, self.spans, *written),
            (strides_of_each(*read, *written), self.inputs.length, heads, self.count, *scalars),
            CHUNK_SIZE=self.size,
            **options,
        )


@triton.jit
def chunk_span(spans_ptr, i_c, seqlen, CHUNK_SIZE: tl.constexpr):
    """First position (int64) and length (int32) of chunk i_c in its row of the batch.  The length
    of an unused chunk is at most 0.

    spans_ptr: `Chunks.spans`; None for a batch, whose rows have seqlen positions.
    """
    if spans_ptr is None:
        start = tl.cast(i_c, tl.int64) * CHUNK_SIZE
        length = seqlen - start
    else:
        start = tl.load(spans_ptr + 2 * i_c)
        length = tl.load(spans_ptr + 2 * i_c + 1) - start
    return start, tl.minimum(CHUNK_SIZE, length).to(tl.int32)


@triton.jit
def own_chunk(unit, spans_ptr, seqlen, heads, nchunks, CHUNK_SIZE: tl.constexpr):
    """The head, the row of the batch, the chunk, and the chunk's first position and length, for a
    unit of work from 0 to rows * nchunks * heads - 1.  Heads vary fastest, then chunks.
    """
    i_h, i_bc = unit % heads, unit // heads
    i_b, i_c = i_bc // nchunks, i_bc % nchunks
    start, length = chunk_span(spans_ptr, i_c, seqlen, CHUNK_SIZE)
    return i_h, i_b, i_c, start, length


@triton.jit
def _chunk_table_kernel(tensors, cu_seqlens_stride, sequences, count, S: tl.constexpr):
    """Write the spans of the chunks of one packed sequence, behind those of all earlier sequences,
    and its entry of `bounds`; in the last program also what follows them.
    """
    cu_seqlens_ptr, spans_ptr, bounds_ptr = tensors
    # --- first: the sequence's first chunk, which is the number of chunks of earlier sequences,
    # BLOCK sequences at a time
    i_s = tl.program_id(0)
    first = tl.zeros((), tl.int64)
    for block_start in range(0, i_s, S.BLOCK):
        o_s = block_start + tl.arange(0, S.BLOCK)
        m_s = o_s < i_s
        begin_ptr = cu_seqlens_ptr + o_s.to(tl.int64) * cu_seqlens_stride
        begin = tl.load(begin_ptr, mask=m_s, other=0)
        end = tl.load(begin_ptr + cu_seqlens_stride, mask=m_s, other=0)
        first += tl.sum(tl.cdiv(end - begin, S.CHUNK_SIZE).to(tl.int64))

    # --- the spans of this program's sequence, BLOCK chunks at a time
    begin_ptr = cu_seqlens_ptr + i_s.to(tl.int64) * cu_seqlens_stride
    begin = tl.load(begin_ptr).to(tl.int64)
    end = tl.load(begin_ptr + cu_seqlens_stride).to(tl.int64)
    after = first + tl.cdiv(end - begin, S.CHUNK_SIZE)
    tl.store(bounds_ptr + i_s, first)
    for block_start in range(first, after, S.BLOCK):
        o_c = block_start + tl.arange(0, S.BLOCK)
        start = begin + (o_c - first) * S.CHUNK_SIZE
        tl.store(spans_ptr + 2 * o_c, start, mask=o_c < after)
        tl.store(spans_ptr + 2 * o_c + 1, tl.minimum(start + S.CHUNK_SIZE, end), mask=o_c < after)

    # --- the last program: empty spans for the unused chunks
    if i_s == sequences - 1:
        tl.store(bounds_ptr + sequences, after)
        for block_start in range(after, count, S.BLOCK):
            o_c = block_start + tl.arange(0, S.BLOCK)
            tl.store(spans_ptr + 2 * o_c, end, mask=o_c < count)
            tl.store(spans_ptr + 2 * o_c + 1, end, mask=o_c < count)
