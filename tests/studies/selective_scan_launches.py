"""The launches of the study scan-003 that are compiled without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from selective_scan.inputs import ScanInputs
from selective_scan.parallel import CONFIG, parallel
from selective_scan.parallel_backward import parallel_backward
from selective_scan.sequential import ScanConfig, sequential
from selective_scan.sequential_backward import sequential_backward


def absent(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


POSITIONS = (16, 2048, 8)
STATES = (*POSITIONS, 64)
INPUTS = ScanInputs(
    x=absent(*POSITIONS), decay=absent(*POSITIONS, dtype=torch.float32), B=absent(*STATES), C=absent(*STATES)
)
ENTERING = absent(16, 2048 // ScanConfig().block_t, 8, 64, dtype=torch.float32)

LAUNCHES: dict[str, Callable[[], object]] = {
    "sequential": partial(sequential, INPUTS),
    "sequential backward": partial(sequential_backward, INPUTS, absent(*POSITIONS), ENTERING),
    "parallel, no states": partial(parallel, INPUTS, keeps_states=False),
    **{f"parallel {t}": partial(parallel, INPUTS, config=replace(CONFIG, block_t=t)) for t in (64, 128, 256, 512)},
    **{
        f"parallel backward {t}": partial(
            parallel_backward, INPUTS, absent(*POSITIONS), absent(*STATES), config=replace(CONFIG, block_t=t)
        )
        for t in (64, 128, 256, 512)
    },
}
