"""Finds the modules of a model that call an operator."""

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

    In transformers 5.15 and later, every Mamba-2 and gated-delta-rule model calls its scan as a
    global function of the modeling file.  A mixer is a module whose forward names that function in
    its bytecode.
    """

    name: str  # path of the module in the model that was searched
    layer_index: int  # index of its decoder layer
    operator: str
    module: nn.Module
    function: str  # name of the global function that computes the operator
    namespace: dict[str, Any]  # globals of the modeling file

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the operator by name, from attributes of the module.

        Raises BadInputError if an attribute is missing, or no integer from 1 to `LONGEST_SEQLEN`.
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
    """Every mixer of `model`, in the order of its decoder layers.

    what: names the model in the message if there is none; empty: its class does.

    Raises BadInputError if there is none, if one is in no numbered decoder layer, or if two share a
    layer.
    """
    # function -> operator; single tokens have other functions (`CallBinding.step`), not searched
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
        kinds = _kinds_of_layers(model) or ["nothing with weights"]
        raise BadInputError(
            f"{what or type(model).__name__} has no SSD, GDN or KDA layer: its layers are "
            f"of {words(kinds)}.",
            SUPPORTED,
        )
    return tuple(mixers[index] for index in sorted(mixers))


def _kinds_of_layers(model: nn.Module) -> list[str]:
    """The class names of the modules directly in the model's layers, such as layers.3.mlp, without
    those that have no weight matrix.  Each name is listed once.
    """
    kinds = [
        type(module).__name__
        for name, module in model.named_modules()
        if re.fullmatch(r"[^\d]*\.\d+\.[^.]+", name)
        and any(parameter.ndim > 1 for parameter in module.parameters())
    ]
    return list(dict.fromkeys(kinds))


def is_attention(module: nn.Module) -> bool:
    """Whether `module` computes attention by one of transformers' functions: then the forward of
    its class names their table.
    """
    forward = _forward(module)
    return forward is not None and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def _forward(module: nn.Module) -> FunctionType | None:
    """The module's forward without decorators, with which transformers wraps some; None if it is no
    Python function.
    """
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None
