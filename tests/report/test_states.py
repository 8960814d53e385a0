"""Reports of decoded states, from errors that were made up: what is lost and when, growth, the
sentence, and each kind of output.
"""

import json
from collections.abc import Callable

import cases
import pytest
from cases import decoded
from report.shown import printed, row
from report.test_contents import of_title

from ssdprof.core import pairs
from ssdprof.core.case import Case
from ssdprof.core.conditions import parse_change
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.report import brief, comparison, exports, html
from ssdprof.report.states import overviews

Head = Callable[[int], float | None]


def steady(first: float) -> Head:
    return lambda _: first


def growing(first: float, power: float = 0.5) -> Head:
    return lambda step: first * step**power


def wavering(step: int) -> float:
    """Grows as step^0.2, but so unevenly that it could stay."""
    return 1e-3 * step**0.2 * (2.6 if step.bit_length() % 2 else 1)


def overflowing(step: int) -> float | None:
    return 1e-3 if step < 100 else None


def of_states(*made: Case, **fields) -> Report:
    requested = tuple(map(cases.requested, made))
    return cases.of_cases("run", made, baseline="", requested=requested, **fields)


def in_another_layer(case: Case) -> Case:
    return cases.with_task(case, of=cases.case(layer=cases.layer(8), seqlen=4096).task)


LOSING = of_states(
    decoded("fp32", steady(1e-7), growing(2e-5), memories=(0, 3)),
    decoded("bf16", steady(2e-3), growing(2e-3), memories=(0, 3)),
    decoded("fp16", overflowing, steady(1e-3), memories=(0, 3)),
    decoded("int8", steady(1e-2), growing(1e-2, -0.5), memories=(0, 3)),
    cases.failed(decoded("mine:half", out_errors=(), state_errors=()), "failed"),
)


def test_heads_are_lost_at_ten_times_the_first_rounding():
    (table,) = overviews(LOSING)
    shown = {name: row(table, name) for name in ("fp32", "bf16", "fp16", "int8")}
    # 2e-3 x step^0.5 exceeds 10 x 2e-3 from 128 on; errors below that of inputs in bf16, 2e-3,
    # lose nothing
    lost = [f"{cells['heads lost']} from {cells['from token']}" for cells in shown.values()]
    assert lost == ["0 of 2 from never", *["1 of 2 from 128"] * 2, "0 of 2 from never"]
    assert shown["bf16"]["state error"] == "0.128"
    assert shown["fp16"]["state error"] == "inf"
    assert shown["int8"]["pool of 256"] == "256 MiB"
    assert [cells["trend"] for cells in shown.values()] == ["grows", "grows", "-", "stays"]
    assert shown["bf16"]["p"] == "0.50 [0.50, 0.50]"
    (table,) = overviews(of_states(decoded("mine:f", steady(1e-3), slot_bytes=None)))
    assert row(table, "mine:f")["pool of 256"] == "-"


def test_heads_are_grouped_by_how_long_they_remember():
    table = of_title(LOSING, "Heads by the tokens within which they forget")
    of_int8 = [row(table, "int8", memory) for memory in ("within 64", "hardly")]
    assert [cells["heads lost"] for cells in of_int8] == ["0 of 1", "0 of 1"]
    assert [cells["trend"] for cells in of_int8] == ["stays", "is forgotten"]
    by_step = of_title(LOSING, "Error of the state, worst head")
    assert row(by_step, "1,024")["bf16"] == "0.064"


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            (decoded("fp32", steady(1e-7)), decoded("bf16", *[growing(2e-3)] * 3, steady(2e-3))),
            "keep states in fp32 or better, which keeps every head for 4,096 tokens, at an output "
            "error of 1.00e-7; bf16 loses 3 of 4 heads of layer 7, the first after 128 tokens.",
        ),
        (
            (
                decoded("fp32", steady(1e-7)),
                decoded("bf16", growing(2e-3, 0.2)),
                decoded("fp16", growing(2e-4, 0.2)),
            ),
            "keep states in fp16 or better, which keeps every head for 4,096 tokens, at an output "
            "error of 1.06e-3; its error still grows, so try a longer --seq.",
        ),
        (
            (decoded("int8", growing(1e-2)), decoded("fp16", overflowing)),
            "no format keeps every head for 4,096 tokens; int8 loses 1 of 1 head of layer 7 after "
            "128 tokens; fp16 loses 1 of 1 head of layer 7 after 128 tokens.",
        ),
        (
            (decoded("fp32", steady(1e-7)), in_another_layer(decoded("bf16", overflowing))),
            "no format that ran in every layer keeps every head for 4,096 tokens; bf16 loses 1 of "
            "1 head of layer 8 after 128 tokens.",
        ),
        (
            (decoded("int8", wavering),),
            "keep states in int8 or better, which keeps every head for 4,096 tokens, at an output "
            "error of 0.0137; its error may still grow, so try a longer --seq.",
        ),
    ],
)
def test_the_sentence_names_the_smallest_pool_that_keeps_every_head(
    made: tuple[Case, ...], sentence
):
    assert f"In short: {sentence}" in " ".join(
        printed(brief.shown(of_states(*made).changed(kind="bench"))).split()
    )


def test_nothing_is_advised_where_no_format_ran():
    failed = of_states(cases.failed(decoded("mine:half", out_errors=(), state_errors=()), "failed"))
    assert "In short" not in printed(brief.render(failed))
    assert exports.records(failed)[0]["heads lost"] is None


def test_losses_fail_only_gates_on_them():
    kept = of_states(*LOSING.cases[:-1])
    assert Outcome(kept).passed
    assert not Outcome(LOSING).passed  # the user's format failed
    for gate, holds in (
        ("kept-steps@bf16:64", True),
        ("kept-steps@bf16:65", False),
        ("kept-steps@int8:4096", True),
        ("kept-steps:64", True),
        ("kept-steps@fp8:1", False),  # not computed
        ("rms:2", False),
    ):
        assert Outcome(kept.changed(conditions=cases.gates(gate))).passed == holds, gate


def test_every_output_has_the_losses():
    page = html.render(LOSING)
    assert page.count("<svg") == 2
    assert "Error of the state by step, layer 7, decoded, 4,096 tokens" in page
    _, of_bf16, *_ = exports.records(LOSING)
    columns = ("states", "layer", "heads lost", "steps kept")
    assert [of_bf16[name] for name in columns] == ["bf16", 7, 1, 64]
    again = Report.model_validate(json.loads(exports.baseline(LOSING)))
    same = pairs.compare(("a", LOSING), ("b", again), smallest_difference=0.01)
    words = [line.text for line in comparison.compose(same).verdict]
    assert "Accuracy: 4 equal." in words[-1]
    changed = pairs.compare(
        ("a", of_states(decoded("bf16", growing(2e-3)))),
        ("b", of_states(decoded("bf16", growing(2e-3, 0.6)))),
        smallest_difference=0.01,
        allowed=[parse_change("kept-steps@bf16:base-0")],
    )
    assert all(changed.verdicts.values())
    assert "1 with a larger error" in comparison.compose(changed).verdict[-1].text
