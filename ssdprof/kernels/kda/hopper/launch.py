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
    PartPlace,
    described,
    places,
    row_stride,
    steps,
    strides_of,
    tiles,
)

RESIDENT = 2  # programs of `hopper_kernel.py` on a multiprocessor at the same time
# Registers of a thread, on average over a program's roles.  The first role (`prepare`, `scan` or
# `states`) gets those that the others do not need.
REGISTERS = 128
# Chunks.  With fewer, loading and storing the state of a slab would take as long as its scan; with
# more, the scan of the last slab, beside which nothing runs, would take long.
LEAST_SLAB, MOST_SLAB = 4, 32
# Microseconds that a multiprocessor of an H200 takes for 64 positions of a head, and for the start
# of a sequence and head: with slabs that fill the GPU (benchmarks/log/kda.md, row 16), and with a
# program for a whole sequence (least squares over the three times of row 18, within 3 us)
SLAB_CHUNK_US, SLAB_START_US = 8.9, 4.7
WHOLE_CHUNK_US, WHOLE_START_US = 4.9, 5.1
# Configuration of `whole_kernel.py`: chunks of q, k and v in shared memory; chunks of g there; and
# the registers of a thread in the roles `decays` and `scores`, and in the two roles that copy.  The
# role `states` gets the rest.
WHOLE_CONFIG = dict(
    slots=3, gate_slots=2, decay_registers=112, score_registers=144, copy_registers=24
)


