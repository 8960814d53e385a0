"""The outcome of a report: the verdicts on its conditions, and whether it passed.

The headline of a report and the exit code of every command follow from `Outcome`.  `ListedRun` is
the line of a report in a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from ssdprof.core.base import Record, Text, states_of
from ssdprof.core.case import Case, Prefill
from ssdprof.core.conditions import (
    KEPT_STEPS,
    METRICS,
    SPEED_METRICS,
    Condition,
    is_answers,
    number,
)
from ssdprof.core.report import Report
from ssdprof.errors import SsdprofError

GATED = "fused"  # the implementation that the gates of benches and prefills apply to


class Verdict(Record):
    """Whether a case meets a condition.

    condition: as the user wrote it.
    case: the name of the case, or the key of cases that were left out; empty if the verdict is on
        the whole report.
    holds: None for answers that lack the value, which breaks no condition.
    actual: the value, or why there is none; empty if the condition holds.
    """

    condition: Text
    case: Text
    holds: bool | None
    actual: Text = ""

    @property
    def what(self) -> str:
        """The case, and its value or the reason why it has none."""
        return ": ".join(filter(None, (self.case, self.actual)))

    def __str__(self) -> str:
        return f"{self.condition}: {self.what}"


def gated_cases(report: Report) -> tuple[Case, ...]:
    """The cases that conditions apply to.

    Among the calls of a bench and among prefills these are only the cases of `GATED`.
    """

    def is_of_bench_or_prefill(case: Case) -> bool:
        return isinstance(case.task, Prefill) or (report.kind == "bench" and case.is_call)

    return tuple(
        case
        for case in report.cases
        if case.is_gated and (case.implementation == GATED or not is_of_bench_or_prefill(case))
    )


def verdicts(report: Report) -> Iterator[Verdict]:
    """A verdict for each condition of the report and each case that it applies to.

    Cases that did not pass have no verdict, because the outcome counts them anyway.  The exceptions
    break a condition on speed: a prefill that did not pass, and requested cases that were left out.
    A condition that no case can satisfy or break is broken.
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
    """The verdicts on conditions that do not hold."""
    return tuple(verdict for verdict in verdicts(report) if verdict.holds is False)


def _of(condition: Condition, report: Report) -> Iterator[Verdict]:
    """The verdicts of one condition: on the cases that passed, then, if it is on speed, on those
    that have no time.
    """
    cases = [case for case in gated_cases(report) if METRICS[condition.metric].applies(case)]
    if condition.metric == KEPT_STEPS and condition.at:
        cases = [case for case in cases if states_of(case.precision) == condition.at]
    for case in cases:
        if case.result == "passed":
            yield _verdict(condition, case, report)
    if condition.metric in SPEED_METRICS:
        for name, why in _untimed(cases, report):
            yield Verdict(condition=condition.text, case=name, holds=False, actual=why)


def _untimed(cases: Sequence[Case], report: Report) -> Iterator[tuple[str, str]]:
    """(name, reason) of the requested cases without a time: prefills that did not pass, and what
    was left out, if the cases of `GATED` are part of it.
    """
    for case in cases:
        if isinstance(case.task, Prefill) and case.result != "passed":
            yield case.name, f"{case.result}: {case.why}"
    for left_out in report.left_out:
        if not left_out.implementations or GATED in left_out.implementations:
            name = left_out.case_key
            if report.kind == "prefill":
                name = f"{name}, {GATED}"
            yield name, f"left out: {left_out.reason}"


def _verdict(condition: Condition, case: Case, report: Report) -> Verdict:
    """The verdict on a case that passed.

    A case without the value breaks the condition.  Answers do not: they have no perplexity if no
    next token is known.
    """
    metric = METRICS[condition.metric]
    value = metric.value(case, condition.at, report.speedup)
    holds: bool | None
    if value is None:
        holds = None if is_answers(case) else False
        missing = metric.if_missing
        actual = missing if isinstance(missing, str) else missing(case)
    else:
        size = number(value)
        limit = condition.limit
        holds = size >= limit if metric.more_is_better else size <= limit
        actual = "" if holds else metric.shown(size)
    return Verdict(condition=condition.text, case=case.name, holds=holds, actual=actual)


