"""Laws of the states between calls: what a server's calls on a pool of states must do, and what
they must leave alone.

A law makes calls of one implementation on a pool of random states, with random tokens for a layer
of the captured sizes.  Every call is judged in the same way (`Room.check`):

- `out` and the new states are compared with those of the fp64 oracle, for the same tokens and
  initial states without a pool; those of a `Chain` together, after its last call.
- All other bits of the pool's memory, and the call's other tensors, must be what they were before.

So most of the `LAWS` only say in which calls a fault would show.  Limits: docs/serving.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ssdprof import operators
from ssdprof.core.accuracy import Accuracy
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.measure.accuracy import (
    Candidate,
    bits_of,
    changes,
    compare,
    fingerprints,
    oracle_output,
)
from ssdprof.measure.first_run import status_of
from ssdprof.measure.isolate import Packed, packed
from ssdprof.measure.laws import Broken, Skipped, Trial
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.rounding import unit_roundoff
from ssdprof.operators.serving import PoolRun, pool_run
from ssdprof.operators.tensors import dtype_name

SLOTS = 13  # of a pool, unless a law needs others
# Bits of a signalling NaN.  Arithmetic makes a quiet NaN of it, so that a guard that was read and
# written back has changed.
SIGNALLING = {torch.float32: 0x7FA00000, torch.bfloat16: 0x7FA0}
# elements of a gap between two slots; the guards before and behind the slots are longer by a slot
GUARD_ELEMENTS = 64
STREAM = 256  # random tokens, which calls use one after the other
NO_SLOT = -(1 << 20)  # index in those columns of a wider table that do not belong to the call
MIXED_CALLS = 64  # calls in the chain of `mixed_calls`
REPLAYS = 10  # replays of a CUDA graph, or calls on the same tensors
STATIC_ROWS = 6  # of such a call
PRODUCTS = 10  # products of matrices that keep another stream busy during a call
SLACK = 2.0**-12  # tolerance of `rounded_once`, relative to the largest number of a head's state
TokenTensors = dict[str, Tensor]  # the tensors of some tokens, by name


# --- calls


@dataclass(frozen=True)
class PoolRow:
    """A sequence of a call on a pool.

    tokens: number of tokens.
    columns: slots.  The sequence begins with columns[accepted - 1], or with zeros if that is -1.
    writes: the slot of the final state, or one slot for the state after each token; -1: that state
        is not kept; (): the final state replaces the initial one.
    accepted: number of the tokens of the previous call that were accepted, from 1.
    """

    tokens: int
    columns: tuple[int, ...]
    writes: tuple[int, ...] = ()
    accepted: int = 1

    @property
    def read(self) -> int:
        """The slot of the initial state; -1: zeros."""
        return self.columns[self.accepted - 1]

    @property
    def kept(self) -> dict[int, int]:
        """Index of a token -> the slot of the state after it, for states that are kept."""
        slots = self.writes or (self.read,)
        first = self.tokens - len(slots)
        return {first + i: slot for i, slot in enumerate(slots) if slot >= 0 and self.tokens}

    @property
    def live(self) -> bool:
        """Whether the row has tokens and is no padding."""
        return self.tokens > 0 and (self.read >= 0 or bool(self.kept))

    @property
    def as_padding(self) -> PoolRow:
        """A row with as many tokens and slots, all slots -1, that neither reads nor writes."""
        return PoolRow(self.tokens, (-1,) * len(self.columns), (-1,) * len(self.writes))


def row_of(tokens: int, read: int, *writes: int) -> PoolRow:
    """A sequence that begins with the slot `read`.  writes: see `PoolRow`."""
    return PoolRow(tokens, (read,), writes)


def rows_of(*slots: int, tokens: int = 1) -> list[PoolRow]:
    """Sequences that begin with these slots, and write their final states into the same slots."""
    return [row_of(tokens, slot) for slot in slots]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool of states, between guards.

    states: (slots, heads, ...).
    memory: all elements, from the first guard to the last, of which `states` is a view; empty for a
        pool that is too large to be compared.
    """

    states: Tensor
    memory: Tensor

    def changed(self, before: Tensor, written: Sequence[int]) -> str:
        """The first place outside of the written slots whose bits have changed, in words; empty if
        there is none, and for a pool that is too large to be compared.

        before: a copy of `memory` before the call.
        written: the slots that the call may write.
        """
        states = self.states
        protected = torch.ones_like(self.memory, dtype=torch.bool)
        if not len(protected):
            return ""
        in_slots = protected.as_strided(states.shape, states.stride(), states.storage_offset())
        in_slots[written] = False
        differs = protected & (bits_of(self.memory) != bits_of(before))
        if not bool(differs.any()):
            return ""
        index = int(differs.byte().argmax()) - int(states.storage_offset())
        slot, inside = divmod(index, states.stride(0))
        head = inside // states.stride(1)
        if slot < 0:
            return "the memory before the first slot"
        if slot >= len(states):
            return "the memory behind the last slot"
        words = [f"slot {slot}, head {head}"]
        if head >= states.shape[1]:  # in the gap before the next slot
            words = [f"the memory behind slot {slot}"]
        if slot == 0:
            words.append("the first slot")
        if slot == len(states) - 1:
            words.append("the last slot")
        if slot - 1 in written or slot + 1 in written:
            words.append("beside one that is written")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class PoolCall:
    """A call on a pool.

    rows: its sequences.
    token_tensors: the tensors of all their tokens: (rows, tokens, ...), or (1, tokens of all rows,
        ...) if they are packed.
    inputs: the inputs of the call: these tensors, the pool, and the indices of the slots.
    """

    rows: Sequence[PoolRow]
    pool: Pool
    token_tensors: TokenTensors
    inputs: Inputs

    @property
    def live(self) -> list[tuple[int, PoolRow]]:
        """The live rows, each with its index in the call."""
        return [(i, row) for i, row in enumerate(self.rows) if row.live]

    @property
    def written(self) -> list[int]:
        """The slots that the live rows write."""
        slots: list[int] = []
        for _, row in self.live:
            slots += row.kept.values()
        return slots

    def of_row(self, i: int, tensor: Tensor) -> Tensor:
        """Row i of a tensor that has the form of `token_tensors`, (tokens, ...)."""
        start = sum(row.tokens for row in self.rows[:i])
        return tensor.flatten(0, 1)[start : start + self.rows[i].tokens]

    def tokens_of(self, i: int, count: int | None = None) -> TokenTensors:
        """The tensors of the first `count` tokens of row i, (count, ...); None: of all."""
        return {name: self.of_row(i, tensor)[:count] for name, tensor in self.token_tensors.items()}

    def initial(self, read: int) -> Tensor:
        """The state in the slot `read`, (heads, ...), fp32; zeros for -1."""
        states = self.pool.states
        return states[read].float() if read >= 0 else torch.zeros_like(states[0]).float()


