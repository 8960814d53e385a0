"""The kernels of the study scan-002 by name, and the launches that are compiled without a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from inter_chunk.associative import AssociativeConfig, associative
from inter_chunk.chained import ChainedConfig, chained
from inter_chunk.inputs import InterChunkInputs
from inter_chunk.look_back import LookBackConfig, look_back
from inter_chunk.loop import LoopConfig, loop
from inter_chunk.low_rank import LowRankConfig, low_rank
from inter_chunk.one_launch_a_chunk import ChunkConfig, one_launch_a_chunk

Kernel = Callable[[InterChunkInputs], torch.Tensor]

# blocks that neither divide a state nor have one program per head
DIAGONAL: dict[str, Kernel] = {
    "loop, read back": partial(loop, resident=False, config=LoopConfig(rows=8, num_stages=1)),
    "loop, rounded": partial(loop, resident=True, rounded=True, config=LoopConfig(rows=8)),
    "loop, fp32": partial(loop, resident=True, config=LoopConfig(rows=8)),
    "one launch a chunk": partial(one_launch_a_chunk, config=ChunkConfig(rows=8)),
    "chained": partial(chained, config=ChainedConfig(rows=8)),
    "associative": partial(associative, config=AssociativeConfig(block=64, block_c=4)),
    "look-back": partial(look_back, config=LookBackConfig(rows=8, segment=3)),
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
    tensors = {"states": (*rows, dim), "decay": rows} | ({"w": (*rows, rank), "y": (*rows, rank)} if rank else {})
    dtypes = {"decay": torch.float32}
    return InterChunkInputs(
        **{
            name: torch.empty(shape, dtype=dtypes.get(name, torch.bfloat16), device="meta")
            for name, shape in tensors.items()
        }
    )


def _shipped(dim: int) -> dict[str, Callable[[], object]]:
    inputs = absent(dim)
    return {
        "loop, read back": partial(loop, inputs, resident=False, config=LoopConfig(num_stages=1)),
        "loop, rounded": partial(loop, inputs, resident=True, rounded=True),
        "loop, fp32": partial(loop, inputs, resident=True),
        "loop, a row": partial(loop, inputs, resident=True, config=LoopConfig(rows=1, num_warps=1)),
        "loop, a head": partial(loop, inputs, resident=True, config=LoopConfig(rows=dim, num_stages=2)),
        "one launch a chunk": partial(one_launch_a_chunk, inputs),
        "chained": partial(chained, inputs),
        "associative": partial(associative, inputs),
        "look-back": partial(look_back, inputs),
    }


LAUNCHES: dict[str, Callable[[], object]] = {
    f"{name}, {dim}": launch for dim in (64, 128) for name, launch in _shipped(dim).items()
} | {
    f"low rank {rank} {where} {how}, {dim}": partial(
        low_rank,
        absent(dim, rank),
        resident=where == "resident",
        tensor_cores=how == "tensor cores",
        config=LowRankConfig(num_stages=2 if where == "resident" else 1),
    )
    for dim in (64, 128)
    for rank in (1, 16)
    for where in ("resident", "read back")
    for how in ("columns", "tensor cores")
}
