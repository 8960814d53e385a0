"""The cut of sequences into segments for the Hopper kernel, by simulating the schedule of programs on the SMs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# Times are in units of one chunk of the second pass (1.8 us on an H200), fitted to
# benchmarks/results/hopper-segments-h200.json.  Quality of the fit: benchmarks/log/ssd.md#row-53.
# Time of a chunk of the first pass, by halves of N: FIRST_PASS if all programs begin with a first pass, RECOMPUTED if
# only those that recompute do.
FIRST_PASS = {1: 0.45, 2: 0.34}
RECOMPUTED = {1: 0.384, 2: 0.34}
START = 3.0  # time to start and end a program
PUBLISH = 1.1  # time until others see the state that a segment adds
PART = 0.36  # time to sum the published state of one earlier segment
CALL = 0.6  # time to launch, and to zero the flags
# Chunks after which the first pass stops, for sixteen pairs of heads with decays as models have them.  One pair never
# stops.  It is the first, so that it counts in calls with few pairs.
REACH = (1 << 31, 28, 73, 7, 18, 34, 61, 23, 89, 51, 167, 14, 4, 42, 116, 10)
LONGEST_RECOMPUTED = 128  # most chunks of a sequence for `recompute`
UNFUSED_CHUNK = 4  # longest chunk of an unfused pipeline: 256 positions
MEMORIES = (1, 2, 4, 8)  # memories of heads to check, in chunks, in addition to heads that never forget
AS_LARGE = 1.01  # two squared errors count as equal up to this factor, which no test can detect
CLASSES = 16  # length classes per power of two; all lengths of a class share one simulation


@dataclass(frozen=True, kw_only=True)
class Segments:
    """`long_count` segments of `long_segment` chunks, then segments of `segment` chunks.

    In a good schedule, long segments fill the GPU first, and short ones balance the end.  The first pass of a long
    segment stops early, so a smaller share of it is read twice.
    recompute: a segment's first pass covers all chunks before it, and no segment waits for another; for short sequences
    shares: if segments are whole sequences, the number of programs with equal shares of all chunks (`assignment.py`);
        if 0, or if there are not more pairs of units than this, there is one program per segment
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
    """Chunks per segment of packed sequences, whose lengths are on the device: about the number of pairs of units.

    Fewer pairs leave more of the GPU for segments.  With fewer than 8 chunks per segment, a long sequence would have
    too many parts to sum.
    """
    return min(64, max(8, 1 << (pairs - 1).bit_length()))


def cut(nchunks: int, pairs: int, halves: int, sm_count: int) -> Segments:
    """The segments with the least simulated time, for `pairs` of units (or halves) with `nchunks` chunks each."""
    step = 1 << max(0, nchunks.bit_length() - CLASSES.bit_length())
    return _cut(ceil_div(nchunks, step) * step, pairs, halves, sm_count)


@lru_cache(maxsize=1024)
def _cut(nchunks: int, pairs: int, halves: int, sm_count: int) -> Segments:
    if pairs > sm_count:  # pairs alone give enough parallelism
        return Segments(segment=max(1, nchunks), shares=sm_count)
    exact = (s for s in candidates(nchunks, sm_count / pairs) if as_exact_as_unfused(s, nchunks))
    return min(exact, key=lambda segments: simulated_time(segments, nchunks, pairs, halves, sm_count))


def as_exact_as_unfused(segments: Segments, nchunks: int) -> bool:
    """Whether no head's error exceeds that of an unfused pipeline with its longest chunks, however fast it forgets."""
    ours, theirs = segments.lengths(nchunks), Segments(segment=UNFUSED_CHUNK).lengths(nchunks)
    return rounded_twice(ours) <= rounded_twice(theirs) and all(
        squared_error(ours, memory) <= AS_LARGE * squared_error(theirs, memory) for memory in MEMORIES
    )


def rounded_twice(lengths: list[int]) -> int:
    """Number of pairs of chunks in which the first one precedes the segment of the second one.

    The contribution of the first chunk to the second one's output is rounded twice: by the first pass, and as part of
    the state.  An unfused pipeline rounds the contributions of all earlier chunks twice.
    """
    before, pairs = 0, 0
    for length in lengths:
        pairs += length * before
        before += length
    return pairs


def squared_error(lengths: list[int], memory: float) -> float:
    """Squared error of the outputs of a head whose decay is e^(-1 / memory) per chunk, in units of one rounding.

    Counts the rounding of the output, one rounding per term, and a second one for terms from before a segment.
    See docs/measuring.md.
    """
    kept = math.exp(-2 / memory)

    def energy(nchunks: int) -> float:  # of a chunk's output, from the last `nchunks` chunks, its own included
        return (1 - kept**nchunks) / (1 - kept)

    first, before = 0, 0.0
    for length in lengths:
        before += kept * energy(length) * energy(first)
        first += length
    return 2 + before * (1 - kept) / (first - kept * energy(first))


def candidates(nchunks: int, programs_per_pair: float) -> Iterator[Segments]:
    """Candidate cuts of a sequence of `nchunks` chunks; the GPU runs `programs_per_pair` programs per pair at once."""
    yield Segments(segment=max(1, nchunks))
    at_once = max(1, int(programs_per_pair))
    for count in sorted({2, 3, 4, 6, 8, 11, 16, 22, 32, at_once, at_once + 1}):
        if count <= min(nchunks, at_once + 1):
            yield Segments(segment=ceil_div(nchunks, count))
    for part in (0.5, 0.6, 0.67, 0.75, 0.8, 0.85):  # share of a sequence in long segments
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
    """Time until the last program ends, in chunks.  Each SM runs one program at a time, and programs start in order."""
    lengths = segments.lengths(nchunks)
    looks_back = len(lengths) > 1 and not segments.recompute
    of_first_pass = (RECOMPUTED if segments.recompute else FIRST_PASS)[halves]
    free = [0.0] * sm_count
    published: list[list[float]] = [[] for _ in range(pairs)]  # time of publication, by segment
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
    """The number of earlier segments that a segment reads until the remaining decay is zero."""
    parts = 0
    for length in reversed(before):
        parts += 1
        reach -= length
        if reach <= 0:
            break
    return parts


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
