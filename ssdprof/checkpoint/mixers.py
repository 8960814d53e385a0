"""The modules of a model that call an operator."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from ssdprof import operators
from ssdprof.checkpoint.config import SUPPORTED, refuse
from ssdprof.checkpoint.names import shown
from ssdprof.checkpoint.weights import layer_index
from ssdprof.core.base import LONGEST_SEQLEN
from ssdprof.core.words import words
from ssdprof.errors import BadInputError


@dataclass(frozen=True, eq=False)
class Mixer:
    """A module that calls an operator, and the function that it calls.

    From 5.15, every Mamba-2 and gated-delta-rule model of transformers calls its scan as a global
    function of the modeling file: a mixer is a module whose forward names that function in its
    bytecode.
    """

    name: str  # path in the model that was searched
    layer_index: int  # decoder layer
    operator: str
    module: nn.Module
    function: str  # name of the global
    namespace: dict[str, Any]  # globals of the modeling file

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the operator by name.  BadInputError if the module does not have them as
        attributes.
        """
        wanted = operators.get(self.operator).mixer_sizes
        sizes = {name: getattr(self.module, attribute, None) for name, attribute in wanted.items()}
        for name, size in sizes.items():
            if not isinstance(size, int) or not 1 <= size <= LONGEST_SEQLEN:
                raise refuse(
                    f"{self.name} ({type(self.module).__name__})", f"has {name} = {shown(size)}"
                )
        return sizes  # type: ignore[return-value]  # checked


def find_mixers(model: nn.Module, what: str = "") -> tuple[Mixer, ...]:
    """Every mixer of `model`, in the order of its decoder layers.  what: names the model in
    messages.

    Raises BadInputError if there is none, or if two share a decoder layer.
    """
    # The variants for a single token are other functions, which are not replaced.
    functions = {operators.get(name).binding.function: name for name in operators.names()}
    mixers: dict[int, Mixer] = {}
    for name, module in model.named_modules():
        forward = _forward(module)
        if forward is None:
            continue
        for function in functions.keys() & set(forward.__code__.co_names):
            index = layer_index(f"{name}.")
            if index is None:
                raise BadInputError(f"The mixer {name!r} is in no numbered decoder layer.")
            if index in mixers:
                raise BadInputError(
                    f"Decoder layer {index} has two mixers: {mixers[index].name} and {name}."
                )
            mixers[index] = Mixer(
                name, index, functions[function], module, function, forward.__globals__
            )
    if not mixers:
        parts = (
            part
            for name, part in model.named_modules()
            if re.fullmatch(r"[^\d]*\.\d+\.[^.]+", name)
        )
        kinds = dict.fromkeys(
            type(part).__name__
            for part in parts
            if any(parameter.ndim > 1 for parameter in part.parameters())
        )
        raise BadInputError(
            f"{what or type(model).__name__} has no SSD or gated-delta-rule layer: its layers are "
            f"of {words(kinds or ['nothing with weights'])}.",
            SUPPORTED,
        )
    return tuple(mixers[index] for index in sorted(mixers))


def is_attention(module: nn.Module) -> bool:
    """Whether `module` computes attention by one of transformers' functions: its class's forward
    names their table.
    """
    forward = _forward(module)
    return forward is not None and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def _forward(module: nn.Module) -> FunctionType | None:
    """The forward that the model's author wrote: transformers wraps some in decorators.  None if it
    is not Python.
    """
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None
