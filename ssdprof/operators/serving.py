"""Calls on a server's pool of states, by implementations that take none, and the reverse.

gathered    an implementation that returns new states, called on a pool
on_copies   a call without a pool, by a function that writes a pool in place
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ssdprof import kernels, operators
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.late import torch
from ssdprof.operators.operator import in_pieces, pieces

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.inputs import Inputs
    from ssdprof.kernels.precision import Precision

# (inputs, precision) -> out, and the pool itself: `Implementation.in_place`
PoolRun = Callable[[Any, "Precision"], "kernels.Output"]
GATHERED = ("fused",)  # what servers call on gathered states
COPIES = "each call begins with a copy of the states, in its time"


def pool_run(implementation: Implementation) -> PoolRun | None:
    """How an implementation is called on a pool; None if it is not."""
    if implementation.in_place is not None:
        return implementation.in_place
    if implementation.name in GATHERED and implementation.kind == "bundled":
        return partial(gathered, implementation)
    return None


def gathered(
    implementation: Implementation, inputs: Inputs, precision: Precision
) -> kernels.Output:
    """Copies of the slots that are read, a call that begins with them, and its states to their
    slots.  The host reads no index.  UnsupportedError for every state of packed sequences, unless
    the implementation keeps them.
    """
    assert inputs.state_indices is not None
    pool, slots = getattr(inputs, inputs.LINEAR[1]), inputs.state_indices.long()
    if inputs.accepted is not None:
        slots = slots.gather(1, inputs.accepted.long()[:, None] - 1)[:, 0]
    known = (slots >= 0)[:, None, None, None]
    states = torch.where(known, pool[slots.clamp(min=0)].float(), 0.0)
    written = slots if inputs.write_indices is None else inputs.write_indices.long()
    every = written.ndim == 2
    indices = {"state_indices": None, "write_indices": None, "accepted": None}
    plain = replace(inputs, **{inputs.LINEAR[1]: states}, **indices, state_every=int(every))
    if every and not implementation.keeps(plain):
        tensors = operators.get(inputs.operator).binding.positional(inputs)
        out, new = in_pieces(implementation, pieces(plain, tensors), precision)
    else:
        out, new = implementation.run(plain, precision)
    positions, exist = _positions(inputs, written.shape[1] if every else 1)
    rows = positions if every else torch.arange(len(slots), device=pool.device)
    targets = written.flatten()
    _scatter(pool, targets, exist.flatten() & (targets >= 0), new[rows.flatten()])
    return kernels.Output(out, pool)


def on_copies(run: PoolRun, inputs: Inputs, precision: Precision) -> kernels.Output:
    """The call on a pool of copies of the initial states, or zeros, with a slot for each new state
    that `state_every` wants.
    """
    initial = inputs.initial
    device, count = inputs.device, inputs.sequences
    states = torch.zeros(inputs.states_shape, device=device) if initial is None else initial.float()
    slots = torch.arange(count, dtype=torch.int32, device=device)
    table = None
    room = inputs.final_shape[0] if inputs.state_every else 0
    pool = torch.cat([states, states.new_zeros(room, *states.shape[1:])])
    if room:
        positions, exist = _positions(inputs, inputs.length)
        table = torch.where(exist, positions + count, -1).int()
    call = replace(
        inputs, **{inputs.LINEAR[1]: pool}, state_indices=slots, write_indices=table, state_every=0
    )
    out, _ = run(call, precision)
    return kernels.Output(out, pool[count:] if room else pool)


def _positions(inputs: Inputs, longest: int) -> tuple[Tensor, Tensor]:
    """(sequences, longest): the position of each token among those of all sequences, 0 for what
    does not exist, and whether it exists.
    """
    steps, length = torch.arange(longest, device=inputs.device), inputs.length
    if inputs.cu_seqlens is None:
        starts = torch.arange(inputs.sequences, device=inputs.device) * length
        stops = starts + length
    else:
        starts, stops = inputs.cu_seqlens[:-1].long(), inputs.cu_seqlens[1:].long()
    positions = starts[:, None] + steps
    exist = positions < stops[:, None]
    return torch.where(exist, positions, 0), exist


def _scatter(pool: Tensor, slots: Tensor, kept: Tensor, states: Tensor) -> None:
    """Write the states that are kept, each to its slot.  The host does not know which: in place of
    each other one, the first that is kept is written again, or, if none is, what its slot holds.
    """
    rows = torch.where(kept, torch.arange(len(kept), device=pool.device), kept.byte().argmax())
    target = slots[rows]
    pool[target] = torch.where(kept.any(), states[rows].to(pool.dtype), pool[target])
