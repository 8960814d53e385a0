"""The kernels of the study scan-003 against the scan in fp64 and its gradients by autograd."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from selective_scan.autograd import Form, scan
from selective_scan.inputs import ScanInputs, draw
from selective_scan.parallel import parallel
from selective_scan.reference import GRADIENTS, excess, reference
from selective_scan.sequential import ScanConfig, sequential
from selective_scan.sequential_backward import sequential_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS: tuple[Form, ...] = ("sequential", "parallel")
TILE = ScanConfig(block_t=16, num_warps=4)


def odd(seqlen: int, dtype: torch.dtype = torch.bfloat16) -> ScanInputs:
    """A state of 20, which no block divides, in tensors that are not contiguous."""
    whole = draw(batch=2, seqlen=seqlen, heads=3, dstate=24, dtype=dtype, device=DEVICE, seed=seqlen)
    return replace(whole, B=whole.B[..., :20], C=whole.C[..., 4:])


def gradient_of_y(inputs: ScanInputs) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(inputs.x.shape, generator=generator, device=DEVICE).to(inputs.x.dtype)


def forward_and_backward(inputs: ScanInputs, dy: torch.Tensor, form: Form) -> dict[str, torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.tensors]
    y = scan(ScanInputs(**dict(zip(("x", "decay", "B", "C"), leaves, strict=True))), form, config=TILE)
    return {"y": y.detach(), **dict(zip(GRADIENTS, torch.autograd.grad(y, leaves, dy), strict=True))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("seqlen", [1, 16, 37], ids=["one position", "one tile", "a tile that is not full"])
@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward_against_autograd_in_fp64(form: Form, seqlen: int, dtype: torch.dtype) -> None:
    inputs = odd(seqlen, dtype)
    dy = gradient_of_y(inputs)
    found = excess(forward_and_backward(inputs, dy, form), inputs, dy)
    assert found.keys() == {"y", *GRADIENTS}
    assert max(found.values()) <= 1, found


def test_states_that_are_not_kept_change_nothing() -> None:
    inputs = odd(37)
    y, states = parallel(inputs, keeps_states=True, config=TILE)
    alone, none = parallel(inputs, keeps_states=False, config=TILE)
    assert none is None
    assert states is not None
    assert torch.equal(y, alone)
    _, entering = sequential(inputs, config=TILE)
    assert torch.equal(entering[:, 0], torch.zeros_like(entering[:, 0]))


def test_states_of_another_tile_size_are_refused() -> None:
    inputs = odd(37)
    _, entering = sequential(inputs, config=TILE)
    with pytest.raises(ValueError, match="entering is of 3 tiles"):
        sequential_backward(inputs, gradient_of_y(inputs), entering, config=ScanConfig(block_t=32))


def test_the_comparison_sees_a_position_that_is_shifted_and_a_gradient_of_another_head() -> None:
    inputs = odd(20)
    dy = gradient_of_y(inputs)
    right = reference(inputs, dy)
    assert max(excess(right, inputs, dy).values()) <= 1
    for name, tensor in right.items():
        assert excess({name: tensor.roll(1, dims=1)}, inputs, dy)[name] > 1
        assert excess({name: tensor.roll(1, dims=2)}, inputs, dy)[name] > 1
        assert excess({name: tensor * torch.nan}, inputs, dy)[name] == float("inf")


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs = odd(3)
    with pytest.raises(ValueError, match="decay must be"):
        replace(inputs, decay=inputs.decay[:, 1:])
    with pytest.raises(ValueError, match="C must be"):
        replace(inputs, C=inputs.C[..., :3])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_every_call_has_the_same_bits(form: Form) -> None:
    inputs = draw(batch=16, seqlen=1024, heads=8, dstate=64, device=DEVICE)
    dy = gradient_of_y(inputs)
    run = partial(forward_and_backward, inputs, dy, form)
    first = run()
    for _ in range(5):
        assert all(torch.equal(first[name], tensor) for name, tensor in run().items())
    assert max(excess(first, inputs, dy).values()) <= 1
