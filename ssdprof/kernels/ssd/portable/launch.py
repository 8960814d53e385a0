"""Launch of the portable kernel: its arguments, workspace and grid."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton.language as tl

from ssdprof.kernels.functions import TL_DTYPE
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.buffers import BufferSizes
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable.config import PortableConfig, whole_block
from ssdprof.kernels.ssd.portable.portable_kernel import FLAG_STRIDE, FLAGS, _fused_kernel
from ssdprof.kernels.tensors import strides_of, tile_strides


def buffer_sizes(inputs: SSDInputs, precision: Precision, config: PortableConfig) -> BufferSizes:
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


class PortableLaunch:
    """A call without its tensors.  It serves all inputs of one `SSDInputs.signature` and keeps none of them."""

    def __init__(self, inputs: SSDInputs, precision: Precision, config: PortableConfig) -> None:
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


def ssd_fused_portable(inputs: SSDInputs, precision: Precision, *, config: PortableConfig) -> SSDOutput:
    """Output in x's dtype, final states in fp32.  `fused.py` has rejected unsupported inputs."""
    return PortableLaunch(inputs, precision, config)(inputs)


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


def _options(inputs: SSDInputs, precision: Precision, config: PortableConfig, handover: bool) -> dict[str, Any]:
    nheads, headdim = inputs.x.shape[2:]
    return {
        "HEADS": nheads,
        "HEADS_PER_GROUP": inputs.heads_per_group,
        "HEADDIM": headdim,
        "DSTATE": inputs.B.shape[3],
        "CHUNK": config.chunk,
        "BLOCK_P": config.block_p,
        "BLOCK_N": min(config.block_n, whole_block(inputs.B.shape[3])),
        "RULE": (config.max_segments, config.min_chunks, config.max_chunks),
        "HANDOVER": handover,
        "P_ROWS": config.p_rows,
        "DT_SOFTPLUS": inputs.dt_softplus,
        "INTERMEDIATE": TL_DTYPE[precision.intermediate_dtype(inputs.x.dtype)],
        "ALIGNED": inputs.cu_seqlens is None and inputs.x.shape[1] % config.chunk == 0,
        "OFFSET": tl.int32 if _span(inputs, config.chunk) < 2**31 else tl.int64,
        "STATE_STAGES": config.state_stages,
        "SCAN_STAGES": config.scan_stages,
        "num_warps": config.num_warps,
    }


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
