"""The cut of sequences into segments for the programs of a Hopper kernel: the one with the least
time by a model of the operator's kernel.

A pair is a sequence and the heads of one program: a program computes one segment of a pair, unless
programs have shares of all pairs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, kw_only=True)
class Cut:
    """`long_count` segments of `long_segment` chunks, then segments of `segment` chunks, up to the
    end of a sequence.

    In a good schedule, long segments fill the GPU first, and short ones balance the end.  A first
    pass stops where the rest is negligible, so that it reads a smaller share of a long segment.

    recompute: whether the first pass of a segment covers all chunks before it, so that no segment
        waits for another; for short sequences.
    shares: if segments are whole sequences, the number of programs that share all pairs.  If it is
        0, or if there are not more pairs than this, each segment has a program.
    """

    segment: int
    long_count: int = 0
    long_segment: int = 0
    recompute: bool = False
    shares: int = 0

    def lengths(self, nchunks: int) -> list[int]:
        """The number of chunks of each segment, for a sequence of `nchunks` >= 1 chunks."""
        lengths: list[int] = []
        remaining = nchunks
        while remaining > 0:
            longest = self.long_segment if len(lengths) < self.long_count else self.segment
            lengths.append(min(remaining, longest))
            remaining -= lengths[-1]
        return lengths

    def count(self, nchunks: int) -> int:
        """The number of segments of a sequence of `nchunks` chunks."""
        return len(self.lengths(nchunks))


@lru_cache(maxsize=2048)
def cut(
    nchunks: int,
    pairs: int,
    sm_count: int,
    *,
    candidates: Callable[[int, int, int], Iterable[Cut]],
    time: Callable[[Cut, int, int, int], float],
    classes: int = 1 << 32,
    whole_from: int = 0,
) -> Cut:
    """The cut with the least time for a call.

    nchunks: number of chunks of a sequence, at least 1.
    pairs: number of pairs of all sequences.
    sm_count: number of multiprocessors of the GPU.
    candidates: (nchunks, pairs, sm_count) -> the cuts among which to choose, at least one.
    time: (cut, nchunks, pairs, sm_count) -> the time of the cut, in any unit.
    classes: number of classes of lengths between two powers of two, itself a power of two; all
        lengths of a class have the cut of its largest length.  By default each length is a class.
    whole_from: sequences are not cut if there are at least so many more pairs than multiprocessors.
    """
    # lengths of a class: `step` of them, up to a multiple of `step`
    step = 1 << max(0, nchunks.bit_length() - classes.bit_length())
    if nchunks % step:  # not the largest length of its class
        return cut(
            ceil_div(nchunks, step) * step,
            pairs,
            sm_count,
            candidates=candidates,
            time=time,
            classes=classes,
            whole_from=whole_from,
        )
    if pairs >= sm_count + whole_from:  # uncut sequences already keep the GPU busy
        return Cut(segment=nchunks, shares=sm_count)
    return min(
        candidates(nchunks, pairs, sm_count),
        key=lambda candidate: time(candidate, nchunks, pairs, sm_count),
    )


def ceil_div(a: int, b: int) -> int:
    """a / b for integers, rounded up."""
    return -(-a // b)
