"""What a report's cases and conditions come to: verdicts, the outcome, and its line in a list.

The headline of a report and the exit code of every command follow from `Outcome`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from ssdprof.core.base import Record, Text, states_of
from ssdprof.core.case import Case, Prefill
from ssdprof.core.conditions import KEPT_STEPS, METRICS, OF_SPEED, Condition, is_answers, number
from ssdprof.core.report import Report
from ssdprof.errors import SsdprofError

GATED = "fused"  # the implementation that the gates of benches and prefills apply to


class Verdict(Record):
    """Whether a case meets a condition.

    condition: as the user gave it.  case: its name; empty: the condition applied to no case.
    holds: None if the case lacks the value.  actual: the value, or why there is none.
    """

    condition: Text
    case: Text
    holds: bool | None
    actual: Text = ""

    @property
    def what(self) -> str:
        """The case, and its value or why it has none."""
        return ": ".join(filter(None, (self.case, self.actual)))

    def __str__(self) -> str:
        return f"{self.condition}: {self.what}"


def gated_cases(report: Report) -> tuple[Case, ...]:
    """The cases that conditions apply to."""

    def by_name(case: Case) -> bool:
        return isinstance(case.task, Prefill) or (report.kind == "bench" and case.is_call)

    return tuple(
        case
        for case in report.cases
        if case.is_gated and (not by_name(case) or case.implementation == GATED)
    )


def verdicts(report: Report) -> Iterator[Verdict]:
    """A verdict for each condition of the report and each case that it applies to.

    Cases that did not pass get none: they fail a report anyway, except that a requested prefill
    without a time breaks a speedup.  A condition without any verdict is broken.
    """
    for condition in report.conditions:
        of_cases = list(_of(condition, report))
        yield from of_cases
        if all(verdict.holds is None for verdict in of_cases):
            yield Verdict(
                condition=condition.text,
                case="",
                holds=False,
                actual="no case passed that it could judge",
            )


def broken(report: Report) -> tuple[Verdict, ...]:
    """The verdicts that do not hold."""
    return tuple(verdict for verdict in verdicts(report) if verdict.holds is False)


def _of(condition: Condition, report: Report) -> Iterator[Verdict]:
    """The verdicts of one condition: those on cases that passed, then on those without a time."""
    cases = [case for case in gated_cases(report) if METRICS[condition.metric].applies(case)]
    if condition.metric == KEPT_STEPS and condition.at:
        cases = [case for case in cases if states_of(case.precision) == condition.at]
    for case in cases:
        if case.result == "passed":
            yield _verdict(condition, case, report)
    if condition.metric in OF_SPEED:
        for name, why in _untimed(cases, report):
            yield Verdict(condition=condition.text, case=name, holds=False, actual=why)


def _untimed(cases: Sequence[Case], report: Report) -> Iterator[tuple[str, str]]:
    """The requested cases without a time, and why: prefills that did not pass, and what was left
    out.
    """
    for case in cases:
        if isinstance(case.task, Prefill) and case.result != "passed":
            yield case.name, f"{case.result}: {case.why}"
    for out in report.left_out:
        if not out.implementations or GATED in out.implementations:
            name = f"{out.case_key}, {GATED}" if report.kind == "prefill" else out.case_key
            yield name, f"left out: {out.reason}"


def _verdict(condition: Condition, case: Case, report: Report) -> Verdict:
    """The verdict on a case that passed.  Without the value it breaks the condition, except
    that an answer without a next token has no perplexity.
    """
    metric = METRICS[condition.metric]
    value = metric.value(case, condition.at, report.speedup)
    holds: bool | None
    if value is None:
        holds = None if is_answers(case) else False
        actual = metric.if_missing
    else:
        size = number(value)
        limit = condition.limit
        holds = size >= limit if metric.more_is_better else size <= limit
        actual = "" if holds else metric.shown(size)
    return Verdict(condition=condition.text, case=case.name, holds=holds, actual=actual)


class Outcome:
    """The result of any kind of report.  Refusals do not fail a prefill, nor other libraries a
    bench.  Libraries fail a run only if the user named them, and never by a refusal.

    ended_early: why the report is incomplete, in a sentence; empty if it is complete.
    others: number of cases of other libraries on which nothing depends.
    compared: number of cases that were compared or failed, without those of other libraries and
        those of answers.
    failed: the cases among them that did not pass.
    outside: cases of baselines outside their budget: the verdict is on what is compared with them.
    refused: requested cases that an implementation does not support, except other libraries.
    missing: number of requested cases that are neither in the report nor left out by name.
    broken: conditions that do not hold, each with its case.
    answers: the cases of the model's answers that gates apply to.  answers_failed: those that did
    not pass, or break a condition.
    passed: all requested cases were compared and passed, and all conditions hold; False if nothing
    was compared.
    """

    def __init__(self, report: Report) -> None:
        """Sort the report's cases."""
        baselines = {case.rated_against for case in report.cases}
        counted: list[Case] = []
        calls: list[Case] = []
        self.outside: list[Case] = []
        for case in report.cases:
            is_baseline = (case.case_key, case.implementation) in baselines
            if is_baseline and case.outside_budget:
                self.outside.append(case)
            if not _counts(case, report):
                continue
            counted.append(case)
            # a baseline that is only outside its budget is neither compared nor a failure
            if not (is_answers(case) or (is_baseline and case.only_outside)):
                calls.append(case)
        self.others = len(report.cases) - len(counted)

        self.failed = tuple(case for case in calls if case.failed)
        refused = [case for case in calls if case.result == "refused"]
        self.compared = len(calls) - len(refused)
        requested = {", ".join(parts) for parts in report.requested}
        self.refused = tuple(
            case
            for case in refused
            if not isinstance(case.task, Prefill) and (not requested or case.name in requested)
        )

        self.broken = broken(report)
        offenders = {verdict.case for verdict in self.broken}
        self.answers = tuple(case for case in counted if is_answers(case) and case.is_gated)
        self.answers_failed = tuple(
            case for case in self.answers if case.result != "passed" or case.name in offenders
        )

        self.ended_early = _ended_early(report)
        self.missing = len(report.missing)
        self.faulty = (*self.failed, *self.refused, *self.answers_failed)
        unfinished = self.ended_early or self.missing
        compared = self.compared > 0 or bool(self.answers)
        self.passed = compared and not (unfinished or self.faulty or self.broken)

    @property
    def word(self) -> str:
        """ "passed", "failed", "refused" or "incomplete"."""
        if self.passed:
            return "passed"
        if self.failed or self.broken or self.answers_failed:
            return "failed"
        return "refused" if self.refused else "incomplete"


