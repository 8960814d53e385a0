"""Random GDN inputs, distributed as in a trained layer."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.operators.drawing import Cell, Drawing, Layout, boundaries
from ssdprof.operators.dtypes import dtype_named
from ssdprof.operators.gdn.alternatives import ALTERNATIVES
from ssdprof.operators.gdn.peers import PEERS
from ssdprof.operators.gdn.shapes import GRAMMAR, SHAPES, GDNShape, parse

SEED = 0
SLOWEST, FASTEST = 1.0, 16.0  # A, as models are initialised: g = -A softplus(a + dt_bias)
STEPS = (1e-3, 1e-1)  # softplus(a + dt_bias) at a = 0: log-uniform
NORMALISED, QUARTER_UNGATED = "normalised", "quarter-ungated"
WAYS = {
    NORMALISED: "q and k are normalised before the call and not inside",
    QUARTER_UNGATED: "every fourth value head has no gate: g = 0",
}


def draw(cell: Cell, device: torch.device) -> GDNInputs:
    """q, k, v, a ~ N(0, 1), normalised inside; g = -A softplus(a + dt_bias); beta = sigmoid(N(0, 1)) times its maximum.

    "contiguous" tensors, or "views" as a model passes them: q, k and v as slices of one tensor.  Packed and very
    short sequences have an initial state ~ N(0, 1) too.  `WAYS` says what `cell.drawn` changes.
    """
    shape, dtype = cell.shape, dtype_named(cell.dtype)
    assert isinstance(shape, GDNShape)
    generator = torch.Generator(device).manual_seed(SEED)
    bounds = boundaries(cell.tokens, SEED)
    batch, length = (1, bounds[-1]) if cell.tokens.packed else (cell.tokens.sequences, cell.tokens.seqlen)
    heads = shape.value_heads

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, generator=generator)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(heads, device=device, generator=generator)

    q, k, v = _tensors(shape, cell.layout, batch, length, device, dtype)
    for tensor in (q, k, v):
        tensor.normal_(generator=generator)
    step = uniform(*map(math.log, STEPS)).exp()
    dt_bias = step + torch.log(-torch.expm1(-step))  # the inverse softplus
    A = uniform(SLOWEST, FASTEST)
    g = -A * functional.softplus(normal(batch, length, heads) + dt_bias)
    if QUARTER_UNGATED in cell.drawn:
        g[..., ::4] = 0
    if NORMALISED in cell.drawn:
        for tensor in (q, k):
            tensor.copy_(functional.normalize(tensor.float(), dim=-1))
    states = (cell.tokens.sequences, heads, shape.key_dim, shape.value_dim)
    return GDNInputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=(shape.largest_beta * normal(batch, length, heads).sigmoid()).to(dtype),
        use_qk_l2norm=NORMALISED not in cell.drawn,
        initial_state=normal(*states) if cell.tokens.states else None,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device) if cell.tokens.packed else None,
    )


def _tensors(
    shape: GDNShape, layout: Layout, batch: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised q, k and v."""
    key, value = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
    sizes = (key, key, value)
    if layout == "contiguous":
        q, k, v = (torch.empty(batch, length, *size, dtype=dtype, device=device) for size in sizes)
        return q, k, v
    widths = [math.prod(size) for size in sizes]
    convolved = torch.empty(batch, length, sum(widths), dtype=dtype, device=device)
    parts = torch.split(convolved, widths, -1)
    q, k, v = (part.view(batch, length, *size) for part, size in zip(parts, sizes, strict=True))
    return q, k, v


DRAWING = Drawing(
    shapes=SHAPES, parse=parse, grammar=GRAMMAR, draw=draw, ways=WAYS, alternatives=ALTERNATIVES, peers=PEERS
)
