"""Calls on a pool of states, as servers make them: code that the adapters of libraries' kernels and
`operators/serving.py` share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ssdprof.kernels.adapters import Prepared, bounds_of, prepared_kernel
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError


@dataclass(frozen=True)
class Slots:
    """The slots of a pool that a call in place uses, as tensors on the device.  -1 stands for no
    slot: the sequence begins with zeros, or the state is not written.

    read (sequences): the slot with which each sequence begins.
    written (sequences, tokens): the slot of the state after each token.  An empty sequence writes
        none.
    final (sequences): the slot of the final state, if only that is written; otherwise None.
    overwrites: whether the call has no write_indices, so that final states go to the slots that
        were read.
    buffer: the slots of the states after each token of each sequence, in order, for a call with
        `state_every` on a batch, whose pool `own_pool` has made; None for all other calls.
    """

    read: torch.Tensor
    written: torch.Tensor
    final: torch.Tensor | None
    overwrites: bool
    buffer: slice | None = None

    @classmethod
    def of(cls, inputs: Inputs, buffer: slice | None = None) -> Slots:
        """The slots of a call in place, whose inputs have state_indices."""
        read, written = inputs.slots_read, inputs.write_indices
        assert read is not None
        overwrites = written is None
        final = read if written is None else written
        if final.ndim == 2:  # write_indices, because `slots_read` has one dimension
            return cls(read, final, None, overwrites, buffer)
        # a table in which only the last token of each sequence has a slot
        _, exist = token_positions(inputs, inputs.length)
        last = exist.sum(1, keepdim=True) - 1
        columns = torch.arange(inputs.length, device=read.device)
        table = torch.where(columns == last, final[:, None], -1)
        return cls(read, table, final, overwrites, buffer)

    def refuse_tables(self, name: str) -> None:
        """Raises UnsupportedError for write_indices, also if they name the slots that were read,
        unless the states go to `buffer`.
        """
        if not self.overwrites and self.buffer is None:
            raise UnsupportedError(f"{name}: states go back to the slots that were read")

    def verification(self, inputs: Inputs, pool: torch.Tensor) -> dict[str, Any]:
        """SGLang's arguments for a call that writes the state after each token to `buffer`, and
        does not update the slots that it reads; an empty dict for another call.
        """
        if self.buffer is None:
            return {}
        sequences, length = inputs.sequences, inputs.length
        buffer = pool[self.buffer].view(sequences, length, *pool.shape[1:])
        return {
            "disable_state_update": True,
            "intermediate_states_buffer": buffer,
            "intermediate_state_indices": torch.arange(sequences, device=pool.device).int(),
            "cache_steps": length,
        }

    def refuse_new(self, name: str) -> None:
        """Raises UnsupportedError if a sequence that writes a state begins with zeros.  While a
        CUDA graph is captured, nothing is checked.
        """
        if self._any((self.read < 0)[:, None] & (self.written >= 0)):
            raise UnsupportedError(f"{name}: servers zero a new sequence's slot before the call")

    def refuse_holes(self, name: str) -> None:
        """Raises UnsupportedError if a sequence of a batch that reads a slot does not write the
        state after each token.  While a CUDA graph is captured, nothing is checked.
        """
        if self._any((self.read >= 0)[:, None] & (self.written < 0)):
            raise UnsupportedError(f"{name}: a slot for the state after each token")

    def _any(self, conditions: torch.Tensor) -> bool:
        """Whether any of the conditions is true; False while a CUDA graph is captured, because the
        host would wait for the answer.
        """
        capturing = self.read.is_cuda and torch.cuda.is_current_stream_capturing()
        return not capturing and bool(conditions.any())


def token_positions(inputs: Inputs, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors (sequences, longest): the position of each sequence's n-th token among the tokens
    of all sequences, and whether this token exists.  The position of others is 0.
    """
    bounds = bounds_of(inputs).long()[:, None]
    positions = bounds[:-1] + torch.arange(longest, device=inputs.device)
    exist = positions < bounds[1:]
    return torch.where(exist, positions, 0), exist


# The call in place, as inputs whose pool has the initial states alone;
# () -> a new pool, with these states, and with slots behind them for the new ones, unless those
# overwrite them;
# the initial states, as they are in the memory of that pool;
# the slots of that pool to which the call writes its states
OwnPool = tuple[Inputs, Callable[[], torch.Tensor], torch.Tensor, slice]


