# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD, all five stages in one launch, in plain Triton: for sm_80 and newer, and for the interpreter.

    a_t   = sum_{s <= t in chunk} dt_s A log2(e)                                 chunk_cumsum
    h     = 2^(a_end) h + sum_t 2^(a_end - a_t) dt_t x_t B_t^T                   chunk_state, state_passing
    out_t = 2^(a_t) h C_t + sum_{s <= t} (C_t B_s) 2^(a_t - a_s) dt_s x_s        bmm_chunk, chunk_scan

A sequence is cut into segments, and a segment into chunks.  One program owns one segment of one slice of one head's P,
and keeps the state in registers.  It reads its segment twice.  The first pass runs backwards and computes the state
that the segment adds to a zero state.  Then the program waits for the state of the preceding segment.  The second pass
runs forwards and computes the output.  The last segment of a sequence needs no first pass.  The chunk size affects only
speed and rounding, and is independent of `SSDInputs.chunk_size`.

The first pass stops where the decay to the segment's end underflows: earlier chunks would be multiplied by zero.  (A
NaN or Inf there reaches later segments in the recurrence, but not here.)

In:   x, z (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32
Work: gates (h * p-slices, 2, b * l) fp32 plus one chunk: dt and a, written and read by the same program
      states (sequences, h, p, n) state_dtype: the state that is handed over; final_states itself if fp32
      sync int32, zeroed: the ticket counter, and per sequence, head and slice the number of segments handed over
Grid: (segments * h * p-slices), slices fastest, then heads, sequences, segments; an upper bound for packed sequences.
      The ticket, not the program id, selects the segment.  A program waits only for lower tickets, whose programs have
      started, so that progress does not require two programs to run at the same time.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6; docs/ssd-mathematics.md for segments.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from ssdprof.kernels.functions import TL_DTYPE, ptr_offset
from ssdprof.kernels.launch import Described, Launcher, described
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import BufferSizes, SSDPortableConfig, whole_block
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable.stages import (
    ChunkGates,
    Steps,
    TokenRows,
    chunk_cumsum,
    chunk_products,
    chunk_state,
    find_segment,
    hand_over_state,
    scan_current,
    scan_residual,
    segment_chunks,
    segment_state,
    store_state,
    take_state,
    take_ticket,
    wait_for_state,
    zero_state,
)
from ssdprof.kernels.tensors import strides_of, tile_strides

FLAGS = tl.constexpr(32)  # offset of the flags in sync
FLAG_STRIDE = tl.constexpr(8)  # int32 per flag: a 32-byte sector

STAGES = {"_fused_kernel": "setup"}


@described
def _metadata(tensors: Any, S: Any) -> Described:
    x, dt, _, B, _, _, z, _, initial_states, _, _, final_states, *_ = tensors
    batch, seqlen, nheads, headdim = x.shape
    dstate, chunk = B.shape[3], S.CHUNK
    flops = 2 * batch * seqlen * nheads * (chunk * (dstate + headdim) + 3 * headdim * dstate)
    moved = (x, x, dt, B, B, z, initial_states, final_states)  # x and out, B and C
    return f"b{batch} l{seqlen} h{nheads} p{headdim} n{dstate}", flops, moved


@triton.jit(launch_metadata=_metadata, do_not_specialize=["seqlen", "sequences"])
def _fused_kernel(tensors, strides, seqlen, sequences, dt_low, dt_high, S: tl.constexpr):
    (
        x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, initial_states_ptr, cu_seqlens_ptr, out_ptr,
        final_states_ptr, gates_ptr, states_ptr, sync_ptr,
    ) = tensors  # fmt: skip
    (
        x_strides, dt_strides, A_strides, B_strides, C_strides, D_strides, z_strides, dt_bias_strides,
        initial_states_strides, cu_seqlens_strides, out_strides,
    ) = strides  # fmt: skip
    # stage ticket: which segment of which slice is mine
    SLICES: tl.constexpr = (S.HEADDIM + S.BLOCK_P - 1) // S.BLOCK_P
    BLOCKS: tl.constexpr = (S.DSTATE + S.BLOCK_N - 1) // S.BLOCK_N
    ticket = take_ticket(sync_ptr, S.HANDOVER)
    unit, rank = ticket % (S.HEADS * SLICES), ticket // (S.HEADS * SLICES)
    i_h, first_p = unit // SLICES, (unit % SLICES) * S.BLOCK_P
    if cu_seqlens_ptr is None:
        sequence, segment, begin, length = rank % sequences, rank // sequences, tl.zeros((), tl.int64), seqlen
        i_b, position = sequence, tl.cast(sequence, tl.int64) * seqlen
    else:
        sequence, segment, begin, length = find_segment(
            rank, cu_seqlens_ptr, cu_seqlens_strides[0], sequences, S.CHUNK, S.RULE
        )
        if sequence < 0:
            return
        i_b, position = 0, begin
    nchunks = tl.cdiv(length, S.CHUNK)
    per_segment = segment_chunks(nchunks, S.RULE)
    first = segment * per_segment
    count = tl.minimum(per_segment, nchunks - first)
    last = first + count >= nchunks

    # stage setup: where its tensors lie
    i_g = i_h // S.HEADS_PER_GROUP
    o_q = tl.arange(0, S.CHUNK)
    rows = o_q.to(S.OFFSET)[:, None]
    o_p, o_n = tl.arange(0, S.BLOCK_P).to(S.OFFSET), tl.arange(0, S.BLOCK_N).to(S.OFFSET)
    m_p = (o_p < S.HEADDIM - first_p) | (S.HEADDIM % S.BLOCK_P == 0)
    x_tile = rows * x_strides[1] + o_p[None, :] * x_strides[3]
    B_tile = rows * B_strides[1] + o_n[None, :] * B_strides[3]
    C_tile = rows * C_strides[1] + o_n[None, :] * C_strides[3]
    B_step, C_step = ptr_offset((S.BLOCK_N,), B_strides[3:]), ptr_offset((S.BLOCK_N,), C_strides[3:])
    out_tile = rows * out_strides[1] + o_p[None, :] * out_strides[3]
    x_rows = TokenRows(x_ptr + ptr_offset((i_b, begin, i_h, first_p), x_strides), x_tile, x_strides[1])
    B_rows = TokenRows(B_ptr + ptr_offset((i_b, begin, i_g), B_strides[:3]), B_tile, B_strides[1], B_step)
    C_rows = TokenRows(C_ptr + ptr_offset((i_b, begin, i_g), C_strides[:3]), C_tile, C_strides[1], C_step)
    out_rows = TokenRows(out_ptr + ptr_offset((i_b, begin, i_h, first_p), out_strides), out_tile, out_strides[1])
    positions = tl.cast(seqlen, tl.int64)  # positions of all sequences
    if cu_seqlens_ptr is None:
        positions *= sequences
    gates = ChunkGates(gates_ptr + (2 * positions * unit + position), positions)
    state_offset = ((tl.cast(sequence, tl.int64) * S.HEADS + i_h) * S.HEADDIM + first_p) * S.DSTATE
    if S.P_ROWS:
        state_p, state_n, m_state = o_p[:, None], o_n[None, :], m_p[:, None]
    else:
        state_p, state_n, m_state = o_p[None, :], o_n[:, None], m_p[None, :]
    state_tile = state_p * S.DSTATE + state_n

    # stage chunk_cumsum
    A = tl.load(A_ptr + ptr_offset((i_h,), A_strides)).to(tl.float32)
    dt_bias = 0.0
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + ptr_offset((i_h,), dt_bias_strides)).to(tl.float32)
    steps = Steps(dt_ptr + ptr_offset((i_b, begin, i_h), dt_strides), dt_strides[1], A, dt_bias, dt_low, dt_high)
    felt = chunk_cumsum(steps, gates, first, count, length, S.DT_SOFTPLUS, S.CHUNK)

    # stage state_passing: the state that enters the segment
    state = zero_state(state_tile, BLOCKS)
    if S.HANDOVER:
        added, decay_log2 = state, 0.0
        if not last:
            added, decay_log2 = segment_state(state, x_rows, m_p[None, :], B_rows, gates, first, count, felt, length, S)
        flag_ptr = sync_ptr + FLAGS + (sequence * (S.HEADS * SLICES) + unit) * FLAG_STRIDE
        if segment > 0:
            wait_for_state(flag_ptr, segment)
            state = take_state(states_ptr + state_offset, state_tile, S.BLOCK_N, m_state, S.DSTATE, S.P_ROWS)
    if initial_states_ptr is not None and segment == 0:
        initial_ptr = initial_states_ptr + ptr_offset((sequence, i_h, first_p, 0), initial_states_strides)
        initial_tile = state_p * initial_states_strides[2] + state_n * initial_states_strides[3]
        initial_step = ptr_offset((S.BLOCK_N,), initial_states_strides[3:])
        state = take_state(initial_ptr, initial_tile, initial_step, m_state, S.DSTATE, S.P_ROWS)
    if S.HANDOVER and not last:
        hand_over_state(
            states_ptr + state_offset, state_tile, S.BLOCK_N, m_state, flag_ptr, state, added, decay_log2,
            S.DSTATE, S.P_ROWS,
        )  # fmt: skip

    # stage chunk_scan: the output, chunk after chunk
    D, z_rows = None, None
    if D_ptr is not None:
        if len(D_strides) == 2:
            D_row = tl.load(D_ptr + ptr_offset((i_h, first_p + o_p), D_strides), mask=m_p, other=0.0)
            D = D_row.to(tl.float32)[None, :]
        else:
            D = tl.load(D_ptr + ptr_offset((i_h,), D_strides)).to(tl.float32)
    if z_ptr is not None:
        z_ptr += ptr_offset((i_b, begin, i_h, first_p), z_strides)
        z_rows = TokenRows(z_ptr, rows * z_strides[1] + o_p[None, :] * z_strides[3], z_strides[1])
    for i_c in tl.range(first, first + count, num_stages=S.SCAN_STAGES):
        t = i_c * S.CHUNK
        CB, out = chunk_products(state, C_rows, B_rows, gates, t, length, S.DSTATE, S.P_ROWS, S.ALIGNED)
        out, x = scan_current(out, CB, x_rows, m_p[None, :], gates, t, length, S.INTERMEDIATE, S.ALIGNED)
        state = chunk_state(state, x, B_rows, gates, t, length, None, S.DSTATE, S.P_ROWS, S.INTERMEDIATE, S.ALIGNED)
        scan_residual(out, x, D, z_rows, out_rows, m_p[None, :], t, length, S.ALIGNED)
    # stage state_passing.store
    if last:
        store_state(final_states_ptr + state_offset, state_tile, S.BLOCK_N, m_state, state, S.DSTATE, S.P_ROWS)


