"""Adapts implementations to a server's pool of states, in both directions.

gathered    calls an implementation that takes and returns states, with states of a pool
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
    """The function that calls an implementation on a pool: its own, or for those in `GATHERED` one
    that gathers states; None for other implementations.
    """
    if implementation.in_place is not None:
        return implementation.in_place
    if implementation.name in GATHERED and implementation.kind == "bundled":
        return partial(_step_or_gathered, implementation)
    return None


def _step_or_gathered(
    implementation: Implementation, inputs: Inputs, precision: Precision
) -> kernels.Output:
    """Call an implementation on a pool: `recurrent` in place if the call writes a state after every
    token, because the implementation does not return these, or if the implementation itself would
    take the kernel of `recurrent`, as for short sequences; otherwise the implementation on gathered
    states.
    """
    every_state = inputs.write_indices is not None and inputs.write_indices.ndim == 2
    # the plan comes last, because it takes time, and servers make this call for each token
    if every_state or implementation.plan(inputs.after(None), precision).variant == "recurrent":
        recurrent = kernels.get(inputs.operator, "recurrent").in_place
        assert recurrent is not None
        return recurrent(inputs, precision)
    return gathered(implementation, inputs, precision)


def gathered(
    implementation: Implementation, inputs: Inputs, precision: Precision
) -> kernels.Output:
    """Run an implementation that takes no pool on copies of the states that the call reads, and
    write its new states to the slots of the call, which a sequence without tokens leaves as they
    are.  Returns out, and the pool.  The host reads no index.

    Raises UnsupportedError for what the implementation refuses, such as a call that writes a state
    after every token if it does not keep these.
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
    if every_state:
        rows, has_state = pools.token_positions(inputs, written.shape[1])
    else:
        _, has_state = pools.token_positions(inputs, 1)  # whether the sequence has a token
        rows = torch.arange(len(slots), device=pool.device)
    targets = written.flatten()
    _scatter(pool, targets, has_state.flatten() & (targets >= 0), new_states[rows.flatten()])
    return kernels.Output(out, pool)


def in_pool(implementation: Implementation) -> Implementation:
    """The implementation with calls in place on a pool, behind an interface that takes states and
    returns new ones.  Without a `pool_run` it stays as it is.

    The pool is in fp32.  It has copies of the slots of the inputs' pool, or of their states, which
    are zeros if they have none.  It is made once for inputs and a precision: new states go to slots
    behind those that are read, so that further calls find the same states.
    """
    run = pool_run(implementation)
    if run is None:
        return implementation

    @packages.once
    def prepared_calls(_inputs: Inputs) -> dict[Precision, tuple[Inputs, slice]]:
        """The calls prepared for these inputs so far, by precision.  `once` keeps the dict."""
        return {}

    def prepare(inputs: Inputs) -> tuple[Inputs, slice]:
        """Inputs with a new pool, and the slots to which their new states go."""
        states = getattr(inputs, inputs.STATES)
        # a user's kernel gets the layout of the documents, a bundled one that of the server's pool
        from_server = implementation.kind == "bundled" and inputs.state_indices is not None
        turned = from_server and not states.is_contiguous()
        in_place, new_pool, _, new_slots = pools.own_pool(inputs, turned=turned, apart=True)
        pool = new_pool().mT if turned else new_pool()
        if inputs.cu_seqlens is not None and not inputs.state_every:
            # a sequence without tokens writes no slot, and its final state is its initial one
            empty = inputs.cu_seqlens.diff() == 0
            initial = in_place.initial  # zeros if the inputs have none
            assert initial is not None
            pool[new_slots][empty] = initial[empty]
        return replace(in_place, **{inputs.STATES: pool}), new_slots

    def call(inputs: Inputs, precision: Precision) -> kernels.Output:
        calls = prepared_calls(inputs)
        if precision not in calls:
            calls[precision] = prepare(inputs)
        in_place, new_slots = calls[precision]
        out, pool = run(in_place, precision)
        return kernels.Output(out, pool[new_slots])

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
    """Write each state (n, ...) to its slot (n), but only where `is_written` (n).

    The host does not read the mask, so n states are written.  In place of a state that is not
    written, the first one that is goes to its slot again.  If none is written, the slots keep what
    they have.
    """
    numbers = torch.arange(len(is_written), device=pool.device)
    rows = torch.where(is_written, numbers, is_written.byte().argmax())
    targets = slots[rows]
    pool[targets] = torch.where(is_written.any(), states[rows].to(pool.dtype), pool[targets])
