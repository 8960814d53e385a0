"""Calls on a pool of states, as servers make them: what the adapters of libraries' kernels share
with `operators/serving.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ssdprof.kernels.adapters import Prepared, prepared_kernel
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError


@dataclass(frozen=True)
class Slots:
    """Where the states of a call in place are, on the device; -1: nowhere.

    read (sequences): the slot that each sequence begins with.  written (sequences, longest): that
    of the state after each token.  final (sequences): that of the only state that is kept; None if
    others are.  overwrites: whether it is the slot that was read.  buffer: the slots of all states
    in order, of a call on a pool of its own.
    """

    read: torch.Tensor
    written: torch.Tensor
    final: torch.Tensor | None
    overwrites: bool
    buffer: slice | None = None

    @classmethod
    def of(cls, inputs: Inputs, buffer: slice | None = None) -> Slots:
        """The slots of a call: of tables with a column a token, the one that holds the accepted
        state is read.
        """
        read, written = inputs.slots_read, inputs.write_indices
        assert read is not None
        overwrites = written is None
        if written is not None and written.ndim == 2:
            return cls(read, written, None, overwrites, buffer)
        final = read if written is None else written
        last = token_positions(inputs, inputs.length)[1].sum(1, keepdim=True) - 1
        columns = torch.arange(inputs.length, device=read.device)
        table = torch.where(columns == last, final[:, None], -1)
        return cls(read, table, final, overwrites, buffer)

    def refuse_tables(self, name: str) -> None:
        """UnsupportedError for states that go to other slots than those that were read."""
        if not self.overwrites and self.buffer is None:
            raise UnsupportedError(f"{name}: states go back to the slots that were read")

    def verification(self, inputs: Inputs, pool: torch.Tensor) -> dict[str, Any]:
        """SGLang's arguments for a call that leaves the pool alone and writes all states to a
        buffer; empty for another call.
        """
        if self.buffer is None:
            return {}
        rows = inputs.sequences, inputs.length
        return {
            "disable_state_update": True,
            "intermediate_states_buffer": pool[self.buffer].view(*rows, *pool.shape[1:]),
            "intermediate_state_indices": torch.arange(rows[0], device=pool.device).int(),
            "cache_steps": rows[1],
        }

    def refuse_new(self, name: str) -> None:
        """UnsupportedError for a sequence that begins with zeros, where the host may wait."""
        if self._any((self.read < 0)[:, None] & (self.written >= 0)):
            raise UnsupportedError(f"{name}: servers zero a new sequence's slot before the call")

    def refuse_holes(self, name: str) -> None:
        """UnsupportedError for a state that no slot keeps, where the host may wait."""
        if self._any((self.read >= 0)[:, None] & (self.written < 0)):
            raise UnsupportedError(f"{name}: a slot for the state after each token")

    def _any(self, rows: torch.Tensor) -> bool:
        """False while a CUDA graph is captured."""
        capturing = self.read.is_cuda and torch.cuda.is_current_stream_capturing()
        return not capturing and bool(rows.any())


def token_positions(inputs: Inputs, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequences, longest): the position of each token among those of all sequences, 0 for what
    does not exist, and whether it exists.
    """
    steps = torch.arange(longest, device=inputs.device)
    length = inputs.length
    if inputs.cu_seqlens is None:
        starts = torch.arange(inputs.sequences, device=inputs.device) * length
        stops = starts + length
    else:
        starts = inputs.cu_seqlens[:-1].long()
        stops = inputs.cu_seqlens[1:].long()
    positions = starts[:, None] + steps
    exist = positions < stops[:, None]
    return torch.where(exist, positions, 0), exist


# the call on a pool of its own; what makes the pool; what is in it first; the slots that are wanted
OwnPool = tuple[Inputs, Callable[[], torch.Tensor], torch.Tensor, slice]


