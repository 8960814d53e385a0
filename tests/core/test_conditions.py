"""The grammar of conditions, and what they judge."""

import math
from collections.abc import Callable

import cases
import pytest
from cases import (
    answers,
    band,
    bench,
    case,
    cell,
    deviation,
    failed,
    of_answers,
    of_cases,
    of_prefill,
    prefill,
    report,
    rows,
)
from hypothesis import given
from hypothesis import strategies as st

from ssdprof.core.conditions import METRICS, Change, Condition, parse_change, parse_gate
from ssdprof.core.outcome import broken, verdicts
from ssdprof.core.report import LeftOut, Report
from ssdprof.errors import BadInputError

NUMBERS = st.floats(min_value=0, max_value=1e9, allow_nan=False)


of_every_metric = given(data=st.data(), limit=NUMBERS, name=st.sampled_from(sorted(METRICS)))


def places(name: str) -> list[str]:
    of = METRICS[name].choices
    return ["fla", "my_kernels:fast", "int8-carried:head"] if of is None else list(of)


@of_every_metric
def test_every_gate_in_its_own_unit_is_read(data: st.DataObject, limit: float, name: str):
    metric = METRICS[name]
    at = data.draw(st.sampled_from(["", *places(name)]))
    limit = round(limit) if metric.is_whole else limit
    limit = float(f"{limit % 100 if metric.is_percent else limit:g}")
    text = f"{name}{f'@{at}' if at else ''}:{limit:g}{'%' if metric.is_percent else ''}"
    at = at or ("1e-3" if name == "match" else "")
    assert parse_gate(text) == Condition(metric=name, at=at, limit=limit, text=text)


@of_every_metric
def test_every_change_to_the_worse_is_read(data: st.DataObject, limit: float, name: str):
    metric = METRICS[name]
    at = data.draw(st.sampled_from(["", *places(name)]))
    relative = not metric.is_percent and data.draw(st.booleans())
    limit = float(f"{round(limit) if metric.is_whole else limit:g}")
    sign = "-" if metric.more_is_better else "+"
    unit = "%" if relative else ""
    text = f"{name}{f'@{at}' if at else ''}:base{sign}{limit:g}{unit}"
    found = parse_change(text)
    assert (found.metric, found.text, found.relative) == (name, text, relative)
    assert found.at == at or (name, at, found.at) == ("match", "", "1e-3")
    assert found.limit == (limit / 100 if relative else limit)


@given(text=st.text(alphabet="abeikloprst@:+-.%0159 ", max_size=20) | st.text(max_size=20))
def test_any_other_text_is_refused_with_a_hint(text: str):
    for read in (parse_gate, parse_change):
        try:
            found = read(text)
        except BadInputError as error:
            assert error.hint  # noqa: PT017
        else:
            assert math.isfinite(found.limit)
            assert found.text == text


# a text => what is wrong with it => what to write
GATES = """\
sped:1 => is of an unknown metric => Did you mean speedup?
speedup => cannot be read => Write speedup:1.5.
speedup:fast => cannot be read => speedup:1.5
speedup:1.5% => does not fit speedup => speedup:1.5
rms:base+3% => compares with another report => compare --fail-if
speedup:-1 => cannot be read => speedup:1.5
match:99 => does not fit match => Write match:99%.
match:101% => does not fit match => Write match:99%.
match@1e-4:99% => has an unknown word after @ => match takes 0, 1e-3, 1e-2.
rms@1e-3:1 => has an unknown word after @ => rms takes no @.
time@gpu:3 => has an unknown word after @ => time takes call, device.
rms:9e999 => does not fit rms => rms:1.5
state-breaks:0.5 => does not fit state-breaks => Write state-breaks:0.
"""
CHANGES = """\
mtach:base-1 => is of an unknown metric => Did you mean match?
time:3% => cannot be read => Write time:base+3%.
time:base-3% => does not fit time => Write time:base+3%.
speedup:base+3% => does not fit speedup => Write speedup:base-3%.
speedup:1.5 => cannot be read => Write speedup:base-3%.
match:base+0.1 => does not fit match => Write match:base-0.1.
match:base-0.1% => does not fit match => Write match:base-0.1.
match@1e-4:base-0.1 => has an unknown word after @ => match takes 0, 1e-3, 1e-2.
rms@1e-3:base+1% => has an unknown word after @ => rms takes no @.
launches:base+0.5 => does not fit launches => Write launches:base+0.
launches:base-1 => does not fit launches => Write launches:base+0.
kl:base+9e999 => does not fit kl => Write kl:base+0.001.
 => is of an unknown metric => Choose from: speedup
match:-0.1 => cannot be read => Write match:base-0.1.
"""


