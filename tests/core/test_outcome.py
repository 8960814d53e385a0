"""When a report passes, and the reasons why it does not."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from cases import EXACT_FP32, RELAXED_FP32, answers, band, bench, cell, failed, of_answers, of_prefill, prefill

from ssdprof.core.conditions import of_options
from ssdprof.core.outcome import exact_answer_is_finite, outcome
from ssdprof.core.report import LeftOut, ProcessLine, Report, Requested


def report(**fields: Any) -> Report:
    """A run of two layers at two precisions with all requested cases."""
    return cases.report(**({"layers": (0, 9), "precisions": (EXACT_FP32, RELAXED_FP32)} | fields))


def with_result(result: str, *names: str) -> Any:
    return lambda one: failed(one, result) if one.implementation in names else one


def requested(*names: str) -> tuple[Requested, ...]:
    return tuple(one for one in report().requested if one.implementation in names)


def test_a_whole_report_whose_cases_all_passed_passes() -> None:
    for whole in (report(), bench(), prefill(), answers()):
        assert outcome(whole).passed, whole.kind
    assert outcome(report()).judged == 8


@pytest.mark.parametrize("result", ["inaccurate", "nonfinite", "out of memory", "failed"])
@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_a_case_that_did_not_pass_is_a_failure(result: str, name: str) -> None:
    found = outcome(report(change=with_result(result, name)))
    excused = (result, name) == ("inaccurate", "unfused")  # the verdict is on what is compared with it
    assert found.passed == excused
    assert {case.implementation for case in found.failed} == (set() if excused else {name})
    assert {case.result for case in found.failed} == (set() if excused else {result})
    assert found.refused == ()


def test_a_baseline_outside_its_budget_fails_nothing_but_itself() -> None:
    """Not if its output changed later, and not if it was run alone."""
    outside = report(change=with_result("inaccurate", "unfused"))
    assert {case.implementation for case in outcome(outside).outside} == {"unfused"}
    assert outcome(outside).judged == 4
    later = report(change=lambda one: one.changed(samples=(), later_fault="drifts") if not one.baseline else one)
    assert {case.implementation for case in outcome(later).failed} == {"unfused"}
    alone = tuple(case for case in outside.cases if case.implementation == "unfused")
    assert len(outcome(outside.changed(cases=alone, requested=requested("unfused"))).failed) == 4


def test_a_refused_implementation_is_no_pass_although_the_baseline_passed() -> None:
    found = outcome(report(change=with_result("refused", "fused")))
    assert (found.passed, found.failed, found.judged) == (False, (), 4)
    assert {case.implementation for case in found.refused} == {"fused"}


def test_an_implementation_that_the_user_left_out_is_not_missed() -> None:
    unfused = tuple(case for case in report().cases if case.implementation == "unfused")
    assert outcome(report().changed(cases=unfused, requested=requested("unfused"))).passed
    assert not outcome(report().changed(cases=unfused)).passed


def test_a_refused_baseline_that_was_not_requested_is_no_failure() -> None:
    refused = report(change=with_result("refused", "unfused"))
    assert outcome(refused.changed(requested=requested("fused"))).passed
    assert not outcome(refused).passed


def test_nothing_compared_is_no_pass() -> None:
    assert not outcome(report(cases=())).passed
    assert not outcome(report(cases=(), requested=())).passed
    refused = report(change=with_result("refused", "fused", "unfused"))
    for fields in ({}, {"requested": ()}):
        found = outcome(refused.changed(**fields))
        assert (found.passed, found.judged, len(found.refused)) == (False, 0, 8)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"complete": False}, "this run did not reach its end"),
        ({"ranks": 2}, "this run did not reach its end"),
        ({"processes": ()}, "this run did not reach its end"),
        ({"capture_complete": False}, "the replayed capture was interrupted and may lack layers or prompts"),
    ],
)
def test_what_is_not_whole_is_no_pass(fields: dict[str, Any], why: str) -> None:
    found = outcome(report(**fields))
    assert (found.passed, found.ended_early) == (False, why)


def test_how_each_kind_ended_early() -> None:
    partial = (ProcessLine(process="p"),)
    words = {
        kind: outcome(one.changed(processes=partial)).ended_early
        for kind, one in (("bench", bench()), ("prefill", prefill()), ("answers", answers()))
    }
    assert words == {
        "bench": "this bench did not reach its end",
        "prefill": "the command did not reach its end",
        "answers": "this run did not reach its end",
    }


def test_a_case_that_was_requested_and_is_not_there_is_missing() -> None:
    more = report(layers=(0, 9, 18)).requested
    assert outcome(report(requested=more)).missing == 4
    short = report().changed(cases=report().cases[:-1])
    assert (outcome(short).missing, outcome(short).passed) == (1, False)


def test_what_is_left_out_by_name_is_not_missing() -> None:
    cells = (*cell(), *cell(2048))
    wanted = tuple(map(cases.requested, cells))
    place = cells[-1].place
    part = bench(*cells[:3], requested=wanted)
    assert outcome(part).missing == 3
    assert outcome(bench(*cells[:3], requested=wanted, left_out=(LeftOut(place=place, reason="spent"),))).passed
    one = LeftOut(place=place, implementations=("fla",), reason="spent")
    assert outcome(bench(*cells[:3], requested=wanted, left_out=(one,))).missing == 2


@pytest.mark.parametrize("result", ["inaccurate", "refused", "failed", "out of memory"])
def test_another_library_fails_nothing(result: str) -> None:
    made = tuple(failed(case, result) if case.kind == "library" else case for case in cell())
    assert outcome(bench(*made)).passed
    assert outcome(bench(*made)).judged == 2
    own = tuple(failed(case, "refused").changed(kind="own") if case.kind == "library" else case for case in cell())
    assert not outcome(bench(*own, requested=tuple(map(cases.requested, own)))).passed


def test_a_refused_prefill_fails_nothing_and_a_wrong_one_does() -> None:
    base = of_prefill("unfused", 2000.0)
    assert outcome(prefill(base, failed(of_prefill(), "refused"))).passed
    assert not outcome(prefill(base, failed(of_prefill(), "failed"))).passed


def test_a_broken_condition_is_no_pass() -> None:
    assert outcome(report(conditions=of_options(min_speedup=1.9))).passed
    found = outcome(report(conditions=of_options(min_speedup=2.2)))
    assert not found.passed
    assert len(found.broken) == 2


def test_answers_that_break_a_condition_or_are_not_finite_fail() -> None:
    """Noise and single layers are not judged."""
    good, alone, noise = (
        of_answers(),
        of_answers(alone=3, nonfinite=7),
        of_answers(change="x", bands=(band(kl_mean=9.0),)),
    )
    gate = of_options(max_kl=0.01)
    found = outcome(answers(good, alone, noise, conditions=gate))
    assert (found.passed, found.answers, found.judged) == (True, (good,), 0)
    for bad in (of_answers(nonfinite=7), failed(of_answers(), "refused"), of_answers(bands=(band(kl_mean=1.0),))):
        found = outcome(answers(bad, conditions=gate))
        assert (found.passed, found.answers_failed) == (False, (bad,))


def test_only_the_precisions_that_are_shown_count() -> None:
    whole = report(change=lambda one: failed(one, "inaccurate") if one.precision == RELAXED_FP32 else one)
    assert not outcome(whole).passed
    assert outcome(whole.restricted(precisions=[EXACT_FP32])).passed
    assert not outcome(whole.restricted(precisions=[RELAXED_FP32])).passed
    fused = report(change=with_result("inaccurate", "fused")).restricted(implementations=["unfused"])
    assert outcome(fused).passed


def test_an_exact_answer_that_is_not_finite_is_told_from_a_kernels() -> None:
    def nonfinite(which: str) -> Any:
        (out, states) = report().cases[0].accuracy
        found = getattr(out, which).changed(nonfinite=3, first_nonfinite=(0, 1, 0, 0))
        return report().cases[0].changed(accuracy=(out.changed(**{which: found}), states))

    assert exact_answer_is_finite(nonfinite("vs_oracle"))
    assert not exact_answer_is_finite(nonfinite("floor"))
