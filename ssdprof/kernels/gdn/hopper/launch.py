"""Launches of the Hopper kernels: their arguments, workspace and grids."""

from collections.abc import Callable
from typing import Any

import torch
from triton import next_power_of_2

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, row_count
from ssdprof.kernels.gdn.hopper.hopper_kernel import _hopper_kernel, _parts_kernel
from ssdprof.kernels.gdn.hopper.parts import LEAST_ROWS, _combine_kernel
from ssdprof.kernels.gdn.hopper.prep_kernel import _prep_kernel
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput, state_strides
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.tensors import (
    Described,
    Part,
    PartPlace,
    places,
    row_stride,
    rows,
    steps,
    strides_of,
    tiles,
)

AHEAD = 3  # stages of the loop of `_combine_kernel`: parts that are being loaded or used
# slots of the rings of `_hopper_kernel` and of `_parts_kernel`, which has fewer rings: as many as
# fit in 227 KiB of shared memory
RING, PARTS_RING = 2, 3
# registers per thread: of the role `states`, of `part_states`, which holds two matrices, and of
# the roles that compute gates, load and store; in `_hopper_kernel`, `scores` has the rest
STATE_REGISTERS, PARTS_REGISTERS, OTHER_REGISTERS = 192, 240, 24
# Rows of V of a program of `_combine_kernel`, and its warps.  A pair of a sequence and a head has
# DIM / rows programs, each of which reads all transition matrices of the pair.  With up to
# FEW_PAIRS pairs, all programs with few rows run at the same time on the multiprocessors of an
# H200.  With more pairs, programs have more rows, so that the matrices are read half as often.  The
# numbers of warps were not measured alone.
FEW_PAIRS = 16
FEW_ROWS, FEW_ROWS_WARPS = 16, 8
MORE_ROWS, MORE_ROWS_WARPS = 32, 4

Workspace = dict[str, Part | None]  # the tensors of `workspace`, by name
# the results of the first launch: the workspace, and the descriptors of q, k and the inverses
Begun = tuple[Workspace, tuple[Any, Any, Any]]
# tensors of the workspace that the first launch writes besides the inverses, in the order in which
# all kernels except `_combine_kernel` take them; norms only if the call normalises q and k
CHUNK_GATES = ("decays", "bounds", "norms")


def workspace(
    inputs: GDNInputs, config: GDNHopperConfig, *, padded: bool = False
) -> tuple[int, dict[str, PartPlace | None]]:
    """The bytes of the workspace, and the places in it of the tensors that one launch writes for
    another; None for a tensor that the call does not need.

    `_prep_kernel` writes inverse (slots, HV, 64, 64) in q's dtype, decays (slots, HV, 64) fp32,
        bounds (HV, slots) fp32 and, if it normalises q and k, norms (slots, H, 2, 64) fp32
    `_parts_kernel` writes warmup_lengths (rows) int32, finals (rows, parts, V, K) fp32 and
        transitions (rows, parts, 2, K, K) bf16
    `_combine_kernel` writes entering (rows, V, K) fp32
    Rows are those of `parts.py`, all of which may be slow.  Without parts, the call does not need
        the tensors of these two kernels.
    padded: with final states (sequences, HV, 128, 128) fp32, from which `slices.py` copies
    """
    single, chunk, dim = torch.float32, CHUNK.value, DIM.value
    slots = inputs.slot_count(chunk)
    key_heads, heads = inputs.q.shape[2], inputs.v.shape[2]
    parts = config.transition_parts
    row_total = _row_total(inputs, config)
    return places(
        {
            "inverse": (inputs.q.dtype, slots, heads, chunk, chunk),
            "decays": (single, slots, heads, chunk),
            "bounds": (single, heads, slots),
            "norms": (single, slots, key_heads, 2, chunk) if inputs.use_qk_l2norm else None,
            "warmup_lengths": (torch.int32, row_total) if row_total else None,
            "finals": (single, row_total, parts, dim, dim) if row_total else None,
            "transitions": (torch.bfloat16, row_total, parts, 2, dim, dim) if row_total else None,
            "entering": (single, row_total, dim, dim) if row_total else None,
            "padded": (single, inputs.sequences, heads, dim, dim) if padded else None,
        }
    )


def _row_total(inputs: GDNInputs, config: GDNHopperConfig) -> int:
    """The number of rows of `parts.py`; 0 if segments have no parts."""
    return row_count(inputs, config.segment) if config.transition_parts else 0


def launch_count(inputs: GDNInputs, config: GDNHopperConfig) -> int:
    """Four launches if segments have parts, else two."""
    return 4 if _row_total(inputs, config) else 2


