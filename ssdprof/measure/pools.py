"""Laws of the states between calls: what a server's calls on a pool must do, and must leave alone.

A law makes calls of one implementation on a pool of random states, with random tokens for a layer
of the captured sizes.  Every call is judged in the same way (`Room.check`):

- out, and each new state, against the fp64 oracle of the same tokens after the same states, alone
- every other bit of the pool's memory, and of the call's tensors, as it was before

so that a law is only the call in which a fault would show.  `LAWS` is the list.  docs/serving.md
says what the laws prove.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from ssdprof import operators
from ssdprof.core.accuracy import Accuracy
from ssdprof.core.base import BETWEEN_CALLS, Holds, PrecisionRecord, Probe
from ssdprof.environment import child
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import Candidate, compare, oracle_output
from ssdprof.measure.first_run import status_of
from ssdprof.operators import tensors
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.operator import Output
from ssdprof.operators.rounding import unit_roundoff
from ssdprof.operators.serving import PoolRun, pool_run
from ssdprof.operators.tensors import precision_of

SLOTS = 13
GUARD = 64  # elements before, behind and, where there are gaps, between the slots of a pool
STREAM = 1024  # tokens that calls take in turn
NO_SLOT = -(1 << 20)  # in the columns of a wider table that do not belong to the call
CALLS = 64  # of a chain
REPLAYS = 10
Parts = dict[str, torch.Tensor]  # the tensors of some tokens, by name


class Broken(Exception):
    """A law does not hold.  The message is the first place."""


class NotApplicable(Exception):
    """The message is the reason."""


# --- calls


@dataclass(frozen=True)
class Row:
    """A sequence of a call.

    tokens: how many.  read: the slot that it begins with; -1: zeros.
    write: the slot of its new state; of several, those of the state after each token; None: the
        slot that was read; -1: not kept.
    columns: the slots of which `read` is one, named by the number of accepted tokens; (): none.
    """

    tokens: int
    read: int
    write: int | tuple[int, ...] | None = None
    columns: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """The number that names the column; 1 without columns."""
        return self.columns.index(self.read) + 1 if self.columns else 1

    @property
    def final(self) -> int:
        """The slot of the state after the last token; -1: it is not kept."""
        if isinstance(self.write, tuple):
            return self.write[-1]
        return self.read if self.write is None else self.write

    @property
    def kept(self) -> dict[int, int]:
        """Token -> the slot of the state after it."""
        if isinstance(self.write, tuple):
            return {token: slot for token, slot in enumerate(self.write) if slot >= 0}
        return {self.tokens - 1: self.final} if self.tokens and self.final >= 0 else {}

    @property
    def live(self) -> bool:
        """Neither padding nor without tokens."""
        return self.tokens > 0 and (self.read >= 0 or bool(self.kept))


PADDING = Row(1, -1)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """states: (slots, heads, ...), in `memory`, the elements from the first to the last guard; None
    for a pool that is too large to look at.
    """

    states: torch.Tensor
    memory: torch.Tensor | None

    def before(self) -> torch.Tensor:
        """A copy of all that a call must not change."""
        return torch.stack(list(self.states)) if self.memory is None else self.memory.clone()

    def restore(self, before: torch.Tensor) -> None:
        assert self.memory is not None
        self.memory.copy_(before)

    def changed(self, before: torch.Tensor, written: list[int]) -> str:
        """The first place outside of the written slots whose bits changed; empty if there is
        none.
        """
        states = self.states
        if self.memory is None:
            for slot in set(range(len(states))) - set(written):
                if not torch.equal(_bits(states[slot]), _bits(before[slot])):
                    return _slot_words(slot, len(states), written)
            return ""
        other = torch.ones(self.memory.shape, dtype=torch.bool, device=self.memory.device)
        form = states.shape, states.stride(), states.storage_offset()
        other.as_strided(*form)[written] = False
        differs = other & (_bits(self.memory) != _bits(before))
        if not bool(differs.any()):
            return ""
        place = int(differs.byte().argmax()) - int(states.storage_offset())
        slot, inside = divmod(place, states.stride(0))
        head = inside // states.stride(1)
        if slot not in range(len(states)) or head >= states.shape[1]:
            near = min(max(slot, 0), len(states) - 1)
            return f"the memory {'before' if place < 0 else 'behind'} slot {near}"
        return f"{_slot_words(slot, len(states), written)}, head {head}"


def _slot_words(slot: int, slots: int, written: Sequence[int]) -> str:
    """ "slot 0, the first", so that the usual culprits are named."""
    words = f"slot {slot}"
    if slot == 0:
        words += ", the first"
    if slot == slots - 1:
        words += ", the last"
    if slot - 1 in written or slot + 1 in written:
        words += ", beside one that is written"
    return words


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


@dataclass(frozen=True, kw_only=True)
class PoolCall:
    """rows: its sequences.  parts: the tensors of all their tokens, (batch, tokens, ...)."""

    rows: tuple[Row, ...]
    pool: Pool
    parts: Parts
    inputs: Any

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Of each row: its row in the batch, and its first and last position there."""
        if self.inputs.cu_seqlens is None:
            return [(i, 0, row.tokens) for i, row in enumerate(self.rows)]
        bounds = [0, *accumulate(row.tokens for row in self.rows)]
        return [(0, start, stop) for start, stop in pairwise(bounds)]

    @property
    def live(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row.live]

    @property
    def written(self) -> list[int]:
        return [slot for i in self.live for slot in self.rows[i].kept.values()]

    def of_row(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor (batch, tokens, ...) that belongs to row i."""
        batch, start, stop = self.spans[i]
        return tensor[batch, start:stop]

    def initial(self, i: int) -> torch.Tensor:
        states, slot = self.pool.states, self.rows[i].read
        return states[slot].float() if slot >= 0 else torch.zeros_like(states[0]).float()


# --- the room in which laws make their calls


class Room:
    """Makes and judges the calls of one law.

    like: a captured call, which has the sizes, dtypes and options of all calls.
    """

    def __init__(
        self, implementation: Implementation, run: PoolRun, like: Any, precision: PrecisionRecord
    ) -> None:
        self.implementation, self.precision = implementation, precision
        self._run, self._operator = run, operators.get(like.operator)
        indices = ("state_indices", "write_indices", "accepted", "cu_seqlens")
        self._like = replace(like, **dict.fromkeys((*indices, like.LINEAR[1])), state_every=0)
        self.device: torch.device = like.device
        self._taken = 0  # of the stream
        self.calls = self.kept = 0  # made, and found to leave alone what they must

    @cached_property
    def _stream(self) -> Parts:
        """Random tokens of the layer's sizes (1, STREAM, ...), with the captured call's dtypes."""
        generated, like = self._operator.generated, self._like
        binding = self._operator.binding
        given = binding.positional(like)
        sizes = self._operator.judged.sizes(like).values()
        cell = Cell(
            shape=generated.shape("pool", *sizes),
            dtype=tensors.dtype_name(like.values.dtype),  # type: ignore[arg-type]
            layout="views",
            tokens=Tokens(sequences=1, seqlen=STREAM),
        )
        drawn = binding.positional(generated.draw(cell, self.device))
        # a gate that generators leave out has the form of the values
        return {
            name: drawn.get(name, drawn[like.LINEAR[0]].flip(1)).to(tensor.dtype)
            for name, tensor in given.items()
        }

    def take(self, batch: int, count: int) -> Parts:
        """The next tokens, (batch, count, ...), views of the stream."""
        if self._taken + batch * count > STREAM:
            self._taken = 0
        part = slice(self._taken, self._taken + batch * count)
        self._taken += batch * count
        return {
            name: tensor[0, part].view(batch, count, *tensor.shape[2:])
            for name, tensor in self._stream.items()
        }

    @cached_property
    def _state_shape(self) -> tuple[int, int, int]:
        shape: tuple[int, int, int] = tuple(self._like.states_shape[1:])
        return shape

    def pool(
        self,
        slots: int = SLOTS,
        *,
        dtype: torch.dtype = torch.float32,
        gap: int = 0,
        turned: bool = False,
    ) -> Pool:
        """Random states between guards of NaN.  gap: elements between slots.  turned: the last two
        axes change places in memory.
        """
        heads, rows, columns = self._state_shape
        inner = (heads, columns, rows) if turned else (heads, rows, columns)
        stride = math.prod(inner) + gap
        memory = torch.full(
            (2 * GUARD + slots * stride,), torch.nan, dtype=dtype, device=self.device
        )
        strides = (stride, inner[1] * inner[2], inner[2], 1)
        states = memory.as_strided((slots, *inner), strides, GUARD)
        states.copy_(self._random(slots, *inner))
        return Pool(states=states.mT if turned else states, memory=memory)

    def far_pool(self, slots: int, stride: int) -> Pool:
        """Of bf16, with as much memory before it as behind its first slot, so that an offset that
        wraps around stays in it.  Hardly any of the memory is ever touched.
        """
        shape = self._state_shape
        behind = slots * stride
        try:
            memory = torch.empty(2 * behind, dtype=torch.bfloat16, device=self.device)
        except RuntimeError:  # torch.OutOfMemoryError is one
            raise NotApplicable("there is not enough memory") from None
        strides = (stride, shape[1] * shape[2], shape[2], 1)
        states = memory.as_strided((slots, *shape), strides, behind)
        for slot, state in enumerate(self._random(slots, *shape)):
            states[slot] = state
        return Pool(states=states, memory=None)

    def _random(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(7)
        return torch.randn(*shape, device=self.device, generator=generator)

    def call(
        self,
        pool: Pool,
        rows: Sequence[Row],
        *,
        parts: Parts | None = None,
        padding: float | None = None,
        index: torch.dtype = torch.int32,
        wide: bool = False,
    ) -> PoolCall:
        """A call of these rows: side by side if all have as many tokens, else packed.

        parts: their tokens; None: the next ones.  padding: what the tokens of padded rows are.
        wide: the indices are columns of wider tables.
        """
        counts = [row.tokens for row in rows]
        packed = len(set(counts)) > 1
        if parts is None:
            parts = self.take(*((1, sum(counts)) if packed else (len(rows), counts[0])))
        if padding is not None:
            parts = {name: tensor.clone() for name, tensor in parts.items()}
            padded = [i for i, row in enumerate(rows) if not row.live]
            for tensor in parts.values():
                tensor[padded] = padding
        given: Parts = {self._like.LINEAR[1]: pool.states}

        def indices(values: list[list[int]]) -> torch.Tensor:
            width = len(values[0])
            table = torch.tensor(values, dtype=index, device=self.device)
            if wide:
                beside = torch.full((len(values), 3), NO_SLOT, dtype=index, device=self.device)
                table = torch.cat([table, beside], 1)[:, :width]
            return table

        width = max(len(row.columns) for row in rows)
        if width:
            columns = [[*row.columns, *[-1] * (width - len(row.columns))] for row in rows]
            given["state_indices"] = indices(columns)
            given["accepted"] = indices([[row.accepted] for row in rows])[:, 0]
        else:
            given["state_indices"] = indices([[row.read] for row in rows])[:, 0]
        if any(isinstance(row.write, tuple) for row in rows):
            longest = max(counts)
            table = [[row.kept.get(token, -1) for token in range(longest)] for row in rows]
            given["write_indices"] = indices(table)
        elif any(row.write is not None for row in rows):
            given["write_indices"] = indices([[row.final] for row in rows])[:, 0]
        if packed:
            bounds = [0, *accumulate(counts)]
            given["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        inputs = replace(self._like, **parts, **given)
        return PoolCall(rows=tuple(rows), pool=pool, parts=parts, inputs=inputs)

    # --- judging

    def check(self, call: PoolCall, run: PoolRun | None = None) -> Output:
        """Make the call and judge it.  The live rows' out, packed, and states.  Raises Broken."""
        plain = self.plain(call)
        output = self.run(call, run)
        return self.judge(call, plain, output)

    def launch(self, call: PoolCall) -> torch.Tensor:
        """out of the call, without a look at anything."""
        out, _ = self._run(call.inputs, precision_of(self.precision))
        return out

    def run(self, call: PoolCall, run: PoolRun | None = None) -> torch.Tensor:
        """out of the call, after a look at what it must not change.  run: replaces the
        implementation.
        """
        self.calls += 1
        name = self.implementation.name
        pool, before = call.pool, call.pool.before()
        given = tensors.tensors(call.inputs)
        del given[self._like.LINEAR[1]]
        copies = {name: tensor.clone() for name, tensor in given.items()}
        child.alive()
        try:
            out, returned = (run or self._run)(call.inputs, precision_of(self.precision))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            status, reason = status_of(error, self.device, name)
            if status == "failed":
                raise Broken(f"{self.words}: {reason}") from None
            raise NotApplicable(reason) from None
        if returned is not pool.states:
            raise Broken(f"{self.words}: it returns another tensor than the pool")
        values = call.parts[self._like.LINEAR[0]]
        if out.shape != values.shape or out.dtype != values.dtype:
            raise Broken(
                f"{self.words}: out must be {values.dtype} of shape {tuple(values.shape)}, "
                f"not {out.dtype} of shape {tuple(out.shape)}"
            )
        for tensor_name, copy in copies.items():
            if not torch.equal(_bits(copy), _bits(given[tensor_name])):
                raise Broken(f"{self.words}: it changes {tensor_name}")
        if place := pool.changed(before, call.written):
            raise Broken(f"{self.words}: it changes {place}, which no row writes")
        self.kept += 1
        return out

    @property
    def words(self) -> str:
        return f"call {self.calls}"

    def plain(self, call: PoolCall) -> Any:
        """The same tokens after the same states without a pool, live rows only."""
        every = any(isinstance(call.rows[i].write, tuple) for i in call.live)
        parts = [
            {name: call.of_row(i, tensor) for name, tensor in call.parts.items()} for i in call.live
        ]
        return self.joined(parts, [call.initial(i) for i in call.live], every=every)

    def joined(
        self, parts: Sequence[Parts], initial: Sequence[torch.Tensor], *, every: bool = False
    ) -> Any:
        """Packed sequences.  every: with the state after each token."""
        name = self._like.LINEAR[0]
        bounds = [0, *accumulate(len(part[name]) for part in parts)]
        packed = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
        return replace(
            self._like,
            **packed,
            **{self._like.LINEAR[1]: torch.stack(list(initial))},
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=self.device),
            state_every=int(every),
        )

    def judge(self, call: PoolCall, plain: Any, out: torch.Tensor) -> Output:
        """The live rows' out, packed, and states.  Raises Broken unless they are those of the
        oracle.
        """
        live = [(i, call.rows[i]) for i in call.live]
        packed = torch.cat([call.of_row(i, out) for i, _ in live])[None]
        # a state that is not kept is the oracle's
        states = oracle_output(plain)[1]
        row_of_state: list[str] = []
        for i, row in live:
            tokens = range(row.tokens) if plain.state_every else [row.tokens - 1]
            for token in tokens:
                slot = row.kept.get(token, -1)
                if slot >= 0:
                    states[len(row_of_state)] = call.pool.states[slot].float()
                row_of_state.append(f"{self.words}, row {i}, slot {slot}")
        row_of_token = [
            f"{self.words}, row {i}, token {token}"
            for i, row in live
            for token in range(row.tokens)
        ]
        dtype = call.pool.states.dtype
        self.compare(plain, (packed, states), dtype, row_of_token, row_of_state)
        return packed, states

    def compare(
        self,
        plain: Any,
        output: Output,
        dtype: torch.dtype,
        of_tokens: Sequence[str],
        of_states: Sequence[str],
    ) -> None:
        """Raises Broken with the first place unless the output is within its budget.

        dtype: of the pool.  of_tokens, of_states: where they come from, in words.
        """
        precision = replace(precision_of(self.precision), state_dtype=dtype)
        cuts = self.implementation.cuts_operands
        candidate = Candidate(output=output, precision=precision, cuts=cuts)
        for accuracy in compare(plain, {"": candidate})[""]:
            if reason := accuracy.reason:
                position = _worst(accuracy)
                of_out = accuracy.tensor == "out"
                row = of_tokens[position[1]] if of_out else of_states[position[0]]
                head = position[2] if of_out else position[1]
                raise Broken(f"{row}, head {head}: {reason}")


