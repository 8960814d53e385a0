"""The Hopper kernels for K and V that are not both 128: K of 65 to 128, V in equal slices of 65 to
128.

The columns of a state do not depend on each other.  So each slice of a value head's V is treated as
a value head, with the same q, k and gates.  TMA pads tiles with zeros to K = V = 128 when it reads,
and skips the padding when it writes.  States are not copied through TMA, so this module copies them
to and from padded ones.
"""

import torch

from ssdprof.kernels.gdn.hopper.config import GDNHopperConfig, unsupported_otherwise
from ssdprof.kernels.gdn.hopper.launch import launches, workspace
from ssdprof.kernels.gdn.hopper.rings import DIM
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput, state_strides
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.inputs import PreparedLaunch

# most columns of K, or of V of a slice, with which at least half of each product would be padding
TOO_NARROW = 64


def slice_count(inputs: GDNInputs) -> int:
    """The number of slices of a value head's V."""
    return ceil_div(inputs.v.shape[3], DIM.value)


def unsupported(inputs: GDNInputs) -> str:
    """Why these kernels do not support `inputs`, or should not run them; empty if they should.

    They should not run where at least half of each product would be padding (TOO_NARROW).
    """
    key_dim = inputs.q.shape[3]
    value_dim = inputs.v.shape[3]
    count = slice_count(inputs)
    fits_k = TOO_NARROW < key_dim <= DIM.value
    fits_v = value_dim % count == 0 and value_dim // count > TOO_NARROW
    if not (fits_k and fits_v):
        return f"K {key_dim} with V {value_dim}"
    if count > 1 and inputs.v.stride()[2:] != (value_dim, 1):
        return "value heads that do not lie side by side"
    return unsupported_otherwise(by_slice(inputs))


def by_slice(inputs: GDNInputs) -> GDNInputs:
    """`inputs` with one value head per slice, as views: v (B, T, HV * slices, V of a slice).  Gates
    and the initial state are still those of whole heads.
    """
    *tokens, heads, value_dim = inputs.v.shape
    count = slice_count(inputs)
    v = inputs.v.view(*tokens, heads * count, value_dim // count)
    return GDNInputs.unchecked(**vars(inputs) | {"v": v})


def sliced(inputs: GDNInputs) -> GDNInputs:
    """Inputs with the shapes, strides and dtypes of those that the kernels receive: v, gates and an
    initial state that is padded to (DIM, DIM) have one head per slice.

    Tensors that a call copies are on the meta device here.
    """
    slices = by_slice(inputs)
    heads = slices.v.shape[2]
    changed: dict[str, torch.Tensor] = {}
    if slice_count(inputs) > 1:
        for name, gate in (("g", inputs.g), ("beta", inputs.beta)):
            changed[name] = gate.new_empty(*gate.shape[:2], heads, device="meta")
    if inputs.initial_state is not None:
        shape = inputs.sequences, heads, DIM.value, DIM.value
        changed["initial_state"] = inputs.initial_state.new_empty(shape, device="meta")
    return GDNInputs.unchecked(**vars(slices) | changed)


def workspace_bytes(inputs: GDNInputs, config: GDNHopperConfig) -> int:
    """Bytes of the workspace of a call: that of the kernels, and the copies of their inputs.

    config: for `by_slice(inputs)`
    """
    slices = sliced(inputs)
    nbytes, _ = workspace(slices, config, padded=True)
    if slice_count(inputs) > 1:
        nbytes += slices.g.nbytes + slices.beta.nbytes
    if slices.initial_state is not None:
        nbytes += slices.initial_state.nbytes
    return nbytes


def _pieces(inputs: GDNInputs) -> tuple[int, ...]:
    """(sequences, HV, slices, K, V of a slice): the shape in which states are copied."""
    sequences, heads, key_dim, value_dim = inputs.states_shape
    count = slice_count(inputs)
    return sequences, heads, count, key_dim, value_dim // count


def _strides_of_pieces(strides: tuple[int, ...], slice_dim: int) -> tuple[int, ...]:
    """Strides of states (sequences, HV, K, V), if these are viewed as (sequences, HV, slices, K, V
    of a slice).
    """
    sequence, head, key, value = strides
    return sequence, head, slice_dim * value, key, value


def sliced_launch(
    inputs: GDNInputs, config: GDNHopperConfig, *, state_v_first: bool
) -> PreparedLaunch:
    """A call of the Hopper kernels on slices, with copies of gates and states, for all inputs of
    one signature.

    config: for `by_slice(inputs)`.  state_v_first: final states are (sequences, HV, V, K) in memory
    """
    begin, finish = launches(sliced(inputs), config, state_v_first=state_v_first, padded=True)
    index = inputs.q.get_device()
    shape = inputs.states_shape
    pieces = _pieces(inputs)
    sequences, heads, count, _, slice_dim = pieces
    padded_shape = heads * count, DIM.value, DIM.value
    final_strides = state_strides(*shape[1:], v_first=state_v_first)
    final_pieces = _strides_of_pieces(final_strides, slice_dim)

    def padded_strides(*, v_first: bool) -> tuple[int, ...]:
        """Strides of `pieces` in padded states (sequences, HV * slices, 128, 128)."""
        sequence, piece, key, value = state_strides(*padded_shape, v_first=v_first)
        return sequence, count * piece, piece, key, value

    padded_initial = padded_strides(v_first=False)
    padded_final = padded_strides(v_first=state_v_first)

    def for_slices(gate: torch.Tensor) -> torch.Tensor:
        """g or beta, contiguous: (B, T, HV, slices), which kernels read as (B, T, HV * slices)."""
        return gate.as_strided((*gate.shape, count), (*gate.stride(), 0)).contiguous()

    def pad(initial: torch.Tensor) -> torch.Tensor:
        """A copy of initial states as (sequences, HV * slices, 128, 128), padded with zeros."""
        padded = initial.new_zeros(sequences, *padded_shape)
        strides = _strides_of_pieces(initial.stride(), slice_dim)
        padded.as_strided(pieces, padded_initial).copy_(initial.as_strided(pieces, strides))
        return padded

    def call(call_inputs: GDNInputs) -> GDNOutput:
        """Copy gates for each slice, launch the kernels, copy states from and to padded ones."""
        with torch.cuda.device(index):  # no effect for -1, the CPU
            changed = vars(call_inputs).copy()
            if count > 1:
                changed |= {"g": for_slices(call_inputs.g), "beta": for_slices(call_inputs.beta)}
            begun = begin(GDNInputs.unchecked(**changed))
            # the host does the following while the GPU runs the first launch
            if call_inputs.initial_state is not None:
                changed["initial_state"] = pad(call_inputs.initial_state)
            out = torch.empty_like(call_inputs.v, memory_format=torch.contiguous_format)
            tensors, _ = begun
            padded = tensors["padded"]
            assert padded is not None
            finish(begun, GDNInputs.unchecked(**changed), out, padded)
            final_states = torch.empty_strided(
                shape, final_strides, dtype=torch.float32, device=out.device
            )
            padded_pieces = padded.strided(pieces, padded_final)
            final_states.as_strided(pieces, final_pieces).copy_(padded_pieces)
        return GDNOutput(out, final_states)

    return call