def _counts(case: Case, report: Report) -> bool:
    """Whether the outcome of a report depends on the case: see `Outcome`."""
    if case.kind != "library" or not (case.baseline or report.kind == "bench"):
        return True
    return case.named and case.result != "refused"


def exact_answer_is_finite(case: Case) -> bool:
    """Whether the fp64 oracle, rounded to the output's dtype, is finite.  If not, no kernel's
    output can be.
    """
    return not any(tensor.floor.nonfinite for tensor in case.accuracy)


def _ended_early(report: Report) -> str:
    if not report.complete:
        names = {"bench": "this bench", "prefill": "the command", "tune": "the command"}
        what = names.get(report.kind, "this run")
        return f"{what} did not reach its end"
    if not report.capture_complete:
        return "the replayed capture was interrupted and may lack layers or prompts"
    return ""


class ListedRun(Record):
    """A report's folder.

    name: of the folder; other commands take it.  model: or the operator of a bench.
    verdict: "failed": a case was compared and did not pass, or could not finish, or a condition
        does not hold; "refused": an implementation does not support a case; "incomplete": nothing
        went wrong, but cases are missing; "unreadable": see `reason`, and all other fields but the
        name are empty.
    state: "partial" if it did not reach its end.
    gpu: None on a machine without one.
    """

    name: Text
    kind: Text = ""
    created: Text = ""  # ISO 8601, UTC
    commit: Text = ""  # of the working directory's repository
    model: Text = ""
    random_weights: bool = False
    seqlens: tuple[int, ...] = ()  # of the prompts
    layers: int = 0  # replayed ones
    cases: int = 0
    gates: int = 0
    gpu: Text | None = None
    verdict: Text
    state: Literal["complete", "partial"] | None = None
    reason: Text = ""

    @classmethod
    def of(cls, name: str, report: Report | SsdprofError) -> ListedRun:
        """The line of a run.

        name: of the report's folder.  report: the report, or the error that reading it raised.
        """
        if isinstance(report, SsdprofError):
            return cls(name=name, verdict="unreadable", reason=report.message)
        return cls(
            name=name,
            kind=report.kind,
            created=report.created,
            commit=report.commit,
            model=report.target,
            random_weights=bool(report.model and report.model.random_weights),
            seqlens=tuple(prompt.seqlen for prompt in report.prompts),
            layers=len(report.captured),
            cases=len(report.cases),
            gates=len(report.conditions),
            gpu=report.environment.gpu.name if report.environment.gpu else None,
            verdict=Outcome(report).word,
            state="complete" if report.complete else "partial",
        )
