"""Which layers a user means: `all`, `first:N`, `every:K` or numbers such as `3,7`.

Numbers are decoder layer indices, as in the model's own module names: 3 is `model.layers.3.mamba`.  `first:N` and
`every:K` count the layers that have an operator: in a model with attention at 2, `first:3` is 0, 1 and 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ssdprof.errors import BadInputError
from ssdprof.schema import LayerRef

_GRAMMAR = "Write --layers all, first:N, every:K (every Kth, from the first) or decoder layer numbers such as 3,7."


def select_layers(spec: str, layers: Sequence[LayerRef]) -> tuple[LayerRef, ...]:
    """The layers of `layers` that `spec` names, each once, in the model's order.

    Raises BadInputError for a spec that cannot be read and for a layer that is not there; the message lists those
    that are.
    """
    text = spec.strip().lower()
    if text == "all":
        return tuple(layers)
    if counted := re.fullmatch(r"(first|every):(\d+)", text):
        count = int(counted[2])
        if count < 1:
            raise BadInputError(f"--layers {spec} selects nothing.", _GRAMMAR)
        if counted[1] == "every":
            return tuple(layers[::count])
        if count > len(layers):
            raise BadInputError(f"--layers {spec}: the model has {_listed(layers)}.", "Use --layers all for every one.")
        return tuple(layers[:count])
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        wanted = {int(number) for number in text.split(",")}
        if missing := wanted - {layer.index for layer in layers}:
            numbers = ", ".join(str(index) for index in sorted(missing))
            raise BadInputError(
                f"Layer {numbers} has no SSD or GDN operator; the model has {_listed(layers)}.",
                "Numbers are decoder layer indices, counted from 0.",
            )
        return tuple(layer for layer in layers if layer.index in wanted)
    raise BadInputError(f"--layers {spec!r} cannot be read.", _GRAMMAR)


def _listed(layers: Sequence[LayerRef]) -> str:
    return f"{len(layers)}: {', '.join(str(layer.index) for layer in layers)}"
