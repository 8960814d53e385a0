"""`lo` computes the operator, and rounds exactly where the precision allows it."""

from collections.abc import Callable

import pytest
import torch

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.operators.operator import Span
from ssdprof.operators.ssd_rounding import RoundedSSD, SSDGate

MakeInputs = Callable[..., SSDInputs]


def rounded(inputs: SSDInputs, precision: Precision, *, block: int = 10**6) -> SSDOutput:
    outs, states = [], []
    for batch in range(inputs.x.shape[0]):
        ssd, pieces = RoundedSSD(inputs, precision), []
        for start in range(0, inputs.x.shape[1], block):
            span = Span(sequence=batch, batch=batch, start=start, stop=min(start + block, inputs.x.shape[1]))
            out, state = ssd.advance(span, SSDGate.of(inputs, span))
            pieces.append(out)
        outs.append(torch.cat(pieces))
        states.append(state)
    return SSDOutput(torch.stack(outs), torch.stack(states))


def rms_ratio(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def errors(inputs: SSDInputs, precision: Precision) -> tuple[float, float]:
    """RMS ratio of out and of final_states against the oracle."""
    ours, exact = rounded(inputs, precision), ssd_chunked(inputs)
    return rms_ratio(ours.out, exact.out), rms_ratio(ours.final_states, exact.final_states)


@pytest.mark.parametrize("variant", ["plain", "gated", "initial states", "no skip, no bias", "D per channel", "limit"])
def test_in_fp32_it_is_the_operator(make_inputs: MakeInputs, variant: str) -> None:
    changes = {
        "plain": {},
        "gated": {"z": torch.randn(2, 100, 4, 32)},
        "initial states": {"initial_states": torch.randn(2, 4, 32, 16)},
        "no skip, no bias": {"D": None, "dt_bias": None},
        "D per channel": {"D": torch.randn(4, 32)},
        "limit": {"dt_limit": (1e-3, 1e-2)},
    }[variant]
    inputs = make_inputs(dtype=torch.float32, batch=2, **changes)
    assert max(errors(inputs, Precision())) < 2e-6


def test_spans_carry_the_state(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(seqlen=150, batch=2)
    whole, pieces = rounded(inputs, Precision()), rounded(inputs, Precision(), block=64)
    assert torch.equal(whole.out, pieces.out)
    assert torch.equal(whole.final_states, pieces.final_states)


def test_every_sequence_begins_with_its_own_state(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(batch=2, initial_states=torch.randn(2, 4, 32, 16))
    apart, together = rounded(inputs, Precision()), RoundedSSD(inputs, Precision())
    for batch in range(2):
        span = Span(sequence=batch, batch=batch, start=0, stop=inputs.x.shape[1])
        out, state = together.advance(span, SSDGate.of(inputs, span))
        assert torch.equal(out, apart.out[batch])
        assert torch.equal(state, apart.final_states[batch])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_states_are_numbers_of_their_dtype(make_inputs: MakeInputs, dtype: torch.dtype) -> None:
    states = rounded(make_inputs(dtype=torch.float32), Precision(state_dtype=dtype)).final_states
    assert torch.equal(states.to(dtype).float(), states)


@pytest.mark.parametrize(("dtype", "unit_roundoff"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)], ids=str)
def test_the_error_is_that_of_a_few_roundings(
    make_inputs: MakeInputs, dtype: torch.dtype, unit_roundoff: float
) -> None:
    exact_out, exact_states = errors(make_inputs(dtype=dtype), Precision())
    relaxed_out, relaxed_states = errors(make_inputs(dtype=dtype), Precision(intermediates="relaxed"))
    # one rounding: uniform within half a spacing, rms between 0.29 and 0.58 of the unit roundoff
    assert 0.29 * unit_roundoff < exact_out < relaxed_out < unit_roundoff
    assert 0.29 * unit_roundoff < exact_states < relaxed_states < unit_roundoff


def test_coarser_states_lose_more(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(dtype=torch.float32)
    fp32, fp16, bf16 = (
        errors(inputs, Precision(state_dtype=dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    )
    assert 100 * fp32[1] < fp16[1] < bf16[1] / 4
    assert 100 * fp32[0] < fp16[0] < bf16[0] / 4


def test_the_products_stay_fp32_when_the_process_allows_tf32(make_inputs: MakeInputs) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        rounded(make_inputs(dtype=torch.float32), Precision())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
