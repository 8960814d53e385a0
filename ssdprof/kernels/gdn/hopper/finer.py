"""A finer cut than that of `config.py`: more programs than SMs, and heads that forget slowly in short parts.

`fused` does not choose it; a bench measures it beside `fused`.
"""

from __future__ import annotations

from math import log2

from ssdprof.kernels.gdn.hopper.config import WORTH_PARTS, HopperConfig, ceil_div, estimated_time
from ssdprof.kernels.gdn.hopper.parts import MOST_ROWS
from ssdprof.kernels.gdn.hopper.rings import CHUNK
from ssdprof.kernels.gdn.inputs import GDNInputs

MOST_WAVES = 4  # programs of an SM, one after the other
SHORTEST, LONGEST = 16, 64  # chunks: of a part at least, and of the longest first pass where parts are not longer
MOST_PARTS = 2048  # of all rows: 256 MiB
PASS_OVER_COMBINE = 0.8  # the time of a chunk in a part, in that of a part in `combine_kernel.py`


def finer(inputs: GDNInputs, sm_count: int) -> HopperConfig:
    """The cut with the least estimated time, if every SM takes its next program as soon as it has done the one before.

    Where segments are whole sequences, it is that of `HopperConfig.choose`.
    """
    nchunks, pairs = ceil_div(inputs.v.shape[1], CHUNK.value), inputs.sequences * inputs.v.shape[2]

    def time(count: int) -> float:
        return ceil_div(count * pairs, sm_count) * estimated_time(ceil_div(nchunks, count), nchunks)

    most = min(nchunks, MOST_WAVES * sm_count // pairs, 1 + MOST_ROWS // pairs)
    count = min(range(1, max(1, most) + 1), key=time)
    if count == 1:
        return HopperConfig.choose(inputs, sm_count, batch_invariant=False)
    segment = ceil_div(nchunks, count)
    reason = f"least estimated time: {count * pairs} programs of {segment} chunks on {sm_count} SMs"
    if nchunks - segment <= WORTH_PARTS:
        return HopperConfig(segment=segment, reason=reason)
    parts = _part_count(segment, count - 1, (count - 1) * pairs)
    segment = parts * ceil_div(segment, parts)
    return HopperConfig(
        segment=segment,
        slow_parts=parts,
        longest_first_pass=max(segment // parts, min(LONGEST, max(SHORTEST, segment // 4))),
        carriers=sm_count,
        reason=reason,
    )


def _part_count(segment: int, boundaries: int, rows: int) -> int:
    """Parts of a segment are computed side by side, and then combined one after the other, over all boundaries.

    A power of two, which most segments are a multiple of.
    """
    fastest = 0.5 * log2(PASS_OVER_COMBINE * segment / boundaries)
    most = min(segment // SHORTEST, MOST_PARTS // rows)
    return 1 << max(0, min(round(fastest), int(log2(max(1, most)))))
