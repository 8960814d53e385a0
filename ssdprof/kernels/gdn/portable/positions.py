# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Where sequences are cut into pieces: chunks, or segments of several chunks.

Each piece has a slot.  In a batch, all sequences have equally many.  Packed sequence i, which begins at b, has slots
from b // size + i on: that leaves room for one ragged piece per sequence, and slots are found without a sum over all
sequences before.  Some slots stay empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssdprof.kernels._triton import sequence_bounds

STAGES = {"first_slot": "setup", "piece_of_slot": "setup"}


def slot_count(length: int, sequences: int, size: int, *, packed: bool) -> int:
    """Slots for pieces of `size` positions: `sequences` of `length` each, or packed along `length`."""
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
    """(sequence, batch entry, number of the piece in its sequence, first position and length of that sequence).

    The piece does not exist if it would begin at or past the end, except the first one of an empty sequence.
    """
    if cu_seqlens_ptr is None:
        pieces = tl.cdiv(seqlen, SIZE)
        sequence = slot // pieces
        return sequence, sequence, slot % pieces, tl.zeros((), tl.int64), seqlen
    else:
        low, high = tl.zeros((), tl.int32), tl.cast(sequences, tl.int32)  # the last sequence that begins no later
        while high - low > 1:
            middle = (low + high) // 2
            begin, _ = sequence_bounds(middle, cu_seqlens_ptr, cu_seqlens_stride)
            later = first_slot(middle, begin, seqlen, True, SIZE) > slot
            low, high = tl.where(later, low, middle), tl.where(later, middle, high)
        begin, length = sequence_bounds(low, cu_seqlens_ptr, cu_seqlens_stride)
        return low, tl.zeros((), tl.int32), slot - first_slot(low, begin, seqlen, True, SIZE), begin, length
