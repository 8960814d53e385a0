"""The Hopper kernels for K and V other than 128: K up to 128, and V in slices of up to 128.

The columns of a state do not depend on each other.  So each slice of a value head's V is treated as
a value head, with the same q, k and gates.  TMA pads tiles with zeros to K = V = 128 when it reads,
and skips the padding when it writes.  States are not copied through TMA, so this module pads them.
"""

from __future__ import annotations

import torch

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, unsupported_otherwise
from ssdprof.kernels.gdn.hopper.launch import HopperLaunches, workspace
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput, state_strides
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.tensors import Part

# K, and V of a slice, must be larger: otherwise at least half of each product would be zeros
LEAST = 64


def slice_count(inputs: GDNInputs) -> int:
    return ceil_div(inputs.v.shape[3], DIM.value)


def unsupported(inputs: GDNInputs) -> str:
    """Why these kernels do not support `inputs`, or should not run them; empty if they should."""
    key_dim, value_dim, count = inputs.q.shape[3], inputs.v.shape[3], slice_count(inputs)
    if not LEAST < key_dim <= DIM.value or value_dim % count or value_dim // count <= LEAST:
        return f"K {key_dim} with V {value_dim}"
    if count > 1 and inputs.v.stride(2) != value_dim:
        return "value heads that do not lie side by side"
    return unsupported_otherwise(by_slice(inputs))


def by_slice(inputs: GDNInputs) -> GDNInputs:
    """`inputs` with one value head per slice, as views.  Gates and the initial state are still
    those of whole heads.
    """
    *tokens, heads, value_dim = inputs.v.shape
    count = slice_count(inputs)
    v = inputs.v.view(*tokens, heads * count, value_dim // count)
    return GDNInputs.unchecked(**vars(inputs) | {"v": v})


def sliced(inputs: GDNInputs) -> GDNInputs:
    """The inputs that the kernels receive: v, gates and an initial state of (DIM, DIM) have one
    head per slice.

    Gates and state are on the meta device and have only shapes, strides and dtypes.
    """
    of_slices, initial, dim = by_slice(inputs), inputs.initial_state, DIM.value
    heads = of_slices.v.shape[2]
    if initial is not None:
        initial = initial.new_empty(inputs.sequences, heads, dim, dim, device="meta")
    g, beta = inputs.g, inputs.beta
    if slice_count(inputs) > 1:
        g, beta = (gate.new_empty(*gate.shape[:2], heads, device="meta") for gate in (g, beta))
    return GDNInputs.unchecked(**vars(of_slices) | {"g": g, "beta": beta, "initial_state": initial})


def workspace_bytes(inputs: GDNInputs, config: GDNHopperConfig) -> int:
    """Bytes of the workspace of a call."""
    of_slices = sliced(inputs)
    gates = of_slices.g.nbytes + of_slices.beta.nbytes if slice_count(inputs) > 1 else 0
    initial = 0 if of_slices.initial_state is None else of_slices.initial_state.nbytes
    return workspace(of_slices, config, padded=True)[0] + gates + initial


class _PaddedStates:
    """Copies between states (sequences, HV, K, V) and those of the kernels, (sequences, HV *
    slices, 128, 128), whose rows and columns past K and V of a slice are zeros.

    Both are viewed as (sequences, HV, slices, K, V of a slice).
    """

    def __init__(self, inputs: GDNInputs) -> None:
        self._count = slice_count(inputs)
        sequences, heads, key_dim, value_dim = inputs.states_shape
        self._pieces = sequences, heads, self._count, key_dim, value_dim // self._count
        self._padded_shape = heads * self._count, DIM.value, DIM.value

    def _cut(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of states (sequences, HV, K, V), for the view."""
        sequence, head, key, value = strides
        return sequence, head, self._pieces[-1] * value, key, value

    def _joined(self, *, v_first: bool) -> tuple[int, ...]:
        """Strides of padded states, for the view."""
        sequence, piece, key, value = state_strides(*self._padded_shape, v_first=v_first)
        return sequence, self._count * piece, piece, key, value

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """A padded copy of initial states."""
        padded = states.new_zeros(self._pieces[0], *self._padded_shape)
        target = padded.as_strided(self._pieces, self._joined(v_first=False))
        target.copy_(states.as_strided(self._pieces, self._cut(states.stride())))
        return padded

    def unpad(self, padded: Part, final_states: torch.Tensor, *, v_first: bool) -> None:
        """Copy padded final states to `final_states`."""
        source = padded.strided(self._pieces, self._joined(v_first=v_first))
        final_states.as_strided(self._pieces, self._cut(final_states.stride())).copy_(source)


def sliced_launch(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool
) -> PreparedLaunch[GDNInputs]:
    """A call with slices of V as heads, for all inputs of one signature.  config: for
    `by_slice(inputs)`.
    """
    launches = HopperLaunches(sliced(inputs), config, state_v_first=state_v_first, padded=True)
    states = _PaddedStates(inputs)
    index, count, shape = inputs.q.get_device(), slice_count(inputs), inputs.states_shape
    strides = state_strides(*shape[1:], v_first=state_v_first)

    def call(inputs: GDNInputs) -> GDNOutput:
        """Copies of gates for each slice, the kernels, and copies of states."""
        with torch.cuda.device(index):  # no effect for -1, the CPU
            if count > 1:
                inputs = _with_gates_of_slices(inputs, count)
            begun = launches.begin(inputs)
            # the host does the rest while the GPU runs the first launch
            if inputs.initial_state is not None:
                padded_states = states.pad(inputs.initial_state)
                inputs = GDNInputs.unchecked(**vars(inputs) | {"initial_state": padded_states})
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            padded = begun.parts["padded"]
            assert padded is not None
            launches.finish(begun, inputs, out, padded)
            final_states = torch.empty_strided(
                shape, strides, dtype=torch.float32, device=out.device
            )
            states.unpad(padded, final_states, v_first=state_v_first)
        return GDNOutput(out, final_states)

    return call


def _with_gates_of_slices(inputs: GDNInputs, count: int) -> GDNInputs:
    """With gates (B, T, HV * count), a copy for each slice of a head."""
    g, beta = (
        gate.as_strided((*gate.shape, count), (*gate.stride(), 0)).contiguous()
        for gate in (inputs.g, inputs.beta)
    )
    return GDNInputs.unchecked(**vars(inputs) | {"g": g, "beta": beta})
