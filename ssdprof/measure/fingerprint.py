"""A hash of a tensor's bits, computed on its device, so that outputs can be compared without being kept."""

from __future__ import annotations

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements widened to int64 at a time
_ODD = 6364136223846793005  # Knuth's multiplier


def fingerprint(*tensors: torch.Tensor) -> tuple[int, ...]:
    """For each tensor a weighted sum of its elements' bits, modulo 2**64, with odd weights.

    The same for the same bits in any run and on any device.  One changed element always changes it, because an odd
    weight has an inverse; a NaN is compared by its bits.
    """
    return tuple(_fingerprint(tensor) for tensor in tensors)


def _fingerprint(tensor: torch.Tensor) -> int:
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
    weights = torch.arange(min(_BLOCK, len(bits)), device=bits.device) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK].long()
        total = total * _ODD + (block * weights[: len(block)]).sum()
    return int(total)
