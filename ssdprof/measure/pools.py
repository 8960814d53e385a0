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
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor

from ssdprof import operators
from ssdprof.core.accuracy import Accuracy
from ssdprof.core.base import BETWEEN_CALLS, Probe
from ssdprof.environment import child
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import (
    Candidate,
    bits_of,
    changes,
    compare,
    fingerprints,
    oracle_output,
)
from ssdprof.measure.first_run import status_of
from ssdprof.measure.laws import Broken, NotApplicable, tested, untested
from ssdprof.operators import tensors
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.rounding import unit_roundoff
from ssdprof.operators.serving import PoolRun, pool_run

SLOTS = 13
# bits of a NaN that arithmetic changes, so that a guard that is read and written shows too
SIGNALLING = {torch.float32: 0x7FA00000, torch.bfloat16: 0x7FA0}
GUARD = 64  # elements before, behind and, where there are gaps, between the slots of a pool
STREAM = 256  # tokens that calls take in turn
NO_SLOT = -(1 << 20)  # in the columns of a wider table that do not belong to the call
CALLS = 64  # of a chain
REPLAYS = 10
SLACK = 2.0**-12  # of the largest number of a head
TokenTensors = dict[str, Tensor]  # the tensors of some tokens, by name


# --- calls


@dataclass(frozen=True)
class PoolRow:
    """A sequence of a call.

    tokens: how many.  columns: the slot that it begins with is columns[accepted - 1]; -1: zeros.
    writes: the slot of its final state, or the slots of the state after each token; -1: not kept;
    (): the slot that was read.
    """

    tokens: int
    columns: tuple[int, ...]
    writes: tuple[int, ...] = ()
    accepted: int = 1

    @property
    def read(self) -> int:
        return self.columns[self.accepted - 1]

    @property
    def kept(self) -> dict[int, int]:
        """Token -> the slot of the state after it."""
        slots = self.writes or (self.read,)
        first = self.tokens - len(slots)
        return {first + i: slot for i, slot in enumerate(slots) if slot >= 0 and self.tokens}

    @property
    def live(self) -> bool:
        """Neither padding nor without tokens."""
        return self.tokens > 0 and (self.read >= 0 or bool(self.kept))

    @property
    def padding(self) -> PoolRow:
        """A row of the same form that neither reads nor writes."""
        return PoolRow(self.tokens, (-1,) * len(self.columns), (-1,) * len(self.writes))


def row(tokens: int, read: int, *writes: int) -> PoolRow:
    return PoolRow(tokens, (read,), writes)


