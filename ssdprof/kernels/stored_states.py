"""The states of decoding as a pool keeps them between steps: rounded to a `StateFormat`.

A kernel keeps the state in registers and computes a step in fp32.  Then it rounds the state as if
it stored it in the pool, and continues with the rounded state.

Random numbers for stochastic rounding are a function of (seed, sequence, head, step, element), so
that a result depends neither on other sequences nor on how a kernel cuts the state:

    hash(hash(hash(hash(hash(seed) + sequence) + head) + step) + element)

in integers modulo 2**32, where `hash` is the finaliser of MurmurHash3 (Appleby 2011).  The initial
state has step 0.  An element's number is k * V + v in a state (K, V), and p * N + n in a state
(P, N).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssdprof.kernels.device import INTERPRETED, refuse_gradient
from ssdprof.kernels.inputs import Inputs, PreparedLaunch
from ssdprof.kernels.launch import kept
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.state_formats import StateFormat
from ssdprof.kernels.tensors import is_expanded

I = TypeVar("I", bound=Inputs)

INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
# fp32 numbers near this one are integers: adding it, and subtracting it again, rounds to an integer
ROUNDS_TO_ONE = tl.constexpr(1.5 * 2**23)
# Numbers with this or a smaller scale, such as zeros, become 0: the reciprocal of a much smaller
# scale would be infinite.
LEAST_SCALE = tl.constexpr(2.0**-100)
LEAST_NORMAL_FP16 = tl.constexpr(2.0**-14)


@dataclass(frozen=True)
class Stepping:
    """How a launch of a token-by-token kernel rounds states.

    format: of the stored states.  Without one, states are not rounded.
    step: number of tokens of a step, after which the state is rounded; at the end of a sequence it
        is rounded too.
    seed: seed of the random numbers, 0 to 2**31 - 1; None without a format.
    """

    format: StateFormat | None = None
    step: int = 1
    seed: int | None = None

    @property
    def constants(self) -> tuple[str, str, str, float] | None:
        """The compile-time argument FORMAT of the kernels: `StateFormat.constants`; None without a
        format.
        """
        return None if self.format is None else self.format.constants

    @property
    def rounds(self) -> bool:
        """Whether storing a state may change it."""
        return self.format is not None and self.format.number != "fp32"

    @property
    def whole_state(self) -> bool:
        """Whether a program computes the whole state of a head, and no slice of it.  A scale for
        each head needs the whole state.  Triton's interpreter gets it for every format, because it
        is not faster for a slice.
        """
        return self.format is not None and (INTERPRETED or self.format.scale == "head")

    @property
    def out_dtype(self) -> torch.dtype | None:
        """The dtype of the output; None: that of the values."""
        return None if self.format is None else torch.float32


NOT_STEPPING = Stepping()


# stages of functions: `stalls/attribute.py`
STAGES = {"stored_after": "recurrence"}


@triton.jit
def hashed(bits):
    """The finaliser of MurmurHash3, for uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def hashed_head(seed, sequence, head):
    """The key of the random numbers of one head of one sequence."""
    key = hashed(tl.cast(seed, tl.uint32)) + tl.cast(sequence, tl.uint32)
    return hashed(hashed(key) + tl.cast(head, tl.uint32))


@triton.jit
def stored_state(state, key, step, elements, ROW_AXIS: tl.constexpr, FORMAT: tl.constexpr):
    """A tile of a state in fp32 after it was stored in a pool.  A tile has whole rows; with a scale
    for each head it is the whole state.

    key: result of `hashed_head`.  step: number of the step after which it is stored; 0: before the
    first one.
    elements: the number of each element of the tile in the state.  ROW_AXIS: axis of the tile along
    which elements share a scale.
    FORMAT, here and below: (number, rounding, scale, fixed range), `StateFormat.constants`.
    """
    if FORMAT[0] == "fp32":
        return state
    elif FORMAT[0] == "int8" or FORMAT[0] == "fp8":
        return _scaled(state, ROW_AXIS, FORMAT)
    elif FORMAT[1] == "stochastic":
        random = hashed(hashed(key + tl.cast(step, tl.uint32)) + tl.cast(elements, tl.uint32))
        return _stochastic(state, random, FORMAT)
    elif FORMAT[0] == "bf16":
        return state.to(tl.bfloat16).to(tl.float32)
    else:
        return state.to(tl.float16).to(tl.float32)