def _worst(accuracy: Accuracy) -> tuple[int, ...]:
    """The place that fails, as an index of the tensor."""
    deviation = accuracy.vs_oracle
    if deviation.first_nonfinite is not None:
        return deviation.first_nonfinite
    for use in accuracy.budget:
        if use.error > use.budget:
            return use.position
    return deviation.worst_position


# --- sequences through several calls


@dataclass(kw_only=True)
class History:
    """What a sequence has taken in several calls, and what it gave.

    initial: the state before.  places: of each token, in words.  final: the state after all.
    """

    initial: torch.Tensor
    parts: list[Parts] = field(default_factory=list)
    outs: list[torch.Tensor] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    final: torch.Tensor | None = None

    def add(self, room: Room, call: PoolCall, i: int, out: torch.Tensor, accepted: int) -> None:
        """The first `accepted` tokens of row i of a call."""
        part = {name: call.of_row(i, tensor)[:accepted] for name, tensor in call.parts.items()}
        self.parts.append({name: tensor.clone() for name, tensor in part.items()})
        self.outs.append(call.of_row(i, out)[:accepted].clone())
        self.places += [f"{room.words}, row {i}, token {token}" for token in range(accepted)]


def check_histories(room: Room, histories: Sequence[History]) -> None:
    """Every sequence must be as it is alone, from its start.  Raises Broken."""
    told = [one for one in histories if one.outs]
    whole = [
        {name: torch.cat([part[name] for part in one.parts]) for name in one.parts[0]}
        for one in told
    ]
    plain = room.joined(whole, [one.initial for one in told])
    out = torch.cat([part for one in told for part in one.outs])[None]
    states = torch.stack([one.final for one in told if one.final is not None])
    places = [place for one in told for place in one.places]
    last = [f"{one.places[-1]}, its last" for one in told]
    room.compare(plain, (out, states), torch.float32, places, last)


