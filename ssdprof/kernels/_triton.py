# mypy: allow-untyped-defs
"""What every kernel file shares: the choice of interpreter or GPU, and strided offsets.

Without an NVIDIA GPU, kernels run in Triton's interpreter, on the CPU.  Triton reads that choice when a kernel is
defined, so it is made here, before any kernel file is imported.  Triton's own TRITON_INTERPRET, if set, decides
instead.
"""

import os

import torch
import triton
import triton.language as tl

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    triton.knobs.runtime.interpret = True

INTERPRETED: bool = triton.knobs.runtime.interpret


@triton.jit
def ptr_offset(index, strides):
    """Element offset of `index` in a tensor with `strides` (two tuples of one length), in int64."""
    offset = tl.zeros((), tl.int64)
    for axis in tl.static_range(len(strides)):
        offset += index[axis].to(tl.int64) * strides[axis]
    return offset
