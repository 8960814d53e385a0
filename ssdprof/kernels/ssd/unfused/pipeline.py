"""SSD in five launches, one per stage of the algorithm: the baseline.

`ssd_unfused(...)` takes tensors, as `ssd_fused` does; the registered implementation, `run`, takes `SSDInputs`.
By default, dtypes are those of the original unfused kernels of state-spaces/mamba.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ssdprof.kernels.chunks import Chunks, chunk_count
from ssdprof.kernels.device import INTERPRETED, refuse_device, refuse_gradient
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan, UnsupportedError, register
from ssdprof.kernels.ssd.config import (
    BmmChunkConfig,
    ChunkCumsumConfig,
    ChunkScanConfig,
    ChunkStateConfig,
    StatePassingConfig,
)
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.unfused.stages import bmm_chunk, chunk_cumsum, chunk_scan, chunk_state, state_passing

MAX_HEADDIM, MAX_DSTATE = 128, 256


def ssd_unfused(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    chunk_size: int = 256,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    precision: Precision = Precision(),  # noqa: B008
    batch_invariant: bool = False,  # noqa: ARG001
) -> SSDOutput:
    """The SSD (Mamba-2) operator in five launches, forward only.  Arguments and result are those of `ssd_fused`.

    chunk_size: positions per chunk, rounded down to a power of two from 16 to 256.  batch_invariant: no effect, every
    call is batch invariant.  Does not support torch.compile(fullgraph=True).

    Raises ValueError for inputs that do not fit together, and UnsupportedError for unsupported ones.
    """
    inputs = SSDInputs(
        x=x, dt=dt, A=A, B=B, C=C, chunk_size=chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
        dt_limit=dt_limit, initial_states=initial_states, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return run(inputs, precision)


def run(inputs: SSDInputs, precision: Precision = Precision()) -> SSDOutput:  # noqa: B008
    """Output in x's dtype, final states in fp32.

    Raises UnsupportedError for sizes above MAX_HEADDIM or MAX_DSTATE, for inputs that require a gradient, and, outside
    Triton's interpreter, for tensors that are not on a GPU.
    """
    _refuse_unsupported(inputs)
    with torch.cuda.device(inputs.x.get_device()):  # no effect for -1, the CPU
        return five_stages(inputs, precision)


def five_stages(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    """`run` without checks, on the current device."""
    chunks = Chunks.of(inputs)
    dt, dA_cumsum_log2 = chunk_cumsum(
        inputs.dt, inputs.A, chunks, dt_bias=inputs.dt_bias, dt_softplus=inputs.dt_softplus, dt_limit=inputs.dt_limit
    )
    states = chunk_state(inputs.x, inputs.B, dt, dA_cumsum_log2, chunks, precision=precision)
    prev_states, final_states = state_passing(
        states, dA_cumsum_log2, chunks, initial_states=inputs.initial_states, state_dtype=precision.state_dtype
    )
    del states  # CB can reuse its memory
    CB = bmm_chunk(inputs.C, inputs.B, chunks, precision=precision)
    out = chunk_scan(inputs, dt, dA_cumsum_log2, prev_states, CB, chunks)
    return SSDOutput(out, final_states)


def plan(inputs: SSDInputs, precision: Precision = Precision()) -> Plan:  # noqa: B008
    """The launches, configurations and workspace of a call.  Allocates and launches nothing."""
    _refuse_unsupported(inputs)
    (batch, _, nheads, headdim), (ngroups, dstate) = inputs.x.shape, inputs.B.shape[2:]
    nchunks, size, dtype = batch * chunk_count(inputs), inputs.power_of_two_chunk, inputs.x.dtype
    configs: dict[str, Any] = {
        "chunk_cumsum": ChunkCumsumConfig(),
        "chunk_state": ChunkStateConfig.choose(headdim=headdim, dstate=dstate, chunk_size=size, dtype=dtype),
        "state_passing": StatePassingConfig(),
        "bmm_chunk": BmmChunkConfig.choose(dstate=dstate, chunk_size=size, dtype=dtype),
        "chunk_scan": ChunkScanConfig.choose(inputs),
    }
    # bytes, except `states`: elements
    gate = 2 * 4 * nchunks * nheads * size
    states = nchunks * nheads * headdim * dstate
    CB = nchunks * ngroups * size**2 * precision.intermediate_dtype(dtype).itemsize
    return Plan(
        variant="interpreter" if INTERPRETED else "portable",
        launches=5 if inputs.cu_seqlens is None else 6,
        config={"chunk_size": size}
        | {f"{stage}.{key}": value for stage, config in configs.items() for key, value in asdict(config).items()},
        workspace_bytes=gate + precision.state_dtype.itemsize * states + max(4 * states, CB),
        reason="five stages, one launch each" + ("" if inputs.cu_seqlens is None else ", and one for the chunk table"),
    )


def _refuse_unsupported(inputs: SSDInputs) -> None:
    for name, value, limit in (("headdim", inputs.x.shape[3], MAX_HEADDIM), ("dstate", inputs.B.shape[3], MAX_DSTATE)):
        if value > limit:
            raise UnsupportedError(f"unfused: {name} is at most {limit}, not {value}")
    refuse_gradient("unfused", vars(inputs).values())
    refuse_device("unfused", inputs.x, oldest=(0, 0))


register(Implementation(operator="ssd", name="unfused", run=run, plan=plan))
