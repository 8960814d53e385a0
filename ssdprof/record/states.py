"""The states of a call's sequences, in the layouts of servers' pools.  Imports torch at first use.

Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ssdprof.operators.late import torch
from ssdprof.record.place import INITIAL_STATES, Arguments

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class CallStates:
    """Where a function reads the states of its sequences, and where it writes them.

    A slot is an index of a pool of states.  A server keeps the states of all its requests in one.

    batch, length: rows of tokens, and tokens of a row.
    cu_seqlens: bounds of the sequences, if they are packed in one row.
    state: (sequences, ...), or a pool (slots, ...) if the call has `slots`.
    slots: (sequences), the slot that each sequence reads; or (sequences, columns), of which the
        sequence reads column `accepted - 1`, or column 0 without `accepted`.
    accepted: (sequences), the tokens that the server accepted in the last verification.
    padding: slots up to this number belong to no sequence.
    has_initial: (sequences) bool.  A sequence without an initial state begins with zeros.
    written_slots: (sequences), the slots to write; None: those that are read.
    written_pool: the pool to write; None: the one that is read.
    token_slots: (sequences, tokens), the slot that receives the state after each token, instead of
        the final state alone.
    slots_are_table: True: `slots` with columns are `token_slots`, too, if there are no others.
        With `accepted` they always are.
    token_buffer: (rows, tokens, ...), memory that receives the state after each token, instead.
    buffer_rows: (sequences), the row of `token_buffer` for each sequence; None: row i for
        sequence i.
    keeps_states: False: the function writes no states, neither final ones nor those after tokens.
    update_disabled: True: the function writes states to `token_buffer` or `token_slots` alone.
        None means the same: it is the default of FlashInfer's verification, which then discards
        the final states, too.
    in_place: without slots, the function writes the final states to `state`.  Otherwise it returns
        them.
    v_first: a state is (V, K) in memory.
    step: the call is for a few tokens of each sequence.  Such calls often have padding.
    """

    batch: int
    length: int
    cu_seqlens: Tensor | None = None
    state: Tensor | None = None
    slots: Tensor | None = None
    accepted: Tensor | None = None
    padding: int = -1
    has_initial: Tensor | None = None
    written_slots: Tensor | None = None
    written_pool: Tensor | None = None
    token_slots: Tensor | None = None
    slots_are_table: bool = False
    token_buffer: Tensor | None = None
    buffer_rows: Tensor | None = None
    keeps_states: bool = True
    update_disabled: bool | None = False
    in_place: bool = False
    v_first: bool = False
    step: bool = False

    @classmethod
    def of(cls, tokens: Tensor, arguments: Arguments) -> CallStates:
        """The states of a call.

        tokens: a tensor (batch, length, ...) of the call's tokens, such as the values: (1, tokens,
            ...) for packed sequences.
        arguments: the function's arguments by our names, of which those are used that are fields.
        """
        fields = cls.__dataclass_fields__
        known = {name: value for name, value in arguments.items() if name in fields}
        return cls(batch=tokens.shape[0], length=tokens.shape[1], **known)

    @property
    def sequences(self) -> int:
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def after_each_token(self) -> bool:
        """Whether the function writes the state after each token."""
        return self.keeps_states and (self.token_buffer is not None or self._table is not None)

    @property
    def _table(self) -> Tensor | None:
        """(sequences, tokens), the slot that receives the state after each token.  None if the
        function writes final states alone.
        """
        if self.token_slots is not None or self.slots is None or self.slots.ndim == 1:
            return self.token_slots
        return self.slots if self.accepted is not None or self.slots_are_table else None

    @cached_property
    def slots_read(self) -> Tensor | None:
        """(sequences), the slot that each sequence reads, -1 for padding.  None without a pool."""
        if self.slots is None:
            return None
        slots = self.slots[: self.sequences].long()
        if slots.ndim == 2:
            if self.accepted is not None:
                column = self.accepted[: self.sequences].long() - 1
                slots = slots.gather(1, column.clamp(min=0)[:, None])
            slots = slots[:, 0]
        return torch.where(slots <= self.padding, -1, slots)

    @property
    def copied(self) -> frozenset[str]:
        """`FunctionCall.copied`: the names of initial states if `initial` returns new memory."""
        if self.slots is None and self.has_initial is None:
            return frozenset()
        return INITIAL_STATES

    def initial(self) -> Tensor | None:
        """(sequences, ...), the states with which the sequences begin, with K before V.  0 for
        padding and for sequences without an initial state.  None if the call has no states.  A view
        of the call's states without slots and `has_initial`, otherwise new memory.
        """
        states = self.state
        if states is None:
            return None
        has_initial = self.has_initial
        slots = self.slots_read
        if slots is not None:
            states = states[slots.clamp(min=0)]
            has_slot = slots >= 0
            has_initial = has_slot if has_initial is None else has_initial & has_slot
        if has_initial is not None:
            states = _zero_unless(has_initial, states)
        return self._k_before_v(states)

    def result(
        self, arguments: Arguments, values: Tensor, returned: object
    ) -> tuple[Tensor, Tensor | None]:
        """`FunctionCall.result` of a call whose output has the shape and dtype of `values`, (batch,
        length, ...).  In a step with slots, the output of padding is 0.
        """
        out, other_tensors = outputs_of(arguments, values, returned)
        if self.slots is not None and self.step:  # servers leave the output of padding undefined
            out = _zero_unless(self._has_slot.view(self.batch, self.length), out)
        return out, self._final(other_tensors)

    def _final(self, returned: list[Tensor]) -> Tensor | None:
        """(sequences, ...), the states after the call, or (tokens, ...) if the function writes them
        after each token, with K before V.  0 for padding.  None if the function writes none.

        returned: the tensors that the function returned besides its output.
        """
        pool = self.state if self.written_pool is None else self.written_pool
        if self.after_each_token:
            assert pool is not None
            return self._k_before_v(self._after_tokens(pool))
        if not self.keeps_states or self.update_disabled is not False:
            return None
        slots = self.slots_read
        if slots is not None:
            assert pool is not None
            written = slots
            if self.written_slots is not None:
                written = self.written_slots[: self.sequences].long()
            return self._k_before_v(_zero_unless(slots >= 0, pool[written.clamp(min=0)]))
        states = pool
        if not self.in_place:
            states = returned[0] if returned else None
        return None if states is None else self._k_before_v(states)

    def _after_tokens(self, pool: Tensor) -> Tensor:
        """(tokens, ...), the state after each token, from `token_buffer` or from the pool.  0 for
        padding, and for tokens whose state goes to no slot.
        """
        sequence, position = self._tokens
        if self.token_buffer is not None:
            column = position.clamp(max=self.token_buffer.shape[1] - 1)
            row = sequence
            if self.buffer_rows is not None:
                row = self.buffer_rows.long()[sequence].clamp(min=0)
            return _zero_unless(self._has_slot, self.token_buffer[row, column])
        table = self._table
        assert table is not None
        slots = table.long()[sequence, position.clamp(max=table.shape[1] - 1)]
        is_written = self._has_slot & (slots > self.padding)
        return _zero_unless(is_written, pool[slots.clamp(min=0)])

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """(tokens) each: the sequence of a token, and the token's position in it.  For tokens
        behind the last sequence, the position is beyond the end of that sequence.
        """
        assert self.state is not None
        index = torch.arange(self.batch * self.length, device=self.state.device)
        if self.cu_seqlens is None:
            return index // self.length, index % self.length
        bounds = self.cu_seqlens.long()
        sequence = torch.searchsorted(bounds[1:], index, right=True)
        sequence = sequence.clamp(max=self.sequences - 1)
        return sequence, index - bounds[sequence]

    @cached_property
    def _has_slot(self) -> Tensor:
        """(tokens) bool: whether the token belongs to a sequence that is no padding."""
        sequence, position = self._tokens
        has_slot = torch.ones_like(position, dtype=torch.bool)
        if self.cu_seqlens is not None:
            has_slot = position < self.cu_seqlens.diff()[sequence]
        slots = self.slots_read
        return has_slot if slots is None else has_slot & (slots >= 0)[sequence]

    def _k_before_v(self, states: Tensor) -> Tensor:
        """A view of states of this call with K as the last but one dimension, and V as the last."""
        return states.mT if self.v_first else states


def outputs_of(
    arguments: Arguments, values: Tensor, returned: object
) -> tuple[Tensor, list[Tensor]]:
    """The output of a call, in the shape and dtype of `values`, and the other tensors that its
    function returned.

    arguments: with `out`, the function writes its output there.  What it returns then counts as
        other tensors.
    returned: a tensor, a list or tuple of tensors, of which the first is the output, or anything
        else if there is `out`.
    """
    tensors = [returned] if isinstance(returned, torch.Tensor) else []
    if isinstance(returned, tuple | list):
        tensors = list(returned)
    out = arguments.get("out")
    if out is None:
        out = tensors.pop(0)
    return out.reshape(values.shape).to(values.dtype), tensors


def _zero_unless(mask: Tensor, tensor: Tensor) -> Tensor:
    """A copy of the tensor with 0 where the mask is False, also in place of NaN.

    mask: has the first dimensions of the tensor.
    """
    other_dims = [1] * (tensor.ndim - mask.ndim)
    return torch.where(mask.view(*mask.shape, *other_dims), tensor, 0)
