# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD position by position, in one launch, with the state in registers: for decoding and short sequences.

    dt_t  = clamp(softplus(dt_t + dt_bias), low, high)
    h     = exp(dt_t A) h + dt_t x_t B_t^T
    out_t = (h C_t + D x_t) * silu(z_t)

All arithmetic is in fp32.  A call with one position moves little more than the states.  With l positions it takes l
dependent steps on any GPU.  Any l works; from a few dozen positions on, the chunked kernels are faster.

In:   x, z (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32, or initial_states itself, in place
Grid: (sequences * h * slices of p), slices fastest, then heads.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), equation 2.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.functions import LOG2_E, decay_exp, ptr_offset, sequence_bounds, softplus
from ssdprof.kernels.launch import Described, LaunchCache, Launcher, described
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.tensors import is_expanded, strides_of_each

MAX_DSTATE = 256

STAGES = {"_ssd_recurrent_kernel": "setup"}


@dataclass(frozen=True, kw_only=True)
class SSDRecurrentConfig:
    """block_p: slice of P per program, a power of two."""

    block_p: int = 16
    num_warps: int = 2

    @classmethod
    def choose(cls, inputs: SSDInputs) -> SSDRecurrentConfig:
        return cls(block_p=min(cls.block_p, triton.next_power_of_2(inputs.x.shape[3])))


@described
def _metadata(tensors: Any, _S: Any) -> Described:
    x, dt, _, B, _, _, z, _, initial, _, _, final = tensors
    return f"{tuple(x.shape)} n{B.shape[3]}", 6 * x.numel() * B.shape[3], (x, x, B, B, z, dt, initial, final)


@triton.jit(launch_metadata=_metadata, do_not_specialize=["seqlen"])
def _ssd_recurrent_kernel(tensors, strides, seqlen, dt_low, dt_high, S: tl.constexpr):
    (
        x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_states_ptr, cu_seqlens_ptr, out_ptr,
        final_states_ptr,
    ) = tensors  # fmt: skip
    (
        x_strides, dt_strides, A_strides, B_strides, C_strides, D_strides, z_strides, dt_bias_strides,
        initial_states_strides, cu_seqlens_strides, out_strides, final_states_strides,
    ) = strides  # fmt: skip
    # stage setup: which slice of which head is mine
    SLICES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    unit = tl.program_id(0) % (S.HEADS * SLICES)
    sequence, i_h, i_slice = tl.program_id(0) // (S.HEADS * SLICES), unit // SLICES, unit % SLICES
    i_b, begin, length = sequence, tl.zeros((), tl.int64), seqlen
    if cu_seqlens_ptr is not None:
        begin, length = sequence_bounds(sequence, cu_seqlens_ptr, cu_seqlens_strides[0])
        i_b = 0
    o_p, o_n = i_slice * S.BLOCK_P + tl.arange(0, S.BLOCK_P), tl.arange(0, S.BLOCK_N)
    m_p, m_n = o_p < S.HEADDIM, o_n < S.DSTATE
    m_state = m_p[:, None] & m_n[None, :]
    i_g = i_h // S.HEADS_PER_GROUP
    x_ptr += ptr_offset((i_b, begin, i_h), x_strides[:3]) + o_p.to(tl.int64) * x_strides[3]
    out_ptr += ptr_offset((i_b, begin, i_h), out_strides[:3]) + o_p.to(tl.int64) * out_strides[3]
    B_ptr += ptr_offset((i_b, begin, i_g), B_strides[:3]) + o_n.to(tl.int64) * B_strides[3]
    C_ptr += ptr_offset((i_b, begin, i_g), C_strides[:3]) + o_n.to(tl.int64) * C_strides[3]
    dt_ptr += ptr_offset((i_b, begin, i_h), dt_strides)
    if z_ptr is not None:
        z_ptr += ptr_offset((i_b, begin, i_h), z_strides[:3]) + o_p.to(tl.int64) * z_strides[3]
    A = tl.load(A_ptr + ptr_offset((i_h,), A_strides)).to(tl.float32)
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + ptr_offset((i_h,), dt_bias_strides)).to(tl.float32)
    D = tl.zeros((S.BLOCK_P,), tl.float32)
    if D_ptr is not None:
        if len(D_strides) == 2:
            D = tl.load(D_ptr + ptr_offset((i_h, o_p), D_strides), mask=m_p, other=0.0).to(tl.float32)
        else:
            D += tl.load(D_ptr + ptr_offset((i_h,), D_strides)).to(tl.float32)

    # stage setup.load
    state = tl.zeros((S.BLOCK_P, S.BLOCK_N), tl.float32)
    if initial_states_ptr is not None:
        index = (sequence, i_h, o_p[:, None], o_n[None, :])
        initial = tl.load(initial_states_ptr + ptr_offset(index, initial_states_strides), mask=m_state, other=0.0)
        state = initial.to(tl.float32)

    # stage recurrence
    for t in range(0, length):
        step = tl.cast(t, tl.int64)
        x = tl.load(x_ptr + step * x_strides[1], mask=m_p, other=0.0).to(tl.float32)
        B = tl.load(B_ptr + step * B_strides[1], mask=m_n, other=0.0).to(tl.float32)
        C = tl.load(C_ptr + step * C_strides[1], mask=m_n, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + step * dt_strides[1]).to(tl.float32) + dt_bias
        if S.DT_SOFTPLUS:
            dt = softplus(dt)
        dt = tl.clamp(dt, dt_low, dt_high, propagate_nan=tl.PropagateNan.ALL)
        state = state * decay_exp(dt * A) + (dt * x)[:, None] * B[None, :]
        out = tl.sum(state * C[None, :], axis=1) + D * x
        if z_ptr is not None:
            z = tl.load(z_ptr + step * z_strides[1], mask=m_p, other=0.0).to(tl.float32)
            out *= z / (1.0 + tl.exp2(-z * LOG2_E))
        tl.store(out_ptr + step * out_strides[1], out.to(out_ptr.dtype.element_ty), mask=m_p)

    # stage setup.store
    index = (sequence, i_h, o_p[:, None], o_n[None, :])
    final = final_states_ptr + ptr_offset(index, final_states_strides)
    tl.store(final, state.to(final_states_ptr.dtype.element_ty), mask=m_state)


