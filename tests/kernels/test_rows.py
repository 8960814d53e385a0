"""Tensors whose rows are scattered are copied where a better kernel then runs, and only there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import BF16, SSDCase

from ssdprof.kernels.choice import Fused, Variant
from ssdprof.kernels.tensors import contiguous_copy, is_scattered


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """With neighbouring positions side by side, as torch's convolution writes them."""
    return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(1, 64, 2, 16), (2, 131, 3, 20), (1, 5, 1, 200), (3, 1, 2, 64), (1, 0, 2, 16)]
)
def test_a_copy_is_contiguous_and_equal(shape: tuple[int, ...], dtype: torch.dtype):
    rows = torch.randn(shape).to(dtype)
    for tensor in (
        innermost(rows),
        rows[:, ::2],
        rows.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        copy = contiguous_copy(tensor)
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)


def test_only_scattered_rows_are_copied():
    wide = torch.zeros(1, 64, 4 * 128, dtype=BF16)
    rows = wide[..., 128:384].unflatten(-1, (2, 128))
    assert not is_scattered(rows)
    assert is_scattered(innermost(rows))
    assert is_scattered(wide.unflatten(-1, (4, 128))[:, :, ::2]), (
        "heads that do not lie side by side"
    )


def fused(supports: str = "") -> Fused:
    """Two variants that return the inputs: one that reads rows only, and one that takes
    everything.
    """

    def unsupported(call: Any) -> str:
        return supports or (
            "its rows" if any(map(is_scattered, (call.inputs.x, call.inputs.B))) else ""
        )

    common: dict[str, Any] = dict(configure=lambda _: {}, prepare=lambda *_: lambda inputs: inputs)
    common["work"] = lambda *_: (1, 100, "why")
    return Fused(
        "f",
        (Variant(name="tiles", unsupported=unsupported, **common), Variant(name="any", **common)),
        ("x", "B", "C"),
    )


def test_the_better_kernel_gets_copies_which_its_plan_counts():
    given = SSDCase(seqlen=40, dtype=BF16).inputs()
    turned = replace(given, x=innermost(given.x), C=innermost(given.C))
    run: Any = fused().run(turned)
    plan = fused().plan(turned)
    assert (plan.variant, plan.launches, plan.reason) == (
        "tiles",
        3,
        "contiguous copies of x, C, then why",
    )
    assert plan.workspace_bytes == 100 + given.x.nbytes + given.C.nbytes
    assert run.x.is_contiguous()
    assert torch.equal(run.x, given.x)
    assert torch.equal(run.C, given.C)
    assert run.B is turned.B, "what can be read is not copied"
    assert fused().plan(given).launches == 1


def test_nothing_is_copied_in_vain():
    given = SSDCase(seqlen=40, dtype=BF16).inputs()
    turned = replace(given, x=innermost(given.x))
    assert fused("fp32 inputs").run(turned) is turned
    shared = replace(given, B=given.B[:, :1].clone().expand_as(given.B))
    assert fused().run(shared) is shared, "copies would take more memory than the tensor"
