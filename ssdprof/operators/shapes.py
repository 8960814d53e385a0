"""The shapes of an operator's layers, as a user names them.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Shape(Protocol):
    """The sizes of a layer; hashable.  str() gives them in words: "80x64, N 128, G 1"."""

    @property
    def name(self) -> str:
        """The name that the user typed."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """shapes: of models, by the name of a model that has them; the first is the default.

    parse: sizes as a user writes them -> Shape; None for text of another form.  Raises BadInputError for impossible
        sizes.
    grammar: how sizes are written: "heads x P x N x groups, such as 80x64x128x1".
    """

    shapes: Mapping[str, Shape]
    parse: Callable[[str], Shape | None]
    grammar: str