def rows_of(*slots: int, tokens: int = 1) -> list[PoolRow]:
    """Sequences that begin with these slots and write them."""
    return [row(tokens, slot) for slot in slots]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool of states, between guards.

    states: (slots, heads, ...), in `memory`, the elements from the first to the last guard; empty
    for a pool that is too large to look at.
    """

    states: Tensor
    memory: Tensor

    def changed(self, before: Tensor, written: Sequence[int]) -> str:
        """The first place outside of the written slots whose bits changed; empty if there is none.

        before: a copy of `memory`.
        """
        states = self.states
        other = torch.ones_like(self.memory, dtype=torch.bool)
        if not len(other):
            return ""
        form = states.shape, states.stride(), states.storage_offset()
        other.as_strided(*form)[written] = False
        differs = other & (bits_of(self.memory) != bits_of(before))
        if not bool(differs.any()):
            return ""
        index = int(differs.byte().argmax()) - int(states.storage_offset())
        slot, inside = divmod(index, states.stride(0))
        head = inside // states.stride(1)
        words = f"slot {slot}, head {head}"
        if slot not in range(len(states)) or head >= states.shape[1]:
            words = f"the memory behind slot {slot}"
        for holds, name in (
            (slot == 0, "the first slot"),
            (slot == len(states) - 1, "the last slot"),
            (slot - 1 in written or slot + 1 in written, "beside one that is written"),
        ):
            words += f", {name}" if holds else ""
        return words


@dataclass(frozen=True, kw_only=True)
class PoolCall:
    """A call on a pool.

    rows: its sequences.  parts: the tensors of all their tokens, (batch, tokens, ...).
    """

    rows: Sequence[PoolRow]
    pool: Pool
    parts: TokenTensors
    inputs: Inputs

    @property
    def live(self) -> list[tuple[int, PoolRow]]:
        return [(i, row) for i, row in enumerate(self.rows) if row.live]

    @property
    def written(self) -> list[int]:
        """The slots that the rows write."""
        slots: list[int] = []
        for _, row in self.live:
            slots += row.kept.values()
        return slots

    def of_row(self, i: int, tensor: Tensor) -> Tensor:
        """The part of a tensor (batch, tokens, ...) that belongs to row i."""
        start = sum(row.tokens for row in self.rows[:i])
        return tensor.flatten(0, 1)[start : start + self.rows[i].tokens]

    def tokens_of(self, i: int, count: int | None = None) -> TokenTensors:
        """The tokens of row i, or its first ones, (count, ...)."""
        return {name: self.of_row(i, tensor)[:count] for name, tensor in self.parts.items()}

    def initial(self, read: int) -> Tensor:
        states = self.pool.states
        return states[read].float() if read >= 0 else torch.zeros_like(states[0]).float()


# --- the room in which laws make their calls


class Room:
    """Makes and judges the calls of one law.

    like: a captured call, which has the sizes, dtypes and options of all calls.
    """

    def __init__(
        self, implementation: Implementation, run: PoolRun, like: Inputs, precision: Precision
    ) -> None:
        self.implementation = implementation
        self.precision = precision
        self.pool_run = run
        indices = ("state_indices", "write_indices", "accepted", "cu_seqlens")
        self._states = like.LINEAR[1]
        self._like = replace(like, **dict.fromkeys((*indices, self._states)), state_every=0)
        self.device: torch.device = like.device
        self._taken = 0  # of the stream
        self.calls = self.kept = 0  # made, and found to leave alone what they must

    @cached_property
    def _stream(self) -> TokenTensors:
        """Random tokens of the layer's sizes (1, STREAM, ...), with the captured call's dtypes."""
        operator = operators.get(self._like.operator)
        like = self._like
        cell = Cell(
            shape=operator.generated.shape("pool", *like.sizes.values()),
            dtype=tensors.dtype_name(like.values.dtype),  # type: ignore[arg-type]
            layout="views",
            tokens=Tokens(sequences=1, seqlen=STREAM),
        )
        generated = operator.binding.positional(operator.generated.draw(cell, self.device))
        # a gate that generators leave out has the form of the values
        return {
            name: generated.get(name, generated[like.LINEAR[0]].flip(1)).to(tensor.dtype)
            for name, tensor in operator.binding.positional(like).items()
        }

    def take(self, batch: int, count: int) -> TokenTensors:
        """The next tokens, (batch, count, ...), views of the stream."""
        if self._taken + batch * count > STREAM:
            self._taken = 0
        part = slice(self._taken, self._taken + batch * count)
        self._taken += batch * count
        return {
            name: tensor[0, part].view(batch, count, *tensor.shape[2:])
            for name, tensor in self._stream.items()
        }

    def pool(
        self,
        slots: int = SLOTS,
        *,
        dtype: torch.dtype = torch.float32,
        gap: int = 0,
        turned: bool | None = None,
        far: int = 0,
    ) -> Pool:
        """Random states between guards of NaN.

        gap: elements between slots.  turned: the last two axes change places in memory; None: as
        the implementation needs it.  far: elements from slot to slot, and as many before the first
        as behind it, so that an offset that wraps around stays in the memory; hardly any of it is
        ever touched.  There is room for a slot before the first, which some libraries take for
        padding.
        """
        heads, rows, columns = self._like.states_shape[1:]
        turned = self.implementation.turned_pools if turned is None else turned
        inner = (heads, columns, rows) if turned else (heads, rows, columns)
        stride = far or math.prod(inner) + gap
        before = slots * far or stride + GUARD
        try:
            memory = torch.empty(2 * before + slots * stride, dtype=dtype, device=self.device)
        except RuntimeError:  # torch.OutOfMemoryError is one
            raise NotApplicable("there is not enough memory") from None
        strides = (stride, inner[1] * inner[2], inner[2], 1)
        states = memory.as_strided((slots, *inner), strides, before)
        if not far:
            bits_of(memory).fill_(SIGNALLING[dtype])
        generator = torch.Generator(self.device).manual_seed(7)
        states.copy_(torch.randn(slots, *inner, device=self.device, generator=generator))
        return Pool(states=states.mT if turned else states, memory=memory[:0] if far else memory)

    def call(
        self,
        pool: Pool,
        rows: Sequence[PoolRow],
        *,
        parts: TokenTensors | None = None,
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
            parts = self.take(1, sum(counts)) if packed else self.take(len(rows), counts[0])
        if padding is not None:
            parts = {name: tensor.clone() for name, tensor in parts.items()}
            for tensor in parts.values():
                tensor[[i for i, row in enumerate(rows) if not row.live]] = padding

        def table(values: Sequence[Sequence[int]]) -> Tensor:
            """(rows, columns), or (rows) of a single column."""
            indices = torch.tensor(values, dtype=index, device=self.device)
            if wide:
                others = torch.full_like(indices, NO_SLOT)
                indices = torch.cat([indices, others], 1)[:, : len(values[0])]
            return indices if indices.shape[1] > 1 else indices[:, 0]

        tensors = {self._states: pool.states, "state_indices": table([row.columns for row in rows])}
        if len(rows[0].columns) > 1:
            tensors["accepted"] = table([[row.accepted] for row in rows])
        if rows[0].writes:
            tensors["write_indices"] = table([row.writes for row in rows])
        if packed:
            tensors["cu_seqlens"] = self._bounds(counts)
        inputs = replace(self._like, **parts, **tensors)
        return PoolCall(rows=rows, pool=pool, parts=parts, inputs=inputs)

    def _bounds(self, counts: Sequence[int]) -> Tensor:
        bounds = [0, *accumulate(counts)]
        return torch.tensor(bounds, dtype=torch.int32, device=self.device)

    # --- judging

    def check(self, call: PoolCall, run: PoolRun | None = None) -> Output:
        """Make the call and judge it.  The live rows' out, packed, and states.  Raises Broken.

        run: replaces the implementation.
        """
        parts = [call.tokens_of(i) for i, _ in call.live]
        every = max(len(row.writes) for _, row in call.live) > 1
        plain = self.alone(parts, [call.initial(row.read) for _, row in call.live], every=every)
        out = self.run(call, run)
        packed = torch.cat([call.of_row(i, out) for i, _ in call.live])[None]
        tokens: list[str] = []
        for i, row in call.live:
            tokens += [f"call {self.calls}, row {i}, token {token}" for token in range(row.tokens)]
        states, slots = self._kept_states(call, plain, every)
        output = Output(packed, states)
        dtype = call.pool.states.dtype
        self.compare(plain, output, dtype, tokens=tokens, states=slots)
        return output

    def _kept_states(self, call: PoolCall, plain: Inputs, every: bool) -> tuple[Tensor, list[str]]:
        """The states after the live rows, (states, heads, ...), as the pool has them now, and the
        label of each: "call 3, row 1, slot 11".  A state that no slot keeps is the oracle's.

        plain, every: see `alone`.
        """
        states = torch.empty(plain.final_shape, device=self.device)
        labels: list[str] = []
        dropped: list[int] = []
        for i, row in call.live:
            for token in range(0 if every else row.tokens - 1, row.tokens):
                slot = row.kept.get(token)
                if slot is None:
                    dropped.append(len(labels))
                else:
                    states[len(labels)] = call.pool.states[slot].float()
                labels.append(f"call {self.calls}, row {i}, slot {slot}")
        if dropped:
            states[dropped] = oracle_output(plain)[1][dropped]
        return states, labels

    def run(self, call: PoolCall, run: PoolRun | None = None) -> Tensor:
        """out of the call, after a look at what it must not change."""
        self.calls += 1
        pool = call.pool
        before = call.pool.memory.clone()
        tensors = call.inputs.tensors
        del tensors[self._states]
        given = fingerprints(tensors)
        child.alive()
        try:
            out, returned = (run or self.pool_run)(call.inputs, self.precision)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            status, reason = status_of(error, self.device, self.implementation.name)
            if status != "failed":
                raise NotApplicable(reason) from None
            raise Broken(f"call {self.calls}: {reason}") from None
        values = call.parts[self._like.LINEAR[0]]
        wrong = changes(given, tensors)
        if returned is not pool.states:
            wrong = "it returns another tensor than the pool"
        elif (out.shape, out.dtype) != (values.shape, values.dtype):
            wrong = f"out is {out.dtype} of shape {tuple(out.shape)}"
        elif not wrong and (place := pool.changed(before, call.written)):
            wrong = f"it changes {place}, which no row writes"
        if wrong:
            raise Broken(f"call {self.calls}: {wrong}")
        self.kept += 1
        return out

    def alone(
        self, parts: Sequence[TokenTensors], initial: Sequence[Tensor], *, every: bool = False
    ) -> Inputs:
        """Sequences without a pool, packed.  every: with the state after each token."""
        packed = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
        packed[self._states] = torch.stack(list(initial))
        counts = [len(part[self._like.LINEAR[0]]) for part in parts]
        return replace(
            self._like, **packed, cu_seqlens=self._bounds(counts), state_every=int(every)
        )

    def compare(
        self,
        plain: Inputs,
        output: Output,
        dtype: torch.dtype,
        *,
        tokens: Sequence[str],
        states: Sequence[str],
    ) -> None:
        """Raises Broken with the position unless the output is within its budget.

        dtype: of the pool.  tokens, states: the names of all tokens and of all states in messages.
        """
        candidate = Candidate(
            output=output,
            precision=replace(self.precision, state_dtype=dtype),
            cuts=self.implementation.cuts_operands,
        )
        for accuracy in compare(plain, {"": candidate})[""]:
            if accuracy.reason:
                exact = oracle_output(plain)
                position = accuracy.vs_oracle.first_nonfinite or accuracy.vs_oracle.worst_position
                if accuracy.tensor == "out":  # (1, tokens, heads, ...)
                    names = tokens
                    position = position[1:]
                    errors = (output[0].float() - exact[0].float())[0]
                else:  # (states, heads, ...)
                    names = states
                    errors = output[1].float() - exact[1].float()
                index, head = _first_beyond(accuracy, errors) or position[:2]
                raise Broken(f"{names[index]}, head {head}: {accuracy.reason}")


def _first_beyond(accuracy: Accuracy, errors: Tensor) -> tuple[int, int] | None:
    """The first token or state with an error beyond the budget of a head, and the head; None if
    none is.  errors: (tokens or states, heads, ...).
    """
    for use in accuracy.budget:
        beyond = errors[:, use.head].abs().flatten(1).amax(1) > use.budget
        if use.norm == "max" and bool(beyond.any()):
            return int(beyond.byte().argmax()), use.head
    return None


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(bits_of(one), bits_of(other))


class Chain:
    """Calls of some sequences on one pool, of which each has several slots in no order.

    columns: the slots of each sequence.  current: the column of its state; None: it is new.
    histories: what each sequence, those that ended too, has taken, and what it gave.
    """

    def __init__(self, room: Room, count: int, width: int) -> None:
        self.room = room
        self.rng = random.Random(count)
        slots = self.rng.sample(range(count * width + 2), count * width)
        self.columns = [tuple(slots[width * i : width * (i + 1)]) for i in range(count)]
        self.pool = room.pool(slots=count * width + 2)
        self.current: list[int | None] = [0] * count
        initial = [self.pool.states[slots[0]].clone() for slots in self.columns]
        self.histories = [PoolHistory(state, state) for state in initial]
        self.ended: list[PoolHistory] = []

    def renew(self, i: int) -> None:
        """Sequence i ends, and another one takes its slots."""
        self.ended.append(self.histories[i])
        zeros = torch.zeros_like(self.pool.states[0])
        self.histories[i] = PoolHistory(zeros, zeros)
        self.current[i] = None

    def call(
        self, sequences: Sequence[int], tokens: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Make a call of some of the sequences, and note what each gave.

        tokens: of each of these sequences; if all have as many, the state after each is kept, and a
        padded row stands among them.
        accepted: how many of them are accepted; the sequence goes on from there.
        """
        packed = len(set(tokens)) > 1
        rows = [self._row(i, count, packed) for i, count in zip(sequences, tokens, strict=True)]
        if not packed:
            rows.append(rows[0].padding)
        call = self.room.call(self.pool, rows, padding=None if packed else torch.nan, wide=True)
        out = self.room.run(call)
        for index, (i, count) in enumerate(zip(sequences, accepted, strict=True)):
            if rows[index].live:
                column = 0 if packed else count - 1
                self.current[i] = column
                history = self.histories[i]
                history.parts.append(call.tokens_of(index, count))
                history.outs.append(call.of_row(index, out)[:count])
                history.last = f"call {self.room.calls}, row {index}"
                history.labels += [f"{history.last}, token {token}" for token in range(count)]
                history.final = self.pool.states[self.columns[i][column]].clone()

    def _row(self, i: int, tokens: int, packed: bool) -> PoolRow:
        """Sequence i in a call.  packed: it keeps its last state, in its first slot."""
        columns = self.columns[i]
        writes = columns[:1] if packed else columns[:tokens]
        current = self.current[i]
        if current is None:
            columns = (-1, *columns[1:])  # it begins with zeros
            current = 0
        if packed:
            return row(tokens, columns[current], *writes)
        return PoolRow(tokens, columns, writes, current + 1)

    def check(self) -> None:
        """Every sequence must be as it is alone, from its start.  Raises Broken."""
        histories = [history for history in (*self.ended, *self.histories) if history.outs]
        parts: list[TokenTensors] = []
        outs: list[Tensor] = []
        labels: list[str] = []
        for history in histories:
            first, *_ = history.parts
            parts.append(
                {name: torch.cat([part[name] for part in history.parts]) for name in first}
            )
            outs += history.outs
            labels += history.labels
        plain = self.room.alone(parts, [history.initial for history in histories])
        states = torch.stack([history.final for history in histories])
        output = Output(torch.cat(outs)[None], states)
        last = [history.last for history in histories]
        self.room.compare(plain, output, torch.float32, tokens=labels, states=last)


