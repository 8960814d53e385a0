"""The record of GDN: a call's sizes, its cost, its form, and inputs drawn for a bench."""

from __future__ import annotations

import pytest
import torch

from ssdprof import operators
from ssdprof.errors import BadInputError
from ssdprof.kernels.gdn.inputs import MAX_DIM, GDNInputs
from ssdprof.kernels.ssd import fused, recurrent, unfused
from ssdprof.operators.generate import Cell, Shape, Tokens

OPERATOR = operators.get("gdn")
CPU = torch.device("cpu")
SMALL = Shape("small", "", {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 24, "largest_beta": 2})


def drawn(tokens: Tokens, layout: str = "contiguous") -> GDNInputs:
    inputs = OPERATOR.generated.draw(Cell(shape=SMALL, dtype="bf16", layout=layout, tokens=tokens), CPU)
    assert isinstance(inputs, GDNInputs)
    return inputs


def test_a_batch_is_drawn_as_a_model_passes_it() -> None:
    inputs = drawn(Tokens(sequences=2, seqlen=30), "views")
    assert inputs.q.shape == (2, 30, 2, 16)
    assert inputs.v.stride(1) == 2 * 2 * 16 + 4 * 24, "q, k and v are views of one tensor"
    assert inputs.use_qk_l2norm
    assert (inputs.g < 0).all()
    assert 1 < inputs.beta.max() <= 2
    assert torch.equal(inputs.q, drawn(Tokens(sequences=2, seqlen=30), "views").q), "the same at every call"


def test_packed_sequences_have_their_states() -> None:
    inputs = drawn(Tokens(sequences=3, seqlen=20, shortest=5))
    assert inputs.cu_seqlens is not None
    assert inputs.cu_seqlens[-1] == inputs.length
    assert inputs.initial_state is not None
    assert inputs.initial_state.shape == (3, 4, 16, 24)


def test_dims_and_cost() -> None:
    inputs = drawn(Tokens(sequences=2, seqlen=40))
    dims = OPERATOR.judged.dims(inputs)
    assert dims.words == "2/4 heads, K 16, V 24"
    positions = 2 * 40
    assert OPERATOR.judged.flops(dims.sizes, positions) == positions * (2 * 17 * (2 * 16 + 4 * 24) + 6 * 4 * 16 * 24)
    bf16, fp32 = 2, 4
    read = positions * (bf16 * (2 * 2 * 16 + 4 * 24 + 4) + fp32 * 4)
    written = positions * bf16 * 4 * 24 + fp32 * 2 * 4 * 16 * 24
    assert OPERATOR.judged.cost(inputs)[1]["bytes_moved"] == read + written


def test_forms_are_those_of_an_output() -> None:
    inputs = drawn(Tokens(sequences=3, seqlen=20, shortest=5))
    out, final_states = OPERATOR.judged.forms(inputs)
    assert (out.shape, out.dtype) == (tuple(inputs.v.shape), torch.bfloat16)
    assert (final_states.shape, final_states.dtype) == ((3, 4, 16, 24), torch.float32)


def test_the_largest_sizes_are_those_of_the_kernels() -> None:
    """A config is judged by them before a download.  Kernels take these sizes and refuse larger ones by name."""
    assert operators.get("ssd").generated.largest == {"dstate": fused.MAX_DSTATE}
    assert fused.MAX_DSTATE == recurrent.MAX_DSTATE == unfused.MAX_DSTATE
    assert OPERATOR.generated.largest == {"key_dim": MAX_DIM, "value_dim": MAX_DIM}


def test_sizes_as_a_user_writes_them() -> None:
    shape = OPERATOR.generated.parse("16/32x128x64")
    assert str(shape) == "16/32 heads, K 128, V 64"
    assert OPERATOR.generated.parse("16x32x128") is None
    assert str(OPERATOR.generated.parse("2/4x256x256")) == "2/4 heads, K 256, V 256"
    assert OPERATOR.generated.grammar == "key heads / value heads x K x V, such as 16/32x128x128"
    assert str(OPERATOR.generated.shapes["olmo-hybrid-7b"]) == "30/30 heads, K 96, V 192"


@pytest.mark.parametrize("text", ["3/4x16x16", "0/4x16x16", "2/4x257x16", "2/4x16x300"])
def test_impossible_sizes_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match=text):
        OPERATOR.generated.parse(text)
