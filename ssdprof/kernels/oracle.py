"""Code that the oracles of all operators share.  An oracle yields its output in blocks of
positions, sequence after sequence.  Each operator has a chunked form, which computes a block
(`Evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.registry import Implementation, Plan, register

# positions per chunk of the chunked forms; it affects the amount of work, and the result only by
# rounding in the dtype of the computation
ORACLE_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Span:
    """The positions start to stop - 1 of row `batch` of the tensors, which belong to one sequence.

    sequence: number of the sequence, which is the row of the initial states, and without
        `state_every` of the final states; it is `batch` unless sequences are packed.
    """

    sequence: int
    batch: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor (b, l, ...) at the positions of the span, as a view (length, ...)."""
        return tensor[self.batch, self.start : self.stop]

    def cut(self, block: int) -> Iterator[Span]:
        """The span in spans of at most `block` positions, in order; an empty span as it is."""
        for start in range(self.start, max(self.stop, self.start + 1), block):
            stop = min(start + block, self.stop)
            yield Span(sequence=self.sequence, batch=self.batch, start=start, stop=stop)


# A part of the output: its span; out there, (length, heads, values); the state (heads, ...) after
# it; and the row of the call's final states that has this state, or None if none has it
Block = tuple[Span, Tensor, Tensor, int | None]
# (inputs, span, dtype, state before the span) -> out of the span, and the state after it
Evaluate = Callable[[Any, Span, torch.dtype, Tensor], tuple[Tensor, Tensor]]


def spans_of(inputs: Inputs) -> list[Span]:
    """The positions of every sequence, in order; those of an empty sequence are an empty span.

    For packed sequences, reads cu_seqlens on the host.  Raises ValueError if its values are not 0 =
    c_0 <= c_1 <= ... = length.
    """
    length = inputs.length
    if inputs.cu_seqlens is None:
        rows = range(inputs.sequences)
        return [Span(sequence=row, batch=row, start=0, stop=length) for row in rows]
    bounds: list[int] = inputs.cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to {length}")
    return [
        Span(sequence=i, batch=0, start=start, stop=stop)
        for i, (start, stop) in enumerate(pairwise(bounds))
    ]


