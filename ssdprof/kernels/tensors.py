"""Tensors as arguments of kernels: strides, the workspace of a call, TMA descriptors, and copies
that TMA can read.

TMA is the unit of Hopper GPUs that copies tiles between global and shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from math import gcd, prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch

# stages of functions: `stalls/attribute.py`
STAGES = {"_rows_kernel": "setup"}

# --- strides


def strides_of(tensor: Tensor | None) -> tuple[int, ...]:
    """The strides of a tensor in elements; an empty tuple for None."""
    return () if tensor is None else tensor.stride()


def strides_of_each(*tensors: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """The strides of several tensors."""
    return tuple(map(strides_of, tensors))


def is_expanded(tensor: Tensor | None) -> bool:
    """Whether a stride of 0 makes several indices the same element in memory, as after `expand`.
    Kernels must not write to such a tensor.  Elements that share memory otherwise, such as those of
    overlapping windows, are not found.  False for None.
    """
    if tensor is None:
        return False
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in sizes_and_strides)


def strides_unit(*tensors: Tensor) -> int:
    """The largest power of two up to 16 that divides all strides of the tensors, except the last
    one of each tensor: the argument UNIT of `in_units`.
    """
    return gcd(16, *(gcd(*tensor.stride()[:-1]) for tensor in tensors))


def tile_strides(tensor: Tensor | None) -> tuple[int | tl.constexpr, ...]:
    """The strides of a tensor (batch, position, head, dimension), for a kernel that reads tiles of
    positions and dimensions; an empty tuple for None.

    If rows are contiguous, the strides inside a tile are compile-time constants, except in the
    interpreter.  They depend on the model and not on the call, and a constant offset takes no
    register.
    """
    if tensor is None or tensor.stride(3) != 1 or INTERPRETED:
        return strides_of(tensor)
    batch, position, head, dimension = tensor.stride()
    return batch, tl.constexpr(position), head, tl.constexpr(dimension)


def offset_dtype(
    chunk: int,
    tensors: Iterable[Tensor | None],
    sizes: tuple[int, int],
    *state_strides: tuple[int, ...],
) -> tl.dtype:
    """The dtype of offsets inside of tiles: int32 if it is large enough, otherwise int64.

    A tile is `chunk` positions of one head of a tensor (b, l, heads, columns), or a state.

    sizes: rows and columns of a state.  state_strides: strides of tensors of states (sequences,
        heads, rows, columns), or an empty tuple for a tensor that the call does not have.
    """
    spans = [
        chunk * tensor.stride(1) + tensor.shape[3] * tensor.stride(3)
        for tensor in tensors
        if tensor is not None
    ]
    spans += [sizes[0] * strides[2] + sizes[1] * strides[3] for strides in state_strides if strides]
    return tl.int32 if max(spans) < 2**31 else tl.int64


# --- the workspace: one allocation for all memory of a call except its outputs.  A launch needs
# only an address and a dtype of each part, which the host makes in a tenth of the time that it
# takes for a tensor or a view.

ALIGNMENT = 512  # bytes, as in torch's allocations on a GPU


class Part:
    """A part of a tensor's memory with a dtype, as an argument of a launch.

    begin: first byte of the part.  It may be negative, because the base of a descriptor may be
        before its tensor.
    nbytes: size of the part.
    """

    def __init__(self, memory: Tensor | Part, begin: int, nbytes: int, dtype: torch.dtype) -> None:
        self.memory = memory
        self.begin = begin
        self.nbytes = nbytes
        self.dtype = dtype
        self._address: int = memory.data_ptr() + begin

    def data_ptr(self) -> int:
        """The address, by the name under which Triton asks for it."""
        return self._address

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """A view of the memory from the part's begin on, in the dtype of the whole memory, which
        must be a tensor at the beginning of its storage.  It may extend past the part's end.
        """
        assert isinstance(self.memory, Tensor)
        return self.memory.as_strided(shape, strides, self.begin // self.memory.element_size())

    def tensor(self) -> Tensor:
        """A view of the part with one dimension, of a memory that is a contiguous tensor."""
        assert isinstance(self.memory, Tensor)
        memory = self.memory.view(torch.uint8)[self.begin : self.begin + self.nbytes]
        return memory.view(self.dtype)


PartPlace = tuple[int, int, torch.dtype]  # the arguments of `Part` after the memory


def places(
    parts: dict[str, tuple[torch.dtype, *tuple[int, ...]] | None],
) -> tuple[int, dict[str, PartPlace | None]]:
    """Divide a workspace into consecutive parts, each aligned to `ALIGNMENT`.  Returns the bytes of
    the workspace and the place of each part, None for those that are None.

    parts: name -> dtype and sizes; None for a part that this call does not need.
    """
    end = 0
    part_places: dict[str, PartPlace | None] = {}
    for name, part in parts.items():
        if part is None:
            part_places[name] = None
            continue
        dtype, *shape = part
        nbytes = prod(shape) * dtype.itemsize
        part_places[name] = end, nbytes, dtype
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return end, part_places


# --- TMA descriptors.  They are built and checked once; later calls only set the tensor.

Strides = tuple[int, int, int]  # in elements, between sequences, positions and heads
Described = Callable[["Tensor | Part"], TensorDescriptor]  # (tensor) -> its descriptor
_GL_DTYPE = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def described(
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
    ahead: int = 0,
) -> Described:
    """A function that makes the descriptor of a tensor with this dtype, these sizes and strides,
    which it does not check.

    block: sizes of a tile.  ahead: bytes by which the descriptor begins before its tensor.
    """
    layout = _shared_layout(block, dtype)
    fields = vars(TensorDescriptor(_empty(dtype), list(sizes), list(strides), list(block), layout))

    def descriptor_of(tensor: Tensor | Part) -> TensorDescriptor:
        descriptor = object.__new__(TensorDescriptor)
        base = Part(tensor, -ahead, 0, dtype) if ahead else tensor
        descriptor.__dict__.update(fields, base=base)
        return descriptor

    return descriptor_of


def tiles(
    like: Tensor,
    strides: Strides,
    *,
    sizes: tuple[int, int],
    block: tuple[int, int, int],
    packed: bool,
) -> Described:
    """Descriptors of tiles (1, k, positions, columns) of a tensor (b, l, k, columns).

    Beyond the end of a sequence, TMA reads zeros and writes nothing.  A tile begins at (sequence,
    k, position, column).

    For packed sequences, a tile begins at (end, k, l - length + position, column), where `end` is
    the position after the sequence's last one in the pack.  So the third coordinate is l at the end
    of every sequence, where TMA stops.  The first and the third coordinate together count l
    positions too many; therefore the descriptor begins l positions before the tensor.  No address
    before the tensor is read.

    like: a tensor with the dtype, b and l.
    strides: strides of b, l and k, in elements.
    sizes: sizes of k and columns.
    block: k, positions and columns of a tile.
    """
    batch, seqlen = like.shape[:2]
    sequence_stride, position_stride, k_stride = strides
    if not packed:
        shape = (batch, sizes[0], seqlen, sizes[1])
        return described(
            like.dtype, shape, (sequence_stride, k_stride, position_stride, 1), (1, *block)
        )
    shape = (seqlen + 1, sizes[0], seqlen, sizes[1])
    ahead = seqlen * position_stride * like.element_size()
    return described(
        like.dtype, shape, (position_stride, k_stride, position_stride, 1), (1, *block), ahead
    )


def rows(dtype: torch.dtype, count: int, *, block: tuple[int, int]) -> Described:
    """Descriptors of tiles `block` (rows, columns) of a contiguous tensor (count, columns)."""
    return described(dtype, (count, block[1]), (block[1], 1), block)


def row_stride(tensor: Tensor) -> int:
    """Stride between positions of a tensor (b, l, ...), in elements.  If l is 1, PyTorch's stride
    of l is arbitrary, and that of b stands for it.
    """
    return tensor.stride(0 if tensor.shape[1] == 1 else 1)


def steps(tensor: Tensor, step: int) -> Strides:
    """The strides between sequences and between positions of a tensor (b, l, ...), also valid for
    sizes of 1, and `step` as the third stride.
    """
    row = row_stride(tensor)
    sequence = tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1] * row
    return sequence, row, step


def unreadable(**tensors: Tensor) -> str:
    """The reason why TMA cannot read one of these tensors (b, l, heads, columns), by name; empty if
    it can read all of them.

    TMA needs multiples of 16 bytes.  Here strides are multiples of 8 elements for any dtype, which
    refuses some fp32 tensors that it could read.
    """
    for name, tensor in tensors.items():
        row = row_stride(tensor)
        if (
            tensor.stride(3) != 1
            or row % 8
            or tensor.stride(2) % 8
            or tensor.data_ptr() % 16
            or row <= 0
        ):
            return f"strides or alignment of {name}, which TMA cannot read"
        if tensor.shape[0] > 1 and (tensor.stride(0) % 8 or tensor.stride(0) <= 0):
            return f"batch stride of {name}, which TMA cannot read"
    return ""


@cache
def _empty(dtype: torch.dtype) -> Tensor:
    """A tensor without elements, with which a descriptor is built once."""
    return torch.empty(0, dtype=dtype, device="meta")


@lru_cache(maxsize=64)
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a tile with these sizes in shared memory.  It is cached, because computing it
    takes most of the time in which a launch is prepared.
    """
    return gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])


