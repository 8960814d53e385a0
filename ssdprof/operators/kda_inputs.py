"""Random inputs of KDA, and edge inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import zip_longest

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
    """As of GDN; the first form of each kind has channels that forget everything, too, and that of
    rows of whole chunks `DECAYED` and `LOW`.
    """
    kinds = gdn_inputs.edges(like, draw)
    for lengths, forms in zip_longest(generate.EDGES, kinds):
        more = (DECAYED, LOW) if lengths == generate.EDGES[-1] else ()
        forms[0] = replace(forms[0], traits=(*forms[0].traits, FORGETTING, *more))
    return kinds


def forgetting_channels(inputs: kernels.GDNInputs) -> None:
    """Not in heads that hardly forget."""
    inputs.g[:, ::11, 1:3, ::3] = -torch.inf


def decayed_state(inputs: kernels.GDNInputs) -> None:
    """In one head, by 2^-46 within a chunk, and large beside what is written."""
    if inputs.initial_state is not None:
        inputs.initial_state[:, 5] *= 2.0**8
    inputs.v[:, :, 5] *= 2.0**-8
    inputs.g[:, :32, 5] = -1


def low_gates(inputs: kernels.GDNInputs) -> kernels.GDNInputs:
    return replace(inputs, g=inputs.g.to(inputs.q.dtype))


DECAYED: Trait[kernels.GDNInputs] = Trait(
    "a state that decays in all channels", decayed_state, "what is left of it is read"
)
LOW: Trait[kernels.GDNInputs] = Trait("g in the dtype of q", low_gates, "g is summed in fp32")
FORGETTING: Trait[kernels.GDNInputs] = Trait(
    "g of -inf in some channels", forgetting_channels, "exp(-inf) is 0, and never NaN"
)
