"""The gated RMS norm against its formula in fp64: both orders, groups, layouts; it compiles for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from compile_target import CAPABILITIES, compiled

from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.mixer import gated_rms_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-20}


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, group_size: int, norm_first: bool
) -> torch.Tensor:
    """The formula in fp64, in x's shape."""
    x, gate = x.double(), gate.double()
    silu = gate / (1 + torch.exp(-gate))
    y = x if norm_first else x * silu
    groups = y.unflatten(-1, (-1, group_size))
    out = (groups / torch.sqrt((groups**2).mean(-1, keepdim=True) + eps)).flatten(-2) * weight.double()
    return out * silu if norm_first else out


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("width", "group_size"), [(16, 16), (96, 48), (320, 320), (5120, 5120), (24, 8)])
def test_it_is_the_formula(width: int, group_size: int, dtype: torch.dtype, norm_first: bool) -> None:
    x, gate, weight = (
        normal(2, 5, width, dtype=dtype),
        3 * normal(2, 5, width, dtype=dtype, seed=1),
        normal(width, seed=2),
    )
    settings = dict(eps=1e-5, group_size=group_size, norm_first=norm_first)
    out = gated_rms_norm(x, gate, weight, **settings)  # type: ignore[arg-type]
    expected = normed(x, gate, weight, **settings)  # type: ignore[arg-type]
    assert (out.dtype, out.is_contiguous()) == (dtype, True)
    assert ((out.double() - expected).abs() <= EPS[dtype] * (expected.abs() + 1e-3)).all()


@pytest.mark.parametrize("norm_first", [False, True])
def test_rows_of_heads_and_the_gate_as_a_view_of_a_projection(norm_first: bool) -> None:
    x, wide, weight = normal(2, 70, 64), normal(2, 70, 200, seed=1), normal(64, seed=2)
    gate = wide[:, :, 30:94]
    settings = dict(eps=1e-6, group_size=64, norm_first=norm_first)
    plain = gated_rms_norm(x, gate.contiguous(), weight, **settings)  # type: ignore[arg-type]
    assert torch.equal(gated_rms_norm(x, gate, weight, **settings), plain)  # type: ignore[arg-type]
    channel_major = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(gated_rms_norm(channel_major, gate, weight, **settings), plain)  # type: ignore[arg-type]
    rows = gated_rms_norm(x.flatten(0, 1), gate.flatten(0, 1), weight, **settings)  # type: ignore[arg-type]
    assert torch.equal(rows, plain.flatten(0, 1))


def test_a_row_of_zeros_is_no_nan() -> None:
    out = gated_rms_norm(torch.zeros(1, 2, 8), normal(1, 2, 8), torch.ones(8), eps=1e-6, group_size=8, norm_first=False)
    assert torch.equal(out, torch.zeros(1, 2, 8))


def test_what_it_does_not_take_is_refused() -> None:
    x = normal(1, 4, 8)
    with pytest.raises(UnsupportedError, match=r"not torch\.float64"):
        gated_rms_norm(x.double(), x, torch.ones(8), eps=1e-6, group_size=8, norm_first=False)
    for gate, weight, group_size in ((x[:, :3], 8, 8), (x, 7, 8), (x, 8, 3)):
        with pytest.raises(ValueError, match="do not fit together"):
            gated_rms_norm(x, gate, torch.ones(weight), eps=1e-6, group_size=group_size, norm_first=False)


# --- compiled without a GPU


def launch(width: int, group_size: int, *, norm_first: bool) -> None:
    x = torch.empty(1, 1024, width, dtype=BF16, device="meta")
    gate = torch.empty_strided((1, 1024, width), (1024 * 10576, 10576, 1), dtype=BF16, device="meta")
    weight = torch.empty(width, dtype=BF16, device="meta")
    gated_rms_norm(x, gate, weight, eps=1e-5, group_size=group_size, norm_first=norm_first)


LAUNCHES: dict[str, Callable[[], None]] = {
    "mamba2-2.7b": partial(launch, 5120, 5120, norm_first=False),
    "a group of 1024": partial(launch, 8192, 1024, norm_first=False),
    "heads of 128": partial(launch, 128, 128, norm_first=True),
}


@pytest.mark.compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", LAUNCHES)
def test_it_compiles_without_spills(label: str, capability: int) -> None:
    (kernel,) = compiled("test_gated_rms_norm", capability)[label]
    assert kernel.kernel == "_gated_rms_norm_kernel"
    assert kernel.spilled_bytes == 0
    assert kernel.registers * kernel.num_warps * 32 <= 32768  # two programs and more on an SM
