"""Conditions on the cases of reports: gates on one report, and allowed changes from a baseline.

    --gate      metric[@where]:limit        speedup@fla:1.3   match@1e-2:99%    rms:2
    --fail-if   metric[@where]:base+N[%]    time:base+3%      match:base-0.1    rms:base+5%

The metric decides the direction.  The limit of a `speedup` is the smallest one that is allowed, and
its change is written `base-N`.  A change of a value that was measured with an interval is broken
only if the whole interval lies beyond the limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import model_validator

from ssdprof.core.accuracy import LEAST_VALUE
from ssdprof.core.base import TOLERANCES, NotNegative, Record, Text, states_of
from ssdprof.core.case import Answers, Case, DecodedStates, Prefill
from ssdprof.core.statistics import Estimate
from ssdprof.core.words import tolerance as tolerance_words
from ssdprof.errors import BadInputError, nearest

SPEED_METRICS = ("speedup", "time")
KEPT_STEPS = "kept-steps"
STATE_BREAKS = "state-breaks"
TOLERANCE_NAMES = {tolerance_words(value): value for value in TOLERANCES}
Measured = Estimate | float  # a value with an interval, or an exact one
SpeedupOf = Callable[..., Estimate | None]  # `Report.speedup` of the report of a case
_METRIC = r"(?P<metric>[a-z0-9-]+)(?:@(?P<at>.+))?:"
_NUMBER = r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)(?P<percent>%?)"
_GATE = re.compile(_METRIC + _NUMBER)
_CHANGE = re.compile(_METRIC + r"base(?P<sign>[+-])" + _NUMBER)


class Condition(Record):
    """A gate: a condition that the cases of a report must satisfy.

    metric: a key of `METRICS`.
    at: what follows @: a tolerance, a clock, an implementation or a format, depending on the
        metric.
    limit: in the metric's unit; the smallest allowed value if more is better, else the largest.
    text: the gate as the user wrote it.
    """

    metric: Text
    at: Text = ""
    limit: NotNegative
    text: Text

    @model_validator(mode="after")
    def _is_known(self) -> Condition:
        if self.metric not in METRICS:
            raise ValueError(f"there is no metric {self.metric}")
        if not METRICS[self.metric].allows(self.at):
            raise ValueError(f"there is no {self.metric} at {self.at}")
        return self


@dataclass(frozen=True, kw_only=True)
class Change:
    """The largest change for the worse that is allowed from one report to another.

    limit: a fraction of the value in BASE if `relative`, else in the metric's unit.
    metric, at, text: as in `Condition`.
    """

    metric: str
    at: str
    limit: float
    relative: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A value of cases on which there can be conditions.

    value: computes the value from a case, from what follows @, and from `Report.speedup`; None if
        the case has no value.
    applies: whether a case is of a kind that can have the value.
    gate, change: examples of limits, for hints.
    choices: what may follow @; None if any name may.
    default: what is assumed to follow @ if nothing does.
    is_whole: whether all values are whole numbers; then limits are, too, unless in percent.
    if_missing: why a case that passed has no value, in words; computed from the case if there are
        several reasons.
    """

    value: Callable[[Case, str, SpeedupOf], Measured | None]
    applies: Callable[[Case], bool]
    gate: str
    change: str
    unit: str = ""
    more_is_better: bool = False
    is_whole: bool = False
    choices: tuple[str, ...] | None = ()
    default: str = ""
    if_missing: str | Callable[[Case], str] = "no such value"

    def allows(self, at: str) -> bool:
        """Whether a text may follow @; nothing may always follow."""
        return not at or self.choices is None or at in self.choices

    @property
    def is_percent(self) -> bool:
        return self.unit == "%"

    def shown(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:,}{self.unit}" if isinstance(value, int) else f"{value:.6g}{self.unit}"


def is_answers(case: Case) -> bool:
    return isinstance(case.task, Answers)


def _is_timed(case: Case) -> bool:
    return case.is_call or isinstance(case.task, Prefill)


def _is_call(case: Case) -> bool:
    return case.is_call


def _is_decoded(case: Case) -> bool:
    return isinstance(case.task, DecodedStates)


