"""The grammar of conditions, and what they judge."""

from __future__ import annotations

import math
from typing import Any

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
)
from hypothesis import given
from hypothesis import strategies as st

from ssdprof.core.conditions import METRICS, Condition, broken, of_options, parse, verdicts
from ssdprof.core.report import LeftOut, Report
from ssdprof.errors import BadInputError

NUMBERS = st.floats(min_value=0, max_value=1e9, allow_nan=False)


def places(name: str) -> list[str]:
    of = METRICS[name].places
    return ["fla", "own_kernels.fast"] if of is None else list(of)


@given(data=st.data(), limit=NUMBERS, name=st.sampled_from(sorted(METRICS)))
def test_every_condition_in_its_own_unit_is_read(
    data: st.DataObject, limit: float, name: str
) -> None:
    at = data.draw(st.sampled_from(["", *places(name)]))
    metric, to_base = METRICS[name], data.draw(st.booleans())
    unit = data.draw(st.sampled_from(["", "%"])) if to_base else "%" if metric.percent else ""
    limit = limit if to_base or not unit else limit % 100
    limit = float(f"{limit:g}")
    base = f"base{'-' if metric.more else '+'}" if to_base else ""
    text = f"{name}{f'@{at}' if at else ''}:{base}{limit:g}{unit}"
    found = parse("--fail-if" if to_base else "--gate", text)
    assert found == Condition(
        metric=name, at=at, limit=limit, percent=unit == "%", to_base=to_base, spelling=text
    )


@given(text=st.text(alphabet="abeikloprst@:+-.%0159 ", max_size=20) | st.text(max_size=20))
def test_any_other_text_is_refused_with_a_hint(text: str) -> None:
    for read in (lambda: parse("--gate", text), lambda: parse("--fail-if", text)):
        try:
            found = read()
        except BadInputError as error:
            assert error.hint  # noqa: PT017
        else:
            assert math.isfinite(found.limit)
            assert found.spelling == text


GATES = [
    ("sped:1", "does not know 'sped'", "Did you mean speedup?"),
    ("speedup", "cannot read 'speedup'", "Write speedup:2."),
    ("speedup:fast", "cannot read", "speedup:2"),
    ("speedup:1.5%", "does not fit speedup", "speedup:2"),
    ("rms:base+3%", "has no report to compare with", "compare --fail-if"),
    ("speedup:-1", "does not fit speedup", "speedup:2"),
    ("match:99", "does not fit match", "Write match:2%."),
    ("match@1e-4:99%", "no match at 1e-4", "0, 1e-3, 1e-2"),
    ("rms@1e-3:1", "no rms at 1e-3", "Write rms:2"),
    ("time@gpu:3", "no time at gpu", "call, device"),
    ("rms:9e999", "no number", "rms:2"),
]
CHANGES = [
    ("mtach:-1", "does not know 'mtach'", "Did you mean match?"),
    ("slower", "cannot read 'slower'", "slower:3%"),
    ("slower:3", "does not fit slower", "slower:3%"),
    ("slower:-3%", "does not fit slower", "slower:3%"),
    ("match:0.1", "does not fit match", "match:-0.1"),
    ("match:-0.1%", "does not fit match", "match:-0.1"),
    ("match@1e-4:-0.1", "no match at 1e-4", "0, 1e-3, 1e-2"),
    ("rms@1e-3:1%", "no rms at 1e-3", "match has a place: 0, 1e-3"),
    ("launches:-1", "does not fit launches", "launches:0"),
    ("speedup:base+3%", "does not fit speedup", "Write speedup:2 or speedup:base-3%."),
    ("time:base-3%", "does not fit time", "time:base+3%"),
    ("", "does not know ''", "Choose from: slower"),
]


