"""Launch of the Hopper kernel: its arguments, workspace and grid."""

import torch

from ssdprof.kernels.hopper.ring import CHUNK
from ssdprof.kernels.hopper.schedule import ceil_div
from ssdprof.kernels.inputs import PreparedLaunch
from ssdprof.kernels.launch import Launcher
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig, n_split, program_count, unit_count
from ssdprof.kernels.ssd.hopper.hopper_kernel import FLAGS, _fused_hopper_kernel
from ssdprof.kernels.ssd.hopper.rings import COLUMNS, FLAG_STRIDE, SLICE
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.launch import Buffers, prepared
from ssdprof.kernels.tensors import Described, Strides, row_stride, steps, strides_of, tiles


def share_count(inputs: SSDInputs, config: SSDHopperConfig) -> int:
    """The number of programs with equal shares; 0 if there is one program per segment.

    Shares are for sequences that are not cut.  Each program needs at least one pair, and with as
    many pairs as programs, each pair is a segment of its own: hence `config.shares < pairs`.
    """
    uncut = (
        inputs.cu_seqlens is None and config.count(ceil_div(inputs.x.shape[1], CHUNK.value)) == 1
    )
    pairs = inputs.sequences * program_count(inputs)
    return config.shares if uncut and config.shares < pairs else 0


