"""A place: a function of another library that computes an operator.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class FunctionCall:
    """A call of a place's function in the operator's terms.

    inputs: what `activate` takes, on the call's device and without waiting for it.  Initial states
        are those of the call's sequences alone, gathered from the pool if there is one, K before V.
        What the function overwrites is a copy.
    result: what the function returned -> out, in the shape of the values, and the final states of
        the call's sequences as `inputs` has the initial ones, read from the pool if the function
        wrote them there; None if there are none.  In a verification, whose inputs have
        `state_every` 1: (tokens, ...), the state after each token.
    slots: (sequences) of the pool; -1 is padding, which servers do not compute.  Its states are 0,
        and of steps its out, too.
    layer: its name or index in the model, where the call itself can tell.
    activate: inputs, or copies of them -> fields of the operator's inputs (`GDNInputs`, ...), with
        gates after their activations.  For calls that are stored or computed again: it costs as
        much as a part of the call.
    """

    inputs: dict[str, Any]
    result: Callable[[Any], tuple[Tensor, Tensor | None]]
    slots: Tensor | None = None
    layer: str | None = None
    activate: Callable[[dict[str, Any]], dict[str, Any]] = dict


Bind = Callable[[Mapping[str, Any]], FunctionCall | None]
Phase = Literal["prompt", "decode", "verify"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A function that is wrapped while a program is recorded.

    library: its distribution on PyPI.
    module: in which the program looks the function up; wrapped as soon as it has been imported.
    function: its qualified name there: "chunk_kda", "ChunkGatedDeltaRule.forward_native".
    phase: "decode" also where a call may be a verification.
    parameters: those that `bind` reads.  A function that lacks one of them is named as changed, and
        is not wrapped.
    bind: the arguments by name, defaults included, those of **kwargs among them -> the call; None
        if there is nothing to record.  Called before the function.  Raises ValueError or TypeError
        for a call that the operator's inputs cannot express.
    """

    library: str
    module: str
    function: str
    operator: str
    phase: Phase
    parameters: tuple[str, ...]
    bind: Bind
