"""When a run passes, and the reasons why it does not."""

from __future__ import annotations

from typing import Any

import pytest
from report.make import RELAXED_FP32, failed, layer, make_report
from ssdprof.schema import EXACT_FP32, Asked, CaseResult, RunReport
from ssdprof.schema.outcome import at_precisions, exact_answer_is_finite, outcome

LAYERS = (0, 9)
PRECISIONS = (EXACT_FP32, RELAXED_FP32)


def asked(*implementations: str, layers: tuple[int, ...] = LAYERS) -> Asked:
    return Asked(implementations=implementations, precisions=PRECISIONS, layers=tuple(layer(index) for index in layers))


def report(**fields: Any) -> RunReport:
    """A run of two layers at two precisions with all requested cases."""
    made = {"layers": LAYERS, "precisions": PRECISIONS, "seqlens": (1024,), "asked": asked("unfused", "fused")}
    return make_report(**(made | fields))


def with_fused(status: str, reason: str = "no") -> Any:
    return lambda case: failed(case, status, reason) if case.implementation == "fused" else case


def test_a_whole_run_whose_cases_all_passed_passes() -> None:
    assert outcome(report()).passed


@pytest.mark.parametrize("status", ["inaccurate", "nonfinite", "out of memory", "failed"])
def test_a_case_that_did_not_pass_is_a_failure(status: str) -> None:
    found = outcome(report(change=with_fused(status)))
    assert not found.passed
    assert {case.implementation for case in found.failed} == {"fused"}
    assert found.refused == ()


def test_a_refused_implementation_is_no_pass_although_the_baseline_passed() -> None:
    found = outcome(report(change=with_fused("refused")))
    assert (found.passed, found.failed) == (False, ())
    assert {case.implementation for case in found.refused} == {"fused"}
    assert found.judged == 4


def test_an_implementation_that_the_user_left_out_is_not_missed() -> None:
    unfused = tuple(case for case in report().cases if case.implementation == "unfused")
    assert outcome(report(cases=unfused, asked=asked("unfused"))).passed
    assert not outcome(report(cases=unfused)).passed


def test_a_refused_baseline_that_was_not_asked_for_is_no_failure() -> None:
    def change(case: CaseResult) -> CaseResult:
        return failed(case, "refused", "no") if case.implementation == "unfused" else case

    assert outcome(report(change=change, asked=asked("fused"))).passed
    assert not outcome(report(change=change)).passed


@pytest.mark.parametrize("fields", [{"cases": ()}, {"cases": (), "asked": None}], ids=["asked", "of an old version"])
def test_nothing_compared_is_no_pass(fields: dict[str, Any]) -> None:
    assert not outcome(report(**fields)).passed


def test_everything_refused_is_no_pass() -> None:
    found = outcome(report(change=lambda case: failed(case, "refused", "no")))
    assert (found.passed, found.judged) == (False, 0)
    old = outcome(report(change=lambda case: failed(case, "refused", "no"), asked=None))
    assert (old.passed, len(old.refused)) == (False, 8)


@pytest.mark.parametrize("fields", [{"state": "partial"}, {"capture_complete": False}])
def test_what_is_not_whole_is_no_pass(fields: dict[str, Any]) -> None:
    found = outcome(report(**fields))
    assert not found.passed
    assert found.broken_off


def test_a_case_that_was_asked_for_and_is_not_there_is_missing() -> None:
    """A layer, a prompt, a precision."""
    assert outcome(report(asked=asked("unfused", "fused", layers=(0, 9, 18)))).missing == 4
    longer = report().prompts[0].model_copy(update={"seqlen": 2048})
    assert outcome(report(prompts=(*report().prompts, longer))).missing == 8
    assert outcome(report(cases=report().cases[:-1])).missing == 1
    assert not outcome(report(cases=report().cases[:-1])).passed


def test_only_the_precisions_that_are_shown_count() -> None:
    def change(case: CaseResult) -> CaseResult:
        return failed(case, "inaccurate") if case.precision == RELAXED_FP32 else case

    whole = report(change=change)
    assert not outcome(whole).passed
    assert outcome(at_precisions(whole, [EXACT_FP32])).passed
    assert not outcome(at_precisions(whole, [RELAXED_FP32])).passed


def test_an_exact_answer_that_is_not_finite_is_told_from_a_kernel_s() -> None:
    (case, *_) = report().cases

    def with_nonfinite(which: str) -> CaseResult:
        (out, states) = case.accuracy
        deviation = getattr(out, which).model_copy(update={"nonfinite": 3})
        return case.model_copy(update={"accuracy": (out.model_copy(update={which: deviation}), states)})

    assert exact_answer_is_finite(with_nonfinite("vs_oracle"))
    assert not exact_answer_is_finite(with_nonfinite("floor"))