@dataclass
class PoolHistory:
    """What a sequence has taken: the tokens of each call, and out for them.

    initial, final: the states before and after.  labels: of each token.  last: of the last call.
    """

    initial: Tensor
    final: Tensor
    parts: list[TokenTensors] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    last: str = ""


# --- the laws


def other_slots(room: Room) -> None:
    """An odd number of sequences, in slots in any order, with guards between slots."""
    pool = room.pool(gap=GUARD)
    for slots in ((5, 11, 3, 2, 7), (0, 12, 6)):
        room.check(room.call(pool, rows_of(*slots)))


def padded_rows(room: Room) -> None:
    """Rows with index -1 among others, the first and the last slot in use or not; and before
    others, which begin beyond a block of 16 rows.
    """
    pool = room.pool()
    for slots, padding in (
        ((5, -1, 11, 0, -1, 2, 12, -1), torch.nan),
        ((-1, 5, 11, 3, -1, 2, 7, -1), torch.nan),
        ((5, -1, 11, 3, -1, 2, 7, -1), torch.inf),
        ((*[-1] * 17, 5, 11), torch.nan),
    ):
        room.check(room.call(pool, rows_of(*slots), padding=padding))


def without_tokens(room: Room) -> None:
    """A pack of sequences of 0 to 8 tokens."""
    lengths = (1, 3, 0, 8, 2, 0, 5)
    slots = (4, 9, 0, 12, 1, 7, 10)
    rows = [row(tokens, slot) for tokens, slot in zip(lengths, slots, strict=True)]
    room.check(room.call(room.pool(), rows))