@pytest.mark.parametrize(
    ("parse", "text", "complaint", "hint"),
    [
        *((parse_gate, *gate) for gate in rows(GATES)),
        *((parse_change, *change) for change in rows(CHANGES)),
    ],
)
def test_what_cannot_be_read_says_what_to_write(
    parse: Callable[[str], Condition | Change], text, complaint, hint
):
    with pytest.raises(BadInputError) as caught:
        parse(text)
    what = "gate" if parse is parse_gate else "change"
    assert caught.value.message.startswith(f"The {what} {text!r} ")
    assert complaint in caught.value.message
    assert hint in caught.value.hint


def test_the_examples_in_hints_can_be_read():
    for name, metric in METRICS.items():
        assert parse_gate(f"{name}:{metric.gate}").metric == name
        assert parse_change(f"{name}:{metric.change}").metric == name


# --- judging


def said(found: Report, *gates: str) -> list[str]:
    return [str(one) for one in broken(found.changed(conditions=cases.gates(*gates)))]


TWO = report(layers=(0, 9), precisions=(cases.EXACT_FP32, cases.RELAXED_FP32))
EXACT_0, EXACT_9, RELAXED_0, RELAXED_9 = (
    f"layer {layer}, 131,072 tokens, fused, {intermediates}, fp32 states"
    for intermediates in ("exact", "relaxed")
    for layer in (0, 9)
)


def test_gates_that_hold():
    assert (
        said(
            TWO,
            "speedup:1.99",
            "match@1e-3:60%",
            "rms:3",
            "time:2000",
            "memory:1048576",
            "launches:1",
        )
        == []
    )


@pytest.mark.parametrize(
    ("gate", "names", "found"),
    [
        ("speedup:2.2", (EXACT_0, EXACT_9), "2x"),
        ("time@device:500.5", (EXACT_9,), "545 µs"),
        ("time@call:521", (EXACT_9,), "565 µs"),
        ("memory:1000", (EXACT_0, RELAXED_0, EXACT_9, RELAXED_9), "1,048,576 bytes"),
        ("match@0:80%", (RELAXED_0, RELAXED_9), ""),
        ("rms:1.4", (EXACT_9, RELAXED_0, RELAXED_9), "times the floor"),
    ],
)
def test_a_gate_names_the_cases_that_break_it(gate, names, found):
    """Neither the baseline's nor its other precisions'."""
    lines = said(TWO, gate)
    assert {line.split(": ")[1] for line in lines} == set(names)
    assert all(line.startswith(f"{gate}: ") and found in line for line in lines)


def test_a_speedup_over_another_implementation():
    """Of a bench, `fused` alone is judged, over the fastest case of the other."""
    made = (*cell(), *cell(times={"fla": 60.0}, precision=cases.RELAXED_FP32))
    assert said(bench(*made), "speedup@fla:1.1", "speedup:1.99") == []
    assert said(bench(*made), "speedup@fla:1.3") == [
        "speedup@fla:1.3: mamba2-2.7b, bf16, 1 x 1,024, fused, exact, fp32 states: 1.2x"
    ]
    assert said(bench(*made), "speedup@nobody:1")[0].endswith("it or its baseline was not timed")


def test_a_gate_that_can_judge_nothing_is_broken():
    refused = report(change=lambda one: failed(one, "refused"))
    assert said(refused, "rms:9") == ["rms:9: no case passed that it could judge"]
    assert {
        line.rpartition(": ")[2] for line in said(report(layers=(0,), gpu=False), "speedup:1")
    } == {"it or its baseline was not timed"}
    assert said(TWO, "kl:1") == ["kl:1: no case passed that it could judge"]
    small = deviation().changed(scale_max_abs=0.049)
    for other, reason in ((small, "the tolerance is over 2 %"), (None, "there is no baseline's")):
        out = cases.accuracy(vs_baseline=other)
        line, *_ = said(of_cases("run", [case(accuracy=(out,))]), "match:1%", "match@0:1%")
        assert f"states: {reason}" in line
        assert "gate rms" in line


