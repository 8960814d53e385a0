"""Functions that compute Mamba-2's scan.  Imports torch at first use.

Shapes: batch b, positions l, h heads of dimension p.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ssdprof.record.place import Arguments, FunctionCall
from ssdprof.record.states import CallStates, outputs_of

if TYPE_CHECKING:
    from torch import Tensor

_TOKEN_TENSORS = ("x", "dt", "B", "C", "z")  # inputs (b, l, ...)
# other inputs, in the operator's shapes
_CALL_ARGUMENTS = ("A", "D", "dt_bias", "chunk_size", "initial_states", "dt_softplus", "dt_limit")


def bind(step: bool, arguments: Arguments) -> FunctionCall:
    """A call in the operator's terms.

    step: whether the function is for a few tokens of each sequence.
    arguments: by our names, which `places.py` explains.

    Raises ValueError if the operator's inputs cannot express the call.
    """
    return _bind_step(arguments) if step else _bind_prompt(arguments)


def _bind_prompt(arguments: Arguments) -> FunctionCall:
    """A prompt, whose x is (b, l, h, p), or (l, h, p) in vLLM."""
    cu_seqlens = arguments.get("cu_seqlens")
    if cu_seqlens is None and arguments.get("seq_idx") is not None:
        raise ValueError("packed sequences without cu_seqlens are not recorded")
    has_batch = arguments["x"].ndim == 4
    inputs = {name: arguments[name] for name in _CALL_ARGUMENTS} | {"cu_seqlens": cu_seqlens}
    for name in _TOKEN_TENSORS:
        tensor = arguments.get(name)
        inputs[name] = tensor if tensor is None or has_batch else tensor[None]

    def result(returned: object) -> tuple[Tensor, Tensor | None]:
        out, other_tensors = outputs_of(arguments, inputs["x"], returned)
        return out, _final_states(arguments, other_tensors)

    return FunctionCall(inputs=inputs, result=result, slots=arguments.get("final_slots"))


def _final_states(arguments: Arguments, returned: list[Tensor]) -> Tensor | None:
    """(sequences, ...), the final states of a prompt.  None if the call asked for none.

    returned: the tensors that the function returned besides its output.
    """
    pool: Tensor | None = arguments.get("final_pool")
    if pool is not None:
        return pool[arguments["final_slots"].long()]
    if "last_chunks" in arguments:
        if arguments["returns_chunks"]:
            return returned[0][arguments["last_chunks"].long()]
        return returned[0]
    is_packed = arguments.get("cu_seqlens") is not None
    returns_states = arguments["returns_final_packed" if is_packed else "returns_final"]
    if not returns_states:
        return None
    # the last tensor; with `returns_tracked`, the second of three
    return returned[1] if arguments.get("returns_tracked") else returned[-1]


def _bind_step(arguments: Arguments) -> FunctionCall:
    """A few tokens of each sequence.

    x is (b, h, p), (b, l, h, p), or (tokens, h, p) with cu_seqlens.  dt, A, D and dt_bias are
    expanded over the channels of a head.  If they are not, it may be a call of Mamba-1, which is
    refused.
    """
    cu_seqlens = arguments.get("cu_seqlens")
    if arguments.get("token_buffer") is not None and arguments.get("buffer_rows") is None:
        raise ValueError("states in a buffer without the rows of its sequences are not recorded")

    def with_batch(tensor: Tensor) -> Tensor:
        """A tensor of tokens as (b, l, ...)."""
        if tensor.ndim == 4:
            return tensor
        return tensor[:, None] if cu_seqlens is None else tensor[None]

    x = with_batch(arguments["x"])
    state_arguments = {**arguments, "step": True}
    written_slots = arguments.get("written_slots")
    if arguments.get("accepted") is not None:
        state_arguments["token_slots"] = (
            arguments["slots"] if written_slots is None else written_slots
        )
    if written_slots is not None and written_slots.ndim == 2:
        state_arguments["written_slots"] = written_slots[:, 0]
    states = CallStates.of(x, state_arguments)
    inputs: dict[str, object] = {"x": x, "dt": _of_heads("dt", with_batch(arguments["dt"]), 3)}
    for name in ("B", "C", "z"):
        inputs[name] = None if arguments[name] is None else with_batch(arguments[name])
    for name in ("A", "D", "dt_bias"):
        inputs[name] = _of_heads(name, arguments[name], 1)
    inputs |= {
        "dt_softplus": bool(arguments["dt_softplus"]),
        "initial_states": states.initial(),
        "cu_seqlens": cu_seqlens,
        "state_every": int(states.after_each_token),
    }
    return FunctionCall(
        inputs=inputs,
        result=partial(states.result, arguments, x),
        slots=states.slots_read,
        copied=states.copied,
    )


def _of_heads(name: str, tensor: Tensor | None, dims: int) -> Tensor | None:
    """The first `dims` dimensions of a tensor that is expanded over the other ones, as a view.  A
    tensor without other ones is returned as it is, and None for None.

    Raises ValueError if it is not expanded.
    """
    if tensor is None or tensor.ndim == dims:
        return tensor
    if any(tensor.stride()[dims:]):
        raise ValueError(f"{name} is not expanded over the channels of a head")
    return tensor.flatten(dims)[..., 0]
