"""The same bits give the same number, and other bits another number."""

import math

import pytest
import torch

from ssdprof.measure import accuracy
from ssdprof.measure.accuracy import fingerprint

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_bit_changes_it(dtype):
    tensor = torch.randn(3, 50).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    tensor.view(torch.uint8)[2, 7] ^= 1
    assert fingerprint(tensor) != before


LINE = torch.arange(40.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # two elements swapped
        (LINE, torch.cat([LINE[:3], LINE[[9]], LINE[4:9], LINE[[3]], LINE[10:]])),
        (LINE, torch.cat([LINE[16:32], LINE[:16], LINE[32:]])),  # two blocks swapped
        (LINE, torch.cat([LINE[:39], torch.tensor([7.0])])),  # in the last block
        (torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, -0.0])),
    ],
)
def test_a_nan_is_its_bits_and_places_count(one: torch.Tensor, other: torch.Tensor, monkeypatch):
    monkeypatch.setattr(accuracy, "_BLOCK", 16)
    assert fingerprint(one) == fingerprint(one.clone())
    assert fingerprint(one) != fingerprint(other)


def test_every_tensor_has_its_own_and_strides_do_not_matter():
    a = torch.randn(4, 6)
    b = torch.randn(5)
    assert fingerprint(a, b) == (*fingerprint(a), *fingerprint(b))
    assert fingerprint(a.T) == fingerprint(a.T.contiguous())
