"""The operator "ssd".  Imports torch at first use only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdprof import kernels
from ssdprof.operators import generate
from ssdprof.operators.generate import Cell, InputDType, InputGenerator, Library
from ssdprof.operators.late import lazy, rounding, torch
from ssdprof.operators.operator import (
    BoundCall,
    CallBinding,
    Operator,
    OracleSpec,
    Stages,
    computed,
    from_call,
)
from ssdprof.operators.tensors import exact_fp32, requested_precisions

if TYPE_CHECKING:
    from ssdprof.kernels.ssd import adapters, reference, servers
    from ssdprof.operators import ssd_tuning
else:
    adapters, reference, servers = (
        lazy(f"ssdprof.kernels.ssd.{name}") for name in ("adapters", "reference", "servers")
    )
    ssd_tuning = lazy("ssdprof.operators.ssd_tuning")

STAGES = Stages.of(
    "ssd",
    {
        "waiting.scores": "for the scores",
        "waiting.half": "for the other half of N",
        "waiting.gates": "for the gates",
        "chunk_state.first_pass": "first pass",
        "state_passing.wait": "waiting for the segment before",
        "state_passing.load": "loading the state",
        "state_passing.store": "storing the state",
        "chunk_scan.previous": "previous state",
        "chunk_scan.current": "current chunk",
        "chunk_scan.residual": "residual and store",
    },
    "setup",
    "setup.load",
    "setup.store",
    "ticket",
    "loads",
    "chunk_cumsum",
    "bmm_chunk",
    "waiting",
    "waiting.chunk",
    "waiting.scores",
    "waiting.half",
    "waiting.gates",
    "chunk_state",
    "chunk_state.first_pass",
    "state_passing",
    "state_passing.wait",
    "state_passing.load",
    "state_passing.store",
    "chunk_scan",
    "chunk_scan.previous",
    "chunk_scan.current",
    "chunk_scan.residual",
    "recurrence",
    "step_state",
    "step_output",
    "ahead",
    fused=("_rows_kernel", "_fused_hopper_kernel", "_fused_kernel"),
    recurrent=("_ssd_recurrent_kernel",),
    unfused=(
        "_chunk_table_kernel",
        "_chunk_cumsum_kernel",
        "_chunk_state_kernel",
        "_state_passing_kernel",
        "_bmm_chunk_kernel",
        "_chunk_scan_kernel",
    ),
    unfused_step=("_ssd_step_state_kernel", "_ssd_step_output_kernel"),
)


# --- how a model calls it


def bind(
    mixer: torch.nn.Module,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **given: Any,
) -> BoundCall:
    """The call of `mixer` as inputs."""
    limit = tuple(map(float, dt_limit))
    inputs = from_call(
        kernels.SSDInputs, **given, x=x, dt=dt, A=A, B=B, C=C, chunk_size=chunk_size, dt_limit=limit
    )
    return inputs, return_final_states, _limit_remark(mixer, inputs.dt_limit)


def _limit_remark(mixer: torch.nn.Module, passed: tuple[float, float]) -> str:
    """A sentence if the config's limits of dt differ from those that the model passes; else
    empty.
    """
    stated = getattr(getattr(mixer, "config", None), "time_step_limit", None)
    if stated is None or tuple(map(float, stated)) == passed:
        return ""
    low, high = map(float, stated)
    return (
        f"The model calls the operator with dt_limit ({passed[0]:g}, {passed[1]:g}), and these "
        "limits were used; its "
        f"config states time_step_limit ({low:g}, {high:g}), which other runtimes use."
    )


def bind_step(
    mixer: torch.nn.Module,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> BoundCall:
    """A call of `mixer` for one token: x (b, h, p), B and C (b, g, n), and dt, A, D and dt_bias
    repeated over channels.

    The state is updated in place, so only the output is returned.  The limits of dt are not among
    the
    arguments: a model applies them to prompts only.
    """
    inputs = kernels.SSDInputs(
        x=x[:, None],
        dt=_of_heads("dt", dt, 2)[:, None],
        A=_of_heads("A", A, 1),
        B=B[:, None],
        C=C[:, None],
        chunk_size=getattr(mixer, "chunk_size", kernels.SSDInputs.chunk_size),
        z=None if z is None else z[:, None],
        dt_softplus=dt_softplus,
        initial_states=state,
        D=None if D is None else _of_heads("D", D, 1),
        dt_bias=None if dt_bias is None else _of_heads("dt_bias", dt_bias, 1),
    )
    return inputs, False, ""


def _of_heads(name: str, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The first `dims` dimensions of a tensor that is the same over the others.  ValueError if it
    is not.
    """
    first = tensor
    for _ in range(tensor.ndim - dims):
        first = first.select(-1, 0)
    if any(tensor.stride()[dims:]):  # not expanded
        repeated = first.reshape(*first.shape, *(1 for _ in tensor.shape[dims:])).expand_as(tensor)
        if not torch.equal(tensor, repeated):
            raise ValueError(f"{name} differs between the channels of a head")
    return first


