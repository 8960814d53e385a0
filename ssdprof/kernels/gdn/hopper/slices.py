"""The Hopper kernels for K and V other than 128: K up to 128, and V in slices of up to 128.

The columns of a state do not depend on each other.  So each slice of a value head's V is treated as
a value head, with the same q, k and gates.  TMA pads tiles with zeros to K = V = 128 when it reads,
and skips the padding when it writes.  States are not copied through TMA, so this module pads them.
"""

from __future__ import annotations

import torch

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, unsupported_otherwise
from ssdprof.kernels.gdn.hopper.launch import launches, workspace
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput, state_strides
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.inputs import PreparedLaunch

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


def sliced_launch(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool
) -> PreparedLaunch:
    """config: for `by_slice(inputs)`."""
    begin, finish = launches(sliced(inputs), config, state_v_first=state_v_first, padded=True)
    index, count, shape = inputs.q.get_device(), slice_count(inputs), inputs.states_shape
    of_gates, g_strides, beta_strides = (
        (*inputs.g.shape, count),
        (*inputs.g.stride(), 0),
        (*inputs.beta.stride(), 0),
    )
    sequences, heads, key_dim, value_dim = shape
    pieces = sequences, heads, count, key_dim, value_dim // count
    padded_shape = heads * count, DIM.value, DIM.value

    def cut(strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of states (sequences, HV, K, V) as (sequences, HV, slices, K, V of a slice)."""
        sequence, head, key, value = strides
        return sequence, head, pieces[-1] * value, key, value

    def joined(*, v_first: bool) -> tuple[int, ...]:
        """Strides of padded states (sequences, HV * slices, K, V of a slice) as those of `cut`."""
        sequence, piece, key, value = state_strides(*padded_shape, v_first=v_first)
        return sequence, count * piece, piece, key, value

    states = state_strides(heads, key_dim, value_dim, v_first=state_v_first)
    initial = None if inputs.initial_state is None else cut(inputs.initial_state.stride())
    initial_padded, final, final_padded = (
        joined(v_first=False),
        cut(states),
        joined(v_first=state_v_first),
    )

    def pad(given: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        padded = given.new_zeros(sequences, *padded_shape)
        to, of = padded.as_strided(pieces, initial_padded), given.as_strided(pieces, strides)
        to.copy_(of)
        return padded

    def call(inputs: GDNInputs) -> GDNOutput:
        """Copy gates for each slice, launch the kernels, copy states from and to padded ones."""
        with torch.cuda.device(index):  # no effect for -1, the CPU
            if count > 1:
                gates = {
                    "g": inputs.g.as_strided(of_gates, g_strides).contiguous(),
                    "beta": inputs.beta.as_strided(of_gates, beta_strides).contiguous(),
                }
                inputs = GDNInputs.unchecked(**vars(inputs) | gates)
            begun = begin(inputs)
            # the host does the rest while the GPU runs the first launch
            if inputs.initial_state is not None and initial is not None:
                inputs = GDNInputs.unchecked(
                    **vars(inputs) | {"initial_state": pad(inputs.initial_state, initial)}
                )
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            padded = begun[0]["padded"]
            assert padded is not None
            finish(begun, inputs, out, padded)
            final_states = torch.empty_strided(
                shape, states, dtype=torch.float32, device=out.device
            )
            final_states.as_strided(pieces, final).copy_(padded.strided(pieces, final_padded))
        return GDNOutput(out, final_states)

    return call
