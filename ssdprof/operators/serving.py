"""Calls on a server's pool of states, by implementations that take none, and the reverse.

gathered    an implementation that returns new states, called on a pool
in_pool     calls that return new states, made in place on a pool
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ssdprof import kernels
from ssdprof.kernels.registry import Implementation, Plan, keeps_every_state
from ssdprof.operators.late import lazy, packages, torch

if TYPE_CHECKING:
    from ssdprof.kernels import pools
    from ssdprof.kernels.inputs import Inputs
    from ssdprof.kernels.precision import Precision
else:
    pools = lazy("ssdprof.kernels.pools")

# (inputs, precision) -> out, and the pool itself: `Implementation.in_place`
PoolRun = Callable[[Any, "Precision"], "kernels.Output"]
GATHERED = ("fused",)  # what servers call on gathered states


def pool_run(implementation: Implementation) -> PoolRun | None:
    """How an implementation is called on a pool; None if it is not."""
    if implementation.in_place is not None:
        return implementation.in_place
    if implementation.name in GATHERED and implementation.kind == "bundled":
        return partial(_step_or_gathered, implementation)
    return None


def _step_or_gathered(
    implementation: Implementation, inputs: Inputs, precision: Precision
) -> kernels.Output:
    """The call in place of `recurrent` where the implementation runs that kernel, which it does for
    sequences of few tokens, or keeps no state after every token; else a call on gathered states.
    """
    every_state = inputs.write_indices is not None and inputs.write_indices.ndim == 2
    variant = implementation.plan(_without_slots(inputs), precision).variant
    if every_state or variant == "recurrent":
        recurrent = kernels.get(inputs.operator, "recurrent").in_place
        assert recurrent is not None
        return recurrent(inputs, precision)
    return gathered(implementation, inputs, precision)


def _without_slots(inputs: Inputs, states: torch.Tensor | None = None) -> Inputs:
    """The call that begins with these states, one for each sequence, or with zero."""
    indices = {"state_indices": None, "write_indices": None, "accepted": None}
    return replace(inputs, **{inputs.LINEAR[1]: states}, **indices, state_every=0)


def gathered(
    implementation: Implementation, inputs: Inputs, precision: Precision
) -> kernels.Output:
    """Copies of the slots that are read, a call that begins with them, and its states to their
    slots.  The host reads no index.  UnsupportedError if slots are written after every token, and
    the implementation keeps no such states.
    """
    pool = getattr(inputs, inputs.LINEAR[1])
    slots = inputs.slots_read
    assert slots is not None
    slots = slots.long()
    known = (slots >= 0)[:, None, None, None]
    states = torch.where(known, pool[slots.clamp(min=0)].float(), 0.0)
    written = slots if inputs.write_indices is None else inputs.write_indices.long()
    every = written.ndim == 2
    plain = replace(_without_slots(inputs, states), state_every=int(every))
    out, new = implementation.run(plain, precision)
    positions, exist = pools.token_positions(inputs, written.shape[1] if every else 1)
    rows = positions if every else torch.arange(len(slots), device=pool.device)
    targets = written.flatten()
    _scatter(pool, targets, exist.flatten() & (targets >= 0), new[rows.flatten()])
    return kernels.Output(out, pool)


def in_pool(implementation: Implementation) -> Implementation:
    """An implementation that is called on a pool, with calls in place on copies of the inputs'
    pool, or of their states.  A copy is made once for inputs and a precision, as new states go to
    slots behind those that are read.  What is not called on a pool stays as it is.
    """
    run = pool_run(implementation)
    if run is None:
        return implementation

    @packages.once
    def calls(_inputs: Inputs) -> dict[Precision, tuple[Inputs, slice]]:
        return {}

    def prepare(inputs: Inputs) -> tuple[Inputs, slice]:
        """The call on a pool of its own, and the slots of its final states."""
        states = getattr(inputs, inputs.LINEAR[1])
        # a user's kernel gets the layout of the documents, ours that of a server
        served = implementation.kind == "bundled" and inputs.state_indices is not None
        turned = served and not states.is_contiguous()
        in_place, fresh, _, kept = pools.own_pool(inputs, turned=turned, apart=True)
        pool = fresh().mT if turned else fresh()
        if inputs.cu_seqlens is not None and inputs.initial is not None and not inputs.state_every:
            # a sequence without tokens writes no slot
            empty = inputs.cu_seqlens.diff() == 0
            pool[kept][empty] = inputs.initial[empty].float()
        return replace(in_place, **{inputs.LINEAR[1]: pool}), kept

    def call(inputs: Inputs, precision: Precision) -> kernels.Output:
        prepared = calls(inputs)
        if precision not in prepared:
            prepared[precision] = prepare(inputs)
        in_place, kept = prepared[precision]
        out, pool = run(in_place, precision)
        return kernels.Output(out, pool[kept])

    def copies(inputs: Inputs) -> list[torch.Tensor]:
        return [getattr(in_place, inputs.LINEAR[1]) for in_place, _ in calls(inputs).values()]

    def plan(inputs: Inputs, precision: Precision) -> Plan:
        plan = implementation.plan(inputs.after(inputs.initial), precision)
        return replace(plan, reason="; ".join(filter(None, ("in place on a pool", plan.reason))))

    return replace(
        implementation, run=call, plan=plan, keeps=keeps_every_state, pools=True, copies=copies
    )


def _scatter(
    pool: torch.Tensor, slots: torch.Tensor, kept: torch.Tensor, states: torch.Tensor
) -> None:
    """Write the states that are kept, each to its slot.  The host does not know which: in place of
    each other one, the first that is kept is written again, or, if none is, what its slot holds.
    """
    rows = torch.where(kept, torch.arange(len(kept), device=pool.device), kept.byte().argmax())
    target = slots[rows]
    pool[target] = torch.where(kept.any(), states[rows].to(pool.dtype), pool[target])
