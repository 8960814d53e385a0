"""Definitions of flashinfer-bench: what a kernel computes, in that project's names and layouts.

https://bench.flashinfer.ai/docs/flashinfer-trace: a definition has axes, inputs, outputs and a
reference; a workload has inputs for it, and a solution is a kernel of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias

from ssdprof.operators.operator import I, Output

if TYPE_CHECKING:
    from torch import Tensor

Document: TypeAlias = "dict[str, Any]"  # a JSON object
Values: TypeAlias = "dict[str, Tensor]"  # by name; a scalar is a tensor without axes


UNWRITTEN = "ssdprof writes no definition of it"


def unwritten(*_: object) -> NoReturn:
    """Stands for the functions of a kind of definition that ssdprof only reads."""
    raise ValueError(UNWRITTEN)


@dataclass(frozen=True, kw_only=True)
class Definition(Generic[I]):
    """A kind of definition, which stands for a kind of call of an operator.

    name: the name of definitions of this kind, with the sizes of axes in braces.
    tokens: the axes whose product is the number of tokens.
    sequences: the axis of sequences.
    read: (inputs of the definition by name) -> the operator's inputs, packed.  Raises ValueError
        for values that the operator cannot have.

    A kind that ssdprof also writes has these fields:

    inputs: name -> its axes, in the order of a call; empty for a scalar.
    outputs: name -> the input that has its shape and dtype.
    write: (the operator's inputs) -> inputs of the definition by name.  Raises ValueError for a
        call that is not of this kind.
    finish: (inputs of the definition, out, final_states) -> the outputs of the definition.
    reference: (inputs by name) -> the outputs of the definition, computed with torch alone.
    """

    name: str
    tokens: tuple[str, ...]
    sequences: str
    read: Callable[..., I]
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    write: Callable[[I], Values] = unwritten
    finish: Callable[[Values, Tensor, Tensor], Output] = unwritten
    reference: Callable[..., Output] = unwritten

    def defines(self, document: Document) -> bool:
        """Whether a definition is of this kind: whether its name matches `name`, and `read` takes
        its inputs.
        """
        try:
            inspect.signature(self.read).bind(**document["inputs"])
        except TypeError:
            return False
        pattern = re.sub(r"\{\w+\}", r"\\d+", self.name)
        return bool(re.fullmatch(pattern, document["name"]))


def rows(pool: Tensor, slots: Tensor) -> Tensor:
    """The states in these slots of a pool.  Raises ValueError for a slot outside of the pool."""
    if not bool(((slots >= 0) & (slots < len(pool))).all()):
        raise ValueError(f"slots are named outside of a pool of {len(pool)}")
    return pool[slots.long()]
