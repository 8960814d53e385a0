"""The states of a call's sequences, in the layouts of servers' pools.  Imports torch at first use.

Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ssdprof.operators.late import torch
from ssdprof.record.place import Arguments

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class CallStates:
    """Where a function reads states, and where it leaves them.

    batch, length   rows of tokens and tokens of a row
    cu_seqlens      of the sequences packed in one row
    state           (sequences, ...), or a pool of slots if there are slots
    slots           (sequences) of the pool to read, or (sequences, columns): column accepted - 1
    padding         slots up to this one are padding
    has_initial     (sequences); a sequence without an initial state begins with zeros
    written         slots to write, if they are not those that are read
    table           (sequences, tokens) slots: where the state after each token goes instead
    tables          whether slots with columns are a table also without `accepted`
    buffer, rows    (rows, tokens, ...): where the state after each token goes instead, and the row
                    of each sequence; row i for sequence i without rows
    target          the pool to write, if it is not the one that is read
    kept            False: the call keeps no states
    frozen          True or None: it keeps no states but those in a buffer or a table
    in_place        without slots, `state` becomes the final states; else the function returns them
    v_first         V before K
    step            a call for a few tokens of each sequence, in which padding is usual
    """

    batch: int
    length: int
    cu_seqlens: Tensor | None = None
    state: Tensor | None = None
    slots: Tensor | None = None
    accepted: Tensor | None = None
    padding: int = -1
    has_initial: Tensor | None = None
    written: Tensor | None = None
    table: Tensor | None = None
    tables: bool = False
    buffer: Tensor | None = None
    rows: Tensor | None = None
    target: Tensor | None = None
    kept: bool = True
    frozen: bool | None = False
    in_place: bool = False
    v_first: bool = False
    step: bool = False

    @classmethod
    def of(cls, tokens: Tensor, arguments: Arguments) -> CallStates:
        """The states of a call.

        tokens: (batch, length, ...).  arguments: of the function; names that are no field have no
        effect.
        """
        fields = cls.__dataclass_fields__
        known = {name: value for name, value in arguments.items() if name in fields}
        return cls(batch=tokens.shape[0], length=tokens.shape[1], **known)

    @property
    def sequences(self) -> int:
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def after_each_token(self) -> bool:
        """Whether the state after each token is kept."""
        return self.kept and (self.buffer is not None or self._table is not None)

    @property
    def _table(self) -> Tensor | None:
        """The slots to which the states after each token go: (sequences, tokens).  None if the call
        keeps only final states.
        """
        if self.table is not None or self.slots is None or self.slots.ndim == 1:
            return self.table
        return self.slots if self.accepted is not None or self.tables else None

    @cached_property
    def slots_read(self) -> Tensor | None:
        """The slot with which each sequence begins: (sequences); -1: padding."""
        if self.slots is None:
            return None
        slots = self.slots[: self.sequences].long()
        if slots.ndim == 2:
            column = torch.zeros_like(slots[:, 0])
            if self.accepted is not None:
                column = self.accepted[: self.sequences].long() - 1
            slots = slots.gather(1, column.clamp(min=0)[:, None])[:, 0]
        return torch.where(slots <= self.padding, -1, slots)

    @property
    def gathered(self) -> bool:
        """Whether `initial` returns a copy."""
        return self.slots is not None or self.has_initial is not None

    def initial(self) -> Tensor | None:
        """The states with which the sequences begin."""
        states = self.state
        if states is None:
            return None
        has_initial = self.has_initial
        slots = self.slots_read
        if slots is not None:
            states = states[slots.clamp(min=0)]
            live = slots >= 0
            has_initial = live if has_initial is None else has_initial & live
        if has_initial is not None:
            states = _where(has_initial, states)
        return self._turned(states)

    def final(self, returned: Tensor | None) -> Tensor | None:
        """The states after the call, 0 where none was kept.  returned: by the function, if it
        returns states.
        """
        pool = self.state if self.target is None else self.target
        if self.after_each_token:
            assert pool is not None
            return self._turned(self._after_tokens(pool))
        if not self.kept or self.frozen is not False:
            return None
        slots = self.slots_read
        if slots is None:
            states = pool if self.in_place else returned
            return None if states is None else self._turned(states)
        assert pool is not None
        written = slots if self.written is None else self.written[: self.sequences].long()
        return self._turned(_where(slots >= 0, pool[written.clamp(min=0)]))

    def _after_tokens(self, pool: Tensor) -> Tensor:
        """The state after each token: (tokens, ...)."""
        sequence, step = self._tokens
        if self.buffer is None:
            table = self._table
            assert table is not None
            slots = table.long()[sequence, step.clamp(max=table.shape[1] - 1)]
            return _where(self._live & (slots > self.padding), pool[slots.clamp(min=0)])
        row = sequence if self.rows is None else self.rows.long()[sequence].clamp(min=0)
        return _where(self._live, self.buffer[row, step.clamp(max=self.buffer.shape[1] - 1)])

    def live(self, out: Tensor) -> Tensor:
        """out (batch, length, ...) of a step, with 0 for padding, which servers do not write."""
        if self.slots is None or not self.step:
            return out
        return _where(self._live.view(self.batch, self.length), out)

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """The sequence of each token, and its place in it."""
        assert self.state is not None
        position = torch.arange(self.batch * self.length, device=self.state.device)
        if self.cu_seqlens is None:
            return position // self.length, position % self.length
        bounds = self.cu_seqlens.long()
        sequence = torch.searchsorted(bounds[1:], position, right=True)
        sequence = sequence.clamp(max=self.sequences - 1)
        return sequence, position - bounds[sequence]

    @cached_property
    def _live(self) -> Tensor:
        """Tokens that belong to a sequence with a slot."""
        sequence, step = self._tokens
        live = torch.ones_like(step, dtype=torch.bool)
        if self.cu_seqlens is not None:
            live = step < self.cu_seqlens.diff()[sequence]
        slots = self.slots_read
        return live if slots is None else live & (slots >= 0)[sequence]

    def _turned(self, states: Tensor) -> Tensor:
        return states.mT if self.v_first else states


def tensors_of(returned: object) -> list[Tensor]:
    """What a function returned, one by one."""
    if isinstance(returned, tuple | list):
        return list(returned)
    return [returned] if isinstance(returned, torch.Tensor) else []


def _where(kept: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with 0 where its first dimensions are not kept, whatever it holds there."""
    return torch.where(kept.view(*kept.shape, *(1 for _ in tensor.shape[kept.ndim :])), tensor, 0)
