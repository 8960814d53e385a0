"""The kernels of a mixer besides its operator: the causal convolution before it, and the gated RMS
norm after it.

They compute in fp32 and round the result once.  Their oracles are `convolved` and `normed` in
tests/kernels/test_mixer.py.  Prefixes of names in kernels: `gdn/unfused/stages.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdprof.kernels.functions import TL_DTYPE, load_at, ptr_offset, store_at
from ssdprof.kernels.launch import launch
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.tensors import strides_of_each

MAX_CONV_WIDTH = 16  # positions of the convolution
MAX_GROUP_SIZE = 32768  # channels of a group of the norm
# channels per program of the convolution; 16-bit numbers of so many take two cache lines
BLOCK_D = 128


@triton.jit
def _load_positions(
    x_ptr, initial_ptr, x_strides, initial_strides, i_b, o_s, o_d, m, length, WIDTH: tl.constexpr
):
    """x at positions o_s and channels o_d, [positions, channels] in x's dtype.  Before the sequence
    it is the initial state, rounded to x's dtype, or 0; after it, and where the mask m is false, it
    is 0.

    initial_ptr: (b, d, WIDTH - 1), the positions before the sequence; None: zeros.
    i_b: index of the sequence.  length: positions of the sequence.
    """
    m_x = m & ((o_s >= 0) & (o_s < length))[:, None]
    b_x = load_at(x_ptr, x_strides, (i_b, o_s[:, None], o_d[None, :]), mask=m_x)
    if initial_ptr is not None:  # at every position, one of both loads is 0
        offset = ptr_offset((i_b, o_d[None, :], (o_s + WIDTH - 1)[:, None]), initial_strides)
        b_x += tl.load(initial_ptr + offset, mask=m & (o_s < 0)[:, None], other=0.0).to(b_x.dtype)
    return b_x


@triton.jit
def _causal_conv1d_kernel(tensors, strides, length, channels, S: tl.constexpr):
    """One block of positions of a block of channels of `causal_conv1d`."""
    x_ptr, weight_ptr, bias_ptr, initial_ptr, out_ptr, final_ptr = tensors
    x_strides, weight_strides, bias_strides, initial_strides, out_strides, final_strides = strides
    # --- this program's positions and channels; neighbouring programs have neighbouring channels
    d_blocks, l_blocks = tl.cdiv(channels, S.BLOCK_D), tl.cdiv(length, S.BLOCK_L)
    i_l = (tl.program_id(0) // d_blocks) % l_blocks
    i_b = tl.program_id(0) // d_blocks // l_blocks
    o_d = (tl.program_id(0) % d_blocks) * S.BLOCK_D + tl.arange(0, S.BLOCK_D)
    o_l = i_l * S.BLOCK_L + tl.arange(0, S.BLOCK_L)
    m_d = o_d < channels

    # --- y, [BLOCK_L, BLOCK_D] in fp32: the bias and WIDTH shifted products, then the activation
    b_y = tl.zeros((S.BLOCK_L, S.BLOCK_D), tl.float32)
    if bias_ptr is not None:
        b_y += load_at(bias_ptr, bias_strides, (o_d,), mask=m_d).to(tl.float32)[None, :]
    for k in tl.static_range(S.WIDTH):
        b_x = _load_positions(
            x_ptr,
            initial_ptr,
            x_strides,
            initial_strides,
            i_b,
            o_l + (k - S.WIDTH + 1),
            o_d,
            m_d[None, :],
            length,
            S.WIDTH,
        )
        b_weight = load_at(weight_ptr, weight_strides, (o_d, k), mask=m_d).to(tl.float32)
        b_y += b_x.to(tl.float32) * b_weight[None, :]
    if S.SILU:
        b_y = b_y * tl.sigmoid(b_y)
    out_offset = ptr_offset((i_b, o_l[:, None], o_d[None, :]), out_strides)
    m_out = (o_l < length)[:, None] & m_d[None, :]
    tl.store(out_ptr + out_offset, b_y.to(out_ptr.dtype.element_ty), mask=m_out)

    # --- final state: x at the last WIDTH - 1 positions, of which the first may be in the initial
    # state; by the program with the last positions
    if final_ptr is not None:  # noqa: SIM102  # the first is known when the kernel is compiled
        if i_l == l_blocks - 1:
            o_w = tl.arange(0, S.BLOCK_W)
            m_w = (o_w < S.WIDTH - 1)[:, None] & m_d[None, :]
            b_last = _load_positions(
                x_ptr,
                initial_ptr,
                x_strides,
                initial_strides,
                i_b,
                length - (S.WIDTH - 1) + o_w,
                o_d,
                m_w,
                length,
                S.WIDTH,
            )
            final_index = (i_b, o_d[None, :], o_w[:, None])
            store_at(final_ptr, final_strides, final_index, b_last, mask=m_w)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    initial_state: Tensor | None = None,
    wants_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The causal depthwise convolution.  Returns (out, final_state); final_state is None unless
    wants_final_state.

        y[t, d]   = bias[d] + sum_{k < w} weight[d, k] * x[t - (w - 1) + k, d]
        out[t, d] = y[t, d] * sigmoid(y[t, d])   with silu, else y[t, d]

    Positions before the sequence have the initial state, rounded to x's dtype, or zeros.

    In:   x (b, l, d), any strides | weight (d, w) | bias (d) or None
          initial_state (b, d, w - 1) or None, oldest position first
    Out:  out (b, l, d), contiguous, in x's dtype
          final_state, as initial_state, in x's dtype: x at the last w - 1 positions
    Grid: (b * l-blocks * d-blocks).  A program computes a block of positions and channels.
    Source: Gu and Dao 2023 (arXiv:2312.00752), section 3.4.

    Raises ValueError for an empty x and for shapes that do not fit together, UnsupportedError for
    dtypes and widths without support.
    """
    # with an initial state, a thread has a quarter of the elements, because the addresses of the
    # initial state need registers too
    block_l, num_warps = (32, 4) if initial_state is None else (16, 8)
    batch, length, channels = x.shape
    width = weight.shape[-1]
    if x.numel() == 0:
        raise ValueError(f"x is empty: {tuple(x.shape)}")
    if x.dtype not in TL_DTYPE:
        raise UnsupportedError(f"causal_conv1d: x is fp32, fp16 or bf16, not {x.dtype}")
    if not 2 <= width <= MAX_CONV_WIDTH:
        raise UnsupportedError(f"causal_conv1d: 2 to {MAX_CONV_WIDTH} positions, not {width}")
    _check("weight", weight, (channels, width))
    _check("bias", bias, (channels,))
    _check("initial_state", initial_state, (batch, channels, width - 1))
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    final = (
        torch.empty((batch, channels, width - 1), device=x.device, dtype=x.dtype)
        if wants_final_state
        else None
    )
    launch(
        _causal_conv1d_kernel,
        batch * triton.cdiv(length, block_l) * triton.cdiv(channels, BLOCK_D),
        (x, weight, bias, initial_state, out, final),
        (strides_of_each(x, weight, bias, initial_state, out, final), length, channels),
        SILU=silu,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width - 1),
        BLOCK_L=block_l,
        BLOCK_D=BLOCK_D,
        num_warps=num_warps,
    )
    return out, final


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a tensor of another shape."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")