@triton.jit
def stored_after(state, tokens, length, key, elements, ROW_AXIS: tl.constexpr, S: tl.constexpr):
    """The state after the first `tokens` tokens of a sequence of `length` tokens: that of
    `stored_state` if a step, or the sequence, ends there, otherwise unchanged.
    """
    if (tokens % S.STEP == 0) | (tokens == length):
        step = (tokens + S.STEP - 1) // S.STEP
        state = stored_state(state, key, step, elements, ROW_AXIS, S.FORMAT)
    return state


@triton.jit
def _stochastic(state, random, FORMAT: tl.constexpr):
    """Round to one of the two neighbours in 16 bits, at random, so that the mean is kept.  NaN and
    infinity stay what they are.

    fp32 has 23 bits of mantissa, bf16 7 and fp16 10: DROPPED bits fewer.  As many random bits are
    added to the magnitude, and as many bits are then cut off.  Below its least normal number, fp16
    has a fixed unit in the last place; adding that number first gives the sum this unit.

    random: 32 random bits for each number.
    """
    DROPPED: tl.constexpr = 16 if FORMAT[0] == "bf16" else 13
    magnitude = tl.abs(state)
    added = tl.zeros_like(magnitude)
    if FORMAT[0] == "fp16":
        added = tl.where(magnitude < LEAST_NORMAL_FP16, LEAST_NORMAL_FP16, 0.0)
    bits = (magnitude + added).to(tl.uint32, bitcast=True) + (random >> (32 - DROPPED))
    rounded = (bits >> DROPPED << DROPPED).to(tl.float32, bitcast=True) - added
    if FORMAT[0] == "fp16":
        rounded = rounded.to(tl.float16).to(tl.float32)  # infinity beyond 65,504
    return tl.where(magnitude < INFINITY, tl.where(state < 0, -rounded, rounded), state)


@triton.jit
def _scaled(state, ROW_AXIS: tl.constexpr, FORMAT: tl.constexpr):
    """Round to 8 bits with a scale, to nearest, ties to even.

    LARGEST: the largest number of the format: 127 of int8, 448 of e4m3.  A rounding error that is
    carried is a multiple of 1 / 254 of the scale, so that half a unit is 127 of them.

    Numbers whose scale is at most LEAST_SCALE become 0.  NaN and infinity become NaN, and with them
    all numbers that share their scale, unless it is fixed.
    """
    LARGEST: tl.constexpr = 127.0 if FORMAT[0] == "int8" else 448.0
    magnitude = tl.abs(state)
    if FORMAT[2] == "fixed":
        largest = tl.full((1, 1), FORMAT[3], tl.float32)
    else:
        # with infinity in place of NaN, because a maximum may ignore NaN
        largest = tl.where(magnitude < INFINITY, magnitude, INFINITY)
        largest = tl.max(largest, axis=ROW_AXIS, keep_dims=True)
        if FORMAT[2] == "head":
            largest = tl.max(largest, axis=1 - ROW_AXIS, keep_dims=True)
    scale = tl.div_rn(largest, LARGEST)
    has_scale = scale > LEAST_SCALE
    per_unit = tl.where(has_scale, tl.div_rn(1.0, tl.where(has_scale, scale, 1.0)), 0.0)
    number = _clamped(state * per_unit, LARGEST)
    number = _to_units(number, 1.0) if FORMAT[0] == "int8" else _e4m3(number)
    rounded = number * scale
    if FORMAT[1] == "carried":
        error = _clamped((state - rounded) * (254.0 * per_unit), 127.0)
        rounded += _to_units(error, 1.0) * (scale / 254.0)
    return tl.where((magnitude < INFINITY) & (largest < INFINITY), rounded, NAN)


@triton.jit
def _clamped(number, LARGEST: tl.constexpr):
    """The number, between -LARGEST and LARGEST."""
    return tl.minimum(tl.maximum(number, -LARGEST), LARGEST)


