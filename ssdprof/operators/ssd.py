"""The operator "ssd".  Imports torch at first use only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdprof import kernels
from ssdprof.core.base import DType, PrecisionRecord, precisions_for
from ssdprof.core.subject import Dims
from ssdprof.errors import BadInputError
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import dtype_name, dtype_named
from ssdprof.operators.generate import Cell, InputDType, InputGenerator, Layout, Library, LoadedLibrary, boundaries
from ssdprof.operators.lazy import LazyModule
from ssdprof.operators.operator import (
    BoundCall,
    CallBinding,
    Cost,
    Form,
    Operator,
    OracleSpec,
    Outline,
    Output,
    Scalar,
    Sharding,
    Stages,
    known_sources,
    run_kernels,
)  # fmt: skip

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ssdprof.kernels.oracle import OutputBlock
    from ssdprof.kernels.ssd import adapters, reference
    from ssdprof.kernels.ssd.inputs import SSDInputs
    from ssdprof.operators import ssd_rounding as rounding
    from ssdprof.operators import ssd_tuning
else:
    torch = LazyModule("torch")
    reference = LazyModule("ssdprof.kernels.ssd.reference")
    rounding = LazyModule("ssdprof.operators.ssd_rounding")
    ssd_tuning = LazyModule("ssdprof.operators.ssd_tuning")
    adapters = LazyModule("ssdprof.kernels.ssd.adapters")


# --- outline

STAGES = Stages(
    order=(
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
    ),
    words={
        "setup.load": "loading the initial state",
        "setup.store": "storing the final state",
        "waiting.chunk": "for a chunk and its gates",
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
        "ahead": "roles that are ahead",
    },
    ahead=frozenset({"ahead"}),
    kernels={
        kernel: implementation
        for implementation, own in {
            "fused": ("_fused_hopper_kernel", "_fused_kernel"),
            "unfused": (
                "_chunk_table_kernel",
                "_chunk_cumsum_kernel",
                "_chunk_state_kernel",
                "_state_passing_kernel",
                "_bmm_chunk_kernel",
                "_chunk_scan_kernel",
            ),
            "recurrent": ("_ssd_recurrent_kernel",),
            "unfused_step": ("_ssd_step_state_kernel", "_ssd_step_output_kernel"),
        }.items()
        for kernel in own
    },
    sources=known_sources("ssd"),
)

OUTLINE = Outline(
    name="ssd",
    title="SSD (Mamba-2)",
    layers="Mamba-2",
    mixer_sizes={
        "nheads": "num_heads",
        "headdim": "head_dim",
        "dstate": "ssm_state_size",
        "ngroups": "n_groups",
        "chunk_size": "chunk_size",
    },
    words="{nheads}x{headdim}, N {dstate}, G {ngroups}, chunk {chunk_size}",
    largest={"dstate": 256},
    stages=STAGES,
)


# --- shapes of models

GRAMMAR = "heads x P x N x groups, such as 80x64x128x1"
_ORDER = "Order: heads x P x N x groups."


@dataclass(frozen=True, kw_only=True)
class SSDShape:
    """The sizes of a layer: x is (b, l, nheads, headdim), B and C are (b, l, ngroups, dstate).

    name: as the user typed it.
    """

    name: str
    nheads: int
    headdim: int
    dstate: int
    ngroups: int

    def __str__(self) -> str:
        return f"{self.nheads}x{self.headdim}, N {self.dstate}, G {self.ngroups}"


_BY_MODEL = {  # H, P, N, G, as in the models' configs
    "mamba2-2.7b": (80, 64, 128, 1),
    "granite-4.0-h-small": (128, 64, 128, 1),
    "granite-4.0-h-1b": (48, 64, 128, 1),
    "nemotron-3-nano": (64, 64, 128, 8),
    "nemotron-nano-9b-v2": (128, 80, 128, 8),
    "codestral-mamba-7b": (128, 64, 128, 8),
    "falcon-h1-3b": (32, 128, 256, 1),
    "zamba2-2.7b": (80, 64, 64, 1),
    "zamba2-7b": (112, 64, 64, 2),
}
SHAPES = {
    name: SSDShape(name=name, nheads=h, headdim=p, dstate=n, ngroups=g) for name, (h, p, n, g) in _BY_MODEL.items()
}


def parse(text: str) -> SSDShape | None:
    """ "80x64x128x1": heads x P x N x groups; None if it has another form.  BadInputError for impossible sizes."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,5})x(\d{1,5})", text)
    if match is None:
        return None
    nheads, headdim, dstate, ngroups = map(int, match.groups())
    if not min(nheads, headdim, dstate, ngroups) or nheads % ngroups:
        raise BadInputError(
            f"{text} is not an SSD shape: sizes must be positive, and groups must divide heads.", _ORDER
        )
    if dstate > OUTLINE.largest["dstate"]:
        raise BadInputError(f"{text} is not measured: N is at most {OUTLINE.largest['dstate']}.", _ORDER)
    return SSDShape(name=text, nheads=nheads, headdim=headdim, dstate=dstate, ngroups=ngroups)


