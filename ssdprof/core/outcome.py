"""The outcome of a report, from which its headline and every command's exit code follow."""

from __future__ import annotations

from dataclasses import dataclass

from ssdprof.core.case import Case
from ssdprof.core.conditions import broken
from ssdprof.core.report import Report, Verdict


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """ended_early: why the report is incomplete, in a sentence; empty if it is complete.

    judged: number of cases that were compared or failed, without those of other libraries and those of answers.
    failed: the judged cases that did not pass.
    outside: cases of baselines outside their budget: the verdict is on what is compared with them.
    refused: requested cases that an implementation does not support, except other libraries.
    missing: number of requested cases that are neither in the report nor left out by name.
    broken: conditions that do not hold, each with its case.
    answers: the judged cases of the model's answers.  answers_failed: those that did not pass, or break a condition.
    """

    ended_early: str
    judged: int
    failed: tuple[Case, ...]
    outside: tuple[Case, ...]
    refused: tuple[Case, ...]
    missing: int
    broken: tuple[Verdict, ...]
    answers: tuple[Case, ...]
    answers_failed: tuple[Case, ...]

    @property
    def passed(self) -> bool:
        """Whether all requested cases were compared and passed, and all conditions hold.  False if nothing was
        compared."""
        failed = self.failed or self.refused or self.missing or self.broken or self.answers_failed
        return self.judged + len(self.answers) > 0 and not (self.ended_early or failed)


def outcome(report: Report) -> Outcome:
    """The result of any kind of report.  Refusals do not fail a prefill, nor other libraries a bench."""
    bench = report.kind == "bench"
    own = [case for case in report.cases if case.kind != "library" or not (case.baseline or bench)]
    calls = [case for case in own if not case.answers]
    refused = [case for case in calls if case.result == "refused"]
    answers = tuple(case for case in own if case.answers and case.judged)
    rivals = {case.rated_against for case in report.cases}
    outside = [one for one in report.cases if one.outside_budget and (one.place, one.implementation) in rivals]
    excused = [case for case in outside if case.only_outside]
    requested = {one.name for one in report.requested}
    found = broken(report)
    of_answers = {one.case for one in found}
    return Outcome(
        ended_early=_ended_early(report),
        judged=len([case for case in calls if case not in (*refused, *excused)]),
        failed=tuple(case for case in calls if case.result not in ("passed", "refused") and case not in excused),
        outside=tuple(outside),
        refused=tuple(case for case in refused if not case.prefill and (not requested or case.name in requested)),
        missing=len(report.missing),
        broken=found,
        answers=answers,
        answers_failed=tuple(case for case in answers if case.result != "passed" or case.name in of_answers),
    )


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