@triton.jit
def _e4m3(number):
    """Round to the nearest e4m3 number, which has three bits of mantissa and exponents from -6, for
    magnitudes up to 448.

    The unit is 2**-3 times the number's power of two.  The arithmetic is exact, and needs no
    instruction that older GPUs lack.
    """
    # fp32 stores the exponent plus 127, in the 8 bits above the 23 bits of mantissa
    SMALLEST: tl.constexpr = (127 - 6) << 23  # the bits of 2**-6
    power = number.to(tl.int32, bitcast=True) & 0x7F800000
    # subtracting 3 from the exponent divides by 2**3
    unit = (tl.maximum(power, SMALLEST) - (3 << 23)).to(tl.float32, bitcast=True)
    return _to_units(number, unit)


@triton.jit
def _to_units(number, unit):
    """Round to the nearest multiple of `unit`, a power of two, ties to even.  The number's
    magnitude is at most 2**22 units.
    """
    return (number + unit * ROUNDS_TO_ONE) - unit * ROUNDS_TO_ONE


def refuse_unwritable(inputs: Inputs, *, in_place: bool) -> None:
    """Check a call of a token-by-token kernel, which returns states after every token or only at
    the end.

    Raises ValueError for a call in place without initial states to write to, with `state_every`, or
    with expanded initial states, and for slots to write to in another call.  Raises
    UnsupportedError for states after every few tokens.
    """
    name = inputs.STATES
    initial = getattr(inputs, name)
    if in_place and (initial is None or inputs.state_every):
        raise ValueError(f"in_place needs {name} to write to, and writes one state: no state_every")
    if not in_place and not (inputs.write_indices is None and inputs.accepted is None):
        raise ValueError("write_indices and accepted are for calls in place")
    if inputs.state_every > 1:
        raise UnsupportedError("recurrent: the state after every token, or only at the end")
    if in_place and is_expanded(initial):
        raise ValueError(f"in_place cannot write to expanded {name}: pass {name}.contiguous()")


_launches: dict[Hashable, PreparedLaunch] = {}


def stepped(
    prepare: Callable[[I, Stepping], PreparedLaunch],
    inputs: I,
    state_format: StateFormat,
    step: int,
    marks: Sequence[int],
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """`Implementation.stepped` of a token-by-token kernel: out, and the pool's states after each of
    the steps `marks`, (marks, sequences, ...), both in fp32.  The state is rounded to the format at
    the beginning, after every `step` tokens, and at the end of each sequence.

    prepare: (inputs, stepping) -> the launch of the kernel in place, with that rounding.
    marks: numbers of steps; 0 stands for the initial state after its rounding.  A sequence with
        fewer steps has its last state there.
    """
    call, slots = on_pool(inputs, step, marks)
    refuse_gradient("recurrent", vars(call).values())
    stepping = Stepping(state_format, step, seed)
    launch = kept(_launches, (prepare, call.signature, stepping), prepare, call, stepping)
    out, pool = launch(call)
    return out, pool[slots]


def on_pool(inputs: I, step: int, marks: Sequence[int]) -> tuple[I, Tensor]:
    """Turn a call into a call in place on a new pool in fp32 that keeps the state at every mark.

    Returns the call, and slots (marks, sequences): slots[m, s] has the state of sequence s after
    `marks[m]` steps of `step` tokens, or its last state if it has fewer steps.  The call's table
    `write_indices` has a column for the initial state, then one for each token, which only the
    kernels of `stepped` expect.
    """
    sequences, device = inputs.sequences, inputs.device
    lengths = torch.full((sequences,), inputs.length, device=device)
    if inputs.cu_seqlens is not None:
        lengths = inputs.cu_seqlens.diff().long()
    tokens = step * torch.tensor(marks, dtype=torch.long, device=device)  # before each mark
    columns = torch.minimum(tokens, lengths[:, None])  # (sequences, marks)
    slots = torch.arange(sequences * (1 + len(marks)), dtype=torch.int32, device=device)
    table = torch.full((sequences, 1 + inputs.length), -1, dtype=torch.int32, device=device)
    table[:, 0] = slots[:sequences]
    # if several marks fall on one token, one of their slots is written, and all of them read it
    table.scatter_(1, columns, slots[sequences:].view(len(marks), sequences).mT)
    slots_of_marks = table.gather(1, columns).mT.long()
    pool = torch.empty((len(slots), *inputs.states_shape[1:]), device=device)
    pool[:sequences] = 0 if inputs.initial is None else inputs.initial
    call = replace(
        inputs,
        **{inputs.STATES: pool},
        state_indices=slots[:sequences],
        write_indices=table,
        state_every=0,
    )
    return call, slots_of_marks
