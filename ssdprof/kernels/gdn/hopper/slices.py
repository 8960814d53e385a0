"""The Hopper kernels for K and V other than 128: K up to 128, and V in slices of up to 128.

A slice of a value head's V is a value head of its own, with the same q, k and gates, for the columns of a state do not
depend on each other.  The copy engine fills tiles up with zeros, to 128 of K and of V, and leaves out what is beyond
when it writes.  States, which it does not copy, are padded here.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ssdprof.kernels.gdn.hopper.config import HopperConfig, ceil_div, unreadable
from ssdprof.kernels.gdn.hopper.launch import HopperLaunch
from ssdprof.kernels.gdn.hopper.launch import workspace_bytes as hopper_bytes
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.states import empty_states

LEAST = 64  # of K, and of V in a slice: with at most as many, half of each product would be zeros


def slice_count(inputs: GDNInputs) -> int:
    return ceil_div(inputs.v.shape[3], DIM.value)


def unsupported(inputs: GDNInputs) -> str:
    """Why these kernels cannot take `inputs`, or are not the ones to take them; empty if they are."""
    key_dim, value_dim, count = inputs.q.shape[3], inputs.v.shape[3], slice_count(inputs)
    if not LEAST < key_dim <= DIM.value or value_dim % count or value_dim // count <= LEAST:
        return f"K {key_dim} with V {value_dim}"
    if count > 1 and inputs.v.stride(2) != value_dim:
        return "value heads that do not lie side by side"
    return unreadable(by_slice(inputs))


def by_slice(inputs: GDNInputs) -> GDNInputs:
    """With a value head for each slice, as views: gates and the initial state are still those of whole heads."""
    *tokens, heads, value_dim = inputs.v.shape
    count = slice_count(inputs)
    v = inputs.v.view(*tokens, heads * count, value_dim // count)
    return GDNInputs.unchecked(**vars(inputs) | {"v": v})


def sliced(inputs: GDNInputs) -> GDNInputs:
    """With a value head for each slice, and an initial state of (DIM, DIM)."""
    of_slices, count, initial = by_slice(inputs), slice_count(inputs), inputs.initial_state
    key_dim, width = inputs.q.shape[3], of_slices.v.shape[3]
    if initial is not None:
        columns = initial.view(*initial.shape[:3], count, width).transpose(2, 3).flatten(1, 2)
        initial = pad(columns, (0, DIM.value - width, 0, DIM.value - key_dim))
    gates = (inputs.g, inputs.beta)
    g, beta = (gate.repeat_interleave(count, 2) for gate in gates) if count > 1 else gates
    return GDNInputs.unchecked(**vars(of_slices) | {"g": g, "beta": beta, "initial_state": initial})


def workspace_bytes(inputs: GDNInputs, config: HopperConfig) -> int:
    """What a call allocates beyond its outputs."""
    count, of_slices = slice_count(inputs), by_slice(inputs)
    padded = 4 * DIM.value**2 * inputs.sequences * of_slices.v.shape[2]
    gates = count * (inputs.g.nbytes + inputs.beta.nbytes) if count > 1 else 0
    return int(hopper_bytes(of_slices, config) + gates + padded * (1 if inputs.initial_state is None else 2))


class SlicedLaunch:
    """Everything about a call but its tensors: it serves all inputs of one `GDNInputs.signature`, and holds none."""

    def __init__(self, inputs: GDNInputs, config: HopperConfig, *, state_v_first: bool = False) -> None:
        """config: for `by_slice(inputs)`."""
        self._count, self._state_v_first = slice_count(inputs), state_v_first
        self._launch = HopperLaunch(sliced(inputs), config, state_v_first=state_v_first)

    def __call__(self, inputs: GDNInputs) -> GDNOutput:
        with torch.cuda.device(inputs.q.get_device()):  # nothing to do for -1, the CPU
            out, columns = self._launch(sliced(inputs))
            final_states = empty_states(inputs, inputs.v.device, state_v_first=self._state_v_first)
            sequences, heads, key_dim, _ = final_states.shape
            to = final_states.view(sequences, heads, key_dim, self._count, -1).transpose(2, 3)
            to.copy_(columns.view(sequences, heads, self._count, key_dim, -1))
        return GDNOutput(out.view(inputs.v.shape), final_states)
