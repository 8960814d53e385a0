# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels of the study scan-003: a selective scan with one decay and one channel per head, and the
same in fp64.

    h[t] = decay[t] * h[t-1] + B[t] * x[t],    y[t] = C[t] . h[t],    h[-1] = 0
    dh[t] = decay[t+1] * dh[t+1] + C[t] * dy[t]
    dx[t] = dh[t] . B[t],    ddecay[t] = dh[t] . h[t-1],    dB[t] = dh[t] * x[t],
    dC[t] = h[t] * dy[t]

In:   x, dy (b, l, h) | decay (b, l, h) fp32 | B, C (b, l, h, n)
Out:  y, dx (b, l, h) | ddecay as decay | dB, dC as B and C
Grid: (b * h).  A program owns one head of one sequence and walks over its positions, or its tiles
of BLOCK_T positions.
Oracle: `reference`.  Every kernel gives the same bits in every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from study import Judge

from ssdprof.kernels.functions import ptr_offset
from ssdprof.kernels.launch import launch

GRADIENTS = ("dx", "ddecay", "dB", "dC")
Form = Literal["sequential", "parallel"]


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """The tensors of the formulas above.  x, B and C have one dtype, which is that of y.

    Raises ValueError for shapes that do not fit together.
    """

    x: torch.Tensor
    decay: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 3 or self.decay.shape != self.x.shape:
            raise ValueError(f"decay must be {tuple(self.x.shape)}, not {tuple(self.decay.shape)}")
        for name, tensor in (("B", self.B), ("C", self.C)):
            if tensor.ndim != 4 or tensor.shape[:3] != self.x.shape or tensor.shape != self.B.shape:
                raise ValueError(
                    f"{name} must be {tuple(self.x.shape)} and n, not {tuple(tensor.shape)}"
                )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.decay, self.B, self.C


@dataclass(frozen=True, kw_only=True)
class ScanLayer:
    """The same scan in the form of a Mamba-2 layer with heads of one channel: decay = exp(dt A),
    and x times dt.

    x: (b, l, h); dt: (b, l, h) fp32; A: (h) fp32; B, C: (b, l, h, n).
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor

    def scan_inputs(self, dtype: torch.dtype | None = None) -> ScanInputs:
        """dtype: of x, B, C and decay; None: x, B and C as they are, decay in fp32."""
        x = (self.x.double() * self.dt.double()).to(dtype or self.x.dtype)
        decay = torch.exp(self.dt.double() * self.A.double()).to(dtype or torch.float32)
        return ScanInputs(x=x, decay=decay, B=self.B.to(x.dtype), C=self.C.to(x.dtype))


def draw_layer(
    *,
    batch: int,
    seqlen: int,
    heads: int,
    dstate: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ScanLayer:
    """x, B and C ~ N(0, 1), dt log-uniform in 1e-3 .. 1e-1, A uniform in -16 .. -1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(
            dtype
        )

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device, dtype=torch.float32)

    positions = (batch, seqlen, heads)
    return ScanLayer(
        x=normal(*positions),
        dt=10 ** (-3 + 2 * uniform(*positions)),
        A=-1 - 15 * uniform(heads),
        B=normal(*positions, dstate),
        C=normal(*positions, dstate),
    )


def scan(x: torch.Tensor, decay: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """y (b, l, h), in the dtype of the arguments, by a loop in Python over positions."""
    state = torch.zeros_like(B[:, 0])
    out = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None] * state + B[:, t] * x[:, t, :, None]
        out.append((C[:, t] * state).sum(-1))
    return torch.stack(out, dim=1)


def reference(inputs: ScanInputs, dy: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """y, and if a gradient of y is given also dx, ddecay, dB and dC, by torch's autograd; all in
    fp64.
    """
    leaves = [tensor.detach().double().requires_grad_(dy is not None) for tensor in inputs.tensors]
    y = scan(*leaves)
    found = {"y": y.detach()}
    if dy is not None:
        found |= zip(GRADIENTS, torch.autograd.grad(y, leaves, dy.double()), strict=True)
    return found


def by_doubling(
    inputs: ScanInputs, dy: torch.Tensor | None = None, *, rounded: bool = False
) -> dict[str, torch.Tensor]:
    """The results of `reference`, by formulas, in a number of steps that grows with the logarithm
    of the length.

    rounded: computed in fp32; dC and ddecay from states in the dtype of the inputs, as kernels keep
        them; and every result in the dtype that a kernel stores.
    """
    working = torch.float32 if rounded else torch.float64
    x, decay, B, C = (tensor.to(working) for tensor in inputs.tensors)
    states = _states(decay, B * x[..., None])
    found = {"y": (C * states).sum(-1)}
    if dy is not None:
        dy = dy.to(working)
        if rounded:
            states = states.to(inputs.B.dtype).to(working)
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
        next_decay = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], dim=1)
        dstates = _states(next_decay.flip(1), (C * dy[..., None]).flip(1)).flip(1)
        found |= {
            "dx": (dstates * B).sum(-1),
            "ddecay": (dstates * before).sum(-1),
            "dB": dstates * x[..., None],
            "dC": states * dy[..., None],
        }
    if rounded:
        stored = {"ddecay": inputs.decay.dtype}
        found = {
            name: tensor.to(stored.get(name, inputs.x.dtype)) for name, tensor in found.items()
        }
    return found


