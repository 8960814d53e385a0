"""Functions that compute Mamba-2's scan.  Imports torch at first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssdprof.record.place import Arguments, FunctionCall
from ssdprof.record.states import CallStates, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = ("dt", "B", "C", "z")  # of each token, besides x
_OTHERS = ("A", "D", "dt_bias", "chunk_size", "initial_states", "dt_softplus", "dt_limit")


def bind(step: bool, arguments: Arguments) -> FunctionCall:
    """A call in terms of the operator's inputs.  arguments: by our names.

    ValueError for those that the inputs cannot express.
    """
    return _step(arguments) if step else _prompt(arguments)


def _prompt(arguments: Arguments) -> FunctionCall:
    """x (b, l, h, p), of vLLM (l, h, p)."""
    x = arguments["x"]
    cu_seqlens = arguments.get("cu_seqlens")
    if cu_seqlens is None and arguments.get("seq_idx") is not None:
        raise ValueError("packed sequences without cu_seqlens are not recorded")

    def rows(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or x.ndim == 4 else tensor[None]

    inputs: dict[str, object] = {name: rows(arguments.get(name)) for name in ("x", *_ROWS)}
    inputs |= {name: arguments[name] for name in _OTHERS} | {"cu_seqlens": cu_seqlens}

    def result(returned: object) -> tuple[Tensor, Tensor | None]:
        several = tensors_of(returned)
        out = several.pop(0) if arguments.get("out") is None else arguments["out"]
        out = out.reshape(x.shape if x.ndim == 4 else (1, *x.shape))
        return out.to(x.dtype), _final_states(arguments, several)

    return FunctionCall(inputs=inputs, result=result, slots=arguments.get("slots"))


def _final_states(arguments: Arguments, returned: Sequence[Tensor]) -> Tensor | None:
    """The final states: (sequences, ...).  returned: what a function returned besides its
    output.
    """
    states: Tensor | None = None
    if arguments.get("pool") is not None:
        states = arguments["pool"][arguments["slots"].long()]
    elif "last" in arguments:
        states = returned[0][arguments["last"].long()] if arguments["chunks"] else returned[0]
    elif arguments["kept"] if arguments.get("cu_seqlens") is None else arguments["kept_packed"]:
        states = returned[1 if arguments.get("tracked") else -1]
    return states


def _step(arguments: Arguments) -> FunctionCall:
    """A few tokens of each sequence, on a pool, or on a state for each: x (b, h, p), (b, t, h, p),
    or (tokens, h, p) with cu_seqlens; dt, A, D and dt_bias expanded over channels, without which it
    may be a call of Mamba-1.
    """
    x = arguments["x"]
    cu_seqlens = arguments.get("cu_seqlens")
    accepted = arguments.get("accepted")
    if arguments.get("buffer") is not None and arguments.get("rows") is None:
        raise ValueError("states in a buffer without rows of its own are not recorded")

    def rows(tensor: Tensor) -> Tensor:
        if tensor.ndim == 4:
            return tensor
        return tensor[:, None] if cu_seqlens is None else tensor[None]

    values = rows(x)
    written = arguments.get("written")
    moved = {"written": written if written is None or written.ndim == 1 else written[:, 0]}
    if accepted is not None:
        moved["table"] = arguments["slots"] if written is None else written
    states = CallStates.of(values, {**arguments, **moved, "step": True})
    inputs: dict[str, object] = {
        name: None if arguments[name] is None else rows(arguments[name]) for name in ("B", "C", "z")
    }
    inputs |= {"x": values, "dt": _of_heads("dt", rows(arguments["dt"]), 3)}
    inputs |= {name: _of_heads(name, arguments[name], 1) for name in ("A", "D", "dt_bias")}
    inputs |= {
        "dt_softplus": bool(arguments["dt_softplus"]),
        "initial_states": states.initial(),
        "cu_seqlens": cu_seqlens,
        "state_every": int(states.after_each_token),
    }

    def result(returned: object) -> tuple[Tensor, Tensor | None]:
        out = tensors_of(returned)[0] if arguments.get("out") is None else arguments["out"]
        return states.live(out.reshape(values.shape).to(x.dtype)), states.final(None)

    return FunctionCall(
        inputs=inputs,
        result=result,
        slots=states.slots_read,
        copied=frozenset({"initial_states"} if states.gathered else ()),
    )


def _of_heads(name: str, tensor: Tensor | None, dims: int) -> Tensor | None:
    """The first `dims` dimensions of a tensor that is expanded over the others.  ValueError if it
    is not.
    """
    if tensor is None or tensor.ndim == dims:
        return tensor
    if any(tensor.stride()[dims:]):
        raise ValueError(f"{name} is not expanded over the channels of a head")
    return tensor.flatten(dims)[..., 0]
