"""Shared code of the oracles: they return their output in blocks of positions, sequence after sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of the output, and the state after it.

    out:   (stop - start, heads, values), the output at positions start..stop of row `batch`
    state: (heads, ...) after position stop - 1; the sequence's final state if `last`
    sequence: row of the initial and final states; equals `batch` unless the inputs are packed
    """

    sequence: int
    batch: int
    start: int
    stop: int
    last: bool  # whether it is the last block of its sequence
    out: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Positions start..stop of one sequence, in row `batch`."""

    sequence: int
    batch: int
    start: int
    stop: int

    def cut(self, block: int) -> Iterator[Stretch]:
        """Pieces of at most `block` positions, in order.  An empty stretch has one empty piece."""
        for start in range(self.start, max(self.stop, self.start + 1), block):
            stop = min(start + block, self.stop)
            yield Stretch(sequence=self.sequence, batch=self.batch, start=start, stop=stop)


def sequences(batch: int, length: int, cu_seqlens: torch.Tensor | None) -> list[Stretch]:
    """The sequences of a (batch, length, ...) tensor, in order.

    Reads cu_seqlens on the host.  Raises ValueError if its values are not 0 = c_0 <= c_1 <= ... = length.
    """
    if cu_seqlens is None:
        return [Stretch(sequence=row, batch=row, start=0, stop=length) for row in range(batch)]
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to {length}")
    return [Stretch(sequence=i, batch=0, start=start, stop=stop) for i, (start, stop) in enumerate(pairwise(bounds))]
