"""The states of a call's sequences, in the layouts of servers' pools.  Imports torch at first use.

Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ssdprof.operators.late import torch
from ssdprof.record.signature import Arguments

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class CallStates:
    """Where a function reads states, and where it leaves them.

    batch, length: rows of tokens and tokens of a row.  cu_seqlens: of one row.
    given: what the function was given, by these names; each may be missing:

    state           (sequences, ...), or a pool of slots if there are slots
    slots           (sequences) of the pool to read, or (sequences, columns): column accepted - 1
    padding         slots up to this one are padding; -1 if missing
    has_initial     (sequences); a sequence without an initial state begins with zeros
    written         slots to write, if they are not those that are read
    table           (sequences, tokens) slots: where the state after each token goes instead
    tables          whether slots with columns are a table also without `accepted`
    buffer, rows    (rows, tokens, ...): where the state after each token goes instead, and the row
                    of each sequence; row i for sequence i without rows
    target          the pool to write, if it is not the one that is read
    kept            False: the call keeps no states.  frozen: True or None: it keeps none but
                    those in a buffer or a table
    in_place        without slots, `state` becomes the final states; else the function returns them
    v_first         V before K
    step            a call for a few tokens of each sequence, in which padding is usual
    """

    batch: int
    length: int
    cu_seqlens: Tensor | None
    given: Arguments

    @property
    def sequences(self) -> int:
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def every(self) -> bool:
        """Whether the state after each token is kept."""
        if not self.given.get("kept", True):
            return False
        return self.given.get("buffer") is not None or self._table is not None

    @property
    def _table(self) -> Tensor | None:
        table, slots = self.given.get("table"), self.given.get("slots")
        if table is not None or slots is None or slots.ndim == 1:
            return table
        several = self.given.get("accepted") is not None or self.given.get("tables")
        return slots if several else None

    @cached_property
    def slots(self) -> Tensor | None:
        """(sequences): those that are read; -1: padding."""
        slots = self.given.get("slots")
        if slots is None:
            return None
        slots, accepted = slots[: self.sequences].long(), self.given.get("accepted")
        if slots.ndim == 2:
            column = torch.zeros_like(slots[:, 0])
            if accepted is not None:
                column = accepted[: self.sequences].long() - 1
            slots = slots.gather(1, column.clamp(min=0)[:, None])[:, 0]
        return torch.where(slots <= self.given.get("padding", -1), -1, slots)

    def initial(self) -> Tensor | None:
        """A copy of the states with which the sequences begin."""
        states = self.given.get("state")
        if states is None:
            return None
        known = self.given.get("has_initial")
        if self.slots is None:
            states = states.clone()
        else:
            states = states[self.slots.clamp(min=0)]
            known = self.slots >= 0 if known is None else known & (self.slots >= 0)
        return self._turned(states if known is None else _where(known, states))

    def final(self, returned: Tensor | None) -> Tensor | None:
        """The states after the call, 0 where none was kept.  returned: by the function, if it
        returns states.
        """
        given = self.given
        pool: Tensor = given["state"] if given.get("target") is None else given["target"]
        if self.every:
            return self._turned(self._after_tokens(pool))
        if not given.get("kept", True) or given.get("frozen", False) is not False:
            return None
        if self.slots is None:
            states = pool.clone() if given.get("in_place") else returned
            return None if states is None else self._turned(states)
        written = given.get("written")
        slots = self.slots if written is None else written[: self.sequences].long()
        return self._turned(_where(self.slots >= 0, pool[slots.clamp(min=0)]))

    def _after_tokens(self, pool: Tensor) -> Tensor:
        """(tokens, ...)."""
        sequence, step = self._tokens
        buffer: Tensor | None = self.given.get("buffer")
        if buffer is None:
            table = self._table
            assert table is not None
            slots = table.long()[sequence, step.clamp(max=table.shape[1] - 1)]
            kept = self._live & (slots > self.given.get("padding", -1))
            return _where(kept, pool[slots.clamp(min=0)])
        rows = self.given.get("rows")
        row = sequence if rows is None else rows.long()[sequence].clamp(min=0)
        return _where(self._live, buffer[row, step.clamp(max=buffer.shape[1] - 1)])

    def live(self, out: Tensor) -> Tensor:
        """out (batch, length, ...) of a step, with 0 for padding, which servers do not write."""
        if self.slots is None or not self.given.get("step"):
            return out
        return _where(self._live.view(self.batch, self.length), out)

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """The sequence of each token, and its place in it."""
        state = self.given["state"]
        position = torch.arange(self.batch * self.length, device=state.device)
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
        return live if self.slots is None else live & (self.slots >= 0)[sequence]

    def _turned(self, states: Tensor) -> Tensor:
        return states.mT if self.given.get("v_first") else states


def tensors_of(returned: object) -> list[Tensor]:
    """What a function returned, one by one."""
    if isinstance(returned, tuple | list):
        return list(returned)
    return [returned] if isinstance(returned, torch.Tensor) else []


def _where(kept: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with 0 where its first dimensions are not kept, whatever it holds there."""
    return torch.where(kept.view(*kept.shape, *(1 for _ in tensor.shape[kept.ndim :])), tensor, 0)
