"""An operator's shapes, as a user names them."""

from __future__ import annotations

from ssdprof.errors import BadInputError
from ssdprof.operators.shapes import Shape, Shapes


def parse_shapes(known: Shapes, words: str | None) -> tuple[Shape, ...]:
    """ "mamba2-2.7b,80x64x128x1" -> shapes, each once; "all" is every model, None the first.  Raises BadInputError."""
    if words is None:
        words = next(iter(known.shapes))
    names = tuple(known.shapes) if words == "all" else tuple(word.strip() for word in words.split(","))
    return tuple(dict.fromkeys(_shape(known, name) for name in names))


def _shape(known: Shapes, name: str) -> Shape:
    found = known.shapes.get(name) or known.parse(name)
    if found is None:
        raise BadInputError(
            f"{name!r} is not a known shape.", f"Known are {', '.join(known.shapes)} and all; or give {known.grammar}."
        )
    return found
