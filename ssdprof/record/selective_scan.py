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


def bind(step: bool, given: Arguments) -> FunctionCall:
    """A call in terms of the operator's inputs.  given: the arguments by our names.

    ValueError for those that the inputs cannot express.
    """
    return _step(given) if step else _prompt(given)


def _prompt(given: Arguments) -> FunctionCall:
    """x (b, l, h, p), of vLLM (l, h, p)."""
    x = given["x"]
    cu_seqlens = given.get("cu_seqlens")
    if cu_seqlens is None and given.get("seq_idx") is not None:
        raise ValueError("packed sequences without cu_seqlens are not recorded")

    def rows(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or x.ndim == 4 else tensor[None]

    inputs: dict[str, object] = {name: rows(given.get(name)) for name in ("x", *_ROWS)}
    inputs |= {name: given[name] for name in _OTHERS} | {"cu_seqlens": cu_seqlens}

    def result(returned: object) -> tuple[Tensor, Tensor | None]:
        several = tensors_of(returned)
        out = several.pop(0) if given.get("out") is None else given["out"]
        out = out.reshape(x.shape if x.ndim == 4 else (1, *x.shape))
        return out.to(x.dtype), _final_states(given, several)

    return FunctionCall(inputs=inputs, result=result, slots=given.get("slots"))


def _final_states(given: Arguments, returned: Sequence[Tensor]) -> Tensor | None:
    """(sequences, ...).  returned: what a function returned besides its output."""
    states: Tensor | None = None
    if given.get("pool") is not None:
        states = given["pool"][given["slots"].long()]
    elif "last" in given:
        states = returned[0][given["last"].long()] if given["chunks"] else returned[0]
    elif given["kept"] if given.get("cu_seqlens") is None else given["kept_packed"]:
        states = returned[1 if given.get("tracked") else -1]
    return states


def _step(given: Arguments) -> FunctionCall:
    """A few tokens of each sequence, on a pool, or on a state for each: x (b, h, p), (b, t, h, p),
    or (tokens, h, p) with cu_seqlens; dt, A, D and dt_bias expanded over channels, without which it
    may be a call of Mamba-1.
    """
    x = given["x"]
    cu_seqlens = given.get("cu_seqlens")
    accepted = given.get("accepted")
    if given.get("buffer") is not None and given.get("rows") is None:
        raise ValueError("states in a buffer without rows of its own are not recorded")

    def rows(tensor: Tensor) -> Tensor:
        if tensor.ndim == 4:
            return tensor
        return tensor[:, None] if cu_seqlens is None else tensor[None]

    values = rows(x)
    written = given.get("written")
    moved = {"written": written if written is None or written.ndim == 1 else written[:, 0]}
    if accepted is not None:
        moved["table"] = given["slots"] if written is None else written
    states = CallStates.of(values, {**given, **moved, "step": True})
    inputs: dict[str, object] = {
        name: None if given[name] is None else rows(given[name]) for name in ("B", "C", "z")
    }
    inputs |= {"x": values, "dt": _of_heads("dt", rows(given["dt"]), 3)}
    inputs |= {name: _of_heads(name, given[name], 1) for name in ("A", "D", "dt_bias")}
    inputs |= {
        "dt_softplus": bool(given["dt_softplus"]),
        "initial_states": states.initial(),
        "cu_seqlens": cu_seqlens,
        "state_every": int(states.after_each_token),
    }

    def result(returned: object) -> tuple[Tensor, Tensor | None]:
        out = tensors_of(returned)[0] if given.get("out") is None else given["out"]
        return states.live(out.reshape(values.shape).to(x.dtype)), states.final(None)

    return FunctionCall(inputs=inputs, result=result, slots=states.slots_read)


def _of_heads(name: str, tensor: Tensor | None, dims: int) -> Tensor | None:
    """The first `dims` dimensions of a tensor that is expanded over the others.  ValueError if it
    is not.
    """
    if tensor is None or tensor.ndim == dims:
        return tensor
    if any(tensor.stride()[dims:]):
        raise ValueError(f"{name} is not expanded over the channels of a head")
    return tensor.flatten(dims)[..., 0]