def test_an_error_over_a_floor_of_nothing_is_infinite():
    for rms in (2e-3, None, 0.0):
        error = deviation().changed(rms_ratio=rms)
        out = cases.accuracy(vs_oracle=error, floor=deviation(0.0))
        found = said(of_cases("run", [case(accuracy=(out,))]), "rms:9")
        assert str(found).count(": inf times") == (rms != 0)


def test_the_fused_implementation_has_to_reach_the_speedup_of_a_prefill_in_each_form():
    place = "prefill, model convolution and norm, 1,024 tokens"
    assert said(prefill(), "speedup:1.99") == []
    assert said(prefill(), "speedup:2.1") == [
        f"speedup:2.1: {place}, fused, exact, fp32 states: 2x"
    ]
    own = [
        of_prefill(name, us, conv_and_norm="bundled")
        for name, us in (("unfused", 1100.0), ("fused", 1000.0))
    ]
    both = prefill(of_prefill("unfused", 2000.0), of_prefill(), *own)
    assert [line.split(", ")[0:2] for line in said(both, "speedup:1.99")] == [
        ["speedup:1.99: prefill", "bundled convolution and norm"]
    ]
    library = of_prefill("mamba_ssm", 9000.0, kind="library")
    assert said(prefill(of_prefill("unfused", 2000.0), of_prefill(), library), "speedup:1.99") == []


def test_a_prefill_that_was_not_timed_does_not_hold():
    base = of_prefill("unfused", 2000.0)
    late = of_prefill(call_us=None)
    assert said(prefill(base, late), "speedup:1")[0].endswith(
        "fused, exact, fp32 states: it or its baseline was not timed"
    )
    assert said(prefill(of_prefill()), "speedup:1")[0].endswith("it or its baseline was not timed")
    refused = failed(of_prefill(), "refused")
    assert said(prefill(base, refused), "speedup:1") == [
        "speedup:1: prefill, model convolution and norm, 1,024 tokens, fused, exact, fp32 states: "
        "refused: headdim 80 is not supported"
    ]
    place = "prefill, model convolution and norm, 131,072 tokens"
    spent = LeftOut(case_key=place, reason="spent")
    library = spent.changed(implementations=("mamba_ssm",))
    assert said(prefill(base, of_prefill(), left_out=(spent, library)), "speedup:1") == [
        f"speedup:1: {place}, fused: left out: spent"
    ]
    assert said(prefill(base), "speedup:1") == ["speedup:1: no case passed that it could judge"]


def test_a_left_out_cell_of_a_bench_breaks_a_speedup():
    left = LeftOut(case_key="mamba2-2.7b, bf16, 1 x 60", reason="the budget was spent")
    assert said(bench(left_out=(left,)), "speedup:1", "match@1e-2:1%") == [
        "speedup:1: mamba2-2.7b, bf16, 1 x 60: left out: the budget was spent"
    ]


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        ("kl:0.001", "0.002 nats"),
        ("top1:99.6%", "99.5%"),
        ("perplexity-increase:0.1%", "0.125%"),
        ("perplexity:8", "8.01"),
    ],
)
def test_answers_are_judged_on_the_whole_prompt_and_noise_is_not(gate, found):
    assert said(answers(), gate) == [
        f"{gate}: answers, 1,100 tokens, fused, exact, fp32 states: {found}"
    ]
    alone = of_answers(alone=3)
    assert (
        said(
            answers(
                of_answers(
                    bands=(
                        band(
                            kl_mean=0.0, top1_pct=100.0, perplexity=8.0, perplexity_increase_pct=0.0
                        ),
                    )
                ),
                alone,
            ),
            gate,
        )
        == []
    )


def test_a_perplexity_that_nobody_knows_cannot_be_judged():
    unknown = answers(of_answers(bands=(band(perplexity=None, perplexity_increase_pct=None),)))
    gate = "perplexity-increase:1%"
    gated = unknown.changed(conditions=cases.gates(gate))
    assert [verdict.holds for verdict in verdicts(gated)] == [None, False]
    assert said(unknown, gate) == [f"{gate}: no case passed that it could judge"]
