# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""SSD, all five stages in one launch, for Hopper: warp roles, the copy engine, states in registers.  In Gluon.

The algorithm is that of `fused_portable.py`: a program goes over its segment backwards for the state that the segment
adds, takes over the state of the segment before, hands its own over, and goes forwards for the output.  Here a program
owns two units (heads, or slices of 64 of a head's P) that share B and C, and its warps have roles (`hopper_roles.py`).
States and outputs are held transposed, so that the state is a matrix operand straight from registers and x, loaded
once, serves all three products.  Why so, and what was tried: docs/ssd-performance.md.

In:   x (b, l, h, p) | dt (b, l, h) | A, dt_bias (h) | B, C (b, l, g, n) | D (h) or (h, p)
      initial_states (sequences, h, p, n) | cu_seqlens (sequences + 1)
Out:  out (b, l, h, p), x's dtype | final_states (sequences, h, p, n) fp32
Work: states (sequences, h, p, n) state_dtype, the one that is being handed over; final_states itself if fp32
      sync int32, zeroed: the ticket counter, and per sequence and unit the number of segments handed over
Grid: (segments * units / 2), units fastest, then sequences, segments; an upper bound if packed.  A program waits only
      for lower tickets, which have started, so that progress needs no two programs at once.
Oracle: `reference.py`.  Source: Dao and Gu 2024 (arXiv:2405.21060), section 6; docs/ssd-mathematics.md for segments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper_config import HopperConfig, ceil_div, unit_count
from ssdprof.kernels.ssd.hopper_roles import CHUNK, SLICE, Segment, Shared, gates, loads, scores, unit_state
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

FLAGS = gl.constexpr(8)  # where the flags begin in sync; each has a 32-byte sector
SEQUENCE_BLOCK = gl.constexpr(128)  # packed sequences looked at side by side
STAGES = {"find_segment": "ticket", "_add": "caller", "first_role": "bmm_chunk", "_fused_hopper_kernel": "setup"}
GL_DTYPE = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def find_segment(rank, cu_seqlens_ptr, cu_seqlens_stride, sequences, K):
    """(sequence, segment, begin, length) of the `rank`-th segment of packed sequences; no chunks past the last one."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    sequence, segment, begin, length, before = 0, 0, 0, 0, 0
    for block in range(0, sequences, SEQUENCE_BLOCK):
        o_s = block + gl.arange(0, SEQUENCE_BLOCK, layout)
        inside = o_s < sequences
        start = gl.load(cu_seqlens_ptr + o_s * cu_seqlens_stride, mask=inside, other=0).to(gl.int32)
        stop = gl.load(cu_seqlens_ptr + (o_s + 1) * cu_seqlens_stride, mask=inside, other=0).to(gl.int32)
        # an empty sequence has one segment of no chunks, which makes its initial state its final one
        segments = gl.maximum(gl.cdiv(gl.cdiv(stop - start, CHUNK), K), 1)
        segments = gl.where(inside, segments, 0)
        after = before + gl.associative_scan(segments, 0, _add)
        mine = (after - segments <= rank) & (rank < after)
        sequence += gl.sum(gl.where(mine, o_s, 0), 0)
        segment += gl.sum(gl.where(mine, rank - (after - segments), 0), 0)
        begin += gl.sum(gl.where(mine, start, 0), 0)
        length += gl.sum(gl.where(mine, stop - start, 0), 0)
        before += gl.sum(segments, 0)
    return sequence, segment, begin, length, rank < before


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def first_role(shared, segment, DSTATE: gl.constexpr, RELAXED: gl.constexpr, RAGGED: gl.constexpr):
    """`scores`, called: what Triton builds as a first role itself, it files under this file with that file's lines."""
    scores(shared, segment, DSTATE, RELAXED, RAGGED)


def _metadata(_grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    x, B, final_states = args["x_desc"].base, args["B_desc"].base, args["final_ptr"]
    batch, seqlen, nheads, headdim = x.shape
    dstate, chunk = B.shape[3], CHUNK.value
    tensors = (x, x, args["dt_ptr"], B, B, args["initial_ptr"], final_states)  # x and out, B and C
    return {
        "name": f"{kernel.name} b{batch} l{seqlen} h{nheads} p{headdim} n{dstate}",
        "flops": 2 * batch * seqlen * nheads * (chunk * (dstate + headdim) + 3 * headdim * dstate),
        "bytes": sum(t.numel() * t.element_size() for t in tensors if t is not None),
    }


# a constant 1 among the arguments of warp_specialize does not compile in Triton 3.6
@gluon.jit(launch_metadata=_metadata, do_not_specialize=["seqlen", "sequences", "K"])
def _fused_hopper_kernel(
    x_desc, B_desc, C_desc, out_desc, out_ptr, dt_ptr, A_ptr, dt_bias_ptr, D_ptr, initial_ptr,
    cu_seqlens_ptr, final_ptr, states_ptr, sync_ptr,
    out_strides, dt_strides, A_strides, dt_bias_strides, D_strides, initial_strides,
    cu_seqlens_strides, dt_low, dt_high, seqlen, sequences, K,
    HEADS: gl.constexpr, HEADS_PER_GROUP: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr,
    DT_SOFTPLUS: gl.constexpr, RELAXED: gl.constexpr, RAGGED: gl.constexpr, HANDOVER: gl.constexpr,
    RING: gl.constexpr, SCORE_RING: gl.constexpr, UNIT_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    shared = Shared(
        gl.allocate_shared_memory(dtype, [RING, CHUNK, DSTATE], B_desc.layout),
        gl.allocate_shared_memory(dtype, [RING, CHUNK, DSTATE], C_desc.layout),
        gl.allocate_shared_memory(dtype, [RING * 2, CHUNK, 1, SLICE], x_desc.layout),
        gl.allocate_shared_memory(dtype, [SCORE_RING * 2, CHUNK, CHUNK], square),
        gl.allocate_shared_memory(dtype, [2, CHUNK, 1, SLICE], out_desc.layout),
        gl.allocate_shared_memory(gl.float32, [RING * 4, 2 * CHUNK], vector),
        gl.allocate_shared_memory(gl.float32, [RING, 2], vector),
        gl.allocate_shared_memory(gl.int32, [RING + 2, 1], vector),
        gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [SCORE_RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [SCORE_RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [RING + 2, 1], barrier),
        RING, SCORE_RING,
    )  # fmt: skip
    for i in gl.static_range(RING):
        mbarrier.init(shared.full.index(i), count=2)  # gates, loads
        mbarrier.init(shared.empty.index(i), count=3)  # scores and both units
    for i in gl.static_range(SCORE_RING):
        mbarrier.init(shared.scored.index(i), count=1)
        mbarrier.init(shared.unscored.index(i), count=2)
    for i in gl.static_range(RING + 2):
        mbarrier.init(shared.told.index(i), count=1)

    # stage ticket: which segment of which units is mine
    SLICES: gl.constexpr = (HEADDIM + SLICE - 1) // SLICE
    PAIRS: gl.constexpr = HEADS * SLICES // 2
    ticket = gl.program_id(0)
    if HANDOVER:
        ticket = gl.atomic_add(sync_ptr, 1, sem="relaxed")
    rank = ticket // PAIRS
    unit = ticket % PAIRS * 2
    exists = True
    if cu_seqlens_ptr is None:
        sequence, index = rank % sequences, rank // sequences
        begin, length = sequence * seqlen, seqlen
    else:
        sequence, index, begin, length, exists = find_segment(rank, cu_seqlens_ptr, cu_seqlens_strides[0], sequences, K)
    first = index * K
    nchunks = gl.maximum(gl.minimum(K, gl.cdiv(length, CHUNK) - first), 0)
    last = (first + nchunks) * CHUNK >= length
    segment = Segment(sequence, index, begin, length, first, nchunks, unit, last)
    # stage setup
    if exists:
        tensors = (
            out_desc, out_ptr, out_strides, D_ptr, D_strides, initial_ptr, initial_strides, states_ptr, final_ptr,
            sync_ptr + FLAGS,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (first_role, (shared, segment, DSTATE, RELAXED, RAGGED)),
                (
                    unit_state,
                    (shared, segment, tensors, 0, HEADS, HEADDIM, DSTATE, SLICES, RELAXED, RAGGED, HANDOVER),
                ),
                (
                    unit_state,
                    (shared, segment, tensors, 1, HEADS, HEADDIM, DSTATE, SLICES, RELAXED, RAGGED, HANDOVER),
                ),
                (
                    gates,
                    (
                        shared, segment, dt_ptr, A_ptr, dt_bias_ptr, dt_strides, A_strides[0], dt_bias_strides[0],
                        dt_low, dt_high, SLICES, DT_SOFTPLUS,
                    ),
                ),
                (
                    loads,
                    (shared, segment, x_desc, B_desc, C_desc, DSTATE, SLICES, HEADS_PER_GROUP),
                ),
            ],
            [4, 4, 2, 1],
            [UNIT_REGISTERS, UNIT_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS],
        )  # fmt: skip


def segment_count(inputs: SSDInputs, config: HopperConfig) -> int:
    """Segments of all sequences; an upper bound if they are packed, for their lengths are on the device."""
    positions = config.segment * CHUNK.value
    if inputs.cu_seqlens is None:
        return inputs.sequences * ceil_div(inputs.x.shape[1], positions)
    return int(inputs.sequences + inputs.x.shape[1] // positions)


def handover(inputs: SSDInputs, config: HopperConfig) -> bool:
    """Whether a sequence may have more than one segment."""
    return bool(inputs.x.shape[1] > config.segment * CHUNK.value)


def sync_size(inputs: SSDInputs) -> int:
    """int32 of the ticket counter and the flags."""
    return int(FLAGS.value + inputs.sequences * unit_count(inputs) * 8)


def workspace_bytes(inputs: SSDInputs, precision: Precision, config: HopperConfig) -> int:
    """What a call allocates beyond its outputs."""
    if not handover(inputs, config):
        return 0
    states = inputs.sequences * inputs.x.shape[2] * inputs.x.shape[3] * inputs.B.shape[3]
    return 4 * sync_size(inputs) + (0 if precision.state_dtype == torch.float32 else 2 * states)


def launch_arguments(
    inputs: SSDInputs, precision: Precision, config: HopperConfig
) -> tuple[tuple[Any, ...], dict[str, Any], SSDOutput]:
    """What the kernel is called with (positional; compile-time and launch options), and the outputs."""
    x, B, C, D = inputs.x, inputs.B, inputs.C, inputs.D
    batch, seqlen, nheads, headdim = x.shape
    dstate, sequences = B.shape[3], inputs.sequences
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_states = torch.empty(sequences, nheads, headdim, dstate, dtype=torch.float32, device=x.device)
    states, sync = final_states, None
    if handover(inputs, config):
        if precision.state_dtype != torch.float32:
            states = torch.empty(final_states.shape, dtype=precision.state_dtype, device=x.device)
        sync = torch.zeros(sync_size(inputs), dtype=torch.int32, device=x.device)
    rows = batch * seqlen
    groups = B.shape[2] * dstate
    args = (
        _units(x, rows), _rows(B, rows, groups), _rows(C, rows, groups), _units(out, rows), out, inputs.dt,
        inputs.A, inputs.dt_bias, D, inputs.initial_states, inputs.cu_seqlens, final_states, states,
        final_states if sync is None else sync,
        out.stride()[1:3], inputs.dt.stride()[1:], inputs.A.stride(),
        (0,) if inputs.dt_bias is None else inputs.dt_bias.stride(),
        (0, 0) if D is None else (D.stride(0), D.stride(1) if D.ndim == 2 else 0),
        (0, 0, 0, 0) if inputs.initial_states is None else inputs.initial_states.stride(),
        (0,) if inputs.cu_seqlens is None else inputs.cu_seqlens.stride(),
        *map(float, inputs.dt_limit), seqlen, sequences, config.segment,
    )  # fmt: skip
    options = {
        "HEADS": nheads,
        "HEADS_PER_GROUP": inputs.heads_per_group,
        "HEADDIM": headdim,
        "DSTATE": dstate,
        "DT_SOFTPLUS": inputs.dt_softplus,
        "RELAXED": not precision.exact,
        "RAGGED": inputs.cu_seqlens is not None or seqlen % CHUNK.value != 0,
        "HANDOVER": sync is not None,
        "RING": config.ring,
        "SCORE_RING": config.score_ring,
        "UNIT_REGISTERS": config.unit_registers,
        "OTHER_REGISTERS": config.other_registers,
        "num_warps": 4,
    }
    return args, options, SSDOutput(out, final_states)


def _units(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tiles of (chunk, one head, slice); past a head's P the copy engine reads zeros and writes nothing."""
    block = (CHUNK.value, 1, SLICE.value)
    layout = _shared_layout(block, tensor.dtype)
    return TensorDescriptor(tensor, [rows, *tensor.shape[2:]], list(tensor.stride()[1:]), list(block), layout)


def _rows(tensor: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Tiles of (chunk, one group's N)."""
    block = (CHUNK.value, tensor.shape[3])
    layout = _shared_layout(block, tensor.dtype)
    return TensorDescriptor(tensor, [rows, width], [tensor.stride(1), 1], list(block), layout)


@lru_cache(maxsize=64)
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory.  Kept: finding it out takes longer than all else that prepares a launch."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GL_DTYPE[dtype])


def ssd_fused_hopper(inputs: SSDInputs, precision: Precision, *, config: HopperConfig) -> SSDOutput:
    """Output as x, final states in fp32.  Call it only where `hopper_config.unsupported` is empty."""
    args, options, outputs = launch_arguments(inputs, precision, config)
    pairs = unit_count(inputs) // 2
    with torch.cuda.device_of(inputs.x):
        _fused_hopper_kernel[(segment_count(inputs, config) * pairs,)](*args, **options)
    return outputs
