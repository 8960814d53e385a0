"""On a GPU: subnormal and large numbers, which no ordinary layer has, and flash-linear-attention's own test cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import BF16, EXACT, FP16, FP32, bounds, with_steps
from subjects import SSD_CHOSEN, Subject, subjects

from ssdprof.kernels.gdn.compat import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.accuracy import assert_passes

pytestmark = pytest.mark.gpu


def with_subnormal(kernel: Subject, name: str) -> SSDInputs:
    """No decay, steps of 1, and scales that make the subnormal tensor affect the output."""
    carried = name == "initial_states"
    # initial states: one chunk only, since a GPU's sums may lose them
    inputs = with_steps(kernel.case(seqlen=2 if carried else 28, skip="", initial_states=carried).inputs(), 1.0, 0.0)
    scales = dict(x=1e-20, B=1e-20, C=1e25) if carried else dict.fromkeys({"x", "B", "C"} - {name}, 1e13)
    for other, scale in scales.items():
        getattr(inputs, other).mul_(scale)
    tensor = getattr(inputs, name)
    tensor.copy_((tensor.cpu().float().tanh() * torch.finfo(FP32).tiny).to(tensor.dtype))
    return inputs


def products_keep_subnormal_numbers() -> bool:
    small = torch.full((256, 256), 1e-39, dtype=BF16, device="cuda")
    return bool((small @ torch.full_like(small, 1e30)).any())


@pytest.mark.parametrize("name", ["x", "B", "C", "initial_states"])
@subjects(gpu=SSD_CHOSEN)
def test_subnormal_numbers(kernel: Subject, name: str) -> None:
    """Kept, or treated as zero if the GPU's matrix products do that.  The two outputs differ here."""
    inputs, zeroed = with_subnormal(kernel, name), with_subnormal(kernel, name)
    getattr(zeroed, name).zero_()
    assert_passes(kernel(inputs), inputs if products_keep_subnormal_numbers() else zeroed, EXACT)
    with pytest.raises(AssertionError, match="oracle"):
        assert_passes(kernel(zeroed), inputs, EXACT)


@pytest.mark.parametrize("name", ["x", "B", "C"])
@subjects(gpu=SSD_CHOSEN)
def test_large_numbers(kernel: Subject, name: str) -> None:
    """Far beyond the range of fp16, since bf16 inputs may be."""
    inputs = kernel.case(seqlen=28).inputs()
    getattr(inputs, name).mul_(1e25)
    assert_passes(kernel(inputs), inputs, EXACT)


@subjects(gpu=SSD_CHOSEN)
def test_linear_attention_over_every_segment(kernel: Subject) -> None:
    """Nothing is forgotten: the first pass reads whole segments."""
    inputs = with_steps(kernel.case(seqlen=650).inputs(), 0.01, 0.0)
    assert_passes(kernel(inputs), inputs, EXACT)


# Sizes and limits of flash-linear-attention's tests/ops/test_gdn.py: batch, T, H, HV, K = V, scale, divisor of g, share
# of positions without a gate, normalised inside.  Keys are uniform in [0, 1), so that all have a similar direction.
FLA_CHUNK = [
    (4, 1024, 4, 4, 128, 0.1, 1, 1.0, False), (2, 75, 4, 4, 64, 1, 0.01, 0, False), (2, 500, 3, 3, 60, 1, 1, 0, False),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False), (3, 1024, 4, 4, 100, 1, 0.1, 0, False),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True), (2, 1500, 4, 4, 128, 0.1, 10, 0, False),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False), (2, 256, 2, 4, 64, 1, 1, 0, False), (2, 512, 2, 8, 64, 1, 0.1, 0, True),
    (2, 1024, 4, 8, 128, 0.1, 1, 0, False),
]  # fmt: skip
FLA_RECURRENT = [  # batch, T, H, HV, K = V, scale, divisor of g, dtype
    (1, 63, 1, 1, 64, 1, 1, FP32), (2, 500, 4, 4, 60, 1, 1, FP32), (2, 1000, 2, 8, 128, 1, 0.1, FP32),
    (3, 1024, 2, 2, 128, 0.1, 1, FP32), (4, 1024, 3, 3, 128, 1, 10, FP32), (4, 2048, 4, 4, 64, 0.1, 1, FP32),
    (2, 1024, 4, 4, 128, 1, 0.1, FP16), (2, 1024, 4, 8, 128, 1, 10, FP16),
]  # fmt: skip
FLA_LENGTHS = [(15,), (256, 244, 500), (15, 85, 200, 900, 800), (8192,)]


def drawn(
    sizes: tuple[int, ...], dtype: torch.dtype = FP16, *, uniform: bool = True, scale: float = 1, divisor: float = 1,
    ungated: float = 0, inside: bool = True, state: bool = True, lengths: tuple[int, ...] = (),
) -> GDNInputs:  # fmt: skip
    """Uniform or normal q, k and v; g is the log sigmoid of a uniform number, divided by `divisor`."""
    torch.manual_seed(42)
    (batch, length, heads, value_heads, dim), draw = sizes, torch.rand if uniform else torch.randn
    q, k = (draw(batch, length, heads, dim, device="cuda") for _ in range(2))
    v = draw(batch, length, value_heads, dim, device="cuda")
    gate, raw, kept = (torch.rand(batch, length, value_heads, device="cuda") for _ in range(3))
    g = torch.nn.functional.logsigmoid(gate) / divisor * (kept > ungated)
    if not inside:
        q, k = (torch.nn.functional.normalize(one, dim=-1) for one in (q, k))
    initial = torch.randn(len(lengths) or batch, value_heads, dim, dim, device="cuda") if state else None
    return GDNInputs(
        q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), g=g, beta=raw.sigmoid(), use_qk_l2norm=inside, scale=float(scale),
        initial_state=initial, cu_seqlens=bounds(lengths, "cuda") if lengths else None,
    )  # fmt: skip


def assert_fla_close(inputs: GDNInputs, function: Any, limit: float) -> None:
    """The RMS error over the RMS, for the whole output and the whole final state."""
    found = function(
        inputs.q, inputs.k, inputs.v, g=inputs.g, beta=inputs.beta, scale=inputs.scale,
        initial_state=inputs.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
        cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    for ours, expected in zip(found, gdn_chunked(inputs), strict=True):
        error = (ours.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error <= limit, float(error)


@pytest.mark.parametrize("case", FLA_CHUNK, ids=str)
def test_flas_chunk_cases(case: Any) -> None:
    *sizes, scale, divisor, ungated, inside = case
    inputs = drawn(tuple(sizes), scale=scale, divisor=divisor, ungated=ungated, inside=inside, state=False)
    assert_fla_close(inputs, chunk_gated_delta_rule, 0.005)


@pytest.mark.parametrize("dim", [60, 64, 100, 128])
@pytest.mark.parametrize("lengths", FLA_LENGTHS, ids=str)
def test_flas_packs(lengths: tuple[int, ...], dim: int) -> None:
    inputs = drawn((1, sum(lengths), 4, 4, dim), lengths=lengths)
    assert_fla_close(inputs, chunk_gated_delta_rule, 0.005)


@pytest.mark.parametrize("case", FLA_RECURRENT, ids=str)
def test_flas_recurrent_cases(case: Any) -> None:
    *sizes, scale, divisor, dtype = case
    inputs = drawn(tuple(sizes), dtype, uniform=False, scale=scale, divisor=divisor)
    assert_fla_close(inputs, fused_recurrent_gated_delta_rule, 0.002)