# --- the room in which laws make their calls


class Room:
    """Makes and judges the calls of one law.

    pool_run: calls the implementation on a pool.
    by_call: whether each call of a `Chain` is judged, too, as if it were alone.
    calls: the number of calls so far, a refused or wrong one included.
    harmless: the number of those that returned the pool and `out` in its form, and left alone what
        they must.
    latest: the latest call; a copy of its pool before it, with the layout (`packed`); and its
        output, None if it returned none of that form.
    """

    def __init__(self, trial: Trial, *, by_call: bool = False) -> None:
        """trial: the implementation, which has a `pool_run`, and the captured call, from which all
        calls have their sizes, dtypes and options.
        """
        run = pool_run(trial.implementation)
        assert run is not None
        self.implementation = trial.implementation
        self.precision = trial.precision
        self.pool_run: PoolRun = run
        self.watched = trial.watched
        self.by_call = by_call
        like = trial.whole
        self._states = like.STATES  # the name of the initial states
        absent = ("state_indices", "write_indices", "accepted", "cu_seqlens", self._states)
        # the captured call, without what says where its sequences and states are
        self._like = replace(like, **dict.fromkeys(absent), state_every=0)
        self.device: torch.device = like.device
        self._taken = 0  # tokens of the stream that calls have used
        self.calls = 0
        self.harmless = 0
        self.latest: tuple[PoolCall, Packed, Output | None] | None = None

    @cached_property
    def _stream(self) -> TokenTensors:
        """Random tokens of the layer's sizes (1, STREAM, ...), with the captured call's dtypes."""
        operator = operators.get(self._like.operator)
        like = self._like
        cell = Cell(
            shape=operator.generated.shape("pool", *like.sizes.values()),
            dtype=dtype_name(like.values.dtype),  # type: ignore[arg-type]
            layout="views",
            tokens=Tokens(sequences=1, seqlen=STREAM),
        )
        generated = operator.binding.positional(operator.generated.draw(cell, self.device))
        values = generated[like.VALUES]
        # What the generator leaves out is a gate of the output, which has the form of the values.
        # They are flipped, so that a gate in place of the values is found.
        return {
            name: generated.get(name, values.flip(1)).to(tensor.dtype)
            for name, tensor in operator.binding.positional(like).items()
        }

    def take(self, batch: int, count: int) -> TokenTensors:
        """Views of the stream's next tokens, at most STREAM, as (batch, count, ...); if too few are
        left, of the first.
        """
        if self._taken + batch * count > STREAM:
            self._taken = 0
        tokens = slice(self._taken, self._taken + batch * count)
        self._taken += batch * count
        return {
            name: tensor[0, tokens].view(batch, count, *tensor.shape[2:])
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
        """A pool of random states, the same for the same arguments, between guards of NaN.  Raises
        Skipped without enough memory.  Before the first slot there is memory for another one, which
        some libraries use for padding.

        gap: elements between slots.
        turned: whether the last two dimensions are exchanged in memory; None: as the implementation
            needs it.
        far: elements from one slot to the next; 0: slots are as close as `gap` says.  As many
            elements lie before the first slot as from it to the end of the last, and behind that,
            so that an offset that wraps around stays in the memory.  Hardly any of it is touched,
            and it has no guards.
        """
        heads, rows, columns = self._like.states_shape[1:]
        turned = self.implementation.turned_pools if turned is None else turned
        inner = (heads, columns, rows) if turned else (heads, rows, columns)  # of a slot, in memory
        stride = far or math.prod(inner) + gap
        before = stride + GUARD_ELEMENTS  # elements before the first slot, and behind the last
        if far:
            before = slots * far
        try:
            memory = torch.empty(2 * before + slots * stride, dtype=dtype, device=self.device)
        except RuntimeError:  # torch.OutOfMemoryError is one
            raise Skipped("there is not enough memory", "not tested") from None
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
        token_tensors: TokenTensors | None = None,
        padding: float | None = None,
        index: torch.dtype = torch.int32,
        wide: bool = False,
    ) -> PoolCall:
        """A call of these rows: side by side if all have the same number of tokens, else packed.

        rows: all with the same numbers of columns and of writes.
        token_tensors: the tensors of the tokens; None: the next tokens of the stream.
        padding: the number that fills the tokens of rows that are not live, if rows are side by
            side; None: they stay as they are.
        index: dtype of the indices.
        wide: whether the indices are columns of wider tables.
        """
        counts = [row.tokens for row in rows]
        is_packed = len(set(counts)) > 1
        if token_tensors is None:
            form = (1, sum(counts)) if is_packed else (len(rows), counts[0])
            token_tensors = self.take(*form)
        if padding is not None:
            token_tensors = {name: tensor.clone() for name, tensor in token_tensors.items()}
            for tensor in token_tensors.values():
                tensor[[i for i, row in enumerate(rows) if not row.live]] = padding

        def table(values: Sequence[Sequence[int]]) -> Tensor:
            """The indices as a tensor (rows, columns), or (rows) if there is a single column."""
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
        if is_packed:
            tensors["cu_seqlens"] = self._bounds(counts)
        inputs = replace(self._like, **token_tensors, **tensors)
        return PoolCall(rows=rows, pool=pool, token_tensors=token_tensors, inputs=inputs)

    def _bounds(self, counts: Sequence[int]) -> Tensor:
        """`cu_seqlens` of packed sequences with these numbers of tokens."""
        bounds = [0, *accumulate(counts)]
        return torch.tensor(bounds, dtype=torch.int32, device=self.device)

    # --- judging

    def check(self, call: PoolCall, run: PoolRun | None = None) -> Output:
        """Make the call and judge it.  Returns the live rows' `out`, packed, and their states.

        run: is called instead of the implementation; None: the implementation is.
        Raises Broken if the output is outside its budget, and what `run` raises.
        """
        plain = self.plain(call)
        return self.judge(call, plain, self.run(call, run))

    def plain(self, call: PoolCall) -> Inputs:
        """The live rows of a call, packed, without a pool.  The call must not have been made yet,
        because it may overwrite the initial states.
        """
        return self.without_pool(
            [call.tokens_of(i) for i, _ in call.live],
            [call.initial(row.read) for _, row in call.live],
            every_state=max(len(row.writes) for _, row in call.live) > 1,
        )

    def judge(self, call: PoolCall, plain: Inputs, out: Tensor) -> Output:
        """Judge the latest call by its `out` and by the pool.  Returns the same as `check`.

        plain: what `plain` returned for the call.
        """
        live_out = torch.cat([call.of_row(i, out) for i, _ in call.live])[None]
        token_names: list[str] = []
        for i, row in call.live:
            label = f"call {self.calls}, row {i}"
            token_names += [f"{label}, token {token}" for token in range(row.tokens)]
        states, state_names = self._kept_states(call, plain)
        output = Output(live_out, states)
        dtype = call.pool.states.dtype
        self.judge_output(plain, output, dtype, token_names=token_names, state_names=state_names)
        return output

    def _kept_states(self, call: PoolCall, plain: Inputs) -> tuple[Tensor, list[str]]:
        """The states of the live rows, (states, heads, ...), fp32, as the pool has them now, and a
        label for each: "call 3, row 1, slot 11".

        plain: the same sequences without a pool.  In place of a state that is not kept, the
        oracle's is returned, which cannot be wrong.  Its label says "slot None".
        """
        states = torch.empty(plain.final_shape, device=self.device)
        state_names: list[str] = []
        dropped: list[int] = []  # indices of states that are not kept
        for i, row in call.live:
            tokens = range(row.tokens)
            if not plain.state_every:
                tokens = tokens[-1:]
            for token in tokens:
                slot = row.kept.get(token)
                if slot is None:
                    dropped.append(len(state_names))
                else:
                    states[len(state_names)] = call.pool.states[slot].float()
                state_names.append(f"call {self.calls}, row {i}, slot {slot}")
        if dropped:
            _, exact_states = oracle_output(plain)
            states[dropped] = exact_states[dropped]
        return states, state_names

    def run(self, call: PoolCall, run: PoolRun | None = None) -> Tensor:
        """Make the call, and return `out`.  run: see `check`.

        Raises Broken if the call fails, returns something else than the pool and `out` in its form,
        or changes what it must not; Skipped if the implementation refuses it, or without enough
        memory; MissingCapabilityError if a fault made the GPU unusable.
        """
        self.calls += 1
        pool = call.pool
        memory_before = pool.memory.clone()
        before = packed(pool.states)
        self.latest = call, before, None
        tensors = call.inputs.tensors
        del tensors[self._states]  # the pool, which the call may write
        original_bits = fingerprints(tensors)
        try:
            with self.watched(call.inputs):
                out, returned = (run or self.pool_run)(call.inputs, self.precision)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        except Exception as error:
            status, reason = status_of(error, self.device, self.implementation.name)
            if status == "refused":
                raise Skipped(reason) from None
            if status == "out of memory":
                raise Skipped(reason, "not tested") from None
            raise Broken(f"call {self.calls}: {reason}") from None
        values = call.token_tensors[self._like.VALUES]
        if returned is not pool.states:
            fault = "it returns another tensor than the pool"
        elif (out.shape, out.dtype) != (values.shape, values.dtype):
            fault = f"out is {out.dtype} of shape {tuple(out.shape)}"
        else:
            fault = changes(original_bits, tensors)
            place = pool.changed(memory_before, call.written)
            if place and not fault:
                fault = f"it changes {place}, which no row writes"
            self.latest = call, before, Output(out, pool.states)
        if fault:
            raise Broken(f"call {self.calls}: {fault}")
        self.harmless += 1
        return out

    def without_pool(
        self, parts: Sequence[TokenTensors], initial: Sequence[Tensor], *, every_state: bool = False
    ) -> Inputs:
        """Inputs of packed sequences without a pool.

        parts: the tensors of each sequence's tokens.  initial: the initial state of each.
        every_state: their output has the state after each token, not only the final states.
        """
        tensors = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
        tensors[self._states] = torch.stack(list(initial))
        counts = [len(part[self._like.VALUES]) for part in parts]
        return replace(
            self._like, **tensors, cu_seqlens=self._bounds(counts), state_every=int(every_state)
        )

    def judge_output(
        self,
        plain: Inputs,
        output: Output,
        state_dtype: torch.dtype,
        *,
        token_names: Sequence[str],
        state_names: Sequence[str],
    ) -> None:
        """Judge an output by the oracle's.

        plain: the inputs without a pool.  state_dtype: that of the pool.
        token_names, state_names: the names of all tokens and of all states in messages.

        Raises Broken if the output is not within its budget.  The message names the first token or
        state that is not finite; if all are, the first of the worst head that is beyond the budget
        in the maximum norm, or else that with the largest error.
        """
        candidate = Candidate(
            output=output,
            precision=replace(self.precision, state_dtype=state_dtype),
            cuts=self.implementation.cuts_operands,
        )
        wrong = [accuracy for accuracy in compare(plain, {"": candidate})[""] if accuracy.reason]
        if not wrong:
            return
        accuracy = wrong[0]
        exact_out, exact_states = oracle_output(plain)
        error = accuracy.vs_oracle
        position = error.first_nonfinite or error.worst_position
        if accuracy.tensor == "out":  # (1, tokens, heads, ...)
            names = token_names
            position = position[1:]
            errors = (output.out.float() - exact_out.float())[0]
        else:  # (states, heads, ...)
            names = state_names
            errors = output.final_states.float() - exact_states.float()
        if not error.nonfinite:
            position = _first_beyond(accuracy, errors) or position
        index, head, *_ = position
        raise Broken(f"{names[index]}, head {head}: {accuracy.reason}")


