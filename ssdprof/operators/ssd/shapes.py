"""SSD layers of models, by the name of a model that has them or by their sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ssdprof.errors import BadInputError
from ssdprof.operators.ssd import OUTLINE
from ssdprof.schema.sizes import SSDSizes

GRAMMAR = "heads x P x N x groups, such as 80x64x128x1"
_ORDER = "Order: heads x P x N x groups."


@dataclass(frozen=True, kw_only=True)
class SSDShape(SSDSizes):
    """name: as the user typed it."""

    name: str


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
SHAPES = {
    name: SSDShape(name=name, nheads=h, headdim=p, dstate=n, ngroups=g) for name, (h, p, n, g) in _BY_MODEL.items()
}


def parse(text: str) -> SSDShape | None:
    """ "80x64x128x1": heads x P x N x groups; None if it has another form.  BadInputError for impossible sizes."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})x(\d{1,5})", text)
    if match is None:
        return None
    nheads, headdim, dstate, ngroups = map(int, match.groups())
    if not min(nheads, headdim, dstate, ngroups) or nheads % ngroups:
        raise BadInputError(
            f"{text} is not an SSD shape: sizes must be positive, and groups must divide heads.", _ORDER
        )
    if dstate > OUTLINE.largest["dstate"]:
        raise BadInputError(f"{text} is not measured: N is at most {OUTLINE.largest['dstate']}.", _ORDER)
    return SSDShape(name=text, nheads=nheads, headdim=headdim, dstate=dstate, ngroups=ngroups)