# --- copies of tensors whose rows are not contiguous.  torch's depthwise convolution, which
# transformers runs without the package `causal_conv1d`, writes neighbouring positions next to each
# other.  A copy reads such a tensor along positions and writes it along columns.

BLOCK_POSITIONS = 64  # positions that a program copies
MOST_COLUMNS = 128  # most columns that a program copies


@triton.jit
def _rows_kernel(tensors, strides, length, heads, S: tl.constexpr):
    """Copy a tile of a strided tensor (b, l, heads, columns) to contiguous memory."""
    source, target = tensors
    # --- this program's positions (BLOCK_L, 1) and columns (1, BLOCK_C) of one head.  i_bhs: row of
    # the batch, head and slice of columns, slices fastest
    blocks, slices = tl.cdiv(length, S.BLOCK_L), tl.cdiv(S.COLUMNS, S.BLOCK_C)
    i_l, i_bhs = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_h, i_b = i_bhs // slices % heads, i_bhs // slices // heads
    o_l = i_l * S.BLOCK_L + tl.arange(0, S.BLOCK_L)[:, None]
    o_c = i_bhs % slices * S.BLOCK_C + tl.arange(0, S.BLOCK_C)[None, :]
    m = (o_l < length) & (o_c < S.COLUMNS)
    tile = tl.load(source + ptr_offset((i_b, o_l, i_h, o_c), strides), mask=m)
    row = (tl.cast(i_b, tl.int64) * length + o_l) * heads + i_h
    tl.store(target + row * S.COLUMNS + o_c, tile, mask=m)


