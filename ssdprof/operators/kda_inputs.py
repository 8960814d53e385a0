"""Random inputs of KDA, and edge inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ssdprof import kernels
from ssdprof.operators import gdn_inputs, generate
from ssdprof.operators.generate import Cell, EdgeInputs, Trait
from ssdprof.operators.late import torch
from ssdprof.operators.tensors import dtype_named

BOUND = -5.0  # of the bounded gate
BOUNDED, SATURATED, LOW_GATES = "bounded", "saturated", "low-gates"
WAYS = {
    gdn_inputs.NORMALISED: "q and k are normalised before the call and not inside",
    BOUNDED: "bounded gates, g = -5 sigmoid(a + dt_bias)",
    SATURATED: (
        "every fourth value head forgets most channels at every token: g is below -50 in the mean"
    ),
    LOW_GATES: "g in the model's dtype, as in bailing_hybrid",
    **generate.POOL,
}


def gates(cell: Cell, generator: torch.Generator) -> torch.Tensor:
    """g = -A softplus(a + dt_bias), a ~ N(0, 1), A of a head and dt_bias of a channel, unless
    `WAYS` says otherwise.
    """
    sizes, (rows, length, _) = cell.shape.sizes, generate.positions(cell)
    heads, key_dim = sizes["value_heads"], sizes["key_dim"]
    dt_bias = generate.gate_bias(heads * key_dim, generator).view(heads, key_dim)
    A = generate.uniform(heads, gdn_inputs.SLOWEST, gdn_inputs.FASTEST, generator)[:, None]
    g = torch.randn(
        rows, length, heads, key_dim, device=generator.device, generator=generator
    ).add_(dt_bias)
    if SATURATED in cell.ways:
        g[..., ::4, :] += 10
    g = BOUND * g.sigmoid_() if BOUNDED in cell.ways else torch.nn.functional.softplus(g).mul_(-A)
    return g.to(dtype_named(cell.dtype)) if LOW_GATES in cell.ways else g


draw = partial(gdn_inputs.draw, kind="KDAInputs", gates=gates)


def edges(like: kernels.GDNInputs) -> list[list[EdgeInputs[kernels.GDNInputs]]]:
    """As of GDN; the first form of each kind has channels that forget everything, too."""
    kinds = gdn_inputs.edges(like, draw)
    for forms in kinds:
        forms[0] = replace(forms[0], traits=(*forms[0].traits, FORGETTING))
    return kinds


def forgetting_channels(inputs: kernels.GDNInputs) -> None:
    """Not in heads that hardly forget."""
    inputs.g[:, ::11, 1:3, ::3] = -torch.inf


FORGETTING: Trait[kernels.GDNInputs] = Trait(
    "g of -inf in some channels", forgetting_channels, "exp(-inf) is 0, and never NaN"
)
