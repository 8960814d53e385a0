# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Assignment of segments to programs of `portable_kernel.py`."""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCE_BLOCK = tl.constexpr(128)  # packed sequences per iteration

STAGES = {"take_ticket": "ticket", "segment_chunks": "ticket", "find_segment": "ticket"}


@triton.jit
def take_ticket(sync_ptr, HANDOVER: tl.constexpr):
    """The program's ticket.  Lower tickets belong to programs that run or have ended.

    Without a hand-over between segments the program id is sufficient.
    """
    if HANDOVER:
        return tl.atomic_add(sync_ptr, 1, sem="relaxed")
    else:
        return tl.program_id(0)


@triton.jit
def segment_chunks(nchunks, RULE: tl.constexpr):
    """Chunks per segment of a sequence of `nchunks`: `PortableConfig.segment_chunks`."""
    return tl.minimum(tl.maximum(tl.cdiv(nchunks, RULE[0]), RULE[1]), RULE[2])


@triton.jit
def find_segment(rank, cu_seqlens_ptr, cu_seqlens_stride, sequences, CHUNK: tl.constexpr, RULE: tl.constexpr):
    """(sequence, segment, first position, length) of the `rank`-th segment of packed sequences.

    The sequence is -1 if the segment does not exist.
    """
    sequence, segment, before = -1, 0, 0
    begin, length = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for block in range(0, sequences, SEQUENCE_BLOCK):
        o_s = block + tl.arange(0, SEQUENCE_BLOCK)
        m_s = o_s < sequences
        p = cu_seqlens_ptr + o_s.to(tl.int64) * cu_seqlens_stride
        start = tl.load(p, mask=m_s, other=0).to(tl.int64)
        stop = tl.load(p + cu_seqlens_stride, mask=m_s, other=0).to(tl.int64)
        nchunks = tl.cdiv(stop - start, CHUNK).to(tl.int32)
        # an empty sequence has one segment without chunks, which copies the initial state to the final state
        segments = tl.maximum(tl.cdiv(nchunks, segment_chunks(nchunks, RULE)), 1)
        segments = tl.where(m_s, segments, 0)
        after = before + tl.cumsum(segments, axis=0)
        mine = (after - segments <= rank) & (rank < after)
        sequence += tl.sum(tl.where(mine, o_s + 1, 0), axis=0)
        segment += tl.sum(tl.where(mine, rank - (after - segments), 0), axis=0)
        begin += tl.sum(tl.where(mine, start, 0), axis=0)
        length += tl.sum(tl.where(mine, stop - start, 0), axis=0)
        before += tl.sum(segments, axis=0)
    return sequence, segment, begin, length.to(tl.int32)
