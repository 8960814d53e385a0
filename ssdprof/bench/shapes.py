"""An operator's shapes, as a user names them."""

from __future__ import annotations

from typing import Any

from ssdprof.errors import BadInputError
from ssdprof.operators.drawing import Drawing, Shape


def parse_shapes(drawing: Drawing[Any], words: str) -> tuple[Shape, ...]:
    """ "mamba2-2.7b,80x64x128x1" -> shapes, each once; "all" is every model.  Raises BadInputError."""
    names = tuple(drawing.shapes) if words == "all" else tuple(word.strip() for word in words.split(","))
    return tuple(dict.fromkeys(_shape(drawing, name) for name in names))


def _shape(drawing: Drawing[Any], name: str) -> Shape:
    found = drawing.shapes.get(name) or drawing.parse(name)
    if found is None:
        raise BadInputError(
            f"{name!r} is no known shape.",
            f"Known are {', '.join(drawing.shapes)} and all; or give {drawing.grammar}.",
        )
    return found
