"""The launches of the studies that are compiled without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import scan_002
import selective_scan as ss
import torch
from inter_chunk import InterChunkInputs


def absent(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def states(dim: int, rank: int = 0) -> InterChunkInputs:
    rows = (4, 64, 16, dim)
    factor = absent(*rows, rank) if rank else None
    return InterChunkInputs(
        states=absent(*rows, dim), decay=absent(*rows, dtype=torch.float32), w=factor, y=factor
    )


INTER_CHUNK: dict[str, Callable[[], object]] = {
    f"{name}, {dim}, rank {rank}": partial(run, states(dim, rank))
    for dim in (64, 128)
    for rank in (0, 1, 16)
    for name, run in (scan_002.of_rank if rank else scan_002.diagonal)(dim).items()
}
POSITIONS = (16, 2048, 8)
TILES = (64, 128, 256, 512)
INPUTS = ss.ScanInputs(
    x=absent(*POSITIONS),
    decay=absent(*POSITIONS, dtype=torch.float32),
    B=absent(*POSITIONS, 64),
    C=absent(*POSITIONS, 64),
)
DY = absent(*POSITIONS)
KEPT = absent(*POSITIONS, 64)
ENTERING = absent(16, 2048 // ss.ScanConfig().block_t, 8, 64, dtype=torch.float32)
SELECTIVE_SCAN: dict[str, Callable[[], object]] = {
    "sequential": partial(ss.sequential, INPUTS),
    "sequential backward": partial(ss.sequential_backward, INPUTS, DY, ENTERING),
    "parallel, no states": partial(ss.parallel, INPUTS, keeps_states=False),
    **{
        f"parallel {t}": partial(ss.parallel, INPUTS, config=replace(ss.PARALLEL, block_t=t))
        for t in TILES
    },
    **{
        f"parallel backward {t}": partial(
            ss.parallel_backward, INPUTS, DY, KEPT, config=replace(ss.PARALLEL, block_t=t)
        )
        for t in TILES
    },
}
LAUNCHES = INTER_CHUNK | SELECTIVE_SCAN
