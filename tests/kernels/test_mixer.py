"""The causal convolution and the gated RMS norm against their formulas in fp64: layouts, states,
widths, groups.
"""

from functools import partial

import pytest
import torch
from kernel_cases import BF16, FP16, FP32
from torch import Tensor

from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.mixer import causal_conv1d, gated_rms_norm

EPS = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-21}  # of one rounding; fp32 sums round at every term
DTYPES = pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow), FP32])


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- the convolution


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, *, silu: bool
) -> Tensor:
    """(b, l, d) in fp64, position by position."""
    batch, length, channels = x.shape
    width = weight.shape[1]
    before = torch.zeros(batch, width - 1, channels) if initial is None else initial.transpose(1, 2)
    padded = torch.cat([before.double(), x.double()], dim=1)
    out = torch.zeros(batch, length, channels, dtype=torch.float64)
    for t in range(length):
        out[:, t] = (padded[:, t : t + width] * weight.double().T).sum(dim=1)
    if bias is not None:
        out += bias.double()
    return out * torch.sigmoid(out) if silu else out


def assert_close(out: Tensor, expected: Tensor):
    assert (out.double() - expected).abs().max() <= EPS[out.dtype] * expected.abs().max()


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 31, 32, 70])
@pytest.mark.parametrize("stateful", [False, True])
def test_the_convolution_is_the_formula(length, dtype: torch.dtype, stateful):
    x = normal(2, length, 130, dtype=dtype)
    weight = normal(130, 4, dtype=dtype, seed=1)
    bias = normal(130, seed=2)
    initial = normal(2, 130, 3, dtype=dtype, seed=3) if stateful else None
    out, final = causal_conv1d(x, weight, bias, initial_state=initial, wants_final_state=True)
    assert out.is_contiguous()
    assert_close(out, convolved(x, weight, bias, initial, silu=True))
    before = torch.zeros(2, 130, 3, dtype=dtype) if initial is None else initial
    assert torch.equal(final, torch.cat([before, x.transpose(1, 2)], dim=2)[:, :, -3:])


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("silu", [False, True])
def test_other_widths_and_views(width, silu):
    """Columns of a projection, or with neighbouring positions side by side; without bias and final
    state.
    """
    wide = normal(2, 40, 66, seed=9)
    weight = normal(16, width, seed=1)
    x = wide[:, :, 20:36]
    out, final = causal_conv1d(x, weight, silu=silu)
    assert final is None
    assert_close(out, convolved(x, weight, None, None, silu=silu))
    assert torch.equal(causal_conv1d(channel_major(x), weight, silu=silu)[0], out)


def channel_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_two_pieces_with_the_state_between_are_one():
    x = normal(1, 90, 8)
    weight = normal(8, 4, seed=1)
    bias = normal(8, seed=2)
    whole, end = causal_conv1d(x, weight, bias, wants_final_state=True)
    for cut in (1, 2, 33):
        first, state = causal_conv1d(x[:, :cut], weight, bias, wants_final_state=True)
        second, last = causal_conv1d(
            x[:, cut:], weight, bias, initial_state=state, wants_final_state=True
        )
        assert torch.equal(torch.cat([first, second], dim=1), whole)
        assert torch.equal(last, end)


def test_what_the_convolution_does_not_take_is_refused():
    x = normal(1, 8, 4)
    weight = normal(4, 4)
    with pytest.raises(UnsupportedError, match=r"not torch\.float64"):
        causal_conv1d(x.double(), weight)
    with pytest.raises(UnsupportedError, match="2 to 16 positions, not 1"):
        causal_conv1d(x, weight[:, :1])
    with pytest.raises(ValueError, match="x is empty"):
        causal_conv1d(x[:, :0], weight)
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\), not \(5,\)"):
        causal_conv1d(x, weight, normal(5))
    with pytest.raises(ValueError, match=r"initial_state must have shape \(1, 4, 3\)"):
        causal_conv1d(x, weight, initial_state=normal(1, 4, 4))


# --- the norm


def normed(x: Tensor, gate: Tensor, weight: Tensor, **settings) -> Tensor:
    """The formula in fp64, in x's shape."""
    x = x.double()
    gate = gate.double()
    silu = gate / (1 + torch.exp(-gate))
    y = x if settings["norm_first"] else x * silu
    groups = y.unflatten(-1, (-1, settings["group_size"]))
    out = groups / torch.sqrt((groups**2).mean(-1, keepdim=True) + settings["eps"])
    out = out.flatten(-2) * weight.double()
    return out * silu if settings["norm_first"] else out


@pytest.mark.parametrize("norm_first", [False, True])
@DTYPES
@pytest.mark.parametrize(
    ("width", "group_size"), [(16, 16), (96, 48), (320, 320), (5120, 5120), (24, 8)]
)
def test_the_norm_is_the_formula(width, group_size, dtype: torch.dtype, norm_first):
    x = normal(2, 5, width, dtype=dtype)
    x[0] = 0  # by whose norm nothing may be divided
    gate = 3 * normal(2, 5, width, dtype=dtype, seed=1)
    weight = normal(width, seed=2)
    settings = dict(eps=1e-5, group_size=group_size, norm_first=norm_first)
    out = gated_rms_norm(x, gate, weight, **settings)  # type: ignore[arg-type]
    expected = normed(x, gate, weight, **settings)
    assert (out.dtype, out.is_contiguous()) == (dtype, True)
    limit = 2 * EPS[dtype] if dtype == FP32 else EPS[dtype]
    assert ((out.double() - expected).abs() <= limit * (expected.abs() + 1e-3)).all()


@pytest.mark.parametrize("norm_first", [False, True])
def test_rows_of_heads_and_the_gate_as_a_view_of_a_projection(norm_first):
    x = normal(2, 70, 64)
    wide = normal(2, 70, 200, seed=1)
    weight = normal(64, seed=2)
    gate = wide[:, :, 30:94]

    def run(x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, weight, eps=1e-6, group_size=64, norm_first=norm_first)

    plain = run(x, gate.contiguous())
    assert torch.equal(run(x, gate), plain)
    assert torch.equal(run(channel_major(x), gate), plain)
    assert torch.equal(run(x.flatten(0, 1), gate.flatten(0, 1)), plain.flatten(0, 1))


def test_what_the_norm_does_not_take_is_refused():
    x = normal(1, 4, 8)
    norm = partial(gated_rms_norm, eps=1e-6, norm_first=False)
    with pytest.raises(UnsupportedError, match=r"not torch\.float64"):
        norm(x.double(), x, torch.ones(8), group_size=8)
    for gate, weight, group_size in ((x[:, :3], 8, 8), (x, 7, 8), (x, 8, 3), (x, 8, 0)):
        with pytest.raises(ValueError, match="do not fit together"):
            norm(x, gate, torch.ones(weight), group_size=group_size)
