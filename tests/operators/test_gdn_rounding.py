"""`lo` of GDN computes the operator, and rounds exactly where the precision allows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssdprof.kernels.gdn.hopper.rings import CHUNK
from ssdprof.kernels.gdn.inputs import GDNInputs, GDNOutput
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.precision import Precision
from ssdprof.operators.gdn_rounding import GDNGate, RoundedGDN
from ssdprof.operators.operator import Span

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make(length: int = 150, batch: int = 1, dtype: torch.dtype = FP32, gate: float = 0.3, **fields: Any) -> GDNInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, length, *shape, generator=generator)

    tensors: dict[str, Any] = dict(
        q=normal(2, 32).to(dtype),
        k=normal(2, 32).to(dtype),
        v=normal(4, 24).to(dtype),
        g=-gate * normal(4).abs(),
        beta=normal(4).sigmoid().to(dtype),
        use_qk_l2norm=True,
    )
    return GDNInputs(**(tensors | fields))


def rounded(inputs: GDNInputs, precision: Precision, *, block: int = 10**6) -> GDNOutput:
    outs, states = [], []
    for batch in range(inputs.q.shape[0]):
        gdn, pieces = RoundedGDN(inputs, precision), []
        for start in range(0, inputs.length, block):
            span = Span(sequence=batch, batch=batch, start=start, stop=min(start + block, inputs.length))
            out, state = gdn.advance(span, GDNGate.of(inputs, span))
            pieces.append(out)
        outs.append(torch.cat(pieces))
        states.append(state)
    return GDNOutput(torch.stack(outs), torch.stack(states))


def errors(inputs: GDNInputs, precision: Precision) -> tuple[float, float]:
    """RMS ratio of out and of final_states against the oracle."""

    def ratio(ours: torch.Tensor, exact: torch.Tensor) -> float:
        return float((ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    ours, exact = rounded(inputs, precision), gdn_chunked(inputs)
    return ratio(ours.out, exact.out), ratio(ours.final_states, exact.final_states)


@pytest.mark.parametrize("variant", ["plain", "initial state", "not normalised", "scale", "no gate", "all forgotten"])
def test_in_fp32_it_is_the_operator(variant: str) -> None:
    changes: dict[str, Any] = {
        "plain": {},
        "initial state": {"initial_state": torch.randn(2, 4, 32, 24)},
        "not normalised": {"k": torch.randn(2, 150, 2, 32) / 32**0.5, "use_qk_l2norm": False},
        "scale": {"scale": 3.0},
        "no gate": {"gate": 0.0},
        "all forgotten": {"g": torch.full((2, 150, 4), -torch.inf)},
    }[variant]  # fmt: skip
    assert max(errors(make(batch=2, **changes), Precision())) < 2e-6


def test_spans_carry_the_state() -> None:
    inputs = make(batch=2)
    whole, pieces = rounded(inputs, Precision()), rounded(inputs, Precision(), block=CHUNK)
    assert torch.equal(whole.out, pieces.out)
    assert torch.equal(whole.final_states, pieces.final_states)


def test_every_sequence_begins_with_its_own_state() -> None:
    inputs = make(batch=2, initial_state=torch.randn(2, 4, 32, 24))
    apart, together = rounded(inputs, Precision()), RoundedGDN(inputs, Precision())
    for batch in range(2):
        span = Span(sequence=batch, batch=batch, start=0, stop=inputs.length)
        out, state = together.advance(span, GDNGate.of(inputs, span))
        assert torch.equal(out, apart.out[batch])
        assert torch.equal(state, apart.final_states[batch])


def test_an_empty_sequence_keeps_its_state() -> None:
    inputs = make(initial_state=torch.randn(1, 4, 32, 24))
    span = Span(sequence=0, batch=0, start=0, stop=0)
    gate = GDNGate.of(inputs, span)
    out, state = RoundedGDN(inputs, Precision()).advance(span, gate)
    assert out.shape == (0, 4, 24)
    assert inputs.initial_state is not None
    assert torch.equal(state, inputs.initial_state[0])
    assert torch.equal(gate.largest_exponent(), torch.zeros(4))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_the_states_are_numbers_of_their_dtype(dtype: torch.dtype) -> None:
    states = rounded(make(), Precision(state_dtype=dtype)).final_states
    assert torch.equal(states.to(dtype).float(), states)


@pytest.mark.parametrize(("dtype", "unit_roundoff"), [(FP16, 2**-11), (BF16, 2**-8)], ids=str)
def test_the_error_is_that_of_a_few_roundings(dtype: torch.dtype, unit_roundoff: float) -> None:
    exact_out, exact_states = errors(make(dtype=dtype), Precision())
    relaxed_out, relaxed_states = errors(make(dtype=dtype), Precision(intermediates="relaxed"))
    assert 0.29 * unit_roundoff < exact_out < relaxed_out < 3 * unit_roundoff
    assert 0.29 * unit_roundoff < exact_states < relaxed_states < 3 * unit_roundoff


def test_coarser_states_lose_more() -> None:
    fp32, fp16, bf16 = (errors(make(gate=0.01), Precision(state_dtype=dtype)) for dtype in (FP32, FP16, BF16))
    assert 50 * fp32[1] < fp16[1] < bf16[1] / 4
    assert 50 * fp32[0] < fp16[0] < bf16[0] / 4
