"""Cases in the form of fla's tests of the gated delta rule, with the sizes of olmo-hybrid-7b: K 96,
V 192, beta to 2.

`fla_cases.py` runs them on `kernels/gdn/compat.py`.  fla's recurrence is the
reference, and the ratios are those of its tests.
"""

from __future__ import annotations

from typing import Any

import fla.utils
import pytest
import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from torch.nn import functional as F

from ssdprof.kernels.gdn.compat import chunk_gated_delta_rule

HEADS, KEY_DIM, VALUE_DIM = 4, 96, 192


def draw(batch: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """q, k, v, beta up to 2, gates generated as in fla's tests, and an initial state."""
    torch.manual_seed(42)
    sizes = (batch, length, HEADS)
    return {
        "q": F.normalize(torch.rand(*sizes, KEY_DIM, device="cuda"), dim=-1).to(dtype),
        "k": F.normalize(torch.rand(*sizes, KEY_DIM, device="cuda"), dim=-1).to(dtype),
        "v": torch.rand(*sizes, VALUE_DIM, device="cuda").to(dtype),
        "beta": 2 * torch.rand(*sizes, device="cuda"),
        "g": F.logsigmoid(torch.rand(*sizes, device="cuda")),
        "initial_state": torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, device="cuda"),
    }


def assert_close(
    result: tuple[torch.Tensor, torch.Tensor], tensors: dict[str, Any], ratio: float
) -> None:
    reference = naive_recurrent_gated_delta_rule(**tensors, output_final_state=True)
    for name, ours, theirs in zip(("o", "ht"), result, reference, strict=True):
        fla.utils.assert_close(name, theirs, ours, ratio)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(1, 63), (2, 500), (3, 1024)])
def test_chunk_olmo(batch: int, length: int, dtype: torch.dtype) -> None:
    tensors = draw(batch, length, dtype)
    assert_close(chunk_gated_delta_rule(**tensors, output_final_state=True), tensors, 0.005)