def buffer_sizes(inputs: SSDInputs, precision: Precision, config: SSDPortableConfig) -> BufferSizes:
    units = config.units(inputs)
    flags = FLAGS.value + inputs.sequences * units * FLAG_STRIDE.value
    handover = config.handover(inputs)
    return BufferSizes.of(
        inputs,
        precision,
        states=prod(inputs.states_shape) if handover and precision.state_dtype != torch.float32 else 0,
        sync=flags if handover else 0,
        gates=units * 2 * inputs.x.shape[0] * inputs.x.shape[1] + config.chunk,
    )


class SSDPortableLaunch:
    """A call without its tensors.  It serves all inputs of one `SSDInputs.signature` and keeps none of them."""

    def __init__(self, inputs: SSDInputs, precision: Precision, config: SSDPortableConfig) -> None:
        self._sizes = buffer_sizes(inputs, precision, config)
        self._index = inputs.x.get_device()
        self._programs = config.segments(inputs) * config.units(inputs)
        self._launcher = Launcher(
            _fused_kernel, _scalars(inputs), _options(inputs, precision, config, self._sizes.sync > 0)
        )

    def __call__(self, inputs: SSDInputs) -> SSDOutput:
        with torch.cuda.device(self._index):  # no effect for -1, the CPU
            out, final_states, states, sync, gates = self._sizes.allocate(inputs.x)
            self._launcher(
                self._programs, inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D, inputs.z, inputs.dt_bias,
                inputs.initial_states, inputs.cu_seqlens, out, final_states, gates,
                final_states if states is None else states, sync,
            )  # fmt: skip
        return SSDOutput(out, final_states)