def own_pool(inputs: Inputs, *, turned: bool = False, apart: bool = False) -> OwnPool:
    """A call without a pool, or with one that it must not change, as a call on a pool of its own,
    which has memory of one more slot before its first.

    turned: the last two axes change places in the pool's memory.  apart: final states go to slots
    behind those that are read, which are the whole pool of a call with one.
    """
    states, device, count = inputs.initial, inputs.device, inputs.sequences
    slots = torch.arange(count, dtype=torch.int32, device=device)
    if apart and inputs.state_indices is not None:
        states = getattr(inputs, inputs.LINEAR[1])
        slots = inputs.state_indices
    if states is None:
        states = torch.zeros(inputs.states_shape, device=device)
    states = states.float()
    first = len(states)
    room = 0
    written = None
    if inputs.state_every:
        room = inputs.final_shape[0]
        positions, exist = token_positions(inputs, inputs.length)
        written = torch.where(exist, positions + first, -1).int()
    elif apart:
        room = count
        written = first + torch.arange(count, dtype=torch.int32, device=device)
    call = replace(
        inputs,
        **{inputs.LINEAR[1]: states},
        state_indices=slots,
        write_indices=written,
        state_every=0,
    )
    stored = states.mT.contiguous() if turned else states

    def fresh() -> torch.Tensor:
        pool = stored.new_empty(1 + first + room, *stored.shape[1:])[1:]
        pool[:first] = stored
        return pool

    return call, fresh, stored, slice(first if room else 0, first + room)


# (pool) -> out; and the values as the kernel reads them
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
    """A library's kernel that updates a pool in place.

    unsupported, refused_values: why it does not take inputs; "" if it does.  A call in place is not
    refused for its values, because padding may have any.
    bind: prepares everything but the pool.  turned: the last two axes of its pools change places.
    keeps: whether it can keep the state after every token.  apart: whether it always can write
    states to other slots than those that it reads, so that a call needs no copy of the states.
    """

    def refused(inputs: Inputs, precision: Precision) -> str:
        return unsupported(inputs, precision) or refused_values(inputs)

    def prepare(inputs: Inputs) -> Prepared:
        """Bind a call on a pool of its own.  Unless the kernel writes to other slots than it reads,
        each call begins with a new copy of the pool.
        """
        own_call, fresh, stored, kept = own_pool(inputs, turned=turned, apart=apart)
        buffer = kept if inputs.state_every and inputs.cu_seqlens is None else None
        run, values = bind(own_call, Slots.of(own_call, buffer))
        first = fresh()

        def call() -> Output:
            pool = first if apart else fresh()
            out = run(pool)
            states = pool[kept]
            return Output(out, states.mT if turned else states)

        if apart:  # the call itself writes into this pool
            stored = first[: len(stored)]
        return call, (values, stored)

    def in_place(inputs: Inputs, precision: Precision) -> Output:
        if reason := unsupported(inputs, precision):
            raise UnsupportedError(f"{name}: {reason}")
        pool: torch.Tensor = getattr(inputs, inputs.LINEAR[1])
        stored = pool.mT if turned else pool
        slots = Slots.of(inputs)
        if turned and (stored.stride(-1) != 1 or stored.stride(-2) != stored.shape[-1]):
            raise UnsupportedError(f"{name}: slots of a pool are contiguous, V before K")
        slots.refuse_new(name)
        with torch.cuda.device(pool.get_device()), torch.no_grad():
            return Output(bind(inputs, slots)[0](stored), pool)

    return replace(
        prepared_kernel(operator, name, refused, prepare, plan),
        keeps=lambda inputs: keeps and inputs.state_every == 1,
        pools=True,
        in_place=in_place,
        turned_pools=turned,
    )


def with_slot_before(pool: torch.Tensor, name: str) -> torch.Tensor:
    """The pool from one slot before its first, which libraries take for padding."""
    step = pool.stride(0)
    offset = pool.storage_offset()
    if offset < step:
        why = "slot 0 is padding, so that the pool is a view of one with a slot more in front"
        raise UnsupportedError(f"{name}: {why}")
    return pool.as_strided((len(pool) + 1, *pool.shape[1:]), pool.stride(), int(offset - step))
