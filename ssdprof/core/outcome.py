"""The outcome of a report, from which its headline and every command's exit code follow."""

from __future__ import annotations

from ssdprof.core.case import Case
from ssdprof.core.conditions import broken
from ssdprof.core.report import Report


class Outcome:
    """The result of any kind of report.  Refusals do not fail a prefill, nor other libraries a bench.

    ended_early: why the report is incomplete, in a sentence; empty if it is complete.
    judged: number of cases that were compared or failed, without those of other libraries and those of answers.
    failed: the judged cases that did not pass.
    outside: cases of baselines outside their budget: the verdict is on what is compared with them.
    refused: requested cases that an implementation does not support, except other libraries.
    missing: number of requested cases that are neither in the report nor left out by name.
    broken: conditions that do not hold, each with its case.
    answers: the judged cases of the model's answers.  answers_failed: those that did not pass, or break a condition.
    passed: all requested cases were compared and passed, and all conditions hold; False if nothing was compared.
    """

    def __init__(self, report: Report) -> None:
        bench = report.kind == "bench"
        own = [case for case in report.cases if case.kind != "library" or not (case.baseline or bench)]
        calls = [case for case in own if not case.answers]
        refused = [case for case in calls if case.result == "refused"]
        rivals = {case.rated_against for case in report.cases}
        self.outside = [one for one in report.cases if one.outside_budget and (one.place, one.implementation) in rivals]
        excused = [case for case in self.outside if case.only_outside]
        requested = {", ".join(one) for one in report.requested}
        self.ended_early = _ended_early(report)
        self.judged = len([case for case in calls if case not in (*refused, *excused)])
        self.failed = tuple(case for case in calls if case.failed and case not in excused)
        self.refused = tuple(one for one in refused if not one.prefill and (not requested or one.name in requested))
        self.missing = len(report.missing)
        self.broken = broken(report)
        self.answers = tuple(case for case in own if case.answers and case.judged)
        limits = {one.case for one in self.broken}
        self.answers_failed = tuple(case for case in self.answers if case.result != "passed" or case.name in limits)
        failed = self.failed or self.refused or self.missing or self.broken or self.answers_failed
        self.passed = self.judged + len(self.answers) > 0 and not (self.ended_early or failed)


def exact_answer_is_finite(case: Case) -> bool:
    """Whether the fp64 oracle, rounded to the output's dtype, is finite.  If not, no kernel's output can be."""
    return not any(tensor.floor.nonfinite for tensor in case.accuracy)


def _ended_early(report: Report) -> str:
    if not report.complete:
        names = {"bench": "this bench", "prefill": "the command", "tune": "the command"}
        what = names.get(report.kind, "this run")
        return f"{what} did not reach its end"
    if not report.capture_complete:
        return "the replayed capture was interrupted and may lack layers or prompts"
    return ""
