"""The GDN kernels on a GPU: sizes of models, flash-linear-attention's own test cases, graphs, repeated calls."""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from gdn_cases import EXACT, Case
from sanitizer_target import on_the_gpu
from test_gdn_fused import CASES, CONFIGS, LIMITS, TINY, assert_bitwise, assert_close, fused

from ssdprof.kernels.gdn.compat import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ssdprof.kernels.gdn.config import GDNPortableConfig
from ssdprof.kernels.gdn.fused import run
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.recurrent import gdn_recurrent
from ssdprof.kernels.gdn.reference import gdn_chunked, gdn_recurrence

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN = dict(key_heads=4, values_per_key=2, key_dim=128, value_dim=128)
SIZES = {
    "qwen": QWEN,
    "olmo, beta to 2": dict(key_heads=3, key_dim=96, value_dim=192, largest_beta=2.0),
    **{f"{dim}": dict(values_per_key=2, key_dim=dim, value_dim=dim) for dim in (16, 60, 64, 100, 120, 192, 256)},
    "256/16": dict(key_dim=256, value_dim=16),
    "16/256": dict(key_dim=16, value_dim=256),
}
WIDE = GDNPortableConfig()  # slices of 128 of V, as in long calls
FINE = {"wide": WIDE, "wide, cut": replace(WIDE, segment=2), "narrow, cut": replace(CONFIGS["cut"] or TINY, chunk=64)}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", CASES)
def test_the_interpreters_cases(case: str, config: str) -> None:
    """A decay is the exponential of a difference of two fp32 sums, so its relative error grows with the sums."""
    inputs = on_the_gpu(CASES[case].inputs())
    largest_sum = float(inputs.g.abs().max()) * 64 * math.log2(math.e)
    assert_close(fused(inputs, CONFIGS[config]), gdn_recurrence(inputs), LIMITS[FP32] + 2**-24 * largest_sum)


@pytest.mark.parametrize("lengths", [None, (0, 15, 700, 0, 1285)], ids=["", "packed"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, dtype: torch.dtype, lengths: tuple[int, ...] | None) -> None:
    inputs = on_the_gpu(Case(length=2000, lengths=lengths, initial_state=True, dtype=dtype, **SIZES[size]).inputs())
    expected = gdn_chunked(inputs)
    assert_close(fused(inputs), expected, LIMITS[dtype])
    assert_close(gdn_recurrent(inputs), expected, LIMITS[dtype])


@pytest.mark.parametrize("config", FINE)
@pytest.mark.parametrize("size", ["qwen", "olmo, beta to 2", "60"])
def test_cuts_of_wide_and_narrow_slices(size: str, config: str) -> None:
    case = Case(length=1000, initial_state=True, dtype=BF16, **SIZES[size])  # type: ignore[arg-type]
    inputs = on_the_gpu(case.inputs())
    assert_close(fused(inputs, FINE[config]), gdn_chunked(inputs), LIMITS[BF16])


@pytest.mark.parametrize("length", [1, 12, 300, 5000])
def test_a_cuda_graph_replays_a_call(length: int) -> None:
    inputs = on_the_gpu(Case(length=length, initial_state=True, dtype=BF16, **QWEN).inputs())  # type: ignore[arg-type]
    expected = fused(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused(inputs)
    for _ in range(20):
        graph.replay()
        assert_bitwise(found, expected)


def test_batch_invariant() -> None:
    from ssdprof.kernels import gdn_fused

    inputs = on_the_gpu(Case(length=5000, batch=5, dtype=BF16, **QWEN).inputs())  # type: ignore[arg-type]
    tensors = [inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta]
    together = gdn_fused(*tensors, use_qk_l2norm=True, batch_invariant=True)
    alone = gdn_fused(*(one[3:4] for one in tensors), use_qk_l2norm=True, batch_invariant=True)
    assert_bitwise(alone, GDNOutput(together.out[3:4], together.final_states[3:4]))


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_batch_invariant_packs(kernel: str) -> None:
    """QWEN's K = V = 128 runs the Hopper kernel on a Hopper GPU; K = V = 60 never does."""
    dims = QWEN if kernel == "hopper" else QWEN | {"key_dim": 60, "value_dim": 60}
    inputs = on_the_gpu(Case(lengths=(5000, 0, 70, 3000), dtype=BF16, **dims).inputs())  # type: ignore[arg-type]
    together = run(inputs, batch_invariant=True)
    tensors = {name: getattr(inputs, name)[:, :5000] for name in ("q", "k", "v", "g", "beta")}
    first = replace(inputs, **tensors, cu_seqlens=torch.tensor([0, 5000], device="cuda"))
    assert_bitwise(run(first, batch_invariant=True), GDNOutput(together.out[:, :5000], together.final_states[:1]))


# Sizes and limits of flash-linear-attention's tests/ops/test_gdn.py: batch, T, H, HV, K = V, scale, divisor of g, share
# of positions without a gate, normalised inside.  Keys are uniform in [0, 1), so that all have a similar direction.
FLA_CHUNK = [
    (4, 1024, 4, 4, 128, 0.1, 1, 1.0, False),
    (2, 75, 4, 4, 64, 1, 0.01, 0, False),
    (2, 500, 3, 3, 60, 1, 1, 0, False),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False),
    (3, 1024, 4, 4, 100, 1, 0.1, 0, False),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True),
    (2, 1500, 4, 4, 128, 0.1, 10, 0, False),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False),
    (2, 256, 2, 4, 64, 1, 1, 0, False),
    (2, 512, 2, 8, 64, 1, 0.1, 0, True),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, False),
]
FLA_RECURRENT = [  # batch, T, H, HV, K = V, scale, divisor of g, dtype
    (1, 63, 1, 1, 64, 1, 1, FP32),
    (2, 500, 4, 4, 60, 1, 1, FP32),
    (2, 1000, 2, 8, 128, 1, 0.1, FP32),
    (3, 1024, 2, 2, 128, 0.1, 1, FP32),
    (4, 1024, 3, 3, 128, 1, 10, FP32),
    (4, 2048, 4, 4, 64, 0.1, 1, FP32),
    (2, 1024, 4, 4, 128, 1, 0.1, FP16),
    (2, 1024, 4, 8, 128, 1, 10, FP16),
]
FLA_LENGTHS = [(15,), (256, 244, 500), (15, 85, 200, 900, 800), (8192,)]


