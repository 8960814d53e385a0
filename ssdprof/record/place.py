"""A place: a function of another library that computes an operator.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.inputs import Inputs

# of a call of a function of another library, by name: of any type until `bind` has looked at them
Arguments: TypeAlias = Mapping[str, Any]
# inputs and weights -> the inputs after their activations
Activate: TypeAlias = "Callable[[Inputs, Mapping[str, Tensor]], Inputs]"


def unchanged(inputs: Inputs, _weights: Mapping[str, Tensor]) -> Inputs:
    return inputs


@dataclass(kw_only=True)
class FunctionCall:
    """A call of a place's function in the operator's terms.

    inputs: fields of the operator's inputs (`GDNInputs`, ...), on the call's device and without
        waiting for it; gates may be those before their activations, in the same shape.  Initial
        states are those of the call's sequences alone, gathered from the pool if there is one, K
        before V.
    result: what the function returned -> out, in the shape of the values, and the final states of
        the call's sequences as `inputs` has the initial ones, read from the pool if the function
        wrote them there; None if there are none.  In a verification, whose inputs have
        `state_every` 1: (tokens, ...), the state after each token.
    slots: (sequences) of the pool; -1 is padding, which servers do not compute.  Its states are 0,
        and of steps its out, too.
    layer: its name or index in the model, where the call itself can tell.
    overwrites: names of inputs that the function may write over.
    copied: names of inputs that are copies already, such as states gathered from a pool.
    weights: what `activate` takes besides, by name.
    activate: (inputs, weights), or copies of them -> the operator's inputs, with gates after their
        activations.  For copies of calls that are stored or computed again: it costs as much as a
        part of the call.
    """

    inputs: dict[str, object]
    result: Callable[[object], tuple[Tensor, Tensor | None]]
    slots: Tensor | None = None
    layer: str | None = None
    overwrites: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    activate: Activate = unchanged


Bind = Callable[[Arguments], FunctionCall | None]
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
