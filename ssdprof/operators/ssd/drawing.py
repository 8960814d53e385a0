"""Random SSD inputs, distributed as in a trained layer."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.operators.drawing import Cell, Drawing, Layout, boundaries
from ssdprof.operators.dtypes import dtype_named
from ssdprof.operators.ssd.alternatives import ALTERNATIVES
from ssdprof.operators.ssd.peers import PEERS
from ssdprof.operators.ssd.shapes import GRAMMAR, SHAPES, SSDShape, parse

SEED = 0
STEPS = (1e-3, 1e-1)  # of dt at a raw dt of 0: log-uniform, as models are initialised
SLOWEST, FASTEST = -1.0, -16.0  # A
CHUNK_SIZES = (128, 256)  # usual values for unfused kernels


def draw(cell: Cell, device: torch.device) -> SSDInputs:
    """x, raw dt, B, C, D ~ N(0, 1); A uniform; dt_bias the inverse softplus of a log-uniform step; softplus on.

    "contiguous" tensors, or "views" as a model passes them: x, B and C as slices of one tensor, dt as a slice of
    the input projection.  Packed and very short sequences have initial states ~ N(0, 1) too.
    """
    shape, dtype = cell.shape, dtype_named(cell.dtype)
    assert isinstance(shape, SSDShape)
    generator = torch.Generator(device).manual_seed(SEED)
    bounds = boundaries(cell.tokens, SEED)
    batch, seqlen = (1, bounds[-1]) if cell.tokens.packed else (cell.tokens.sequences, cell.tokens.seqlen)

    def normal(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*sizes, dtype=dtype, device=device, generator=generator)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape.nheads, device=device, generator=generator)

    step = uniform(*map(math.log, STEPS)).exp()
    x, B, C, dt = _tensors(shape, cell.layout, batch, seqlen, device, dtype)
    for tensor in (x, B, C, dt):
        tensor.normal_(generator=generator)
    return SSDInputs(
        x=x,
        dt=dt,
        A=uniform(FASTEST, SLOWEST),
        B=B,
        C=C,
        chunk_size=CHUNK_SIZES[0],
        D=normal(shape.nheads),
        dt_bias=step + torch.log(-torch.expm1(-step)),
        dt_softplus=True,
        initial_states=normal(cell.tokens.sequences, shape.nheads, shape.headdim, shape.dstate)
        if cell.tokens.states
        else None,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device) if cell.tokens.packed else None,
    )


def _tensors(
    shape: SSDShape, layout: Layout, batch: int, seqlen: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised x, B, C and dt."""
    sizes = _sizes(shape)
    if layout == "contiguous":
        x, B, C, dt = (torch.empty(batch, seqlen, *size, dtype=dtype, device=device) for size in sizes)
        return x, B, C, dt
    *conv, steps = map(math.prod, sizes)
    projection = torch.empty(batch, seqlen, conv[0] + sum(conv) + steps, dtype=dtype, device=device)  # z x B C dt
    convolved = torch.empty(batch, seqlen, sum(conv), dtype=dtype, device=device)
    x, B, C = (
        part.view(batch, seqlen, *size) for part, size in zip(torch.split(convolved, conv, -1), sizes[:3], strict=True)
    )
    return x, B, C, projection[..., -steps:]


def _sizes(shape: SSDShape) -> tuple[tuple[int, ...], ...]:
    """The shapes of one position of x, B, C and dt."""
    group = (shape.ngroups, shape.dstate)
    return (shape.nheads, shape.headdim), group, group, (shape.nheads,)


DRAWING = Drawing(
    shapes=SHAPES,
    parse=parse,
    grammar=GRAMMAR,
    draw=draw,
    chunk_sizes=CHUNK_SIZES,
    with_chunk_size=lambda inputs, size: replace(inputs, chunk_size=size),
    chunks_itself=frozenset({"fused", "recurrent", *ALTERNATIVES, "selective_state_update"}),
    alternatives=ALTERNATIVES,
    peers=PEERS,
)