def initial_states(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """The initial states of all sequences in `dtype`, in a new tensor; zeros if there are none."""
    if inputs.initial is not None:
        return inputs.initial.to(dtype, copy=True)
    return torch.zeros(inputs.states_shape, dtype=dtype, device=inputs.values.device)


def blocks_of(
    evaluate: Evaluate,
    inputs: Inputs,
    dtype: torch.dtype = torch.float64,
    *,
    block: int = 2048,
    may_wait: bool = True,
) -> Iterator[Block]:
    """The output in blocks of at most `block` positions, in order, sequence after sequence.

    Every sequence yields at least one block, which is empty if the sequence is.  Its last block has
    its final state; blocks also end where `state_every` wants a state.  With `state_every`, an
    empty sequence has no state among the final states, and its block names no row.

    may_wait: whether the host may wait for the device after each block, to look for NaN.  Else NaN
        reaches earlier positions of its chunk.

    Reads the values of cu_seqlens on the host.  Raises ValueError if they are not 0 = c_0 <= c_1 <=
    ... = length.
    """
    if may_wait:
        evaluate = partial(_causal, evaluate)
    states = initial_states(inputs, dtype)
    for span in spans_of(inputs):
        state = states[span.sequence]
        # pieces end where a state is wanted
        every = inputs.state_every or max(span.length, 1)
        for piece in span.cut(every):
            row: int | None = span.sequence
            if inputs.state_every:
                row = state_row(inputs, piece.batch, piece.start) if piece.length else None
            for part in piece.cut(block):
                out, state = evaluate(inputs, part, dtype, state)
                yield part, out, state, row if part.stop == piece.stop else None


def _causal(
    evaluate: Evaluate, inputs: Inputs, span: Span, dtype: torch.dtype, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The result of `evaluate`, in which no NaN reaches earlier positions.

    Inside a chunk it would: the causal mask multiplies later positions by zero.  If out is not
    finite, the span is evaluated again in pieces.  A new one begins at each position where an
    element of an input is NaN or infinite that is finite at the position before.  An infinite g
    counts as finite, because its decay is 0 or 1.  Waits for the device.
    """
    out, state_after = evaluate(inputs, span, dtype, state)
    if bool(out.isfinite().all()):
        return out, state_after
    is_new = torch.zeros(span.length - 1, dtype=torch.bool, device=inputs.device)
    for name, tensor in inputs.tensors.items():
        if tensor.ndim > 2 and name != inputs.STATES:  # (b, l, ...)
            rows = span.of(tensor).flatten(1)
            faulty = rows.isnan() if name == "g" else ~rows.isfinite()
            is_new |= (faulty[1:] & ~faulty[:-1]).any(1)
    begins = is_new.nonzero()[:, 0] + span.start + 1
    pieces = []
    for start, stop in pairwise([span.start, *begins.tolist(), span.stop]):
        piece, state = evaluate(inputs, replace(span, start=start, stop=stop), dtype, state)
        pieces.append(piece)
    # what was finite, such as other heads, keeps its bits
    out = torch.where(out.isfinite(), out, torch.cat(pieces))
    return out, torch.where(state_after.isfinite(), state_after, state)


def state_row(inputs: Inputs, batch: int, position: int) -> int:
    """The row of `final_states` with the first state that is returned after position `position`, or
    a later one, of the batch row `batch`.  `state_every` must not be 0.
    """
    per_batch_row = -(-inputs.length // inputs.state_every)  # rounded up
    return batch * per_batch_row + position // inputs.state_every


def chunked(
    evaluate: Evaluate, inputs: Inputs, dtype: torch.dtype = torch.float64, *, block: int = 2048
) -> Output:
    """The blocks of `blocks_of`, joined to an output whose out and final states are in `dtype`."""
    return joined(inputs, blocks_of(evaluate, inputs, dtype, block=block), dtype, dtype)


def joined(
    inputs: Inputs, blocks: Iterable[Block], dtype: torch.dtype, state_dtype: torch.dtype
) -> Output:
    """The output of a call from its blocks: out in `dtype`, final states in `state_dtype`."""
    out = torch.empty(inputs.values.shape, dtype=dtype, device=inputs.values.device)
    final_states = torch.empty(inputs.final_shape, dtype=state_dtype, device=inputs.values.device)
    for span, block_out, state, row in blocks:
        span.of(out).copy_(block_out)
        if row is not None:
            final_states[row] = state
    return Output(out, final_states)


def register_oracle(operator: str, evaluate: Evaluate) -> Callable[..., Output]:
    """Register the oracle as the implementation "reference", which computes in fp64 with torch at
    every precision, and rounds once: out to the dtype of the values, states to fp32.  In its
    output, NaN reaches earlier positions of a chunk.  Returns a function (inputs) -> the output.
    """
    plan = Plan(
        variant="torch",
        launches=0,
        config={"chunk_size": ORACLE_CHUNK},
        reason="fp64, rounded once at the end; torch operations, not kernels of ours",
    )

    def run(inputs: Inputs, _precision: object = None) -> Output:
        # without a wait, so that a CUDA graph can capture it
        blocks = blocks_of(evaluate, inputs, may_wait=False)
        return joined(inputs, blocks, inputs.values.dtype, torch.float32)

    register(
        Implementation(
            operator=operator,
            name="reference",
            run=run,
            plan=lambda _inputs, _precision: plan,
            keeps=lambda _: True,
        )
    )
    return run


def split_chunks(tensor: Tensor, size: int) -> Tensor:
    """Cut positions into chunks of `size`, the last of them padded with zeros: (l, h, ...) -> (c,
    h, size, ...).
    """
    length, *rest = tensor.shape
    padded = torch.cat([tensor, tensor.new_zeros(-length % size, *rest)])
    return padded.reshape(-1, size, *rest).transpose(1, 2)


def segment_sums(steps: Tensor) -> Tensor:
    """The sum of steps s + 1 to l for each pair (l, s), 0 for s = l and -inf for s > l: (..., l) ->
    (..., l, s).

    Each pair has a sum of its own.  In a difference of cumulative sums, one huge step would cancel
    the digits of later steps.
    """
    length = steps.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=steps.device).tril()
    after_s = steps[..., :, None].expand(*steps.shape, length).masked_fill(~causal.tril(-1), 0)
    return after_s.cumsum(-2).masked_fill(~causal, -torch.inf)