def _states(decay: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """h_t = decay_t h_{t-1} + added_t (b, l, h, n), all t at once: step s adds the value from 2^s
    positions before.
    """
    decay, added = decay.clone(), added.clone()
    distance = 1
    while distance < decay.shape[1]:
        # the product is a separate tensor, computed before the sum
        added[:, distance:] += decay[:, distance:, :, None] * added[:, :-distance]
        decay[:, distance:] *= decay[:, :-distance].clone()
        distance *= 2
    return added


def judge(
    inputs: ScanInputs,
    dy: torch.Tensor | None = None,
    exact: Mapping[str, torch.Tensor] | None = None,
) -> Judge:
    """exact: exact results; None computes them by doubling."""
    eps = torch.finfo(inputs.x.dtype).eps
    return Judge(exact or by_doubling(inputs, dy), by_doubling(inputs, dy, rounded=True), eps)


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """block_t: positions of a tile.  num_stages: positions, or tiles, that loads run ahead."""

    block_t: int = 128
    num_warps: int = 1
    num_stages: int = 4


PARALLEL = ScanConfig(num_warps=4, num_stages=2)


@triton.jit(do_not_specialize=["nheads", "seqlen"])
def _sequential_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, y_ptr, entering_ptr,
    x_strides, decay_strides, B_strides, C_strides, y_strides, entering_strides,
    nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """entering (b, tiles, h, n) fp32: the state before each tile, for the gradients."""
    i_b, i_h = tl.program_id(0) // nheads, tl.program_id(0) % nheads
    o_n = tl.arange(0, BLOCK_N)
    m = o_n < N
    h = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for i_tile in range(0, tl.cdiv(seqlen, BLOCK_T)):
        tl.store(entering_ptr + ptr_offset((i_b, i_tile, i_h, o_n), entering_strides), h, mask=m)
        first = i_tile * BLOCK_T
        for t in tl.range(first, tl.minimum(first + BLOCK_T, seqlen), num_stages=NUM_STAGES):
            x = tl.load(x_ptr + ptr_offset((i_b, t, i_h), x_strides)).to(tl.float32)
            decay = tl.load(decay_ptr + ptr_offset((i_b, t, i_h), decay_strides))
            b_B = tl.load(B_ptr + ptr_offset((i_b, t, i_h, o_n), B_strides), mask=m, other=0.0).to(
                tl.float32
            )
            b_C = tl.load(C_ptr + ptr_offset((i_b, t, i_h, o_n), C_strides), mask=m, other=0.0).to(
                tl.float32
            )
            h = decay * h + b_B * x
            y = tl.sum(b_C * h, 0)
            tl.store(y_ptr + ptr_offset((i_b, t, i_h), y_strides), y.to(y_ptr.dtype.element_ty))


def sequential(
    inputs: ScanInputs, *, config: ScanConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position after position, the state in registers.  Returns (y, entering)."""
    config = config or ScanConfig()
    batch, seqlen, nheads, n = inputs.B.shape
    y = torch.empty_like(inputs.x)
    tiles = triton.cdiv(seqlen, config.block_t)
    entering = torch.empty(batch, tiles, nheads, n, dtype=torch.float32, device=y.device)
    _launched(_sequential_kernel, inputs, config, (y, entering), NUM_STAGES=config.num_stages)
    return y, entering


@triton.jit(do_not_specialize=["nheads", "seqlen"])
def _sequential_backward_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, dy_ptr, entering_ptr, dx_ptr, ddecay_ptr, dB_ptr, dC_ptr,
    aside_ptr, x_strides, decay_strides, B_strides, C_strides, dy_strides, entering_strides,
    dx_strides, ddecay_strides, dB_strides, dC_strides, aside_strides, nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """aside (b * h, BLOCK_T, n) fp32: the states of a tile, computed again and stored, then read in
    reverse order.
    """
    i_bh = tl.program_id(0)
    i_b, i_h = i_bh // nheads, i_bh % nheads
    o_n = tl.arange(0, BLOCK_N)
    m = o_n < N
    passed = tl.zeros((BLOCK_N,), dtype=tl.float32)  # decay[t+1] * dh[t+1]
    tiles = tl.cdiv(seqlen, BLOCK_T)
    for back in range(0, tiles):
        i_tile = tiles - 1 - back
        first = i_tile * BLOCK_T
        length = tl.minimum(BLOCK_T, seqlen - first)
        entering = tl.load(
            entering_ptr + ptr_offset((i_b, i_tile, i_h, o_n), entering_strides), mask=m, other=0.0
        )

        # --- recompute the states of the tile
        h = entering
        for i_t in tl.range(0, length, num_stages=NUM_STAGES):
            t = first + i_t
            x = tl.load(x_ptr + ptr_offset((i_b, t, i_h), x_strides)).to(tl.float32)
            decay = tl.load(decay_ptr + ptr_offset((i_b, t, i_h), decay_strides))
            b_B = tl.load(B_ptr + ptr_offset((i_b, t, i_h, o_n), B_strides), mask=m, other=0.0).to(
                tl.float32
            )
            h = decay * h + b_B * x
            tl.store(aside_ptr + ptr_offset((i_bh, i_t, o_n), aside_strides), h, mask=m)
        tl.debug_barrier()  # another thread may load the data that this one has stored

        # --- from the last position to the first
        for i_back in tl.range(0, length, num_stages=NUM_STAGES):
            i_t = length - 1 - i_back
            t = first + i_t
            x = tl.load(x_ptr + ptr_offset((i_b, t, i_h), x_strides)).to(tl.float32)
            decay = tl.load(decay_ptr + ptr_offset((i_b, t, i_h), decay_strides))
            dy = tl.load(dy_ptr + ptr_offset((i_b, t, i_h), dy_strides)).to(tl.float32)
            b_B = tl.load(B_ptr + ptr_offset((i_b, t, i_h, o_n), B_strides), mask=m, other=0.0).to(
                tl.float32
            )
            b_C = tl.load(C_ptr + ptr_offset((i_b, t, i_h, o_n), C_strides), mask=m, other=0.0).to(
                tl.float32
            )
            h = tl.load(aside_ptr + ptr_offset((i_bh, i_t, o_n), aside_strides), mask=m, other=0.0)
            kept = aside_ptr + ptr_offset((i_bh, i_t - 1, o_n), aside_strides)
            before = tl.where(
                i_t > 0, tl.load(kept, mask=o_n < tl.where(i_t > 0, N, 0), other=0.0), entering
            )
            dh = passed + b_C * dy
            dx, ddecay = tl.sum(dh * b_B, 0), tl.sum(dh * before, 0)
            tl.store(dx_ptr + ptr_offset((i_b, t, i_h), dx_strides), dx.to(dx_ptr.dtype.element_ty))
            tl.store(ddecay_ptr + ptr_offset((i_b, t, i_h), ddecay_strides), ddecay)
            dB_offset = ptr_offset((i_b, t, i_h, o_n), dB_strides)
            tl.store(dB_ptr + dB_offset, (dh * x).to(dB_ptr.dtype.element_ty), mask=m)
            dC_offset = ptr_offset((i_b, t, i_h, o_n), dC_strides)
            tl.store(dC_ptr + dC_offset, (h * dy).to(dC_ptr.dtype.element_ty), mask=m)
            passed = decay * dh
        tl.debug_barrier()  # before the next tile's states overwrite these


def sequential_backward(
    inputs: ScanInputs,
    dy: torch.Tensor,
    entering: torch.Tensor,
    *,
    config: ScanConfig | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns (dx, ddecay, dB, dC).  entering: from the forward kernel with the same block_t."""
    config = config or ScanConfig()
    batch, seqlen, nheads, n = inputs.B.shape
    if entering.shape[1] != triton.cdiv(seqlen, config.block_t):
        raise ValueError(
            f"entering is of {entering.shape[1]} tiles, not of block_t {config.block_t}"
        )
    gradients = tuple(torch.empty_like(tensor) for tensor in inputs.tensors)
    aside = torch.empty(batch * nheads, config.block_t, n, dtype=torch.float32, device=dy.device)
    tensors = (dy, entering, *gradients, aside)
    _launched(_sequential_backward_kernel, inputs, config, tensors, NUM_STAGES=config.num_stages)
    return gradients


@triton.jit
def _then(first_decay, first_added, second_decay, second_added):
    """Two steps as one: (a, s) then (b, t) -> (a b, b s + t), with decays a, b and summands s,
    t.
    """
    return first_decay * second_decay, first_added * second_decay + second_added


@triton.jit(do_not_specialize=["nheads", "seqlen"])
def _parallel_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, y_ptr, states_ptr,
    x_strides, decay_strides, B_strides, C_strides, y_strides, states_strides,
    nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """states (b, l, h, n): every h[t] in the dtype of B, for the gradients.  States pass between
    tiles in fp32.
    """
    i_b, i_h = tl.program_id(0) // nheads, tl.program_id(0) % nheads
    o_t, o_n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    entering = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in tl.range(0, seqlen, BLOCK_T, num_stages=NUM_STAGES):
        o_l = first + o_t
        m_l = o_l < seqlen
        m = m_l[:, None] & (o_n < N)[None, :]
        x = tl.load(x_ptr + ptr_offset((i_b, o_l, i_h), x_strides), mask=m_l, other=0.0).to(
            tl.float32
        )
        decay = tl.load(decay_ptr + ptr_offset((i_b, o_l, i_h), decay_strides), mask=m_l, other=1.0)
        b_B = tl.load(
            B_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), B_strides), mask=m, other=0.0
        )
        b_C = tl.load(
            C_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), C_strides), mask=m, other=0.0
        )
        added = b_B.to(tl.float32) * x[:, None]
        decays, added = tl.associative_scan(
            (tl.broadcast_to(decay[:, None], added.shape), added), 0, _then
        )
        h = decays * entering[None, :] + added  # [BLOCK_T, BLOCK_N]
        y = tl.sum(b_C.to(tl.float32) * h, 1)
        tl.store(
            y_ptr + ptr_offset((i_b, o_l, i_h), y_strides), y.to(y_ptr.dtype.element_ty), mask=m_l
        )
        if states_ptr is not None:
            states_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), states_strides)
            tl.store(states_ptr + states_offset, h.to(states_ptr.dtype.element_ty), mask=m)
        # positions past the end add nothing and decay nothing
        entering = tl.sum(tl.where(o_t[:, None] == BLOCK_T - 1, h, 0.0), 0)


