"""Device functions and constants that all kernels share: dtypes, strided offsets, decays and
sums of products.
"""

import math

import torch
import triton
import triton.language as tl

# its import chooses the interpreter or a GPU before a kernel is defined
from ssdprof.kernels import device

TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Input precision of tl.dot for fp32 operands: each operand is split into the sum of two tf32
# numbers, and three products of these are added in fp32.  The result is close to fp32; plain tf32
# keeps 3 digits.  16-bit operands are not affected.
DOT_PRECISION = tl.constexpr("tf32x3")

LOG2_E = tl.constexpr(math.log2(math.e))
# between this number and 0, five terms of the series of expm1 have an absolute error below 6e-9
SERIES_FROM = tl.constexpr(-0.125)
INTERPRETED = tl.constexpr(device.INTERPRETED)

# stages of functions: `stalls/attribute.py`
STAGES = {"softplus": "chunk_cumsum"}


@triton.jit
def ptr_offset(index, strides):
    """Offset in elements, in int64, of `index` along the first axes of a tensor with `strides`."""
    offset = tl.zeros((), tl.int64)
    for axis in tl.static_range(len(index)):
        offset += tl.cast(index[axis], tl.int64) * strides[axis]
    return offset


@triton.jit
def load_at(ptr, strides, index, mask=None):
    """The elements at `index` of a tensor with `strides`; 0 where the mask is false.  Without a
    mask, all elements must exist.
    """
    pointers = ptr + ptr_offset(index, strides)
    return tl.load(pointers, mask=mask, other=None if mask is None else 0.0)


@triton.jit
def store_at(ptr, strides, index, value, mask=None):
    """Store `value` at `index` of a tensor with `strides`, rounded to the tensor's dtype, where the
    mask is true; without a mask, everywhere.
    """
    pointers = ptr + ptr_offset(index, strides)
    tl.store(pointers, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def slot_to_read(sequence, slots, slots_strides, accepted, accepted_strides):
    """The slot of a pool with which a sequence begins; -1: it begins with zeros.

    slots, slots_strides: `Inputs.state_indices`.  accepted, accepted_strides: `Inputs.accepted`, or
    None, and then state_indices has one dimension.
    """
    slots += tl.cast(sequence, tl.int64) * slots_strides[0]
    if accepted is not None:
        column = tl.load(accepted + ptr_offset((sequence,), accepted_strides)) - 1
        slots += tl.cast(column, tl.int64) * slots_strides[1]
    return tl.load(slots)


@triton.jit
def in_units(strides, UNIT: tl.constexpr):
    """The strides, with the information for the compiler that all except the last are multiples of
    UNIT (`strides_unit`).  The compiler itself detects only multiples of 16.
    """
    if UNIT == 1 or UNIT == 16:
        return strides
    else:
        known = ()
        for axis in tl.static_range(len(strides) - 1):
            known = known + (strides[axis] // UNIT * UNIT,)
        # Triton 3.9 returns no constant in a new tuple
        last = strides[len(strides) - 1] + tl.zeros([], tl.int32)
        return known + (last,)


@triton.jit
def decay_exp2(log2_decay):
    """2 ** log2_decay, but at most 1: the exponent is a difference of rounded cumulative sums,
    which may be slightly above 0.  NaN stays NaN.
    """
    return tl.exp2(tl.minimum(log2_decay, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def decay_exp(log_decay):
    """exp(log_decay), but at most 1, for states that decay at every position.  NaN stays NaN.

    A GPU's exp2 has a bias of about 2e-8, so that a state with decays close to 1 would have an
    error of 2e-5 after a thousand positions.  Decays close to 1 are therefore computed with a
    series.
    """
    v = tl.minimum(log_decay, 0.0, propagate_nan=tl.PropagateNan.ALL)
    series = v * (1.0 + v * (1 / 2 + v * (1 / 6 + v * (1 / 24 + v * (1 / 120)))))
    return tl.where(v > SERIES_FROM, 1.0 + series, tl.exp2(v * LOG2_E))


@triton.jit
def _added(total, product):
    """total + product.  The compiler may fuse the multiplication of `product` into this sum, but
    never that of `total`: the assembly, which becomes no instruction, hides how `total` was
    computed.
    """
    total = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
    )
    return total + product


@triton.jit
def sum_of_products(products, AXIS: tl.constexpr):
    """The sum of a tile of fp32 products along AXIS, with the same bits in every kernel that gives
    the tile the same layout.

    With `tl.sum`, the compiler rounds one of a thread's first two products and fuses the other with
    their sum; which one depends on the order of the code around it.  Here it always rounds the
    first (`_added`).
    """
    if INTERPRETED:  # the interpreter has no assembly, and fuses nothing
        return tl.sum(products, axis=AXIS)
    else:
        return tl.reduce(products, AXIS, _added)


@triton.jit
def sequence_bounds(sequence, cu_seqlens_ptr, cu_seqlens_stride):
    """First position (int64) and length (int32) of a packed sequence."""
    begin_ptr = cu_seqlens_ptr + tl.cast(sequence, tl.int64) * cu_seqlens_stride
    begin = tl.load(begin_ptr).to(tl.int64)
    return begin, (tl.load(begin_ptr + cu_seqlens_stride) - begin).to(tl.int32)


@triton.jit
def softplus(v):
    """log(1 + exp(v)) = max(v, 0) + log(1 + exp(-|v|)), without overflow, and with full precision
    where exp(v) is small.  NaN stays NaN.
    """
    e = tl.exp2(-tl.abs(v) * LOG2_E)
    u = 1.0 + e
    # u is rounded; the factor e / (u - 1) corrects log(u) for this rounding
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p