# --- the laws


def other_slots(room: Room) -> None:
    """An odd number of sequences, in slots in any order, with guards between slots."""
    pool = room.pool(gap=GUARD)
    for slots in ((5, 11, 3, 2, 7), (0, 12, 6)):
        room.check(room.call(pool, [Row(1, slot) for slot in slots]))


def padded_rows(room: Room) -> None:
    """Rows with index -1 among others, the first and the last slot in use or not."""
    pool = room.pool()
    for slots, padding in (
        ((5, -1, 11, 0, -1, 2, 12, -1), torch.nan),
        ((-1, 5, 11, 3, -1, 2, 7, -1), torch.nan),
        ((5, -1, 11, 3, -1, 2, 7, -1), torch.inf),
    ):
        room.check(room.call(pool, [Row(1, slot) for slot in slots], padding=padding))


def without_tokens(room: Room) -> None:
    """A pack of sequences of 0 to 8 tokens."""
    pool = room.pool()
    lengths, slots = (1, 3, 0, 8, 2, 0, 5), (4, 9, 0, 12, 1, 7, 10)
    rows = [Row(tokens, slot) for tokens, slot in zip(lengths, slots, strict=True)]
    room.check(room.call(pool, rows))


def new_sequences(room: Room) -> None:
    """Sequences that begin with zeros, in slots that held others."""
    pool = room.pool()
    for tokens in (1, 2):
        rows = [Row(tokens, -1, 6), Row(tokens, 8, 8), Row(tokens, -1, 0), Row(tokens, 3, 5)]
        room.check(room.call(pool, rows))