def parallel(
    inputs: ScanInputs, *, keeps_states: bool = True, config: ScanConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An associative scan of each tile.  Returns (y, states)."""
    config = config or PARALLEL
    y, states = torch.empty_like(inputs.x), torch.empty_like(inputs.B) if keeps_states else None
    _launched(_parallel_kernel, inputs, config, (y, states), NUM_STAGES=config.num_stages)
    return y, states


@triton.jit(do_not_specialize=["nheads", "seqlen"])
def _parallel_backward_kernel(
    x_ptr, decay_ptr, B_ptr, C_ptr, dy_ptr, states_ptr, dx_ptr, ddecay_ptr, dB_ptr, dC_ptr,
    x_strides, decay_strides, B_strides, C_strides, dy_strides, states_strides,
    dx_strides, ddecay_strides, dB_strides, dC_strides,
    nheads, seqlen,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """An associative scan of each tile from its end, tiles from the last to the first; dh passes in
    fp32.
    """
    i_b, i_h = tl.program_id(0) // nheads, tl.program_id(0) % nheads
    o_t, o_n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    after = tl.zeros((BLOCK_N,), dtype=tl.float32)  # dh of the position after the tile
    tiles = tl.cdiv(seqlen, BLOCK_T)
    for back in range(0, tiles):
        o_l = (tiles - 1 - back) * BLOCK_T + o_t
        m_l, m_n = o_l < seqlen, (o_n < N)[None, :]
        m = m_l[:, None] & m_n

        # --- dh of every position
        dy = tl.load(dy_ptr + ptr_offset((i_b, o_l, i_h), dy_strides), mask=m_l, other=0.0).to(
            tl.float32
        )
        next_decay_offset = ptr_offset((i_b, o_l + 1, i_h), decay_strides)
        next_decay = tl.load(decay_ptr + next_decay_offset, mask=o_l + 1 < seqlen, other=1.0)
        b_C = tl.load(
            C_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), C_strides), mask=m, other=0.0
        )
        added = b_C.to(tl.float32) * dy[:, None]
        next_decays = tl.broadcast_to(next_decay[:, None], added.shape)
        decays, added = tl.associative_scan((next_decays, added), 0, _then, reverse=True)
        dh = decays * after[None, :] + added  # [BLOCK_T, BLOCK_N]
        after = tl.sum(tl.where(o_t[:, None] == 0, dh, 0.0), 0)

        # --- gradients of the inputs
        b_B = tl.load(
            B_ptr + ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), B_strides), mask=m, other=0.0
        )
        dx = tl.sum(dh * b_B.to(tl.float32), 1)
        tl.store(
            dx_ptr + ptr_offset((i_b, o_l, i_h), dx_strides),
            dx.to(dx_ptr.dtype.element_ty),
            mask=m_l,
        )
        x = tl.load(x_ptr + ptr_offset((i_b, o_l, i_h), x_strides), mask=m_l, other=0.0).to(
            tl.float32
        )
        dB_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), dB_strides)
        tl.store(dB_ptr + dB_offset, (dh * x[:, None]).to(dB_ptr.dtype.element_ty), mask=m)

        before_offset = ptr_offset((i_b, o_l[:, None] - 1, i_h, o_n[None, :]), states_strides)
        before = tl.load(states_ptr + before_offset, mask=m & (o_l > 0)[:, None], other=0.0)
        ddecay = tl.sum(dh * before.to(tl.float32), 1)
        tl.store(ddecay_ptr + ptr_offset((i_b, o_l, i_h), ddecay_strides), ddecay, mask=m_l)
        states_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), states_strides)
        h = tl.load(states_ptr + states_offset, mask=m, other=0.0).to(tl.float32)
        dC_offset = ptr_offset((i_b, o_l[:, None], i_h, o_n[None, :]), dC_strides)
        tl.store(dC_ptr + dC_offset, (h * dy[:, None]).to(dC_ptr.dtype.element_ty), mask=m)


def parallel_backward(
    inputs: ScanInputs, dy: torch.Tensor, states: torch.Tensor, *, config: ScanConfig | None = None
) -> tuple[torch.Tensor, ...]:
    """Returns (dx, ddecay, dB, dC).  states: from the forward kernel."""
    gradients = tuple(torch.empty_like(tensor) for tensor in inputs.tensors)
    _launched(_parallel_backward_kernel, inputs, config or PARALLEL, (dy, states, *gradients))
    return gradients


def _launched(
    kernel: Any,
    inputs: ScanInputs,
    config: ScanConfig,
    others: tuple[torch.Tensor | None, ...],
    **constants: Any,
) -> None:
    batch, seqlen, nheads, n = inputs.B.shape
    tensors = (*inputs.tensors, *others)
    launch(
        kernel,
        batch * nheads,
        tensors,
        (*(() if tensor is None else tensor.stride() for tensor in tensors), nheads, seqlen),
        N=n,
        BLOCK_N=triton.next_power_of_2(n),
        BLOCK_T=config.block_t,
        **constants,
        num_warps=config.num_warps,
    )


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, form: Form, config: ScanConfig | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        x, decay, B, C = tensors
        y, kept = FORWARD[form](ScanInputs(x=x, decay=decay, B=B, C=C), config=config)
        ctx.form, ctx.config = form, config
        ctx.save_for_backward(*tensors, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, decay, B, C, kept = ctx.saved_tensors
        return (
            None,
            None,
            *BACKWARD[ctx.form](
                ScanInputs(x=x, decay=decay, B=B, C=C), dy, kept, config=ctx.config
            ),
        )


FORWARD: dict[Form, Any] = {"sequential": sequential, "parallel": parallel}
BACKWARD: dict[Form, Any] = {"sequential": sequential_backward, "parallel": parallel_backward}


def run_both(
    inputs: ScanInputs, dy: torch.Tensor, *, form: Form, config: ScanConfig | None = None
) -> dict[str, torch.Tensor]:
    """y and all gradients, through torch's autograd."""
    x, decay, B, C = leaves = [tensor.detach().requires_grad_() for tensor in inputs.tensors]
    y: torch.Tensor = _Scan.apply(form, config, x, decay, B, C)  # type: ignore[no-untyped-call]
    return {
        "y": y.detach(),
        **dict(zip(GRADIENTS, torch.autograd.grad(y, leaves, dy), strict=True)),
    }
