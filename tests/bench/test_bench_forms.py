"""Other inputs (`--draw`), forms that are not chosen (`--also`), and decoding compared with another library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from command_line import call
from fakes import RAN
from test_bench_run import noting
from test_bench_run import pretended_gpu as pretended_gpu
from test_bench_run import pytestmark as pytestmark

from ssdprof import operators
from ssdprof.commands.bench import ways
# TODO ssdprof.bench.contenders: line_up
# TODO ssdprof.bench.judge: judge
from ssdprof.jobs.model import load
# TODO ssdprof.bench.schema: BenchReport
from ssdprof.errors import BadInputError
from ssdprof.kernels import registry
from ssdprof.kernels.gdn.reference import gdn_chunked, gdn_recurrence
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, UnsupportedError
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.operators.generate import Cell, Tokens
# TODO ssdprof.operators.drawing: Peer, PeerSource
from ssdprof.operators.gdn import GDNShape
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.implementations import resolve
from ssdprof.operators.ssd import SSDShape
from ssdprof.schema import EXACT_FP32

GDN, SSD = operators.get("gdn"), operators.get("ssd")
CPU = torch.device("cpu")
SHAPES: dict[str, Any] = {
    "gdn": GDNShape(name="tiny", key_heads=2, value_heads=8, key_dim=16, value_dim=16),
    "ssd": SSDShape(name="tiny", nheads=2, headdim=16, dstate=16, ngroups=1),
}


def cell(operator: str, seqlen: int = 40, sequences: int = 2, drawn: tuple[str, ...] = ()) -> Cell:
    tokens = Tokens(sequences=sequences, seqlen=seqlen)
    return Cell(shape=SHAPES[operator], dtype="bf16", layout="contiguous", tokens=tokens, drawn=drawn)


def invoke(*words: str) -> tuple[int, str, str]:
    return call("bench", *words)


def report_of(*words: str) -> BenchReport:
    code, out, err = invoke(*words, "--json")
    assert code == 0, err
    return load(out)


# --- --draw


def test_normalised_inputs_have_unit_keys_and_are_not_normalised_again() -> None:
    usual, normalised = (GDN.drawing.draw(cell("gdn", drawn=drawn), CPU) for drawn in ((), ("normalised",)))
    assert usual.use_qk_l2norm
    assert not normalised.use_qk_l2norm
    for name in ("q", "k"):
        norms = getattr(normalised, name).float().norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-2)
        assert getattr(usual, name).float().norm(dim=-1).min() > 1.5
    assert all(torch.equal(getattr(usual, name), getattr(normalised, name)) for name in ("v", "g", "beta"))
    for ours, theirs in zip(gdn_chunked(usual, torch.float64), gdn_chunked(normalised, torch.float64), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-2, "the same problem but for the rounding of q and k"


def test_a_quarter_of_the_heads_has_no_gate() -> None:
    usual, ungated = (GDN.drawing.draw(cell("gdn", drawn=drawn), CPU) for drawn in ((), ("quarter-ungated",)))
    without = (ungated.g == 0).all(dim=(0, 1))
    assert without.tolist() == [True, False, False, False] * 2
    assert torch.equal(ungated.g[..., ~without], usual.g[..., ~without])
    assert (usual.g < 0).all()


def test_words_of_draw_come_once_in_the_operators_order_and_others_are_refused() -> None:
    assert ways(GDN, "quarter-ungated, normalised,normalised") == ("normalised", "quarter-ungated")
    assert ways(GDN, "") == ways(SSD, "") == ()
    with pytest.raises(BadInputError, match="--draw does not know 'half-ungated'") as refused:
        ways(GDN, "half-ungated")
    assert "quarter-ungated (every fourth value head has no gate: g = 0)" in str(refused.value.hint)
    with pytest.raises(BadInputError) as refused:
        ways(SSD, "normalised")
    assert refused.value.hint == "For ssd there are: none."


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gdn", "--draw", "wide"), "--draw does not know 'wide'"),
        (("ssd", "--also", "fused_portable"), "There is no implementation 'fused_portable' of ssd: it is one of gdn."),
    ],
)
def test_unknown_words_end_with_2(words: tuple[str, ...], said: str) -> None:
    code, _, err = invoke(*words)
    assert code == 2
    assert said in err


# --- --also


def named(*names: str) -> list[Implementation]:
    return [resolve(GDN, name) for name in names]


def test_forms_take_part_once_with_exact_intermediates_where_they_are_named() -> None:
    both = tuple(EXACT_FP32.model_copy(update={"intermediates": one}) for one in ("exact", "relaxed"))
    contenders = line_up(GDN, cell("gdn"), both, named("fused", "fused_portable", "fused_portable"), ())
    assert [(one.name, str(one.precision)) for one in contenders] == [
        ("fused", "exact, fp32 states"), ("fused", "relaxed, fp32 states"), ("fused_portable", "exact, fp32 states"),
    ]  # fmt: skip
    with pytest.raises(BadInputError, match="There is no implementation 'portable' of gdn"):
        named("portable")


def test_the_portable_form_runs_the_portable_kernel_where_fused_would_not() -> None:
    portable = resolve(GDN, "fused_portable")
    inputs = GDN.drawing.draw(cell("gdn", seqlen=3), CPU)
    assert registry.get("gdn", "fused").plan(inputs, Precision()).variant == "recurrent"
    plan = portable.present.plan(inputs, Precision())
    assert (plan.variant, plan.launches) == ("interpreter", 2)
    assert plan.reason.startswith("requested; ")
    (judged,) = judge(line_up(GDN, cell("gdn"), (EXACT_FP32,), (portable,), ())[-1].entries(GDN, inputs))
    assert judged.verdict.status == "passed", judged.verdict.reason


def test_the_recurrent_form_in_place_leaves_its_inputs_as_they_were() -> None:
    in_place = resolve(SSD, "recurrent_in_place").present
    inputs: SSDInputs = SSD.drawing.draw(cell("ssd", seqlen=1), CPU)
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


# --- whole benches, with a stopwatch that invents the numbers


def peer(operator: str, name: str, cost: float) -> PeerSource:
    """Another library that computes the recurrence."""

    def run(inputs: Any, _precision: Precision) -> Any:
        RAN.append((name, cost))
        exact = ssd_recurrence(inputs) if operator == "ssd" else gdn_recurrence(inputs)
        kind = inputs.x.dtype if operator == "ssd" else inputs.v.dtype
        return type(exact)(exact.out.to(kind), exact.final_states.float())

    def plan(_inputs: Any, _precision: Precision) -> registry.Plan:
        return registry.Plan(variant="triton", launches=1)

    implementation = Implementation(operator=operator, name=name, run=run, plan=plan)
    loaded = Peer(implementation=implementation, version="9.9", precisions=lambda _dtype: (EXACT_FP32,))
    return PeerSource(load=lambda _checkout: loaded, hint="")


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in ("ssd", "gdn"):
        for name, cost in (("unfused", 300.0), ("fused", 100.0), ("recurrent", 50.0)):
            monkeypatch.setitem(registry._implementations, (operator, name), noting(name, cost, operator))
    monkeypatch.setitem(GDN.drawing.peers, "fla_recurrent", peer("gdn", "fla_recurrent", 65.0))
    monkeypatch.setitem(SSD.drawing.peers, "selective_state_update", peer("ssd", "selective_state_update", 80.0))
    for record, name, cost in ((GDN, "fused_portable", 150.0), (SSD, "recurrent_in_place", 60.0)):
        plain = record.drawing.alternatives[name]

        def run(inputs: Any, precision: Precision, plain: Any = plain, name: str = name, cost: float = cost) -> Any:
            output = plain.run(inputs, precision)
            RAN.append((name, cost))
            return output

        monkeypatch.setitem(record.drawing.alternatives, name, replace(plain, run=run))


@pytest.mark.slow
@pytest.mark.usefixtures("stopwatch")
@pytest.mark.parametrize(
    ("words", "peer_name", "ratio"),
    [
        (("gdn", "--shape", "1/2x16x16"), "fla_recurrent", 65 / 50),
        (("ssd", "--shape", "2x16x16x1", "--chunk-size", "128"), "selective_state_update", 80 / 50),
    ],
)
def test_decoding_beside_a_library(words: tuple[str, ...], peer_name: str, ratio: float) -> None:
    done = report_of(*words, "--seq", "1", "--batch", "1,3", "--against", peer_name)
    assert (done.baseline, done.peers) == (peer_name, {peer_name: "9.9"})
    assert [one.tokens for one in done.cells] == ["1 x 1", "3 x 1"]
    for one in done.cells:
        cases = {case.implementation: case for case in one.cases}
        assert set(cases) == {peer_name, "unfused", "fused", "recurrent"}
        assert {case.status for case in cases.values()} == {"passed"}
        assert cases["fused"].variant == "recurrent", "fused takes that kernel too"
        over = cases["recurrent"].over(peer_name)
        assert over is not None
        assert over.device_ratio == pytest.approx(ratio)


@pytest.mark.slow
@pytest.mark.usefixtures("stopwatch")
def test_forms_and_draws_stand_in_the_report() -> None:
    words = ("--seq", "40", "--draw", "normalised,quarter-ungated", "--also", "fused_portable")
    done = report_of("gdn", "--shape", "1/4x16x16", *words)
    (one,) = done.cells
    assert one.drawn == ("normalised", "quarter-ungated")
    cases = {case.implementation: case for case in one.cases}
    assert set(cases) == {"unfused", "fused", "fused_portable"}
    assert {case.status for case in cases.values()} == {"passed"}
    over = cases["fused_portable"].over("unfused")
    assert over is not None
    assert over.device_ratio == 2
    decoding = report_of(
        "ssd", "--shape", "2x16x16x1", "--chunk-size", "128", "--seq", "1", "--also", "recurrent_in_place"
    )
    names = [case.implementation for case in decoding.cells[0].cases]
    assert names == ["unfused", "fused", "recurrent_in_place", "recurrent"]
    assert decoding.cells[0].drawn == ()
