"""Descriptors by which Hopper's copy engine reads and writes tiles of tensors, made without a copy and kept."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssdprof.kernels._workspace import Part

Strides = tuple[int, int, int]
_GL_DTYPE = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class _Base:
    """What a descriptor is over: a tensor, taken to begin `ahead` bytes before it does."""

    __slots__ = ("ahead", "dtype", "tensor")

    def __init__(self, tensor: torch.Tensor | Part, ahead: int) -> None:
        self.tensor, self.ahead, self.dtype = tensor, ahead, tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.ahead


class _Descriptor:
    """A descriptor without a tensor.  `of` gives it one."""

    def __init__(
        self, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], ahead: int
    ) -> None:
        self._ahead = ahead
        self._descriptor = TensorDescriptor(
            _nothing(dtype), list(sizes), list(strides), list(block), _shared_layout(block, dtype)
        )

    def of(self, tensor: torch.Tensor | Part) -> TensorDescriptor:
        """Without another check of shape and strides."""
        copy = object.__new__(TensorDescriptor)
        base = _Base(tensor, self._ahead) if self._ahead else tensor
        copy.__dict__.update(self._descriptor.__dict__, base=base)
        return copy


def tensor_of(descriptor: TensorDescriptor) -> Any:
    """The tensor that a descriptor of this module is over."""
    base = descriptor.base
    return base.tensor if isinstance(base, _Base) else base


class Tiles(_Descriptor):
    """Tiles (1, k, positions, columns) of a tensor (b, l, k, columns).

    Beyond a sequence's end the copy engine reads zeros and writes nothing.  A tile begins at (sequence, k, position,
    column).  Where sequences are packed, it begins at (row after the sequence's last, k, l - length + position,
    column), so that the third coordinate of an end is always l.  With the first coordinate it counts l rows too many,
    and so the descriptor begins l rows before the tensor; nothing is read at an address before the tensor's own.

    like: of the tensor's dtype, batch and length
    strides: of b, l and k, in elements
    sizes: of k and columns
    block: a tile's k, positions and columns
    """

    def __init__(
        self, like: torch.Tensor, strides: Strides, *, sizes: tuple[int, int], block: tuple[int, int, int],
        packed: bool,
    ) -> None:  # fmt: skip
        batch, seqlen = like.shape[:2]
        sequence, row, step = strides
        sequences, of_sequence = (seqlen + 1, row) if packed else (batch, sequence)
        super().__init__(
            like.dtype, (sequences, sizes[0], seqlen, sizes[1]), (of_sequence, step, row, 1), (1, *block),
            seqlen * row * like.element_size() if packed else 0,
        )  # fmt: skip


class Rows(_Descriptor):
    """Tiles (rows, columns) of a contiguous tensor that is taken to be (count, columns)."""

    def __init__(self, dtype: torch.dtype, count: int, *, block: tuple[int, int]) -> None:
        super().__init__(dtype, (count, block[1]), (block[1], 1), block, 0)


def row_stride(tensor: torch.Tensor) -> int:
    """Elements from one position of (b, l, ...) to the next.  PyTorch's own stride is arbitrary if l is 1."""
    return tensor.stride(0 if tensor.shape[1] == 1 else 1)


def steps(tensor: torch.Tensor, step: int) -> Strides:
    """From one sequence to the next, of which there may be one, from one position to the next, and `step`."""
    row = row_stride(tensor)
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1] * row, row, step


@cache
def _nothing(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta")


@lru_cache(maxsize=64)
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a tile lies in shared memory.  Kept: finding it out takes longer than all else that prepares a launch."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])
