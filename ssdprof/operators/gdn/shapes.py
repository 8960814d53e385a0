"""GDN layers of models, by the name of a model that has them or by their sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ssdprof.errors import BadInputError
from ssdprof.operators.gdn import OUTLINE
from ssdprof.schema.sizes import GDNSizes

GRAMMAR = "key heads / value heads x K x V, such as 16/32x128x128"
_ORDER = "Order: key heads / value heads x K x V."


@dataclass(frozen=True, kw_only=True)
class GDNShape(GDNSizes):
    """name: as the user typed it.  largest_beta: 2 if eigenvalues may be negative."""

    name: str
    largest_beta: float = 1.0


_BY_MODEL = {  # H, HV, K, V, largest beta, as in the models' configs
    "qwen3-next-80b": (16, 32, 128, 128, 1.0),
    "qwen3.5-0.8b": (16, 16, 128, 128, 1.0),
    "qwen3.5-9b": (16, 32, 128, 128, 1.0),
    "qwen3.5-27b": (16, 48, 128, 128, 1.0),
    "qwen3.5-397b": (16, 64, 128, 128, 1.0),
    "qwen3.5-397b-tp8": (2, 8, 128, 128, 1.0),  # one rank of eight
    "olmo-hybrid-7b": (30, 30, 96, 192, 2.0),
}
SHAPES = {
    name: GDNShape(name=name, key_heads=h, value_heads=hv, key_dim=k, value_dim=v, largest_beta=beta)
    for name, (h, hv, k, v, beta) in _BY_MODEL.items()
}


def parse(text: str) -> GDNShape | None:
    """ "16/32x128x128": key heads / value heads x K x V; None if it has another form.

    Raises BadInputError for impossible sizes.
    """
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})x(\d{1,5})x(\d{1,5})", text)
    if match is None:
        return None
    key_heads, value_heads, key_dim, value_dim = map(int, match.groups())
    if not min(key_heads, value_heads, key_dim, value_dim) or value_heads % key_heads:
        raise BadInputError(
            f"{text} is not a GDN shape: sizes must be positive, and key heads must divide value heads.", _ORDER
        )
    shape = GDNShape(name=text, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)
    if any(getattr(shape, name) > most for name, most in OUTLINE.largest.items()):
        largest = OUTLINE.largest
        raise BadInputError(
            f"{text} is not measured: K is at most {largest['key_dim']}, V at most {largest['value_dim']}.", _ORDER
        )
    return shape
