"""One allocation for what a call needs beyond its outputs.

A launch takes an address and a dtype.  On the host these cost a tenth of a tensor, or of a view of one.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 512  # bytes: that of torch's own allocations on a GPU


class Place(NamedTuple):
    """Where a part lies in a workspace, in bytes, and of which dtype it is."""

    begin: int
    nbytes: int
    dtype: torch.dtype


class Part:
    """A part of a workspace, as a launch takes it: an object with a dtype and an address."""

    __slots__ = ("_address", "_memory", "_place", "dtype")

    def __init__(self, memory: torch.Tensor, place: Place) -> None:
        self._memory, self._place, self.dtype = memory, place, place.dtype
        self._address = memory.data_ptr() + place.begin

    def data_ptr(self) -> int:
        return self._address

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """A view of it, if it is of fp32, as the workspace is."""
        return self._memory.as_strided(shape, strides, self._place.begin // self._memory.element_size())

    def tensor(self) -> torch.Tensor:
        """A view of its elements, in one dimension."""
        begin, nbytes, dtype = self._place
        return self._memory.view(torch.uint8)[begin : begin + nbytes].view(dtype)


def part(memory: torch.Tensor | None, place: Place | None) -> Part | None:
    """None where there is no place, as a launch takes it."""
    return None if memory is None or place is None else Part(memory, place)


class Layout:
    """Places one after the other, each at a multiple of `ALIGNMENT`."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, dtype: torch.dtype, *shape: int) -> Place:
        place = Place(self.nbytes, prod(shape) * dtype.itemsize, dtype)
        self.nbytes += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def allocate(self, device: torch.device) -> torch.Tensor:
        """The workspace, uninitialised, in fp32."""
        return torch.empty(self.nbytes // 4, dtype=torch.float32, device=device)
