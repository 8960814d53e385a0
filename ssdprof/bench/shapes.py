"""Operator shapes, by the name of a model that has them or by their sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ssdprof.errors import BadInputError
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.fused import refuse_dstate


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of an SSD layer.  name: what the user called it."""

    name: str
    nheads: int
    headdim: int
    dstate: int
    ngroups: int

    def __str__(self) -> str:
        return f"{self.nheads}x{self.headdim}, N {self.dstate}, G {self.ngroups}"


_BY_MODEL = {  # H, P, N, G, as in the models' configs
    "mamba2-2.7b": (80, 64, 128, 1),
    "granite-4.0-h-small": (128, 64, 128, 1),
    "granite-4.0-h-1b": (48, 64, 128, 1),
    "nemotron-3-nano": (64, 64, 128, 8),
    "nemotron-nano-9b-v2": (128, 80, 128, 8),
    "codestral-mamba-7b": (128, 64, 128, 8),
    "falcon-h1-3b": (32, 128, 256, 1),
    "zamba2-2.7b": (80, 64, 64, 1),
    "zamba2-7b": (112, 64, 64, 2),
}
MODELS = tuple(_BY_MODEL)


def parse_shapes(words: str) -> tuple[Shape, ...]:
    """ "mamba2-2.7b,80x64x128x1" -> shapes, each once; "all" is every model.  Raises BadInputError."""
    names = MODELS if words == "all" else [word.strip() for word in words.split(",")]
    return tuple(dict.fromkeys(_shape(name) for name in names))


def _shape(name: str) -> Shape:
    sizes = _BY_MODEL.get(name)
    if sizes is None:
        match = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})x(\d{1,5})", name)
        if match is None:
            raise BadInputError(
                f"{name!r} is no known shape.",
                f"Known are {', '.join(MODELS)} and all; or give heads x P x N x groups, such as 80x64x128x1.",
            )
        sizes = (int(match[1]), int(match[2]), int(match[3]), int(match[4]))
    nheads, headdim, dstate, ngroups = sizes
    if not min(sizes) or nheads % ngroups:
        raise BadInputError(
            f"{name} is no SSD operator: sizes are positive, and groups divide heads.", "Order: heads x P x N x groups."
        )
    try:
        refuse_dstate(dstate)
    except UnsupportedError as error:
        raise BadInputError(f"{name} is not measured: {error}.", "Order: heads x P x N x groups.") from error
    return Shape(name=name, nheads=nheads, headdim=headdim, dstate=dstate, ngroups=ngroups)
