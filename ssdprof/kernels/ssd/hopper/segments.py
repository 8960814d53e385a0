"""How the Hopper kernel cuts sequences into segments: by a simulated schedule of the programs on the GPU's SMs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# In units of a chunk of the second pass (1.8 us on an H200), fitted to the times in
# benchmarks/results/hopper-segments-h200.json.  How well: benchmarks/log/ssd.md#row-53.
# A chunk of the first pass, by halves of N: where all programs begin with one, and where only those that recompute do.
FIRST_PASS = {1: 0.45, 2: 0.34}
RECOMPUTED = {1: 0.384, 2: 0.34}
START = 3.0  # a program's start and end
PUBLISH = 1.1  # until what a segment adds is seen by others
PART = 0.36  # for a segment to sum what one before it has published
CALL = 0.6  # launching, and zeroing the flags
# Chunks after which the first pass stops, of sixteen pairs of heads with decays as models have them.  One never stops:
# the first, so that it counts where there are few.
REACH = (1 << 31, 28, 73, 7, 18, 34, 61, 23, 89, 51, 167, 14, 4, 42, 116, 10)
LONGEST_RECOMPUTED = 128  # chunks of a sequence whose first passes may go over all that is before
UNFUSED_CHUNK = 4  # the longest of an unfused pipeline: 256 positions
MEMORIES = (1, 2, 4, 8)  # chunks in which heads forget, beside those that never do
AS_LARGE = 1.01  # a squared error as large as another, but for what no test can see
CLASSES = 16  # of lengths, in each power of two: what is simulated for one is taken for all of its class


@dataclass(frozen=True, kw_only=True)
class Segments:
    """`long_count` segments of `long_segment` chunks, then segments of `segment` chunks.

    A schedule is good when long segments fill the GPU first (their first pass stops early, so they read less twice) and
    short ones even out the end.
    recompute: a segment's first pass goes over all that is before it, and none waits for another; for short sequences
    shares: with whole sequences as segments, programs that stay for equal shares of all chunks (`assignment.py`); if
        there are no more pairs of units than that, or this is 0, there is a program for each segment
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
            lengths.append(min(left, self.long_segment if len(lengths) < self.long_count else self.segment))
            left -= lengths[-1]
        return lengths

    def count(self, nchunks: int) -> int:
        """Segments of a sequence of `nchunks` chunks."""
        return len(self.lengths(nchunks))


def packed_segment(pairs: int) -> int:
    """Chunks of a segment of packed sequences, whose lengths are on the device: as many as there are pairs of units.

    Fewer pairs leave more of the GPU to segments.  With fewer than 8 chunks, long sequences would have too many to sum.
    """
    return min(64, max(8, 1 << (pairs - 1).bit_length()))


def cut(nchunks: int, pairs: int, halves: int, sm_count: int) -> Segments:
    """The segments with the least simulated time for `pairs` of units (or halves) of `nchunks` chunks each."""
    step = 1 << max(0, nchunks.bit_length() - CLASSES.bit_length())
    return _cut(ceil_div(nchunks, step) * step, pairs, halves, sm_count)


@lru_cache(maxsize=1024)
def _cut(nchunks: int, pairs: int, halves: int, sm_count: int) -> Segments:
    if pairs > sm_count:  # no more parallelism is needed than they give
        return Segments(segment=max(1, nchunks), shares=sm_count)
    exact = (s for s in candidates(nchunks, sm_count / pairs) if as_exact_as_unfused(s, nchunks))
    return min(exact, key=lambda segments: simulated_time(segments, nchunks, pairs, halves, sm_count))


def as_exact_as_unfused(segments: Segments, nchunks: int) -> bool:
    """Whether no head's error is larger than an unfused pipeline's with its longest chunks, however soon it forgets."""
    ours, theirs = segments.lengths(nchunks), Segments(segment=UNFUSED_CHUNK).lengths(nchunks)
    return rounded_twice(ours) <= rounded_twice(theirs) and all(
        squared_error(ours, memory) <= AS_LARGE * squared_error(theirs, memory) for memory in MEMORIES
    )


