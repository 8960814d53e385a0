"""Launching the Hopper kernels: what they are called with, what a call allocates, how many programs they have."""

from __future__ import annotations

from typing import Any

import torch

from ssdprof.kernels._launch import Launcher
from ssdprof.kernels._tiles import Rows, Tiles, row_stride, steps
from ssdprof.kernels.gdn.hopper.config import HopperConfig, ceil_div, row_count, slot_count
from ssdprof.kernels.gdn.hopper.hopper_kernel import _hopper_kernel
from ssdprof.kernels.gdn.hopper.prep_kernel import _prep_kernel
from ssdprof.kernels.gdn.hopper.rings import CHUNK, DIM
from ssdprof.kernels.gdn.hopper.slow_heads import SlowHeads
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.states import empty_states

Gates = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # decays, bounds, norms


def workspace_bytes(inputs: GDNInputs, config: HopperConfig) -> int:
    """What a call allocates beyond its outputs."""
    if config.inverts:
        return 0
    slots, heads, chunk = slot_count(inputs), inputs.v.shape[2], CHUNK.value
    of_head = inputs.q.element_size() * chunk * chunk + 4 * chunk + 4  # inverse, decays, bound
    norms = 4 * 2 * chunk * inputs.q.shape[2] if inputs.use_qk_l2norm else 0
    rows = row_count(inputs, config.segment) if config.slow_parts else 0
    return int(slots * (heads * of_head + norms) + rows * (4 + 4 * DIM.value**2 * (1 + 2 * config.slow_parts)))


def launch_count(inputs: GDNInputs, config: HopperConfig) -> int:
    if config.inverts:
        return 1
    return 4 if config.slow_parts and row_count(inputs, config.segment) else 2


