"""Inputs that no ordinary layer has: decays of 1 and of 0, steps of 0, subnormal and huge numbers, sequences of one
position or none.  The comparator judges the outputs."""

from dataclasses import replace

import pytest
import torch
from fused_kernels import CHOSEN, EVERY_KERNEL, Kernel
from ssd_cases import EXACT, PRECISIONS, Case
from test_fused import fused

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.accuracy import assert_passes

pytestmark = pytest.mark.gpu

SMALL = dict(heads=4, headdim=64, dstate=128, dtype=torch.bfloat16, device="cuda")
SUBNORMAL = 1e-39  # in fp32, and therefore in bf16


def with_steps(case: Case, step: float, A: float | None = None) -> SSDInputs:
    """Every dt is `step`, without softplus and bias."""
    inputs = case.inputs(dt_bias=None, dt_softplus=False)
    inputs.dt.fill_(step)
    return inputs if A is None else replace(inputs, A=torch.full_like(inputs.A, A))


@pytest.mark.parametrize("step", [0.0, SUBNORMAL, 1e-30, 1e-6, 50.0, 1e4, 1e30], ids=str)
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_steps_of_any_size(kernel: Kernel, step: float) -> None:
    inputs = with_steps(Case(seqlen=1500, initial_states=True, **SMALL), step)
    inputs.x.mul_(1e-30 if step > 1e10 else 1)
    assert_passes(kernel(inputs), inputs, EXACT)


@pytest.mark.parametrize("scale", [10.0, 100.0])
@pytest.mark.parametrize("step", [1e-6, 1e-5])
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_small_steps_of_large_numbers_in_fp16(kernel: Kernel, step: float, scale: float) -> None:
    """Weights below 2^-14, which are subnormal in fp16, and products that are not."""
    case = Case(seqlen=330, skip="", **SMALL | dict(dtype=torch.float16))
    dt = torch.full((1, 330, case.heads), step, device="cuda")
    inputs = case.inputs(dt=dt, dt_bias=None, dt_softplus=False)
    inputs.x.mul_(scale)
    assert_passes(kernel(inputs), inputs, EXACT)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("A", [0.0, -SUBNORMAL, -1e-6], ids=str)
@pytest.mark.parametrize("kernel", CHOSEN)
def test_no_decay_is_linear_attention(kernel: Kernel, A: float, precision: Precision) -> None:
    inputs = with_steps(Case(seqlen=1500, initial_states=True, **SMALL), 0.01, A)
    assert_passes(kernel(inputs, precision), inputs, precision)


@pytest.mark.parametrize("kernel", CHOSEN)
def test_linear_attention_over_every_segment(kernel: Kernel) -> None:
    """Nothing is forgotten: the first pass reads whole segments."""
    inputs = with_steps(Case(seqlen=16384, **SMALL), 0.01, 0.0)
    assert_passes(kernel(inputs), inputs, EXACT)


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_one_huge_step_resets_the_state(kernel: Kernel) -> None:
    inputs = with_steps(Case(seqlen=700, skip="", **SMALL), 0.01)
    inputs.dt[:, 333] = 1000.0
    assert_passes(kernel(inputs), inputs, EXACT)


def with_subnormal(name: str) -> SSDInputs:
    """No decay, steps of 1, and scales that make the subnormal tensor affect the output."""
    carried = name == "initial_states"
    # initial states: one chunk only, since a GPU's sums may lose them
    case = Case(seqlen=64 if carried else 700, skip="", initial_states=carried, **SMALL)
    inputs = with_steps(case, 1.0, 0.0)
    scales = dict(x=1e-20, B=1e-20, C=1e25) if carried else dict.fromkeys({"x", "B", "C"} - {name}, 1e13)
    for other, scale in scales.items():
        getattr(inputs, other).mul_(scale)
    tensor = getattr(inputs, name)
    below = tensor.cpu().float().tanh() * torch.finfo(torch.float32).tiny
    tensor.copy_(below.to(tensor.dtype))
    return inputs


def products_keep_subnormal_numbers() -> bool:
    small = torch.full((256, 256), SUBNORMAL, dtype=torch.bfloat16, device="cuda")
    return bool((small @ torch.full_like(small, 1e30)).any())


@pytest.mark.parametrize("name", ["x", "B", "C", "initial_states"])
@pytest.mark.parametrize("kernel", CHOSEN)
def test_subnormal_numbers(kernel: Kernel, name: str) -> None:
    """Kept, or treated as zero if the GPU's matrix products do that.  The two outputs differ here."""
    inputs, zeroed = with_subnormal(name), with_subnormal(name)
    getattr(zeroed, name).zero_()
    assert_passes(kernel(inputs), inputs if products_keep_subnormal_numbers() else zeroed, EXACT)
    with pytest.raises(AssertionError, match="oracle"):
        assert_passes(kernel(zeroed), inputs, EXACT)


@pytest.mark.parametrize("name", ["x", "B", "C"])
@pytest.mark.parametrize("kernel", CHOSEN)
def test_large_numbers(kernel: Kernel, name: str) -> None:
    """Far beyond the range of fp16, since bf16 inputs may be."""
    inputs = Case(seqlen=700, **SMALL).inputs()
    getattr(inputs, name).mul_(1e25)
    assert_passes(kernel(inputs), inputs, EXACT)


@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_lengths_around_a_chunk(kernel: Kernel, seqlen: int) -> None:
    inputs = Case(seqlen=seqlen, initial_states=True, **SMALL).inputs()
    assert_passes(kernel(inputs), inputs, EXACT)


@pytest.mark.parametrize(
    "lengths",
    [(0, 1), (1, 0), (0, 0, 64, 0, 0), (1,) * 200, (0,) * 130 + (300, 0, 129), tuple(i % 131 for i in range(300))],
    ids=["empty first", "empty last", "one among empty ones", "of one position", "after 130 empty ones", "300"],
)
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_packs(kernel: Kernel, lengths: tuple[int, ...]) -> None:
    inputs = Case(lengths=lengths, initial_states=True, **SMALL).inputs()
    assert_passes(kernel(inputs), inputs, EXACT)


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "dt_bias", "initial_states"])
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_nan_is_not_swallowed(kernel: Kernel, name: str) -> None:
    """A GPU's minimum and maximum drop NaN by default; the interpreter's never do."""
    inputs = Case(seqlen=300, initial_states=True, dt_limit=(0.0, 0.1), **SMALL).inputs()
    getattr(inputs, name).fill_(torch.nan)
    assert not torch.isfinite(kernel(inputs).out).any()


def test_heads_that_are_one_tensor() -> None:
    """x and dt are expanded with strides of 0."""
    inputs = Case(seqlen=300, **SMALL).inputs()
    same = replace(inputs, x=inputs.x[:, :, :1].expand_as(inputs.x), dt=inputs.dt[:, :, :1].expand_as(inputs.dt))
    assert_passes(fused(same), same, EXACT)


def test_rows_and_heads_exchanged_in_memory() -> None:
    inputs = Case(seqlen=300, **SMALL).inputs()
    turned = replace(inputs, x=inputs.x.transpose(1, 2).contiguous().transpose(1, 2))
    assert_passes(fused(turned), turned, EXACT)
