"""The studies' kernels against fp64, in Triton's interpreter or on a GPU."""

from dataclasses import replace
from functools import partial

import inter_chunk as ic
import pytest
import selective_scan as ss
import torch

pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# several programs per head, and blocks that do not divide a state
DIAGONAL: dict[str, ic.Kernel] = {
    "loop, read back": partial(ic.loop, resident=False, num_stages=1),
    "loop, rounded": partial(ic.loop, resident=True, rounded=True),
    "loop, fp32": partial(ic.loop, resident=True),
    "loop, whole": partial(ic.loop, resident=True, rows=32),
    "one launch a chunk": partial(ic.one_launch_a_chunk, rows=16), "chained": ic.chained,
    "associative": partial(ic.associative, block_c=4),
    "look-back": partial(ic.look_back, rows=16, segment=3),
}  # fmt: skip
LOW_RANK: dict[str, ic.Kernel] = {
    f"{where}, {how}": partial(
        ic.low_rank,
        resident=where != "read back",
        rounded=where == "rounded",
        tensor_cores=how == "tensor cores",
        num_stages=1 if where == "read back" else 2,
    )
    for where in ("read back", "rounded", "fp32")
    for how in ("columns", "tensor cores")
}
SAME_BITS = ("loop, read back", "loop, rounded", "one launch a chunk", "chained")
slow = pytest.mark.slow


def chunks_of(
    chunks: int, *, rank: int = 0, dtype: torch.dtype = torch.bfloat16
) -> ic.InterChunkInputs:
    """k = 24 and v = 20 are no multiples of a block, and no tensor is contiguous."""
    whole = ic.draw(
        batch=2, chunks=chunks, heads=2, dim=24, rank=rank, dtype=dtype, device=DEVICE, seed=chunks
    )
    return replace(whole, states=whole.states[..., :20])


def excess(inputs: ic.InterChunkInputs, out: torch.Tensor) -> float:
    return ic.judge(inputs).excess({"out": out})["out"]


@pytest.mark.parametrize("chunks", [1, 5, pytest.param(12, marks=slow)])
@pytest.mark.parametrize("name", DIAGONAL)
def test_a_diagonal_transition_against_fp64(name, chunks):
    inputs = chunks_of(chunks)
    assert excess(inputs, DIAGONAL[name](inputs)) <= 1


@pytest.mark.parametrize("rank", [3, *(pytest.param(rank, marks=slow) for rank in (1, 16))])
@pytest.mark.parametrize("name", LOW_RANK)
def test_a_transition_of_low_rank_against_fp64(name, rank):
    inputs = chunks_of(5, rank=rank)
    assert excess(inputs, LOW_RANK[name](inputs)) <= 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("look-back", "fp32, columns") else slow)
        for n in DIAGONAL | LOW_RANK
    ],
)
def test_fp32(name):
    inputs = chunks_of(4, rank=2 if name in LOW_RANK else 0, dtype=torch.float32)
    assert excess(inputs, (DIAGONAL | LOW_RANK)[name](inputs)) <= 1


@pytest.mark.parametrize("name", SAME_BITS[1:])
def test_whoever_rounds_in_every_turn_has_the_bits_of_the_loop_that_reads_back(name):
    inputs = chunks_of(4)
    assert torch.equal(DIAGONAL[name](inputs), DIAGONAL[SAME_BITS[0]](inputs))


def positions(
    seqlen: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[ss.ScanInputs, torch.Tensor]:
    """A state of 20, which is no multiple of a block, in tensors that are not contiguous; and a
    gradient of y.
    """
    layer = ss.draw_layer(
        batch=2, seqlen=seqlen, heads=3, dstate=24, dtype=dtype, device=DEVICE, seed=seqlen
    )
    whole = layer.scan_inputs()
    inputs = replace(whole, B=whole.B[..., :20], C=whole.C[..., 4:])
    generator = torch.Generator(DEVICE).manual_seed(1)
    return inputs, torch.randn(inputs.x.shape, generator=generator, device=DEVICE).to(
        inputs.x.dtype
    )


TILE = ss.ScanConfig(block_t=16, num_warps=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=slow)])
@pytest.mark.parametrize("seqlen", [1, 16, 21])
@pytest.mark.parametrize("form", ["sequential", pytest.param("parallel", marks=slow)])
def test_forward_and_backward_against_autograd_in_fp64(form: ss.Form, seqlen, dtype):
    inputs, dy = positions(seqlen, dtype)
    found = ss.judge(inputs, dy, ss.reference(inputs, dy)).excess(
        ss.run_both(inputs, dy, form=form, config=TILE)
    )
    assert found.keys() == {"y", *ss.GRADIENTS}
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("seqlen", [1, 16, 21])
def test_the_oracle_by_doubling_is_the_recurrence_and_its_autograd(seqlen):
    inputs, dy = positions(seqlen)
    torch.testing.assert_close(
        ss.by_doubling(inputs, dy), ss.reference(inputs, dy), rtol=1e-12, atol=1e-12
    )


def test_a_layer_and_its_scan_are_the_same():
    layer = ss.draw_layer(batch=1, seqlen=9, heads=2, dstate=4, device=DEVICE)
    y = ss.reference(layer.scan_inputs(torch.float64))["y"]
    state = torch.zeros(1, 2, 4, dtype=torch.float64, device=DEVICE)
    for t in range(9):
        dt = layer.dt[:, t].double()
        state = state * torch.exp(dt * layer.A.double())[..., None]
        state = state + (dt * layer.x[:, t].double())[..., None] * layer.B[:, t].double()
        torch.testing.assert_close(y[:, t], (layer.C[:, t].double() * state).sum(-1))


def test_the_comparison_sees_a_shift_another_head_and_a_number_that_is_missing():
    states = chunks_of(5)
    inputs, dy = positions(20)
    for right, judge in (
        ({"out": ic.reference(states)}, ic.judge(states)),
        (exact := ss.reference(inputs, dy), ss.judge(inputs, dy, exact)),
    ):
        assert max(judge.excess(right).values()) <= 1
        for name, tensor in right.items():
            assert judge.excess({name: tensor.roll(1, dims=1)})[name] > 1
            assert judge.excess({name: tensor.roll(1, dims=2)})[name] > 1
            missing = tensor.clone()
            missing[1, 2, 0] = torch.nan
            assert judge.excess({name: missing})[name] == float("inf")


@pytest.mark.gpu
def test_every_call_has_the_same_bits():
    """Thousands of programs run and wait for each other in another order in every call."""
    for name, kernel in (DIAGONAL | LOW_RANK).items():
        states = ic.draw(
            batch=4, chunks=64, heads=16, dim=64, rank=4 if name in LOW_RANK else 0, device=DEVICE
        )
        first = kernel(states)
        assert all(torch.equal(kernel(states), first) for _ in range(20)), name
        assert excess(states, first) <= 1
    inputs = ss.draw_layer(batch=16, seqlen=4096, heads=8, dstate=64, device=DEVICE).scan_inputs()
    dy = torch.randn(inputs.x.shape, device=DEVICE).to(inputs.x.dtype)
    for form in ss.FORWARD:
        found = ss.run_both(inputs, dy, form=form)
        for _ in range(5):
            assert all(
                torch.equal(found[key], t) for key, t in ss.run_both(inputs, dy, form=form).items()
            ), form
        assert max(ss.judge(inputs, dy).excess(found).values()) <= 1