def drawn(
    batch: int,
    length: int,
    heads: int,
    value_heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    uniform: bool,
    **options: Any,
) -> GDNInputs:
    """Uniform or normal q, k and v; g is the log sigmoid of a uniform number, divided by `divisor`."""
    torch.manual_seed(42)
    draw = torch.rand if uniform else torch.randn
    q, k = (draw(batch, length, heads, dim, device="cuda") for _ in range(2))
    v = draw(batch, length, value_heads, dim, device="cuda")
    gate, raw, kept = (torch.rand(batch, length, value_heads, device="cuda") for _ in range(3))
    g = torch.nn.functional.logsigmoid(gate) / options.get("divisor", 1) * (kept > options.get("ungated", 0))
    inside = bool(options.get("inside", False))
    if not inside:
        q, k = (torch.nn.functional.normalize(one, dim=-1) for one in (q, k))
    lengths = options.get("lengths")
    sequences = batch if lengths is None else len(lengths)
    return GDNInputs(
        q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), g=g, beta=raw.sigmoid(), use_qk_l2norm=inside,
        scale=float(options.get("scale", 1)),
        initial_state=torch.randn(sequences, value_heads, dim, dim, device="cuda") if options.get("state") else None,
        cu_seqlens=None if lengths is None else torch.tensor([0, *accumulate(lengths)], device="cuda"),
    )  # fmt: skip


def assert_fla_close(inputs: GDNInputs, function: Any, limit: float) -> None:
    """The RMS error over the RMS, for the whole output and the whole final state."""
    out, final_state = function(
        inputs.q, inputs.k, inputs.v, g=inputs.g, beta=inputs.beta, scale=inputs.scale,
        initial_state=inputs.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
        cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    for ours, expected in zip((out, final_state), gdn_chunked(inputs), strict=True):
        error = (ours.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error <= limit, float(error)


@pytest.mark.parametrize("case", FLA_CHUNK, ids=str)
def test_flas_chunk_cases(case: Any) -> None:
    *sizes, scale, divisor, ungated, inside = case
    inputs = drawn(*sizes, FP16, uniform=True, scale=scale, divisor=divisor, ungated=ungated, inside=inside)
    assert_fla_close(inputs, chunk_gated_delta_rule, 0.005)


@pytest.mark.parametrize("dim", [60, 64, 100, 128])
@pytest.mark.parametrize("lengths", FLA_LENGTHS, ids=str)
def test_flas_packs(lengths: tuple[int, ...], dim: int) -> None:
    inputs = drawn(1, sum(lengths), 4, 4, dim, FP16, uniform=True, lengths=lengths, state=True, inside=True)
    assert_fla_close(inputs, chunk_gated_delta_rule, 0.005)


@pytest.mark.parametrize("case", FLA_RECURRENT, ids=str)
def test_flas_recurrent_cases(case: Any) -> None:
    *sizes, scale, divisor, dtype = case
    inputs = drawn(*sizes, dtype, uniform=False, scale=scale, divisor=divisor, state=True, inside=True)
    assert_fla_close(inputs, fused_recurrent_gated_delta_rule, 0.002)


@pytest.mark.parametrize("kind", ["no gate", "collinear, beta 1.9"])
def test_hard_inputs_of_olmo(kind: str) -> None:
    """K 96, V 192, beta up to 2, and keys that make a chunk's system ill-conditioned: as accurate as unfused."""
    from ssdprof.kernels import get

    collinear, gate = (0.9, 0.01) if kind != "no gate" else (0.0, 0.0)
    case = Case(length=4096, key_heads=3, key_dim=96, value_dim=192, dtype=BF16, largest_beta=2.0)
    inputs = on_the_gpu(case.but(collinear=collinear, gate=gate).inputs())
    expected, unfused = gdn_chunked(inputs), get("gdn", "unfused").run(inputs, EXACT)
    for ours, theirs, exact in zip(fused(inputs), unfused, expected, strict=True):
        error, limit = ((one.double() - exact).square().mean().sqrt() for one in (ours, theirs))
        assert error <= 1.01 * limit, (float(error), float(limit))