def rounded_twice(lengths: list[int]) -> int:
    """Pairs of chunks of which one is before the other's segment: what it adds to the other's output is rounded by the
    first pass, and as a part of the state.  An unfused pipeline does that to what is before a chunk."""
    before, pairs = 0, 0
    for length in lengths:
        pairs += length * before
        before += length
    return pairs


def squared_error(lengths: list[int], memory: float) -> float:
    """Squared error of the outputs of a head whose decay is e^(-1 / memory) per chunk.  In units of one rounding: the
    output's own, one per term, and a second one for terms from before a segment.  docs/measuring.md."""
    kept = math.exp(-2 / memory)

    def energy(nchunks: int) -> float:  # that one chunk has of so many, up to its own
        return (1 - kept**nchunks) / (1 - kept)

    first, before = 0, 0.0
    for length in lengths:
        before += kept * energy(length) * energy(first)
        first += length
    return 2 + before * (1 - kept) / (first - kept * energy(first))


def candidates(nchunks: int, programs_per_pair: float) -> Iterator[Segments]:
    """Ways to cut a sequence of `nchunks` chunks, where the GPU has room for so many programs per pair at once."""
    yield Segments(segment=max(1, nchunks))
    at_once = max(1, int(programs_per_pair))
    for count in sorted({2, 3, 4, 6, 8, 11, 16, 22, 32, at_once, at_once + 1}):
        if count <= min(nchunks, at_once + 1):
            yield Segments(segment=ceil_div(nchunks, count))
    for part in (0.5, 0.6, 0.67, 0.75, 0.8, 0.85):  # of a sequence, in long segments
        long = max(1, round(part * nchunks / at_once))
        left = nchunks - at_once * long
        if left > 0:
            for count in (1, 2, 4, 8):
                yield Segments(long_count=at_once, long_segment=long, segment=ceil_div(left, count))
    if nchunks <= LONGEST_RECOMPUTED:
        for first in range(ceil_div(nchunks, 2), 3 * nchunks // 4 + 1, ceil_div(nchunks, 64)):
            if nchunks > first:
                for count in (1, 2, 3):
                    yield Segments(
                        long_count=1, long_segment=first, segment=ceil_div(nchunks - first, count), recompute=True
                    )


def simulated_time(segments: Segments, nchunks: int, pairs: int, halves: int, sm_count: int) -> float:
    """Until the last program ends, in chunks' time, if SMs take programs in order as they come free, one each."""
    lengths = segments.lengths(nchunks)
    looks_back = len(lengths) > 1 and not segments.recompute
    of_first_pass = (RECOMPUTED if segments.recompute else FIRST_PASS)[halves]
    free = [0.0] * sm_count
    published: list[list[float]] = [[] for _ in range(pairs)]  # when, by segments
    end, before = 0.0, 0
    for index, length in enumerate(lengths):
        last = index == len(lengths) - 1
        to_see = before if segments.recompute else 0 if last else length
        parts = [_parts(lengths[:index], reach) for reach in REACH[:pairs]] if looks_back else []
        for pair in range(pairs):
            time = free[0] + START + of_first_pass * min(to_see, REACH[pair % len(REACH)])
            if looks_back:
                if not last:
                    time += PUBLISH
                    published[pair].append(time)
                read = parts[pair % len(REACH)]
                time = max([time, *published[pair][index - read : index]]) + PART * read
            time += length
            heapq.heapreplace(free, time)
            end = max(end, time)
        before += length
    return end + (CALL if looks_back else CALL / 2)


def _parts(before: list[int], reach: int) -> int:
    """How many of the segments before it a segment reads: until the remaining decay is zero."""
    parts = 0
    for length in reversed(before):
        parts += 1
        reach -= length
        if reach <= 0:
            break
    return parts


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