@dataclass(frozen=True, kw_only=True)
class KDAHopperConfig:
    """The configuration of `hopper_kernel.py`.

    slab: chunks of a slab: the most that a program scans.
    behind: a group of programs that prepares slab g scans slab g - behind.
    reason: why the sizes were chosen, for reports.
    """

    slab: int
    behind: int = 1
    reason: str = ""

    @classmethod
    def choose(cls, inputs: KDAInputs, *, batch_invariant: bool = False) -> KDAHopperConfig:
        """Slabs of an eighth of all chunks, within LEAST_SLAB and MOST_SLAB, and then so much
        shorter that all slabs of a sequence, or of a pack, are about equally long.

        While a slab is scanned, later slabs are prepared, but nothing runs beside the scan of the
        last slab, so that it should be short.  On the other hand, loading and storing the state of
        a slab takes as long as scanning two or three chunks.  Bits never depend on slabs, so that
        batch_invariant has no effect.

        Programs that prepare `behind` slabs fill the GPU.
        """
        del batch_invariant
        heads, row_chunks = inputs.v.shape[2], ceil_div(inputs.v.shape[1], CHUNK.value)
        # a pack is one row of the batch, and in other calls each row is a sequence
        chunks = row_chunks * inputs.v.shape[0]
        slab = min(max(chunks // 8, LEAST_SLAB), MOST_SLAB)
        slab = ceil_div(row_chunks, ceil_div(row_chunks, slab))
        behind = max(1, round(RESIDENT * sm_count(inputs.q) / (slab * heads)))
        return cls(slab=slab, behind=behind, reason=f"slabs of {slab} chunks for {heads} heads")


def slab_count(inputs: KDAInputs, config: KDAHopperConfig) -> int:
    """The number of slabs of all sequences.  If sequences are packed, a slab may have parts of
    several; otherwise each sequence begins with a new slab.
    """
    slots = inputs.slot_count(CHUNK.value)
    if inputs.cu_seqlens is not None:
        return ceil_div(slots, config.slab)
    return inputs.sequences * ceil_div(slots // inputs.sequences, config.slab)


def flag_count(inputs: KDAInputs, config: KDAHopperConfig) -> int:
    """The number of counters and flags by which programs wait for each other: a counter for each
    slab and head, and a flag for each of their scans, of 64 columns of V.
    """
    heads, value_dim = inputs.v.shape[2:]
    return slab_count(inputs, config) * int(heads * (1 + value_dim // HALF.value))


def workspace(inputs: KDAInputs) -> tuple[int, dict[str, PartPlace]]:
    """The bytes of the tensors that programs of `hopper_kernel.py` write for each other, and their
    places (`tensors.places`).
    """
    # the slots of all heads
    slots, dtype = inputs.slot_count(CHUNK.value) * inputs.v.shape[2], inputs.q.dtype
    factor = (dtype, slots, CHUNK.value, DIM.value)
    nbytes, parts = places(
        {
            "keys": factor,
            "queries": factor,
            "X": factor,
            "W": (dtype, slots, CHUNK.value, CHUNK.value),
            "ends": (torch.float32, slots, DIM.value),
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
    yield q.dtype == torch.float32, "fp32 inputs"
    yield not inputs.use_qk_l2norm, "q and k that it does not normalise"


@registry.first_reason
def whole_unsupported(inputs: KDAInputs) -> registry.Reasons:
    """The reason why `whole_kernel.py` does not support the inputs; empty if it does."""
    reason = hopper_unsupported(inputs)
    yield reason != "", reason
    yield inputs.v.shape[3] != DIM.value, f"V {inputs.v.shape[3]}"
    yield inputs.q.dtype != torch.bfloat16, "fp16 inputs, which cannot hold operands up to 2^84"


def whole_is_faster(inputs: KDAInputs, sms: int) -> bool:
    """Whether a program for each sequence and head is faster than slabs on a GPU of `sms`
    multiprocessors, by a model of both times that depends on sizes only.

    Slabs fill the GPU for any sequences.  Programs for whole sequences run in rounds of `sms`
    programs.  A round takes as long as a sequence, and in the last round some multiprocessors are
    idle.

    The host does not know the lengths of packed sequences.  At worst, they run one after the other,
    each in the rounds of its heads: a program begins when another one ends, so that the sum over
    all sequences is an upper bound for any lengths, but for the last chunks, which are not full.
    Packed sequences run whole only if that bound is below the time of slabs, which needs more than
    half as many heads as multiprocessors.
    """
    heads, sequences = inputs.v.shape[2], inputs.sequences
    if inputs.cu_seqlens is None:
        chunks: float = ceil_div(inputs.length, CHUNK.value)  # of a sequence
        rounds = ceil_div(sequences * heads, sms)
    else:
        chunks = inputs.length / CHUNK.value / sequences  # of a sequence, on average
        rounds = sequences * ceil_div(heads, sms)
    whole_us = rounds * (chunks * WHOLE_CHUNK_US + WHOLE_START_US)
    slabs_us = sequences * heads / sms * (chunks * SLAB_CHUNK_US + SLAB_START_US)
    return whole_us < slabs_us


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
    groups = slabs + config.behind  # of programs that prepare one slab and scan another
    programs = groups * heads * (config.slab + slices)
    flags = flag_count(inputs, config)

    def call(call_inputs: KDAInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            sync = torch.zeros(flags, dtype=torch.int32, device=device)
            memory = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
            # in the order of `workspace`; only the factors have descriptors
            *factors, ends = (Part(memory, *place) for place in parts.values())
            output = _outputs(call_inputs, strides)
            tiled: tuple[torch.Tensor | Part, ...] = (
                call_inputs.q,
                call_inputs.k,
                call_inputs.g,
                call_inputs.v,
                *factors,
                output.out,
            )
            descriptors = (make(tensor) for make, tensor in zip(makers, tiled, strict=True))
            tensors = (
                call_inputs.beta,
                call_inputs.cu_seqlens,
                *call_inputs.raw_gate[:2],
                ends,
                call_inputs.initial_state,
                sync,
            )
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

    def call(call_inputs: KDAInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            output = _outputs(call_inputs, strides)
            tiled = call_inputs.q, call_inputs.k, call_inputs.g, call_inputs.v, output.out
            descriptors = (make(tensor) for make, tensor in zip(makers, tiled, strict=True))
            tensors = (
                call_inputs.beta,
                call_inputs.cu_seqlens,
                *call_inputs.raw_gate[:2],
                call_inputs.initial_state,
            )
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
    """Functions that make the descriptors of keys, queries, X and W, in this order, for tiles of
    one head, one chunk and 64 columns.
    """
    row_count = inputs.slot_count(CHUNK.value) * inputs.v.shape[2] * CHUNK.value
    return [
        described(inputs.q.dtype, (row_count, columns), (columns, 1), (CHUNK.value, HALF.value))
        for columns in (DIM.value, DIM.value, DIM.value, CHUNK.value)
    ]


def _outputs(inputs: KDAInputs, strides: tuple[int, ...]) -> GDNOutput:
    """New memory for an output, contiguous, and for final states with these strides."""
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
    final states.  options: compile-time arguments of this kernel, beside those of both kernels.
    """
    beta, initial_strides = inputs.beta, strides_of(inputs.initial_state) or (0, 0, 0, 0)
    strides = (
        (beta.stride(0), row_stride(beta), beta.stride(2)),
        strides_of(inputs.cu_seqlens) or (0,),
    )
    options_of_both = dict(
        HEADS=inputs.v.shape[2],
        VALUES_PER_KEY=inputs.values_per_key,
        GATE_BYTES=inputs.g.element_size(),
        LOWER_BOUND=inputs.raw_gate[2],
        PACKED=inputs.cu_seqlens is not None,
        STATE_STRIDES=(*initial_strides, *final_strides),
        num_warps=WARPS.value,
        maxnreg=REGISTERS,
    )
    scalars = strides, inputs.v.shape[1], *sizes, inputs.scale_or_default
    return Launcher(kernel, scalars, options_of_both | options)
