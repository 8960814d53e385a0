"""Conditions: gates on one report, and changes from a baseline.

    --gate      metric[@where]:limit        speedup@fla:1.3   match@1e-2:99%    rms:2
    --fail-if   metric[@where]:base+N[%]    time:base+3%      match:base-0.1    rms:base+5%

The metric says in which direction: a gate of `speedup` is the least one that is allowed, and a
change of it is `base-N`.  A change of a measured value is broken only if its whole interval lies
beyond the limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import model_validator

from ssdprof.core.base import TOLERANCES, NotNegative, Record, Text
from ssdprof.core.case import Answers, Prefill
from ssdprof.core.statistics import Estimate
from ssdprof.core.words import tolerance
from ssdprof.errors import BadInputError, nearest

if TYPE_CHECKING:
    from ssdprof.core.case import Case
    from ssdprof.core.report import Report

TOLERANCE_NAMES = {tolerance(one): one for one in TOLERANCES}
JUDGED = "fused"  # the implementation that the gates of benches and prefills judge
Value = Estimate | float
_METRIC = r"(?P<metric>[a-z0-9-]+)(?:@(?P<at>[^:]+))?:"
_NUMBER = r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)(?P<percent>%?)"
_GATE = re.compile(_METRIC + _NUMBER)
_CHANGE = re.compile(_METRIC + r"base(?P<sign>[+-])" + _NUMBER)


class Condition(Record):
    """A gate: what a case of a report must satisfy.

    metric: of `METRICS`, which say in which direction.  at: a tolerance, clock or implementation,
    as the metric wants.  limit: in the metric's unit.  text: as the user gave it.
    """

    metric: Text
    at: Text = ""
    limit: NotNegative
    text: Text

    @model_validator(mode="after")
    def _is_known(self) -> Condition:
        if self.metric not in METRICS:
            raise ValueError(f"there is no metric {self.metric}")
        if not METRICS[self.metric].has(self.at):
            raise ValueError(f"there is no {self.metric} at {self.at}")
        return self


@dataclass(frozen=True, kw_only=True)
class Change:
    """The largest change from a baseline that is allowed, to the worse.

    limit: a part of the baseline's value if relative, else in the metric's unit.  Others: see
    `Condition`.
    """

    metric: str
    at: str
    limit: float
    relative: bool
    text: str


class Verdict(Record):
    """condition: as the user gave it.  case: its name; empty: the condition judged no case.
    holds: None if it cannot be judged.  found: in words.
    """

    condition: Text
    case: Text
    holds: bool | None
    found: Text = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.condition, self.case, self.found) if part)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """of: (case, where, report) -> its value; None: there is none.

    lacks: the reason why not, in words.  applies: whether it is of a case.
    places: what @ may name; None: any implementation.  place: the default.
    more: more is better.  unit: of values.  limit, change: examples.
    """

    of: Callable[[Case, str, Report], Value | None]
    lacks: str = "no such value"
    applies: Callable[[Case], bool]
    places: tuple[str, ...] | None = ()
    place: str = ""
    more: bool = False
    unit: str = ""
    limit: str
    change: str

    def has(self, place: str) -> bool:
        """Whether @ may name it."""
        return not place or self.places is None or place in self.places

    @property
    def percent(self) -> bool:
        return self.unit == "%"

    def shown(self, value: float) -> str:
        return f"{value:,}{self.unit}" if isinstance(value, int) else f"{value:.6g}{self.unit}"


def _timed(case: Case) -> bool:
    return not _answers(case)


def _call(case: Case) -> bool:
    return case.dims is not None


def _answers(case: Case) -> bool:
    return isinstance(case.task, Answers)


def _time(case: Case, clock: str, _report: Report) -> Estimate | None:
    if clock == "call":
        return case.call_us
    return case.device_us if clock == "device" else case.time_us


def _rms(case: Case, _where: str, _report: Report) -> float | None:
    """Over the floor; infinite if the floor is 0 and the error is not."""
    out = case.tensor("out")
    if out is None:
        return None
    if out.floor.rms_ratio:
        return out.over_floor
    return math.inf if out.vs_oracle.rms_ratio else 0.0


def _of_answers(name: str) -> Callable[[Case, str, Report], float | None]:
    """A value of the answers' whole prompt."""

    def value(case: Case, _where: str, _report: Report) -> float | None:
        return getattr(case.band, name) if case.band else None

    return value


