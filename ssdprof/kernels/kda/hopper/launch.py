"""The launches of `hopper_kernel.py` and `whole_kernel.py`: which inputs they support, which of the
two is faster, the slabs, and the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ssdprof.kernels import registry
from ssdprof.kernels.device import sm_count
from ssdprof.kernels.gdn.hopper.config import untiled
from ssdprof.kernels.gdn.inputs import GDNOutput, state_strides
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.kda.hopper.hopper_kernel import _kda_hopper_kernel
from ssdprof.kernels.kda.hopper.prep import WARPS
from ssdprof.kernels.kda.hopper.rings import SIZE
from ssdprof.kernels.kda.hopper.tiles import DIM, HALF
from ssdprof.kernels.kda.hopper.whole_kernel import _kda_whole_kernel
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
)

RESIDENT = 2  # programs on a multiprocessor at the same time
# registers of a thread on average; `prepare` and `scan` get those that the other roles do not need
REGISTERS = 128
LEAST_SLAB, MOST_SLAB = 4, 32  # chunks
# Microseconds that a multiprocessor of an H200 takes for 64 positions of a head, and for the start
# of a sequence and head: with slabs that fill the GPU (benchmarks/log/kda.md, row 16), and with a
# program for a whole sequence (least squares over the three times of row 18, within 2 us)
SLAB_CHUNK, SLAB_START = 8.9, 4.7
WHOLE_CHUNK, WHOLE_START = 4.9, 5.1
# Configuration of `whole_kernel.py`: chunks of q, k and v in shared memory; chunks of g there; and
# registers of a thread in three roles, of which the role `states` gets the remaining ones
WHOLE_CONFIG = dict(
    slots=3, gate_slots=2, decay_registers=112, score_registers=144, copy_registers=24
)


@dataclass(frozen=True, kw_only=True)
class KDAHopperConfig:
    """The configuration of `hopper_kernel.py`.

    slab: chunks of a slab: the most that a program scans.
    behind: number of slabs that are prepared before the first slab is scanned.
    reason: why the sizes were chosen, for reports.
    """

    slab: int
    behind: int = 1
    reason: str = ""

    @classmethod
    def choose(cls, inputs: KDAInputs, *, batch_invariant: bool = False) -> KDAHopperConfig:
        """Slabs of an eighth of all chunks, within limits.

        While a slab is scanned, later slabs are prepared, but nothing runs beside the scan of the
        last slab, so that it should be short.  On the other hand, loading and storing the state of
        a slab takes as long as scanning two or three chunks.  Bits never depend on slabs, so that
        batch_invariant has no effect.
        """
        del batch_invariant
        heads, longest = inputs.v.shape[2], ceil_div(inputs.v.shape[1], CHUNK.value)
        chunks = longest if inputs.cu_seqlens is not None else longest * inputs.sequences
        slab = min(max(chunks // 8, LEAST_SLAB), MOST_SLAB)
        slab = ceil_div(longest, ceil_div(longest, slab))
        behind = max(1, round(RESIDENT * sm_count(inputs.q) / (slab * heads)))
        return cls(slab=slab, behind=behind, reason=f"slabs of {slab} chunks for {heads} heads")


def slab_count(inputs: KDAInputs, config: KDAHopperConfig) -> int:
    """The number of slabs of all sequences.  If sequences are packed, a slab may have parts of
    several.
    """
    if inputs.cu_seqlens is not None:
        return ceil_div(inputs.slot_count(CHUNK.value), config.slab)
    return inputs.sequences * ceil_div(
        inputs.slot_count(CHUNK.value) // inputs.sequences, config.slab
    )


def flag_count(inputs: KDAInputs, config: KDAHopperConfig) -> int:
    """The number of counters and flags by which programs wait for each other: one for each slab and
    head, and one for each of its scans.
    """
    heads, value_dim = inputs.v.shape[2:]
    return slab_count(inputs, config) * int(heads * (1 + value_dim // HALF.value))


def workspace(inputs: KDAInputs) -> tuple[int, dict[str, tuple[int, int, torch.dtype]]]:
    """The bytes of the tensors that programs of `hopper_kernel.py` write for each other, and their
    places (`tensors.places`).
    """
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
    """The reason why `hopper_kernel.py` does not support the inputs; empty if it does."""
    q, v = inputs.q, inputs.v
    reason = untiled(inputs, k=inputs.k, g=inputs.g, v=v)
    yield reason != "", reason
    yield inputs.g.dtype == torch.float64, "fp64 gates"
    yield (
        q.shape[3] != DIM.value or v.shape[3] % HALF.value != 0,
        f"K {q.shape[3]} with V {v.shape[3]}",
    )
    yield (
        q.dtype == torch.float32 or not inputs.use_qk_l2norm,
        "fp32 inputs, and q and k that it does not normalise",
    )


@registry.first_reason
def whole_unsupported(inputs: KDAInputs) -> registry.Reasons:
    """The reason why `whole_kernel.py` does not support the inputs; empty if it does."""
    reason = hopper_unsupported(inputs)
    yield reason != "", reason
    yield inputs.v.shape[3] != DIM.value, f"V {inputs.v.shape[3]}"
    yield inputs.q.dtype != torch.bfloat16, "fp16 inputs, whose operands do not reach 2^84"


def whole_is_faster(inputs: KDAInputs, sms: int) -> bool:
    """Whether a program for each sequence and head is faster than slabs on a GPU of `sms`
    multiprocessors, by a model of both times that depends on sizes only.

    Slabs fill the GPU for any sequences.  Programs for whole sequences run in rounds of `sms`
    programs.  A round takes as long as a sequence, and in the last round some multiprocessors are
    idle.

    The host does not know the lengths of packed sequences.  At worst, they run one after the other,
    each in the rounds of its heads: a program begins when another one ends, so that the sum over
    all sequences is an upper bound for any lengths.  Packed sequences run whole only if that bound
    is below the time of slabs, which needs more than half as many heads as multiprocessors.
    """
    heads, sequences = inputs.v.shape[2], inputs.sequences
    if inputs.cu_seqlens is None:
        chunks: float = ceil_div(inputs.length, CHUNK.value)
        rounds = ceil_div(sequences * heads, sms)
    else:
        chunks = inputs.length / CHUNK.value / sequences  # on average
        rounds = sequences * ceil_div(heads, sms)
    whole = rounds * (chunks * WHOLE_CHUNK + WHOLE_START)
    slabs = sequences * heads / sms * (chunks * SLAB_CHUNK + SLAB_START)
    return whole < slabs


def hopper_launch(
    inputs: KDAInputs, config: KDAHopperConfig, *, state_v_first: bool
) -> PreparedLaunch:
    """The launch of `hopper_kernel.py` for all inputs of one signature.  Requires that
    `hopper_unsupported` is empty.

    state_v_first: whether final states are (sequences, HV, V, K) in memory.
    """
    index, device = inputs.q.get_device(), inputs.q.device
    heads, value_dim = inputs.v.shape[2:]
    slabs, slices = slab_count(inputs, config), value_dim // HALF.value
    strides = state_strides(*inputs.states_shape[1:], v_first=state_v_first)
    nbytes, parts = workspace(inputs)
    *input_makers, output_maker = _tiles(inputs, CHUNK.value, HALF.value)
    # functions that make descriptors, in the order of the kernel's arguments
    makers = *input_makers, *_factors(inputs), output_maker
    sizes = inputs.sequences, slabs, config.slab, config.behind
    launcher = _launcher(_kda_hopper_kernel, sizes, inputs, strides, SLICES=slices)
    programs = (slabs + config.behind) * heads * (config.slab + slices)
    flags = flag_count(inputs, config)

    def call(inputs: KDAInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            sync = torch.zeros(flags, dtype=torch.int32, device=device)
            memory = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
            *factors, ends = (Part(memory, *place) for place in parts.values())
            output = _outputs(inputs, strides)
            tiled: tuple[torch.Tensor | Part, ...] = (inputs.q, inputs.k, inputs.g, inputs.v)
            tiled += (*factors, output.out)
            descriptors = (make(tensor) for make, tensor in zip(makers, tiled, strict=True))
            tensors = inputs.beta, inputs.cu_seqlens, ends, inputs.initial_state, sync
            launcher(programs, *descriptors, *tensors, output.final_states)
        return output

    return call


def whole_launch(
    inputs: KDAInputs, config: Mapping[str, int], *, state_v_first: bool
) -> PreparedLaunch:
    """The launch of `whole_kernel.py` for all inputs of one signature.  Requires that
    `whole_unsupported` is empty.

    config: `WHOLE_CONFIG`.  state_v_first: whether final states are (sequences, HV, V, K) in
    memory.
    """
    index = inputs.q.get_device()
    strides = state_strides(*inputs.states_shape[1:], v_first=state_v_first)
    makers = _tiles(inputs, SIZE.value, DIM.value)
    options = {name.upper(): value for name, value in config.items()}
    launcher = _launcher(_kda_whole_kernel, (), inputs, strides, **options)
    programs = inputs.sequences * inputs.v.shape[2]

    def call(inputs: KDAInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            output = _outputs(inputs, strides)
            tiled = inputs.q, inputs.k, inputs.g, inputs.v, output.out
            descriptors = (make(tensor) for make, tensor in zip(makers, tiled, strict=True))
            tensors = inputs.beta, inputs.cu_seqlens, inputs.initial_state
            launcher(programs, *descriptors, *tensors, output.final_states)
        return output

    return call


def _tiles(inputs: KDAInputs, positions: int, columns: int) -> list[Described]:
    """Functions that make the descriptors of q, k, g, v and out, for tiles of `positions` and
    `columns` of one head.
    """
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device="meta")
    return [
        tiles(
            tensor,
            steps(tensor, tensor.stride(2)),
            sizes=(tensor.shape[2], tensor.shape[3]),
            block=(1, positions, columns),
            packed=inputs.cu_seqlens is not None,
        )
        for tensor in (inputs.q, inputs.k, inputs.g, inputs.v, out)
    ]


def _factors(inputs: KDAInputs) -> list[Described]:
    """Functions that make the descriptors of keys, queries, X and W, for tiles of one head, one
    chunk and 64 columns.
    """
    row_count = inputs.slot_count(CHUNK.value) * inputs.v.shape[2] * CHUNK.value
    return [
        described(inputs.q.dtype, (row_count, columns), (columns, 1), (CHUNK.value, HALF.value))
        for columns in (DIM.value, DIM.value, DIM.value, CHUNK.value)
    ]


def _outputs(inputs: KDAInputs, strides: tuple[int, ...]) -> GDNOutput:
    """A new output, whose final states have these strides."""
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    final_states = torch.empty_strided(
        inputs.states_shape, strides, dtype=torch.float32, device=inputs.v.device
    )
    return GDNOutput(out, final_states)


def _launcher(
    kernel: Any,
    sizes: tuple[int, ...],
    inputs: KDAInputs,
    final_strides: tuple[int, ...],
    **options: int,
) -> Launcher:
    """The launcher of a kernel with the arguments that all calls of a signature share.

    sizes: the kernel's scalars between the length and the scale.  final_strides: strides of the
    final states.  options: compile-time arguments of this kernel alone.
    """
    beta, initial_strides = inputs.beta, strides_of(inputs.initial_state) or (0, 0, 0, 0)
    strides = (
        (beta.stride(0), row_stride(beta), beta.stride(2)),
        strides_of(inputs.cu_seqlens) or (0,),
    )
    shared = dict(
        HEADS=inputs.v.shape[2],
        VALUES_PER_KEY=inputs.values_per_key,
        GATE_BYTES=inputs.g.element_size(),
        PACKED=inputs.cu_seqlens is not None,
        STATE_STRIDES=(*initial_strides, *final_strides),
        num_warps=WARPS.value,
        maxnreg=REGISTERS,
    )
    scalars = strides, inputs.v.shape[1], *sizes, inputs.scale_or_default
    return Launcher(kernel, scalars, shared | options)
