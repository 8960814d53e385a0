"""What the inputs of all operators have in common: checks, sequences, and the signature of a
call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import Field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

Scalar = int | float | bool | str | tuple[float, ...] | None
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensor_signature(tensor: Tensor | None) -> Hashable:
    """The properties of a tensor that determine which kernels support it and what Triton compiles
    for it.

    Equal for tensors that differ only in their values, and in their addresses by a multiple of 16
    bytes.
    """
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


class Output(NamedTuple):
    """The result of a call.

    out: shape and dtype of the values, x or v.  final_states: fp32, of the initial states' shape;
    more with state_every.
    """

    out: Tensor
    final_states: Tensor


class Inputs:
    """The base of an operator's inputs, a frozen dataclass of tensors and scalars.

    operator: its name.  FIRST: the tensor that determines batch, length, dtype and device
    LINEAR: tensors that, multiplied together by a number, multiply the output by it: values, of the
        output's shape, then initial states, if there are any
    state_every: positions; 1: after each one.  The states after so many of every sequence, and at
        its end, are wanted; 0: only those at the end.  Above 1 sequences are not packed.  An
        implementation that does not keep them (`Implementation.keeps`) refuses; a report calls it
        once for each state
    state_indices: (sequences) int32 or int64: the row of the initial states, then a pool, with
        which each sequence begins.  None: row i for sequence i.  The host does not read the values.
        An implementation that does not read pools (`Implementation.pools`) refuses; a report gives
        it copies of the rows, in its time

    What only a call in place (`Implementation.in_place`) takes.  It writes new states to slots of
    the pool, rounded once, and returns the pool.  It changes nothing else in the pool, and slots to
    be written differ:

    state_indices: also (sequences, columns): sequence i begins with the slot in column
        accepted[i] - 1.  -1: it begins with zeros
    accepted: (sequences) int32 or int64, 1 to columns
    write_indices: None: the final state goes to the slot that was read.  (sequences): to this slot.
        (sequences, T): the state after token t goes to slot write_indices[i, t].  -1: it is not
        kept.  A sequence that neither reads nor writes is padding, whose tokens may be NaN
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    operator: ClassVar[str]
    FIRST: ClassVar[str]
    LINEAR: ClassVar[tuple[str, ...]]
    cu_seqlens: Tensor | None = None
    state_every: int = 0
    state_indices: Tensor | None = None
    write_indices: Tensor | None = None
    accepted: Tensor | None = None

    @classmethod
    def unchecked(cls, **values: object) -> Self:
        """Fields by name, without a check.  The caller knows the signature, or calls `check`
        later.
        """
        inputs = object.__new__(cls)
        inputs.__dict__.update(values)
        return inputs

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError, naming the argument that does not fit the others."""

    @property
    def _first(self) -> Tensor:
        first: Tensor = getattr(self, self.FIRST)
        return first

    @property
    def values(self) -> Tensor:
        values: Tensor = getattr(self, self.LINEAR[0])
        return values

    @property
    def initial(self) -> Tensor | None:
        """Initial states, one for each sequence: of a pool, a copy.  None is zeros."""
        states: Tensor | None = getattr(self, self.LINEAR[1]) if self.LINEAR[1:] else None
        if states is None or self.state_indices is None:
            return states
        return states[self.state_indices.long()]

    def after(self, states: Tensor | None) -> Self:
        """The inputs with these initial states, one for each sequence."""
        rows = {} if self.state_indices is None else {"state_indices": None}
        return replace(self, **{self.LINEAR[1]: states}, **rows)

    def _check(self, name: str, shape: tuple[int, ...], *, same_dtype: bool = False) -> None:
        """ValueError unless a tensor is None or has this shape and a floating-point dtype.

        same_dtype: it must have the dtype of the tensor FIRST.
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
        """Raises ValueError for lengths, slots or a `state_every` that do not fit the tensors."""
        if self.state_every < 0 or (self.state_every > 1 and self.cu_seqlens is not None):
            raise ValueError(
                f"state_every is 0, 1, or without cu_seqlens more, not {self.state_every}"
            )
        slots = self.state_indices
        if slots is None and not (self.write_indices is None and self.accepted is None):
            raise ValueError("write_indices and accepted need state_indices")
        if slots is not None:
            if (pool := getattr(self, self.LINEAR[1])) is None or not sum(pool.shape[:1]):
                raise ValueError(f"state_indices needs {self.LINEAR[1]}, a pool of states")
            self._check_indices("state_indices", (1,) if self.accepted is None else (2,))
            self._check_indices("accepted", (1,))
            self._check_indices("write_indices", (1, 2))
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
        """A row for each sequence.  dims: how many there may be."""
        indices = getattr(self, name)
        if indices is None:
            return
        integers = indices.dtype in (torch.int32, torch.int64)
        if not integers or indices.ndim not in dims or len(indices) != self.sequences:
            shapes = {1: f"({self.sequences},)", 2: f"({self.sequences}, columns)"}
            wanted = " or ".join(shapes[count] for count in dims)
            raise ValueError(
                f"{name} must be {wanted}, int32 or int64, "
                f"not {tuple(indices.shape)} {indices.dtype}"
            )

    def _check_devices(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.device != (first := self._first.device):
                raise ValueError(f"{name} is on {tensor.device}, {self.FIRST} on {first}")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are tensors, by name, without those that are None."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def scalars(self) -> dict[str, Scalar]:
        """The arguments that are not tensors, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float, str, tuple))
        }

    @property
    def form(self) -> Hashable:
        """All properties of the inputs except the values of their tensors."""
        of_tensors = (
            (name, tensor.shape, tensor.stride(), tensor.dtype)
            for name, tensor in self.tensors.items()
        )
        return (type(self), *of_tensors, *self.scalars.items())

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def length(self) -> int:
        """Positions of one row of the batch; of all sequences together if packed."""
        return self._first.shape[1]

    @property
    def sequences(self) -> int:
        """Independent sequences: the batch, or the packed ones."""
        return self._first.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def slots_read(self) -> Tensor | None:
        """The slot of a pool with which each sequence begins: of tables, that of the accepted
        state.
        """
        slots = self.state_indices
        if slots is None or self.accepted is None:
            return slots
        return slots.gather(1, self.accepted.long()[:, None] - 1)[:, 0]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a layer, by the operator's own names."""
        raise NotImplementedError

    @property
    def final_shape(self) -> tuple[int, ...]:
        """The shape of the final states; with `state_every` a row for each state, sequence by
        sequence.
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
        """Equal for inputs that differ only in the values of their tensors, and in addresses by a
        multiple of 16 bytes.
        """
        raise NotImplementedError

    @property
    def power_of_two_chunk(self) -> int:
        """Positions per chunk of tiled algorithms: a power of two."""
        raise NotImplementedError

    @property
    def chunk_count(self) -> int:
        """Chunks per row of the batch; an upper bound for packed sequences."""
        whole = -(-self.length // self.power_of_two_chunk)
        return whole if self.cu_seqlens is None else whole + self.sequences


# A call without its tensors.  It serves all inputs of one `signature` and keeps none of them.
PreparedLaunch = Callable[[Any], Output]