METRICS: dict[str, Metric] = {
    "speedup": Metric(
        of=lambda case, over, report: report.speedup(case, over=over),
        lacks="it or its baseline was not timed",
        applies=_timed,
        places=None,
        more=True,
        unit="x",
        limit="1.5",
        change="base-3%",
    ),
    "time": Metric(
        of=_time,
        lacks="not timed",
        applies=_timed,
        places=("call", "device"),
        unit=" us",
        limit="500",
        change="base+3%",
    ),
    "match": Metric(
        of=lambda case, within, _: case.match_pct(TOLERANCE_NAMES[within]),
        lacks="not compared with a baseline",
        applies=_call,
        places=tuple(TOLERANCE_NAMES),
        place="1e-3",
        more=True,
        unit="%",
        limit="99%",
        change="base-0.1",
    ),
    "rms": Metric(
        of=_rms,
        lacks="not compared with the fp64 oracle",
        applies=_call,
        unit=" times the floor",
        limit="1.5",
        change="base+5%",
    ),
    "memory": Metric(
        of=lambda case, _where, _report: case.workspace_bytes,
        applies=_call,
        unit=" bytes",
        limit="1e9",
        change="base+5%",
    ),
    "launches": Metric(
        of=lambda case, _where, _report: case.kernels, applies=_call, limit="2", change="base+0"
    ),
    "kl": Metric(
        of=_of_answers("kl_mean"),
        applies=_answers,
        unit=" nats",
        limit="0.001",
        change="base+0.001",
    ),
    "top1": Metric(
        of=_of_answers("top1_pct"),
        applies=_answers,
        more=True,
        unit="%",
        limit="99%",
        change="base-0.1",
    ),
    "perplexity": Metric(
        of=_of_answers("perplexity"), applies=_answers, limit="8", change="base+1%"
    ),
    "perplexity-increase": Metric(
        of=_of_answers("perplexity_increase_pct"),
        applies=_answers,
        unit="%",
        limit="0.1%",
        change="base+0.1",
    ),
}


def parse_gate(text: str) -> Condition:
    """ "match@1e-2:99%" -> the gate.  Raises BadInputError, which says what to write."""
    name, metric = _metric("gate", text)
    hint = f"Write {name}:{metric.limit}."
    if re.search(":base[+-]", text):
        raise BadInputError(
            f"The gate {text!r} compares with another report.",
            "Give it to 'ssdprof compare --fail-if'.",
        )
    parts = _GATE.fullmatch(text)
    if parts is None:
        raise BadInputError(f"The gate {text!r} cannot be read.", hint)
    at = _place("gate", text, metric, parts)
    limit = float(parts["number"])
    largest = 100 if metric.percent else math.inf
    if bool(parts["percent"]) != metric.percent or math.isinf(limit) or limit > largest:
        raise BadInputError(f"The gate {text!r} has a limit that does not fit {name}.", hint)
    return Condition(metric=name, at=at, limit=limit, text=text)


def parse_change(text: str) -> Change:
    """ "time@call:base+3%" -> the change.  Raises BadInputError, which says what to write.

    Changes of a metric in percent are in percentage points: `match:base-0.1`.
    """
    name, metric = _metric("change", text)
    hint = f"Write {name}:{metric.change}."
    parts = _CHANGE.fullmatch(text)
    if parts is None:
        raise BadInputError(f"The change {text!r} cannot be read.", hint)
    at = _place("change", text, metric, parts)
    relative, limit = bool(parts["percent"]), float(parts["number"])
    worse = parts["sign"] == ("-" if metric.more else "+")
    if not worse or (relative and metric.percent) or math.isinf(limit):
        raise BadInputError(f"The change {text!r} has a limit that does not fit {name}.", hint)
    return Change(
        metric=name, at=at, limit=limit / 100 if relative else limit, relative=relative, text=text
    )


def _metric(what: str, text: str) -> tuple[str, Metric]:
    """The metric of a gate or a change, and its name.  Raises BadInputError for an unknown one."""
    name = re.split("[@:]", text, maxsplit=1)[0]
    if name not in METRICS:
        raise BadInputError(f"The {what} {text!r} is of an unknown metric.", nearest(name, METRICS))
    return name, METRICS[name]


def _place(what: str, text: str, metric: Metric, parts: re.Match[str]) -> str:
    """The place of a gate or a change, or the default.  Raises BadInputError for an unknown one."""
    at = parts["at"] or metric.place
    if not metric.has(at):
        raise BadInputError(
            f"The {what} {text!r} has an unknown place.",
            f"{parts['metric']} takes {', '.join(metric.places or ()) or 'no @'}.",
        )
    return at


