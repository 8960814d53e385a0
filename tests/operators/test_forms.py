"""Other inputs of a bench (`--draw`), and forms of the kernels that are not chosen by themselves (`--also`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import SHAPE

from ssdprof import operators
from ssdprof.errors import BadInputError
from ssdprof.jobs.request import parse_ways
from ssdprof.kernels import registry
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.gdn.reference import gdn_chunked
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.measure.accuracy import assert_passes
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.implementations import resolve

GDN, SSD = operators.get("gdn"), operators.get("ssd")
SHAPES: dict[str, Any] = {"gdn": operators.get("gdn").generated.parse("2/8x16x16"), "ssd": SHAPE}
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU")


def drawn(operator: str, *ways: str, seqlen: int = 40) -> Any:
    tokens = Tokens(sequences=2, seqlen=seqlen)
    cell = Cell(shape=SHAPES[operator], dtype="bf16", layout="contiguous", tokens=tokens, drawn=ways)
    return operators.get(operator).generated.draw(cell, torch.device("cpu"))


def test_normalised_inputs_have_unit_keys_and_are_not_normalised_again() -> None:
    usual, normalised = drawn("gdn"), drawn("gdn", "normalised")
    assert (usual.use_qk_l2norm, normalised.use_qk_l2norm) == (True, False)
    for name in ("q", "k"):
        norms = getattr(normalised, name).float().norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-2)
        assert getattr(usual, name).float().norm(dim=-1).min() > 1.5
    assert all(torch.equal(getattr(usual, name), getattr(normalised, name)) for name in ("v", "g", "beta"))
    for ours, theirs in zip(gdn_chunked(usual, torch.float64), gdn_chunked(normalised, torch.float64), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-2, "the same problem but for the rounding of q and k"


def test_a_quarter_of_the_heads_has_no_gate() -> None:
    usual, ungated = drawn("gdn"), drawn("gdn", "quarter-ungated")
    without = (ungated.g == 0).all(dim=(0, 1))
    assert without.tolist() == [True, False, False, False] * 2
    assert torch.equal(ungated.g[..., ~without], usual.g[..., ~without])
    assert (usual.g < 0).all()


@pytest.mark.parametrize(("way", "expected"), [("slow", [True] * 8), ("quarter-slow", [True, False, False, False] * 2)])
def test_heads_that_keep_thousands_of_tokens(way: str, expected: list[bool]) -> None:
    g = drawn("gdn", way).g
    assert (g.mean((0, 1)) > -1.5e-4).tolist() == expected
    assert (g < 0).all()


def test_words_of_draw_come_once_in_the_operators_order_and_others_are_refused() -> None:
    assert parse_ways(GDN, "quarter-ungated, normalised,normalised") == ("normalised", "quarter-ungated")
    assert parse_ways(GDN, "") == parse_ways(SSD, "") == ()
    with pytest.raises(BadInputError, match="--draw does not know 'half-ungated'") as refused:
        parse_ways(GDN, "half-ungated")
    assert "quarter-ungated (every fourth value head has no gate: g = 0)" in str(refused.value.hint)
    with pytest.raises(BadInputError) as refused:
        parse_ways(SSD, "normalised")
    assert refused.value.hint == "For ssd there are: none."


def test_a_form_is_one_of_its_operator() -> None:
    with pytest.raises(BadInputError, match="no implementation 'fused_portable' of ssd: it is one of gdn"):
        resolve(SSD, "fused_portable")


@needs_interpreter
def test_the_portable_form_runs_the_portable_kernel_where_fused_would_not() -> None:
    portable, inputs = resolve(GDN, "fused_portable"), drawn("gdn", seqlen=3)
    assert registry.get("gdn", "fused").plan(inputs, Precision()).variant == "recurrent"
    plan = portable.plan(inputs, Precision())
    assert (plan.variant, plan.launches) == ("interpreter", 2)
    assert plan.reason.startswith("requested; ")
    assert_passes(portable.run(inputs, Precision()), inputs, Precision())


@needs_interpreter
def test_the_recurrent_form_in_place_leaves_its_inputs_as_they_were() -> None:
    in_place = resolve(SSD, "recurrent_in_place")
    inputs: SSDInputs = drawn("ssd", seqlen=1)
    assert inputs.initial_states is not None
    before = inputs.initial_states.clone()
    first, second = (in_place.run(inputs, Precision()) for _ in range(2))
    assert torch.equal(inputs.initial_states, before)
    assert torch.equal(first.final_states, second.final_states)
    expected = registry.get("ssd", "recurrent").run(inputs, Precision())
    assert torch.equal(first.out, expected.out)
    assert torch.equal(first.final_states, expected.final_states)
    plan = in_place.plan(inputs, Precision())
    assert (plan.launches, "copy of the state" in plan.reason) == (2, True)
    with pytest.raises(UnsupportedError, match="begin with a state"):
        in_place.run(replace(inputs, initial_states=None), Precision())