def new_sequences(room: Room) -> None:
    """Sequences that begin with zeros, in slots that held others."""
    _read_and_write(room, (-1, 6), (8, 8), (-1, 0), (3, 5))


def shared_prefix(room: Room) -> None:
    """Several sequences that read one slot and write others, one of which keeps nothing."""
    _read_and_write(room, (3, 1), (8, 0), (3, 5), (3, -1))


def _read_and_write(room: Room, *pairs: tuple[int, int]) -> None:
    """Calls of one and of two tokens, with a sequence for each (slot to read, slot to write)."""
    pool = room.pool()
    for tokens in (1, 2):
        room.check(room.call(pool, [row(tokens, *pair) for pair in pairs]))


def drafted_tokens(room: Room) -> None:
    """A slot for the state after each of five tokens, of which one to five are accepted, twice in a
    row; then a step without drafts, and drafts again.
    """
    chain = Chain(room, count=5, width=5)
    for tokens, accepted in (
        (5, (1, 2, 3, 4, 5)),
        (5, (5, 3, 4, 1, 2)),
        (1, (1, 1, 1, 1, 1)),
        (5, (4, 4, 4, 4, 4)),
    ):
        chain.call(range(5), (tokens,) * 5, accepted)
    chain.check()


def order_and_number(room: Room) -> None:
    """Sequences among others, in another order, and alone."""
    pool = room.pool()
    rows = rows_of(4, 9, 0, 12, 7)
    before = pool.memory.clone()
    whole = room.call(pool, rows)
    expected = room.check(whole)
    for order in ([3, 1, 4, 0, 2], [2], [4, 1]):
        pool.memory.copy_(before)
        parts = {name: tensor[order] for name, tensor in whole.parts.items()}
        out, states = room.check(room.call(pool, [rows[i] for i in order], parts=parts))
        for index, i in enumerate(order):
            changed = _differ(out[0, index], expected[0][0, i])
            changed |= _differ(states[index], expected[1][i])
            if changed and room.implementation.batch_invariant:
                raise Broken(
                    f"call {room.calls}, row {index}, slot {rows[i].read}: other rows change its "
                    "bits, although batch invariance is declared"
                )