def parse_percent(option: str, text: str) -> float:
    """ "1%" -> 0.01.  option: for messages."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < 100:
        raise BadInputError(
            f"{option} is not a percentage: {text!r}.",
            "Give a number from 0% to below 100%, such as 1%.",
        )
    return value / 100


# --- judging


def judged(report: Report) -> tuple[Case, ...]:
    """The cases that conditions judge."""
    by_name = report.kind in ("bench", "prefill")
    return tuple(
        case
        for case in report.cases
        if case.judged
        and (not (by_name or isinstance(case.task, Prefill)) or case.implementation == JUDGED)
    )


def verdicts(report: Report) -> Iterator[Verdict]:
    """A verdict for each condition of the report and each case that it applies to.

    Cases that did not pass are not judged: they fail a report anyway, except that a requested case
    without a time breaks a speedup.  A condition that judged no case is broken.
    """
    for condition in report.conditions:
        found = list(_of(condition, report))
        yield from found
        if all(one.holds is None for one in found):
            yield Verdict(
                condition=condition.text,
                case="",
                holds=False,
                found="no case passed that it could judge",
            )


def broken(report: Report) -> tuple[Verdict, ...]:
    """The verdicts that do not hold."""
    return tuple(one for one in verdicts(report) if one.holds is False)


def _of(condition: Condition, report: Report) -> Iterator[Verdict]:
    cases = [case for case in judged(report) if METRICS[condition.metric].applies(case)]
    found: list[tuple[str, bool | None, str]] = []
    for case in cases:
        if case.result == "passed":
            holds, words = _judge(condition, case, report)
            # an answer without a next token has no perplexity
            found.append(
                (case.name, bool(holds) if holds is not None or not _answers(case) else None, words)
            )
    if condition.metric in ("speedup", "time"):
        untimed = [
            case for case in cases if isinstance(case.task, Prefill) and case.result != "passed"
        ]
        found += [(case.name, False, f"{case.result}: {case.why}") for case in untimed]
        for out in report.left_out:
            if not out.implementations or JUDGED in out.implementations:
                place = f"{out.place}, {JUDGED}" if report.kind == "prefill" else out.place
                found.append((place, False, f"left out: {out.reason}"))
    for name, verdict, words in found:
        yield Verdict(condition=condition.text, case=name, holds=verdict, found=words)


def _judge(condition: Condition, case: Case, report: Report) -> tuple[bool | None, str]:
    """Whether a case is within the limit, and its value if not; None if it has no such value."""
    metric = METRICS[condition.metric]
    value = number(metric.of(case, condition.at, report))
    if value is None:
        return None, metric.lacks
    holds = value >= condition.limit if metric.more else value <= condition.limit
    return holds, "" if holds else metric.shown(value)


def number(value: Value | None) -> float | None:
    return value.value if isinstance(value, Estimate) else value


# --- the outcome of a report, from which its headline and every command's exit code follow


class Outcome:
    """The result of any kind of report.  Refusals do not fail a prefill, nor other libraries a
    bench.  Libraries fail a run only if the user named them, and never by a refusal.

    ended_early: why the report is incomplete, in a sentence; empty if it is complete.
    judged: number of cases that were compared or failed, without those of other libraries and those
    of answers.
    failed: the judged cases that did not pass.
    outside: cases of baselines outside their budget: the verdict is on what is compared with them.
    refused: requested cases that an implementation does not support, except other libraries.
    missing: number of requested cases that are neither in the report nor left out by name.
    broken: conditions that do not hold, each with its case.
    answers: the judged cases of the model's answers.  answers_failed: those that did not pass, or
    break a condition.
    passed: all requested cases were compared and passed, and all conditions hold; False if nothing
    was compared.
    """

    def __init__(self, report: Report) -> None:
        bench = report.kind == "bench"
        own = [
            case
            for case in report.cases
            if case.kind != "library"
            or not (case.baseline or bench)
            or (case.named and case.result != "refused")
        ]
        calls = [case for case in own if not _answers(case)]
        refused = [case for case in calls if case.result == "refused"]
        rivals = {case.rated_against for case in report.cases}
        self.outside = [
            one
            for one in report.cases
            if one.outside_budget and (one.place, one.implementation) in rivals
        ]
        excused = [case for case in self.outside if case.only_outside]
        requested = {", ".join(one) for one in report.requested}
        self.ended_early = _ended_early(report)
        self.judged = len([case for case in calls if case not in (*refused, *excused)])
        self.failed = tuple(case for case in calls if case.failed and case not in excused)
        self.refused = tuple(
            one
            for one in refused
            if not isinstance(one.task, Prefill) and (not requested or one.name in requested)
        )
        self.missing = len(report.missing)
        self.broken = broken(report)
        self.answers = tuple(case for case in own if _answers(case) and case.judged)
        limits = {one.case for one in self.broken}
        self.answers_failed = tuple(
            case for case in self.answers if case.result != "passed" or case.name in limits
        )
        failed = self.failed or self.refused or self.missing or self.broken or self.answers_failed
        self.passed = self.judged + len(self.answers) > 0 and not (self.ended_early or failed)

    @property
    def word(self) -> str:
        """ "passed", "failed", "refused" or "incomplete"."""
        if self.passed:
            return "passed"
        if self.failed or self.broken or self.answers_failed:
            return "failed"
        return "refused" if self.refused else "incomplete"


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