def _kept_steps(case: Case, state_format: str, _speedup_of: SpeedupOf) -> int | None:
    """The steps that a format keeps; None for a case of another format.

    state_format: empty for any.
    """
    is_of_format = state_format in ("", states_of(case.precision))
    return case.task.kept_steps if isinstance(case.task, DecodedStates) and is_of_format else None


def _speedup(case: Case, over: str, speedup: SpeedupOf) -> Estimate | None:
    return speedup(case, over=over)


def _time(case: Case, clock: str, _speedup_of: SpeedupOf) -> Estimate | None:
    if clock == "call":
        return case.call_us
    return case.device_us if clock == "device" else case.time_us


def _match(case: Case, tolerance_name: str, _speedup_of: SpeedupOf) -> float | None:
    """The share of matching elements; None if the output was not compared with a baseline, or if
    the share says nothing (`LEAST_VALUE`), as where a table has a dash.
    """
    tolerance = TOLERANCE_NAMES[tolerance_name]
    out = case.tensor("out")
    error = out.vs_baseline if out else None
    if error is None or (error.scale_max_abs or 0.0) < LEAST_VALUE * tolerance:
        return None
    return error.match_pct(tolerance)


def _why_no_match(case: Case) -> str:
    """Why `_match` is None, and the gate that can be given instead."""
    if case.match_pct(0.0) is None:
        return "there is no baseline's output to match; gate rms, which compares with fp64"
    return (
        "the tolerance is over 2 % of the baseline's largest value; gate rms, whose limit is "
        "relative"
    )


def _rms(case: Case, _at: str, _speedup_of: SpeedupOf) -> float | None:
    """The RMS error over that of the floor; infinite if only the floor is 0.  None if the output
    was not compared.
    """
    out = case.tensor("out")
    if out is None:
        return None
    if out.floor.rms_ratio:
        return out.over_floor
    # an infinite error, of an oracle of zeros, is None
    return 0.0 if out.vs_oracle.rms_ratio == 0 else math.inf


def _of_answers(name: str) -> Callable[[Case, str, SpeedupOf], float | None]:
    """A metric's `value` for a field of `AnswerBand`, over the whole prompt."""

    def value(case: Case, _at: str, _speedup_of: SpeedupOf) -> float | None:
        return getattr(case.band, name) if case.band else None

    return value


METRICS: dict[str, Metric] = {
    "speedup": Metric(
        value=_speedup,
        applies=_is_timed,
        gate="1.5",
        change="base-3%",
        unit="x",
        more_is_better=True,
        choices=None,
        if_missing="it or its baseline was not timed",
    ),
    "time": Metric(
        value=_time,
        applies=_is_timed,
        gate="500",
        change="base+3%",
        unit=" µs",
        choices=("call", "device"),
        if_missing="not timed",
    ),
    "match": Metric(
        value=_match,
        applies=_is_call,
        gate="99%",
        change="base-0.1",
        unit="%",
        more_is_better=True,
        choices=tuple(TOLERANCE_NAMES),
        default="1e-3",
        if_missing=_why_no_match,
    ),
    "rms": Metric(
        value=_rms,
        applies=_is_call,
        gate="1.5",
        change="base+5%",
        unit=" times the floor",
        if_missing="not compared with the fp64 oracle",
    ),
    "memory": Metric(
        value=lambda case, _at, _speedup_of: case.workspace_bytes,
        applies=_is_call,
        gate="1e9",
        change="base+5%",
        unit=" bytes",
        is_whole=True,
        if_missing="its memory was not measured",
    ),
    "launches": Metric(
        value=lambda case, _at, _speedup_of: case.kernel_count,
        applies=_is_call,
        gate="2",
        change="base+0",
        is_whole=True,
        if_missing="its launches were not recorded",
    ),
    STATE_BREAKS: Metric(
        value=lambda case, _at, _speedup_of: float(bool(case.state_break)),
        applies=lambda case: case.layer is not None,
        gate="0",
        change="base+0",
        is_whole=True,
    ),
    KEPT_STEPS: Metric(
        value=_kept_steps,
        applies=_is_decoded,
        gate="1000",
        change="base-0",
        unit=" steps",
        more_is_better=True,
        is_whole=True,
        choices=None,
    ),
    "kl": Metric(
        value=_of_answers("kl_mean"),
        applies=is_answers,
        gate="0.001",
        change="base+0.001",
        unit=" nats",
    ),
    "top1": Metric(
        value=_of_answers("top1_pct"),
        applies=is_answers,
        gate="99%",
        change="base-0.1",
        unit="%",
        more_is_better=True,
    ),
    "perplexity": Metric(
        value=_of_answers("perplexity"), applies=is_answers, gate="8", change="base+1%"
    ),
    "perplexity-increase": Metric(
        value=_of_answers("perplexity_increase_pct"),
        applies=is_answers,
        gate="0.1%",
        change="base+0.1",
        unit="%",
    ),
}


