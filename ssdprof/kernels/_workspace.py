"""The workspace of a call: one allocation for everything except its outputs.

A launch needs only an address and a dtype.  On the host, these take a tenth of the time of a tensor or a view.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 512  # bytes, as torch's own allocations on a GPU


class Place(NamedTuple):
    """Offset and size of a part in a workspace, in bytes, and its dtype."""

    begin: int
    nbytes: int
    dtype: torch.dtype


class Part:
    """A part of a workspace, as an argument of a launch: an object with a dtype and an address."""

    __slots__ = ("_address", "_memory", "_place", "dtype")

    def __init__(self, memory: torch.Tensor, place: Place) -> None:
        self._memory, self._place, self.dtype = memory, place, place.dtype
        self._address = memory.data_ptr() + place.begin

    def data_ptr(self) -> int:
        return self._address

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """A strided view.  Requires an fp32 part, because the workspace is fp32."""
        return self._memory.as_strided(shape, strides, self._place.begin // self._memory.element_size())

    def tensor(self) -> torch.Tensor:
        """A one-dimensional view."""
        begin, nbytes, dtype = self._place
        return self._memory.view(torch.uint8)[begin : begin + nbytes].view(dtype)


def part(memory: torch.Tensor | None, place: Place | None) -> Part | None:
    """The part at `place`; None, which a launch accepts, without a place or a workspace."""
    return None if memory is None or place is None else Part(memory, place)


class Layout:
    """Consecutive places, each aligned to `ALIGNMENT`."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, dtype: torch.dtype, *shape: int) -> Place:
        place = Place(self.nbytes, prod(shape) * dtype.itemsize, dtype)
        self.nbytes += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def allocate(self, device: torch.device) -> torch.Tensor:
        """An uninitialised fp32 tensor for the workspace."""
        return torch.empty(self.nbytes // 4, dtype=torch.float32, device=device)