def _first_beyond(accuracy: Accuracy, errors: Tensor) -> tuple[int, int] | None:
    """The head that uses most of its budget in the maximum norm, and its first token or state that
    is beyond the budget, as (token or state, head); None if there is none.

    errors: (tokens or states, heads, ...).
    """
    for use in accuracy.budget:
        beyond = errors[:, use.head].abs().flatten(1).amax(1) > use.budget
        if use.norm == "max" and bool(beyond.any()):
            return int(beyond.byte().argmax()), use.head
    return None


def _differ(first: Tensor, second: Tensor) -> bool:
    """Whether any bit of two tensors of one form differs."""
    return not torch.equal(bits_of(first), bits_of(second))


class Chain:
    """Several calls of some sequences on one pool, where each has several slots, in no order.

    columns: the slots of each sequence.
    current: for each sequence, the column of its state; None: it is new, and begins with zeros.
    histories: the tokens and outputs of each sequence.  ended: of sequences that have ended.
    """

    def __init__(self, room: Room, count: int, width: int) -> None:
        """count: number of sequences.  width: slots of each."""
        self.room = room
        self.rng = random.Random(count)
        slots = self.rng.sample(range(count * width + 2), count * width)
        self.columns = [tuple(slots[width * i : width * (i + 1)]) for i in range(count)]
        self.pool = room.pool(slots=count * width + 2)
        self.current: list[int | None] = [0] * count
        initial = [self.pool.states[columns[0]].clone() for columns in self.columns]
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
        """Make a call of some of the sequences, and add it to their histories.  If it is skipped
        (`Room.run`), the calls before it are compared with the oracle.

        sequences: their indices.
        tokens: the number of tokens of each.  If all have the same number, the state after each
            token is kept, and the call has a padded row.  Otherwise they are packed.
        accepted: the number of these tokens that are accepted, in a packed call all.  The sequence
            continues after them.
        """
        is_packed = len(set(tokens)) > 1
        rows = [self._row(i, count, is_packed) for i, count in zip(sequences, tokens, strict=True)]
        padding = None
        if not is_packed:
            rows.append(rows[0].as_padding)
            padding = torch.nan
        call = self.room.call(self.pool, rows, padding=padding, wide=True)
        plain = self.room.plain(call) if self.room.by_call else None
        try:
            out = self.room.run(call)
        except Skipped:
            self.check()
            raise
        if plain is not None:
            self.room.judge(call, plain, out)
        for index, (i, count) in enumerate(zip(sequences, accepted, strict=True)):
            if rows[index].live:
                column = 0 if is_packed else count - 1
                self.current[i] = column
                history = self.histories[i]
                history.parts.append(call.tokens_of(index, count))
                history.outs.append(call.of_row(index, out)[:count])
                history.last = f"call {self.room.calls}, row {index}"
                history.labels += [f"{history.last}, token {token}" for token in range(count)]
                history.final = self.pool.states[self.columns[i][column]].clone()

    def _row(self, i: int, tokens: int, is_packed: bool) -> PoolRow:
        """Sequence i in a call.

        is_packed: only its final state is kept, in its first slot; else that after each token is.
        """
        columns = self.columns[i]
        writes = columns[:1] if is_packed else columns[:tokens]
        current = self.current[i]
        if current is None:
            columns = (-1, *columns[1:])  # it begins with zeros
            current = 0
        if is_packed:
            return row_of(tokens, columns[current], *writes)
        return PoolRow(tokens, columns, writes, current + 1)

    def check(self) -> None:
        """Compare every sequence that has tokens with the oracle, as one call from its first token.
        Raises Broken if an output is wrong.
        """
        histories = [history for history in (*self.ended, *self.histories) if history.outs]
        if not histories:
            return
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
        plain = self.room.without_pool(parts, [history.initial for history in histories])
        states = torch.stack([history.final for history in histories])
        output = Output(torch.cat(outs)[None], states)
        last = [history.last for history in histories]
        self.room.judge_output(plain, output, torch.float32, token_names=labels, state_names=last)