def parse_gate(text: str) -> Condition:
    """The gate of a text such as "match@1e-2:99%".

    Raises BadInputError, whose hint says what to write.
    """
    if re.search(":base[+-]", text):
        raise BadInputError(
            f"The gate {text!r} compares with another report.",
            "Give it to 'ssdprof compare --fail-if'.",
        )
    at, limit, parts = _parsed("gate", text)
    return Condition(metric=parts["metric"], at=at, limit=limit, text=text)


def parse_change(text: str) -> Change:
    """The allowed change of a text such as "time@call:base+3%".

    Changes of a metric in percent are in percentage points: `match:base-0.1`.

    Raises BadInputError, whose hint says what to write.
    """
    at, limit, parts = _parsed("change", text)
    relative = bool(parts["percent"])
    if relative:
        limit /= 100
    return Change(metric=parts["metric"], at=at, limit=limit, relative=relative, text=text)


def number(value: Measured) -> float:
    """A value without its interval."""
    return value.value if isinstance(value, Estimate) else value


def _parsed(what: Literal["gate", "change"], text: str) -> tuple[str, float, re.Match[str]]:
    """Parse and check a gate or a change.

    Returns (at, limit, parts): the word after @, or the metric's default; the number; and the match
    of the grammar, whose groups are all parts of the text.

    Raises BadInputError for an unknown metric, another grammar, and a limit or a word after @ that
    the metric does not take.
    """
    name = re.split("[@:]", text, maxsplit=1)[0]
    metric = METRICS.get(name)
    if metric is None:
        raise BadInputError(f"The {what} {text!r} is of an unknown metric.", nearest(name, METRICS))
    pattern = _GATE if what == "gate" else _CHANGE
    example = metric.gate if what == "gate" else metric.change
    hint = f"Write {name}:{example}."
    parts = pattern.fullmatch(text)
    if parts is None:
        raise BadInputError(f"The {what} {text!r} cannot be read.", hint)
    at = parts["at"] or metric.default
    limit = float(parts["number"])
    percent = parts["percent"]
    if not metric.allows(at):
        raise BadInputError(
            f"The {what} {text!r} has an unknown word after @.",
            f"{name} takes {', '.join(metric.choices or ()) or 'no @'}.",
        )
    if what == "gate":
        has_right_unit = bool(percent) == metric.is_percent
        fits = has_right_unit and (limit <= 100 or not percent)
    else:
        sign_of_worse = "-" if metric.more_is_better else "+"
        # changes of a metric in percent are in percentage points, and have no % themselves
        has_wrong_unit = percent and metric.is_percent
        fits = parts["sign"] == sign_of_worse and not has_wrong_unit
    is_fraction = metric.is_whole and not percent and not limit.is_integer()
    if math.isinf(limit) or is_fraction or not fits:
        raise BadInputError(f"The {what} {text!r} has a limit that does not fit {name}.", hint)
    return at, limit, parts


def parse_percent(option: str, text: str) -> float:
    """The fraction of a text such as "1%", which is 0.01.

    option: named in messages.  Raises BadInputError for anything but 0 <= percentage < 100, and for
    what is no text: 0.01 from a program could mean 1% or 0.01%.
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except (ValueError, AttributeError):
        value = math.nan
    if not 0 <= value < 100:
        raise BadInputError(
            f"{option} is not a percentage: {text!r}.",
            "Give a number from 0% to below 100%, such as 1%.",
        )
    return value / 100