def is_scattered(tensor: Tensor) -> bool:
    """Whether TMA cannot read a tensor (b, l, heads, columns), or its heads are not next to each
    other in memory.
    """
    return bool(unreadable(tensor=tensor)) or tensor.stride(2) != tensor.shape[3]


def overlaps(tensor: Tensor) -> bool:
    """Whether a contiguous copy of a tensor would be larger than its whole storage, so that
    elements certainly share memory, as after `expand`.  False does not mean that none do.
    """
    return tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()


def contiguous_view(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same shape at the start of the tensor's storage, which must be
    large enough (`overlaps`).  It has the strides and alignment of a copy, but arbitrary values.
    """
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides, 0)


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy of a tensor (b, l, heads, columns) with any strides, made by one launch."""
    batch, length, heads, columns = tensor.shape
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    block = min(MOST_COLUMNS, triton.next_power_of_2(columns))
    programs = triton.cdiv(length, BLOCK_POSITIONS) * triton.cdiv(columns, block) * heads * batch
    if programs:
        launch(
            _rows_kernel,
            programs,
            (tensor, target),
            (tensor.stride(), length, heads),
            COLUMNS=columns,
            BLOCK_L=BLOCK_POSITIONS,
            BLOCK_C=block,
            num_warps=4,
        )
    return target