@dataclass
class PoolHistory:
    """The accepted tokens of a sequence, and its outputs.

    initial, final: the state before the first and after the last token, (heads, ...).
    parts, outs: of each call, the tensors of the tokens, and `out` for them, (tokens, ...).
    labels: the name of each token in messages.  last: that of the latest call, with the row in it.
    """

    initial: Tensor
    final: Tensor
    parts: list[TokenTensors] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    last: str = ""


# --- the laws


def other_slots(room: Room) -> None:
    """An odd number of sequences, whose slots lie in any order, with guards between the slots."""
    pool = room.pool(gap=GUARD_ELEMENTS)
    for slots in ((5, 11, 3, 2, 7), (0, 12, 6)):
        room.check(room.call(pool, rows_of(*slots)))


def padded_rows(room: Room) -> None:
    """Padded rows, with index -1, among others, where the first and the last slot are in use or
    not; and so many before others that these are beyond a block of 16 rows.
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
    rows = [row_of(tokens, slot) for tokens, slot in zip(lengths, slots, strict=True)]
    room.check(room.call(room.pool(), rows))


def new_sequences(room: Room) -> None:
    """Sequences that begin with zeros, in slots that held others."""
    _read_and_write(room, (-1, 6), (8, 8), (-1, 0), (3, 5))


def shared_prefix(room: Room) -> None:
    """Several sequences that begin with the same slot and write others; one keeps no state."""
    _read_and_write(room, (3, 1), (8, 0), (3, 5), (3, -1))


def _read_and_write(room: Room, *pairs: tuple[int, int]) -> None:
    """Calls of one and of two tokens, with a sequence for each (slot to read, slot to write)."""
    pool = room.pool()
    for tokens in (1, 2):
        room.check(room.call(pool, [row_of(tokens, *pair) for pair in pairs]))


def drafted_tokens(room: Room) -> None:
    """Calls on five drafted tokens with a slot for the state after each, of which one to five are
    accepted, twice in a row; then a step without drafts, and drafts again.
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
    """The same sequences in another order, and with fewer others.

    Their bits may change, unless the implementation declares batch invariance.
    """
    pool = room.pool()
    rows = rows_of(4, 9, 0, 12, 7)
    before = pool.memory.clone()
    whole = room.call(pool, rows)
    expected_out, expected_states = room.check(whole)
    for order in ([3, 1, 4, 0, 2], [2], [4, 1]):
        pool.memory.copy_(before)
        tensors = {name: tensor[order] for name, tensor in whole.token_tensors.items()}
        call = room.call(pool, [rows[i] for i in order], token_tensors=tensors)
        out, states = room.check(call)
        for index, i in enumerate(order):
            changed = _differ(out[0, index], expected_out[0, i])
            changed |= _differ(states[index], expected_states[i])
            if changed and room.implementation.batch_invariant:
                raise Broken(
                    f"call {room.calls}, row {index}, slot {rows[i].read}: other rows change its "
                    "bits, although batch invariance is declared"
                )


