"""The cut of sequences into segments for the programs of a Hopper kernel, by the operator's model
of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, kw_only=True)
class Cut:
    """`long_count` segments of `long_segment` chunks, then segments of `segment` chunks.

    In a good schedule, long segments fill the GPU first, and short ones balance the end.  The first
    pass of a long segment stops early, so a smaller share of it is read twice.
    recompute: a segment's first pass covers all chunks before it, and no segment waits for another;
    for short sequences
    shares: if segments are whole sequences, the number of programs that share all of them; if 0, or
        if there are not more pairs than this, there is one program per segment
    """

    segment: int
    long_count: int = 0
    long_segment: int = 0
    recompute: bool = False
    shares: int = 0

    def lengths(self, nchunks: int) -> list[int]:
        """Chunks of each segment of a sequence of `nchunks` >= 1 chunks."""
        lengths: list[int] = []
        left = nchunks
        while left > 0:
            lengths.append(
                min(left, self.long_segment if len(lengths) < self.long_count else self.segment)
            )
            left -= lengths[-1]
        return lengths

    def count(self, nchunks: int) -> int:
        """Segments of a sequence of `nchunks` chunks."""
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
    """The cut with the least time, for `pairs` of a sequence and a program's heads, with `nchunks`
    chunks each.

    candidates: of nchunks, pairs and sm_count.  time: of a cut, nchunks, pairs and sm_count
    classes: length classes per power of two; all lengths of a class share one cut
    whole_from: pairs, in addition to one per SM, from which sequences are not cut
    """
    step = 1 << max(0, nchunks.bit_length() - classes.bit_length())
    if nchunks % step:
        return cut(
            ceil_div(nchunks, step) * step,
            pairs,
            sm_count,
            candidates=candidates,
            time=time,
            classes=classes,
            whole_from=whole_from,
        )
    if pairs >= sm_count + whole_from:  # pairs alone give enough parallelism
        return Cut(segment=max(1, nchunks), shares=sm_count)
    return min(
        candidates(nchunks, pairs, sm_count),
        key=lambda candidate: time(candidate, nchunks, pairs, sm_count),
    )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