def indices(room: Room) -> None:
    """int64, -1 among them, and columns of wider tables."""
    pool = room.pool()
    rows = [row(1, 2, 2), row(1, 12, 1), row(1, 7, 9)]
    room.check(room.call(pool, rows_of(2, -1, 7), index=torch.int64))
    room.check(room.call(pool, rows, index=torch.int64))
    room.check(room.call(pool, rows, wide=True))


def layouts(room: Room) -> None:
    """Gaps between slots, and the last axes exchanged, as servers store K and V."""
    for pool in (room.pool(gap=GUARD), room.pool(turned=True)):
        room.check(room.call(pool, rows_of(2, 0, 7)))


def rounded_once(room: Room) -> None:
    """A pool of 16 bits holds what a pool of 32 bits with the same states would hold, rounded."""
    dtype = torch.bfloat16
    rows = rows_of(9, 4, tokens=16)
    coarse = room.pool(dtype=dtype)
    fine = room.pool()
    fine.states.copy_(coarse.states)
    first = room.call(fine, rows)
    _, exact = room.check(first)
    _, states = room.check(room.call(coarse, rows, parts=first.parts))
    allowed = unit_roundoff(dtype) * exact.abs() + SLACK * exact.abs().amax((-2, -1), keepdim=True)
    beyond = (states - exact).abs() > allowed
    if bool(beyond.any()):
        i, head = beyond.nonzero()[0, :2].tolist()
        raise Broken(
            f"call {room.calls}, row {i}, slot {rows[i].read}, head {head}: {int(beyond.sum()):,} "
            "numbers are further from those of a pool in fp32 than one rounding to bf16"
        )