def shared_prefix(room: Room) -> None:
    """Several sequences that read one slot and write others, one of which keeps nothing."""
    pool = room.pool()
    for tokens in (1, 2):
        rows = [Row(tokens, 3, 1), Row(tokens, 8, 0), Row(tokens, 3, 5), Row(tokens, 3, -1)]
        room.check(room.call(pool, rows))


def drafted_tokens(room: Room) -> None:
    """A slot for the state after each of five tokens, of which one to five are accepted, twice in a
    row; then a step without drafts, and drafts again.
    """
    pool = room.pool(slots=29)
    columns = ((6, 1, 12, 3, 22), (0, 9, 4, 2, 23), (11, 5, 8, 10, 24), (14, 13, 16, 15, 25),
               (17, 20, 19, 18, 26))  # fmt: skip
    histories = [History(initial=pool.states[slots[0]].clone()) for slots in columns]
    accepted = [1] * len(columns)
    for count, then in ((5, (1, 2, 3, 4, 5)), (5, (5, 3, 4, 1, 2)), (1, (1,) * 5), (5, (3,) * 5)):
        rows = []
        for slots, number in zip(columns, accepted, strict=True):
            write = slots if count > 1 else slots[0]
            rows.append(Row(count, slots[number - 1], write, slots))
        none = (-1,) * 5
        rows.append(Row(count, -1, none if count > 1 else -1, none))
        call = room.call(pool, rows, wide=True, padding=torch.nan)
        plain = room.plain(call)
        out = room.run(call)
        if room.calls == 1:  # every kept state; later, those that are accepted
            room.judge(call, plain, out)
        accepted = list(then)
        for i, history in enumerate(histories):
            history.add(room, call, i, out, accepted[i])
            history.final = pool.states[columns[i][accepted[i] - 1]].clone()
    check_histories(room, histories)


