"""The cells in which the contenders are measured."""

from __future__ import annotations

from collections.abc import Iterator

BATCH, HEADS = 4, 16
DIMS, CHUNKS, RANKS = (64, 128), (8, 16, 32, 64, 128), (1, 2, 4, 8, 16)
RANK_CHUNKS = 64
Cell = dict[str, int]


def cells() -> Iterator[Cell]:
    """Cells of the criteria come first; if the time runs out, later cells are not measured."""
    yield from ({"dim": 64, "chunks": chunks, "rank": 0} for chunks in sorted(CHUNKS, reverse=True))
    yield from ({"dim": 64, "chunks": RANK_CHUNKS, "rank": rank} for rank in RANKS)
    yield from ({"dim": 128, "chunks": chunks, "rank": 0} for chunks in sorted(CHUNKS, reverse=True))
    yield from ({"dim": 128, "chunks": RANK_CHUNKS, "rank": rank} for rank in RANKS)
