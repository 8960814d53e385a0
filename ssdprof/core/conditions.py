"""The grammar of conditions, `metric[@where]:limit`, for every gate and every comparison of two
reports.

limit is a number, `N%`, or a change from the base report: `base+N%`, or `base+N` in the metric's
own unit, with a minus where more is better.  The metric says in which direction.  An absolute limit
judges the value; a change of a measured value is broken only if its whole interval lies beyond the
limit.

Older options are spellings of it: `--min-speedup 1.5` is `speedup:1.5`, `--min-match 1e-3:99` is
`match@1e-3:99%`, `--max-rms-ratio X` is `rms:X`, `--max-kl X` is `kl:X`.  In `--fail-if`,
`match:-0.1` is `match:base-0.1`, `kl:X` is `kl:base+X`, and `slower:3%` is `time:base+3%`, or
`speedup:base-3%` where the machines differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
_GRAMMAR = re.compile(
    r"(?P<metric>[a-z0-9-]+)(?:@(?P<at>[^:]+))?:(?P<base>base)?"
    r"(?P<limit>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)(?P<unit>%?)"
)
_EXAMPLE = "Give TOLERANCE:PERCENT, such as 1e-3:99."


class Condition(Record):
    """What a case must satisfy: `core.conditions`.  The metric says in which direction.

    at: a tolerance, clock, tensor or implementation, as the metric wants.  limit: in the metric's
    unit, or percent.
    to_base: the limit is a change from the base report: relative if percent.
    spelling: the option as the user gave it, "min-speedup 1.5"; it is what reports show.
    """

    metric: Text
    at: Text = ""
    limit: NotNegative
    percent: bool = False
    to_base: bool = False
    spelling: Text = ""

    @model_validator(mode="after")
    def _is_known(self) -> Condition:
        if self.metric not in (*METRICS, *SLOWER):
            raise ValueError(f"there is no metric {self.metric}")
        places = SLOWER[self.metric] if self.metric in SLOWER else METRICS[self.metric].places
        if self.at and places is not None and self.at not in places:
            raise ValueError(f"there is no {self.metric} at {self.at}")
        return self


class Verdict(Record):
    """holds: None if it cannot be judged.  case: its name; empty: the condition judged no case.
    found: in words.
    """

    condition: Condition
    case: Text
    holds: bool | None
    found: Text = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.condition.spelling, self.case, self.found) if part)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """of: (case, where, report) -> its value; None: there is none.

    lacks: why not, in words.  says: (case, value, limit) -> the value that breaks a limit, in
    words.
    applies: whether it is of a case.  places: what @ may name; None: any implementation.
    more: more is better.  percent: an absolute limit is in percent.  unit: of values.
    relative: a change without "base" is in percent.  changes: the value that changes are of; None:
    that of `of`.
    """

    of: Callable[[Case, str, Report], Value | None]
    lacks: Callable[[Case], str] = lambda _: "no such value"
    says: Callable[[Case, float, Condition], str]
    applies: Callable[[Case], bool]
    places: tuple[str, ...] | None = ()
    more: bool = False
    percent: bool = False
    unit: str = ""
    relative: bool = False
    changes: Callable[[Case, str, Report], Value | None] | None = None


def _call(case: Case) -> bool:
    return case.dims is not None


def _answers(case: Case) -> bool:
    return isinstance(case.task, Answers)


def _rms(case: Case, _where: str, _report: Report) -> float | None:
    """Over the floor; infinite if the floor is 0 and the error is not."""
    out = case.tensor("out")
    if out is None:
        return None
    return out.over_floor if out.floor.rms_ratio else (math.inf if out.vs_oracle.rms_ratio else 0.0)


METRICS: dict[str, Metric] = {
    "speedup": Metric(
        of=lambda case, where, report: report.speedup(case, over=where),
        applies=lambda case: not _answers(case),
        lacks=lambda case: "its baseline was not timed" if case.time_us else "not timed",
        says=lambda case, value, at: f"{value:.5g}x over {at.at or case.baseline}",
        places=None,
        more=True,
        relative=True,
    ),
    "time": Metric(
        of=lambda case, where, _: {"call": case.call_us, "device": case.device_us}.get(
            where, case.time_us
        ),
        lacks=lambda _: "not timed",
        says=lambda _case, value, _: f"{value:,.5g} us",
        applies=lambda case: not _answers(case),
        places=("call", "device"),
        unit=" us",
        relative=True,
    ),
    "match": Metric(
        of=lambda case, where, _: case.match_pct(TOLERANCE_NAMES[where or "1e-3"]),
        applies=_call,
        lacks=lambda _: "not compared with a baseline",
        says=lambda _case, value, _: f"{value:.6g}%",
        places=tuple(TOLERANCE_NAMES),
        more=True,
        percent=True,
        unit="%",
    ),
    "rms": Metric(
        of=_rms,
        lacks=lambda _: "not compared with the fp64 oracle",
        applies=_call,
        relative=True,
        says=lambda _case, value, _: (
            "the floor is 0" if math.isinf(value) else f"{value:.5g} times the floor"
        ),
        changes=lambda case, _where, _report: case.error.rms_ratio if case.error else None,
    ),
    "memory": Metric(
        of=lambda case, _where, _report: case.workspace_bytes,
        applies=_call,
        says=lambda _case, value, _: f"{value:,.0f} bytes",
        unit=" bytes",
        relative=True,
    ),
    "launches": Metric(
        of=lambda case, _where, _report: case.kernels,
        says=lambda _case, value, _: f"{value:.0f}",
        applies=_call,
    ),
    "kl": Metric(
        of=lambda case, _where, _report: case.band.kl_mean if case.band else None,
        applies=_answers,
        unit=" nats",
        says=lambda _case, value, at: f"mean KL {value:.3g} is above {at.limit:g}",
    ),
    "top1": Metric(
        of=lambda case, _where, _report: case.band.top1_pct if case.band else None,
        applies=_answers,
        more=True,
        says=lambda _case, value, at: (
            f"the same top token at {value:.4g}% of positions, below {at.limit:g}%"
        ),
        percent=True,
        unit="%",
    ),
    "perplexity": Metric(
        of=lambda case, _where, _report: case.band.perplexity if case.band else None,
        applies=_answers,
        relative=True,
        says=lambda _case, value, at: f"perplexity {value:.6g} is above {at.limit:g}",
    ),
    "perplexity-increase": Metric(
        of=lambda case, _where, _report: case.band.perplexity_increase_pct if case.band else None,
        applies=_answers,
        says=lambda _case, value, at: f"perplexity rises by {value:.3g}%, more than {at.limit:g}%",
        percent=True,
        unit="%",
    ),
}
# of --fail-if: the time, or the speedup where the machines differ; and the places of a condition
SLOWER: dict[str, tuple[str, ...]] = {"slower": (), "slower-call": ("call",)}
# whose limit in --fail-if is a change
_CHANGES = ("match", "rms", "memory", "launches", "kl", "top1", "perplexity")
LIMITS = {  # options -> the metrics that they limit
    "min_speedup": "speedup",
    "min_match": "match",
    "max_rms_ratio": "rms",
    "max_kl": "kl",
    "min_top1": "top1",
    "max_perplexity_increase": "perplexity-increase",
}


def metric_of(name: str) -> Metric:
    """The metric of a condition."""
    return METRICS["time" if name in SLOWER else name]


def parse(option: str, text: str) -> Condition:
    """option: for messages; --fail-if also takes its older spellings.

    Raises BadInputError, which says what to write, for anything that is not a condition.
    """
    name, old = re.split("[@:]", text, maxsplit=1)[0], option == "--fail-if"
    known = (*(SLOWER if old else ()), *METRICS)
    if name not in known:
        raise BadInputError(f"{option} does not know {name!r}.", nearest(name, known))
    metric, found = metric_of(name), _GRAMMAR.fullmatch(text)
    # from BASE, without saying it
    change = old and (name in SLOWER or (name in _CHANGES and ":base" not in text))
    more = f"{name}:base{'-' if metric.more else '+'}3{'%' if metric.relative else ''}"
    hint = f"Write {name}:2{'%' if metric.percent else ''}{f' or {more}' if old else ''}."
    if found and found["base"] and not old:
        raise BadInputError(
            f"{option} has no report to compare with: {text!r}.",
            "Give it to 'ssdprof compare --fail-if'.",
        )
    if change:
        hint = f"Write {name}:{'3%' if metric.relative else '-0.1' if metric.more else '0'}."
    if found is None or (change and found["base"]):
        raise BadInputError(f"{option} cannot read {text!r}.", hint)
    at, base, unit, word = found["at"] or "", found["base"], found["unit"], found["limit"]
    places = TOLERANCE_NAMES if change and name == "match" else () if change else metric.places
    if places is not None and at and at not in places:
        if change or places:
            hint = (
                f"{'match' if change else name} has a place: "
                f"{', '.join(places or TOLERANCE_NAMES)}."
            )
        raise BadInputError(f"{option} knows no {name} at {at}.", hint)
    limit = float(word) if word.count(".") < 2 else math.inf
    if math.isinf(limit):
        raise BadInputError(f"{option} has no number in {text!r}.", hint)
    fits = word[0] not in "+-" and bool(unit) == metric.percent and (limit <= 100 or not unit)
    if change:
        fits = (limit <= 0 if metric.more else limit >= 0) and bool(unit) == metric.relative
    elif base:
        fits = word[0] == ("-" if metric.more else "+")
    if not fits:
        raise BadInputError(f"{option} has a limit that does not fit {name}: {text!r}.", hint)
    return Condition(
        metric=name,
        at="call" if name == "slower-call" else at,
        limit=abs(limit),
        percent=bool(unit),
        to_base=change or bool(base),
        spelling=text,
    )


def of_options(gates: Iterable[str] = (), **limits: Any) -> tuple[Condition, ...]:
    """The conditions of the options in `LIMITS`, in its order, and of --gate.  None: one that was
    not given.

    Raises BadInputError for an invalid one.
    """
    found = []
    for name in sorted(limits, key=[*LIMITS].index):
        given, metric, option = limits[name], LIMITS[name], name.replace("_", "-")
        unit, colon = "%" * METRICS[metric].percent, ":" * (metric == "match")
        if metric == "match":  # several
            places = [tuple(one.partition(":")[::2]) for one in given or ()]
        else:
            places = [] if given is None else [("", given)]
        for at, limit in places:
            try:
                one = parse(
                    "",
                    f"{metric}{'@' * bool(colon)}{at}:{str(limit).strip().removesuffix('%')}{unit}",
                )
            except BadInputError as error:
                example = (
                    "Give a number from 0 to 100, such as 1.5%." if unit else "Give it as 1.5."
                )
                example = {"match": _EXAMPLE, "kl": "Give nats, such as 0.001."}.get(
                    metric, example
                )
                raise BadInputError(
                    f"--{option} is no limit: {at}{colon}{limit}.", example
                ) from error
            shown = f"{at}{colon}{one.limit:g}{unit * (not colon)}"
            found.append(one.changed(spelling=f"{option} {shown}"))
    return (*found, *(parse("--gate", text) for text in gates))


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
                condition=condition,
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
            holds, words = judge(condition, case, report)
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
        yield Verdict(condition=condition, case=name, holds=verdict, found=words)


def judge(condition: Condition, case: Case, report: Report) -> tuple[bool | None, str]:
    """Whether a case is within an absolute limit, and what is wrong if not; None if it has no such
    value.
    """
    metric = METRICS[condition.metric]
    value = number(metric.of(case, condition.at, report))
    if value is None:
        return None, metric.lacks(case)
    holds = value >= condition.limit if metric.more else value <= condition.limit
    return holds, "" if holds else metric.says(case, value, condition)


def number(value: Value | None) -> float | None:
    return value.value if isinstance(value, Estimate) else value


# --- the outcome of a report, from which its headline and every command's exit code follow


class Outcome:
    """The result of any kind of report.  Refusals do not fail a prefill, nor other libraries a
    bench.

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
            case for case in report.cases if case.kind != "library" or not (case.baseline or bench)
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