def indices(room: Room) -> None:
    """Indices in int64, with -1 among them, and indices that are columns of wider tables."""
    pool = room.pool()
    rows = [row_of(1, 2, 2), row_of(1, 12, 1), row_of(1, 7, 9)]
    room.check(room.call(pool, rows_of(2, -1, 7), index=torch.int64))
    room.check(room.call(pool, rows, index=torch.int64))
    room.check(room.call(pool, rows, wide=True))


def layouts(room: Room) -> None:
    """Pools with gaps between slots, and with the last two dimensions exchanged in memory."""
    for pool in (room.pool(gap=GUARD_ELEMENTS), room.pool(turned=True)):
        room.check(room.call(pool, rows_of(2, 0, 7)))


def rounded_once(room: Room) -> None:
    """A call on a pool in bf16 leaves the states that a call on the same pool in fp32 leaves,
    rounded once.
    """
    dtype = torch.bfloat16
    rows = rows_of(9, 4, tokens=16)
    coarse = room.pool(dtype=dtype)
    fine = room.pool()
    fine.states.copy_(coarse.states)
    first = room.call(fine, rows)
    _, exact = room.check(first)
    _, states = room.check(room.call(coarse, rows, token_tensors=first.token_tensors))
    allowed = unit_roundoff(dtype) * exact.abs() + SLACK * exact.abs().amax((-2, -1), keepdim=True)
    beyond = (states - exact).abs() > allowed
    if bool(beyond.any()):
        i, head = beyond.nonzero()[0, :2].tolist()
        raise Broken(
            f"call {room.calls}, row {i}, slot {rows[i].read}, head {head}: {int(beyond.sum()):,} "
            "numbers are further from those of a pool in fp32 than one rounding to bf16"
        )