def order_and_number(room: Room) -> None:
    """Sequences among others, in another order, and each alone."""
    pool = room.pool()
    before = pool.before()
    rows = [Row(1, slot) for slot in (4, 9, 0, 12, 7)]
    whole = room.call(pool, rows)
    packed, states = room.check(whole)
    for order in ((3, 1, 4, 0, 2), (2,), (4, 1)):
        pool.restore(before)
        parts = {name: tensor[list(order)] for name, tensor in whole.parts.items()}
        again = room.call(pool, [rows[i] for i in order], parts=parts)
        out, state = room.check(again)
        for place, i in enumerate(order):
            same = torch.equal(out[0, place], packed[0, i]) and torch.equal(state[place], states[i])
            if room.implementation.batch_invariant and not same:
                raise Broken(
                    f"{room.words}, row {place}, slot {rows[i].read}: batch invariance is declared,"
                    f" and other rows change its bits"
                )


def indices(room: Room) -> None:
    """int64, and columns of wider tables."""
    pool = room.pool()
    rows = [Row(1, 2, 2), Row(1, 12, 1), Row(1, 7, 9)]
    room.check(room.call(pool, rows, index=torch.int64))
    room.check(room.call(pool, rows, wide=True))


def layouts(room: Room) -> None:
    """Gaps between slots, and the last axes exchanged, as servers store K and V."""
    for pool in (room.pool(gap=GUARD), room.pool(turned=True)):
        room.check(room.call(pool, [Row(1, slot) for slot in (2, 0, 7)]))


