"""States of decoding in the format in which a server's pool stores them: formats by name, and the
operator computed step by step with states in a format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ssdprof import kernels, operators
from ssdprof.core.case import DECODER
from ssdprof.errors import BadInputError, nearest
from ssdprof.kernels.state_formats import StateFormat
from ssdprof.operators.implementations import load
from ssdprof.operators.late import lazy, precision, torch

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels import oracle
    from ssdprof.kernels.inputs import Inputs
else:
    oracle = lazy("ssdprof.kernels.oracle")

_FORMATS = {
    state_format.name: state_format
    for state_format in (
        StateFormat(name="fp32", number="fp32"),
        StateFormat(name="bf16", number="bf16"),
        StateFormat(name="fp16", number="fp16"),
        StateFormat(name="bf16-stochastic", number="bf16", rounding="stochastic"),
        StateFormat(name="fp16-stochastic", number="fp16", rounding="stochastic"),
        StateFormat(name="fp8", number="fp8", scale="row"),
        StateFormat(name="int8", number="int8", scale="row"),
        StateFormat(name="int8-carried", number="int8", rounding="carried", scale="row"),
    )
}
# limits of R in "fixed=R", the range of a fixed scale: far beyond the states of models, and such
# that R and 448 / R, for the largest number of fp8, are normal fp32 numbers
LEAST_RANGE, LARGEST_RANGE = 1e-20, 1e20


def parse_state_format(text: str) -> StateFormat:
    """The format that a text names: one of `_FORMATS`, such as `int8`; one with a scale of its own,
    `int8:head` or `fp8:fixed=2`; or the user's MODULE:FUNCTION.

    Raises BadInputError for another text, for a scale of a format that has none, and for a function
    that cannot be imported.
    """
    name, colon, scale = text.partition(":")
    if name not in _FORMATS:
        if not colon:
            raise BadInputError(
                f"There is no format {text!r} of states.",
                f"{nearest(text, _FORMATS)}  A format of your own is MODULE:FUNCTION.",
            )
        return StateFormat(name=text, number="function", function=load(text))
    state_format = _FORMATS[name]
    if not colon:
        return state_format
    if not state_format.scale:
        raise BadInputError(
            f"States in {name} have no scale, and {text!r} names one.", f"Write {name}."
        )
    if scale == "head":
        return replace(state_format, name=text, scale="head")
    return replace(state_format, name=text, scale="fixed", fixed_range=_fixed_range(text, scale))


def _fixed_range(text: str, scale: str) -> float:
    """R of a scale "fixed=R": 4.0 for "fixed=4".  Raises BadInputError for another scale, and for a
    number outside of LEAST_RANGE to LARGEST_RANGE.

    text: the whole format, for the message.
    """
    word, _, number = scale.partition("=")
    try:
        fixed_range = float(number) if word == "fixed" else math.nan
    except ValueError:
        fixed_range = math.nan
    if not LEAST_RANGE <= fixed_range <= LARGEST_RANGE:
        raise BadInputError(
            f"{text!r} names no scale of states.",
            f"Write {text.partition(':')[0]} for one scale of each row, or add :head, or :fixed=R "
            f"with the largest magnitude that is kept, {LEAST_RANGE:g} to {LARGEST_RANGE:g}.",
        )
    return fixed_range


def stepped_states(
    inputs: Inputs, state_format: StateFormat, step: int, marks: Sequence[int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute the operator token by token, and round its states to a format after every `step`
    tokens.

    The initial states are rounded first.  A step computes in fp32 from the rounded states; its
    outputs are computed before its states are rounded.  The last step of a sequence may have fewer
    tokens, and its states are rounded, too.  Returns out, in the shape of the values, and states
    (marks, sequences, heads, K, V), for SSD (marks, sequences, heads, P, N), both in fp32.

    step: tokens of a step, at least 1.
    marks: numbers of steps after which states are returned, at least one; 0 stands for the rounded
        initial states.  A sequence that ended earlier has its last state.
    seed: seed of the random numbers of stochastic formats, 0 to 2**31 - 1.  A user's function does
        not get it.

    Raises UnsupportedError for inputs that the kernel does not take, BadInputError for a user's
    function that does not return states, and ValueError for a step, mark or seed out of range.
    """
    if step < 1 or min(marks) < 0 or not 0 <= seed < 1 << 31:
        raise ValueError(f"step {step}, marks {tuple(marks)} or seed {seed} is out of range")
    if state_format.function is not None:
        return _by_function(inputs, state_format, step, marks)
    kernel = kernels.get(inputs.operator, DECODER).stepped
    assert kernel is not None
    return kernel(inputs, state_format, step, marks, seed)


def _by_function(
    inputs: Inputs, state_format: StateFormat, step: int, marks: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`stepped_states` for a user's function: one call of the function for the initial state of
    each sequence, then one of the implementation `DECODER` and one of the function for each step.
    """
    positional = operators.get(inputs.operator).binding.positional(inputs)
    run = kernels.get(inputs.operator, DECODER).run
    exact = precision.Precision()
    initial = oracle.initial_states(inputs, torch.float32)
    out = torch.empty(inputs.values.shape, device=inputs.device)
    states = torch.empty(len(marks), *inputs.states_shape, device=inputs.device)
    for span in oracle.spans_of(inputs):
        row_slice = slice(span.batch, span.batch + 1)
        pieces = span.cut(step) if span.length else ()
        state = _rounded(state_format, initial[span.sequence][None])
        states[:, span.sequence] = state
        for steps_done, piece in enumerate(pieces, 1):
            positions = slice(piece.start, piece.stop)
            tokens = {
                name: tensor[row_slice, positions].float() for name, tensor in positional.items()
            }
            one_sequence: dict[str, Any] = {inputs.STATES: state, "cu_seqlens": None}
            call = replace(inputs, **tokens, **one_sequence, state_indices=None, state_every=0)
            out[row_slice, positions], state = run(call, exact)
            state = _rounded(state_format, state)
            # the state for this and every later mark, until the next step overwrites it there
            states[[mark >= steps_done for mark in marks], span.sequence] = state
    return out, states


def _rounded(state_format: StateFormat, states: Tensor) -> Tensor:
    """The states as the user's function rounds them, in fp32.  Raises BadInputError unless it
    returns a tensor of the same shape.
    """
    assert state_format.function is not None
    rounded = state_format.function(states)
    is_tensor = isinstance(rounded, torch.Tensor)
    if not is_tensor or rounded.shape != states.shape:
        returned = tuple(rounded.shape) if is_tensor else type(rounded).__name__
        raise BadInputError(
            f"{state_format.name} must return a tensor {tuple(states.shape)}, not {returned}.",
            "It takes states in fp32 and returns them as the pool would.",
        )
    return rounded.float()
