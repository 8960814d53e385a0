"""Finds the modules that call an operator in a model, without a list of model families.

From 5.15, every Mamba-2 and gated-delta-rule model of transformers calls its scan as a global function of the modeling
file.  A mixer is a module whose forward names that function in its bytecode.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from ssdprof import operators
from ssdprof.core.subject import LayerRef
from ssdprof.errors import BadInputError


@dataclass(frozen=True, eq=False)
class Site:
    """One mixer, and the function that it calls."""

    name: str  # path in the model that was searched
    layer_index: int  # decoder layer
    operator: str
    mixer: nn.Module
    function: str  # name of the global
    namespace: dict[str, Any]  # globals of the modeling file


def find_sites(model: nn.Module) -> tuple[Site, ...]:
    """Every mixer of `model`, in the order of its decoder layers.

    Raises BadInputError if there is none, or if two share a decoder layer.
    """
    # The variants for a single token are other functions, which are not replaced.
    functions = {operators.get(name).binding.function: name for name in operators.names()}
    sites: dict[int, Site] = {}
    for name, module in model.named_modules():
        forward = _forward(module)
        if forward is None:
            continue
        for function in functions.keys() & set(forward.__code__.co_names):
            index = _layer_index(name)
            if index in sites:
                raise BadInputError(f"Decoder layer {index} has two mixers: {sites[index].name} and {name}.")
            sites[index] = Site(
                name=name,
                layer_index=index,
                operator=functions[function],
                mixer=module,
                function=function,
                namespace=forward.__globals__,
            )
    if not sites:
        raise BadInputError(
            f"No layer of {type(model).__name__} calls an SSD or gated-delta-rule operator that can be captured.",
            "`ssdprof models` lists the supported families; layers kept from before transformers 5.15 and kernels "
            "that replace a whole layer are not among them.",
        )
    return tuple(sites[index] for index in sorted(sites))


def match_layers(sites: Sequence[Site], layers: Sequence[LayerRef], model_type: str) -> dict[int, LayerRef]:
    """`layers` by decoder index.  Raises BadInputError for a layer that no site has."""
    operators = {site.layer_index: site.operator for site in sites}
    for layer in layers:
        if operators.get(layer.index) != layer.operator:
            found = operators.get(layer.index, "no operator")
            raise BadInputError(
                f"Layer {layer.index} of this {model_type} model has {found}, not {layer.operator}; "
                f"operators are in {', '.join(str(index) for index in operators)}."
            )
    return {layer.index: layer for layer in layers}


def is_attention(module: nn.Module) -> bool:
    """Whether `module` computes attention by one of transformers' functions: its class's forward names their table."""
    forward = _forward(module)
    return forward is not None and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def _forward(module: nn.Module) -> FunctionType | None:
    """The forward that the model's author wrote: transformers wraps some in decorators.  None if it is not Python."""
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None


def _layer_index(name: str) -> int:
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if found is None:
        raise BadInputError(f"The mixer {name!r} is in no numbered decoder layer.")
    return int(found[1])