def rounded_once(room: Room) -> None:
    """A pool of 16 bits holds what a pool of 32 bits with the same states would hold, rounded."""
    dtype = torch.bfloat16
    coarse, fine = room.pool(dtype=dtype), room.pool()
    fine.states.copy_(coarse.states)
    rows = [Row(16, 9), Row(16, 4)]
    parts = room.take(len(rows), 16)
    in_32 = room.call(fine, rows, parts=parts)
    exact = oracle_output(room.plain(in_32))[1]
    _, fine_states = room.check(in_32)
    _, states = room.check(room.call(coarse, rows, parts=parts))
    slack = 2 * (fine_states - exact).abs() + 2.0**-18 * exact.abs()
    room_of_head = slack.amax((-2, -1), keepdim=True)
    beyond = (states - fine_states).abs() - unit_roundoff(dtype) * fine_states.abs() > room_of_head
    if bool(beyond.any()):
        row, head = (int(index) for index in beyond.nonzero()[0, :2])
        raise Broken(
            f"{room.words}, row {row}, slot {rows[row].read}, head {head}: {int(beyond.sum()):,} "
            f"numbers are further from those of a pool in fp32 than one rounding to bf16"
        )


def far_slots(room: Room) -> None:
    """A pool whose last slot lies beyond 2^31 elements, and so offset in 32 bits wrap around."""
    pool = room.far_pool(slots=3, stride=1 << 30)
    room.check(room.call(pool, [Row(1, 2), Row(1, 1)]))


