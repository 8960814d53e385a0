"""The same bits give the same number, and other bits another number."""

import math

import pytest
import torch

from ssdprof.measure import accuracy
from ssdprof.measure.accuracy import fingerprint

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_bit_changes_it(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 50).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    tensor[2, 7] = torch.nextafter(tensor[2, 7].float(), torch.tensor(math.inf)) if dtype == torch.float32 else 1.5
    assert fingerprint(tensor) != before


def test_swapped_elements_change_it() -> None:
    tensor = torch.arange(100.0)
    swapped = tensor.clone()
    swapped[[3, 60]] = swapped[[60, 3]]
    assert fingerprint(swapped) != fingerprint(tensor)


def test_a_nan_is_its_bits_and_zeros_differ_by_sign() -> None:
    tensor = torch.tensor([math.nan, 0.0])
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(torch.tensor([math.nan, -0.0]))


def test_blocks_tell_their_places_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_BLOCK", 16)
    tensor = torch.arange(40.0)
    assert fingerprint(tensor) != fingerprint(torch.cat([tensor[16:32], tensor[:16], tensor[32:]]))
    assert fingerprint(tensor) != fingerprint(torch.cat([tensor[:39], torch.tensor([7.0])]))


def test_every_tensor_has_its_own_and_strides_do_not_matter() -> None:
    a, b = torch.randn(4, 6), torch.randn(5)
    assert fingerprint(a, b) == (*fingerprint(a), *fingerprint(b))
    assert fingerprint(a.T) == fingerprint(a.T.contiguous())
