"""Launches of the Hopper kernels: their arguments, workspace and grids."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton import next_power_of_2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
from ssdprof.kernels.tensors import Described, Part, Place, places, row_stride, rows, steps, tiles

AHEAD = 3  # parts of which `_combine_kernel` has loads under way, or uses them
RING, PARTS_RING = 2, 3  # slots of the rings, and of those of `parts.py`
# registers per thread of the role `states`, of a role of two matrices, and of gates, loads, stores
STATE_REGISTERS, PARTS_REGISTERS, OTHER_REGISTERS = 192, 240, 24
# most pairs with 16 rows of V in a program of `_combine_kernel`; with more, 32 fill the GPU, too
WIDE = 16


def workspace(
    inputs: GDNInputs, config: GDNHopperConfig, *, padded: bool = False
) -> tuple[int, dict[str, Place | None]]:
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
    """Kernels of a call: two, and two more for states that enter segments of slow heads."""
    return 4 if config.transition_parts and row_count(inputs, config.segment) else 2


def hopper_launch(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool = False
) -> PreparedLaunch[GDNInputs]:
    """A call with K = V = 128, for all inputs of one signature.  Requires that `config.unsupported`
    is empty.
    """
    launches = HopperLaunches(inputs, config, state_v_first=state_v_first)
    index, shape = inputs.q.get_device(), inputs.states_shape
    strides = state_strides(*shape[1:], v_first=state_v_first)

    def call(inputs: GDNInputs) -> GDNOutput:
        with torch.cuda.device(index):  # no effect for -1, the CPU
            begun = launches.begin(inputs)
            # the host does the rest while the GPU runs the first launch
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            final_states = torch.empty_strided(
                shape, strides, dtype=torch.float32, device=inputs.q.device
            )
            launches.finish(begun, inputs, out, final_states)
        return GDNOutput(out, final_states)

    return call


class Begun(NamedTuple):
    """A call after its first launch.  parts: of the workspace, by name.  q, k, inverse: descriptors
    for the later launches.
    """

    parts: dict[str, Part | None]
    q: TensorDescriptor
    k: TensorDescriptor
    inverse: TensorDescriptor

    @property
    def gates(self) -> tuple[Part | None, ...]:
        """What `prep_kernel.py` computes from gates and norms."""
        return self.parts["decays"], self.parts["bounds"], self.parts["norms"]


class HopperLaunches:
    """The kernels of a call, without its tensors.  The current device must be that of the inputs.

    padded: final states are written to the workspace with K = V = 128.
    """

    def __init__(
        self,
        inputs: GDNInputs,
        config: GDNHopperConfig,
        *,
        state_v_first: bool,
        padded: bool = False,
    ) -> None:
        seqlen, slots = inputs.length, slot_count(inputs)
        heads, value_dim = inputs.v.shape[2:]
        packed = inputs.cu_seqlens is not None
        self._nbytes, self._places = workspace(inputs, config, padded=padded)
        self._q_tiles = _tiles(inputs.q, packed=packed)
        self._k_tiles = _tiles(inputs.k, packed=packed)
        self._v_tiles = _tiles(inputs.v, packed=packed)
        row = heads * value_dim
        self._out_tiles = _tiles(inputs.v, (seqlen * row, row, value_dim), packed=packed)
        self._inverse_rows = rows(
            inputs.q.dtype, slots * heads * CHUNK.value, block=(CHUNK.value, CHUNK.value)
        )
        self._prep, self._prep_programs = _prep_launcher(inputs)
        if config.persistent_programs:
            self._programs = min(config.persistent_programs, inputs.sequences * heads)
        else:
            segments = ceil_div(ceil_div(seqlen, CHUNK.value), config.segment)
            self._programs = segments * inputs.sequences * heads
        initial = inputs.initial_state
        inner = (DIM.value, DIM.value) if padded else inputs.states_shape[2:]
        options: dict[str, object] = dict(  # GROUP: value heads per key head
            KEY_HEADS=inputs.q.shape[2],
            HEADS=heads,
            GROUP=inputs.values_per_key,
            PACKED=packed,
            PERSISTENT=config.persistent_programs > 0,
            FIRST_SEGMENT_EXTRA=config.first_segment_extra,
            STATE_STRIDES=(
                *((0, 0, 0, 0) if initial is None else initial.stride()),
                *state_strides(heads, *inner, v_first=state_v_first),
            ),
            DEPTH=RING,
            STATE_REGISTERS=STATE_REGISTERS,
            OTHER_REGISTERS=OTHER_REGISTERS,
            num_warps=4,
        )
        scalars = (
            _cu_strides(inputs),
            inputs.scale_or_default,
            config.truncation_log2,
            *(seqlen, inputs.sequences, slots),
            config.segment,
        )
        self._main = Launcher(_hopper_kernel, scalars, options)
        self._entering: _EnteringLaunches | None = None
        if launch_count(inputs, config) == 4:
            self._entering = _EnteringLaunches(inputs, config, scalars, options)

    def begin(self, inputs: GDNInputs) -> Begun:
        """Allocate the workspace, and launch the kernel that inverts the chunks."""
        memory = torch.empty(self._nbytes // 4, dtype=torch.float32, device=inputs.q.device)
        parts = {
            name: None if place is None else Part(memory, *place)
            for name, place in self._places.items()
        }
        inverse = parts["inverse"]
        assert inverse is not None
        begun = Begun(
            parts, self._q_tiles(inputs.q), self._k_tiles(inputs.k), self._inverse_rows(inverse)
        )
        gates = inputs.g, inputs.beta, inputs.cu_seqlens, *begun.gates
        self._prep(self._prep_programs, begun.k, begun.q, begun.inverse, *gates)
        return begun

    def finish(
        self, begun: Begun, inputs: GDNInputs, out: torch.Tensor, final_states: torch.Tensor | Part
    ) -> None:
        """Launch the other kernels, which write `out` and `final_states`."""
        v = self._v_tiles(inputs.v)
        if self._entering is not None:
            self._entering.launch(begun, v, inputs)
        self._main(
            self._programs,
            begun.q,
            begun.k,
            v,
            begun.inverse,
            self._out_tiles(out),
            inputs.initial_state,
            inputs.cu_seqlens,
            begun.parts["entering"],
            begun.parts["warmup_lengths"],
            final_states,
            *begun.gates,
        )


def _cu_strides(inputs: GDNInputs) -> tuple[int, ...]:
    return (0,) if inputs.cu_seqlens is None else inputs.cu_seqlens.stride()


def _prep_launcher(inputs: GDNInputs) -> tuple[Launcher, int]:
    """The kernel that inverts the chunks, and its number of programs."""
    heads, slots = inputs.v.shape[2], slot_count(inputs)
    # value heads per program
    at_once = next((count for count in (2, 3) if inputs.values_per_key % count == 0), 1)
    gate_strides = tuple(
        (gate.stride(0), row_stride(gate), gate.stride(2)) for gate in (inputs.g, inputs.beta)
    )
    launcher = Launcher(
        _prep_kernel,
        (*gate_strides, _cu_strides(inputs), inputs.length, inputs.sequences, slots),
        dict(
            KEY_HEADS=inputs.q.shape[2],
            HEADS=heads,
            AT_ONCE=at_once,
            NORMALISE=inputs.use_qk_l2norm,
            num_warps=4,
            maxnreg=96,  # five programs per SM
        ),
    )
    return launcher, slots * heads // at_once


class _EnteringLaunches:
    """The two kernels that compute the states entering segments of slow heads."""

    def __init__(
        self,
        inputs: GDNInputs,
        config: GDNHopperConfig,
        scalars: tuple[object, ...],
        options: dict[str, object],
    ) -> None:
        """scalars, options: those of `_hopper_kernel`."""
        count = row_count(inputs, config.segment)
        heads = inputs.v.shape[2]
        pairs, tasks = inputs.sequences * heads, config.transition_parts * count
        boundaries = count // pairs
        self._part_programs = min(config.transition_programs, tasks)
        parts_options = options | dict(
            ROWS=max(LEAST_ROWS, next_power_of_2(count)),
            PARTS=config.transition_parts,
            MOST=next_power_of_2(ceil_div(tasks, self._part_programs)),
            DEPTH=PARTS_RING,
            STATE_REGISTERS=PARTS_REGISTERS,
        )
        limits = config.longest_first_pass, config.least_first_pass
        self._parts = Launcher(_parts_kernel, (*scalars, count, *limits), parts_options)
        block_v, warps = (16, 8) if pairs <= WIDE else (32, 4)
        self._combine_programs = pairs * DIM.value // block_v
        initial = inputs.initial_state
        self._combine = Launcher(
            _combine_kernel,
            (
                (0, 0, 0, 0) if initial is None else initial.stride(),
                pairs,
                boundaries,
                config.segment,
            ),
            dict(
                HEADS=heads,
                PARTS=config.transition_parts,
                BOUNDARIES=next_power_of_2(boundaries),
                DIM=DIM.value,
                BLOCK_V=block_v,
                AHEAD=AHEAD,
                num_warps=warps,
            ),
        )

    def launch(self, begun: Begun, v: TensorDescriptor, inputs: GDNInputs) -> None:
        """Compute the parts, then combine them."""
        parts = begun.parts
        written = parts["parts"], parts["moves"], parts["warmup_lengths"]
        self._parts(
            self._part_programs,
            begun.k,
            v,
            begun.inverse,
            inputs.cu_seqlens,
            *written,
            *begun.gates,
        )
        self._combine(self._combine_programs, *written, inputs.initial_state, parts["entering"])


def _tiles(
    tensor: torch.Tensor, strides: tuple[int, int, int] | None = None, *, packed: bool
) -> Described:
    """Tiles of one head and one chunk."""
    strides = steps(tensor, tensor.stride(2)) if strides is None else strides
    heads, columns = tensor.shape[2:]
    return tiles(
        tensor, strides, sizes=(heads, columns), block=(1, CHUNK.value, DIM.value), packed=packed
    )