@pytest.mark.parametrize(
    ("option", "text", "complaint", "hint"),
    [*(("--gate", *one) for one in GATES), *(("--fail-if", *one) for one in CHANGES)],
)
def test_what_cannot_be_read_says_what_to_write(
    option: str, text: str, complaint: str, hint: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        parse(option, text)
    assert caught.value.message.startswith(f"{option} ")
    assert complaint in caught.value.message
    assert hint in caught.value.hint


def test_options_are_spellings_of_conditions() -> None:
    given = {
        "min-speedup 1.5": ("speedup:1.5", {"min_speedup": 1.5}),
        "min-match 1e-3:99": ("match@1e-3:99%", {"min_match": ["1e-3:99"]}),
        "min-match 0:60": ("match@0:60%", {"min_match": ["0:60%"]}),
        "max-rms-ratio 1.5": ("rms:1.5", {"max_rms_ratio": 1.5}),
        "max-kl 0.001": ("kl:0.001", {"max_kl": 0.001}),
        "min-top1 99%": ("top1:99%", {"min_top1": "99%"}),
        "max-perplexity-increase 1%": ("perplexity-increase:1%", {"max_perplexity_increase": "1%"}),
        "speedup@fla:1.3": ("speedup@fla:1.3", {"gates": ["speedup@fla:1.3"]}),
    }
    for spelling, (gate, options) in given.items():
        conditions = of_options(**options)  # type: ignore[arg-type]
        assert conditions == (parse("", gate).changed(spelling=spelling),)
    assert len(of_options(min_match=["0:100", "0:50"])) == 2
    both = of_options(min_speedup=1.5, min_match=["1e-3:99", "0:60%"], gates=["rms:2"])
    assert [one.metric for one in both] == ["speedup", "match", "match", "rms"]
    assert of_options() == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_match": ["99"]}, "--min-match is no limit: 99:"),
        ({"min_match": ["1e-4:99"]}, "--min-match is no limit: 1e-4:99"),
        ({"min_match": ["1e-3:101"]}, "--min-match is no limit: 1e-3:101"),
        ({"min_match": ["1e-3:nan"]}, "--min-match is no limit: 1e-3:nan"),
        ({"max_kl": -1.0}, "--max-kl is no limit: -1.0"),
        ({"max_kl": math.nan}, "--max-kl is no limit: nan"),
        ({"min_speedup": math.inf}, "--min-speedup is no limit: inf"),
        ({"min_top1": "101%"}, "--min-top1 is no limit: 101%"),
        ({"max_perplexity_increase": "101%"}, "--max-perplexity-increase is no limit: 101%"),
        ({"max_perplexity_increase": "much"}, "--max-perplexity-increase is no limit: much"),
    ],
)
def test_options_that_are_no_limit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        of_options(**options)
    assert caught.value.message == f"{said}."
    assert caught.value.hint.startswith("Give ")


# --- judging


def said(found: Report, *gates: str) -> list[str]:
    return [
        str(one)
        for one in broken(found.changed(conditions=[parse("--gate", gate) for gate in gates]))
    ]


TWO = report(layers=(0, 9), precisions=(cases.EXACT_FP32, cases.RELAXED_FP32))
EXACT_0, EXACT_9 = (f"layer {layer}, 131,072 tokens, fused, exact, fp32 states" for layer in (0, 9))


def test_gates_that_hold() -> None:
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
        ("speedup:2.2", (EXACT_0, EXACT_9), "2x over unfused"),
        ("time@device:500.5", (EXACT_9,), "545 us"),
        ("time@call:521", (EXACT_9,), "565 us"),
        (
            "memory:1000",
            (
                EXACT_0,
                EXACT_0.replace("exact", "relaxed"),
                EXACT_9,
                EXACT_9.replace("exact", "relaxed"),
            ),
            "1,048,576 bytes",
        ),
        (
            "match@0:80%",
            (EXACT_0.replace("exact", "relaxed"), EXACT_9.replace("exact", "relaxed")),
            "",
        ),
        (
            "rms:1.4",
            (EXACT_9, EXACT_0.replace("exact", "relaxed"), EXACT_9.replace("exact", "relaxed")),
            "times the floor",
        ),
    ],
)
def test_a_gate_names_the_cases_that_break_it(
    gate: str, names: tuple[str, ...], found: str
) -> None:
    """Neither the baseline's nor its other precisions'."""
    lines = said(TWO, gate)
    assert {line.split(": ")[1] for line in lines} == set(names)
    assert all(line.startswith(f"{gate}: ") and found in line for line in lines)


