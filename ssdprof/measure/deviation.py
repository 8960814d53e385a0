"""The difference between two tensors, accumulated block by block on the device.

Every sum is in fp64 and every comparison too: a difference of two fp32, fp16 or bf16 numbers is then exact unless their
exponents are more than 29 binary digits apart, so the comparator's own rounding does not affect a result.
The host reads nothing before `result`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ssdprof import schema

_NOWHERE = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Region:
    """The region of a block in its tensor: positions start..stop of a row of `out`, or a sequence of `final_states`.

    Blocks are compared with the head first, as (h, elements of the head).
    """

    shape: tuple[int, ...]  # of the tensor: (b, l, h, ...), or (sequences, h, ...)
    row: int  # batch or sequence
    positions: tuple[int, int] | None  # (start, stop); None for states

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block of a tensor of `shape`, head first, in fp64."""
        block = tensor[self.row]
        if self.positions is not None:
            block = block[slice(*self.positions)].transpose(0, 1)
        return block.flatten(1).double()

    def flat(self, head: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Row-major index in the tensor of element (head, j) of the block."""
        if self.positions is None:
            _, heads, *rest = self.shape
            return (self.row * heads + head) * prod(rest) + j
        _, length, heads, *rest = self.shape
        width = prod(rest)
        return ((self.row * length + self.positions[0] + j // width) * heads + head) * width + j % width


class HeadNorms:
    """Running maximum and sum of squares of a tensor, per head."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.max = torch.zeros(heads, dtype=torch.float64, device=device)
        self.square_sum = torch.zeros(heads, dtype=torch.float64, device=device)

    def add(self, block: torch.Tensor) -> None:
        """block: (h, elements), fp64.  Elements that are not finite are left out."""
        if block.numel() == 0:
            return
        block = torch.where(block.isfinite(), block, 0.0)
        self.max = torch.maximum(self.max, block.abs().amax(1))
        self.square_sum += block.square().sum(1)

    def rms(self, elements: float) -> torch.Tensor:
        """RMS of each head, for this number of elements per head."""
        return (self.square_sum / elements).sqrt()


class SliceSums:
    """Running sums of squares of an error and of the reference, in slices of the positions.

    For a tensor without positions, nothing is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._squares: torch.Tensor | None = None  # (2, slices), fp64

    def add(self, error: torch.Tensor, other: torch.Tensor, place: Region) -> None:
        """Blocks of `place`: (h, elements), fp64."""
        if place.positions is None:
            return
        length, (start, stop) = place.shape[1], place.positions
        slices = min(schema.SLICES, length)
        if self._squares is None:
            self._squares = torch.zeros(2, slices, dtype=torch.float64, device=self._device)
        index = torch.arange(start, stop, device=self._device) * slices // length
        in_slice = torch.arange(slices, device=self._device)[:, None] == index
        for sums, block in zip(self._squares, (error, other), strict=True):
            squares = block.square().view(len(block), stop - start, -1).sum((0, 2))
            sums += torch.where(in_slice, squares, 0.0).sum(1)  # index_add_ has no fixed order of additions

    def ratios(self) -> tuple[float, ...]:
        """The RMS ratio in each slice.  Waits for the device."""
        if self._squares is None:
            return ()
        error, other = self._squares
        return tuple(rms_ratio(error, other).tolist())


class RunningDeviation:
    """Accumulates a `schema.Deviation`."""

    def __init__(self, against: str, shape: tuple[int, ...], heads: int, device: torch.device) -> None:
        self.against = against
        self.shape = shape
        self.error = HeadNorms(heads, device)
        self.other = HeadNorms(heads, device)
        self._along = SliceSums(device)
        self._worst_index = torch.zeros(heads, dtype=torch.int64, device=device)
        self._matches = torch.zeros(len(schema.TOLERANCES), dtype=torch.int64, device=device)
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self._first_nonfinite = torch.full((), _NOWHERE, dtype=torch.int64, device=device)
        self.elements = 0

    def add(self, ours: torch.Tensor, other: torch.Tensor, place: Region) -> None:
        """Compare a block; both (h, elements), fp64.

        An element matches if it equals the other one or if both are finite and |ours - other| <= atol + rtol |other|.
        So a NaN never matches, and an infinity matches only the same infinity.
        """
        if ours.numel() == 0:
            return
        head = torch.arange(len(ours), device=ours.device)
        finite = ours.isfinite() & other.isfinite()
        error = torch.where(finite, ours - other, 0.0).abs()
        other_finite = torch.where(finite, other, 0.0).abs()

        block_max, block_argmax = error.max(1)
        worse = (block_max > self.error.max) | (self.elements == 0)
        self._worst_index = torch.where(worse, place.flat(head, block_argmax), self._worst_index)
        self.error.add(error)
        self.other.add(other_finite)
        self._along.add(error, other_finite, place)

        equal = ours == other
        for i, tolerance in enumerate(schema.TOLERANCES):
            self._matches[i] += (equal | (finite & (error <= tolerance + tolerance * other_finite))).sum()

        bad = ~finite
        first_in_head = bad.to(torch.uint8).argmax(1)
        first = torch.where(bad.any(1), place.flat(head, first_in_head), _NOWHERE).min()
        self._first_nonfinite = torch.minimum(self._first_nonfinite, first)
        self._nonfinite += bad.sum()
        self.elements += ours.numel()

    def result(self) -> schema.Deviation:
        """worst_head: the one with the largest RMS ratio of its own; worst_position: that of max_abs, in any head.

        Waits for the device.
        """
        ratios = rms_ratio(self.error.square_sum, self.other.square_sum)
        nonfinite = int(self._nonfinite)
        matches = (100.0 * self._matches.double() / max(self.elements, 1)).tolist()
        return schema.Deviation(
            against=self.against,
            elements=self.elements,
            matches=tuple(
                schema.Match(tolerance=tolerance, match_pct=match)
                for tolerance, match in zip(schema.TOLERANCES, matches, strict=True)
            ),
            rms_ratio=float(rms_ratio(self.error.square_sum.sum(), self.other.square_sum.sum())),
            max_abs=float(self.error.max.max()),
            worst_head=int(ratios.argmax()),
            worst_position=self.position_of_max(int(self.error.max.argmax())),
            nonfinite=nonfinite,
            first_nonfinite=unravel(int(self._first_nonfinite), self.shape) if nonfinite else None,
            scale_max_abs=float(self.other.max.max()),
            along=self._along.ratios(),
        )

    def position_of_max(self, head: int) -> tuple[int, ...]:
        """The position of the largest difference in `head`."""
        return unravel(int(self._worst_index[head]), self.shape)


def rms_ratio(error_squares: torch.Tensor, other_squares: torch.Tensor) -> torch.Tensor:
    """sqrt(error / other); 0 where there is no error, infinity where only `other` is 0."""
    return torch.where(error_squares == 0, 0.0, (error_squares / other_squares).sqrt())


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The position of a row-major index."""
    position = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        position.append(coordinate)
    return tuple(reversed(position))
