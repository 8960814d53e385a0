"""The kernels that the study compares, by their names in its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from inter_chunk.associative import associative
from inter_chunk.chained import chained
from inter_chunk.inputs import InterChunkInputs
from inter_chunk.look_back import look_back
from inter_chunk.loop import LoopConfig, loop
from inter_chunk.low_rank import LowRankConfig, low_rank
from inter_chunk.one_launch_a_chunk import one_launch_a_chunk

Kernel = Callable[[InterChunkInputs], torch.Tensor]
BASELINE = "read back"
PROPOSED = "registers"
NOT_AHEAD = "registers, no loads ahead"
PRODUCTS = ("columns", "tensor cores")


def diagonal(dim: int) -> dict[str, Kernel]:
    """For states of dim x dim.  Contenders before `registers, fp32` round the state in every iteration."""
    registers = partial(loop, resident=True, rounded=True)
    return {
        BASELINE: partial(loop, resident=False, config=LoopConfig(num_stages=1)),
        "one launch a chunk": one_launch_a_chunk,
        "chained": chained,
        NOT_AHEAD: partial(registers, config=LoopConfig(num_stages=1)),
        PROPOSED: registers,
        "registers, a row a program": partial(registers, config=LoopConfig(rows=1, num_warps=1)),
        "registers, a head a program": partial(registers, config=LoopConfig(rows=dim, num_warps=4, num_stages=3)),
        "registers, fp32": partial(loop, resident=True),
        "associative": associative,
        "look-back": look_back,
    }


def of_rank(dim: int) -> dict[str, Kernel]:
    """For states of dim x dim and a transition of low rank."""
    warps = 4 if dim <= 64 else 8
    ahead, not_ahead = LowRankConfig(num_warps=warps), LowRankConfig(num_warps=warps, num_stages=1)
    kernels: dict[str, Kernel] = {}
    for products in PRODUCTS:
        run = partial(low_rank, tensor_cores=products == "tensor cores")
        kernels[f"{BASELINE}, {products}"] = partial(run, resident=False, config=not_ahead)
        kernels[f"{PROPOSED}, {products}"] = partial(run, resident=True, rounded=True, config=ahead)
    return kernels


def baseline_of(name: str) -> str:
    """The contender that reads its state back, with the same products."""
    products = next((kind for kind in PRODUCTS if name.endswith(f", {kind}")), "")
    return f"{BASELINE}, {products}" if products else BASELINE
