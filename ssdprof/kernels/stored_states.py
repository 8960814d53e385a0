"""The states of decoding as a pool keeps them between steps: rounded to a `StateFormat`.

A kernel computes a step in fp32, with the state in registers, rounds the state as it would store
it, and continues from the rounded one.

Random numbers are a function of (seed, sequence, head, step, element), so that a result depends
neither on other sequences nor on how a kernel cuts the state:

    hash(hash(hash(hash(hash(seed) + sequence) + head) + step) + element)

in integers modulo 2**32, where `hash` is the finaliser of MurmurHash3 (Appleby 2011).  step: 0 for
the initial state, then the number of the step.  element: k * V + v of a state (K, V), p * N + n of
a state (P, N).
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
# the sum of this and of a number up to 2**22 has a unit of 1
ROUNDS_TO_ONE = tl.constexpr(1.5 * 2**23)
LEAST_SCALE = tl.constexpr(2.0**-100)
LEAST_NORMAL_FP16 = tl.constexpr(2.0**-14)


@dataclass(frozen=True)
class Stepping:
    """How a launch rounds states; without a format, not at all.

    step: tokens between roundings.  seed: of random numbers, 0 to 2**31 - 1.
    """

    format: StateFormat | None = None
    step: int = 1
    seed: int | None = None

    @property
    def constants(self) -> tuple[str, str, str, float] | None:
        return None if self.format is None else self.format.constants

    @property
    def rounds(self) -> bool:
        return self.format is not None and self.format.number != "fp32"

    @property
    def whole_state(self) -> bool:
        """Whether a program has all of a head's state: a scale of it needs that, and Triton's
        interpreter takes as long for a slice.
        """
        return self.format is not None and (INTERPRETED or self.format.scale == "head")

    @property
    def out_dtype(self) -> torch.dtype | None:
        """None: that of the values."""
        return None if self.format is None else torch.float32


NOT_STEPPING = Stepping()


STAGES = {"stored_after": "recurrence"}


@triton.jit
def hashed(bits):
    """MurmurHash3's finaliser, of uint32."""
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
    """A tile of a state in fp32 as a pool returns it.

    key: `hashed_head`.  elements: numbers of the tile's elements.  ROW_AXIS: along which one scale
    holds.  FORMAT: `StateFormat.constants`.  A tile has whole rows, for scales of heads a whole
    state.
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
    """`stored_state` after the first `tokens` of a sequence, if a step ends there."""
    if (tokens % S.STEP == 0) | (tokens == length):
        step = (tokens + S.STEP - 1) // S.STEP
        state = stored_state(state, key, step, elements, ROW_AXIS, S.FORMAT)
    return state


@triton.jit
def _stochastic(state, random, FORMAT: tl.constexpr):
    """To one of the two neighbours in 16 bit: with d more bits in fp32, d random bits are added to
    the magnitude and d bits are cut off.

    fp16 has a fixed unit below its least normal number.  Adding that number first makes it the unit
    of the sum.
    """
    DROPPED: tl.constexpr = 16 if FORMAT[0] == "bf16" else 13
    magnitude = tl.abs(state)
    added = tl.zeros_like(magnitude)
    if FORMAT[0] == "fp16":
        added = tl.where(magnitude < LEAST_NORMAL_FP16, LEAST_NORMAL_FP16, 0.0)
    bits = (magnitude + added).to(tl.uint32, bitcast=True) + (random >> (32 - DROPPED))
    rounded = (bits >> DROPPED << DROPPED).to(tl.float32, bitcast=True) - added
    if FORMAT[0] == "fp16":
        rounded = rounded.to(tl.float16).to(tl.float32)  # beyond 65,504: infinity
    return tl.where(magnitude < INFINITY, tl.where(state < 0, -rounded, rounded), state)


@triton.jit
def _scaled(state, ROW_AXIS: tl.constexpr, FORMAT: tl.constexpr):
    """To nearest in 8 bit, ties to even, times a scale.

    Under a scale of at most LEAST_SCALE, as of zeros, all is 0.  Under one of NaN or infinity, and
    where a number with a fixed scale is not finite, all is NaN.
    """
    LARGEST: tl.constexpr = 127.0 if FORMAT[0] == "int8" else 448.0
    magnitude = tl.abs(state)
    if FORMAT[2] == "fixed":
        largest = tl.full((1, 1), FORMAT[3], tl.float32)
    else:
        largest = tl.where(magnitude < INFINITY, magnitude, INFINITY)  # a maximum loses NaN
        largest = tl.max(largest, axis=ROW_AXIS, keep_dims=True)
        if FORMAT[2] == "head":
            largest = tl.max(largest, axis=1 - ROW_AXIS, keep_dims=True)
    scale = tl.div_rn(largest, LARGEST)
    kept = scale > LEAST_SCALE
    per_unit = tl.where(kept, tl.div_rn(1.0, tl.where(kept, scale, 1.0)), 0.0)
    number = _clamped(state * per_unit, LARGEST)
    number = _to_units(number, 1.0) if FORMAT[0] == "int8" else _e4m3(number)
    rounded = number * scale
    if FORMAT[1] == "carried":
        error = _clamped((state - rounded) * (254.0 * per_unit), 127.0)
        rounded += _to_units(error, 1.0) * (scale / 254.0)
    return tl.where((magnitude < INFINITY) & (largest < INFINITY), rounded, NAN)


@triton.jit
def _clamped(number, LARGEST: tl.constexpr):
    return tl.minimum(tl.maximum(number, -LARGEST), LARGEST)


@triton.jit
def _e4m3(number):
    """The nearest number with a sign, three bits of mantissa and exponents from -6; magnitudes up
    to 448.

    Its unit is 2**-3 of its own power of two.  The arithmetic is exact, and needs no instruction
    that older GPUs lack.
    """
    SMALLEST: tl.constexpr = (127 - 6) << 23
    power = number.to(tl.int32, bitcast=True) & 0x7F800000
    unit = (tl.maximum(power, SMALLEST) - (3 << 23)).to(tl.float32, bitcast=True)
    return _to_units(number, unit)


@triton.jit
def _to_units(number, unit):
    """The nearest multiple of a power of two, ties to even; of at most 2**22 units."""
    return (number + unit * ROUNDS_TO_ONE) - unit * ROUNDS_TO_ONE


def refuse_unwritable(inputs: Inputs, *, in_place: bool) -> None:
    """Raises ValueError if a token-by-token kernel cannot write its states in place, and
    UnsupportedError for states after every few tokens.
    """
    name = inputs.LINEAR[1]
    initial = getattr(inputs, name)
    if in_place and (initial is None or inputs.state_every):
        raise ValueError(f"in_place needs {name} to write to, and writes one state: no state_every")
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
    """A call token by token, with the state rounded to the format as a pool holds it: the initial
    one, and then after every `step` tokens and at the end of each sequence.  out, and the pool's
    states after each of the steps `marks`: see `registry.Implementation`.

    prepare: makes the in-place launch of the kernel that rounds the state as `Stepping` says.
    marks: numbers of steps, 0 for the initial state.
    """
    call, slots = on_pool(inputs, step, marks)
    refuse_gradient("recurrent", vars(call).values())
    stepping = Stepping(state_format, step, seed)
    launch = kept(_launches, (prepare, call.signature, stepping), prepare, call, stepping)
    out, pool = launch(call)
    return out, pool[slots]


def on_pool(inputs: I, step: int, marks: Sequence[int]) -> tuple[I, Tensor]:
    """Returns the call with a pool of its own, and slots (marks, sequences): slots[m, s] holds
    sequence s's state after `marks[m]` steps.

    A step is `step` tokens, the last one of a sequence may be shorter; after more steps than a
    sequence has, the pool still holds its last state.  The table of slots has a column for the
    initial state and one for each token.
    """
    sequences, device = inputs.sequences, inputs.device
    lengths = torch.full((sequences,), inputs.length, device=device)
    if inputs.cu_seqlens is not None:
        lengths = inputs.cu_seqlens.diff().long()
    tokens = step * torch.tensor(marks, dtype=torch.long, device=device)
    columns = torch.minimum(tokens, lengths[:, None])  # (sequences, marks)
    slots = torch.arange(sequences * (1 + len(marks)), dtype=torch.int32, device=device)
    table = torch.full((sequences, 1 + inputs.length), -1, dtype=torch.int32, device=device)
    table[:, 0] = slots[:sequences]
    # where several marks are one token, any of their slots serves them all
    table.scatter_(1, columns, slots[sequences:].view(len(marks), sequences).mT)
    slots_of_marks = table.gather(1, columns).mT.long()
    pool = torch.empty((len(slots), *inputs.states_shape[1:]), device=device)
    pool[:sequences] = 0 if inputs.initial is None else inputs.initial
    call = replace(
        inputs,
        **{inputs.LINEAR[1]: pool},
        state_indices=slots[:sequences],
        write_indices=table,
        state_every=0,
    )
    return call, slots_of_marks