def mixed_calls(room: Room) -> None:
    """A chain of calls of chunks, prompts, drafts and steps of some of four sequences on one pool,
    among which sequences end and new ones take their slots.
    """
    chosen = random.Random(64)
    slots = list(range(SLOTS + 4))
    chosen.shuffle(slots)
    columns = [tuple(slots[4 * i : 4 * i + 4]) for i in range(4)]
    pool = room.pool(slots=len(slots))
    histories: dict[int, History] = {}
    ended: list[History] = []
    current: dict[int, int] = {}  # the slot of each sequence
    for number in range(CALLS):
        kind = ("chunk", "draft", "step", "step")[number % 4]
        some = chosen.sample(range(4), chosen.randint(2, 4))
        rows = []
        for i in some:
            if i not in histories or (kind == "chunk" and chosen.random() < 0.2):
                if i in histories:
                    ended.append(histories[i])
                zeros = torch.zeros_like(pool.states[0])
                histories[i], current[i] = History(initial=zeros, final=zeros), -1
            rows.append(_mixed_row(kind, current[i], columns[i], chosen))
        padding = None
        if kind != "chunk":
            tokens = rows[0].tokens
            none = (-1,) * 4
            rows.insert(1, Row(tokens, -1, none if kind == "draft" else -1, none))
            some.insert(1, -1)
            padding = torch.nan
        call = room.call(pool, rows, padding=padding)
        out = room.run(call)
        for place, (i, row) in enumerate(zip(some, rows, strict=True)):
            if not row.live:
                continue
            accepted = chosen.randint(1, row.tokens) if kind == "draft" else row.tokens
            histories[i].add(room, call, place, out, accepted)
            current[i] = row.kept[accepted - 1]
            histories[i].final = pool.states[current[i]].clone()
    check_histories(room, [*ended, *histories.values()])


def _mixed_row(kind: str, slot: int, columns: tuple[int, ...], chosen: random.Random) -> Row:
    """slot: with which the sequence begins; -1: none."""
    if kind == "chunk":
        return Row(chosen.randint(0, 8), slot, columns[0])
    # of a new sequence, a first column without a slot
    columns_read = columns if slot >= 0 else (-1, *columns[1:])
    return Row(
        4 if kind == "draft" else 1, slot, columns if kind == "draft" else columns[0], columns_read
    )


