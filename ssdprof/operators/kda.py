"""The operator "kda".  Imports torch at first use only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ssdprof import kernels
from ssdprof.operators import gdn, generate
from ssdprof.operators.gdn import CHUNK
from ssdprof.operators.generate import Cell, History, KnownOutputs
from ssdprof.operators.late import lazy, packages, rounding, torch
from ssdprof.operators.operator import CallBinding, OracleSpec, Stages, computed
from ssdprof.operators.tensors import dtype_named, exact_fp32

if TYPE_CHECKING:
    from ssdprof.kernels import oracle
    from ssdprof.kernels.gdn import adapters
    from ssdprof.kernels.kda import reference
    from ssdprof.operators import kda_tuning
else:
    oracle = lazy("ssdprof.kernels.oracle")
    adapters, reference = (
        lazy(f"ssdprof.kernels.{name}") for name in ("gdn.adapters", "kda.reference")
    )
    kda_tuning = lazy("ssdprof.operators.kda_tuning")

STAGES = Stages.of(
    "kda",
    {"chunk_state.residual": "residual", "chunk_state.update": "update of the state"},
    "setup",
    "setup.store",
    "qk_l2norm",
    "gate_cumsum",
    "decayed_scores",
    "solve_tril",
    "recompute_w_u",
    "out_factor",
    "state_factor",
    "chunk_state",
    "chunk_state.residual",
    "chunk_state.update",
    "chunk_output",
    "recurrence",
    "step_write",
    "step_state",
    "step_output",
    unfused=(
        "_gdn_qk_l2norm_kernel",
        "_kda_gate_cumsum_kernel",
        "_kda_decayed_scores_kernel",
        "_gdn_solve_tril_kernel",
        "_kda_recompute_w_u_kernel",
        "_gdn_chunk_state_kernel",
        "_kda_chunk_output_kernel",
    ),
    fused=("_kda_hopper_kernel", "_kda_prep_kernel", "_kda_scan_kernel"),
    recurrent=("_gdn_recurrent_kernel",),
    unfused_step=("_gdn_step_write_kernel", "_gdn_step_state_kernel", "_gdn_step_output_kernel"),
)

# --- how a model calls it

BINDING: CallBinding[kernels.KDAInputs] = CallBinding(
    function="chunk_kimi_delta_attention",
    step="recurrent_kimi_delta_attention",
    bind=partial(gdn.bind, kind="KDAInputs"),
    bind_step=partial(gdn.bind, kind="KDAInputs"),
    refused=(*gdn.BINDING.refused, "safe_gate", "lower_bound"),
    always_a_pair=True,
    views=("q", "k", "v"),
    per_position=("g", "beta"),
    gate_bytes=lambda item, sizes: item + 4 * sizes["key_dim"],  # beta, and g in fp32
    replacement=lambda inputs: computed(inputs, reference.kda_chunked),
)


# --- the oracle, and the operator in one precision


def bytes_per_position(inputs: kernels.KDAInputs) -> int:
    """About ten fp32 rows of the rounded form and ten fp64 rows of the oracle, of 2 K + V +
    CHUNK.
    """
    heads, value_dim = inputs.v.shape[2:]
    return int(heads * (10 * 4 + 10 * 8) * (2 * inputs.q.shape[3] + value_dim + CHUNK))


def gate(inputs: kernels.KDAInputs, span: rounding.Span, chunk: int = CHUNK) -> rounding.Gate:
    """The running sum of g in each chunk, (c, h, chunk * K); the padding has g = 0."""
    g = inputs.g[span.batch, span.start : span.stop].float().clamp(gdn._FORGOTTEN, 0)
    sums = rounding.running_sum(rounding.split_chunks(g, chunk).permute(0, 2, 3, 1))
    return rounding.Gate(exponents=sums.mT.flatten(2))


def rounded_chunks(
    inputs: kernels.KDAInputs, low: rounding.Rounded, span: rounding.Span, gate: rounding.Gate
) -> torch.Tensor:
    """out of a span: the `lo` of the comparison (docs/measuring.md).

    The chunked algorithm of `reference.py` with the gate's chunks, in plain torch.  Everything
    is computed in fp32 and rounded

        where a matrix product takes it     to the input's dtype; fp32 to two tf32 numbers, as
                                            tensor cores take it: q and k (normalised ones too),
                                            with the decays from the chunk's start and to its end,
                                            the inverse, beta times v, u, w, the state, what a chunk
                                            writes, the scores
        in the products of the scores       q and k with the decays of each half: bf16 inputs cut to
                                            tf32, fp16 ones
        and between the inverse's blocks    rounded to fp16, fp32 ones to two tf32 numbers
        where states pass from chunk to chunk, and at the end     to the state dtype
        as the output     to the input's dtype

    beta and the substitution inside blocks of 16 rows stay in fp32.  Relaxed intermediates round
    fp32 operands to 16 bits and nothing else.
    """
    operand, exp = low.operand, rounding.gpu_exp
    product = {torch.float32: rounding.two_tf32, torch.float16: operand}.get(
        low.operand_dtype, gdn._tf32
    )
    chunk = gate.exponents.shape[2] // inputs.q.shape[3]
    q, k, v, beta = gdn.operands(inputs, low, span, chunk)
    sums = gate.exponents.reshape(*gate.exponents.shape[:2], chunk, -1)
    scores, system = reference.decayed_scores(q, k, sums, exp, product)
    scores, inverse = operand(scores), operand(gdn._inverse(beta * system, product))
    since_start, to_end = exp(sums), exp((sums[..., -1:, :] - sums).clamp(max=0))
    u = operand(inverse @ operand(beta * v))
    w = operand(inverse @ operand(beta * operand(since_start * k)))
    queries, keys = operand(q * since_start), operand(k * to_end)
    out = torch.empty_like(v)
    for c in range(len(v)):
        entering = operand(low.state)
        written = operand(u[c] - w[c] @ entering)
        out[c] = queries[c] @ entering + scores[c] @ written
        low.state = low.stored(low.state * since_start[c, :, -1, :, None] + keys[c].mT @ written)
    return gdn.in_positions(out, inputs, span)


# --- cost


def flops(sizes: Mapping[str, int], positions: int, chunk_size: int = gdn.SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products at that many positions.

    As of GDN, but k k^T and q k^T are of every value head, because their decays are inside the
    sums.
    """
    heads, key_dim, value_dim = (sizes[name] for name in ("value_heads", "key_dim", "value_dim"))
    return (
        positions * heads * (2 * (chunk_size + 1) * (key_dim + value_dim) + 6 * key_dim * value_dim)
    )