def ssd_fused_portable(inputs: SSDInputs, precision: Precision, *, config: SSDPortableConfig) -> SSDOutput:
    """Output in x's dtype, final states in fp32.  `fused.py` has rejected unsupported inputs."""
    return SSDPortableLaunch(inputs, precision, config)(inputs)


def _scalars(inputs: SSDInputs) -> tuple[Any, ...]:
    """Strides in the order of the tensors, those of the output last; sizes; limits of dt."""
    return (
        (
            tile_strides(inputs.x), inputs.dt.stride(), inputs.A.stride(), tile_strides(inputs.B),
            tile_strides(inputs.C), strides_of(inputs.D), tile_strides(inputs.z), strides_of(inputs.dt_bias),
            strides_of(inputs.initial_states), strides_of(inputs.cu_seqlens), tile_strides(_new(inputs)),
        ),
        inputs.x.shape[1], inputs.sequences, *map(float, inputs.dt_limit),
    )  # fmt: skip


def _options(inputs: SSDInputs, precision: Precision, config: SSDPortableConfig, handover: bool) -> dict[str, Any]:
    nheads, headdim = inputs.x.shape[2:]
    return dict(
        HEADS=nheads, HEADS_PER_GROUP=inputs.heads_per_group, HEADDIM=headdim, DSTATE=inputs.B.shape[3],
        CHUNK=config.chunk, BLOCK_P=config.block_p, BLOCK_N=min(config.block_n, whole_block(inputs.B.shape[3])),
        RULE=(config.max_segments, config.min_chunks, config.max_chunks), HANDOVER=handover, P_ROWS=config.p_rows,
        DT_SOFTPLUS=inputs.dt_softplus, INTERMEDIATE=TL_DTYPE[precision.intermediate_dtype(inputs.x.dtype)],
        ALIGNED=inputs.cu_seqlens is None and inputs.x.shape[1] % config.chunk == 0,
        OFFSET=tl.int32 if _span(inputs, config.chunk) < 2**31 else tl.int64, STATE_STAGES=config.state_stages,
        SCAN_STAGES=config.scan_stages, num_warps=config.num_warps,
    )  # fmt: skip


def _span(inputs: SSDInputs, chunk: int) -> int:
    """Largest distance, in elements, between two elements of a tile of positions or of a state."""
    tokens = (inputs.x, inputs.B, inputs.C, inputs.z, _new(inputs))
    spans = [chunk * tensor.stride(1) + tensor.shape[3] * tensor.stride(3) for tensor in tokens if tensor is not None]
    if inputs.initial_states is not None:
        *_, headdim, dstate = inputs.initial_states.shape
        *_, p, n = inputs.initial_states.stride()
        spans.append(headdim * p + dstate * n)
    return max(spans)


def _new(inputs: SSDInputs) -> torch.Tensor:
    """A meta tensor with the output's shape and strides."""
    return torch.empty(inputs.x.shape, device="meta")
