"""The launch of `hopper_kernel.py`: which inputs it supports, its slabs, and its workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.kernels import registry
from ssdprof.kernels.device import INTERPRETED, capability, sm_count
from ssdprof.kernels.gdn.inputs import GDNOutput, state_strides
from ssdprof.kernels.gdn.portable import slot_count
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
REGISTERS = 128  # of a thread, on average: `work` takes those that copying roles do not need
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
    if inputs.cu_seqlens is None:
        chunks = ceil_div(inputs.v.shape[1], CHUNK.value)
        return inputs.sequences * ceil_div(chunks, config.slab)
    slots = slot_count(inputs.v.shape[1], inputs.sequences, CHUNK.value, packed=True)
    return ceil_div(slots, config.slab)


def workspace(inputs: KDAInputs) -> tuple[int, dict[str, tuple[int, int, torch.dtype]]]:
    """Bytes and places of what programs write for others; see `hopper_kernel.py`."""
    slots = slot_count(
        inputs.v.shape[1], inputs.sequences, CHUNK.value, packed=inputs.cu_seqlens is not None
    )
    chunks, dtype = slots * inputs.v.shape[2], inputs.q.dtype
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
    slots = slot_count(
        inputs.length, inputs.sequences, CHUNK.value, packed=inputs.cu_seqlens is not None
    )
    yield slots * CHUNK.value * v.shape[2] >= 2**31, "2^31 positions of all heads"
    reason = unreadable(q=q, k=inputs.k, g=inputs.g, v=v)
    yield reason != "", reason


def hopper_launch(
    inputs: KDAInputs, config: KDAHopperConfig, *, state_v_first: bool
) -> PreparedLaunch:
    index, device = inputs.q.get_device(), inputs.q.device
    heads, value_dim = inputs.v.shape[2:]
    slabs, slices = slab_count(inputs, config), value_dim // HALF.value
    nbytes, parts = workspace(inputs)
    row_count = parts["W"][1] // (CHUNK.value * inputs.q.element_size())
    factors = [
        described(inputs.q.dtype, (row_count, columns), (columns, 1), (CHUNK.value, HALF.value))
        for columns in (DIM.value, DIM.value, DIM.value, CHUNK.value)
    ]
    read = [_tiles(tensor, inputs) for tensor in (inputs.q, inputs.k, inputs.g, inputs.v)]
    out_tiles = _tiles(torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device="meta"), inputs)
    states_shape = inputs.states_shape
    final = state_strides(*states_shape[1:], v_first=state_v_first)
    initial = strides_of(inputs.initial_state) or (0, 0, 0, 0)
    v_strides, beta_strides = (
        (tensor.stride(0), row_stride(tensor), tensor.stride(2))
        for tensor in (inputs.v, inputs.beta)
    )
    strides = v_strides, beta_strides, strides_of(inputs.cu_seqlens) or (0,)
    sizes = inputs.v.shape[1], inputs.sequences, slabs, config.slab, config.behind
    launcher = Launcher(
        _kda_hopper_kernel,
        (strides, *sizes, inputs.scale_or_default),
        dict(
            HEADS=heads,
            VALUES_PER_KEY=inputs.values_per_key,
            SLICES=slices,
            GATE_BYTES=inputs.g.element_size(),
            PACKED=inputs.cu_seqlens is not None,
            STATE_STRIDES=(*initial, *final),
            num_warps=WARPS.value,
            maxnreg=REGISTERS,
        ),
    )
    programs = (slabs + config.behind) * heads * (config.slab + slices)
    flags = slabs * heads * (1 + slices)

    def call(inputs: KDAInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            sync = torch.zeros(flags, dtype=torch.int32, device=device)
            memory = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
            *between, ends = (Part(memory, *where) for where in parts.values())
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            final_states = torch.empty_strided(
                states_shape, final, dtype=torch.float32, device=device
            )
            tensors: tuple[torch.Tensor | Part, ...] = (
                inputs.q,
                inputs.k,
                inputs.g,
                inputs.v,
                *between,
                out,
            )
            descriptors = (
                describe(tensor)
                for describe, tensor in zip((*read, *factors, out_tiles), tensors, strict=True)
            )
            launcher(
                programs,
                *descriptors,
                inputs.v,
                inputs.beta,
                inputs.cu_seqlens,
                ends,
                inputs.initial_state,
                sync,
                final_states,
            )
        return GDNOutput(out, final_states)

    return call


def _tiles(tensor: torch.Tensor, inputs: KDAInputs) -> Described:
    """Tiles of one head, one chunk and half of the columns."""
    return tiles(
        tensor,
        steps(tensor, tensor.stride(2)),
        sizes=(tensor.shape[2], tensor.shape[3]),
        block=(1, CHUNK.value, HALF.value),
        packed=inputs.cu_seqlens is not None,
    )
