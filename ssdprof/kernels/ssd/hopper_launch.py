"""Launching the Hopper kernel: what it is called with, what a call allocates, and how many programs it has."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.fused_hopper import FLAGS, _fused_hopper_kernel
from ssdprof.kernels.ssd.hopper_config import HopperConfig, ceil_div, unit_count
from ssdprof.kernels.ssd.hopper_roles import CHUNK, SLICE
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput

GL_DTYPE = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


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
    with torch.cuda.device(inputs.x.get_device()):  # nothing to do for -1, the CPU
        _fused_hopper_kernel[(segment_count(inputs, config) * pairs,)](*args, **options)
    return outputs