class Outcome:
    """The outcome of any kind of report.

    A prefill does not fail because an implementation refuses it, and a bench does not fail because
    of another library.  Other reports fail because of a library only if the user named it or chose
    it as the baseline; a named one may refuse a case, the baseline may not.

    ended_early: why the report is incomplete, in a sentence; empty if it is complete.
    others: the number of cases of other libraries, on which the outcome does not depend.
    compared: the number of cases that were compared or failed, without answers, without the cases
        of `others`, and without baselines whose only fault is to be in `outside`.
    failed: the cases among them that did not pass.
    tolerated: the cases among them that passed although they are outside their budget: of other
        libraries, or of a server.
    outside: the cases of baselines that are finite, and outside their budget or break a law.  That
        fails nothing, because the verdict is on the implementations that are compared with them.
    refused: the requested cases that an implementation does not support, without answers, prefills
        and the cases of `others`.
    missing: the number of requested cases that are neither in the report nor left out by name.
    broken: the verdicts on conditions that do not hold.
    answers: the cases of the model's answers that gates apply to.
    answers_failed: the answers that did not pass or break a condition.
    faulty: the cases that failed or were refused, and the answers that failed.
    passed: whether the report is complete, nothing is `missing` or `faulty`, and all conditions
        hold; False if nothing was compared.  What was left out by name only breaks conditions on
        speed.
    """

    def __init__(self, report: Report) -> None:
        """Sort the cases of a report."""
        baselines = {case.rated_against for case in report.cases}
        counted: list[Case] = []
        judged: list[Case] = []
        self.outside: list[Case] = []
        for case in report.cases:
            is_baseline = (case.case_key, case.implementation) in baselines
            if is_baseline and case.accuracy_faults and case.result != "nonfinite":
                self.outside.append(case)
            if not _counts(case, report):
                continue
            counted.append(case)
            # listed in `outside`; neither compared nor a failure
            is_tolerated_baseline = is_baseline and case.is_only_inaccurate
            if not (is_answers(case) or is_tolerated_baseline):
                judged.append(case)
        self.others = len(report.cases) - len(counted)

        self.failed = tuple(case for case in judged if case.failed)
        self.tolerated = tuple(
            case for case in judged if case.result == "passed" and case.accuracy_faults
        )
        refused = [case for case in judged if case.result == "refused"]
        self.compared = len(judged) - len(refused)
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
        is_unfinished = self.ended_early or self.missing
        has_compared = self.compared > 0 or bool(self.answers)
        self.passed = has_compared and not (is_unfinished or self.faulty or self.broken)

    @property
    def word(self) -> str:
        """The outcome in a word: "passed", "failed", "refused" or "incomplete"."""
        if self.passed:
            return "passed"
        if self.failed or self.broken or self.answers_failed:
            return "failed"
        return "refused" if self.refused else "incomplete"


def _counts(case: Case, report: Report) -> bool:
    """Whether the outcome of a report depends on the case: see `Outcome`.  Cases of a bench are
    never `named`.
    """
    if case.kind != "library":
        return True
    if not case.baseline and report.kind != "bench":  # it is the baseline itself
        return True
    return case.named and case.result != "refused"


def exact_answer_is_finite(case: Case) -> bool:
    """Whether the fp64 oracle, rounded to the dtypes of the outputs, is finite.

    If it is not, no accurate kernel can have a finite output.
    """
    return not any(tensor.floor.nonfinite for tensor in case.accuracy)


def _ended_early(report: Report) -> str:
    """Why the report, or the capture that it replayed, did not reach its end; empty if both did."""
    if not report.complete:
        names = {"bench": "this bench", "prefill": "the command", "tune": "the command"}
        return f"{names.get(report.kind, 'this run')} did not reach its end"
    if not report.capture_complete:
        return "the replayed capture was interrupted and may lack layers or prompts"
    return ""


class ListedRun(Record):
    """A report in a list of reports.

    name: of the report's folder, by which other commands find it.
    model: the model, or the operator of a bench.
    layers: the number of layers that were replayed.
    gates: the number of conditions.
    gpu: None on a machine without a GPU.
    verdict: "passed", or one of these words.
        "failed": a case did not pass or could not finish, or a condition does not hold.
        "refused": an implementation does not support a case.
        "incomplete": nothing went wrong, but cases are missing.
        "unreadable": the report cannot be read; all other fields but `name` and `reason` are empty.
    state: "partial" if the report did not reach its end; None if it is unreadable.
    reason: why the report is unreadable.
    """

    name: Text
    kind: Text = ""
    created: Text = ""  # ISO 8601, UTC
    commit: Text = ""  # of the working directory's repository
    model: Text = ""
    random_weights: bool = False
    seqlens: tuple[int, ...] = ()  # of the prompts
    layers: int = 0
    cases: int = 0
    gates: int = 0
    gpu: Text | None = None
    verdict: Text
    state: Literal["complete", "partial"] | None = None
    reason: Text = ""

    @classmethod
    def of(cls, name: str, report: Report | SsdprofError) -> ListedRun:
        """The line of a report.

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
