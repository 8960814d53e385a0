"""Definitions of flashinfer-bench: what a kernel computes, in that project's names and layouts.

https://bench.flashinfer.ai/docs/flashinfer-trace: a definition has axes, inputs, outputs and a
reference.  A workload has values of its inputs, and a solution is a kernel that computes its
outputs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias

from ssdprof.operators.operator import I, OutputPair

if TYPE_CHECKING:
    from torch import Tensor

Document: TypeAlias = "dict[str, Any]"  # a JSON object
# inputs of a definition by name; a scalar is a tensor without axes, or a number when it is read
Values: TypeAlias = "dict[str, Tensor]"

# why a call is left out of the definitions that ssdprof writes
UNWRITTEN = "ssdprof writes no definition of it"


def unwritten(*_: object, **__: object) -> NoReturn:
    """Stands for `write`, `finish` and `reference` of a kind that ssdprof only reads.  Raises
    ValueError.
    """
    raise ValueError(UNWRITTEN)


@dataclass(frozen=True, kw_only=True)
class Definition(Generic[I]):
    """A kind of definition: all definitions of one kind of call of an operator, which differ in the
    sizes of their axes.

    name: the name of definitions of this kind, with axes in braces where the name has their sizes:
        "gdn_prefill_qk{num_q_heads}".
    tokens: the axes whose product is the number of tokens.
    sequences: the axis of sequences.
    read: (**inputs of the definition) -> the operator's inputs, packed.  Raises ValueError for
        values that the operator cannot have.

    A kind that ssdprof also writes has these fields:

    inputs: name -> its axes, in the order of a call; a scalar has none.
    outputs: name -> the input that has its shape and dtype.
    write: (the operator's inputs) -> inputs of the definition by name, and perhaps others that it
        does not have.  Raises ValueError for a call that is not of this kind.
    finish: (inputs of the definition, out, final_states) -> the outputs of the definition.
    reference: (**inputs) -> the outputs of the definition, computed with torch alone.
    """

    name: str
    tokens: tuple[str, ...]
    sequences: str
    read: Callable[..., I]
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    write: Callable[[I], Values] = unwritten
    finish: Callable[[Values, Tensor, Tensor], OutputPair] = unwritten
    reference: Callable[..., OutputPair] = unwritten

    def defines(self, document: Document) -> bool:
        """Whether a definition is of this kind: `read` can be called with inputs of its names, and
        its name is `name` with any sizes.
        """
        try:
            inspect.signature(self.read).bind(**document["inputs"])
        except TypeError:
            return False
        pattern = re.sub(r"\{\w+\}", r"\\d+", self.name)
        return bool(re.fullmatch(pattern, document["name"]))


def states_in(pool: Tensor, slots: Tensor) -> Tensor:
    """Copies of the states in these slots of a pool.  Raises ValueError for a slot outside of the
    pool, also -1; the host waits for the device to compare them.
    """
    if not bool(((slots >= 0) & (slots < len(pool))).all()):
        raise ValueError(f"slots are named outside of a pool of {len(pool)}")
    return pool[slots.long()]