class SSDRecurrentLaunch:
    """A call without its tensors.  It serves all inputs of one `SSDInputs.signature`, and keeps none of them."""

    def __init__(self, inputs: SSDInputs, config: SSDRecurrentConfig, *, in_place: bool = False) -> None:
        self._in_place = in_place
        self._index, self._device = inputs.x.get_device(), inputs.x.device
        self._states_shape = inputs.states_shape
        heads, headdim = inputs.x.shape[2:]
        self._programs = inputs.sequences * heads * triton.cdiv(headdim, config.block_p)
        new = torch.empty(inputs.x.shape, device="meta")
        states = self._final_states(inputs, "meta")
        tensors = (*_tensors(inputs), new, states)
        self._launcher = Launcher(
            _ssd_recurrent_kernel,
            (strides_of_each(*tensors), inputs.x.shape[1], *map(float, inputs.dt_limit)),
            dict(
                HEADS=heads, HEADS_PER_GROUP=inputs.heads_per_group, HEADDIM=headdim, DSTATE=inputs.B.shape[3],
                BLOCK_P=config.block_p, BLOCK_N=triton.next_power_of_2(inputs.B.shape[3]),
                DT_SOFTPLUS=bool(inputs.dt_softplus), num_warps=config.num_warps,
            ),
        )  # fmt: skip

    def __call__(self, inputs: SSDInputs) -> SSDOutput:
        with torch.cuda.device(self._index):  # no effect for -1, the CPU
            out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
            final_states = self._final_states(inputs, self._device)
            self._launcher(self._programs, *_tensors(inputs), out, final_states)
        return SSDOutput(out, final_states)

    def _final_states(self, inputs: SSDInputs, device: torch.device | str) -> torch.Tensor:
        if self._in_place:
            assert inputs.initial_states is not None
            return inputs.initial_states
        return torch.empty(self._states_shape, dtype=torch.float32, device=device)


def _tensors(inputs: SSDInputs) -> tuple[torch.Tensor | None, ...]:
    """The input tensors, in the order of the kernel's arguments."""
    return (
        inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D, inputs.z, inputs.dt_bias,
        inputs.initial_states, inputs.cu_seqlens,
    )  # fmt: skip


_launches: LaunchCache[SSDRecurrentLaunch] = LaunchCache()


def ssd_recurrent(inputs: SSDInputs, *, in_place: bool = False) -> SSDOutput:
    """Output in x's dtype, final states in fp32.  Takes l dependent steps, and so is meant for short l.

    in_place: the final states overwrite inputs.initial_states, in its dtype, and that tensor is returned.

    Raises ValueError if in_place has no initial_states to write to, or expanded ones, and UnsupportedError for N above
    MAX_DSTATE, for inputs that require a gradient, and, outside Triton's interpreter, for tensors not on a GPU.
    """
    if in_place and inputs.initial_states is None:
        raise ValueError("in_place needs initial_states to write to")
    refuse_gradient("recurrent", _tensors(inputs))
    return _launches.get((inputs.signature, in_place), _prepare, inputs, in_place)(inputs)


def _prepare(inputs: SSDInputs, in_place: bool) -> SSDRecurrentLaunch:
    inputs.check()
    _refuse_unsupported(inputs)
    if in_place and is_expanded(inputs.initial_states):
        raise ValueError("in_place cannot write to expanded initial_states: pass initial_states.contiguous()")
    return SSDRecurrentLaunch(inputs, SSDRecurrentConfig.choose(inputs), in_place=in_place)


def _refuse_unsupported(inputs: SSDInputs) -> None:
    dstate, x = inputs.B.shape[3], inputs.x
    if dstate > MAX_DSTATE:
        raise UnsupportedError(f"recurrent: dstate is at most {MAX_DSTATE}, not {dstate}")
    refuse_device("recurrent", x)


def _run(inputs: SSDInputs, _precision: Precision) -> SSDOutput:
    return ssd_recurrent(inputs)


_EQUALS = "; the same as exact with fp32 states"  # appended to the reason for every other precision


def plan(inputs: SSDInputs, precision: Precision) -> Plan:
    _refuse_unsupported(inputs)
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=1,
        config=asdict(SSDRecurrentConfig.choose(inputs)),
        reason="one launch, position by position; fp32 throughout" + _EQUALS * (precision != Precision()),
    )


register(Implementation(operator="ssd", name="recurrent", run=_run, plan=plan))
