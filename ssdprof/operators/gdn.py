"""The operator "gdn".  Imports torch at first use only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ssdprof import kernels
from ssdprof.operators import generate
from ssdprof.operators.generate import Cell, InputDType, InputGenerator
from ssdprof.operators.late import lazy, rounding, torch
from ssdprof.operators.operator import (
    BoundCall,
    CallBinding,
    Operator,
    OracleSpec,
    Output,
    Stages,
    computed,
    from_call,
)
from ssdprof.operators.tensors import dtype_named, exact_fp32, requested_precisions

if TYPE_CHECKING:
    from ssdprof.kernels.gdn import adapters, reference, servers
    from ssdprof.operators import gdn_tuning
else:
    adapters, reference, servers = (
        lazy(f"ssdprof.kernels.gdn.{name}") for name in ("adapters", "reference", "servers")
    )
    gdn_tuning = lazy("ssdprof.operators.gdn_tuning")

STAGES = Stages.of(
    "gdn",
    {
        "waiting.inverse": "for the inverse",
        "waiting.weights": "for the weights of the output",
        "waiting.update": "for the weights of the update",
        "chunk_state.residual": "residual",
        "chunk_state.update": "update of the state",
    },
    "setup",
    "setup.load",
    "setup.store",
    "ticket",
    "loads",
    "waiting",
    "waiting.chunk",
    "waiting.inverse",
    "waiting.weights",
    "waiting.update",
    "qk_l2norm",
    "gate_cumsum",
    "scaled_dot_kkt",
    "solve_tril",
    "recompute_w_u",
    "state_factor",
    "out_factor",
    "rows",
    "warm_up",
    "chunk_state",
    "chunk_state.residual",
    "chunk_state.update",
    "chunk_output",
    "recurrence",
    "step_write",
    "step_state",
    "step_output",
    "ahead",
    unfused=(
        "_gdn_qk_l2norm_kernel",
        "_gdn_gate_cumsum_kernel",
        "_gdn_scaled_dot_kkt_kernel",
        "_gdn_solve_tril_kernel",
        "_gdn_recompute_w_u_kernel",
        "_gdn_chunk_state_kernel",
        "_gdn_chunk_output_kernel",
    ),
    fused=(
        "_rows_kernel",
        "_gdn_factors_kernel",
        "_gdn_scan_kernel",
        "_prep_kernel",
        "_parts_kernel",
        "_combine_kernel",
        "_hopper_kernel",
    ),
    recurrent=("_gdn_recurrent_kernel",),
    unfused_step=("_gdn_step_write_kernel", "_gdn_step_state_kernel", "_gdn_step_output_kernel"),
)


# --- how a model calls it


def bind(
    _mixer: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    kind: str = "GDNInputs",
    **given: Any,
) -> BoundCall:
    """The call of a mixer as inputs of this kind."""
    given |= {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "use_qk_l2norm": use_qk_l2norm_in_kernel,
    }
    return from_call(getattr(kernels, kind), **given), output_final_state, ""


def recorded(
    given: dict[str, Any], returned: Sequence[torch.Tensor]
) -> tuple[kernels.GDNInputs, Output | None]:
    """A call of FlashInfer's prefill, whose g is the decay, states (slots, HV, V, K), and sequences
    packed.
    """
    g, beta, slots = (given.get(name) for name in ("g", "beta", "state_indices"))
    heads, states = given["v"].shape[:2], given.get("initial_state")
    decay = given["v"].new_ones(heads, dtype=torch.float32) if g is None else g
    if not bool(((decay >= 0) & (decay <= 1.0001)).all()):
        raise ValueError("g is not a decay between 0 and 1")

    def of_sequences(pool: torch.Tensor) -> torch.Tensor:
        if slots is None:
            return pool.mT
        if not bool(((slots >= 0) & (slots < len(pool))).all()):
            raise ValueError(f"state_indices names slots outside of a pool of {len(pool)}")
        return pool[slots.long()].mT

    inputs = kernels.GDNInputs(
        **{name: given[name][None] for name in ("q", "k", "v")},
        g=decay.log()[None],
        beta=(torch.ones_like(decay) if beta is None else beta)[None],
        initial_state=None if states is None else of_sequences(states),
        scale=given.get("scale"),
        use_qk_l2norm=bool(given.get("use_qk_l2norm_in_kernel")),
        cu_seqlens=given["cu_seqlens"],
    )
    return inputs, (returned[0][None], of_sequences(returned[1])) if len(returned) == 2 else None


BINDING: CallBinding[kernels.GDNInputs] = CallBinding(
    function="torch_chunk_gated_delta_rule",
    step="torch_recurrent_gated_delta_rule",
    bind=bind,
    bind_step=bind,
    recorded={"chunk_gated_delta_rule": recorded},
    refused=(
        "cp_context",
        "head_first",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "transpose_state_layout",
        "state_v_first",
    ),
    always_a_pair=True,
    views=("q", "k", "v"),
    per_position=("g", "beta"),
    always_fp32=("g",),
    gate_bytes=lambda item, _sizes: item + 4,  # beta, and g in fp32
    replacement=lambda inputs: computed(inputs, reference.gdn_chunked),
)


# --- the oracle, and the operator in one precision

CHUNK = 64  # of the rounded form
_LEAF = 16  # rows of the blocks that are inverted in fp32
_FORGOTTEN = -110.0  # a decay of exp(-110) is zero in fp32


def bytes_per_position(inputs: kernels.GDNInputs) -> int:
    """The rounded form holds about eight fp32 rows of K, V or CHUNK; the oracle about ten fp64 rows
    of K + V + 64.
    """
    heads, value_dim = inputs.v.shape[2:]
    width = inputs.q.shape[3] + value_dim + CHUNK
    return int(heads * (8 * 4 * width + 10 * 8 * width))


def gate(inputs: kernels.GDNInputs, span: rounding.Span, chunk: int = CHUNK) -> rounding.Gate:
    """The running sum of g in each chunk, (c, h, chunk); the padding has g = 0."""
    g = inputs.g[span.batch, span.start : span.stop].float().clamp(_FORGOTTEN, 0)
    return rounding.Gate(
        exponents=rounding.running_sum(rounding.split_chunks(g, chunk).transpose(1, 2))
    )


def rounded_chunks(
    inputs: kernels.GDNInputs, low: rounding.Rounded, span: rounding.Span, gate: rounding.Gate
) -> torch.Tensor:
    """out of a span: the `lo` of the comparison (docs/measuring.md).

    It is the chunked algorithm of Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), section 3.3,
    with the gate's chunks, of 64 positions whatever the call's chunk size, in plain torch.
    Everything is computed in fp32 and rounded

        where a matrix product takes it     to the input's dtype; fp32 to two tf32 numbers, as
                                            tensor cores take it: q and k (normalised ones too), the
                                            inverse, beta times v and beta times decay times k, w,
                                            u, the state, what a chunk writes, the scores
        in products between the inverse's 16-row blocks     cut to tf32; for fp32 inputs to two tf32
                                                            numbers
        where states pass from chunk to chunk, and at the end     to the state dtype
        as the output     to the input's dtype
        if relaxed: decays, q k^T, beta and their products, and what a chunk writes   to 16 bit (the
                                                                                      input's dtype;
                                            bfloat16 for fp32 inputs), and fp32 operands, too

    k k^T, its decays and betas, and the substitution inside blocks of 16 rows stay in fp32.  No
    kernel is imitated
    beyond that and nothing here is fitted: an implementation that rounds at fewer places only gets
    closer to the oracle.
    """
    operand, intermediate, exp = low.operand, low.intermediate, rounding.gpu_exp
    g = gate.exponents
    q, k, v, beta = operands(inputs, low, span, g.shape[2])

    decay = gate.decays.tril()  # (c, h, i, j)
    product = rounding.two_tf32 if low.operand_dtype == torch.float32 else _tf32
    inverse = operand(_inverse(((k @ k.mT) * decay * beta).tril(-1), product))
    beta, since_start = intermediate(beta), intermediate(exp(g))[..., None]
    u = operand(inverse @ operand(beta * v))
    w = operand(inverse @ operand(intermediate(beta * since_start) * k))

    last = g[..., -1:]
    to_end = intermediate(exp((last - g).clamp(max=0)))[..., None]
    chunk_decay = exp(last)[..., None]
    scores = operand(intermediate(intermediate(q @ k.mT) * intermediate(decay)))
    out = torch.empty_like(v)
    for c in range(len(v)):
        entering = operand(low.state)
        written = intermediate(u[c] - w[c] @ entering)
        out[c] = since_start[c] * (q[c] @ entering) + scores[c] @ operand(written)
        low.state = low.stored(low.state * chunk_decay[c] + k[c].mT @ operand(written * to_end[c]))
    return in_positions(out, inputs, span)


def operands(
    inputs: kernels.GDNInputs, low: rounding.Rounded, span: rounding.Span, chunk: int
) -> tuple[torch.Tensor, ...]:
    """In chunks (c, h, chunk, ...): q and k of value heads as operands, normalised if the call asks
    for it; v and beta (..., 1) in fp32.
    """

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        return rounding.split_chunks(tensor, chunk).transpose(1, 2)

    q, k, v, beta = (
        tensor[span.batch, span.start : span.stop].float()
        for tensor in (inputs.q, inputs.k, inputs.v, inputs.beta)
    )
    if inputs.use_qk_l2norm:
        q, k = (
            tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (q, k)
        )
    q, k = (
        chunked(low.operand(tensor).repeat_interleave(inputs.values_per_key, 1))
        for tensor in (q, k)
    )
    return q, k, chunked(v), chunked(beta)[..., None]


def in_positions(out: torch.Tensor, inputs: kernels.GDNInputs, span: rounding.Span) -> torch.Tensor:
    """(c, h, chunk, V), before the scale, -> the output of the span."""
    out = out * inputs.scale_or_default
    return out.transpose(1, 2).flatten(0, 1)[: span.stop - span.start].to(inputs.v.dtype)


def _inverse(system: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """(I + system)^-1 by blocks: those on the diagonal in fp32, then pairs of neighbours.  product:
    its operands.
    """
    identity = torch.eye(_LEAF, device=system.device)
    leaves = _blocks_below(system, _LEAF, 0)
    inverse: torch.Tensor = torch.linalg.solve_triangular(
        leaves, identity.expand_as(leaves), upper=False, unitriangular=True
    )
    half = _LEAF
    while half < system.shape[-1]:
        top = inverse[..., 0::2, :, :]
        bottom = inverse[..., 1::2, :, :]
        between = _blocks_below(system, half, 1)
        corner = -product(bottom) @ product(product(between) @ product(top))
        upper, lower = torch.cat([top, torch.zeros_like(top)], -1), torch.cat([corner, bottom], -1)
        inverse = torch.cat([upper, lower], -2)
        half *= 2
    return inverse.squeeze(-3)


def _blocks_below(system: torch.Tensor, size: int, below: int) -> torch.Tensor:
    """(..., chunk, chunk) -> (..., n, size, size): blocks on the diagonal, or the one below each
    even block of it.
    """
    count = system.shape[-1] // size
    blocks = system.reshape(*system.shape[:-2], count, size, count, size)
    return torch.stack([blocks[..., i + below, :, i, :] for i in range(0, count, 1 + below)], -3)


def _tf32(tensor: torch.Tensor) -> torch.Tensor:
    """An fp32 operand as a tensor core reads it: without its low 13 bits."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


