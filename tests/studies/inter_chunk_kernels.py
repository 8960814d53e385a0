"""The kernels of the study scan-002 with small blocks, and its contenders for compilation without a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from inter_chunk.associative import AssociativeConfig, associative
from inter_chunk.chained import ChainedConfig, chained
from inter_chunk.contenders import Kernel, diagonal, of_rank
from inter_chunk.inputs import InterChunkInputs
from inter_chunk.look_back import LookBackConfig, look_back
from inter_chunk.loop import LoopConfig, loop
from inter_chunk.low_rank import LowRankConfig, low_rank
from inter_chunk.one_launch_a_chunk import ChunkConfig, one_launch_a_chunk

# several programs per head, and blocks that do not divide a state
DIAGONAL: dict[str, Kernel] = {
    "loop, read back": partial(loop, resident=False, config=LoopConfig(num_stages=1)),
    "loop, rounded": partial(loop, resident=True, rounded=True),
    "loop, fp32": partial(loop, resident=True),
    "loop, whole": partial(loop, resident=True, config=LoopConfig(rows=32)),
    "one launch a chunk": partial(one_launch_a_chunk, config=ChunkConfig(rows=16)),
    "chained": partial(chained, config=ChainedConfig(rows=16)),
    "associative": partial(associative, config=AssociativeConfig(block=64, block_c=4)),
    "look-back": partial(look_back, config=LookBackConfig(rows=16, segment=3)),
}
LOW_RANK: dict[str, Kernel] = {
    f"{where}, {how}": partial(
        low_rank,
        resident=where != "read back",
        rounded=where == "rounded",
        tensor_cores=how == "tensor cores",
        config=LowRankConfig(block_v=16, num_stages=1 if where == "read back" else 2),
    )
    for where in ("read back", "rounded", "fp32")
    for how in ("columns", "tensor cores")
}


def absent(dim: int, rank: int = 0) -> InterChunkInputs:
    """Inputs on torch's meta device."""
    rows = (4, 64, 16, dim)
    narrow = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    return InterChunkInputs(
        states=narrow(*rows, dim),
        decay=torch.empty(rows, device="meta"),
        w=narrow(*rows, rank) if rank else None,
        y=narrow(*rows, rank) if rank else None,
    )


LAUNCHES: dict[str, Callable[[], object]] = {
    **{f"{name}, {dim}": partial(run, absent(dim)) for dim in (64, 128) for name, run in diagonal(dim).items()},
    **{
        f"{name}, {dim}, rank {rank}": partial(run, absent(dim, rank))
        for dim in (64, 128)
        for rank in (1, 16)
        for name, run in of_rank(dim).items()
    },
}
