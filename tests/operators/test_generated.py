"""Random inputs of a bench and their ways (`--draw`); sizes as a user writes them; cost and form of
a call; forms of kernels that run only when they are named.
"""

from dataclasses import replace

import pytest
import torch
from fakes import needs_interpreter
from verdict import assert_passes

from ssdprof import operators
from ssdprof.errors import BadInputError
from ssdprof.jobs.reading import parse_ways
from ssdprof.kernels import registry
from ssdprof.kernels.gdn.inputs import MAX_DIM
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd import fused, recurrent, unfused
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.operators.generate import Cell, Layout, Tokens
from ssdprof.operators.implementations import resolve

GDN = operators.get("gdn")
SSD = operators.get("ssd")
SIZES = {"gdn": (2, 8, 16, 16), "ssd": (2, 16, 16, 1)}


def generated(
    operator: str,
    *ways: str,
    seqlen: int = 40,
    sequences: int = 2,
    shortest: int | None = None,
    sizes: tuple[int, ...] = (),
    layout: Layout = "contiguous",
):
    tokens = Tokens(sequences=sequences, seqlen=seqlen, shortest=shortest)
    generated = operators.get(operator).generated
    shape = generated.shape("small", *(sizes or SIZES[operator]))
    return generated.draw(
        Cell(shape=shape, dtype="bf16", layout=layout, tokens=tokens, ways=ways),
        torch.device("cpu"),
    )


SMALL = dict(sizes=(2, 4, 16, 24, 2))


def test_ssd_inputs_are_distributed_as_a_layer_is_initialised():
    inputs = generated("ssd", seqlen=512)
    assert (inputs.x.shape, inputs.x.dtype) == ((2, 512, 2, 16), torch.bfloat16)
    assert inputs.x.is_contiguous()
    assert abs(float(inputs.x.float().std()) - 1) < 0.05
    assert ((inputs.A >= -16) & (inputs.A <= -1)).all()
    step = torch.nn.functional.softplus(inputs.dt_bias)
    assert ((step >= 0.99e-3) & (step <= 1.01e-1)).all()
    again = generated("ssd", seqlen=512)
    assert torch.equal(inputs.x, again.x)
    assert torch.equal(inputs.dt, again.dt)


def test_a_batch_is_drawn_as_a_model_passes_it():
    inputs = generated("gdn", layout="views", **SMALL)
    assert inputs.q.shape == (2, 40, 2, 16)
    assert inputs.v.stride(1) == 2 * 2 * 16 + 4 * 24, "q, k and v are views of one tensor"
    assert inputs.use_qk_l2norm
    assert (inputs.g < 0).all()
    assert 1 < inputs.beta.max() <= 2
    assert torch.equal(inputs.q, generated("gdn", layout="views", **SMALL).q)
    inputs = generated("ssd", layout="views", sequences=1, sizes=(4, 16, 32, 2))
    x, B, C = inputs.x, inputs.B, inputs.C
    assert x.stride(1) == B.stride(1) == C.stride(1) == 4 * 16 + 2 * 2 * 32
    assert (B.data_ptr() - x.data_ptr(), C.data_ptr() - B.data_ptr()) == (2 * 4 * 16, 2 * 2 * 32)
    assert inputs.dt.stride(1) == 2 * 4 * 16 + 2 * 2 * 32 + 4


@pytest.mark.parametrize("operator", ["ssd", "gdn"])
def test_packed_sequences_have_their_states_and_forms_are_those_of_an_output(operator):
    inputs = generated(operator, sequences=16, seqlen=32, shortest=8)
    steps = inputs.cu_seqlens.diff()
    assert len(steps) == 16
    assert ((steps >= 8) & (steps <= 32)).all()
    assert steps.unique().numel() > 1
    assert inputs.cu_seqlens[-1] == inputs.length
    out, final_states = operators.get(operator).oracle.forms(inputs)
    assert (out.shape, out.dtype) == (inputs.values.shape, torch.bfloat16)
    assert (final_states.shape, final_states.dtype) == (inputs.initial.shape, torch.float32)
    assert inputs.initial.shape == {"ssd": (16, 2, 16, 16), "gdn": (16, 8, 16, 16)}[operator]
    tokens = Tokens(sequences=2, seqlen=64, shortest=8, state_every=1)
    assert str(tokens) == "2 packed x 8-64, every state"


def test_dims_and_cost():
    inputs = generated("gdn", **SMALL)
    positions = 2 * 40
    dims = GDN.oracle.dims(inputs)
    assert dims.words == "2/4 heads, K 16, V 24"
    assert GDN.oracle.flops(dims.sizes, positions) == positions * (
        2 * 17 * (2 * 16 + 4 * 24) + 6 * 4 * 16 * 24
    )
    bf16 = 2
    fp32 = 4
    read = positions * (bf16 * (2 * 2 * 16 + 4 * 24 + 4) + fp32 * 4)
    written = positions * bf16 * 4 * 24 + fp32 * 2 * 4 * 16 * 24
    assert GDN.oracle.cost(inputs)[1]["bytes_moved"] == read + written