BINDING: CallBinding[kernels.SSDInputs] = CallBinding(
    function="mamba2_chunk_scan",
    step="mamba2_selective_state_update",
    bind=bind,
    bind_step=bind_step,
    refused=("seq_idx", "cu_seqlens", "return_varlen_states"),
    views=("x", "B", "C"),
    per_position=("dt", "z"),
    gate_bytes=lambda item, _sizes: item,  # dt
    replacement=lambda inputs: computed(inputs, reference.ssd_chunked),
)


# --- the oracle, and the operator in one precision

# of a chunk's scores that the rounded form computes at once, up to their last column
ROWS = {"cuda": 64, "cpu": 256}


def bytes_per_position(inputs: kernels.SSDInputs) -> int:
    """The rounded form holds about six fp32 rows of scores (h, chunk_size); the oracle and the sums
    hold about ten fp64 rows of (h, p + 64 + p n / 64), as `ssd_blocks` explains.
    """
    h, p = inputs.x.shape[2:]
    n, q = inputs.B.shape[3], inputs.power_of_two_chunk
    return h * (6 * 4 * q + 10 * 8 * (p + 64 + p * n // 64))


def gate(inputs: kernels.SSDInputs, span: rounding.Span, chunk: int = 0) -> rounding.Gate:
    """dt and the running sum of dt A in each chunk, (c, h, q).  chunk: 0 is that of the inputs.

    The last chunk is padded with dt = 0, which neither decays nor adds.
    """
    dt = inputs.dt[span.batch, span.start : span.stop].float()
    if inputs.dt_bias is not None:
        dt = dt + inputs.dt_bias.float()
    if inputs.dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    chunk = chunk or inputs.power_of_two_chunk
    dt = rounding.split_chunks(dt.clamp(*inputs.dt_limit), chunk).transpose(1, 2)
    A = inputs.A.float().clamp(min=-1e30)  # -inf times a step of 0 would be NaN
    return rounding.Gate(exponents=rounding.running_sum(dt * A[:, None]), dt=dt)


def rounded_chunks(
    inputs: kernels.SSDInputs, low: rounding.Rounded, span: rounding.Span, gate: rounding.Gate
) -> torch.Tensor:
    """out of a span: the `lo` of the comparison (docs/measuring.md).

    It is the chunked algorithm of Dao and Gu 2024 (arXiv:2405.21060), section 6, in plain torch, at
    the chunk size of the gate.  Everything is computed in fp32 and rounded

        where a matrix product takes it     to the input's dtype; fp32 to two tf32 numbers, as
                                            tensor cores take it
        where states pass from chunk to chunk, and at the end     to the state dtype
        as the output     to the input's dtype
        if relaxed: decays, C B^T, dt and their products     to 16 bit (the input's dtype; bfloat16
                                                             for fp32 inputs)

    It imitates no kernel and nothing is fitted: an implementation that rounds at fewer places only
    gets closer to the oracle.  fp32 sums are made in the order that a kernel may make them and that
    loses most, one addend after the other.
    """
    q = gate.exponents.shape[2]
    operand = low.operand
    intermediate = low.intermediate
    exp = rounding.gpu_exp
    (h, p), (g, n) = inputs.x.shape[2:], inputs.B.shape[2:]
    r, length = h // g, span.stop - span.start
    x_span = inputs.x[span.batch, span.start : span.stop].float()
    # (c, g, r, q, p)
    x = operand(rounding.split_chunks(x_span.reshape(length, g, r, p), q).permute(0, 2, 3, 1, 4))
    B, C = (
        operand(
            rounding.split_chunks(tensor[span.batch, span.start : span.stop].float(), q).transpose(
                1, 2
            )
        )
        for tensor in (inputs.B, inputs.C)
    )  # (c, g, q, n)
    assert gate.dt is not None
    a, dt = (tensor.reshape(-1, g, r, q) for tensor in (gate.exponents, intermediate(gate.dt)))

    causal = torch.ones(q, q, dtype=torch.bool, device=x.device).tril()
    # (c, g, r, q, s)
    decays, CB = gate.decays.reshape(*a.shape, q), torch.where(causal, C @ B.mT, 0.0)[:, :, None]
    rows, outs = min(q, ROWS[x.device.type]), []
    for stop in range(rows, q + 1, rows):
        part = (..., slice(stop - rows, stop), slice(stop))
        decay = intermediate(decays[part])
        scores = intermediate(intermediate(intermediate(CB[part]) * decay) * dt[..., None, :stop])
        outs.append(operand(scores) @ x[..., :stop, :])
    out = torch.cat(outs, -2)

    last = a[..., -1:]
    weights = intermediate(intermediate(exp((last - a).clamp(max=0))) * dt)
    chunk_states = operand(x * weights[..., None]).mT @ B[:, :, None]  # (c, g, r, p, n)
    chunk_decay = exp(last)[..., None]
    state = low.state.reshape(g, r, p, n)
    entering = []
    for c in range(len(chunk_states)):
        entering.append(state)
        state = low.stored(state * chunk_decay[c] + chunk_states[c])
    low.state = state.reshape(h, p, n)
    before = (
        (C @ operand(torch.stack(entering)).flatten(2, 3).mT)
        .reshape(*C.shape[:3], r, p)
        .transpose(2, 3)
    )
    out += before * intermediate(exp(a))[..., None]

    out = out.permute(0, 3, 1, 2, 4).reshape(-1, h, p)[:length]
    if inputs.D is not None:
        out = out + inputs.D.float().reshape(h, -1) * x_span
    if inputs.z is not None:
        out = out * torch.nn.functional.silu(inputs.z[span.batch, span.start : span.stop].float())
    return out.to(inputs.x.dtype)


# --- cost

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def words(sizes: dict[str, int]) -> str:
    """ "80 heads x 64, state 128, 1 group"."""
    groups = "1 group" if sizes["ngroups"] == 1 else f"{sizes['ngroups']:,} groups"
    return f"{sizes['nheads']} heads x {sizes['headdim']}, state {sizes['dstate']}, {groups}"


def flops(sizes: Mapping[str, int], positions: int, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products at that many positions.

    Per position, with (q + 1) / 2 sources per position on average in a chunk of q positions (the
    causal half):

        C B^T                  2 g n (q + 1) / 2
        scores x               2 h p (q + 1) / 2
        state update, C state  2 h p n each

    It grows with q.  The default, the smallest chunk that fills a tensor core's tile, is the least
    that any chunked kernel does, so that no choice of chunk beats the floor.  Decays, skip and gate
    are not counted.
    """
    h, p, n, g = (sizes[name] for name in ("nheads", "headdim", "dstate", "ngroups"))
    sources = chunk_size + 1
    return positions * (g * n * sources + h * p * sources + 4 * h * p * n)


ORACLE = OracleSpec(
    blocks=lambda inputs, length: reference.ssd_blocks(inputs, torch.float64, block=length),
    gate=gate,
    chunks=rounded_chunks,
    bytes_per_position=bytes_per_position,
    chunk_size=lambda inputs: inputs.power_of_two_chunk,
    sizes=lambda inputs: dict(
        zip(GENERATOR.names, (*inputs.x.shape[2:], *reversed(inputs.B.shape[2:])), strict=True)
    ),
    words=words,
    flops=flops,
)


# --- random inputs

SLOWEST, FASTEST = -1.0, -16.0  # A
EDGE_LIMITS = (0.01, 5.0)  # of dt
LARGE_STEP = 4.5  # dt about e^8.5 as large as usually: a chunk's decay underflows
CHUNK_SIZES = (128, 256)  # usual values for unfused kernels


def draw(cell: Cell, device: torch.device) -> kernels.SSDInputs:
    """x, raw dt, B, C, D ~ N(0, 1); A uniform; dt_bias the inverse softplus of a log-uniform step;
    softplus on.

    "contiguous" tensors, or "views" as a model passes them: x, B and C as slices of one tensor, dt
    as a slice of the input projection.  Packed and very short sequences have initial states ~ N(0,
    1) too.
    """
    h, p, n, g = (cell.shape.sizes[name] for name in GENERATOR.names)
    generator = torch.Generator(device).manual_seed(generate.SEED)
    normal = partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
    dt_bias = generate.gate_bias(h, generator)
    x, B, C = generate.empty([(h, p), (g, n), (g, n)], cell, device)
    before = 2 * h * p + 2 * g * n if cell.layout == "views" else 0  # z x B C
    dt = generate.empty([(before + h,)], replace(cell, layout="contiguous"), device)[0][
        ..., before:
    ]
    for tensor in (x, B, C, dt):
        tensor.normal_(generator=generator)
    states, slots = None, None
    if cell.tokens.states or cell.drawn:
        states = normal(cell.tokens.sequences, h, p, n)
        states, slots = generate.pool(states) if cell.drawn else (states, None)
    return kernels.SSDInputs(
        x=x,
        dt=dt,
        A=generate.uniform(h, FASTEST, SLOWEST, generator),
        B=B,
        C=C,
        chunk_size=CHUNK_SIZES[0],
        D=normal(h),
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_states=states,
        state_indices=slots,
        cu_seqlens=generate.cu_seqlens(cell, device),
        state_every=cell.tokens.state_every,
    )


def edges(like: kernels.SSDInputs) -> Iterator[Iterator[kernels.SSDInputs]]:
    """`_edge` of each of `generate.EDGES`; at last inputs without bias, softplus and an upper limit
    of dt.
    """
    yield from (_edge(like, lengths) for lengths in generate.EDGES)
    *_, plain = _edge(like, (320, 320))
    dt = torch.nn.functional.softplus(plain.dt.float() - 3).to(plain.dt.dtype)
    yield iter([replace(plain, dt=dt, dt_bias=None, dt_softplus=False, dt_limit=(0.02, math.inf))])


def _edge(like: kernels.SSDInputs, lengths: generate.Lengths) -> Iterator[kernels.SSDInputs]:
    """P = N, groups, initial states, and `_everything`; then without that; then like `like`; then
    without states.
    """
    n, p, device = like.B.shape[3], like.x.shape[3], like.x.device
    for heads, width, groups, initial in (
        (6, n, 2, True),
        (4, n, 2, True),
        (4, p, 1, True),
        (4, p, 1, False),
    ):
        shape = GENERATOR.shape("edges", heads, width, n, groups)
        states = generate.states(len(lengths), heads, n, width, device=device).mT
        drawn = replace(
            draw(generate.edge_cell(shape, like.x, lengths), device),
            chunk_size=like.chunk_size,
            cu_seqlens=generate.edge_bounds(lengths, device),
            initial_states=states if initial else None,
        )
        yield _everything(drawn) if heads == 6 else drawn


def _everything(drawn: kernels.SSDInputs) -> kernels.SSDInputs:
    """With D of every channel, z, limits of dt that bind, strides, large steps in a head, and x = 0
    in a slow one.
    """
    h, p = drawn.x.shape[2:]
    wide = generate.states(*drawn.x.shape[:3], 2 * p, device=drawn.x.device).to(drawn.x.dtype)
    assert drawn.dt_bias is not None
    drawn.dt_bias[1] += LARGE_STEP
    drawn.x[:, 100:104, 0] = 0
    D = generate.states(h, p, device=drawn.x.device)
    return replace(drawn, z=wide[..., p:], D=D, dt_limit=EDGE_LIMITS)


# --- other libraries


def _mamba_ssm_precisions(dtype: InputDType) -> tuple[kernels.Precision, ...]:
    if dtype == "fp32":  # multiplied in tf32
        return requested_precisions(dtype, "relaxed", ("fp32",))
    passes_any = adapters.mamba_ssm_passes_any_states()
    return requested_precisions(dtype, "exact", (dtype, "fp32") if passes_any else (dtype,))


def _published_precisions(dtype: InputDType) -> tuple[kernels.Precision, ...]:
    """Its "high" setting; of fp16 inputs also its "medium" one, and each with the states of the
    other.
    """
    if dtype == "fp16":
        return requested_precisions(dtype, "all", ("fp32", "fp16"))
    return exact_fp32(dtype)


LIBRARIES = {
    "mamba_ssm": generate.installed(
        "mamba-ssm",
        _mamba_ssm_precisions,
        lambda: adapters.load_mamba_ssm(),
        version=lambda: adapters.mamba_ssm_version(),
    ),
    "selective_state_update": generate.installed(
        "mamba-ssm",
        exact_fp32,
        lambda: servers.load_step(servers.MAMBA_STEP),
        version=lambda: adapters.mamba_ssm_version(),
    ),
    **generate.of_servers(
        lambda dtype: requested_precisions(dtype, "exact", (dtype, "fp32")),
        lambda name: servers.LOADERS[name](name),
    ),
    "published": Library(
        load=lambda checkout: replace(
            adapters.load_published(checkout or Path()),
            version=adapters.published_version(checkout or Path()),
            precisions=_published_precisions,
        ),
        hint="Give a checkout of github.com/RishiAstra/mamba.",
        repository="github.com/RishiAstra/mamba",
    ),
    **generate.of_transformers(
        "mamba_ssm",
        "mamba-ssm",
        lambda dtype: requested_precisions(dtype, "exact", (dtype,)),
        lambda package: adapters.load_model(package),
    ),
}

_WORDS = "{nheads}x{headdim}, N {dstate}, G {ngroups}"
GENERATOR: InputGenerator[kernels.SSDInputs] = InputGenerator(
    form="{nheads}x{headdim}x{dstate}x{ngroups}",
    order="heads x P x N x groups",
    words=_WORDS,
    models={  # as in their configs
        "mamba2-2.7b": (80, 64, 128, 1),
        "granite-4.0-h-small": (128, 64, 128, 1),
        "granite-4.0-h-1b": (48, 64, 128, 1),
        "nemotron-3-nano": (64, 64, 128, 8),
        "nemotron-nano-9b-v2": (128, 80, 128, 8),
        "codestral-mamba-7b": (128, 64, 128, 8),
        "falcon-h1-3b": (32, 128, 256, 1),
        "zamba2-2.7b": (80, 64, 64, 1),
        "zamba2-7b": (112, 64, 64, 2),
    },
    divides=("ngroups", "nheads"),
    largest={"dstate": 256},
    draw=draw,
    ways=generate.POOL,
    edges=edges,
    chunk_sizes=CHUNK_SIZES,
    chunks_itself=frozenset({"fused", "recurrent", "recurrent_in_place", "selective_state_update"}),
    alternatives=("recurrent_in_place",),
    libraries=LIBRARIES,
)


# --- tensor-parallel ranks


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """Every rank takes the same number of heads; groups are divided, too, or one group is on every
    rank.
    """
    heads, groups = sizes["nheads"], sizes["ngroups"]
    if heads % ranks:
        return f"its {heads} heads cannot be divided by {ranks}"
    if groups % ranks and groups != 1:
        return (
            f"its {groups} groups cannot be divided by {ranks}, and only a single group is "
            "repeated on every rank"
        )
    return ""


OPERATOR = Operator(
    name="ssd",
    title="SSD (Mamba-2)",
    layers="Mamba-2",
    load_inputs=lambda: kernels.SSDInputs,
    mixer_sizes={
        "nheads": "num_heads",
        "headdim": "head_dim",
        "dstate": "ssm_state_size",
        "ngroups": "n_groups",
        "chunk_size": "chunk_size",
    },
    words=f"{_WORDS}, chunk {{chunk_size}}",
    stages=STAGES,
    binding=BINDING,
    judged=ORACLE,
    generated=GENERATOR,
    load_tuning=lambda: ssd_tuning.TUNING,
    refusal=refusal,
    divided={
        "x": 2,
        "dt": 2,
        "A": 0,
        "B": 2,
        "C": 2,
        "D": 0,
        "z": 2,
        "dt_bias": 0,
        "initial_states": 1,
    },
)