@triton.jit
def _gated_rms_norm_kernel(tensors, strides, length, groups, rows, eps, S: tl.constexpr):
    """One block of rows of `gated_rms_norm`.  A row is a group of channels at one position."""
    x_ptr, gate_ptr, weight_ptr, out_ptr = tensors
    x_strides, gate_strides, weight_strides, out_strides = strides
    # --- this program's rows, and the sequence, position and channels of each
    o_r = tl.program_id(0).to(tl.int64) * S.BLOCK_ROWS + tl.arange(0, S.BLOCK_ROWS)
    o_c = tl.arange(0, S.BLOCK_G)
    m = (o_r < rows)[:, None] & (o_c < S.GROUP_SIZE)[None, :]
    i_g, i_bl = o_r % groups, o_r // groups
    channel = i_g[:, None] * S.GROUP_SIZE + o_c[None, :]
    index = ((i_bl // length)[:, None], (i_bl % length)[:, None], channel)

    # --- the norm and the gate, [BLOCK_ROWS, BLOCK_G] in fp32
    b_x = load_at(x_ptr, x_strides, index, mask=m).to(tl.float32)
    b_gate = load_at(gate_ptr, gate_strides, index, mask=m).to(tl.float32)
    b_weight = load_at(weight_ptr, weight_strides, (channel,), mask=m).to(tl.float32)
    b_gate = b_gate * tl.sigmoid(b_gate)
    if not S.NORM_FIRST:
        b_x *= b_gate
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=1) / S.GROUP_SIZE + eps)[:, None] * b_weight
    if S.NORM_FIRST:
        b_x *= b_gate
    store_at(out_ptr, out_strides, index, b_x, mask=m)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, group_size: int, norm_first: bool
) -> Tensor:
    """The RMS norm with a gate, over groups of neighbouring channels.

        gate first:  y = x * silu(gate),  out = y / sqrt(mean(y^2) + eps) * weight        Mamba-2
        norm first:  out = x / sqrt(mean(x^2) + eps) * weight * silu(gate)    gated delta rule

    In:   x, gate (l, d) or (b, l, d), any strides | weight (d)
    Out:  out, as x, contiguous
    Grid: (blocks of b * l * groups rows).  A program computes whole rows, of group_size channels.
    Source: Dao and Gu 2024 (arXiv:2405.21060), section 7.1; Yang et al. 2024 (arXiv:2412.06464),
    section 3.4.

    Raises ValueError for shapes that do not fit together, UnsupportedError for dtypes and sizes
    without support.
    """
    channels = x.shape[-1]
    if x.dtype not in TL_DTYPE or gate.dtype not in TL_DTYPE:
        raise UnsupportedError(
            f"gated_rms_norm: x and gate are fp32, fp16 or bf16, not {x.dtype} and {gate.dtype}"
        )
    if group_size > MAX_GROUP_SIZE:
        raise UnsupportedError(
            f"gated_rms_norm: groups of at most {MAX_GROUP_SIZE} channels, not {group_size}"
        )
    fit = x.ndim in (2, 3) and gate.shape == x.shape and weight.shape == (channels,)
    if not fit or group_size < 1 or channels % group_size:
        raise ValueError(
            f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} and "
            f"groups of {group_size} do not fit together"
        )
    # a program has 4,096 numbers with those of padding, 32 per thread; a larger group has a program
    # of its own, with up to 16 warps
    block = triton.next_power_of_2(group_size)  # channels of a row, padded
    block_rows = max(1, 4096 // block)
    num_warps = min(16, max(4, block // 1024))
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    rows = x.numel() // group_size
    launch(
        _gated_rms_norm_kernel,
        triton.cdiv(rows, block_rows),
        (x, gate, weight, out),
        (
            (_batched_strides(x), _batched_strides(gate), weight.stride(), _batched_strides(out)),
            x.shape[-2],
            channels // group_size,
            rows,
            float(eps),
        ),
        NORM_FIRST=norm_first,
        GROUP_SIZE=group_size,
        BLOCK_ROWS=block_rows,
        BLOCK_G=block,
        num_warps=num_warps,
    )
    return out


def _batched_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor (b, l, d), or of (l, d) as a batch of one."""
    return tensor.stride() if tensor.ndim == 3 else (0, *tensor.stride())
