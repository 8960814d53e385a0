"""The unfused GDN kernels on a GPU: sizes of models, every dtype and precision, and tensors beyond 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gdn_cases import EXACT, RELAXED, Case

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.unfused.pipeline import plan, run
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import assert_passes

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN = Case(device="cuda", length=1000, key_heads=4, values_per_key=2, key_dim=128, value_dim=128, dtype=BF16)
OLMO = QWEN.but(key_heads=6, values_per_key=1, key_dim=96, value_dim=192, largest_beta=2.0)
PACKED = QWEN.but(lengths=(256, 0, 1, 513, 100, 0), initial_state=True)
PRECISIONS = [EXACT, RELAXED, Precision(state_dtype=FP16), Precision(intermediates="relaxed", state_dtype=BF16)]


def passes(case: Case, precision: Precision = EXACT) -> None:
    inputs = case.inputs()
    assert_passes(run(inputs, precision), inputs, precision)


@pytest.mark.parametrize("case", [QWEN, OLMO, PACKED], ids=["qwen", "olmo", "packed"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: f"{p.intermediates}-{p.state_dtype}")
def test_precisions(case: Case, dtype: torch.dtype, precision: Precision) -> None:
    passes(case.but(dtype=dtype), precision)


@pytest.mark.parametrize("key_dim", [16, 32, 60, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("value_dim", [16, 32, 60, 120, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_dims(key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    passes(QWEN.but(length=300, key_heads=2, key_dim=key_dim, value_dim=value_dim, dtype=dtype))


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 2049])
def test_lengths(length: int) -> None:
    passes(QWEN.but(length=length, batch=3, initial_state=True))


@pytest.mark.parametrize("gate", [0.0, 1e-3, 50.0])
@pytest.mark.parametrize("collinear", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_gates_and_collinear_keys(gate: float, collinear: float, dtype: torch.dtype) -> None:
    passes(QWEN.but(gate=gate, collinear=collinear, largest_beta=2.0, dtype=dtype))


def test_a_hundred_times() -> None:
    inputs = PACKED.inputs()
    first = run(inputs)
    for _ in range(100):
        assert all(torch.equal(one, other) for one, other in zip(run(inputs), first, strict=True))


def test_positions_innermost() -> None:
    """As after a model's convolution.  Bits may differ: the compiler chooses other products for such tiles."""
    inputs = QWEN.inputs()
    views = {name: getattr(inputs, name).transpose(1, 3).contiguous().transpose(1, 3) for name in ("q", "k", "v")}
    transposed = QWEN.inputs(**views)
    assert transposed.q.stride(1) == 1
    assert_passes(run(transposed), transposed, EXACT)


def test_a_call_allocates_what_the_plan_says() -> None:
    inputs = QWEN.but(length=20000).inputs()
    run(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = run(inputs)
    outputs = sum(tensor.numel() * tensor.element_size() for tensor in output)
    workspace = torch.cuda.max_memory_allocated() - before - outputs
    assert 0.7 * plan(inputs).workspace_bytes < workspace <= 1.01 * plan(inputs).workspace_bytes


@pytest.mark.usefixtures("much_gpu_memory")
def test_tensors_beyond_two_to_the_31_elements() -> None:
    """With 2^31 elements in v and in every workspace, the pack's last sequence has the result that it has alone."""
    heads, tokens, last = 8, (1 << 31) // (8 * 128) + 5000, 3000
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(1, tokens, *shape, dtype=BF16, device="cuda").normal_(generator=generator)

    fields: dict[str, Any] = dict(
        q=normal(1, 128), k=normal(1, 128), v=normal(heads, 128), g=normal(heads), beta=normal(heads)
    )
    fields["g"], fields["beta"] = -fields["g"].abs(), fields["beta"].sigmoid()
    bounds = torch.tensor([0, tokens - last, tokens], device="cuda")
    whole = run(GDNInputs(**fields, cu_seqlens=bounds, use_qk_l2norm=True))
    alone = run(GDNInputs(**{name: t[:, -last:] for name, t in fields.items()}, use_qk_l2norm=True))
    assert torch.equal(whole.out[:, -last:], alone.out)
    assert torch.equal(whole.final_states[1:], alone.final_states)