def slot_count(inputs: SSDInputs, config: SSDHopperConfig) -> int:
    """The number of segments that publish a state: all but the last of each sequence, unless later
    segments recompute it.  An upper bound for packed sequences.
    """
    seqlen = inputs.x.shape[1]
    if config.recompute:
        return 0
    if inputs.cu_seqlens is not None:
        return int(seqlen // (config.segment * CHUNK.value))
    return inputs.sequences * (config.count(ceil_div(seqlen, CHUNK.value)) - 1)


def buffer_sizes(inputs: SSDInputs, precision: Precision, config: SSDHopperConfig) -> Buffers:
    """Elements and dtype of each buffer of a call, by name: `sync`, with ticket and flags, and
    `states`, those that segments or shares pass on.  Empty if they pass on none.

    `states` has room for every lane of every slot: a segment's slot has the lanes of all units of
    the sequence, a share's slot those of its program.
    """
    dstate = inputs.B.shape[3]
    split = n_split(dstate)
    shares = share_count(inputs, config)
    lanes = 2 * shares if shares else slot_count(inputs, config) * unit_count(inputs) * split
    if not lanes:
        return {}
    # between shares, states are not rounded, so that results are those of undivided sequences
    state_dtype = torch.float32 if shares else precision.state_dtype
    return {
        "sync": (FLAGS.value + lanes * FLAG_STRIDE.value, torch.int32),
        "states": (lanes * SLICE.value * dstate // split, state_dtype),
    }


def passing(inputs: SSDInputs, config: SSDHopperConfig) -> str:
    """How a segment gets the state that enters it:

    "recompute": its first pass computes the state from all chunks before the segment.
    "look back": the first pass of each segment computes the state that the segment adds, and the
        segment publishes it; later segments sum these states (`role_states.py`).
    "carry": there is no first pass; the share that began a sequence passes its state on.
    "none": there is no first pass, because every segment begins a sequence.
    """
    if share_count(inputs, config):
        return "carry"
    if config.recompute:
        return "recompute"
    return "look back" if slot_count(inputs, config) else "none"


def launch_options(
    inputs: SSDInputs, precision: Precision, config: SSDHopperConfig
) -> dict[str, object]:
    """Compile-time arguments and launch options of the kernel.

    SLICES: units per head.  UNITS: units per program.  PAIRS: programs per segment of a sequence
    """
    nheads, headdim = inputs.x.shape[2:]
    dstate = inputs.B.shape[3]
    split = n_split(dstate)
    return dict(
        HEADS=nheads,
        HEADS_PER_GROUP=inputs.heads_per_group,
        HEADDIM=headdim,
        DSTATE=dstate,
        SLICES=ceil_div(headdim, SLICE.value),
        N_SPLIT=split,
        UNITS=2 // split,
        PAIRS=program_count(inputs),
        DT_SOFTPLUS=inputs.dt_softplus,
        RELAXED=not precision.exact,
        PASSING=passing(inputs, config),
        INITIAL_STRIDES=strides_of(inputs.initial_states) or (0, 0, 0, 0),
        DEPTH=config.ring,
        SCORE_DEPTH=config.score_ring,
        UNIT_REGISTERS=config.unit_registers,
        OTHER_REGISTERS=config.other_registers,
        num_warps=8,
    )


def hopper_launch(
    inputs: SSDInputs, precision: Precision, config: SSDHopperConfig
) -> PreparedLaunch:
    """A call of the Hopper kernel, for all inputs of the signature of `inputs`.  Requires that
    `unsupported` in config.py returns "" for them.
    """
    packed = inputs.cu_seqlens is not None
    D = inputs.D
    seqlen, nheads, headdim = inputs.x.shape[1:]
    split = n_split(inputs.B.shape[3])
    row = nheads * headdim  # elements of a position of the output, which is contiguous
    x_tiles = _units(inputs, steps(inputs.x, inputs.x.stride(2)), CHUNK.value)
    # a tile of the output has the positions of a chunk that one lane finishes
    out_tiles = _units(inputs, (seqlen * row, row, headdim), CHUNK.value // split)
    B_tiles, C_tiles = (_rows(tensor, split, packed=packed) for tensor in (inputs.B, inputs.C))
    segments = inputs.sequences * config.count(ceil_div(seqlen, CHUNK.value))
    if packed:  # an upper bound, because the lengths are on the device
        segments = inputs.sequences + seqlen // (config.segment * CHUNK.value)

    def tensors(
        call_inputs: SSDInputs,
        out: torch.Tensor,
        final: torch.Tensor,
        sync: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> tuple[object, ...]:
        """The kernel's descriptors and tensors in its order.  A call without buffers has `final` in
        their places, whose pointer the kernel does not use then.
        """
        x, B, C = call_inputs.x, call_inputs.B, call_inputs.C
        descriptors = x_tiles(x), B_tiles(B), C_tiles(C), out_tiles(out)
        gates = call_inputs.dt, call_inputs.A, call_inputs.dt_bias
        if states is None or sync is None:  # a call has both or none
            states = sync = final
        entering = call_inputs.initial_states, call_inputs.cu_seqlens
        return *descriptors, *gates, call_inputs.D, *entering, final, states, sync

    D_strides: tuple[int, ...] = (0, 0)
    if D is not None:  # (h, p), or (h): every p has the same number
        D_strides = D.stride() if D.ndim == 2 else (D.stride(0), 0)
    strides = (
        (inputs.dt.stride(0), row_stride(inputs.dt), inputs.dt.stride(2)),
        inputs.A.stride(),
        strides_of(inputs.dt_bias) or (0,),
        D_strides,
        strides_of(inputs.cu_seqlens) or (0,),
    )
    sizes = (seqlen, inputs.sequences, config.segment, config.long_count, config.long_segment)
    scalars = (strides, tuple(map(float, inputs.dt_limit)), *sizes)
    options = launch_options(inputs, precision, config)
    programs = share_count(inputs, config) or segments * program_count(inputs)
    return prepared(
        Launcher(_fused_hopper_kernel, scalars, options),
        programs,
        inputs,
        tensors,
        buffer_sizes(inputs, precision, config),
    )


def _units(inputs: SSDInputs, strides: Strides, positions: int) -> Described:
    """Descriptors of tiles (positions, SLICE) of one head of x, or of the output.  Past a head's P,
    as past a sequence's end, TMA reads zeros and writes nothing.

    strides: between sequences, positions and heads
    """
    nheads, headdim = inputs.x.shape[2:]
    block = (1, positions, SLICE.value)
    return tiles(
        inputs.x,
        strides,
        sizes=(nheads, headdim),
        block=block,
        packed=inputs.cu_seqlens is not None,
    )


def _rows(tensor: torch.Tensor, split: int, *, packed: bool) -> Described:
    """Descriptors of tiles of B or C: a chunk of one group with all of N, or half of it, in blocks
    of COLUMNS columns, as they lie in shared memory.

    split: result of `n_split`.  packed: whether sequences are packed
    """
    ngroups, dstate = tensor.shape[2:]
    blocks = dstate // COLUMNS.value
    return tiles(
        tensor,
        steps(tensor, COLUMNS.value),
        sizes=(ngroups * blocks, COLUMNS.value),
        block=(blocks // split, CHUNK.value, COLUMNS.value),
        packed=packed,
    )
