"""What a report says of a wrong output besides its largest error."""

from dataclasses import replace

import pytest
import torch
from generated_inputs import generated

from ssdprof import operators
from ssdprof.kernels import GDNInputs
from ssdprof.kernels.oracle import spans_of
from ssdprof.kernels.precision import Precision
from ssdprof.measure.accuracy import Candidate, compare, oracle_output
from ssdprof.measure.diagnosis import diagnosed
from ssdprof.operators.operator import OutputPair


def remarks(inputs: GDNInputs, output: OutputPair) -> tuple[str, str]:
    candidate = Candidate(output=output, precision=Precision())
    out, states = diagnosed(inputs, candidate, compare(inputs, {"": candidate})[""])
    return out.remark, states.remark


def gdn() -> GDNInputs:
    inputs: GDNInputs = generated("gdn", "1/2x16x16", 200, sequences=2)
    return inputs


@pytest.mark.parametrize(
    ("row", "columns", "remark"),
    [
        (1, slice(128, None), "from position 128 of {} on, a multiple of 128, all is wrong"),
        (0, slice(100, None), "from position 100 of {} on all is wrong"),
        (1, slice(None), "all of {} is wrong, from its start on"),
        (0, slice(40, 60), "the first position outside is 40 of {}"),
    ],
)
def test_the_place_where_an_error_begins(row, columns: slice, remark):
    inputs = gdn()
    out, states = oracle_output(inputs)
    out[row, columns, 1] += 0.5
    name = f"sequence {row} (200 tokens)"
    assert remarks(inputs, (out, states)) == (remark.format(name), "")


def test_the_sequence_whose_state_is_wrong():
    inputs = gdn()
    out, states = oracle_output(inputs)
    states[1] *= 2
    assert remarks(inputs, (out, states)) == (
        "",
        "the first wrong state is that of sequence 1 (200 tokens)",
    )


def test_why_the_exact_answer_is_not_finite():
    """It overflows fp16 with this scale."""
    inputs = generated("gdn", "1/2x16x16", 20, sequences=2, dtype="fp16")
    inputs = replace(inputs, scale=1e9, initial_state=torch.ones(2, 2, 16, 16))

    def remark() -> str:
        return remarks(inputs, oracle_output(inputs))[0]

    assert remark() == "all inputs are finite, so the exact answer overflows"
    inputs.k[1, 6] = inputs.v[1, 7] = torch.nan
    assert remark() == "k and v hold NaN, first at position 6 of sequence 1"
    inputs.initial_state[1] = torch.nan
    assert remark().endswith("hold NaN, first in the initial state of sequence 1")


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (Precision(state_dtype=torch.bfloat16), "states were kept in bf16"),
        (Precision(state_dtype=torch.float16), "states were kept in fp16"),
        (Precision(intermediates="relaxed"), "intermediates were rounded to 16 bits"),
    ],
)
def test_an_error_as_large_as_that_of_a_known_rounding(precision: Precision, words, chunk):
    inputs = gdn()
    inputs = replace(
        inputs, **{name: getattr(inputs, name).float() for name in ("q", "k", "v", "beta")}
    )
    oracle = operators.get("gdn").oracle
    rounded = oracle.rounded(inputs, precision)
    outs = []
    states = []
    for span in spans_of(inputs):
        outs.append(rounded.advance(inputs, span, oracle.gate(inputs, span, chunk))[0])
        states.append(rounded.state * (1 + 2.0**-23))  # not of 16 bits alone
    for remark in remarks(inputs, (torch.stack(outs), torch.stack(states))):
        assert remark.endswith(f"the error is as large as if {words}")


def test_an_error_of_any_other_size_is_no_rounding():
    inputs = gdn()
    out, states = oracle_output(inputs)
    assert "as large" not in remarks(inputs, (out * 1.5, states))[0]
