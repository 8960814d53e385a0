"""The cells in which the contenders are measured: the sizes of the study's source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

BATCH, HEADS, DSTATE = 16, 8, 64
FORWARD_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BOTH_LENGTHS = (2048, 4096, 8192, 16384, 32768)
TILES_LENGTH = 8192
LOOP_LENGTHS = (512, 1024, 2048, 4096)  # for a loop in Python, which takes a second for 8,192

Pass = Literal["forward", "tiles", "forward and backward"]
Cell = tuple[Pass, int]  # pass, length


def cells() -> Iterator[Cell]:
    """Cells of most claims come first; if the time runs out, later cells are not measured."""
    yield from (("forward", seqlen) for seqlen in (32768, 2048, 512, 8192))
    yield ("tiles", TILES_LENGTH)
    yield from (("forward and backward", seqlen) for seqlen in (32768, 2048, 8192))
    yield from (("forward", seqlen) for seqlen in (1024, 4096, 16384))
    yield from (("forward and backward", seqlen) for seqlen in (4096, 16384))