def replayed_graph(room: Room) -> None:
    """A CUDA graph of a call, replayed with other tokens, slots and numbers of live rows."""
    if room.device.type != "cuda":
        raise NotApplicable("it needs a GPU")
    pool, count = room.pool(), 6
    static = room.call(pool, [Row(1, slot) for slot in range(count)])
    before = pool.before()
    room.run(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = room.launch(static)
    pool.restore(before)
    chosen = random.Random(REPLAYS)
    for _ in range(REPLAYS):
        slots = chosen.sample(range(SLOTS), count)
        live = chosen.randint(1, count)
        rows = [Row(1, slot if i < live else -1) for i, slot in enumerate(slots)]
        call = room.call(pool, rows, padding=torch.nan)

        def replay(inputs: Any, _: object) -> Output:
            placed = tensors.tensors(static.inputs)
            for name, tensor in tensors.tensors(inputs).items():
                if tensor is not pool.states:
                    placed[name].copy_(tensor)
            graph.replay()
            return out, pool.states

        room.check(call, replay)


def beside_another_stream(room: Room) -> None:
    """Calls while another stream keeps the GPU busy."""
    if room.device.type != "cuda":
        raise NotApplicable("it needs a GPU")
    pool = room.pool()
    side = torch.cuda.Stream(room.device)  # type: ignore[no-untyped-call]
    busy = torch.randn(4096, 4096, device=room.device)
    for slots in ((5, 11, 3, 2, 7), (0, 12, 6), (8, 4)):
        with torch.cuda.stream(side):
            for _ in range(REPLAYS):
                busy = (busy @ busy).clamp(-1, 1)
        room.check(room.call(pool, [Row(1, slot) for slot in slots]))


LAWS: dict[str, Callable[[Room], None]] = {
    "other slots keep their bits": other_slots,
    "padded rows touch nothing": padded_rows,
    "sequences without tokens": without_tokens,
    "new sequences begin with zeros": new_sequences,
    "a shared prefix": shared_prefix,
    "drafted tokens": drafted_tokens,
    "order and number of rows": order_and_number,
    "indices of any form": indices,
    "layouts of the pool": layouts,
    "states are rounded once": rounded_once,
    "slots beyond 2^31 elements": far_slots,
    f"{CALLS} mixed calls": mixed_calls,
    "a replayed CUDA graph": replayed_graph,
    "beside another stream": beside_another_stream,
}


def applies(implementation: Implementation, inputs: Any) -> bool:
    """Whether the laws are tested with this call: of an implementation that servers call on a pool,
    a step, drafted tokens, or a call that begins with slots; any call of a user's kernel that works
    in place, which is for nothing else.
    """
    if implementation.kind == "own":
        return implementation.in_place is not None
    step = inputs.cu_seqlens is None and inputs.length == 1
    serving = step or inputs.state_every == 1 or inputs.state_indices is not None
    return serving and pool_run(implementation) is not None


def try_laws(
    implementation: Implementation, inputs: Any, precision: PrecisionRecord, *, quick: bool
) -> Iterator[Probe]:
    """A probe of each law.  inputs: a call that the implementation computed correctly.  quick:
    without chains of many calls.
    """
    run = pool_run(implementation)
    assert run is not None
    for name, law in LAWS.items():
        room = Room(implementation, run, inputs, precision)
        holds: Holds = "yes"
        detail = ""
        try:
            if quick and law is mixed_calls:
                raise NotApplicable("Triton's interpreter runs it; --thorough tests it")
            law(room)
        except Broken as error:
            holds, detail = "no", str(error)
        except NotApplicable as error:
            detail = str(error)
            if room.kept:
                detail = f"in {room.kept} of its calls: {detail}"
            else:
                holds = "not applicable"
        except torch.OutOfMemoryError:
            holds, detail = "not applicable", "out of memory"
        yield Probe(name=BETWEEN_CALLS + name, holds=holds, detail=detail)
