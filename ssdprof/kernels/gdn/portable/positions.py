# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Division of sequences into pieces: chunks, or segments of several chunks.

Each piece has a slot.  In a batch, all sequences have equally many slots.  The slots of packed sequence i, which begins
at b, start at b // size + i.  This leaves room for one partial piece per sequence, and needs no sum over earlier
sequences.  Some slots stay empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssdprof.kernels.functions import sequence_bounds

STAGES = {"first_slot": "setup", "piece_of_slot": "setup"}


def slot_count(length: int, sequences: int, size: int, *, packed: bool) -> int:
    """Slots for pieces of `size` positions, for `sequences` of `length` each, or packed into `length` positions."""
    return length // size + sequences if packed else sequences * -(-length // size)


@triton.jit
def first_slot(sequence, begin, seqlen, PACKED: tl.constexpr, SIZE: tl.constexpr):
    """Slot of a sequence's first piece."""
    if PACKED:
        return (begin // SIZE).to(tl.int32) + sequence
    else:
        return sequence * tl.cdiv(seqlen, SIZE)


@triton.jit
def piece_of_slot(slot, cu_seqlens_ptr, cu_seqlens_stride, seqlen, sequences, SIZE: tl.constexpr):
    """(sequence, batch entry, index of the piece in its sequence, first position and length of that sequence).

    A piece that begins at or past the end does not exist, except the first one of an empty sequence.
    """
    if cu_seqlens_ptr is None:
        pieces = tl.cdiv(seqlen, SIZE)
        sequence = slot // pieces
        return sequence, sequence, slot % pieces, tl.zeros((), tl.int64), seqlen
    else:
        low, high = tl.zeros((), tl.int32), tl.cast(sequences, tl.int32)  # finds the last sequence not after `slot`
        while high - low > 1:
            middle = (low + high) // 2
            begin, _ = sequence_bounds(middle, cu_seqlens_ptr, cu_seqlens_stride)
            later = first_slot(middle, begin, seqlen, True, SIZE) > slot
            low, high = tl.where(later, low, middle), tl.where(later, middle, high)
        begin, length = sequence_bounds(low, cu_seqlens_ptr, cu_seqlens_stride)
        return low, tl.zeros((), tl.int32), slot - first_slot(low, begin, seqlen, True, SIZE), begin, length