def far_slots(room: Room) -> None:
    """A pool whose last slot lies 2^31 elements behind the first: 32 bits wrap around."""
    pool = room.pool(slots=3, dtype=torch.bfloat16, far=1 << 30)
    room.check(room.call(pool, rows_of(2, 1)))


def mixed_calls(room: Room) -> None:
    """A chain of calls of chunks, prompts, drafts and steps of some of four sequences, among which
    sequences end and new ones take their slots.
    """
    chain = Chain(room, count=4, width=4)
    rng = chain.rng
    for number in range(CALLS):
        sequences = rng.sample(range(4), rng.randint(2, 4))
        if number % 4 == 0:
            if number:
                chain.renew(sequences[0])
            lengths = rng.sample(range(9), len(sequences))
            chain.call(sequences, lengths, lengths)
        elif number % 4 == 1:
            chain.call(sequences, [4] * len(sequences), [rng.randint(1, 4) for _ in sequences])
        else:
            chain.call(sequences, [1] * len(sequences), [1] * len(sequences))
    chain.check()


def same_tensors(room: Room) -> None:
    """Calls with the same tensors, whose values change between them, as a server's buffers do."""
    static = room.call(room.pool(), rows_of(*range(6)))
    room.run(static)
    change_values(room, static, lambda: room.pool_run(static.inputs, room.precision)[0], times=3)


