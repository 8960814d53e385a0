"""When a report passes, and the reasons why it does not."""

from typing import Any

import cases
import pytest
from cases import (
    EXACT_FP32,
    RELAXED_FP32,
    answers,
    band,
    bench,
    cell,
    failed,
    of_answers,
    of_prefill,
    prefill,
)
from cases import two_layers as report

from ssdprof.core.conditions import parse_gate
from ssdprof.core.outcome import Outcome, exact_answer_is_finite
from ssdprof.core.report import LeftOut, ProcessLine, Report, Requested


def with_result(result: str, *names: str) -> Report:
    """A run in which the cases of these implementations have this result."""
    return report(change=lambda one: failed(one, result) if one.implementation in names else one)


def requested(*names: str) -> tuple[Requested, ...]:
    return tuple(one for one in report().requested if one[1] in names)


def only(found: Report, name: str) -> tuple[cases.Case, ...]:
    return tuple(case for case in found.cases if case.implementation == name)


def libraries(result: str, **fields) -> Report:
    made = tuple(
        failed(case, result).changed(**fields) if case.kind == "library" else case
        for case in cell()
    )
    return bench(*made, **({"requested": tuple(map(cases.requested, made))} if fields else {}))


WHOLE = report()
GATE = (parse_gate("kl:0.01"),)
OUTSIDE = with_result("inaccurate", "unfused")
NO_BASELINE = with_result("refused", "unfused")
NO_FUSED = with_result("refused", "fused")
NOTHING = with_result("refused", "fused", "unfused")
LATER = report(
    change=lambda one: one if one.baseline else one.changed(samples=(), later_fault="drifts")
)
COARSE = report(
    change=lambda one: failed(one, "inaccurate") if one.precision == RELAXED_FP32 else one
)
CELLS = (*cell(), *cell(2048))
PART = {"requested": tuple(map(cases.requested, CELLS))}
SPENT = LeftOut(case_key=CELLS[-1].case_key, reason="spent")
BASE = of_prefill("unfused", 2000.0)
PARTIAL = (ProcessLine(process="p"),)
GOOD = of_answers()
NOISE = of_answers(change="x", bands=(band(kl_mean=9.0),))
RUN = "this run did not reach its end"
# report -> whether it passes, and other fields of the outcome: of tuples of cases their
# implementations
OUTCOMES: list[tuple[Report, bool, dict[str, Any]]] = [
    (WHOLE, True, {"compared": 8}),
    (bench(), True, {}),
    (prefill(), True, {}),
    (answers(), True, {}),
    *(
        (with_result(result, name), False, {"failed": {name}, "refused": set()})
        for result in ("nonfinite", "out of memory", "failed")
        for name in ("fused", "unfused")
    ),
    (with_result("inaccurate", "fused"), False, {"failed": {"fused"}}),
    # a baseline outside its budget fails nothing but itself: not if its output changed later, nor
    # if it was run alone
    (OUTSIDE, True, {"failed": set(), "outside": {"unfused"}, "compared": 4}),
    (LATER, False, {"failed": {"unfused"}}),
    (
        OUTSIDE.changed(cases=only(OUTSIDE, "unfused"), requested=requested("unfused")),
        False,
        {"failed": {"unfused"}},
    ),
    # refusals
    (NO_FUSED, False, {"failed": set(), "refused": {"fused"}, "compared": 4}),
    (NO_BASELINE.changed(requested=requested("fused")), True, {}),
    (NO_BASELINE, False, {}),
    (WHOLE.changed(cases=only(WHOLE, "unfused"), requested=requested("unfused")), True, {}),
    (WHOLE.changed(cases=only(WHOLE, "unfused")), False, {}),
    # nothing
    (report(cases=()), False, {}),
    (report(cases=(), requested=()), False, {}),
    (NOTHING, False, {"compared": 0, "refused": {"fused", "unfused"}}),
    (NOTHING.changed(requested=()), False, {}),
    # what is not whole
    (report(complete=False), False, {"ended_early": RUN}),
    (report(ranks=2), False, {"ended_early": RUN}),
    (report(processes=()), False, {"ended_early": RUN}),
    (
        report(capture_complete=False),
        False,
        {"ended_early": "the replayed capture was interrupted and may lack layers or prompts"},
    ),
    (
        bench().changed(processes=PARTIAL),
        False,
        {"ended_early": "this bench did not reach its end"},
    ),
    (
        prefill().changed(processes=PARTIAL),
        False,
        {"ended_early": "the command did not reach its end"},
    ),
    (answers().changed(processes=PARTIAL), False, {"ended_early": RUN}),
    (report(requested=report(layers=(0, 9, 18)).requested), False, {"missing": 4}),
    (WHOLE.changed(cases=WHOLE.cases[:-1]), False, {"missing": 1}),
    # what is left out by name is not missing
    (bench(*CELLS[:3], **PART), False, {"missing": 3}),
    (bench(*CELLS[:3], **PART, left_out=(SPENT,)), True, {}),
    (
        bench(*CELLS[:3], **PART, left_out=(SPENT.changed(implementations=("fla",)),)),
        False,
        {"missing": 2},
    ),
    # another library fails nothing, one's own kernel does
    *(
        (libraries(result), True, {"compared": 2})
        for result in ("inaccurate", "refused", "failed", "out of memory")
    ),
    (libraries("refused", kind="own"), False, {}),
    (prefill(BASE, failed(of_prefill(), "refused")), True, {}),
    (prefill(BASE, failed(of_prefill(), "failed")), False, {}),
    (
        report(conditions=(parse_gate("speedup:2.4"),)).restricted(precisions=[RELAXED_FP32]),
        True,
        {},
    ),
    (report(conditions=(parse_gate("speedup:2.2"),)), False, {}),
    # answers: noise and single layers are not judged
    (
        answers(GOOD, of_answers(alone=3, nonfinite=7), NOISE, conditions=GATE),
        True,
        {"answers": {"fused"}, "compared": 0},
    ),
    *(
        (answers(bad, conditions=GATE), False, {"answers_failed": {"fused"}})
        for bad in (
            of_answers(nonfinite=7),
            failed(GOOD, "refused"),
            of_answers(bands=(band(kl_mean=1.0),)),
        )
    ),
    # only what is shown counts
    (COARSE, False, {}),
    (COARSE.restricted(precisions=[EXACT_FP32]), True, {}),
    (COARSE.restricted(precisions=[RELAXED_FP32]), False, {}),
    (with_result("inaccurate", "fused").restricted(implementations=["unfused"]), True, {}),
]


@pytest.mark.parametrize(("found", "passed", "fields"), OUTCOMES)
def test_a_report_passes_if_all_of_it_was_compared_and_passed(found: Report, passed, fields):
    result = Outcome(found)
    shown = {name: getattr(result, name) for name in fields}
    names = {
        name: {one.implementation for one in of}
        for name, of in shown.items()
        if isinstance(of, tuple | list)
    }
    assert (result.passed, shown | names) == (passed, fields)


def test_an_exact_answer_that_is_not_finite_is_told_from_a_kernels():
    def nonfinite(which: str):
        (out, states) = WHOLE.cases[0].accuracy
        found = getattr(out, which).changed(nonfinite=3, first_nonfinite=(0, 1, 0, 0))
        return WHOLE.cases[0].changed(accuracy=(out.changed(**{which: found}), states))

    assert exact_answer_is_finite(nonfinite("vs_oracle"))
    assert not exact_answer_is_finite(nonfinite("floor"))