# --- how a model calls it


def bind(
    mixer: nn.Module,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    """The call of `mixer` as inputs; arguments of its forward that have no effect on the operator are dropped."""
    low, high = dt_limit
    inputs = kernels.SSDInputs(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=(float(low), float(high)),
        initial_states=initial_states,
    )
    return BoundCall(inputs, return_final_states, _limit_remark(mixer, inputs.dt_limit))


def _limit_remark(mixer: nn.Module, passed: tuple[float, float]) -> str:
    """A sentence if the config's limits of dt differ from those that the model passes; else empty."""
    stated = getattr(getattr(mixer, "config", None), "time_step_limit", None)
    if stated is None or tuple(map(float, stated)) == passed:
        return ""
    low, high = map(float, stated)
    return (
        f"The model calls the operator with dt_limit ({passed[0]:g}, {passed[1]:g}), and these limits were used; its "
        f"config states time_step_limit ({low:g}, {high:g}), which other runtimes use."
    )


def bind_step(
    mixer: nn.Module,
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
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    """A call of `mixer` for one token: x (b, h, p), B and C (b, g, n), and dt, A, D and dt_bias repeated over channels.

    The state is updated in place, so only the output is returned.  The limits of dt are not among the
    arguments: a model applies them to prompts only.
    """
    inputs = kernels.SSDInputs(
        x=x[:, None],
        dt=_of_heads("dt", dt, 2)[:, None],
        A=_of_heads("A", A, 1),
        B=B[:, None],
        C=C[:, None],
        chunk_size=getattr(mixer, "chunk_size", kernels.SSDInputs.chunk_size),
        D=None if D is None else _of_heads("D", D, 1),
        z=None if z is None else z[:, None],
        dt_bias=None if dt_bias is None else _of_heads("dt_bias", dt_bias, 1),
        dt_softplus=dt_softplus,
        initial_states=state,
    )
    return BoundCall(inputs, wants_final_state=False)


def _of_heads(name: str, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The first `dims` dimensions of a tensor that is the same over the others.  ValueError if it is not."""
    first = tensor
    for _ in range(tensor.ndim - dims):
        first = first.select(-1, 0)
    if any(tensor.stride()[dims:]):  # not expanded
        repeated = first.reshape(*first.shape, *(1 for _ in tensor.shape[dims:])).expand_as(tensor)
        if not torch.equal(tensor, repeated):
            raise ValueError(f"{name} differs between the channels of a head")
    return first


def replacement(inputs: SSDInputs) -> Output:
    """Our kernels on a GPU, the chunked form in fp32 elsewhere."""
    if inputs.x.device.type == "cuda":
        return run_kernels("ssd", inputs, inputs.x.device)
    out, final_states = reference.ssd_chunked(inputs, dtype=torch.float32)
    return out.to(inputs.x.dtype), final_states


def scalars(inputs: SSDInputs) -> dict[str, Scalar]:
    """The scalars in JSON, which has no infinity: None means no limit of dt."""
    found = tensors.scalars(inputs)
    low, high = (limit if math.isfinite(limit) else None for limit in found.pop("dt_limit"))
    return found | {"dt_limit_low": low, "dt_limit_high": high}


def arguments(stored: dict[str, Scalar]) -> dict[str, Any]:
    """The inverse of `scalars`."""
    found: dict[str, Any] = dict(stored)
    if "dt_limit_low" in found:
        low, high = found.pop("dt_limit_low"), found.pop("dt_limit_high", None)
        found["dt_limit"] = (-math.inf if low is None else low, math.inf if high is None else high)
    return found


BINDING = CallBinding(
    function="mamba2_chunk_scan",
    step="mamba2_selective_state_update",
    bind=bind,
    bind_step=bind_step,
    refused=("seq_idx", "cu_seqlens", "return_varlen_states"),
    views=("x", "B", "C"),
    per_position=("dt", "z"),
    gate_bytes=lambda item: item,  # dt
    replacement=replacement,
    scalars=scalars,
    arguments=arguments,
)


# --- the oracle


def forms(inputs: SSDInputs) -> tuple[Form, Form]:
    """out is as x; final states are (sequences, h, p, n) in fp32."""
    return (
        Form(shape=tuple(inputs.x.shape), dtype=inputs.x.dtype),
        Form(shape=inputs.states_shape, dtype=torch.float32),
    )


def blocks(inputs: SSDInputs, length: int) -> Iterator[OutputBlock]:
    """The oracle, `length` positions at a time."""
    return reference.ssd_blocks(inputs, torch.float64, block=length)


def bytes_per_position(inputs: SSDInputs) -> int:
    """The rounded form holds about six fp32 rows of scores (h, chunk_size); the oracle and the sums hold about ten fp64
    rows of (h, p + 64 + p n / 64), as `ssd_blocks` explains."""
    h, p = inputs.x.shape[2:]
    n, q = inputs.B.shape[3], inputs.power_of_two_chunk
    return h * (6 * 4 * q + 10 * 8 * (p + 64 + p * n // 64))


ORACLE = OracleSpec(
    forms=forms,
    blocks=blocks,
    gate=lambda inputs, span: rounding.SSDGate.of(inputs, span),
    rounded=lambda inputs, precision: rounding.RoundedSSD(inputs, precision),
    bytes_per_position=bytes_per_position,
    chunk_size=lambda inputs: inputs.power_of_two_chunk,
)


# --- cost

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def dims(inputs: SSDInputs) -> Dims:
    """A call's sizes; `sizes` has nheads, headdim, dstate and ngroups."""
    batch, seqlen, nheads, headdim = inputs.x.shape
    ngroups, dstate = inputs.B.shape[2:]
    groups = "1 group" if ngroups == 1 else f"{ngroups:,} groups"
    return Dims(
        operator="ssd",
        batch=batch,
        seqlen=seqlen,
        chunk_size=inputs.chunk_size,
        dtype=dtype_name(inputs.x.dtype),
        sizes={"nheads": nheads, "headdim": headdim, "dstate": dstate, "ngroups": ngroups},
        words=f"{nheads} heads x {headdim}, state {dstate}, {groups}",
    )


def bytes_moved(inputs: SSDInputs) -> int:
    """Every input read once; out and the fp32 final states written once."""
    return tensors.nbytes(inputs) + sum(form.nbytes for form in forms(inputs))


def flops(dims: Dims, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products.

    Per position, with (q + 1) / 2 sources per position on average in a chunk of q positions (the causal half):

        C B^T                  2 g n (q + 1) / 2
        scores x               2 h p (q + 1) / 2
        state update, C state  2 h p n each

    It grows with q.  The default, the smallest chunk that fills a tensor core's tile, is the least that any chunked
    kernel does, so that no choice of chunk beats the floor.  Decays, skip and gate are not counted.
    """
    h, p, n, g = (dims.sizes[name] for name in ("nheads", "headdim", "dstate", "ngroups"))
    sources = chunk_size + 1
    return dims.batch * dims.seqlen * (g * n * sources + h * p * sources + 4 * h * p * n)


COST = Cost(dims=dims, bytes_moved=bytes_moved, flops=flops)


# --- random inputs

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
    return kernels.SSDInputs(
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


# --- other libraries


def _mamba_ssm(_checkout: Path | None) -> LoadedLibrary:
    return LoadedLibrary(
        implementation=adapters.load_mamba_ssm(),
        version=adapters.mamba_ssm_version(),
        precisions=lambda dtype: _exact(
            *dict.fromkeys((dtype, "fp32")) if adapters.mamba_ssm_passes_any_states() else (dtype,)
        ),
    )


def _selective_state_update(_checkout: Path | None) -> LoadedLibrary:
    return LoadedLibrary(
        implementation=adapters.load_selective_state_update(),
        version=adapters.mamba_ssm_version(),
        precisions=lambda _dtype: _exact("fp32"),
    )


def _published(checkout: Path | None) -> LoadedLibrary:
    assert checkout is not None
    return LoadedLibrary(
        implementation=adapters.load_published(checkout),
        version=adapters.published_version(checkout),
        precisions=_published_precisions,
    )


def _published_precisions(dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    """Its "high" setting; of fp16 inputs also its "medium" one, and each with the states of the other."""
    if dtype != "fp16":
        return _exact("fp32")
    return precisions_for(dtype, "all", ("fp32", "fp16"))


def _exact(*states: DType) -> tuple[PrecisionRecord, ...]:
    return tuple(PrecisionRecord(intermediates="exact", state_dtype=state) for state in states)


_MAMBA_SSM_HINT = "pip install mamba-ssm, or leave it out."
LIBRARIES = {
    "mamba_ssm": Library(load=_mamba_ssm, hint=_MAMBA_SSM_HINT),
    "selective_state_update": Library(load=_selective_state_update, hint=_MAMBA_SSM_HINT),
    "published": Library(
        load=_published,
        hint="Give a checkout of github.com/RishiAstra/mamba.",
        from_checkout=True,
        where="github.com/RishiAstra/mamba",
    ),
}


GENERATOR = InputGenerator(
    shapes=SHAPES,
    parse=parse,
    grammar=GRAMMAR,
    draw=draw,
    chunk_sizes=CHUNK_SIZES,
    with_chunk_size=lambda inputs, size: replace(inputs, chunk_size=size),
    chunks_itself=frozenset({"fused", "recurrent", "recurrent_in_place", "selective_state_update"}),
    alternatives=("recurrent_in_place",),
    libraries=LIBRARIES,
)


# --- tensor-parallel ranks


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """Every rank takes the same number of heads; groups are divided, too, or one group is on every rank."""
    heads, groups = sizes["nheads"], sizes["ngroups"]
    if heads % ranks:
        return f"its {heads} heads cannot be divided by {ranks}"
    if groups % ranks and groups != 1:
        return f"its {groups} groups cannot be divided by {ranks}, and only a single group is repeated on every rank"
    return ""


def first_rank(inputs: SSDInputs, ranks: int) -> SSDInputs:
    """The first heads with their groups."""
    heads, groups = inputs.x.shape[2] // ranks, max(1, inputs.B.shape[2] // ranks)

    def first(tensor: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return None if tensor is None else tensor.narrow(dim, 0, heads)

    return replace(
        inputs,
        x=inputs.x[:, :, :heads],
        dt=inputs.dt[:, :, :heads],
        A=inputs.A[:heads],
        B=inputs.B[:, :, :groups],
        C=inputs.C[:, :, :groups],
        D=first(inputs.D, 0),
        z=first(inputs.z, 2),
        dt_bias=first(inputs.dt_bias, 0),
        initial_states=first(inputs.initial_states, 1),
    )


SHARDING = Sharding(refusal=refusal, first_rank=first_rank)


OPERATOR = Operator(
    outline=OUTLINE,
    load_inputs=lambda: kernels.SSDInputs,
    binding=BINDING,
    cost=COST,
    oracle=ORACLE,
    generator=GENERATOR,
    load_tuning=lambda: ssd_tuning.TUNING,
    sharding=SHARDING,
)
