"""Shared code of the oracles: they return their output in blocks of positions, sequence after sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from ssdprof.kernels.registry import Plan

ORACLE_CHUNK = 64  # positions per chunk of the chunked forms: takes little work, and does not affect the result


@dataclass(frozen=True, kw_only=True)
class SequenceSpan:
    """Positions start..stop of one sequence, in row `batch`.

    sequence: row of the initial and final states; equals `batch` unless the inputs are packed
    """

    sequence: int
    batch: int
    start: int
    stop: int

    def cut(self, block: int) -> Iterator[SequenceSpan]:
        """Pieces of at most `block` positions, in order.  An empty span has one empty piece."""
        for start in range(self.start, max(self.stop, self.start + 1), block):
            stop = min(start + block, self.stop)
            yield SequenceSpan(sequence=self.sequence, batch=self.batch, start=start, stop=stop)


@dataclass(frozen=True, kw_only=True)
class OutputBlock(SequenceSpan):
    """A block of the output, and the state after it.

    out:   (stop - start, heads, values), the output at positions start..stop of row `batch`
    state: (heads, ...) after position stop - 1; the sequence's final state if it is the `last` block
    """

    last: bool
    out: torch.Tensor
    state: torch.Tensor


def sequences(batch: int, length: int, cu_seqlens: torch.Tensor | None) -> list[SequenceSpan]:
    """The sequences of a (batch, length, ...) tensor, in order.

    Reads cu_seqlens on the host.  Raises ValueError if its values are not 0 = c_0 <= c_1 <= ... = length.
    """
    if cu_seqlens is None:
        return [SequenceSpan(sequence=row, batch=row, start=0, stop=length) for row in range(batch)]
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to {length}")
    return [
        SequenceSpan(sequence=i, batch=0, start=start, stop=stop) for i, (start, stop) in enumerate(pairwise(bounds))
    ]


def collect(blocks: Iterable[OutputBlock], out: torch.Tensor, final_states: torch.Tensor) -> None:
    """Write the blocks to `out`, and the states after the sequences to `final_states`."""
    for block in blocks:
        out[block.batch, block.start : block.stop] = block.out
        if block.last:
            final_states[block.sequence] = block.state


def oracle_plan(_inputs: object, _precision: object) -> Plan:
    """How an oracle runs as an implementation."""
    return Plan(
        variant="torch",
        launches=0,
        config={"chunk_size": ORACLE_CHUNK},
        reason="fp64, rounded once at the end; torch operations, not kernels of ours",
    )


def segment_sums(steps: torch.Tensor) -> torch.Tensor:
    """(..., l) -> (..., l, s): the sum of steps s+1..l, which is 0 for s = l and -inf for s > l.

    Each pair is summed by itself.  In a difference of cumulative sums, one huge step would cancel the digits of later
    ones.
    """
    length = steps.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=steps.device).tril()
    sums = steps[..., :, None].expand(*steps.shape, length).masked_fill(~causal.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~causal, -torch.inf)