def test_a_speedup_over_another_implementation() -> None:
    """Of a bench, `fused` alone is judged, over the fastest case of the other."""
    made = (*cell(), *cell(times={"fla": 60.0}, precision=cases.RELAXED_FP32))
    assert said(bench(*made), "speedup@fla:1.1", "speedup:1.99") == []
    assert said(bench(*made), "speedup@fla:1.3") == [
        "speedup@fla:1.3: mamba2-2.7b, bf16, 1 x 1,024, fused, exact, fp32 states: 1.2x over fla"
    ]
    assert said(bench(*made), "speedup@nobody:1")[0].endswith("its baseline was not timed")


def test_a_gate_that_can_judge_nothing_is_broken() -> None:
    refused = report(change=lambda one: failed(one, "refused"))
    assert said(refused, "rms:9") == ["rms:9: no case passed that it could judge"]
    assert {
        line.rpartition(": ")[2] for line in said(report(layers=(0,), gpu=False), "speedup:1")
    } == {"not timed"}
    assert said(TWO, "kl:1") == ["kl:1: no case passed that it could judge"]


def test_an_error_over_a_floor_of_nothing_is_infinite() -> None:
    exact = cases.accuracy().changed(floor=deviation(0.0))
    assert said(of_cases("run", [case(accuracy=(exact,))]), "rms:9")[0].endswith("the floor is 0")
    right = exact.changed(vs_oracle=deviation(0.0))
    assert said(of_cases("run", [case(accuracy=(right,))]), "rms:0") == []


def test_the_fused_implementation_has_to_reach_the_speedup_of_a_prefill_in_each_form() -> None:
    place = "prefill, model convolution and norm, 1,024 tokens"
    assert said(prefill(), "speedup:1.99") == []
    assert said(prefill(), "speedup:2.1") == [
        f"speedup:2.1: {place}, fused, exact, fp32 states: 2x over unfused"
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


def test_a_prefill_that_was_not_timed_does_not_hold() -> None:
    base, late = of_prefill("unfused", 2000.0), of_prefill(call_us=None)
    assert said(prefill(base, late), "speedup:1")[0].endswith(
        "fused, exact, fp32 states: not timed"
    )
    assert said(prefill(of_prefill()), "speedup:1")[0].endswith("its baseline was not timed")
    refused = failed(of_prefill(), "refused")
    assert said(prefill(base, refused), "speedup:1") == [
        "speedup:1: prefill, model convolution and norm, 1,024 tokens, fused, exact, fp32 states: "
        "refused: headdim 80 is not supported"
    ]
    place = "prefill, model convolution and norm, 131,072 tokens"
    spent = LeftOut(place=place, reason="spent")
    library = spent.changed(implementations=("mamba_ssm",))
    assert said(prefill(base, of_prefill(), left_out=(spent, library)), "speedup:1") == [
        f"speedup:1: {place}, fused: left out: spent"
    ]
    assert said(prefill(base), "speedup:1") == ["speedup:1: no case passed that it could judge"]


def test_a_left_out_cell_of_a_bench_breaks_a_speedup() -> None:
    left = LeftOut(place="mamba2-2.7b, bf16, 1 x 60", reason="the budget was spent")
    assert said(bench(left_out=(left,)), "speedup:1", "match@1e-2:1%") == [
        "speedup:1: mamba2-2.7b, bf16, 1 x 60: left out: the budget was spent"
    ]


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        ("kl:0.001", "mean KL 0.002 is above 0.001"),
        ("top1:99.6%", "the same top token at 99.5% of positions, below 99.6%"),
        ("perplexity-increase:0.1%", "perplexity rises by 0.125%, more than 0.1%"),
        ("perplexity:8", "perplexity 8.01 is above 8"),
    ],
)
def test_answers_are_judged_on_the_whole_prompt_and_noise_is_not(gate: str, found: str) -> None:
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


def test_a_perplexity_that_nobody_knows_cannot_be_judged() -> None:
    unknown = answers(of_answers(bands=(band(perplexity=None, perplexity_increase_pct=None),)))
    gate = parse("--gate", "perplexity-increase:1%")
    assert [one.holds for one in verdicts(unknown.changed(conditions=[gate]))] == [None, False]
    assert said(unknown, gate.spelling) == [f"{gate.spelling}: no case passed that it could judge"]


@pytest.mark.parametrize("text", ["time:base+3%", "slower:3%"])
def test_a_report_has_no_gate_that_compares_with_another(text: str) -> None:
    with pytest.raises(ValueError, match="compares with another report"):
        TWO.changed(conditions=[parse("--fail-if", text)])