def far_slots(room: Room) -> None:
    """A pool whose last slot is 2^31 elements behind the first: offsets in 32 bits wrap around."""
    pool = room.pool(slots=3, dtype=torch.bfloat16, far=1 << 30)
    room.check(room.call(pool, rows_of(2, 1)))


def mixed_calls(room: Room) -> None:
    """A chain of calls of some of four sequences: packed chunks of 0 to 8 tokens, drafted tokens,
    and single steps.  Sequences end, and new ones take their slots.
    """
    chain = Chain(room, count=4, width=4)
    rng = chain.rng
    for number in range(MIXED_CALLS):
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
    static = room.call(room.pool(), rows_of(*range(STATIC_ROWS)))
    room.run(static)
    change_values(room, static, lambda: room.pool_run(static.inputs, room.precision)[0])


def replayed_graph(room: Room) -> None:
    """A CUDA graph of a call, replayed with other tokens, slots and numbers of live rows."""
    pool = room.pool()
    graph = torch.cuda.CUDAGraph()
    static = room.call(pool, rows_of(*range(STATIC_ROWS)))
    before = pool.memory.clone()
    room.run(static)  # compiles the kernels, which must not happen while the graph is captured
    with torch.cuda.graph(graph):
        out, _ = room.pool_run(static.inputs, room.precision)
    pool.memory.copy_(before)

    def replay() -> Tensor:
        graph.replay()
        return out

    change_values(room, static, replay)


