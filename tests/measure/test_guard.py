"""Guards around tensors detect every write outside of the tensors, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.isolate import GUARD_BYTES, GuardedAllocations, GuardedInputs, unwritten


def ssd() -> SSDInputs:
    """x, B and C are views of one wide tensor, as in a model; dt is a view without its
    neighbours.
    """
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(1, 12, 2 * 16 + 2 * 16, generator=generator).bfloat16()
    x, B, C = wide.split([32, 16, 16], dim=-1)
    return SSDInputs(
        x=x.unflatten(-1, (2, 16)),
        dt=torch.randn(1, 12, 6, generator=generator)[..., 3:5],
        A=torch.tensor([-1.0, -4.0]),
        B=B.unflatten(-1, (1, 16)),
        C=C.unflatten(-1, (1, 16)),
        D=torch.ones(1).expand(2),
        dt_softplus=True,
    )


def gdn() -> GDNInputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, 2, 16, generator=generator) for _ in range(3))
    return GDNInputs(
        q=q, k=k, v=v, g=-torch.rand(1, 12, 2), beta=torch.rand(1, 12, 2), use_qk_l2norm=True
    )


def beside(tensor: Tensor, elements: int) -> Tensor:
    """The element at an offset of `elements` from the tensor's first element."""
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + elements)


@pytest.mark.parametrize("make", [ssd, gdn])
def test_the_copy_is_the_same_to_a_kernel(make: Callable[[], Any]):
    given = make()
    guarded = GuardedInputs(given)
    for name, tensor in given.tensors.items():
        copy = getattr(guarded.inputs, name)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() % 64 == tensor.data_ptr() % 64
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
        assert copy.data_ptr() != tensor.data_ptr()
    assert guarded.inputs.scalars == given.scalars
    assert all(map(torch.equal, oracle_output(guarded.inputs), oracle_output(given)))
    assert guarded.out_of_bounds() == ""


@pytest.mark.parametrize("bits", [0, 0x7FC0, -2])
@pytest.mark.parametrize(
    ("elements", "where"),
    [
        (-1, "before"),
        (-GUARD_BYTES // 4, "before"),
        (11 * 6 + 2, "behind"),
        (GUARD_BYTES // 4, "behind"),
        (2, "between the elements of"),
    ],
)
def test_a_write_beside_an_input_is_seen(elements, where, bits):
    guarded = GuardedInputs(ssd())
    beside(guarded.inputs.tensors["dt"], elements).view(torch.int32).fill_(bits)
    assert guarded.out_of_bounds() == f"it writes out of bounds, {where} its inputs dt"


def test_what_torch_allocates_is_guarded():
    makers: list[Callable[[], Tensor]] = [
        lambda: torch.empty(3, 5),
        lambda: torch.zeros(3, 5, dtype=torch.bfloat16),
        lambda: torch.empty_like(torch.ones(3, 5)),
        lambda: torch.ones(2).new_zeros(3, 5),
        lambda: torch.full((3, 5), 2.0),
        lambda: torch.empty_strided((3, 5), (5, 1)),
    ]
    for make in makers:
        with GuardedAllocations() as memory:
            tensor = make()
            assert memory.out_of_bounds() == ""
            words = "a tensor of shape (3, 5) that it allocates"
            beside(tensor, 15).fill_(1)
            assert memory.out_of_bounds() == f"it writes out of bounds, behind {words}"
            beside(tensor, -1).fill_(1)
            assert memory.out_of_bounds() == f"it writes out of bounds, around {words}"


def test_guarded_tensors_hold_what_they_would_hold():
    with GuardedAllocations() as memory:
        assert torch.equal(torch.zeros(2, 3), torch.tensor([[0.0] * 3] * 2))
        assert torch.full((2,), 7).tolist() == [7, 7]
        assert torch.ones_like(torch.empty(2, dtype=torch.int32)).tolist() == [1, 1]
        assert torch.empty(0).shape == (0,)
        assert torch.empty(2, 3, device="meta").is_meta  # no memory, so no guards
        plain = torch.randn(4, 4)
        guarded = torch.empty(4, 4)
        guarded.copy_(plain)
        assert torch.equal(guarded @ guarded, plain @ plain)
        assert memory.out_of_bounds() == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_nobody_wrote_is_counted(dtype):
    with GuardedAllocations():
        tensor = torch.empty(4, 6, dtype=dtype)
    assert unwritten(tensor) == 24
    tensor[1:] = float("nan")  # a computed NaN has other bits
    assert unwritten(tensor) == 6
    assert unwritten(tensor.t()) == 6
    tensor[0] = 0
    assert unwritten(tensor) == 0
