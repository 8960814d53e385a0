"""The launch of `hopper_kernel.py`: which inputs it supports, its slabs, and its workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.kernels import registry
from ssdprof.kernels.device import INTERPRETED, capability, sm_count
from ssdprof.kernels.gdn.inputs import GDNOutput, state_strides
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.kda.hopper.hopper_kernel import _kda_hopper_kernel
from ssdprof.kernels.kda.hopper.prep import WARPS
from ssdprof.kernels.kda.hopper.tiles import DIM, HALF
from ssdprof.kernels.kda.inputs import KDAInputs
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.tensors import (
    Described,
    Part,
    described,
    places,
    row_stride,
    steps,
    strides_of,
    tiles,
    unreadable,
)

RESIDENT = 2  # programs on a multiprocessor
# of a thread, on average: `prepare` and `scan` take those that the other roles do not need
REGISTERS = 128
LEAST_SLAB, MOST_SLAB = 4, 32  # chunks


@dataclass(frozen=True, kw_only=True)
class KDAHopperConfig:
    """slab: most chunks that a program scans
    behind: slabs that are prepared before the first one is scanned
    """

    slab: int
    behind: int = 1
    reason: str = ""

    @classmethod
    def choose(cls, inputs: KDAInputs, *, batch_invariant: bool = False) -> KDAHopperConfig:
        """An eighth of all chunks, within limits: a slab is scanned when those after it are
        prepared, but nothing runs beside the scan of the last one, and a short slab takes as long
        to load and store its state as to scan two or three chunks.  Bits never depend on slabs, so
        that batch_invariant changes nothing.
        """
        del batch_invariant
        heads, longest = inputs.v.shape[2], ceil_div(inputs.v.shape[1], CHUNK.value)
        chunks = longest if inputs.cu_seqlens is not None else longest * inputs.sequences
        slab = min(max(chunks // 8, LEAST_SLAB), MOST_SLAB)
        slab = ceil_div(longest, ceil_div(longest, slab))
        behind = max(1, round(RESIDENT * sm_count(inputs.q) / (slab * heads)))
        return cls(slab=slab, behind=behind, reason=f"slabs of {slab} chunks for {heads} heads")


def slab_count(inputs: KDAInputs, config: KDAHopperConfig) -> int:
    """Slabs of all sequences.  Those of packed sequences may hold parts of several."""
    if inputs.cu_seqlens is not None:
        return ceil_div(inputs.slot_count(CHUNK.value), config.slab)
    return inputs.sequences * ceil_div(
        inputs.slot_count(CHUNK.value) // inputs.sequences, config.slab
    )


def workspace(inputs: KDAInputs) -> tuple[int, dict[str, tuple[int, int, torch.dtype]]]:
    """Bytes and places of what programs write for others; see `hopper_kernel.py`."""
    chunks, dtype = inputs.slot_count(CHUNK.value) * inputs.v.shape[2], inputs.q.dtype
    factor = (dtype, chunks, CHUNK.value, DIM.value)
    nbytes, parts = places(
        {
            "keys": factor,
            "queries": factor,
            "X": factor,
            "W": (dtype, chunks, CHUNK.value, CHUNK.value),
            "ends": (torch.float32, chunks, DIM.value),
        }
    )
    return nbytes, {name: part for name, part in parts.items() if part is not None}


@registry.first_reason
def hopper_unsupported(inputs: KDAInputs) -> registry.Reasons:
    """Why this kernel does not support `inputs`; empty if it does."""
    q, v = inputs.q, inputs.v
    yield INTERPRETED or not q.is_cuda or capability(q) != (9, 0), "anything but a Hopper GPU"
    yield (
        q.shape[3] != DIM.value or v.shape[3] % HALF.value != 0,
        f"K {q.shape[3]} with V {v.shape[3]}",
    )
    yield (
        q.dtype == torch.float32 or not inputs.use_qk_l2norm,
        "fp32 inputs, and q and k that it does not normalise",
    )
    yield (
        inputs.slot_count(CHUNK.value) * CHUNK.value * v.shape[2] >= 2**31,
        "2^31 positions of all heads",
    )
    reason = unreadable(q=q, k=inputs.k, g=inputs.g, v=v)
    yield reason != "", reason


def hopper_launch(
    inputs: KDAInputs, config: KDAHopperConfig, *, state_v_first: bool
) -> PreparedLaunch:
    """A call for all inputs of one signature.  Requires that `hopper_unsupported` is empty.

    state_v_first: final states are (sequences, HV, V, K) in memory
    """
    index, device = inputs.q.get_device(), inputs.q.device
    heads, value_dim = inputs.v.shape[2:]
    slabs, slices = slab_count(inputs, config), value_dim // HALF.value
    shape = inputs.states_shape
    strides = state_strides(*shape[1:], v_first=state_v_first)
    nbytes, parts = workspace(inputs)
    describe, launcher = _descriptors(inputs), _launcher(inputs, config, slabs, strides)
    programs = (slabs + config.behind) * heads * (config.slab + slices)
    flags = slabs * heads * (1 + slices)

    def call(inputs: KDAInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            sync = torch.zeros(flags, dtype=torch.int32, device=device)
            memory = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
            *factors, ends = (Part(memory, *place) for place in parts.values())
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            final_states = torch.empty_strided(shape, strides, dtype=torch.float32, device=device)
            tiled: tuple[torch.Tensor | Part, ...] = (inputs.q, inputs.k, inputs.g, inputs.v)
            tiled += (*factors, out)
            descriptors = (of(tensor) for of, tensor in zip(describe, tiled, strict=True))
            tensors = inputs.beta, inputs.cu_seqlens, ends, inputs.initial_state, sync, final_states
            launcher(programs, *descriptors, *tensors)
        return GDNOutput(out, final_states)

    return call


def _descriptors(inputs: KDAInputs) -> list[Described]:
    """Descriptors of q, k, g, v, keys, queries, X, W and out: tiles have 64 columns of one head and
    one chunk.
    """
    row_count = inputs.slot_count(CHUNK.value) * inputs.v.shape[2] * CHUNK.value
    factors = [
        described(inputs.q.dtype, (row_count, columns), (columns, 1), (CHUNK.value, HALF.value))
        for columns in (DIM.value, DIM.value, DIM.value, CHUNK.value)
    ]
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device="meta")
    *read, written = (
        tiles(
            tensor,
            steps(tensor, tensor.stride(2)),
            sizes=(tensor.shape[2], tensor.shape[3]),
            block=(1, CHUNK.value, HALF.value),
            packed=inputs.cu_seqlens is not None,
        )
        for tensor in (inputs.q, inputs.k, inputs.g, inputs.v, out)
    )
    return [*read, *factors, written]


def _launcher(
    inputs: KDAInputs, config: KDAHopperConfig, slabs: int, final_strides: tuple[int, ...]
) -> Launcher:
    """With the arguments that all calls of a signature share."""
    beta, initial_strides = inputs.beta, strides_of(inputs.initial_state) or (0, 0, 0, 0)
    strides = (
        (beta.stride(0), row_stride(beta), beta.stride(2)),
        strides_of(inputs.cu_seqlens) or (0,),
    )
    sizes = inputs.v.shape[1], inputs.sequences, slabs, config.slab, config.behind
    return Launcher(
        _kda_hopper_kernel,
        (strides, *sizes, inputs.scale_or_default),
        dict(
            HEADS=inputs.v.shape[2],
            VALUES_PER_KEY=inputs.values_per_key,
            SLICES=inputs.v.shape[3] // HALF.value,
            GATE_BYTES=inputs.g.element_size(),
            PACKED=inputs.cu_seqlens is not None,
            STATE_STRIDES=(*initial_strides, *final_strides),
            num_warps=WARPS.value,
            maxnreg=REGISTERS,
        ),
    )