def change_values(room: Room, static: PoolCall, again: Callable[[], Tensor]) -> None:
    """Check several calls on the tensors of one call, with other tokens, slots and numbers of live
    rows each time.

    static: the call, of STATIC_ROWS rows, whose tensors are overwritten.  again: makes the call
    with these tensors, and returns `out`.
    """
    pool = static.pool
    rng = random.Random(10)  # any seed

    def call_again(inputs: Inputs, _precision: object) -> Output:
        tensors = static.inputs.tensors
        for name, tensor in inputs.tensors.items():
            if tensor is not pool.states:
                tensors[name].copy_(tensor)
        return Output(again(), pool.states)

    for _ in range(REPLAYS):
        slots = rng.sample(range(SLOTS), STATIC_ROWS)
        live = rng.randint(1, STATIC_ROWS)
        slots[live:] = [-1] * (STATIC_ROWS - live)
        room.check(room.call(pool, rows_of(*slots), padding=torch.nan), call_again)


def beside_another_stream(room: Room) -> None:
    """Calls while another stream keeps the GPU busy."""
    pool = room.pool()
    side = torch.cuda.Stream(room.device)  # type: ignore[no-untyped-call]
    busy = torch.randn(4096, 4096, device=room.device)
    for slots in ((5, 11, 3, 2, 7), (0, 12, 6), (8, 4)):
        with torch.cuda.stream(side):
            for _ in range(PRODUCTS):
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
    f"{MIXED_CALLS} mixed calls": mixed_calls,
    "the same tensors with other values": same_tensors,
    "a replayed CUDA graph": replayed_graph,
    "beside another stream": beside_another_stream,
}
CHAINS = (drafted_tokens, mixed_calls)  # their calls are judged together, after the last one
ON_GPU = (replayed_graph, beside_another_stream)
SLOW = f"{MIXED_CALLS} mixed calls"  # for Triton's interpreter, unless all laws are asked for