ORACLE = OracleSpec(
    blocks=lambda inputs, length: reference.kda_blocks(inputs, torch.float64, block=length),
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=lambda _inputs: CHUNK,
    sizes=gdn.sizes_of,
    words=gdn.ORACLE.words,
    flops=flops,
)


# --- random inputs

BOUND = -5.0  # of the bounded gate
BOUNDED, SATURATED, LOW_GATES = "bounded", "saturated", "low-gates"
WAYS = {
    gdn.NORMALISED: "q and k are normalised before the call and not inside",
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
    A = generate.uniform(heads, gdn.SLOWEST, gdn.FASTEST, generator)[:, None]
    g = torch.randn(
        rows, length, heads, key_dim, device=generator.device, generator=generator
    ).add_(dt_bias)
    if SATURATED in cell.drawn:
        g[..., ::4, :] += 10
    g = BOUND * g.sigmoid_() if BOUNDED in cell.drawn else torch.nn.functional.softplus(g).mul_(-A)
    return g.to(dtype_named(cell.dtype)) if LOW_GATES in cell.drawn else g


draw = partial(gdn.draw, kind="KDAInputs", gates=gates)


def edges(like: kernels.KDAInputs) -> Iterator[Iterator[kernels.KDAInputs]]:
    """As of GDN; the first ones have channels that forget everything, too."""
    for kind in gdn.edges(like, draw):
        first = next(kind)
        first.g[:, ::11, 1:3, ::3] = -torch.inf  # not where heads hardly forget
        yield chain([first], kind)


# --- turning keys

# tokens of a window -> keys that turn in it
WINDOWS = {16: 7, 64: 11, 256: 11, 1024: 11}
KEPT, WRITTEN = 15 / 16, 1 / 16  # by the first token of a window
LONG = (2779, 1317)  # tokens of long calls: a pack, or a row of as many
RESOLUTION = 2.0**-60  # of a history's influence


def histories(
    like: kernels.KDAInputs, heads: Sequence[int]
) -> Iterator[Iterator[History[kernels.KDAInputs]]]:
    """`turning_keys` in the shape of `like`, if it has two windows; then of 4,096 tokens.

    With fewer heads than kinds of windows there is a call for each kind.  Several heads are first
    tried as a pack with initial states.
    """
    longest = max(span.length for span in _spans(like))
    fitting = [window for window in WINDOWS if 2 * window <= longest]
    if not fitting:
        return
    yield (turning_keys(given, fitting) for given in [like])
    for count in heads:
        for start in range(0, len(WINDOWS), count):
            yield _long_history(like, count, [*WINDOWS][start : start + count])


def _long_history(
    like: kernels.KDAInputs, heads: int, windows: Sequence[int]
) -> Iterator[History[kernels.KDAInputs]]:
    key_dim, (value_dim, device) = like.q.shape[3], (like.v.shape[3], like.v.device)
    shape = GENERATOR.shape("turning keys", heads, heads, key_dim, value_dim)
    row = draw(generate.edge_cell(shape, like.v, (sum(LONG),)), device)
    row = replace(row, use_qk_l2norm=like.use_qk_l2norm, g=row.g.to(like.g.dtype))
    if heads > 1:
        states = generate.states(len(LONG), heads, key_dim, value_dim, device=device)
        bounds = generate.edge_bounds(LONG, device)
        yield turning_keys(replace(row, cu_seqlens=bounds, initial_state=states), windows)
        yield turning_keys(replace(row, initial_state=states[:1]), windows)
    yield turning_keys(row, windows)


def turning_keys(like: kernels.KDAInputs, windows: Sequence[int]) -> History[kernels.KDAInputs]:
    """Inputs in which every channel's gates sum to -20 in each window, although most of the state
    is kept: keys turn it from one half of the channels to the other before that half decays.

    like: their shapes, dtypes and scale.  windows: tokens of each kind of heads, in turn.  Unit
    vectors x and y lie in the two halves, and change places in every window:

        token               key                                     beta    g
        first               x                                       1/16    0
        next four           random                                  0       -5 on y's half
        m-th of n turning   cos(m a) y - sin(m a) x, a = pi/2/(n+1) 1       0
        last four           random                                  0       -5 on x's half
        others              random                                  0       0

    With q = y at the last token, v_i of the first one, and v = 0 where keys turn,

        out = scale M_i,   M_i = cos(a)^(n+1) (15/16 M_(i-1) + v_i / 16)

    M_(-1) is 0, or the initial state x M_(-1)^T.  docs/measuring.md
    """
    device, (key_heads, key_dim) = like.v.device, like.q.shape[2:]
    generator = torch.Generator(device).manual_seed(generate.SEED)
    normal = partial(torch.randn, device=device, generator=generator)
    q, k, v, g, beta = (
        torch.zeros_like(tensor) for tensor in (like.q, like.k, like.v, like.g, like.beta)
    )
    v.normal_(generator=generator)
    states = None if like.initial is None else torch.zeros_like(like.initial, dtype=torch.float32)
    known: list[KnownOutputs] = []
    for kind, window in enumerate(windows[:key_heads]):
        own = torch.arange(kind, key_heads, len(windows), device=device)
        group = torch.arange(like.values_per_key, device=device)
        heads = (own[:, None] * like.values_per_key + group).flatten()
        halves = normal(len(own), key_dim).argsort(-1) < key_dim // 2
        signs = normal(len(own), key_dim).sign()
        x, y = (torch.nn.functional.normalize(signs * half, dim=-1) for half in (halves, ~halves))
        period = _two_windows(window, x, y, normal)
        turning, kept = WINDOWS[window], math.cos(math.pi / 2 / (WINDOWS[window] + 1))
        kept **= turning + 1
        for span in _spans(like):
            rows = slice(span.start, span.stop)
            at = torch.arange(span.length, device=device) % (2 * window)
            for tensor, values in zip((q, k), period, strict=False):
                tensor[span.batch, rows, own] = values[at].to(tensor.dtype)
            for tensor, values in zip((g, beta), period[2:], strict=True):
                values = values.repeat_interleave(like.values_per_key, 1)
                tensor[span.batch, rows, heads] = values[at].to(tensor.dtype)
            v[span.batch, rows, heads] *= (period[3][at, :1, None] != 1).to(v.dtype)
            count = span.length // window
            first = span.start + window * torch.arange(count, device=device)
            terms = kept * WRITTEN * v[span.batch, first][:, heads].double()
            if states is not None:
                memory = normal(len(heads), v.shape[3])
                directions = x.repeat_interleave(like.values_per_key, 0)
                states[span.sequence, heads] = directions[..., None] * memory[:, None]
                terms[:1] += kept * KEPT * memory.double()
            known.append(
                KnownOutputs(
                    kind=f"windows of {window:,} tokens",
                    batch=span.batch,
                    positions=first + window - 1,
                    heads=heads,
                    expected=like.scale_or_default * decaying_sums(terms, kept * KEPT),
                )
            )
    inputs = like if states is None else like.after(states)
    return History(inputs=replace(inputs, q=q, k=k, v=v, g=g, beta=beta), known=known)


def _spans(inputs: kernels.KDAInputs) -> list[rounding.Span]:
    return oracle.sequences(inputs.sequences, inputs.length, inputs.cu_seqlens)


def _two_windows(
    window: int, x: torch.Tensor, y: torch.Tensor, normal: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """q, k, g (2 window, h, K) and beta (2 window, h) of two windows; x, y (h, K)."""
    turning = WINDOWS[window]
    each = (window - 9) // turning
    parts = []
    for before, after in ((x, y), (y, x)):
        k = torch.nn.functional.normalize(normal(window, *x.shape), dim=-1)
        g, beta = torch.zeros_like(k), torch.zeros_like(k[..., 0])
        k[0], beta[0] = before, WRITTEN
        for m in range(1, turning + 1):
            angle, token = m * math.pi / 2 / (turning + 1), 5 + each * (m - 1)
            k[token], beta[token] = math.cos(angle) * after - math.sin(angle) * before, 1
        g[1:5], g[-4:] = BOUND * (after != 0), BOUND * (before != 0)
        parts.append((after.expand_as(k), k, g, beta))
    return tuple(torch.cat(pair) for pair in zip(*parts, strict=True))


def decaying_sums(terms: torch.Tensor, ratio: float) -> torch.Tensor:
    """sum over j of ratio^j terms_(i-j), of (n, ...): spans that double, until no more counts."""
    step = 1
    while step < len(terms) and ratio**step > RESOLUTION:
        terms = torch.cat([terms[:step], terms[step:] + ratio**step * terms[:-step]])
        step *= 2
    return terms


# --- other libraries


LIBRARIES = {
    name: generate.installed(
        "flash-linear-attention", lambda: adapters.fla_version(), precisions, load
    )
    for name, precisions, load in (
        ("fla", gdn.states_as_inputs, lambda: adapters.load_fla(gdn.fla_operator("kda"), "kda")),
        (
            "fla_recurrent",
            exact_fp32,
            lambda: adapters.load_fla_recurrent(gdn.fla_operator("kda"), "kda"),
        ),
    )
} | {
    "flash_kda": generate.installed(
        "git+https://github.com/MoonshotAI/FlashKDA",
        lambda: packages.package_version("flash_kda"),
        gdn.states_as_inputs,
        lambda: adapters.load_flash_kda(),
    ),
    "sglang": gdn.sglang("kda"),
    "cudnn": generate.installed(
        "nvidia-cudnn-frontend",
        lambda: packages.package_version("nvidia-cudnn-frontend"),
        exact_fp32,
        lambda: adapters.load_cudnn(),
    ),
    **generate.of_transformers(
        "fla",
        "flash-linear-attention",
        gdn.states_as_inputs,
        lambda package: adapters.load_model("kda", package),
    ),
}

GENERATOR = replace(
    gdn.GENERATOR,
    draw=draw,
    edges=edges,
    histories=histories,
    ways=WAYS,
    alternatives=(),
    libraries=LIBRARIES,
    models={  # as in their configs
        "kimi-linear-48b": (32, 32, 128, 128),
        "glm-5-next": (64, 64, 128, 128),
        "kimi-k3": (96, 96, 128, 128),
        "kimi-k3-tp8": (12, 12, 128, 128),  # one rank of eight
    },
)


OPERATOR = replace(
    gdn.OPERATOR,
    name="kda",
    title="KDA",
    layers="Kimi-Delta-Attention",
    load_inputs=lambda: kernels.KDAInputs,
    mixer_sizes={
        "key_heads": "num_heads",
        "value_heads": "num_heads",
        "key_dim": "head_dim",
        "value_dim": "head_dim",
    },
    stages=STAGES,
    binding=BINDING,
    judged=ORACLE,
    generated=GENERATOR,
    load_tuning=lambda: kda_tuning.TUNING,
)
