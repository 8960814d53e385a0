"""Launches of the Hopper kernels: their arguments, workspace and grids."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, row_count, slot_count
from ssdprof.kernels.gdn.hopper.hopper_kernel import _hopper_kernel
from ssdprof.kernels.gdn.hopper.prep_kernel import _prep_kernel
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.hopper.slow_heads import LongMemory
from ssdprof.kernels.gdn.hopper.workspace import HopperWorkspace, padded_strides
from ssdprof.kernels.gdn.inputs import FinalStates, GDNInputs, GDNOutput
from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.tensors import Descriptor, Part, part, row_stride, rows, steps, tiles

Gates = tuple[Part | None, Part | None, Part | None]  # decays, bounds, norms


class Begun(NamedTuple):
    """A call after its first launch.  descriptors: of q, k and the inverses."""

    memory: torch.Tensor | None
    descriptors: tuple[Any, Any, Any]
    gates: Gates


def workspace_bytes(inputs: GDNInputs, config: GDNHopperConfig, *, padded: bool = False) -> int:
    """Bytes of the workspace of a call."""
    return HopperWorkspace.of(inputs, config, padded=padded).layout.nbytes


def launch_count(inputs: GDNInputs, config: GDNHopperConfig) -> int:
    if config.fused_inverse:
        return 1
    return 4 if config.transition_parts and row_count(inputs, config.segment) else 2


class GDNHopperLaunch:
    """A call without its tensors.  It serves all inputs of one `GDNInputs.signature` and keeps none of them.

    padded: final states are written to the workspace with K = V = 128.  Then call only `begin` and `finish`.
    """

    def __init__(
        self, inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool = False, padded: bool = False
    ) -> None:
        seqlen, key_heads = inputs.q.shape[1:3]
        heads, packed = inputs.v.shape[2], inputs.cu_seqlens is not None
        slots = slot_count(inputs)
        self._index, self._device = inputs.q.get_device(), inputs.q.device
        self._places = HopperWorkspace.of(inputs, config, padded=padded)
        self._final_states = FinalStates.of(inputs, state_v_first=state_v_first)
        self._q, self._k, self._v = (_tiles(tensor, packed=packed) for tensor in (inputs.q, inputs.k, inputs.v))
        row = heads * inputs.v.shape[3]
        self._out = _tiles(inputs.v, (seqlen * row, row, inputs.v.shape[3]), packed=packed)
        self._inverse = rows(inputs.q.dtype, slots * heads * CHUNK.value, block=(CHUNK.value, CHUNK.value))
        # value heads per program of the first kernel
        at_once = next((count for count in (2, 3) if heads // key_heads % count == 0), 1)
        self._prep_programs = slots * heads // at_once
        if config.persistent_programs:
            self._programs = min(config.persistent_programs, inputs.sequences * heads)
        else:
            segments = ceil_div(ceil_div(seqlen, CHUNK.value), config.segment)
            self._programs = segments * inputs.sequences * heads
        sizes = (seqlen, inputs.sequences, slots)
        cu_strides = (0,) if inputs.cu_seqlens is None else inputs.cu_seqlens.stride()
        self._inverts = config.fused_inverse
        self._check(inputs, config)
        gate_strides = _vector_strides(inputs.g), _vector_strides(inputs.beta)
        self._prep = Launcher(
            _prep_kernel,
            (*gate_strides, cu_strides, *sizes),
            dict(KEY_HEADS=key_heads, HEADS=heads, AT_ONCE=at_once, NORMALISE=inputs.use_qk_l2norm)
            | dict(num_warps=4, maxnreg=96),  # five programs per SM
        )
        initial = (0, 0, 0, 0) if inputs.initial_state is None else inputs.initial_state.stride()
        final = padded_strides(heads, state_v_first=state_v_first) if padded else self._final_states.strides
        options: dict[str, Any] = dict(  # GROUP: value heads per key head
            KEY_HEADS=key_heads, HEADS=heads, GROUP=heads // key_heads, PACKED=packed,
            PERSISTENT=config.persistent_programs > 0, FIRST_SEGMENT_EXTRA=config.first_segment_extra,
            STATE_STRIDES=(*initial, *final), KEY_DEPTH=config.key_ring, DEPTH=config.ring,
            STATE_REGISTERS=config.state_registers, OTHER_REGISTERS=config.other_registers, num_warps=4,
        )  # fmt: skip
        scalars = inputs.scale_or_default, config.truncation_log2, *sizes, config.segment
        self._long_memory = LongMemory(inputs, config, self._places, (cu_strides, *scalars), options)
        self._main = Launcher(_hopper_kernel, ((*gate_strides, cu_strides), *scalars), options)

    def __call__(self, inputs: GDNInputs) -> GDNOutput:
        with torch.cuda.device(self._index):  # no effect for -1, the CPU
            begun = self.begin(inputs)
            # the host does the rest while the GPU runs the first launch
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            final_states = self._final_states.empty(self._device)
            self.finish(begun, inputs, out, final_states)
        return GDNOutput(out, final_states)

    def begin(self, inputs: GDNInputs) -> Begun:
        """Allocate the workspace, and launch the kernel that inverts the chunks, unless the last launch inverts them.

        The current device must be that of the inputs, here and in `finish`.
        """
        places = self._places
        memory = places.layout.allocate(self._device) if places.layout.nbytes else None
        q, k = self._q.of(inputs.q), self._k.of(inputs.k)
        if memory is None or places.inverse is None:
            return Begun(memory, (q, k, None), (None, None, None))
        inverse = self._inverse.of(Part(memory, places.inverse))
        gates = part(memory, places.decays), part(memory, places.bounds), part(memory, places.norms)
        self._prep(self._prep_programs, k, q, inverse, inputs.g, inputs.beta, inputs.cu_seqlens, *gates)
        return Begun(memory, (q, k, inverse), gates)

    def finish(self, begun: Begun, inputs: GDNInputs, out: torch.Tensor, final_states: torch.Tensor | Part) -> None:
        """Launch the other kernels."""
        memory, (q, k, inverse), gates = begun
        descriptors = (q, k, self._v.of(inputs.v), inverse, self._out.of(out))
        entering, backs = self._long_memory(memory, descriptors, inputs, gates)
        g, beta = (inputs.g, inputs.beta) if self._inverts else (None, None)
        self._main(
            self._programs, *descriptors, inputs.initial_state, inputs.cu_seqlens, entering, backs, final_states,
            *gates, g, beta,
        )  # fmt: skip

    def padded(self, begun: Begun) -> Part:
        """The part of the workspace for padded final states."""
        assert begun.memory is not None
        assert self._places.padded is not None
        return Part(begun.memory, self._places.padded)

    def _check(self, inputs: GDNInputs, config: GDNHopperConfig) -> None:
        whole = config.persistent_programs or config.segment * CHUNK.value >= inputs.v.shape[1]
        if config.first_segment_extra and (whole or config.transition_parts or inputs.cu_seqlens is not None):
            raise ValueError("a longer first segment needs several segments, no parts and no packed sequences")
        if config.fused_inverse and (inputs.use_qk_l2norm or not whole):
            raise ValueError("one launch takes whole sequences whose keys are normalised")


def gdn_fused_hopper(inputs: GDNInputs, *, config: GDNHopperConfig) -> GDNOutput:
    """Output in v's dtype, final states in fp32.  Requires that `config.unsupported` is empty."""
    return GDNHopperLaunch(inputs, config)(inputs)


def _tiles(tensor: torch.Tensor, strides: tuple[int, int, int] | None = None, *, packed: bool) -> Descriptor:
    """Tiles of one head and one chunk."""
    strides = steps(tensor, tensor.stride(2)) if strides is None else strides
    heads, columns = tensor.shape[2:]
    return tiles(tensor, strides, sizes=(heads, columns), block=(1, CHUNK.value, DIM.value), packed=packed)


def _vector_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of g or beta (b, l, hv)."""
    return tensor.stride(0), row_stride(tensor), tensor.stride(2)
