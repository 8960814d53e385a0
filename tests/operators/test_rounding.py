"""`lo` computes the operator, and rounds exactly where the precision allows it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import GDNCase
from measure.conftest import random_inputs

from ssdprof import operators
from ssdprof.kernels.gdn.hopper.rings import CHUNK
from ssdprof.kernels.gdn.inputs import GDNInputs
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.accuracy import block_length
from ssdprof.operators import ssd_oracle as ssd
from ssdprof.operators.operator import OutputPair
from ssdprof.operators.rounding import Span

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
Make = Callable[..., Any]


def make_gdn(
    seqlen: int = 150, batch: int = 1, dtype: torch.dtype = FP32, gate: float = 0.3, **fields
):
    sizes = dict(key_heads=2, values_per_key=2, key_dim=32, value_dim=24, dtype=dtype, gate=gate)
    return GDNCase(seqlen=seqlen, batch=batch, **sizes).inputs(**fields)


@pytest.fixture(params=["ssd", "gdn"])
def make(request) -> Make:
    """Makes the inputs of an operator."""
    return random_inputs if request.param == "ssd" else make_gdn


def begun(inputs, precision: Precision):
    return operators.get(inputs.operator).oracle.rounded(inputs, precision)


def advanced(lo, inputs, batch: int, start: int, stop: int) -> OutputPair:
    span = Span(sequence=batch, batch=batch, start=start, stop=stop)
    gate = operators.get(inputs.operator).oracle.gate(inputs, span)
    found: OutputPair = lo.advance(inputs, span, gate)
    return found


def rounded(inputs, precision: Precision, *, block: int = 10**6) -> OutputPair:
    outs = []
    states = []
    sequences, length = inputs.values.shape[:2]
    for batch in range(sequences):
        lo = begun(inputs, precision)
        pieces = []
        for start in range(0, length, block):
            out, state = advanced(lo, inputs, batch, start, min(start + block, length))
            pieces.append(out)
        outs.append(torch.cat(pieces))
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def errors(inputs, precision: Precision) -> tuple[float, float]:
    """RMS ratio of out and of final_states against the oracle."""
    chunked = gdn_chunked if isinstance(inputs, GDNInputs) else ssd_chunked
    exact = chunked(inputs)
    out, states = (
        float((ours.double() - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
        for ours, theirs in zip(rounded(inputs, precision), exact, strict=True)
    )
    return out, states


@pytest.mark.parametrize(
    "variant", ["plain", "gated", "initial states", "no skip, no bias", "D per channel", "limit"]
)
def test_in_fp32_it_is_ssd(variant, monkeypatch):
    monkeypatch.setitem(ssd.ROWS, "cpu", 256 if variant == "plain" else 16)  # of the scores at once
    changes = {
        "plain": {},
        "gated": {"z": torch.randn(2, 100, 4, 32)},
        "initial states": {"initial_states": torch.randn(2, 4, 32, 16)},
        "no skip, no bias": {"D": None, "dt_bias": None},
        "D per channel": {"D": torch.randn(4, 32)},
        "limit": {"dt_limit": (1e-3, 1e-2)},
    }[variant]
    assert max(errors(random_inputs(dtype=FP32, batch=2, **changes), Precision())) < 2e-6


@pytest.mark.parametrize(
    "variant", ["plain", "initial state", "not normalised", "scale", "no gate", "all forgotten"]
)
def test_in_fp32_it_is_gdn(variant):
    changes = {
        "plain": {},
        "initial state": {"initial_state": torch.randn(2, 4, 32, 24)},
        "not normalised": {"k": torch.randn(2, 150, 2, 32) / 32**0.5, "use_qk_l2norm": False},
        "scale": {"scale": 3.0},
        "no gate": {"gate": 0.0},
        "all forgotten": {"g": torch.full((2, 150, 4), -torch.inf)},
    }[variant]
    assert max(errors(make_gdn(batch=2, **changes), Precision())) < 2e-6


def test_spans_carry_the_state(make: Make):
    inputs = make(seqlen=150, batch=2)
    whole = rounded(inputs, Precision())
    pieces = rounded(inputs, Precision(), block=CHUNK)
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


def with_states(make: Make):
    inputs = make(seqlen=150, batch=2)
    return replace(inputs, **{inputs.STATES: torch.randn(2, 4, 32, 24 if make is make_gdn else 16)})


def test_every_sequence_begins_with_its_own_state(make: Make):
    inputs = with_states(make)
    apart = rounded(inputs, Precision())
    together = begun(inputs, Precision())
    for batch in range(2):
        found = advanced(together, inputs, batch, 0, inputs.length)
        assert all(torch.equal(one, other[batch]) for one, other in zip(found, apart, strict=True))


@pytest.mark.parametrize("length", [0, 150])
def test_heads_side_by_side_are_computed_as_alone(make: Make, length):
    inputs = with_states(make)
    span = Span(sequence=1, batch=1, start=0, stop=length)
    operator = operators.get(inputs.operator)
    wide, whole = operator.repeated(inputs, span, 3)
    gate = operator.oracle.gate(wide, whole)
    found = begun(inputs, Precision()).advance(wide, whole, gate)
    for dim, three, one in zip(
        (1, 0), found, advanced(begun(inputs, Precision()), inputs, 1, 0, length), strict=True
    ):
        torch.testing.assert_close(three, torch.cat([one] * 3, dim))


def test_an_empty_sequence_keeps_its_state():
    inputs = make_gdn(initial_state=torch.randn(1, 4, 32, 24))
    out, state = advanced(begun(inputs, Precision()), inputs, 0, 0, 0)
    assert out.shape == (0, 4, 24)
    assert torch.equal(state, inputs.initial_state[0])
    gate = operators.get("gdn").oracle.gate(inputs, Span(sequence=0, batch=0, start=0, stop=0))
    assert torch.equal(gate.largest_exponent(), torch.zeros(4))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_the_states_are_numbers_of_their_dtype(make: Make, dtype):
    states = rounded(make(dtype=FP32), Precision(state_dtype=dtype))[1]
    assert torch.equal(states.to(dtype).float(), states)


@pytest.mark.parametrize(("dtype", "unit_roundoff"), [(FP16, 2**-11), (BF16, 2**-8)], ids=str)
def test_the_error_is_that_of_a_few_roundings(make: Make, dtype, unit_roundoff):
    exact_out, exact_states = errors(make(dtype=dtype), Precision())
    relaxed_out, relaxed_states = errors(make(dtype=dtype), Precision(intermediates="relaxed"))
    # one rounding: uniform within half a spacing, rms between 0.29 and 0.58 of the unit roundoff
    most = (3 if make is make_gdn else 1) * unit_roundoff
    assert 0.29 * unit_roundoff < exact_out < relaxed_out < most
    assert 0.29 * unit_roundoff < exact_states < relaxed_states < most


def test_coarser_states_lose_more(make: Make):
    gdn = make is make_gdn
    inputs = make(dtype=FP32, **({"gate": 0.01} if gdn else {}))
    fp32, fp16, bf16 = (
        errors(inputs, Precision(state_dtype=dtype)) for dtype in (FP32, FP16, BF16)
    )
    for tensor in range(2):
        assert (50 if gdn else 100) * fp32[tensor] < fp16[tensor] < bf16[tensor] / 4


def test_the_products_stay_fp32_when_the_process_allows_tf32():
    torch.set_float32_matmul_precision("high")
    try:
        rounded(random_inputs(dtype=FP32), Precision())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_wide_states_are_judged_in_shorter_blocks():
    def length(n: int) -> int:
        x, B, dt = (torch.empty(1, 1, *of).expand(1, 4096, *of) for of in ((8, 64), (1, n), (8,)))
        inputs = SSDInputs.unchecked(x=x, dt=dt, A=dt[0, 0], B=B, C=B, chunk_size=64)
        return block_length(operators.get("ssd").oracle, inputs)

    assert 64 <= length(256) < length(16)
