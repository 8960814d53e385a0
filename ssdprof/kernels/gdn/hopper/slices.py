"""The Hopper kernels for K and V other than 128: K up to 128, and V in slices of up to 128.

The columns of a state do not depend on each other.  So each slice of a value head's V is treated as a value head, with
the same q, k and gates.  TMA pads tiles with zeros to K = V = 128 when it reads, and skips the padding when it writes.
States are not copied through TMA, so this module pads them.
"""

from __future__ import annotations

import torch

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, unsupported_otherwise
from ssdprof.kernels.gdn.hopper.launch import GDNHopperLaunch, workspace
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput, state_strides
from ssdprof.kernels.hopper.schedule import ceil_div

LEAST = 64  # K, and V of a slice, must be larger: otherwise at least half of each product would be zeros


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
    """`inputs` with one value head per slice, as views.  Gates and the initial state are still those of whole heads."""
    *tokens, heads, value_dim = inputs.v.shape
    count = slice_count(inputs)
    v = inputs.v.view(*tokens, heads * count, value_dim // count)
    return GDNInputs.unchecked(**vars(inputs) | {"v": v})


def sliced(inputs: GDNInputs) -> GDNInputs:
    """The inputs that the kernels receive: v, gates and an initial state of (DIM, DIM) have one head per slice.

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
    return workspace(of_slices, config, padded=True)[0].nbytes + gates + initial


class SlicedLaunch:
    """A call without its tensors.  It serves all inputs of one `GDNInputs.signature` and keeps none of them."""

    def __init__(self, inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool = False) -> None:
        """config: for `by_slice(inputs)`."""
        self._launch = GDNHopperLaunch(sliced(inputs), config, state_v_first=state_v_first, padded=True)
        self._index, self._device, self._count = inputs.q.get_device(), inputs.q.device, slice_count(inputs)
        self._gates = (*inputs.g.shape, self._count), (*inputs.g.stride(), 0), (*inputs.beta.stride(), 0)
        sequences, heads, key_dim, value_dim = inputs.states_shape
        self._states = inputs.states_shape, state_strides(heads, key_dim, value_dim, v_first=state_v_first)
        self._pieces = sequences, heads, self._count, key_dim, value_dim // self._count
        self._final = self._cut(self._states[1])
        padded = heads * self._count, DIM.value, DIM.value
        self._final_padded = self._joined(state_strides(*padded, v_first=state_v_first))
        self._initial_shape = sequences, *padded
        if inputs.initial_state is not None:
            self._initial = self._cut(inputs.initial_state.stride())
            self._initial_padded = self._joined(state_strides(*padded, v_first=False))

    def __call__(self, inputs: GDNInputs) -> GDNOutput:
        with torch.cuda.device(self._index):  # no effect for -1, the CPU
            if self._count > 1:
                shape, g, beta = self._gates
                gates = {
                    "g": inputs.g.as_strided(shape, g).contiguous(),
                    "beta": inputs.beta.as_strided(shape, beta).contiguous(),
                }
                inputs = GDNInputs.unchecked(**vars(inputs) | gates)
            begun = self._launch.begin(inputs)
            # the host does the rest while the GPU runs the first launch
            if inputs.initial_state is not None:
                inputs = GDNInputs.unchecked(**vars(inputs) | {"initial_state": self._pad(inputs.initial_state)})
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            padded = begun[0]["padded"]
            assert padded is not None
            self._launch.finish(begun, inputs, out, padded)
            final_states = torch.empty_strided(*self._states, dtype=torch.float32, device=self._device)
            final_states.as_strided(self._pieces, self._final).copy_(padded.strided(self._pieces, self._final_padded))
        return GDNOutput(out, final_states)

    def _pad(self, initial: torch.Tensor) -> torch.Tensor:
        padded = initial.new_zeros(self._initial_shape)
        to, of = padded.as_strided(self._pieces, self._initial_padded), initial.as_strided(self._pieces, self._initial)
        to.copy_(of)
        return padded

    def _cut(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of states (sequences, HV, K, V) as (sequences, HV, slices, K, V of a slice)."""
        sequence, head, key, value = strides
        return sequence, head, self._pieces[-1] * value, key, value

    def _joined(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of states (sequences, HV * slices, K, V of a slice) as (sequences, HV, slices, K, V of a slice)."""
        sequence, piece, key, value = strides
        return sequence, self._count * piece, piece, key, value
