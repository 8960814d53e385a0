# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Copies tensors whose rows are not contiguous, for kernels that read rows through TMA.

torch's depthwise convolution, which transformers runs without the package `causal_conv1d`, writes neighbouring
positions next to each other.  A copy reads such a tensor along positions and writes it along columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch
from ssdprof.kernels.tensors import unreadable

BLOCK_POSITIONS = 64
MOST_COLUMNS = 128  # of a program

STAGES = {"_rows_kernel": "setup"}


@triton.jit
def _rows_kernel(tensors, strides, length, heads, S: tl.constexpr):
    source, target = tensors
    blocks, slices = tl.cdiv(length, S.BLOCK_L), tl.cdiv(S.COLUMNS, S.BLOCK_C)
    i_l, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_h, i_b = rest // slices % heads, rest // slices // heads
    o_l = i_l * S.BLOCK_L + tl.arange(0, S.BLOCK_L)[:, None]
    o_c = rest % slices * S.BLOCK_C + tl.arange(0, S.BLOCK_C)[None, :]
    m = (o_l < length) & (o_c < S.COLUMNS)
    tile = tl.load(source + ptr_offset((i_b, o_l, i_h, o_c), strides), mask=m)
    row = (tl.cast(i_b, tl.int64) * length + o_l) * heads + i_h
    tl.store(target + row * S.COLUMNS + o_c, tile, mask=m)


def is_scattered(tensor: torch.Tensor) -> bool:
    """Whether TMA cannot read rows of a tensor (b, l, heads, columns), or heads do not lie side by side."""
    return bool(unreadable(tensor=tensor)) or tensor.stride(2) != tensor.shape[3]


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether a copy takes more memory than all of the tensor's storage, as after `expand`."""
    return tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes()


def contiguous_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as a contiguous tensor of its shape: what a copy looks like, with other contents."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides, 0)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor (b, l, heads, columns) of any strides, by one launch."""
    batch, length, heads, columns = tensor.shape
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    block = min(MOST_COLUMNS, triton.next_power_of_2(columns))
    programs = triton.cdiv(length, BLOCK_POSITIONS) * triton.cdiv(columns, block) * heads * batch
    if programs:
        launch(
            _rows_kernel, programs, (tensor, target), (tensor.stride(), length, heads),
            COLUMNS=columns, BLOCK_L=BLOCK_POSITIONS, BLOCK_C=block, num_warps=4,
        )  # fmt: skip
    return target