class HopperLaunch:
    """Everything about a call but its tensors: it serves all inputs of one `GDNInputs.signature`, and holds none."""

    def __init__(self, inputs: GDNInputs, config: HopperConfig, *, state_v_first: bool = False) -> None:
        seqlen, key_heads = inputs.q.shape[1:3]
        heads, packed = inputs.v.shape[2], inputs.cu_seqlens is not None
        self._heads, self._key_heads, self._slots = heads, key_heads, slot_count(inputs)
        self._index, self._dtype = inputs.q.get_device(), inputs.q.dtype
        self._state_v_first, self._normalise = state_v_first, inputs.use_qk_l2norm
        self._q, self._k, self._v = (_tiles(tensor, packed=packed) for tensor in (inputs.q, inputs.k, inputs.v))
        row = heads * inputs.v.shape[3]
        self._out = _tiles(inputs.v, (seqlen * row, row, inputs.v.shape[3]), packed=packed)
        self._inverse = Rows(self._dtype, self._slots * heads * CHUNK.value, block=(CHUNK.value, CHUNK.value))
        at_once = 2 - heads // key_heads % 2  # value heads of a program of the first kernel
        self._prep_programs = self._slots * heads // at_once
        if config.stays:
            self._programs = min(config.stays, inputs.sequences * heads)
        else:
            segments = ceil_div(ceil_div(seqlen, CHUNK.value), config.segment)
            self._programs = segments * inputs.sequences * heads
        sizes = (seqlen, inputs.sequences, self._slots)
        cu_strides = (0,) if inputs.cu_seqlens is None else inputs.cu_seqlens.stride()
        self._inverts = config.inverts
        self._check(inputs, config)
        gate_strides = _vector_strides(inputs.g), _vector_strides(inputs.beta)
        self._prep = Launcher(
            _prep_kernel,
            (*gate_strides, cu_strides, *sizes),
            {
                "KEY_HEADS": key_heads,
                "HEADS": heads,
                "AT_ONCE": at_once,
                "NORMALISE": self._normalise,
                "num_warps": 4,
                "maxnreg": 96,  # five programs an SM
            },
        )
        initial = (0, 0, 0, 0) if inputs.initial_state is None else inputs.initial_state.stride()
        final = _final_states(inputs, "meta", state_v_first=state_v_first).stride()
        scalars = ((*initial, *final), cu_strides, inputs.scale_or_default, config.enough, *sizes, config.segment)
        options = {
            "KEY_HEADS": key_heads,
            "HEADS": heads,
            "KEY_RING": config.key_ring,
            "RING": config.ring,
            "STATE_REGISTERS": config.state_registers,
            "OTHER_REGISTERS": config.other_registers,
            "num_warps": 8,
        }
        self._slow_heads = SlowHeads(inputs, config, scalars, options)
        self._main = Launcher(
            _hopper_kernel,
            (*gate_strides, *scalars),
            options | {"STAYS": config.stays > 0},
        )

    def __call__(self, inputs: GDNInputs) -> GDNOutput:
        q, v = inputs.q, inputs.v
        with torch.cuda.device(self._index):  # nothing to do for -1, the CPU
            q_desc, k_desc = self._q.of(q), self._k.of(inputs.k)
            inverse_desc: Any = None
            gates: Gates = (None, None, None)
            if not self._inverts:
                inverse_desc, gates = self._prepare(inputs, q_desc, k_desc)
            # the rest while the GPU is at work
            out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            final_states = _final_states(inputs, v.device, state_v_first=self._state_v_first)
            descriptors = (q_desc, k_desc, self._v.of(v), inverse_desc, self._out.of(out))
            entering = self._slow_heads(descriptors, inputs, gates)
            g, beta = (inputs.g, inputs.beta) if self._inverts else (None, None)
            self._main(
                self._programs, *descriptors, inputs.initial_state, inputs.cu_seqlens, *entering, final_states, *gates,
                g, beta,
            )  # fmt: skip
        return GDNOutput(out, final_states)

    def _prepare(self, inputs: GDNInputs, q_descriptor: Any, k_descriptor: Any) -> tuple[Any, Gates]:
        """The first launch: a descriptor of the inverses, and gates."""
        device = inputs.v.device
        inverse = torch.empty(self._slots, self._heads, CHUNK.value, CHUNK.value, dtype=self._dtype, device=device)
        decays = torch.empty(self._slots, self._heads, CHUNK.value, dtype=torch.float32, device=device)
        bounds = torch.empty(self._heads, self._slots, dtype=torch.float32, device=device)
        norms = None
        if self._normalise:
            norms = torch.empty(self._slots, self._key_heads, 2, CHUNK.value, device=device)
        descriptor, gates = self._inverse.of(inverse), (decays, bounds, norms)
        self._prep(
            self._prep_programs, k_descriptor, q_descriptor, descriptor, inputs.g, inputs.beta, inputs.cu_seqlens,
            *gates,
        )  # fmt: skip
        return descriptor, gates

    def _check(self, inputs: GDNInputs, config: HopperConfig) -> None:
        whole = config.stays or config.segment * CHUNK.value >= inputs.v.shape[1]
        if config.inverts and (self._normalise or not whole):
            raise ValueError("one launch takes whole sequences whose keys are normalised")


def gdn_fused_hopper(inputs: GDNInputs, *, config: HopperConfig) -> GDNOutput:
    """Output as v, final states in fp32.  Call it only where `config.unsupported` is empty."""
    return HopperLaunch(inputs, config)(inputs)


def _tiles(tensor: torch.Tensor, strides: tuple[int, int, int] | None = None, *, packed: bool) -> Tiles:
    """Tiles of one head and a chunk's positions."""
    strides = steps(tensor, tensor.stride(2)) if strides is None else strides
    heads, columns = tensor.shape[2:]
    return Tiles(tensor, strides, sizes=(heads, columns), block=(1, CHUNK.value, DIM.value), packed=packed)


def _final_states(inputs: GDNInputs, device: torch.device | str, *, state_v_first: bool) -> torch.Tensor:
    """(sequences, HV, K, V), of (sequences, HV, DIM, DIM) in memory: that much the kernel writes."""
    *outer, key_dim, value_dim = inputs.states_shape
    if key_dim == value_dim == DIM.value:
        return empty_states(inputs, device, state_v_first=state_v_first)
    padded = torch.empty(*outer, DIM.value, DIM.value, dtype=torch.float32, device=device)
    return (padded.mT if state_v_first else padded)[..., :key_dim, :value_dim]


def _vector_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Strides of g or beta (b, l, hv)."""
    return tensor.stride(0), row_stride(tensor), tensor.stride(2)
