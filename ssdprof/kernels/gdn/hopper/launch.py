"""Launches of the Hopper kernels: their arguments, workspace and grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton import next_power_of_2

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, row_count, slot_count
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
    places,
    row_stride,
    rows,
    steps,
    strides_of,
    tiles,
)

AHEAD = 3  # parts of which `_combine_kernel` has loads under way, or uses them
RING, PARTS_RING = 2, 3  # slots of the rings, and of those of `parts.py`
# registers per thread of the role `states`, of a role of two matrices, and of gates, loads, stores
STATE_REGISTERS, PARTS_REGISTERS, OTHER_REGISTERS = 192, 240, 24
# most pairs with 16 rows of V in a program of `_combine_kernel`; with more, 32 fill the GPU, too
WIDE = 16

Workspace = dict[str, Part | None]  # its parts by name
# what the first launch leaves: the workspace; descriptors of q, k and the inverses
Begun = tuple[Workspace, tuple[Any, Any, Any]]
CHUNK_GATES = ("decays", "bounds", "norms")  # that the first launch writes


def workspace(
    inputs: GDNInputs, config: GDNHopperConfig, *, padded: bool = False
) -> tuple[int, dict[str, tuple[int, int, torch.dtype] | None]]:
    """Bytes and places of the tensors that one launch writes for another; None if a call has no
    such launch.

    `prep_kernel.py`: inverse (slots, HV, 64, 64) in q's dtype | decays (slots, HV, 64) fp32 |
        bounds (HV, slots) fp32 norms (slots, H, 2, 64) fp32, if it normalises q and k
    `parts.py`: warmup_lengths (rows) int32 | parts (rows, parts, V, K) fp32 |
        moves (rows, parts, 2, K, K) bf16
    `_combine_kernel`: entering (rows, V, K) fp32
    `slices.py`: padded (sequences, HV, 128, 128) fp32, from which the final states are copied
    """
    single, chunk, dim = torch.float32, CHUNK.value, DIM.value
    slots, heads, count = slot_count(inputs), inputs.v.shape[2], config.transition_parts
    slow = row_count(inputs, config.segment) if count else 0
    return places(
        {
            "inverse": (inputs.q.dtype, slots, heads, chunk, chunk),
            "decays": (single, slots, heads, chunk),
            "bounds": (single, heads, slots),
            "norms": (single, slots, inputs.q.shape[2], 2, chunk) if inputs.use_qk_l2norm else None,
            "warmup_lengths": (torch.int32, slow) if slow else None,
            "parts": (single, slow, count, dim, dim) if slow else None,
            "moves": (torch.bfloat16, slow, count, 2, dim, dim) if slow else None,
            "entering": (single, slow, dim, dim) if slow else None,
            "padded": (single, inputs.sequences, heads, dim, dim) if padded else None,
        }
    )


def launch_count(inputs: GDNInputs, config: GDNHopperConfig) -> int:
    return 4 if config.transition_parts and row_count(inputs, config.segment) else 2


def hopper_launch(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool = False
) -> PreparedLaunch:
    """A call with K = V = 128, for all inputs of one signature.  Requires that `config.unsupported`
    is empty.  state_v_first: final states are (sequences, HV, V, K) in memory
    """
    index = inputs.q.get_device()
    begin, finish = launches(inputs, config, state_v_first=state_v_first)
    shape = inputs.states_shape
    strides = state_strides(*shape[1:], v_first=state_v_first)

    def call(inputs: GDNInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            begun = begin(inputs)
            # the host does the rest while the GPU runs the first launch
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            final_states = torch.empty_strided(
                shape, strides, dtype=torch.float32, device=inputs.q.device
            )
            finish(begun, inputs, out, final_states)
        return GDNOutput(out, final_states)

    return call


def launches(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool, padded: bool = False
) -> tuple[Callable[[GDNInputs], Begun], Callable[..., None]]:
    """Two halves of a call, which keep no tensors; the current device must be that of the inputs in
    both.

    begin: allocates the workspace, and launches the kernel that inverts the chunks.  finish:
        launches the others; its arguments: what `begin` returned, inputs, out, final states.
    padded: final states are written to the workspace with K = V = 128.
    """
    nbytes, part_places = workspace(inputs, config, padded=padded)
    device, invert = inputs.q.device, _inversion(inputs)
    key_heads, heads = inputs.q.shape[2], inputs.v.shape[2]
    dims = (DIM.value, DIM.value) if padded else inputs.states_shape[2:]
    initial = strides_of(inputs.initial_state) or (0, 0, 0, 0)
    options: dict[str, Any] = dict(  # GROUP: value heads per key head
        KEY_HEADS=key_heads,
        HEADS=heads,
        GROUP=heads // key_heads,
        FIRST_SEGMENT_EXTRA=config.first_segment_extra,
        PERSISTENT=config.persistent_programs > 0,
        STATE_STRIDES=(*initial, *state_strides(heads, *dims, v_first=state_v_first)),
        DEPTH=RING,
        STATE_REGISTERS=STATE_REGISTERS,
        OTHER_REGISTERS=OTHER_REGISTERS,
        num_warps=4,
    )

    def begin(inputs: GDNInputs) -> Begun:
        memory = torch.empty(nbytes // 4, dtype=torch.float32, device=device)
        parts = {
            name: None if place is None else Part(memory, *place)
            for name, place in part_places.items()
        }
        return parts, invert(inputs, parts)

    return begin, _scan(inputs, config, options)


def _sizes(inputs: GDNInputs) -> tuple[int, int, int]:
    """Arguments of all kernels: positions of a row of the batch, sequences, and slots of chunks."""
    return inputs.q.shape[1], inputs.sequences, slot_count(inputs)


def _inversion(inputs: GDNInputs) -> Callable[[GDNInputs, Workspace], tuple[Any, Any, Any]]:
    """The launch of `_prep_kernel`, which returns descriptors of q, k and the inverses."""
    packed, heads, slots = inputs.cu_seqlens is not None, inputs.v.shape[2], slot_count(inputs)
    q_tiles, k_tiles = (_tiles(tensor, packed=packed) for tensor in (inputs.q, inputs.k))
    row_count = slots * heads * CHUNK.value
    inverse_rows = rows(inputs.q.dtype, row_count, block=(CHUNK.value, CHUNK.value))
    # value heads per program
    at_once = next((count for count in (2, 3) if inputs.values_per_key % count == 0), 1)
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

    def invert(inputs: GDNInputs, parts: Workspace) -> tuple[Any, Any, Any]:
        assert parts["inverse"] is not None
        q, k, inverse = q_tiles(inputs.q), k_tiles(inputs.k), inverse_rows(parts["inverse"])
        gates, written = (inputs.g, inputs.beta), (parts[name] for name in CHUNK_GATES)
        launcher(slots * heads // at_once, k, q, inverse, *gates, inputs.cu_seqlens, *written)
        return q, k, inverse

    return invert


def _scan(
    inputs: GDNInputs, config: GDNHopperConfig, options: dict[str, Any]
) -> Callable[..., None]:
    """The launches after the first: those of slow heads, if there are any, and `_hopper_kernel`,
    which writes the output and the final states.
    """
    packed, (heads, value_dim) = inputs.cu_seqlens is not None, inputs.v.shape[2:]
    row = heads * value_dim
    v_tiles = _tiles(inputs.v, packed=packed)
    out_tiles = _tiles(inputs.v, (inputs.length * row, row, value_dim), packed=packed)
    scalars = (
        strides_of(inputs.cu_seqlens) or (0,),
        inputs.scale_or_default,
        config.truncation_log2,
        *_sizes(inputs),
        config.segment,
    )
    scan, enter = (
        Launcher(_hopper_kernel, scalars, options),
        _entering(inputs, config, scalars, options),
    )
    programs = inputs.sequences * heads + row_count(inputs, config.segment)
    if config.persistent_programs:
        programs = min(config.persistent_programs, inputs.sequences * heads)

    def finish(
        begun: Begun, inputs: GDNInputs, out: torch.Tensor, final_states: torch.Tensor | Part
    ) -> None:
        parts, (q, k, inverse) = begun
        v, gates = v_tiles(inputs.v), [parts[name] for name in CHUNK_GATES]
        if enter is not None:
            enter(parts, k, v, inverse, inputs, gates)
        descriptors = q, k, v, inverse, out_tiles(out)
        entering = parts["entering"], parts["warmup_lengths"]
        states = inputs.initial_state, inputs.cu_seqlens
        scan(programs, *descriptors, *states, *entering, final_states, *gates)

    return finish


def _entering(
    inputs: GDNInputs, config: GDNHopperConfig, scalars: tuple[Any, ...], options: dict[str, Any]
) -> Callable[..., None] | None:
    """The launches that compute the states entering segments of slow heads; None without such
    segments.
    """
    count = row_count(inputs, config.segment) if config.transition_parts else 0
    if not count:
        return None
    pairs, tasks = inputs.sequences * inputs.v.shape[2], config.transition_parts * count
    boundaries, programs = count // pairs, min(config.transition_programs, tasks)
    block_v, warps = (16, 8) if pairs <= WIDE else (32, 4)
    parts_options = options | dict(
        ROWS=max(LEAST_ROWS, next_power_of_2(count)),
        PARTS=config.transition_parts,
        MOST=next_power_of_2(ceil_div(tasks, programs)),
        DEPTH=PARTS_RING,
        STATE_REGISTERS=PARTS_REGISTERS,
    )
    limits = config.longest_first_pass, config.least_first_pass
    make = Launcher(_parts_kernel, (*scalars, count, *limits), parts_options)
    combine = Launcher(
        _combine_kernel,
        (options["STATE_STRIDES"][:4], pairs, boundaries, config.segment),
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
        parts: Workspace, k: Any, v: Any, inverse: Any, inputs: GDNInputs, gates: list[Part | None]
    ) -> None:
        written = parts["parts"], parts["moves"], parts["warmup_lengths"]
        make(programs, k, v, inverse, inputs.cu_seqlens, *written, *gates)
        combine(pairs * DIM.value // block_v, *written, inputs.initial_state, parts["entering"])

    return enter


def _tiles(
    tensor: torch.Tensor, strides: tuple[int, int, int] | None = None, *, packed: bool
) -> Described:
    """Tiles of one head and one chunk."""
    strides = steps(tensor, tensor.stride(2)) if strides is None else strides
    heads, columns = tensor.shape[2:]
    return tiles(
        tensor, strides, sizes=(heads, columns), block=(1, CHUNK.value, DIM.value), packed=packed
    )
