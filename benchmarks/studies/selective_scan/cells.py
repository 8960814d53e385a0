"""Where the contenders are measured: the sizes of the study's source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

BATCH, HEADS, DSTATE = 16, 8, 64
FORWARD_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BOTH_LENGTHS = (2048, 4096, 8192, 16384, 32768)
TILES_LENGTH = 8192
LOOP_LENGTHS = (512, 1024, 2048, 4096)  # of a loop in Python, which takes a second for 8,192

Pass = Literal["forward", "tiles", "forward and backward"]
Cell = tuple[Pass, int]  # and the length


def cells() -> Iterator[Cell]:
    """What most claims are about first: if the time is up, the others are left out."""
    yield from (("forward", seqlen) for seqlen in (32768, 2048, 512, 8192))
    yield ("tiles", TILES_LENGTH)
    yield from (("forward and backward", seqlen) for seqlen in (32768, 2048, 8192))
    yield from (("forward", seqlen) for seqlen in (1024, 4096, 16384))
    yield from (("forward and backward", seqlen) for seqlen in (4096, 16384))
