"""A place is a function of another library that computes an operator.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from ssdprof.kernels.inputs import Inputs

# arguments of a call by name, of any type, because another library defines them
Arguments: TypeAlias = Mapping[str, Any]
# inputs and weights -> the inputs with gates after their activations
Activate: TypeAlias = "Callable[[Inputs, Mapping[str, Tensor]], Inputs]"
INITIAL_STATES = frozenset({"initial_state", "initial_states"})  # of GDN and KDA; of SSD


def unchanged(inputs: Inputs, _weights: Mapping[str, Tensor]) -> Inputs:
    return inputs


@dataclass(kw_only=True)
class FunctionCall:
    """A call of a place's function in the operator's terms.

    inputs: fields of the operator's inputs (`GDNInputs`, ...), on the call's device, computed
        without waiting for it.  Gates may be those before their activations, in the same shape.
        Initial states have a row for each sequence: if the call has a pool of states, those of its
        sequences are gathered.
    result: what the function returned -> out, in the shape of the values, and the final states.
        Final states have the layout of the initial ones.  If the function writes them to a pool,
        they are gathered from it.  In a verification, whose inputs have `state_every` 1, they are
        (tokens, ...), the state after each token.  None if the call keeps no states.
    slots: (sequences), their slots in the pool; None without a pool.  -1 is padding, which servers
        do not compute.  The states of padding are 0, and in a step its output, too.
    overwrites: names of inputs that the function may overwrite.
    copied: names of inputs that are copies already, such as states gathered from a pool.
    weights: the second argument of `activate`, by name.
    activate: computes the gates after their activations from the inputs and the weights, or from
        copies of them.  It takes a considerable part of the call's time, so that it is called only
        for calls that are stored, compared or not finite.
    """

    inputs: dict[str, object]
    result: Callable[[object], tuple[Tensor, Tensor | None]]
    slots: Tensor | None = None
    overwrites: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    activate: Activate = unchanged


Phase = Literal["prompt", "decode", "verify"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A function that is wrapped while a program is recorded.

    library: name of its distribution on PyPI.
    module: the module in which the program looks the function up.  The function is wrapped as soon
        as the module is imported.
    function: its qualified name there: "chunk_kda", "ChunkGatedDeltaRule.forward_native".
    operator: name of the operator that it computes.
    phase: "decode" also for a function that both decodes and verifies.
    parameters: names of those that `bind` needs.  If the function lacks one of them, a note names
        it, and the function is not wrapped.
    bind: arguments by name, including defaults and those of **kwargs -> the call, or None if it is
        a call of another operator.  Called before the function.  Raises ValueError or TypeError if
        the operator's inputs cannot express the call.
    """

    library: str
    module: str
    function: str
    operator: str
    phase: Phase
    parameters: tuple[str, ...]
    bind: Callable[[Arguments], FunctionCall | None]
