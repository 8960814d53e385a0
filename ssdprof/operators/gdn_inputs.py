"""Random inputs of GDN, and edge inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ssdprof import kernels
from ssdprof.operators import generate
from ssdprof.operators.gdn_oracle import SIZE_WORDS
from ssdprof.operators.generate import Cell, EdgeInputs, InputGenerator, Trait
from ssdprof.operators.late import torch
from ssdprof.operators.tensors import dtype_named

if TYPE_CHECKING:
    from ssdprof.kernels import GDNInputs

Draw = Callable[[Cell, "torch.device"], "GDNInputs"]
Gates = Callable[[Cell, "torch.Generator"], "torch.Tensor"]
SCALE = 0.3  # scale of those edge inputs that do not have the default
SLOWEST, FASTEST = 1.0, 16.0  # range of A in new models: g = -A softplus(a + dt_bias)
# words of --draw
NORMALISED = "normalised"
QUARTER_UNGATED = "quarter-ungated"
QUARTER_SLOW = "quarter-slow"
SLOW = "slow"
WAYS = {
    NORMALISED: "q and k are normalised before the call and not inside",
    QUARTER_UNGATED: "every fourth value head has no gate: g = 0",
    QUARTER_SLOW: "every fourth value head keeps thousands of tokens: g is -1e-4 in the mean",
    SLOW: "every value head keeps thousands of tokens: g is -1e-4 in the mean",
}


def gates(cell: Cell, generator: torch.Generator) -> torch.Tensor:
    """g (B, T, HV) in fp32: -A softplus(a + dt_bias) with a ~ N(0, 1), unless `WAYS` says
    otherwise.
    """
    heads = cell.shape.sizes["value_heads"]
    rows, length, _ = generate.extents(cell)
    dt_bias = generate.gate_bias(heads, generator)
    A = generate.uniform(heads, SLOWEST, FASTEST, generator)
    raw = torch.randn(rows, length, heads, device=generator.device, generator=generator)
    g = -A * torch.nn.functional.softplus(raw + dt_bias)
    for way, heads_of_way in ((QUARTER_SLOW, slice(None, None, 4)), (SLOW, slice(None))):
        if way in cell.ways:
            g[..., heads_of_way].uniform_(-2e-4, 0, generator=generator)
    if QUARTER_UNGATED in cell.ways:
        g[..., ::4] = 0
    return g


def draw(
    cell: Cell, device: torch.device, *, kind: str = "GDNInputs", gates: Gates = gates
) -> GDNInputs:
    """Random inputs: q, k, v ~ N(0, 1), with q and k normalised inside the call; g from `gates`;
    beta = sigmoid(N(0, 1)) times its largest value in the model.

    As "views", q, k and v are slices of one tensor, as a model passes them; g and beta are
    contiguous in every layout.  Packed sequences, decode steps and sequences on a pool have initial
    states ~ N(0, 1), too.  `WAYS` says what `cell.ways` changes.

    kind: the type of the inputs in `ssdprof.kernels`.
    gates: (cell, generator) -> g.
    """
    key_heads, heads, key_dim, value_dim, largest_beta = (
        cell.shape.sizes[name] for name in GENERATOR.names
    )
    generator = torch.Generator(device).manual_seed(generate.SEED)
    normal = partial(torch.randn, device=device, generator=generator)
    q, k, v = generate.empty(
        [(key_heads, key_dim), (key_heads, key_dim), (heads, value_dim)], cell, device
    )
    for tensor in (q, k, v):
        tensor.normal_(generator=generator)
    g = gates(cell, generator)
    if NORMALISED in cell.ways:
        for tensor in (q, k):
            tensor.copy_(torch.nn.functional.normalize(tensor.float(), dim=-1))
    states, slots = None, None
    if cell.tokens.has_states:
        states = normal(cell.tokens.sequences, heads, key_dim, value_dim)
        if cell.tokens.pool:  # in the pool's memory V is before K, as in servers
            pool, slots = generate.pool(states.mT, cell.tokens.pool)
            states = pool.mT
    inputs: GDNInputs = getattr(kernels, kind)(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=(largest_beta * normal(*v.shape[:3]).sigmoid()).to(dtype_named(cell.dtype)),
        use_qk_l2norm=NORMALISED not in cell.ways,
        initial_state=states,
        state_indices=slots,
        cu_seqlens=generate.cu_seqlens(cell, device),
        state_every=cell.tokens.state_every,
    )
    return inputs


# --- edge inputs


def edges(like: GDNInputs, draw: Draw = draw) -> list[list[EdgeInputs[GDNInputs]]]:
    """`InputGenerator.edges`: `_forms` for each of `generate.EDGES`, then a kind with one entry,
    whose q and k are short and not normalised, and whose scale is not the default.

    draw: draws inputs of a cell.
    """
    kinds = [_forms(like, lengths, draw) for lengths in generate.EDGES]
    plain = _forms(like, (320, 320), draw)[-1]  # without initial states
    traits = [*plain.traits, Trait("short q and k, not normalised", short_keys), SCALED]
    return [*kinds, [replace(plain, traits=traits)]]


def _forms(like: GDNInputs, lengths: generate.Lengths, draw: Draw) -> list[EdgeInputs[GDNInputs]]:
    """The edge inputs of one kind: K = V, initial states, `FIRST_TRAITS` or `OTHER_TRAITS`, and
    `generate.traits_of`; without these traits; the same with V of `like`; and these without initial
    states.  All have `TINY_KEYS`, K of `like`, 2 key heads and 6 value heads.
    """
    key_dim = like.q.shape[3]
    special = FIRST_TRAITS if lengths == generate.INCOMPLETE_CHUNKS else OTHER_TRAITS

    def generated(value_dim: int) -> GDNInputs:
        shape = GENERATOR.shape("edges", 2, 6, key_dim, value_dim)
        inputs = draw(generate.edge_cell(shape, like.v, lengths), like.device)
        return generate.as_edge(inputs, like, lengths)

    equal = partial(generated, key_dim)
    alike = partial(generated, like.v.shape[3])
    traits = (*special, *generate.traits_of(lengths))
    return generate.edge_forms((equal, equal, alike), (TINY_KEYS,), traits)


def tiny_keys(inputs: GDNInputs) -> None:
    """q and k of every fifth position, from position 0, with squared norms of about 1e-6."""
    for tensor in (inputs.q, inputs.k):
        tensor[:, ::5] *= 1e-3 * tensor.shape[3] ** -0.5


def beta_up_to_2(inputs: GDNInputs) -> None:
    """beta between 0 and 2, as in models that allow negative eigenvalues."""
    inputs.beta.mul_(2)


def g_above_0(inputs: GDNInputs) -> None:
    """g above 0 at every seventh position."""
    inputs.g[:, ::7] *= -1


def slow_heads(inputs: GDNInputs) -> None:
    """Heads 0 and 2 that hardly forget: their g is 2^7 and 2^6 times smaller, and 0 where it was
    above 0.
    """
    inputs.g[:, :, :3:2] = inputs.g[:, :, :3:2].clamp(max=0) * 2.0**-7
    inputs.g[:, :, 2] *= 2


def hardly_written(inputs: GDNInputs) -> None:
    """Head 0 writes nothing in row 0 of the batch, and little in row 1.  There must be two rows."""
    inputs.beta[0, :, 0] = 0
    inputs.beta[1, :, 0] *= 2.0**-6


def equal_keys(inputs: GDNInputs) -> None:
    """48 equal keys of key head 1 in one chunk of 64, written with a large beta by its value heads,
    3 to 5.
    """
    inputs.k[:, 128:176, 1] = inputs.k[:, 128:129, 1]
    inputs.beta[:, 128:176, 3:] = 0.875


def forgetting(inputs: GDNInputs) -> None:
    """Head 1 forgets everything at every eleventh position."""
    inputs.g[:, ::11, 1] = -torch.inf


def underflowing_decays(inputs: GDNInputs) -> None:
    """Head 5 forgets so fast in one chunk of 64 that a product of its decays underflows."""
    inputs.g[:, 64:128, 5] = -30


def long_keys(inputs: GDNInputs) -> None:
    """q and k of every fifth position, from position 1, 100 times as long.  These are not the tiny
    ones of `tiny_keys`.
    """
    for tensor in (inputs.q, inputs.k):
        tensor[:, 1::5] *= 100


def beta_below_0(inputs: GDNInputs) -> None:
    """beta below 0 at every thirteenth position."""
    inputs.beta[:, ::13] *= -1


def in_wider_tensors(inputs: GDNInputs) -> GDNInputs:
    """The inputs with k and g as views of tensors twice as wide, of which the rest is NaN, so that
    a kernel that ignores strides fails.
    """

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)
        return wide[..., : tensor.shape[-1]]

    return replace(inputs, k=widened(inputs.k), g=widened(inputs.g))


def short_keys(inputs: GDNInputs) -> GDNInputs:
    """The inputs with q and k of norm 0.7, and a call that does not normalise them."""
    q, k = (
        0.7 * torch.nn.functional.normalize(tensor.float(), dim=-1).to(tensor.dtype)
        for tensor in (inputs.q, inputs.k)
    )
    return replace(inputs, q=q, k=k, use_qk_l2norm=False)


def with_scale(inputs: GDNInputs) -> GDNInputs:
    """The inputs with the scale `SCALE`, which is not the default."""
    return replace(inputs, scale=SCALE)


TINY_KEYS: Trait[GDNInputs] = Trait(
    "q and k with squared norms near 1e-6", tiny_keys, "1e-6 is added to a squared norm"
)
SCALED: Trait[GDNInputs] = Trait(f"a scale of {SCALE:g}", with_scale)
FORGETTING: Trait[GDNInputs] = Trait("g of -inf", forgetting, "exp(-inf) is 0, and never NaN")
BETA_UP_TO_2: Trait[GDNInputs] = Trait("beta up to 2", beta_up_to_2)
G_ABOVE_0: Trait[GDNInputs] = Trait("g above 0", g_above_0, "g above 0 counts as 0")
# Traits of the first edge inputs of the kind INCOMPLETE_CHUNKS.  Some need its two rows and the
# positions up to 176.
FIRST_TRAITS = (
    BETA_UP_TO_2,
    G_ABOVE_0,
    Trait("heads that hardly forget", slow_heads),
    Trait("a head that writes nothing, or little", hardly_written),
    Trait("equal keys in a chunk", equal_keys, "the chunk's system is solved, not a series summed"),
    FORGETTING,
    Trait(
        "g of -30 at 64 tokens",
        underflowing_decays,
        "a product of decays is 0, and no factor may overflow",
    ),
)
# Traits of the first edge inputs of every other kind of `generate.EDGES`
OTHER_TRAITS = (
    BETA_UP_TO_2,
    G_ABOVE_0,
    Trait("q and k 100 times as long", long_keys),
    Trait("beta below 0", beta_below_0),
    FORGETTING,
    Trait("k and g in wider tensors", in_wider_tensors, "strides are the tensors' own"),
    SCALED,
)


# --- shapes

GENERATOR: InputGenerator[GDNInputs] = InputGenerator(
    form="{key_heads}/{value_heads}x{key_dim}x{value_dim}",
    order="key heads / value heads x K x V",
    words=SIZE_WORDS,
    models=generate.models_of("gdn"),
    others={"largest_beta": 1},  # 2 in models that allow negative eigenvalues
    divides=("key_heads", "value_heads"),
    largest={"key_dim": 256, "value_dim": 256},
    draw=draw,
    edges=edges,
    ways=WAYS,
    alternatives=("fused_portable",),
)
