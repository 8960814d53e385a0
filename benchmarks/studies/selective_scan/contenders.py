"""The kernels that the study compares, by their names in its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from selective_scan.autograd import Form, scan
from selective_scan.inputs import ScanInputs
from selective_scan.parallel import CONFIG, parallel
from selective_scan.reference import GRADIENTS
from selective_scan.sequential import ScanConfig, sequential

SEQUENTIAL, NO_STATES = "sequential", "parallel, BLOCK_T 128, no states"
TILES = (64, 128, 256, 512)
Forward = Callable[[ScanInputs], torch.Tensor]
Both = Callable[[ScanInputs, torch.Tensor], dict[str, torch.Tensor]]


def tile(block_t: int, warps: int = CONFIG.num_warps) -> str:
    """The name of the parallel form with these tiles."""
    return f"parallel, BLOCK_T {block_t}" + ("" if warps == CONFIG.num_warps else f", {warps} warps")


def forward() -> dict[str, Forward]:
    """inputs -> y.  The states for the gradients are computed too, except for `NO_STATES`."""
    return {
        SEQUENTIAL: lambda inputs: sequential(inputs)[0],
        tile(64): partial(_y, config=replace(CONFIG, block_t=64)),
        tile(128): _y,
        NO_STATES: partial(_y, keeps_states=False),
    }


def kept_bytes(inputs: ScanInputs) -> dict[str, int]:
    """Bytes that the forward pass keeps for the gradients, in addition to its inputs."""
    entering, states = sequential(inputs)[1], parallel(inputs)[1]
    return {SEQUENTIAL: entering.nbytes, tile(128): 0 if states is None else states.nbytes}


def tiles() -> dict[str, Forward]:
    """The parallel form with tiles of several sizes, the larger ones also with more warps."""
    wanted = [*((t, CONFIG.num_warps) for t in TILES), (256, 8), (512, 8)]
    return {tile(t, w): partial(_y, config=replace(CONFIG, block_t=t, num_warps=w)) for t, w in wanted}


def _y(inputs: ScanInputs, *, config: ScanConfig = CONFIG, keeps_states: bool = True) -> torch.Tensor:
    return parallel(inputs, keeps_states=keeps_states, config=config)[0]


def both() -> dict[str, Both]:
    """(inputs, dy) -> y and all gradients, through torch's autograd."""
    return {SEQUENTIAL: partial(run_both, form="sequential"), tile(128): partial(run_both, form="parallel")}


def run_both(
    inputs: ScanInputs, dy: torch.Tensor, *, form: Form, config: ScanConfig | None = None
) -> dict[str, torch.Tensor]:
    x, decay, B, C = leaves = [tensor.detach().requires_grad_() for tensor in inputs.tensors]
    y = scan(ScanInputs(x=x, decay=decay, B=B, C=C), form, config=config)
    return {"y": y.detach(), **dict(zip(GRADIENTS, torch.autograd.grad(y, leaves, dy), strict=True))}
