"""The causal convolution against its formula in fp64: layouts, states, widths; it compiles for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from compile_target import CAPABILITIES, compiled

from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.mixer import causal_conv1d

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-21}  # of one rounding; fp32 sums round at every term


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, initial: torch.Tensor | None, *, silu: bool
) -> torch.Tensor:
    """(b, l, d) in fp64, position by position."""
    (batch, length, channels), width = x.shape, weight.shape[1]
    before = torch.zeros(batch, width - 1, channels) if initial is None else initial.transpose(1, 2)
    padded = torch.cat([before.double(), x.double()], dim=1)
    out = torch.zeros(batch, length, channels, dtype=torch.float64)
    for t in range(length):
        out[:, t] = (padded[:, t : t + width] * weight.double().T).sum(dim=1)
    if bias is not None:
        out += bias.double()
    return out * torch.sigmoid(out) if silu else out


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert (out.double() - expected).abs().max() <= EPS[out.dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 70])
@pytest.mark.parametrize("stateful", [False, True])
def test_it_is_the_formula(length: int, dtype: torch.dtype, stateful: bool) -> None:
    x, weight, bias = normal(2, length, 130, dtype=dtype), normal(130, 4, dtype=dtype, seed=1), normal(130, seed=2)
    initial = normal(2, 130, 3, dtype=dtype, seed=3) if stateful else None
    out, final = causal_conv1d(x, weight, bias, initial_state=initial, wants_final_state=True)
    assert out.is_contiguous()
    assert_close(out, convolved(x, weight, bias, initial, silu=True))
    before = torch.zeros(2, 130, 3, dtype=dtype) if initial is None else initial
    assert final is not None
    assert torch.equal(final, torch.cat([before, x.transpose(1, 2)], dim=2)[:, :, -3:])


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("silu", [False, True])
def test_other_widths_and_no_bias(width: int, silu: bool) -> None:
    x, weight = normal(1, 40, 16), normal(16, width, seed=1)
    out, final = causal_conv1d(x, weight, silu=silu)
    assert final is None
    assert_close(out, convolved(x, weight, None, None, silu=silu))


def as_view_of_a_projection(x: torch.Tensor) -> torch.Tensor:
    wide = normal(x.shape[0], x.shape[1], x.shape[2] + 50, seed=9)
    wide[:, :, 20 : 20 + x.shape[2]] = x
    return wide[:, :, 20 : 20 + x.shape[2]]


def channel_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("layout", [as_view_of_a_projection, channel_major])
def test_strides_change_nothing(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, weight, bias = normal(2, 37, 24), normal(24, 1, 4, seed=1).squeeze(1), normal(24, seed=2)
    strided = layout(x)
    assert strided.stride() != x.stride()
    assert torch.equal(causal_conv1d(strided, weight, bias)[0], causal_conv1d(x, weight, bias)[0])


def test_two_pieces_with_the_state_between_are_one() -> None:
    x, weight, bias = normal(1, 90, 8), normal(8, 4, seed=1), normal(8, seed=2)
    whole, end = causal_conv1d(x, weight, bias, wants_final_state=True)
    for cut in (1, 2, 33):
        first, state = causal_conv1d(x[:, :cut], weight, bias, wants_final_state=True)
        second, last = causal_conv1d(x[:, cut:], weight, bias, initial_state=state, wants_final_state=True)
        assert torch.equal(torch.cat([first, second], dim=1), whole)
        assert last is not None
        assert end is not None
        assert torch.equal(last, end)


def test_what_it_does_not_take_is_refused() -> None:
    x, weight = normal(1, 8, 4), normal(4, 4)
    with pytest.raises(UnsupportedError, match=r"not torch\.float64"):
        causal_conv1d(x.double(), weight)
    with pytest.raises(UnsupportedError, match="2 to 16 positions, not 1"):
        causal_conv1d(x, weight[:, :1])
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\), not \(5,\)"):
        causal_conv1d(x, weight, normal(5))
    with pytest.raises(ValueError, match=r"initial_state must have shape \(1, 4, 3\)"):
        causal_conv1d(x, weight, initial_state=normal(1, 4, 4))


# --- compiled without a GPU


def launch(*, bias: bool, state: bool, dtype: torch.dtype) -> None:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = torch.empty_strided((1, 1024, 5376), (1024 * 10576, 10576, 1), dtype=dtype, device="meta")
    causal_conv1d(
        x, meta(5376, 4), meta(5376) if bias else None, initial_state=meta(1, 5376, 3) if state else None,
        wants_final_state=state,
    )  # fmt: skip


LAUNCHES: dict[str, Callable[[], None]] = {
    "a prompt": partial(launch, bias=True, state=False, dtype=BF16),
    "a segment": partial(launch, bias=False, state=True, dtype=BF16),
    "fp32": partial(launch, bias=True, state=True, dtype=FP32),
}


@pytest.mark.compiler
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", LAUNCHES)
def test_it_compiles_without_spills(label: str, capability: int) -> None:
    (kernel,) = compiled("test_causal_conv1d", capability)[label]
    assert kernel.kernel == "_causal_conv1d_kernel"
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 128  # four programs and more on an SM
    assert kernel.metadata["bytes"] == 2 * 1024 * 5376 * (4 if label == "fp32" else 2)
