"""The kernels of the study scan-003 against the scan in fp64 and its gradients by autograd."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from selective_scan.autograd import Form
from selective_scan.contenders import both, run_both
from selective_scan.inputs import ScanInputs, draw_layer
from selective_scan.parallel import parallel
from selective_scan.reference import GRADIENTS, Judge, by_doubling, reference
from selective_scan.sequential import ScanConfig, sequential
from selective_scan.sequential_backward import sequential_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS: tuple[Form, ...] = ("sequential", "parallel")
TILE = ScanConfig(block_t=16, num_warps=4)


def odd(seqlen: int, dtype: torch.dtype = torch.bfloat16) -> ScanInputs:
    """A state of 20, which is no multiple of a block, in tensors that are not contiguous."""
    layer = draw_layer(batch=2, seqlen=seqlen, heads=3, dstate=24, dtype=dtype, device=DEVICE, seed=seqlen)
    whole = layer.scan_inputs()
    return replace(whole, B=whole.B[..., :20], C=whole.C[..., 4:])


def gradient_of_y(inputs: ScanInputs) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(inputs.x.shape, generator=generator, device=DEVICE).to(inputs.x.dtype)


def judge_of(inputs: ScanInputs, dy: torch.Tensor) -> Judge:
    """A judge by autograd of the recurrence."""
    return Judge(inputs, dy, reference(inputs, dy))


@pytest.mark.parametrize(
    ("seqlen", "dtype"),
    [
        pytest.param(1, torch.bfloat16, id="one position-bf16"),
        pytest.param(16, torch.float32, id="one tile-fp32"),
        pytest.param(21, torch.bfloat16, id="a tile that is not full-bf16"),
        pytest.param(1, torch.float32, id="one position-fp32", marks=pytest.mark.slow),
        pytest.param(16, torch.bfloat16, id="one tile-bf16", marks=pytest.mark.slow),
        pytest.param(21, torch.float32, id="a tile that is not full-fp32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward_against_autograd_in_fp64(form: Form, seqlen: int, dtype: torch.dtype) -> None:
    inputs = odd(seqlen, dtype)
    dy = gradient_of_y(inputs)
    found = judge_of(inputs, dy).excess(run_both(inputs, dy, form=form, config=TILE))
    assert found.keys() == {"y", *GRADIENTS}
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("seqlen", [1, 16, 21])
def test_the_oracle_by_doubling_is_the_recurrence_and_its_autograd(seqlen: int) -> None:
    inputs = odd(seqlen)
    dy = gradient_of_y(inputs)
    found, exact = by_doubling(inputs, dy), reference(inputs, dy)
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_layer_and_its_scan_are_the_same() -> None:
    layer = draw_layer(batch=1, seqlen=9, heads=2, dstate=4, device=DEVICE)
    inputs = layer.scan_inputs(torch.float64)
    state = torch.zeros(1, 2, 4, dtype=torch.float64, device=DEVICE)
    for t in range(9):
        dt = layer.dt[:, t].double()
        state = state * torch.exp(dt * layer.A.double())[..., None]
        state = state + (dt * layer.x[:, t].double())[..., None] * layer.B[:, t].double()
        torch.testing.assert_close(reference(inputs)["y"][:, t], (layer.C[:, t].double() * state).sum(-1))


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
    right, judge = reference(inputs, dy), judge_of(inputs, dy)
    assert max(judge.excess(right).values()) <= 1
    for name, tensor in right.items():
        assert judge.excess({name: tensor.roll(1, dims=1)})[name] > 1
        assert judge.excess({name: tensor.roll(1, dims=2)})[name] > 1
        assert judge.excess({name: tensor * torch.nan})[name] == float("inf")


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs = odd(3)
    with pytest.raises(ValueError, match="decay must be"):
        replace(inputs, decay=inputs.decay[:, 1:])
    with pytest.raises(ValueError, match="C must be"):
        replace(inputs, C=inputs.C[..., :3])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_offsets_beyond_32_bits(form: Form) -> None:
    inputs = draw_layer(batch=2, seqlen=40, heads=2, dstate=16, device=DEVICE).scan_inputs()
    dy = gradient_of_y(inputs)
    _, *strides = inputs.B.stride()
    far = torch.empty_strided(inputs.B.shape, (2**31, *strides), dtype=torch.bfloat16, device=DEVICE)
    far.copy_(inputs.B)
    near, found = run_both(inputs, dy, form=form), run_both(replace(inputs, B=far), dy, form=form)
    assert all(torch.equal(near[name], tensor) for name, tensor in found.items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", both())
def test_every_call_has_the_same_bits(name: str) -> None:
    inputs = draw_layer(batch=16, seqlen=4096, heads=8, dstate=64, device=DEVICE).scan_inputs()
    dy = gradient_of_y(inputs)
    run = partial(both()[name], inputs, dy)
    first = run()
    for _ in range(5):
        assert all(torch.equal(first[key], tensor) for key, tensor in run().items())
    assert max(Judge(inputs, dy).excess(first).values()) <= 1