# --- cost

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def sizes_of(inputs: kernels.GDNInputs) -> dict[str, int]:
    (key_heads, key_dim), (value_heads, value_dim) = inputs.q.shape[2:], inputs.v.shape[2:]
    return {
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }


def flops(sizes: Mapping[str, int], positions: int, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products at that many positions.

    Per position, with (C + 1) / 2 sources per position on average in a chunk of C positions (the
    causal half):

        k k^T, q k^T                       2 H K (C + 1) / 2 each
        the inverse, times what is written, and scores times what is written
                                           2 HV V (C + 1) / 2 each
        k S, q S, and the state's update   2 HV K V each

    It grows with C.  The default, the smallest chunk that fills a tensor core's tile, is the least
    that any chunked kernel does, so that no choice of chunk beats the floor.  The inverse itself,
    decays and norms are not counted.
    """
    key_heads, heads, key_dim, value_dim = (sizes[name] for name in GENERATOR.names[:4])
    sources = chunk_size + 1
    per_position = (
        2 * sources * (key_heads * key_dim + heads * value_dim) + 6 * heads * key_dim * value_dim
    )
    return positions * per_position


ORACLE = OracleSpec(
    blocks=lambda inputs, length: reference.gdn_blocks(inputs, torch.float64, block=length),
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=lambda _inputs: CHUNK,
    sizes=sizes_of,
    words=lambda sizes: _WORDS.format(**sizes),
    flops=flops,
)


# --- random inputs

SCALE = 0.3  # of edge inputs
SLOWEST, FASTEST = 1.0, 16.0  # A, as models are initialised: g = -A softplus(a + dt_bias)
NORMALISED = "normalised"
QUARTER_UNGATED = "quarter-ungated"
QUARTER_SLOW = "quarter-slow"
SLOW = "slow"
WAYS = {
    NORMALISED: "q and k are normalised before the call and not inside",
    QUARTER_UNGATED: "every fourth value head has no gate: g = 0",
    QUARTER_SLOW: "every fourth value head keeps thousands of tokens: g is -1e-4 in the mean",
    SLOW: "every value head does",
    **generate.POOL,
}


def gates(cell: Cell, generator: torch.Generator) -> torch.Tensor:
    """g = -A softplus(a + dt_bias) with a ~ N(0, 1), unless `WAYS` says otherwise."""
    heads, (rows, length, _) = cell.shape.sizes["value_heads"], generate.positions(cell)
    dt_bias = generate.gate_bias(heads, generator)
    A = generate.uniform(heads, SLOWEST, FASTEST, generator)
    raw = torch.randn(rows, length, heads, device=generator.device, generator=generator)
    g = -A * torch.nn.functional.softplus(raw + dt_bias)
    for way, heads_of_it in ((QUARTER_SLOW, slice(None, None, 4)), (SLOW, slice(None))):
        if way in cell.drawn:
            g[..., heads_of_it].uniform_(-2e-4, 0, generator=generator)
    if QUARTER_UNGATED in cell.drawn:
        g[..., ::4] = 0
    return g


def draw(
    cell: Cell, device: torch.device, *, kind: str = "GDNInputs", gates: Callable[..., Any] = gates
) -> Any:
    """q, k, v ~ N(0, 1), normalised inside; g of `gates`; beta = sigmoid(N(0, 1)) times its
    maximum.

    "contiguous" tensors, or "views" as a model passes them: q, k and v as slices of one tensor.
    Packed and very short sequences have an initial state ~ N(0, 1) too.  `WAYS` says what
    `cell.drawn` changes.
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
    if NORMALISED in cell.drawn:
        for tensor in (q, k):
            tensor.copy_(torch.nn.functional.normalize(tensor.float(), dim=-1))
    (pooled,), states, slots = generate.POOL, None, None
    if cell.tokens.states or pooled in cell.drawn:
        states = normal(cell.tokens.sequences, heads, key_dim, value_dim)
        if pooled in cell.drawn:
            states, slots = generate.pool(states.mT)
            states = states.mT
    return getattr(kernels, kind)(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=(largest_beta * normal(*v.shape[:3]).sigmoid()).to(dtype_named(cell.dtype)),
        use_qk_l2norm=NORMALISED not in cell.drawn,
        initial_state=states,
        state_indices=slots,
        cu_seqlens=generate.cu_seqlens(cell, device),
        state_every=cell.tokens.state_every,
    )


def edges(like: Any, draw: Callable[[Cell, torch.device], Any] = draw) -> Iterator[Iterator[Any]]:
    """`_edge` of each of `generate.EDGES`; at last short q and k that are not normalised, and
    another scale.
    """
    yield from (_edge(like, lengths, draw) for lengths in generate.EDGES)
    *_, plain = _edge(like, (320, 320), draw)
    q, k = (
        0.7 * torch.nn.functional.normalize(one.float(), dim=-1).to(one.dtype)
        for one in (plain.q, plain.k)
    )
    yield iter([replace(plain, q=q, k=k, use_qk_l2norm=False, scale=SCALE)])


def _edge(
    like: Any, lengths: generate.Lengths, draw: Callable[[Cell, torch.device], Any]
) -> Iterator[Any]:
    """K = V, initial states, beta up to 2, some g > 0, and `_values` or `_forms`; then without the
    last three; then like `like`; then without initial states.  Some q and k have squared norms near
    1e-6.
    """
    key_dim, width, device = like.q.shape[3], like.v.shape[3], like.v.device
    for value_dim, largest_beta, initial in (
        (key_dim, 2, True),
        (key_dim, 1, True),
        (width, 1, True),
        (width, 1, False),
    ):
        shape = GENERATOR.shape("edges", 2, 6, key_dim, value_dim, largest_beta)
        drawn = draw(generate.edge_cell(shape, like.v, lengths), device)
        for tensor in (drawn.q, drawn.k):
            tensor[:, ::5] *= 1e-3 * key_dim**-0.5
        states = generate.states(len(lengths), 6, value_dim, key_dim, device=device).mT
        drawn = replace(
            drawn,
            chunk_size=like.chunk_size,
            cu_seqlens=generate.edge_bounds(lengths, device),
            initial_state=states if initial else None,
        )
        if largest_beta > 1:
            drawn.g[:, ::7] *= -1
            drawn = _values(drawn) if lengths == generate.EDGES[0] else _forms(drawn)
        yield drawn


def _values(drawn: Any) -> Any:
    """Heads that hardly forget, one of which hardly writes; equal keys in a chunk; gates that
    forget everything.
    """
    g, k, beta = drawn.g, drawn.k, drawn.beta
    g[:, :, :3:2] = g[:, :, :3:2].clamp(max=0) * 2.0**-7
    g[:, :, 2] *= 2
    beta[0, :, 0], beta[1, :, 0] = 0, beta[1, :, 0] * 2.0**-6
    k[:, 128:176, 1] = k[:, 128:129, 1]
    beta[:, 128:176, 3:] = 0.875
    g[:, ::11, 1] = -torch.inf
    return drawn


def _forms(drawn: Any) -> Any:
    """k and g in wider tensors, long q and k, beta < 0, another scale, gates that forget
    everything.
    """
    for tensor in (drawn.q, drawn.k):
        tensor[:, 1::5] *= 100
    drawn.beta[:, ::13] *= -1
    drawn.g[:, ::11, 1] = -torch.inf
    k, g = (
        torch.cat([one, torch.full_like(one, torch.nan)], -1)[..., : one.shape[-1]]
        for one in (drawn.k, drawn.g)
    )
    return replace(drawn, k=k, g=g, scale=SCALE)


# --- other libraries

# fla reads it when it is imported, as models in transformers do
_NO_DISPATCH = "FLA_DISABLE_BACKEND_DISPATCH"
os.environ.setdefault(_NO_DISPATCH, "1")


def fla_operator(name: str = "gdn") -> ModuleType:
    """fla's module of an operator, with its calls to other libraries turned off, so that fla's own
    kernels are timed.

    Raises ImportError if it is not installed, and if it was imported before with these calls on.
    """
    if adapters.FLA[name] in sys.modules and os.environ.get(_NO_DISPATCH) != "1":
        raise ImportError(
            f"fla was imported before {_NO_DISPATCH}=1 was set, and may call other libraries"
        )
    os.environ[_NO_DISPATCH] = "1"
    return import_module(adapters.FLA[name])


def states_as_inputs(dtype: InputDType) -> tuple[kernels.Precision, ...]:
    return requested_precisions(dtype, "exact", (dtype,))


LIBRARIES = {
    name: generate.installed(package, precisions, load)
    for name, package, precisions, load in (
        (
            "fla",
            "flash-linear-attention",
            states_as_inputs,
            lambda: adapters.load_fla(fla_operator()),
        ),
        (
            "fla_recurrent",
            "flash-linear-attention",
            exact_fp32,
            lambda: adapters.load_fla_recurrent(fla_operator()),
        ),
        ("flash_qla", "flash-qla", exact_fp32, lambda: adapters.load_flash_qla()),
        ("flashinfer", "flashinfer-python", exact_fp32, lambda: adapters.load_flashinfer()),
        ("flashinfer_mtp", "flashinfer-python", exact_fp32, lambda: adapters.load_flashinfer_mtp()),
    )
} | {
    **generate.of_servers(states_as_inputs, lambda name: servers.LOADERS[name]("gdn")),
    **generate.of_transformers(
        "fla",
        "flash-linear-attention",
        states_as_inputs,
        lambda package: adapters.load_model("gdn", package),
    ),
}

_WORDS = "{key_heads}/{value_heads} heads, K {key_dim}, V {value_dim}"
GENERATOR: InputGenerator[Any] = InputGenerator(
    form="{key_heads}/{value_heads}x{key_dim}x{value_dim}",
    order="key heads / value heads x K x V",
    words=_WORDS,
    models={  # as in their configs
        "qwen3-next-80b": (16, 32, 128, 128),
        "qwen3.5-0.8b": (16, 16, 128, 128),
        "qwen3.5-9b": (16, 32, 128, 128),
        "qwen3.5-27b": (16, 48, 128, 128),
        "qwen3.5-397b": (16, 64, 128, 128),
        "qwen3.5-397b-tp8": (2, 8, 128, 128),  # one rank of eight
        "olmo-hybrid-7b": (30, 30, 96, 192, 2),
    },
    others={"largest_beta": 1},  # 2 if eigenvalues may be negative
    divides=("key_heads", "value_heads"),
    largest={"key_dim": 256, "value_dim": 256},
    draw=draw,
    edges=edges,
    ways=WAYS,
    alternatives=("fused_portable",),
    libraries=LIBRARIES,
)


# --- tensor-parallel ranks


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """Every rank takes the same number of key heads, with their value heads."""
    heads = sizes["key_heads"]
    return f"its {heads} key heads cannot be divided by {ranks}" if heads % ranks else ""


OPERATOR: Operator = Operator(
    name="gdn",
    title="GDN",
    layers="Gated-DeltaNet",
    load_inputs=lambda: kernels.GDNInputs,
    mixer_sizes={
        "key_heads": "num_k_heads",
        "value_heads": "num_v_heads",
        "key_dim": "head_k_dim",
        "value_dim": "head_v_dim",
    },
    words=_WORDS,
    stages=STAGES,
    binding=BINDING,
    judged=ORACLE,
    generated=GENERATOR,
    load_tuning=lambda: gdn_tuning.TUNING,
    refusal=refusal,
    divided={"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "initial_state": 1},
)