def hopper_launch(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool = False
) -> PreparedLaunch:
    """A call with K = V = 128, for all inputs of one signature.  Requires that `unsupported` of
    `hopper/config.py` returns "" for the inputs.

    state_v_first: final states are (sequences, HV, V, K) in memory.
    """
    index = inputs.q.get_device()
    begin, finish = launches(inputs, config, state_v_first=state_v_first)
    shape = inputs.states_shape
    strides = state_strides(*shape[1:], v_first=state_v_first)

    def call(call_inputs: GDNInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            begun = begin(call_inputs)
            # the host does the following while the GPU runs the first launch
            out = torch.empty_like(call_inputs.v, memory_format=torch.contiguous_format)
            final_states = torch.empty_strided(
                shape, strides, dtype=torch.float32, device=call_inputs.q.device
            )
            finish(begun, call_inputs, out, final_states)
        return GDNOutput(out, final_states)

    return call


def launches(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool, padded: bool = False
) -> tuple[Callable[[GDNInputs], Begun], Callable[..., None]]:
    """Two functions, `begin` and `finish`, that together are a call, so that the host allocates
    outputs and copies states while the GPU runs the first launch.  They keep no tensors.  When they
    are called, the current device must be that of the inputs.

    begin(inputs): allocates the workspace, and launches the kernel that inverts the chunks
    finish(begun, inputs, out, final_states): launches the other kernels.  begun: the result of
        `begin`
    padded: the final states are `padded` of the workspace, with K = V = 128
    """
    nbytes, tensor_places = workspace(inputs, config, padded=padded)
    device = inputs.q.device
    invert = _inversion(inputs)
    key_heads, heads = inputs.q.shape[2], inputs.v.shape[2]
    dims = (DIM.value, DIM.value) if padded else inputs.states_shape[2:]
    final_strides = state_strides(heads, *dims, v_first=state_v_first)
    options: dict[str, Any] = dict(
        KEY_HEADS=key_heads,
        HEADS=heads,
        GROUP=heads // key_heads,  # value heads per key head
        FIRST_SEGMENT_EXTRA=config.first_segment_extra,
        PERSISTENT=config.persistent_programs > 0,
        STATE_STRIDES=(*_initial_strides(inputs), *final_strides),
        DEPTH=RING,
        STATE_REGISTERS=STATE_REGISTERS,
        OTHER_REGISTERS=OTHER_REGISTERS,
        num_warps=4,
    )

    def begin(call_inputs: GDNInputs) -> Begun:
        memory = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
        tensors = {
            name: None if place is None else Part(memory, *place)
            for name, place in tensor_places.items()
        }
        return tensors, invert(call_inputs, tensors)

    return begin, _scan(inputs, config, options)


def _initial_strides(inputs: GDNInputs) -> tuple[int, ...]:
    """The four strides of the initial states; zeros if the call has none."""
    return strides_of(inputs.initial_state) or (0, 0, 0, 0)


def _sizes(inputs: GDNInputs) -> tuple[int, int, int]:
    """Arguments of all kernels except `_combine_kernel`: the numbers of positions in a row of the
    batch, of sequences, and of slots for chunks.
    """
    return inputs.length, inputs.sequences, inputs.slot_count(CHUNK.value)


def _inversion(inputs: GDNInputs) -> Callable[[GDNInputs, Workspace], tuple[Any, Any, Any]]:
    """A function of inputs and workspace that launches `_prep_kernel`, and returns the descriptors
    of q, k and the inverses.
    """
    packed = inputs.cu_seqlens is not None
    _, _, slots = _sizes(inputs)
    heads = inputs.v.shape[2]
    q_tiles = _tiles(inputs.q, packed=packed)
    k_tiles = _tiles(inputs.k, packed=packed)
    inverse_rows = slots * heads * CHUNK.value
    inverse_tiles = rows(inputs.q.dtype, inverse_rows, block=(CHUNK.value, CHUNK.value))
    # value heads per program: a divisor of those of a key head, two if possible, or three
    at_once = 1
    if inputs.values_per_key % 2 == 0:
        at_once = 2
    elif inputs.values_per_key % 3 == 0:
        at_once = 3
    gate_strides = tuple(
        (gate.stride(0), row_stride(gate), gate.stride(2)) for gate in (inputs.g, inputs.beta)
    )
    launcher = Launcher(
        _prep_kernel,
        (*gate_strides, strides_of(inputs.cu_seqlens) or (0,), *_sizes(inputs)),
        dict(
            KEY_HEADS=inputs.q.shape[2],
            HEADS=heads,
            AT_ONCE=at_once,
            NORMALISE=inputs.use_qk_l2norm,
            num_warps=4,
            maxnreg=96,  # five programs per SM
        ),
    )

    def invert(call_inputs: GDNInputs, tensors: Workspace) -> tuple[Any, Any, Any]:
        assert tensors["inverse"] is not None
        q = q_tiles(call_inputs.q)
        k = k_tiles(call_inputs.k)
        inverse = inverse_tiles(tensors["inverse"])
        gates = (call_inputs.g, call_inputs.beta)
        chunk_gates = (tensors[name] for name in CHUNK_GATES)
        launcher(
            slots * heads // at_once, k, q, inverse, *gates, call_inputs.cu_seqlens, *chunk_gates
        )
        return q, k, inverse

    return invert


def _scan(
    inputs: GDNInputs, config: GDNHopperConfig, options: dict[str, Any]
) -> Callable[..., None]:
    """`finish` of `launches`: the launches for slow heads, if segments have parts, and then
    `_hopper_kernel`, which writes the output and the final states.

    options: compile-time arguments and launch options of `_hopper_kernel`
    """
    packed = inputs.cu_seqlens is not None
    heads, value_dim = inputs.v.shape[2:]
    v_tiles = _tiles(inputs.v, packed=packed)
    position = heads * value_dim  # elements of a position of out, which is contiguous
    out_tiles = _tiles(inputs.v, (inputs.length * position, position, value_dim), packed=packed)
    scalars = (
        strides_of(inputs.cu_seqlens) or (0,),
        inputs.scale_or_default,
        config.truncation_log2,
        *_sizes(inputs),
        config.segment,
    )
    scan = Launcher(_hopper_kernel, scalars, options)
    enter = _entering(inputs, config, scalars, options)
    programs = inputs.sequences * heads + row_count(inputs, config.segment)
    if config.persistent_programs:
        programs = min(config.persistent_programs, inputs.sequences * heads)

    def finish(
        begun: Begun, call_inputs: GDNInputs, out: torch.Tensor, final_states: torch.Tensor | Part
    ) -> None:
        tensors, (q, k, inverse) = begun
        v = v_tiles(call_inputs.v)
        gates = [tensors[name] for name in CHUNK_GATES]
        if enter is not None:
            enter(tensors, k, v, inverse, call_inputs, gates)
        scan(
            programs,
            q,
            k,
            v,
            inverse,
            out_tiles(out),
            call_inputs.initial_state,
            call_inputs.cu_seqlens,
            tensors["entering"],
            tensors["warmup_lengths"],
            final_states,
            *gates,
        )

    return finish


def _entering(
    inputs: GDNInputs, config: GDNHopperConfig, scalars: tuple[Any, ...], options: dict[str, Any]
) -> Callable[..., None] | None:
    """A function that launches the kernels of `parts.py`, which compute the states that enter
    segments of slow heads; None if segments have no parts.

    scalars, options: those of `_hopper_kernel`, which `_parts_kernel` has, too
    """
    row_total = _row_total(inputs, config)
    if not row_total:
        return None
    pairs = inputs.sequences * inputs.v.shape[2]
    part_total = config.transition_parts * row_total
    boundaries = row_total // pairs  # between the segments of a sequence
    programs = min(config.transition_programs, part_total)
    block_v, warps = MORE_ROWS, MORE_ROWS_WARPS
    if pairs <= FEW_PAIRS:
        block_v, warps = FEW_ROWS, FEW_ROWS_WARPS
    parts_options = options | dict(
        ROWS=max(LEAST_ROWS, next_power_of_2(row_total)),
        PARTS=config.transition_parts,
        # most parts of a program, if all rows are slow, as a power of two
        PARTS_OF_PROGRAM=next_power_of_2(ceil_div(part_total, programs)),
        DEPTH=PARTS_RING,
        STATE_REGISTERS=PARTS_REGISTERS,
    )
    compute = Launcher(
        _parts_kernel,
        (*scalars, row_total, config.longest_first_pass, config.least_first_pass),
        parts_options,
    )
    combine = Launcher(
        _combine_kernel,
        (_initial_strides(inputs), pairs, boundaries, config.segment),
        dict(
            HEADS=inputs.v.shape[2],
            PARTS=config.transition_parts,
            BOUNDARIES=next_power_of_2(boundaries),
            DIM=DIM.value,
            BLOCK_V=block_v,
            AHEAD=AHEAD,
            num_warps=warps,
        ),
    )

    def enter(
        tensors: Workspace,
        k: Any,
        v: Any,
        inverse: Any,
        call_inputs: GDNInputs,
        gates: list[Part | None],
    ) -> None:
        results = tensors["finals"], tensors["transitions"], tensors["warmup_lengths"]
        compute(programs, k, v, inverse, call_inputs.cu_seqlens, *results, *gates)
        combine(
            pairs * DIM.value // block_v, *results, call_inputs.initial_state, tensors["entering"]
        )

    return enter


def _tiles(
    tensor: torch.Tensor, strides: tuple[int, int, int] | None = None, *, packed: bool
) -> Described:
    """Descriptors of tiles of one head and one chunk, padded with zeros to DIM columns.

    tensor: any with the shape and dtype
    strides: between sequences, positions and heads; None: those of `tensor`
    """
    strides = steps(tensor, tensor.stride(2)) if strides is None else strides
    heads, columns = tensor.shape[2:]
    return tiles(
        tensor, strides, sizes=(heads, columns), block=(1, CHUNK.value, DIM.value), packed=packed
    )
