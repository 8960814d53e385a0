"""Adapts implementations to a server's pool of states, in both directions.

gathered    calls an implementation that takes and returns states on a pool
in_pool     gives an implementation that works in place on a pool the interface of the others
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

# (inputs, precision) -> out, and the pool itself: the type of `Implementation.in_place`
PoolRun = Callable[[Any, "Precision"], "kernels.Output"]
GATHERED = ("fused",)  # bundled implementations that servers would call on gathered states


def pool_run(implementation: Implementation) -> PoolRun | None:
    """The function that calls an implementation on a pool; None if it is not called on one."""
    if implementation.in_place is not None:
        return implementation.in_place
    if implementation.name in GATHERED and implementation.kind == "bundled":
        return partial(_step_or_gathered, implementation)
    return None


def _step_or_gathered(
    implementation: Implementation, inputs: Inputs, precision: Precision
) -> kernels.Output:
    """Call an implementation on a pool: `recurrent` in place if the implementation runs that kernel
    on sequences as short as these, or if the call writes a state after every token, which the
    implementation does not keep; otherwise the implementation on gathered states.
    """
    every_state = inputs.write_indices is not None and inputs.write_indices.ndim == 2
    # planned only if need be: servers make this call for each token
    if every_state or implementation.plan(inputs.after(None), precision).variant == "recurrent":
        recurrent = kernels.get(inputs.operator, "recurrent").in_place
        assert recurrent is not None
        return recurrent(inputs, precision)
    return gathered(implementation, inputs, precision)


def gathered(
    implementation: Implementation, inputs: Inputs, precision: Precision
) -> kernels.Output:
    """Run an implementation that takes no pool on copies of the slots that the call reads, and
    write its new states to the slots that the call writes.  The host reads no index.

    Raises UnsupportedError if the call writes a state after every token and the implementation does
    not keep these.
    """
    pool = getattr(inputs, inputs.STATES)
    slots = inputs.slots_read
    assert slots is not None
    slots = slots.long()
    has_slot = (slots >= 0)[:, None, None, None]  # the others begin from zero
    states = torch.where(has_slot, pool[slots.clamp(min=0)].float(), 0.0)
    written = slots if inputs.write_indices is None else inputs.write_indices.long()
    every_state = written.ndim == 2  # (sequences, tokens): a slot for the state after each token
    plain = replace(inputs.after(states), state_every=int(every_state))
    out, new_states = implementation.run(plain, precision)
    positions, exist = pools.token_positions(inputs, written.shape[1] if every_state else 1)
    rows = positions if every_state else torch.arange(len(slots), device=pool.device)
    targets = written.flatten()
    _scatter(pool, targets, exist.flatten() & (targets >= 0), new_states[rows.flatten()])
    return kernels.Output(out, pool)


def in_pool(implementation: Implementation) -> Implementation:
    """The implementation with calls in place on a pool, behind an interface that takes states and
    returns new ones.  Without a `pool_run` it stays as it is.

    The pool is a copy of the inputs' pool, or has copies of their states.  It is made once for
    inputs and a precision, because new states go to slots behind those that are read.
    """
    run = pool_run(implementation)
    if run is None:
        return implementation

    @packages.once
    def prepared_calls(_inputs: Inputs) -> dict[Precision, tuple[Inputs, slice]]:
        """The calls prepared for these inputs so far, by precision.  `once` keeps the dict."""
        return {}

    def prepare(inputs: Inputs) -> tuple[Inputs, slice]:
        """Inputs with a new pool, and the slots to which their final states go."""
        states = getattr(inputs, inputs.STATES)
        # a user's kernel gets the layout of the documents, a bundled one that of the server's pool
        from_server = implementation.kind == "bundled" and inputs.state_indices is not None
        turned = from_server and not states.is_contiguous()
        in_place, new_pool, _, final_slots = pools.own_pool(inputs, turned=turned, apart=True)
        pool = new_pool().mT if turned else new_pool()
        if inputs.cu_seqlens is not None and inputs.initial is not None and not inputs.state_every:
            # a sequence without tokens writes no slot
            empty = inputs.cu_seqlens.diff() == 0
            pool[final_slots][empty] = inputs.initial[empty].float()
        return replace(in_place, **{inputs.STATES: pool}), final_slots

    def call(inputs: Inputs, precision: Precision) -> kernels.Output:
        calls = prepared_calls(inputs)
        if precision not in calls:
            calls[precision] = prepare(inputs)
        in_place, final_slots = calls[precision]
        out, pool = run(in_place, precision)
        return kernels.Output(out, pool[final_slots])

    def copies(inputs: Inputs) -> list[torch.Tensor]:
        calls = prepared_calls(inputs)
        return [getattr(in_place, inputs.STATES) for in_place, _ in calls.values()]

    def plan(inputs: Inputs, precision: Precision) -> Plan:
        plan = implementation.plan(inputs.after(inputs.initial), precision)
        reason = "in place on a pool"
        if plan.reason:
            reason += f"; {plan.reason}"
        return replace(plan, reason=reason)

    return replace(
        implementation, run=call, plan=plan, keeps=keeps_every_state, pools=True, copies=copies
    )


def _scatter(
    pool: torch.Tensor, slots: torch.Tensor, is_written: torch.Tensor, states: torch.Tensor
) -> None:
    """Write each of the states (n, ...) for which `is_written` (n) to its slot (n).

    The host does not read the mask, so n states are written: each state without a slot is replaced
    by the first that has one, or, if none has, by what its target already holds.
    """
    numbers = torch.arange(len(is_written), device=pool.device)
    rows = torch.where(is_written, numbers, is_written.byte().argmax())
    target = slots[rows]
    pool[target] = torch.where(is_written.any(), states[rows].to(pool.dtype), pool[target])