def own_pool(inputs: Inputs, *, turned: bool = False, apart: bool = False) -> OwnPool:
    """Turn a call without a pool, or with one that must not change, into a call in place on a pool
    that is made for it, in fp32.  The memory of that pool has one more slot before the first
    (`with_slot_before`).  `state_every` must be 0 or 1.

    turned: whether the last two axes are exchanged in the pool's memory.
    apart: whether final states go to slots behind those that are read.  If the call has a pool, all
        slots of that pool are copied then.
    """
    states, device, count = inputs.initial, inputs.device, inputs.sequences
    slots = torch.arange(count, dtype=torch.int32, device=device)
    if apart and inputs.state_indices is not None:
        states = getattr(inputs, inputs.STATES)
        slots = inputs.state_indices
    if states is None:
        states = torch.zeros(inputs.states_shape, device=device)
    states = states.float()
    initial_slots = len(states)
    more_slots = 0  # behind the initial ones
    written = None  # final states go to the slots that were read
    if inputs.state_every:
        more_slots = inputs.final_shape[0]
        positions, exist = token_positions(inputs, inputs.length)
        written = torch.where(exist, positions + initial_slots, -1).int()
    elif apart:
        more_slots = count
        written = initial_slots + torch.arange(count, dtype=torch.int32, device=device)
    call = replace(
        inputs, **{inputs.STATES: states}, state_indices=slots, write_indices=written, state_every=0
    )
    stored = states.mT.contiguous() if turned else states

    def new_pool() -> torch.Tensor:
        """A pool with the initial states.  The slots of the new states have any numbers."""
        pool = stored.new_empty(1 + initial_slots + more_slots, *stored.shape[1:])[1:]
        pool[:initial_slots] = stored
        return pool

    new_slots = slice(initial_slots if more_slots else 0, initial_slots + more_slots)
    return call, new_pool, stored, new_slots


# A call with everything except its pool: (pool) -> out; and the values, as the kernel reads them
Bound = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]


def pool_kernel(
    operator: str,
    name: str,
    unsupported: Callable[[Any, Precision], str],
    bind: Callable[[Any, Slots], Bound],
    plan: Plan,
    *,
    refused_values: Callable[[Any], str] = lambda _inputs: "",
    turned: bool = False,
    keeps: bool = True,
    apart: bool = False,
) -> Implementation:
    """A library's kernel that updates a pool in place, as an implementation.

    unsupported: (inputs, precision) -> why the kernel does not support them; "" if it does.
    bind: (inputs, slots) -> the bound call.
    refused_values: (inputs) -> why the kernel does not support their values; "" if it does.  Calls
        in place are not refused for values, because padding may have any.
    turned: whether the last two axes of its pools are exchanged in memory.
    keeps: whether it can write the state after every token.
    apart: whether it can always write states to other slots than those that it reads, so that a
        call needs no new copy of the states.
    """

    def refused(inputs: Inputs, precision: Precision) -> str:
        """Why calls that are not in place do not support the inputs; "" if they do."""
        return unsupported(inputs, precision) or refused_values(inputs)

    def prepare(inputs: Inputs) -> Prepared:
        """Bind a call on a pool that is made for it.  Unless the kernel writes to other slots than
        it reads, each call begins with a new copy of the pool.
        """
        call_in_place, new_pool, stored, new_slots = own_pool(inputs, turned=turned, apart=apart)
        buffer = new_slots if inputs.state_every and inputs.cu_seqlens is None else None
        run, values = bind(call_in_place, Slots.of(call_in_place, buffer))
        first_pool = new_pool()

        def call() -> Output:
            """Run the call in place.  The states that it returns are a view of its pool, which with
            `apart` the next call overwrites.
            """
            pool = first_pool if apart else new_pool()
            out = run(pool)
            states = pool[new_slots]
            return Output(out, states.mT if turned else states)

        if apart:  # every call reads the states in this pool
            stored = first_pool[: len(stored)]
        return call, (values, stored)

    def in_place(inputs: Inputs, precision: Precision) -> Output:
        """`Implementation.in_place`: on the caller's pool, whatever the values are."""
        reason = unsupported(inputs, precision)
        if reason:
            raise UnsupportedError(f"{name}: {reason}")
        pool: torch.Tensor = getattr(inputs, inputs.STATES)
        stored = pool.mT if turned else pool
        slots = Slots.of(inputs)
        if turned and (stored.stride(-1) != 1 or stored.stride(-2) != stored.shape[-1]):
            raise UnsupportedError(f"{name}: slots of a pool are contiguous, V before K")
        slots.refuse_new(name)
        with torch.cuda.device(pool.get_device()), torch.no_grad():
            run, _ = bind(inputs, slots)
            return Output(run(stored), pool)

    return replace(
        prepared_kernel(operator, name, refused, prepare, plan),
        keeps=lambda inputs: keeps and inputs.state_every == 1,
        pools=True,
        in_place=in_place,
        turned_pools=turned,
    )


def with_slot_before(pool: torch.Tensor, name: str) -> torch.Tensor:
    """The pool with one more slot before its first, which some libraries use for padding, as a
    view.  name: of the implementation.  Raises UnsupportedError if the pool's memory does not have
    this slot.
    """
    step = pool.stride(0)
    offset = pool.storage_offset()
    if offset < step:
        reason = "slot 0 is padding: the pool must be a view of one with one more slot in front"
        raise UnsupportedError(f"{name}: {reason}")
    return pool.as_strided((len(pool) + 1, *pool.shape[1:]), pool.stride(), int(offset - step))
