"""Selects the layers that a user names: `all`, `first:N`, `every:K`, or numbers and ranges such as `3,7` and `0-3,7`.

Numbers are decoder layer indices, as in the model's own module names: 3 is `model.layers.3.mamba`.  `first:N` and
`every:K` count the layers that have an operator: in a model with attention at 2, `first:3` is 0, 1 and 3.  A range
includes both ends, and selects its layers with an operator: in this model, `0-3` is 0, 1 and 3, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ssdprof.core.subject import LayerRef
from ssdprof.errors import BadInputError

_GRAMMAR = (
    "Write --layers all, first:N, every:K (every Kth, from the first), or decoder layer numbers and ranges: 3,7 or 0-3."
)
_NUMBERS = r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?"


def check_layers(spec: str) -> None:
    """BadInputError for a spec that cannot be read, whatever the model."""
    text = spec.strip().lower()
    if not re.fullmatch(rf"all|(first|every):\d{{1,6}}|{_NUMBERS}(\s*,\s*{_NUMBERS})*", text):
        raise BadInputError(f"--layers {spec!r} cannot be read.", _GRAMMAR)
    if re.fullmatch(r"(first|every):0+", text):
        raise BadInputError(f"--layers {spec} selects nothing.", _GRAMMAR)
    for first, last in re.findall(_NUMBERS, text if text[0].isdigit() else ""):
        if last and int(last) < int(first):
            raise BadInputError(f"--layers {spec}: the range {first}-{last} is empty.", "Write the smaller one first.")


def select_layers(spec: str, layers: Sequence[LayerRef]) -> tuple[LayerRef, ...]:
    """The layers of `layers` that `spec` names, each once, in the model's order.

    Raises BadInputError for a spec that cannot be read and for a layer that does not exist; the message lists the
    existing ones.
    """
    check_layers(spec)
    text = spec.strip().lower()
    if text == "all":
        return tuple(layers)
    if ":" in text:
        word, _, number = text.partition(":")
        count = int(number)
        if word == "every":
            return tuple(layers[::count])
        if count > len(layers):
            raise BadInputError(f"--layers {spec}: the model has {_listed(layers)}.", "Use --layers all for every one.")
        return tuple(layers[:count])
    present = {layer.index for layer in layers}
    wanted: set[int] = set()
    missing: list[str] = []
    for first, last in re.findall(_NUMBERS, text):
        found = present & set(range(int(first), int(last or first) + 1))
        missing += [] if found else [f"{first}-{last}" if last else first]
        wanted |= found
    if missing:
        named = ", ".join(sorted(missing, key=lambda word: int(word.split("-")[0])))
        raise BadInputError(
            f"Layer {named} has no SSD or GDN operator; the model has {_listed(layers)}.",
            "Numbers are decoder layer indices, counted from 0.",
        )
    return tuple(layer for layer in layers if layer.index in wanted)


def _listed(layers: Sequence[LayerRef]) -> str:
    return f"{len(layers)}: {', '.join(str(layer.index) for layer in layers)}"
