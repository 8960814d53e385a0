"""Triton's interpreter gives the numbers that a GPU gives, including bfloat16."""

import inspect

import pytest
import torch
import triton
import triton.language as tl

from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.functions import decay_exp2, ptr_offset

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="this process compiles its kernels")


@triton.jit
def _elementwise_kernel(a_ptr, b_ptr, to_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    a = tl.load(a_ptr + o)
    b = tl.load(b_ptr + o)
    tl.store(to_ptr + o, tl.where(a < b, a + b, a * b))


@triton.jit
def _copy_kernel(from_ptr, to_ptr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(to_ptr + o, tl.load(from_ptr + o).to(to_ptr.dtype.element_ty))


@triton.jit
def _helpers_kernel(offset_ptr, decay_ptr, log2_decay_ptr, strides, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(offset_ptr + o, ptr_offset((2, o), strides))
    tl.store(decay_ptr + o, decay_exp2(tl.load(log2_decay_ptr + o)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_elementwise(dtype: torch.dtype):
    a, b = torch.randn(2, 64).to(dtype)
    found = torch.empty_like(a)
    _elementwise_kernel[(1,)](a, b, found, SIZE=64)
    assert torch.equal(found, torch.where(a < b, a + b, a * b))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_round_to_nearest_even(source: torch.dtype, target: torch.dtype):
    values = torch.randn(64)
    ties = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e-40, 0.0, -0.0, torch.inf]
    )
    values[: len(ties)] = ties
    values = values.to(source)
    cast = torch.empty(64, dtype=target)
    _copy_kernel[(1,)](values, cast, SIZE=64)
    assert torch.equal(cast, values.to(target))


def test_nan_stays_nan_in_bfloat16():
    cast = torch.empty(16, dtype=torch.bfloat16)
    _copy_kernel[(1,)](torch.full((16,), torch.nan), cast, SIZE=16)
    assert cast.isnan().all()


def test_offsets_pass_2_to_the_31():
    offsets = torch.empty(16, dtype=torch.int64)
    _helpers_kernel[(1,)](offsets, torch.empty(16), torch.zeros(16), (2**31, 2**30), SIZE=16)
    assert torch.equal(offsets, 2 * 2**31 + torch.arange(16) * 2**30)


def test_decay_is_at_most_1_and_keeps_nan():
    log2_decay = torch.tensor([1e-6, 0.0, -1.0, -1e30, -torch.inf, torch.nan] + [0.0] * 10)
    decay = torch.empty(16)
    _helpers_kernel[(1,)](torch.empty(16, dtype=torch.int64), decay, log2_decay, (1, 1), SIZE=16)
    assert decay[:5].tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert decay[5].isnan()


def test_the_language_is_searched_once_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch):
    offset = torch.empty(2, dtype=torch.int64)
    decay = torch.empty(2)

    def launch() -> None:
        _helpers_kernel[(2,)](offset, decay, torch.tensor([-1.0, 0.0]), (10, 3), SIZE=2)

    launch()
    load = tl.load
    add = tl.tensor.__add__
    monkeypatch.setattr(
        inspect, "getmembers", lambda *_: pytest.fail("the language is searched again")
    )
    launch()
    assert offset.tolist() == [20, 23]
    assert (tl.load, tl.tensor.__add__) == (load, add)
    assert tl.core.is_builtin(tl.load)