def replayed_graph(room: Room) -> None:
    """A CUDA graph of a call, replayed with other tokens, slots and numbers of live rows."""
    pool = room.pool()
    graph = torch.cuda.CUDAGraph()
    static = room.call(pool, rows_of(*range(6)))
    before = pool.memory.clone()
    room.run(static)  # compiles
    with torch.cuda.graph(graph):
        out, _ = room.pool_run(static.inputs, room.precision)
    pool.memory.copy_(before)

    def replay() -> Tensor:
        graph.replay()
        return out

    change_values(room, static, replay, times=REPLAYS)


def change_values(room: Room, static: PoolCall, again: Callable[[], Tensor], *, times: int) -> None:
    """Check calls whose values are copied to the tensors of `static`, of six rows.  again: makes
    the call with these tensors, and returns its output.
    """
    pool = static.pool
    rng = random.Random(REPLAYS)

    def call_again(inputs: Inputs, _: object) -> Output:
        tensors = static.inputs.tensors
        for name, tensor in inputs.tensors.items():
            if tensor is not pool.states:
                tensors[name].copy_(tensor)
        return Output(again(), pool.states)

    for _ in range(times):
        slots = rng.sample(range(SLOTS), 6)
        live = rng.randint(1, 6)
        slots[live:] = [-1] * (6 - live)
        room.check(room.call(pool, rows_of(*slots), padding=torch.nan), call_again)


def beside_another_stream(room: Room) -> None:
    """Calls while another stream keeps the GPU busy."""
    pool = room.pool()
    side = torch.cuda.Stream(room.device)  # type: ignore[no-untyped-call]
    busy = torch.randn(4096, 4096, device=room.device)
    for slots in ((5, 11, 3, 2, 7), (0, 12, 6), (8, 4)):
        with torch.cuda.stream(side):
            for _ in range(REPLAYS):
                busy = (busy @ busy).clamp(-1, 1)
        room.check(room.call(pool, rows_of(*slots)))


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
    "the same tensors with other values": same_tensors,
    "a replayed CUDA graph": replayed_graph,
    "beside another stream": beside_another_stream,
}


def applies(implementation: Implementation, inputs: Inputs) -> bool:
    """Whether the laws are tested with this call: of an implementation that servers call on a pool,
    a step, drafted tokens, or a call that begins with slots; any call of a user's kernel that works
    in index, which is for nothing else.
    """
    if implementation.kind == "own":
        return implementation.in_place is not None
    step = inputs.cu_seqlens is None and inputs.length == 1
    serving = step or inputs.state_every == 1 or inputs.state_indices is not None
    return serving and pool_run(implementation) is not None


def try_laws(
    implementation: Implementation, inputs: Inputs, precision: Precision, *, quick: bool
) -> Iterator[Probe]:
    """A probe of each law.  inputs: a call that the implementation computed correctly.  quick:
    without chains of many calls.
    """
    run = pool_run(implementation)
    assert run is not None
    for name, law in LAWS.items():
        room = Room(implementation, run, inputs, precision)
        if quick and law is mixed_calls:
            law = untested
        yield tested(BETWEEN_CALLS + name, partial(_in_room, law, room))


def _in_room(law: Callable[[Room], None], room: Room) -> str:
    """Test the law.  Returns which of its calls were refused; empty if none was.

    Raises NotApplicable if all were, or if the law needs a GPU.
    """
    if law in (replayed_graph, beside_another_stream) and room.device.type != "cuda":
        raise NotApplicable("it needs a GPU")
    try:
        law(room)
    except NotApplicable as refusal:
        if not room.kept:
            raise
        return f"in {room.kept} of its calls: {refusal}"
    return ""
