"""The base class of the inputs of all operators: checks, sequences, and the signature of a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import Field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

Scalar = int | float | bool | str | tuple[float, ...] | None
# of the tensor FIRST; other tensors may also be fp64, unless they share its dtype
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensor_signature(tensor: Tensor | None) -> Hashable:
    """The properties of a tensor that determine which kernels support it and what Triton compiles
    for it; None for None.  Equal for tensors that differ only in their values, and in their
    addresses by a multiple of 16 bytes.
    """
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


class Output(NamedTuple):
    """The result of a call.

    out: the output, in the shape and dtype of the values, x or v.
    final_states: the states, in the shape `Inputs.final_shape`; the pool itself after a call in
        place.  Bundled implementations return states in fp32, or the pool in its dtype.
    """

    out: Tensor
    final_states: Tensor


class Inputs:
    """The base of an operator's inputs, a frozen dataclass of tensors and scalars.

    operator: name of the operator.
    FIRST: name of the tensor that determines batch, length, dtype and device.
    VALUES: name of the values, in the shape of the output.
    STATES: name of the initial states; empty if the operator has none.
    state_every: number of positions after which a state of every sequence is returned, besides its
        state at the end; 0: only the states at the end are returned.  With packed sequences it is 0
        or 1.  Implementations that do not keep these states (`Implementation.keeps`) refuse; a
        report calls them once for each state.
    state_indices: (sequences) int32 or int64, for initial states that are a pool: the slot of the
        pool with which each sequence begins.  None: sequence i begins with row i.  The host does
        not read the values.  Implementations that do not read pools (`Implementation.pools`)
        refuse; a report gives them copies of the rows, and times the copying.

    A call in place (`Implementation.in_place`) writes new states to slots of the pool, rounded
    once, and returns the pool.  It changes nothing else in the pool.  All slots to which it writes
    must differ.  An empty sequence writes nothing.  Only such a call takes these values:

    state_indices: also (sequences, columns): sequence i begins with the slot in column
        accepted[i] - 1.  The slot -1 means that it begins with zeros.
    accepted: (sequences) int32 or int64, 1 to columns.
    write_indices: None: the final state goes to the slot that was read.  (sequences): it goes to
        this slot.  (sequences, T): the state after token t of sequence i goes to slot
        write_indices[i, t]; T is at least the number of tokens of the longest sequence, which is
        not checked for packed sequences.  A state with slot -1 is dropped.  A sequence that neither
        reads nor writes is padding, whose tokens may be NaN.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    operator: ClassVar[str]
    FIRST: ClassVar[str]
    VALUES: ClassVar[str]
    STATES: ClassVar[str] = ""
    cu_seqlens: Tensor | None = None
    state_every: int = 0
    state_indices: Tensor | None = None
    write_indices: Tensor | None = None
    accepted: Tensor | None = None

    @classmethod
    def unchecked(cls, **values: object) -> Self:
        """Inputs from fields by name, without a check, for a caller that has checked a call of this
        signature, or calls `check` later.
        """
        inputs = object.__new__(cls)
        inputs.__dict__.update(values)
        return inputs

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError, which names an argument that does not fit the others.  Each operator
        defines it.
        """

    @property
    def _first(self) -> Tensor:
        """The tensor FIRST."""
        first: Tensor = getattr(self, self.FIRST)
        return first

    @property
    def values(self) -> Tensor:
        """The tensor VALUES, x or v."""
        values: Tensor = getattr(self, self.VALUES)
        return values

    @property
    def initial(self) -> Tensor | None:
        """The initial state of each sequence, in the shape `states_shape`; from a pool they are
        copied.  None stands for zeros.  Not for a call in place whose state_indices have columns or
        slots -1.
        """
        states: Tensor | None = getattr(self, self.STATES) if self.STATES else None
        if states is None or self.state_indices is None:
            return states
        return states[self.state_indices.long()]

    @property
    def linear(self) -> dict[str, Tensor]:
        """The values and the initial states, or the pool, if there are any, by name.  The operator
        is linear in them: if all of them are multiplied by a number, so is the output.
        """
        tensors = self.tensors
        return {name: tensors[name] for name in (self.VALUES, self.STATES) if name in tensors}

    def after(self, states: Tensor | None) -> Self:
        """The inputs with other initial states, one for each sequence, and without a pool.  None
        stands for zeros.  Raises ValueError if the states do not fit.
        """
        return replace(
            self,
            **{self.STATES: states},
            **dict.fromkeys(("state_indices", "write_indices", "accepted")),
        )

    def _check(self, name: str, shape: tuple[int, ...], *, same_dtype: bool = False) -> None:
        """Raises ValueError unless the tensor is None or has this shape, and one of INPUT_DTYPES or
        fp64.

        same_dtype: whether it must have the dtype of the tensor FIRST.
        """
        tensor = getattr(self, name)
        dtype = self._first.dtype
        if tensor is None:
            return
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")
        if same_dtype and tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} as {self.FIRST} is, not {tensor.dtype}")
        if tensor.dtype not in (*INPUT_DTYPES, torch.float64):
            raise ValueError(
                f"{name} must be float64, float32, float16 or bfloat16, not {tensor.dtype}"
            )

    def _check_sequences(self) -> None:
        """Raises ValueError if `state_every`, the slots or cu_seqlens do not fit the tensors.  The
        values of slots and of cu_seqlens are not read.
        """
        if self.state_every < 0 or (self.state_every > 1 and self.cu_seqlens is not None):
            raise ValueError(
                f"state_every must be 0 or 1, or more without cu_seqlens, not {self.state_every}"
            )
        slots = self.state_indices
        if slots is None and not (self.write_indices is None and self.accepted is None):
            raise ValueError("write_indices and accepted need state_indices")
        if slots is not None:
            pool = getattr(self, self.STATES)
            if pool is None or pool.ndim == 0 or len(pool) == 0:
                raise ValueError(f"state_indices needs {self.STATES}, a pool of states")
            self._check_indices("state_indices", (1,) if self.accepted is None else (2,))
            self._check_indices("accepted", (1,))
            self._check_indices("write_indices", (1, 2))
            table = self.write_indices if self.cu_seqlens is None else None
            if table is not None and table.ndim == 2 and table.shape[1] < self.length:
                raise ValueError(f"write_indices needs a column for each of {self.length} tokens")
        if self.cu_seqlens is None:
            return
        if self._first.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs a batch of 1, not {self._first.shape[0]}")
        if self.cu_seqlens.ndim != 1 or len(self.cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens must be (sequences + 1), not {tuple(self.cu_seqlens.shape)}"
            )
        if self.cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"cu_seqlens must be int32 or int64, not {self.cu_seqlens.dtype}")

    def _check_indices(self, name: str, dims: tuple[int, ...]) -> None:
        """Raises ValueError unless a tensor of indices is None, or has int32 or int64 numbers, a
        row for each sequence, and one of the numbers of dimensions `dims`.
        """
        indices = getattr(self, name)
        if indices is None:
            return
        has_integers = indices.dtype in (torch.int32, torch.int64)
        if not has_integers or indices.ndim not in dims or len(indices) != self.sequences:
            shapes = {1: f"({self.sequences},)", 2: f"({self.sequences}, columns)"}
            wanted = " or ".join(shapes[count] for count in dims)
            raise ValueError(
                f"{name} must be {wanted}, int32 or int64, "
                f"not {tuple(indices.shape)} {indices.dtype}"
            )

    def _check_devices(self) -> None:
        """Raises ValueError for tensors on several devices."""
        for name, tensor in self.tensors.items():
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, {self.FIRST} on {self.device}")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are tensors, by name, without those that are None."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def scalars(self) -> dict[str, Scalar]:
        """The arguments that are not tensors, without those that are None."""
        return {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), (int, float, str, tuple))
        }

    @property
    def form(self) -> Hashable:
        """A key made of the class of the inputs, their scalars, and the names, shapes, strides and
        dtypes of their tensors.
        """
        tensor_forms = (
            (name, tensor.shape, tensor.stride(), tensor.dtype)
            for name, tensor in self.tensors.items()
        )
        return (type(self), *tensor_forms, *self.scalars.items())

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._first.device

    @property
    def length(self) -> int:
        """Positions of one row of the batch; if sequences are packed, of all of them together."""
        return self._first.shape[1]

    @property
    def sequences(self) -> int:
        """The number of independent sequences: rows of the batch, or packed sequences."""
        return self._first.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def slots_read(self) -> Tensor | None:
        """The slot of the pool with which each sequence begins, (sequences), where -1 stands for
        zeros; None without a pool.
        """
        slots = self.state_indices
        if slots is None or self.accepted is None:
            return slots
        return slots.gather(1, self.accepted.long()[:, None] - 1)[:, 0]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a layer, by the operator's names for them."""
        raise NotImplementedError

    @property
    def final_shape(self) -> tuple[int, ...]:
        """The shape of the final states of a call that is not in place.  With `state_every` they
        have a row for each state, sequence after sequence; the last state of a sequence is its
        final one, and an empty sequence has none.
        """
        if not self.state_every:
            return self.states_shape
        return (self._first.shape[0] * -(-self.length // self.state_every), *self.states_shape[1:])

    @property
    def states_shape(self) -> tuple[int, ...]:
        """The shape of initial states."""
        raise NotImplementedError

    @property
    def signature(self) -> Hashable:
        """A key that is equal for inputs that differ only in the values of their tensors, and in
        addresses by a multiple of 16 bytes.
        """
        raise NotImplementedError

    @property
    def power_of_two_chunk(self) -> int:
        """Positions per chunk of tiled algorithms: a power of two."""
        raise NotImplementedError

    @property
    def chunk_count(self) -> int:
        """Chunks per row of the batch; an upper bound for packed sequences."""
        if_one_sequence = -(-self.length // self.power_of_two_chunk)  # rounded up
        return if_one_sequence if self.cu_seqlens is None else if_one_sequence + self.sequences


# (inputs) -> the output: a prepared call for all inputs of one `signature`; keeps no tensors
PreparedLaunch = Callable[[Any], Output]
