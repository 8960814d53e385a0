"""The comparator passes correct outputs and fails each kind of wrong output."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_cases import DTYPES, EXACT, PRECISIONS, RELAXED_FP32
from measure.conftest import random_inputs
from torch import Tensor
from verdict import assert_passes

from ssdprof.core.accuracy import Accuracy
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure import accuracy
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.operators import ssd_oracle as ssd
from ssdprof.operators.rounding import Span

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
precisions = pytest.mark.parametrize(
    "precision", PRECISIONS, ids=lambda p: f"{p.intermediates}-{p.state_dtype}"
)


def one_value_off_by_a_twentieth_of_its_head(_inputs: SSDInputs, out: Tensor):
    out[0, 57, 2, 3] += out[:, :, 2].abs().max() / 20


def two_heads_swapped(_inputs: SSDInputs, out: Tensor):
    out[:, :, [0, 1]] = out[:, :, [1, 0]]


def a_chunk_shifted_by_one(inputs: SSDInputs, out: Tensor):
    q = inputs.chunk_size
    out[:, q : 2 * q, 3] = out[:, q - 1 : 2 * q - 1, 3].clone()


def last_partial_chunk_missing(inputs: SSDInputs, out: Tensor):
    out[:, out.shape[1] // inputs.chunk_size * inputs.chunk_size :] = 0


def skip_dropped(inputs: SSDInputs, out: Tensor):
    out.copy_(ssd_chunked(replace(inputs, D=None)).out)


def state_not_carried(inputs: SSDInputs, out: Tensor):
    q = inputs.chunk_size
    names = ("x", "dt", "B", "C")
    second = replace(inputs, **{name: getattr(inputs, name)[:, q : 2 * q] for name in names})
    out[:, q : 2 * q] = ssd_chunked(second).out


WRONG = (
    one_value_off_by_a_twentieth_of_its_head,
    two_heads_swapped,
    a_chunk_shifted_by_one,
    last_partial_chunk_missing,
    skip_dropped,
    state_not_carried,
)


def right_answer(inputs: SSDInputs) -> SSDOutput:
    out, final_states = ssd_chunked(inputs)
    return SSDOutput(out.to(inputs.x.dtype), final_states.float())


def rounded_answer(inputs: SSDInputs, precision: Precision) -> SSDOutput:
    span = Span(sequence=0, batch=0, start=0, stop=inputs.x.shape[1])
    out, state = ssd.ORACLE.rounded(inputs, precision).advance(inputs, span, ssd.gate(inputs, span))
    return SSDOutput(out[None], state[None])


def judge(
    output: SSDOutput, inputs: SSDInputs, precision: Precision = EXACT
) -> tuple[Accuracy, ...]:
    return compare(inputs, {"ours": Candidate(output=output, precision=precision)})["ours"]


def reason(found: tuple[Accuracy, ...]) -> str:
    """Empty if it passes."""
    return "; ".join(tensor.reason for tensor in found if tensor.reason)


@dtypes
@precisions
def test_the_rounded_exact_answer_passes(dtype: torch.dtype, precision: Precision):
    inputs = random_inputs(dtype=dtype, batch=2)
    assert_passes(right_answer(inputs), inputs, precision)


@dtypes
@precisions
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_output_fails(
    dtype: torch.dtype, precision: Precision, change: Callable[[SSDInputs, Tensor], None]
):
    inputs = random_inputs(dtype=dtype)
    output = right_answer(inputs)
    change(inputs, output.out)
    comparison = judge(output, inputs, precision)
    assert [not tensor.reason for tensor in comparison] == [False, True]
    assert reason(comparison).startswith("out, head ")


@dtypes
def test_a_wrong_final_state_fails_alone(dtype: torch.dtype):
    inputs = random_inputs(dtype=dtype)
    out = right_answer(inputs).out
    stale = ssd_chunked(
        replace(inputs, **{name: getattr(inputs, name)[:, :96] for name in ("x", "dt", "B", "C")})
    )
    comparison = judge(SSDOutput(out, stale.final_states.float()), inputs)
    assert [not tensor.reason for tensor in comparison] == [True, False]
    with pytest.raises(AssertionError, match="final_states, head"):
        assert_passes(SSDOutput(out, stale.final_states.float()), inputs, EXACT)


@dtypes
def test_one_nan_is_reported_with_its_position(dtype: torch.dtype):
    inputs = random_inputs(dtype=dtype, batch=2)
    output = right_answer(inputs)
    output.out[1, 57, 2, 3] = float("nan")
    output.out[1, 57, 3, 1] = float("inf")
    comparison = judge(output, inputs)
    assert comparison[0].vs_oracle.nonfinite
    from_oracle = comparison[0].vs_oracle
    assert from_oracle.nonfinite == 2
    assert from_oracle.first_nonfinite == (1, 57, 2, 3)
    assert "the exact answer is finite everywhere" in reason(comparison)


def test_nan_weights_are_told_from_a_nan_of_the_kernel():
    D = torch.ones(4)
    D[2] = float("nan")
    inputs = random_inputs(D=D)
    comparison = judge(right_answer(inputs), inputs)
    assert comparison[0].vs_oracle.nonfinite
    assert comparison[0].floor.first_nonfinite == (0, 0, 2, 0)
    assert (
        "the exact answer, rounded to bf16, is itself not finite in 3,200 elements, the first at "
        "(0, 0, 2, 0)"
    ) in (reason(comparison))
    assert not comparison[1].reason


@dtypes
def test_states_in_bf16_do_not_pass_as_fp32(dtype: torch.dtype):
    inputs = random_inputs(dtype=dtype)
    coarse = rounded_answer(inputs, Precision(state_dtype=torch.bfloat16))
    assert not reason(judge(coarse, inputs, Precision(state_dtype=torch.bfloat16)))
    for claimed in (torch.float32, torch.float16):
        assert judge(coarse, inputs, Precision(state_dtype=claimed))[1].reason


def test_bf16_inputs_hide_rounded_states_from_the_norms_but_not_their_bits():
    inputs = random_inputs(dtype=torch.bfloat16, A=torch.full((4,), -0.1), seed=2)
    out, final_states = rounded_answer(inputs, EXACT)
    assert not reason(judge(SSDOutput(out, final_states.clone()), inputs))
    final_states[:, 2] = final_states[:, 2].bfloat16().float()
    said = reason(judge(SSDOutput(out, final_states), inputs))
    assert said == "final_states: fp32 states are claimed, but a head has only bf16 numbers"


def test_states_that_are_exact_in_bf16_may_be_bf16_numbers():
    inputs = random_inputs(x=torch.zeros(1, 100, 4, 32, dtype=torch.bfloat16))
    assert_passes(right_answer(inputs), inputs, EXACT)


def test_relaxed_does_not_pass_as_exact_for_fp32_inputs():
    inputs = random_inputs(dtype=torch.float32)
    relaxed = rounded_answer(inputs, RELAXED_FP32)
    assert reason(judge(relaxed, inputs, EXACT))
    assert not reason(judge(relaxed, inputs, RELAXED_FP32))


def test_one_huge_activation_does_not_blind_the_rule():
    """Trained models have a few activations far above the rest; only these need the budget of the
    maximum norm.
    """
    x = torch.randn(1, 100, 4, 32, generator=torch.Generator().manual_seed(1))
    x[0, 99, :, 5] = 300
    inputs = random_inputs(x=x.bfloat16(), D=torch.ones(4))
    output = right_answer(inputs)
    assert_passes(output, inputs, EXACT)
    output.out[:, :99] *= 1.1
    assert "rms|ours - oracle|" in reason(judge(output, inputs))


def test_packed_sequences_are_compared_one_by_one():
    initial_states = torch.randn(4, 4, 32, 16)
    inputs = random_inputs(
        cu_seqlens=torch.tensor([0, 33, 33, 90, 100]), initial_states=initial_states
    )
    output = right_answer(inputs)
    assert_passes(output, inputs, EXACT)
    assert torch.equal(output.final_states[1], initial_states[1])
    output.final_states[2, 1, 4, 5] = float("nan")
    assert judge(output, inputs)[1].vs_oracle.first_nonfinite == (2, 1, 4, 5)


def test_the_length_of_the_blocks_does_not_matter(monkeypatch):
    inputs = random_inputs(batch=2, seqlen=150, z=torch.randn(2, 150, 4, 32).bfloat16())
    output = right_answer(inputs)
    output.out[1, 140, 3, 9] += 1
    whole = judge(output, inputs)
    monkeypatch.setattr(accuracy, "block_length", lambda _oracle, inputs: inputs.chunk_size)
    steps = []
    candidate = Candidate(output=output, precision=EXACT)
    pieces = compare(inputs, {"ours": candidate}, on_progress=steps.append)["ours"]
    assert steps == [32, 32, 32, 32, 22] * 2, "progress adds up to all positions"
    for one, other in zip(whole, pieces, strict=True):
        assert one.vs_oracle.matches == other.vs_oracle.matches
        assert one.vs_oracle.worst_position == other.vs_oracle.worst_position
        assert one.vs_oracle.rms_ratio == pytest.approx(other.vs_oracle.rms_ratio, rel=1e-9)
        assert one.reason == other.reason


def test_baseline_and_floor_stand_beside_the_oracle():
    inputs = random_inputs()
    right = right_answer(inputs)
    coarse = rounded_answer(inputs, EXACT)
    comparisons = compare(
        inputs,
        {
            "coarse": Candidate(output=coarse, precision=EXACT),
            "right": Candidate(output=right, precision=EXACT, baseline="coarse"),
        },
    )
    out = comparisons["right"][0]
    assert out.vs_baseline.against == "coarse"
    equal = 100 * (right.out == coarse.out).double().mean()
    assert out.vs_baseline.matches[0] == pytest.approx(float(equal))
    assert out.floor == out.vs_oracle  # `right` is the exact answer, rounded
    assert comparisons["coarse"][0].vs_baseline is None
    assert comparisons["coarse"][0].floor == out.floor


def test_an_output_of_the_wrong_shape_or_dtype_is_named():
    inputs = random_inputs()
    out, final_states = right_answer(inputs)
    with pytest.raises(ValueError, match=r"out must be torch.bfloat16 of shape \(1, 100, 4, 32\)"):
        judge(SSDOutput(out.float(), final_states), inputs)
    with pytest.raises(ValueError, match=r"final_states must be torch.float32"):
        judge(SSDOutput(out, final_states.mT), inputs)


def test_the_error_of_no_draw_of_the_model_uses_more_than_half_of_the_budget():
    """With 16-bit inputs.  The error of a single one may be small by chance where a head has few
    large errors.
    """
    inputs = random_inputs(seqlen=64, heads=2, seed=3)
    precision = EXACT
    span = Span(sequence=0, batch=0, start=0, stop=64)
    for seed in range(accuracy.DRAWS):
        perturbed = ssd.ORACLE.rounded(inputs, precision).perturb(seed)
        out, state = perturbed.advance(inputs, span, ssd.gate(inputs, span))
        output = (out[None].to(inputs.x.dtype), state[None])
        for found in compare(inputs, {"perturbed": Candidate(output=output, precision=precision)})[
            "perturbed"
        ]:
            assert all(use.error <= 0.5 * use.budget for use in found.budget)
