"""Sums over every range of a short axis: the log decay between any two positions of a chunk."""

import torch


def segment_sums(steps: torch.Tensor) -> torch.Tensor:
    """(..., l) -> (..., l, s): the sum of steps s+1..l, which is 0 for s = l and -inf for s > l.

    Each pair is summed by itself.  In a difference of cumulative sums, one huge step would cancel the digits of later
    ones.
    """
    length = steps.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=steps.device).tril()
    sums = steps[..., :, None].expand(*steps.shape, length).masked_fill(~causal.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~causal, -torch.inf)