# --- sizes


def test_the_largest_sizes_are_those_of_the_kernels():
    """A config is judged by them before a download.  Kernels take these sizes and refuse larger
    ones by name.
    """
    assert SSD.generated.largest == {"dstate": fused.MAX_DSTATE}
    assert fused.MAX_DSTATE == recurrent.MAX_DSTATE == unfused.MAX_DSTATE
    assert GDN.generated.largest == {"key_dim": MAX_DIM, "value_dim": MAX_DIM}


def test_sizes_as_a_user_writes_them():
    assert str(GDN.generated.parse("16/32x128x64")) == "16/32 heads, K 128, V 64"
    assert GDN.generated.parse("16x32x128") is None
    assert str(GDN.generated.parse("2/4x256x256")) == "2/4 heads, K 256, V 256"
    assert GDN.generated.grammar == "key heads / value heads x K x V, such as 16/32x128x128"
    assert str(GDN.generated.shapes["olmo-hybrid-7b"]) == "30/30 heads, K 96, V 192"


@pytest.mark.parametrize("text", ["3/4x16x16", "0/4x16x16", "2/4x257x16", "2/4x16x300"])
def test_impossible_sizes_are_refused(text):
    with pytest.raises(BadInputError, match=text):
        GDN.generated.parse(text)


# --- ways to draw


def test_normalised_inputs_have_unit_keys_and_are_not_normalised_again():
    usual = generated("gdn")
    normalised = generated("gdn", "normalised")
    assert (usual.use_qk_l2norm, normalised.use_qk_l2norm) == (True, False)
    for name in ("q", "k"):
        norms = getattr(normalised, name).float().norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-2)
        assert getattr(usual, name).float().norm(dim=-1).min() > 1.5
    assert all(
        torch.equal(getattr(usual, name), getattr(normalised, name)) for name in ("v", "g", "beta")
    )
    for ours, theirs in zip(
        gdn_chunked(usual, torch.float64), gdn_chunked(normalised, torch.float64), strict=True
    ):
        assert (ours - theirs).norm() / theirs.norm() < 1e-2, (
            "the same problem but for the rounding of q and k"
        )


def test_a_quarter_of_the_heads_has_no_gate():
    usual = generated("gdn")
    ungated = generated("gdn", "quarter-ungated")
    without = (ungated.g == 0).all(dim=(0, 1))
    assert without.tolist() == [True, False, False, False] * 2
    assert torch.equal(ungated.g[..., ~without], usual.g[..., ~without])
    assert (usual.g < 0).all()


@pytest.mark.parametrize(
    ("way", "expected"), [("slow", [True] * 8), ("quarter-slow", [True, False, False, False] * 2)]
)
def test_heads_that_keep_thousands_of_tokens(way, expected: list[bool]):
    g = generated("gdn", way).g
    assert (g.mean((0, 1)) > -1.5e-4).tolist() == expected
    assert (g < 0).all()


def test_words_of_draw_come_once_in_the_operators_order_and_others_are_refused():
    assert parse_ways(GDN, "quarter-ungated, normalised,normalised") == (
        "normalised",
        "quarter-ungated",
    )
    assert parse_ways(GDN, "") == parse_ways(SSD, "") == ()
    with pytest.raises(BadInputError, match="--draw does not know 'half-ungated'") as refused:
        parse_ways(GDN, "half-ungated")
    assert "quarter-ungated (every fourth value head has no gate: g = 0)" in str(refused.value.hint)
    with pytest.raises(BadInputError) as refused:
        parse_ways(SSD, "normalised")
    assert refused.value.hint == "For ssd there are: none."


@needs_interpreter
def test_the_portable_form_runs_the_portable_kernel_where_fused_would_not():
    portable = resolve(GDN, "fused_portable")
    inputs = generated("gdn", seqlen=3)
    assert registry.get("gdn", "fused").plan(inputs, Precision()).variant == "recurrent"
    plan = portable.plan(inputs, Precision())
    assert (plan.variant, plan.launches) == ("interpreter", 2)
    assert_passes(portable.run(inputs, Precision()), inputs, Precision())


@needs_interpreter
def test_the_recurrent_form_in_place_leaves_its_inputs_as_they_were():
    in_place = resolve(SSD, "recurrent_in_place")
    inputs: SSDInputs = generated("ssd", seqlen=1)
    before = inputs.initial_states.clone()
    first, second = (in_place.run(inputs, Precision()) for _ in range(2))
    assert torch.equal(inputs.initial_states, before)
    assert torch.equal(first.final_states, second.final_states)
    expected = registry.get("ssd", "recurrent").run(inputs, Precision())
    assert torch.equal(first.out, expected.out)
    assert torch.equal(first.final_states, expected.final_states)
    plan = in_place.plan(inputs, Precision())
    assert (plan.launches, "copy of the state" in plan.reason) == (2, True)
    for call in (in_place.run, in_place.plan):
        with pytest.raises(UnsupportedError, match="begin with a state"):
            call(replace(inputs, initial_states=None), Precision())
