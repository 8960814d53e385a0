"""The operator "gdn".  Imports torch at first use only."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ssdprof import kernels
from ssdprof.core.base import EXACT_FP32, PrecisionRecord
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
    Sharding,
    Stages,
    known_sources,
    run_kernels,
)  # fmt: skip

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ssdprof.kernels import adapters as packages
    from ssdprof.kernels.gdn import adapters, reference
    from ssdprof.kernels.gdn.inputs import GDNInputs
    from ssdprof.kernels.oracle import OutputBlock
    from ssdprof.operators import gdn_rounding as rounding
    from ssdprof.operators import gdn_tuning
else:
    torch = LazyModule("torch")
    reference = LazyModule("ssdprof.kernels.gdn.reference")
    rounding = LazyModule("ssdprof.operators.gdn_rounding")
    gdn_tuning = LazyModule("ssdprof.operators.gdn_tuning")
    adapters = LazyModule("ssdprof.kernels.gdn.adapters")
    packages = LazyModule("ssdprof.kernels.adapters")


# --- outline

STAGES = Stages(
    order=(
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
    ),
    words={
        "setup.load": "loading the initial state",
        "setup.store": "storing the final state",
        "waiting.chunk": "for a chunk and its gates",
        "waiting.inverse": "for the inverse",
        "waiting.weights": "for the weights of the output",
        "waiting.update": "for the weights of the update",
        "ahead": "roles that are ahead",
        "chunk_state.residual": "residual",
        "chunk_state.update": "update of the state",
    },
    ahead=frozenset({"ahead"}),
    kernels={
        kernel: implementation
        for implementation, own in {
            "unfused": (
                "_gdn_qk_l2norm_kernel",
                "_gdn_gate_cumsum_kernel",
                "_gdn_scaled_dot_kkt_kernel",
                "_gdn_solve_tril_kernel",
                "_gdn_recompute_w_u_kernel",
                "_gdn_chunk_state_kernel",
                "_gdn_chunk_output_kernel",
            ),
            "fused": (
                "_gdn_factors_kernel",
                "_gdn_scan_kernel",
                "_prep_kernel",
                "_parts_kernel",
                "_combine_kernel",
                "_hopper_kernel",
            ),
            "recurrent": ("_gdn_recurrent_kernel",),
            "unfused_step": ("_gdn_step_write_kernel", "_gdn_step_state_kernel", "_gdn_step_output_kernel"),
        }.items()
        for kernel in own
    },
    sources=known_sources("gdn"),
)

OUTLINE = Outline(
    name="gdn",
    title="GDN",
    layers="Gated-DeltaNet",
    mixer_sizes={
        "key_heads": "num_k_heads",
        "value_heads": "num_v_heads",
        "key_dim": "head_k_dim",
        "value_dim": "head_v_dim",
    },
    words="{key_heads}/{value_heads} heads, K {key_dim}, V {value_dim}",
    largest={"key_dim": 256, "value_dim": 256},
    stages=STAGES,
)


# --- shapes of models

GRAMMAR = "key heads / value heads x K x V, such as 16/32x128x128"
_ORDER = "Order: key heads / value heads x K x V."


@dataclass(frozen=True, kw_only=True)
class GDNShape:
    """The sizes of a layer: q and k are (B, T, key_heads, key_dim), v is (B, T, value_heads, value_dim).

    name: as the user typed it.  largest_beta: 2 if eigenvalues may be negative.
    """

    name: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    largest_beta: float = 1.0

    def __str__(self) -> str:
        return f"{self.key_heads}/{self.value_heads} heads, K {self.key_dim}, V {self.value_dim}"


_BY_MODEL = {  # H, HV, K, V, largest beta, as in the models' configs
    "qwen3-next-80b": (16, 32, 128, 128, 1.0),
    "qwen3.5-0.8b": (16, 16, 128, 128, 1.0),
    "qwen3.5-9b": (16, 32, 128, 128, 1.0),
    "qwen3.5-27b": (16, 48, 128, 128, 1.0),
    "qwen3.5-397b": (16, 64, 128, 128, 1.0),
    "qwen3.5-397b-tp8": (2, 8, 128, 128, 1.0),  # one rank of eight
    "olmo-hybrid-7b": (30, 30, 96, 192, 2.0),
}
SHAPES = {
    name: GDNShape(name=name, key_heads=h, value_heads=hv, key_dim=k, value_dim=v, largest_beta=beta)
    for name, (h, hv, k, v, beta) in _BY_MODEL.items()
}


def parse(text: str) -> GDNShape | None:
    """ "16/32x128x128": key heads / value heads x K x V; None if it has another form.

    Raises BadInputError for impossible sizes.
    """
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})x(\d{1,5})x(\d{1,5})", text)
    if match is None:
        return None
    key_heads, value_heads, key_dim, value_dim = map(int, match.groups())
    if not min(key_heads, value_heads, key_dim, value_dim) or value_heads % key_heads:
        raise BadInputError(
            f"{text} is not a GDN shape: sizes must be positive, and key heads must divide value heads.", _ORDER
        )
    shape = GDNShape(name=text, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)
    if any(getattr(shape, name) > most for name, most in OUTLINE.largest.items()):
        largest = OUTLINE.largest
        raise BadInputError(
            f"{text} is not measured: K is at most {largest['key_dim']}, V at most {largest['value_dim']}.", _ORDER
        )
    return shape


# --- how a model calls it


def bind(
    mixer: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **dropped: Any,  # noqa: ARG001
) -> BoundCall:
    """The call of `mixer` as inputs; arguments of its forward that have no effect on the operator are dropped."""
    copies = _head_copies(mixer, q, k, v)
    inputs = kernels.GDNInputs(
        q=q[:, :, ::copies],
        k=k[:, :, ::copies],
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )
    remark = ""
    if copies > 1:
        remark = (
            f"The model repeats each query and key head {copies} times before the operator; each was taken once, as "
            "kernels take it."
        )
    return BoundCall(inputs, output_final_state, remark)


def _head_copies(mixer: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """How often the mixer repeated each q and k head before the call, from the number of its own key heads.

    Up to transformers 5.22 mixers repeat them to the number of value heads; kernels take them once.  The strides of
    such a capture are those of every n-th head.  Raises ValueError if the heads are not copies.
    """
    own_heads = getattr(mixer, "num_k_heads", q.shape[2])
    if q.shape[2] == own_heads or q.shape[2] != v.shape[2] or v.shape[2] % own_heads:
        return 1
    copies = v.shape[2] // own_heads
    for tensor in (q, k):
        per_head = tensor.view(*tensor.shape[:2], own_heads, copies, tensor.shape[3])
        if not all(torch.equal(per_head[:, :, :, 0], per_head[:, :, :, i]) for i in range(1, copies)):
            raise ValueError(f"q and k have {q.shape[2]} heads that are not copies of {own_heads}")
    return copies


def replacement(inputs: GDNInputs) -> Output:
    """Our kernels on a GPU, the chunked form in fp32 elsewhere."""
    if inputs.v.device.type == "cuda":
        return run_kernels("gdn", inputs, inputs.v.device)
    out, final_states = reference.gdn_chunked(inputs, dtype=torch.float32)
    return out.to(inputs.v.dtype), final_states


BINDING = CallBinding(
    function="torch_chunk_gated_delta_rule",
    step="torch_recurrent_gated_delta_rule",
    bind=bind,
    bind_step=bind,
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
    gate_bytes=lambda item: item + 4,  # beta, and g in fp32
    replacement=replacement,
)


# --- the oracle


def forms(inputs: GDNInputs) -> tuple[Form, Form]:
    """out is as v; final states are (sequences, HV, K, V) in fp32."""
    return (
        Form(shape=tuple(inputs.v.shape), dtype=inputs.v.dtype),
        Form(shape=inputs.states_shape, dtype=torch.float32),
    )


def blocks(inputs: GDNInputs, length: int) -> Iterator[OutputBlock]:
    """The oracle, `length` positions at a time."""
    return reference.gdn_blocks(inputs, torch.float64, block=length)


def bytes_per_position(inputs: GDNInputs) -> int:
    """The rounded form holds about eight fp32 rows of K, V or CHUNK; the oracle about ten fp64 rows of K + V + 64."""
    heads, value_dim = inputs.v.shape[2:]
    width = inputs.q.shape[3] + value_dim + rounding.CHUNK
    return int(heads * (8 * 4 * width + 10 * 8 * width))


ORACLE = OracleSpec(
    forms=forms,
    blocks=blocks,
    gate=lambda inputs, span: rounding.GDNGate.of(inputs, span),
    rounded=lambda inputs, precision: rounding.RoundedGDN(inputs, precision),
    bytes_per_position=bytes_per_position,
    chunk_size=lambda _inputs: rounding.CHUNK,
)


# --- cost

SMALLEST_CHUNK = 16  # the edge of a tensor core's tile


def dims(inputs: GDNInputs) -> Dims:
    """A call's sizes; `sizes` has key_heads, value_heads, key_dim and value_dim."""
    batch, seqlen, key_heads, key_dim = inputs.q.shape
    value_heads, value_dim = inputs.v.shape[2:]
    return Dims(
        operator="gdn",
        batch=batch,
        seqlen=seqlen,
        chunk_size=inputs.chunk_size,
        dtype=dtype_name(inputs.q.dtype),
        sizes={"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim},
        words=f"{key_heads}/{value_heads} heads, K {key_dim}, V {value_dim}",
    )


def bytes_moved(inputs: GDNInputs) -> int:
    """Every input read once; out and the fp32 final states written once."""
    return tensors.nbytes(inputs) + sum(form.nbytes for form in forms(inputs))


def flops(dims: Dims, chunk_size: int = SMALLEST_CHUNK) -> int:
    """Multiplications and additions of the chunked form's matrix products.

    Per position, with (C + 1) / 2 sources per position on average in a chunk of C positions (the causal half):

        k k^T, q k^T                       2 H K (C + 1) / 2 each
        the inverse, times what is written, and scores times what is written
                                           2 HV V (C + 1) / 2 each
        k S, q S, and the state's update   2 HV K V each

    It grows with C.  The default, the smallest chunk that fills a tensor core's tile, is the least that any chunked
    kernel does, so that no choice of chunk beats the floor.  The inverse itself, decays and norms are not counted.
    """
    names = ("key_heads", "value_heads", "key_dim", "value_dim")
    key_heads, heads, key_dim, value_dim = (dims.sizes[name] for name in names)
    sources = chunk_size + 1
    per_position = 2 * sources * (key_heads * key_dim + heads * value_dim) + 6 * heads * key_dim * value_dim
    return dims.batch * dims.seqlen * per_position


COST = Cost(dims=dims, bytes_moved=bytes_moved, flops=flops)


# --- random inputs

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
    g = -A * torch.nn.functional.softplus(normal(batch, length, heads) + dt_bias)
    if QUARTER_UNGATED in cell.drawn:
        g[..., ::4] = 0
    if NORMALISED in cell.drawn:
        for tensor in (q, k):
            tensor.copy_(torch.nn.functional.normalize(tensor.float(), dim=-1))
    states = (cell.tokens.sequences, heads, shape.key_dim, shape.value_dim)
    return kernels.GDNInputs(
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


# --- other libraries

_NO_DISPATCH = "FLA_DISABLE_BACKEND_DISPATCH"  # fla reads it when it is imported


def _fla(_checkout: Path | None) -> LoadedLibrary:
    return LoadedLibrary(
        implementation=adapters.load_fla(_fla_operator()), version=adapters.fla_version(), precisions=_states_as_inputs
    )


def _fla_recurrent(_checkout: Path | None) -> LoadedLibrary:
    return LoadedLibrary(
        implementation=adapters.load_fla_recurrent(_fla_operator()),
        version=adapters.fla_version(),
        precisions=_fp32_states,
    )


def _fla_operator() -> ModuleType:
    """fla's operator, with its calls to other libraries turned off, so that fla's own kernels are timed.

    Raises ImportError if it is not installed, and if it was imported before with these calls on.
    """
    if adapters.FLA in sys.modules and os.environ.get(_NO_DISPATCH) != "1":
        raise ImportError(f"fla was imported before {_NO_DISPATCH}=1 was set, and may call other libraries")
    os.environ[_NO_DISPATCH] = "1"
    return import_module(adapters.FLA)


def _flash_qla(_checkout: Path | None) -> LoadedLibrary:
    return LoadedLibrary(
        implementation=adapters.load_flash_qla(), version=packages.package_version("flash_qla"), precisions=_fp32_states
    )


def _flashinfer(_checkout: Path | None) -> LoadedLibrary:
    version = packages.package_version("flashinfer-python")
    return LoadedLibrary(implementation=adapters.load_flashinfer(), version=version, precisions=_fp32_states)


def _states_as_inputs(dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    return (PrecisionRecord(intermediates="exact", state_dtype=dtype),)


def _fp32_states(_dtype: InputDType) -> tuple[PrecisionRecord, ...]:
    return (EXACT_FP32,)


_FLA_HINT = "pip install flash-linear-attention, or leave it out."
LIBRARIES = {
    "fla": Library(load=_fla, hint=_FLA_HINT),
    "fla_recurrent": Library(load=_fla_recurrent, hint=_FLA_HINT),
    "flash_qla": Library(load=_flash_qla, hint="pip install flash-qla, or leave it out."),
    "flashinfer": Library(load=_flashinfer, hint="pip install flashinfer-python, or leave it out."),
}


GENERATOR = InputGenerator(
    shapes=SHAPES,
    parse=parse,
    grammar=GRAMMAR,
    draw=draw,
    ways=WAYS,
    alternatives=("fused_portable",),
    libraries=LIBRARIES,
)


# --- tensor-parallel ranks


def refusal(sizes: Mapping[str, int], ranks: int) -> str:
    """Every rank takes the same number of key heads, with their value heads."""
    heads = sizes["key_heads"]
    return f"its {heads} key heads cannot be divided by {ranks}" if heads % ranks else ""


def first_rank(inputs: GDNInputs, ranks: int) -> GDNInputs:
    """The first key heads with their value heads."""
    keys, values = inputs.q.shape[2] // ranks, inputs.v.shape[2] // ranks
    state = inputs.initial_state
    return replace(
        inputs,
        q=inputs.q[:, :, :keys],
        k=inputs.k[:, :, :keys],
        v=inputs.v[:, :, :values],
        g=inputs.g[:, :, :values],
        beta=inputs.beta[:, :, :values],
        initial_state=None if state is None else state[:, :values],
    )


SHARDING = Sharding(refusal=refusal, first_rank=first_rank)


OPERATOR = Operator(
    outline=OUTLINE,
    load_inputs=lambda: kernels.GDNInputs,
    binding=BINDING,
    cost=COST,
    oracle=ORACLE,
    generator=GENERATOR,
    load_tuning=lambda: gdn_tuning.TUNING,
    sharding=SHARDING,
)
