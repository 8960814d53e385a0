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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import model_validator

from ssdprof.core.base import TOLERANCES, NotNegative, Record, Text, states_of
from ssdprof.core.case import Answers, Case, DecodedStates, Prefill
from ssdprof.core.statistics import Estimate
from ssdprof.core.words import tolerance
from ssdprof.errors import BadInputError, nearest

OF_SPEED = ("speedup", "time")  # metrics
KEPT_STEPS = "kept-steps"
TOLERANCE_NAMES = {tolerance(value): value for value in TOLERANCES}
Measured = Estimate | float
Speedup = Callable[..., Estimate | None]  # of a case: `Report.speedup`
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


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A value of a case that conditions are about.

    value: of a case at a tolerance, clock or implementation; None: the case has none.
    if_missing: the reason, in words.  applies: whether cases of this kind can have it.
    choices: what may follow @; None: any implementation.  default: if nothing does.
    gate, change: examples of limits.
    """

    value: Callable[[Case, str, Speedup], Measured | None]
    applies: Callable[[Case], bool]
    gate: str
    change: str
    unit: str = ""
    more_is_better: bool = False
    choices: tuple[str, ...] | None = ()
    default: str = ""
    if_missing: str = "no such value"

    def has(self, at: str) -> bool:
        """Whether it may follow @."""
        return not at or self.choices is None or at in self.choices

    @property
    def is_percent(self) -> bool:
        return self.unit == "%"

    def shown(self, value: float) -> str:
        return f"{value:,}{self.unit}" if isinstance(value, int) else f"{value:.6g}{self.unit}"


def is_answers(case: Case) -> bool:
    return isinstance(case.task, Answers)


def _is_timed(case: Case) -> bool:
    return case.is_call or isinstance(case.task, Prefill)


def _is_call(case: Case) -> bool:
    return case.is_call


def _is_decoded(case: Case) -> bool:
    return isinstance(case.task, DecodedStates)


def _kept_steps(case: Case, state_format: str, _: Speedup) -> int | None:
    of_format = state_format in ("", states_of(case.precision))
    return case.task.kept_steps if isinstance(case.task, DecodedStates) and of_format else None


def _speedup(case: Case, over: str, speedup: Speedup) -> Estimate | None:
    return speedup(case, over=over)


def _time(case: Case, clock: str, _: Speedup) -> Estimate | None:
    if clock == "call":
        return case.call_us
    return case.device_us if clock == "device" else case.time_us


def _match(case: Case, tolerance_name: str, _: Speedup) -> float | None:
    return case.match_pct(TOLERANCE_NAMES[tolerance_name])


def _rms(case: Case, _at: str, _: Speedup) -> float | None:
    """Over the floor; infinite if the floor is 0 and the error is not."""
    out = case.tensor("out")
    if out is None:
        return None
    if out.floor.rms_ratio:
        return out.over_floor
    return math.inf if out.vs_oracle.rms_ratio else 0.0


def _of_answers(name: str) -> Callable[[Case, str, Speedup], float | None]:
    """A value of the answers' whole prompt."""

    def value(case: Case, _at: str, _: Speedup) -> float | None:
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
        unit=" us",
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
        if_missing="not compared with a baseline",
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
        value=lambda case, _at, _: case.workspace_bytes,
        applies=_is_call,
        gate="1e9",
        change="base+5%",
        unit=" bytes",
    ),
    "launches": Metric(
        value=lambda case, _at, _: case.kernels, applies=_is_call, gate="2", change="base+0"
    ),
    KEPT_STEPS: Metric(
        value=_kept_steps,
        applies=_is_decoded,
        gate="1000",
        change="base-0",
        unit=" steps",
        more_is_better=True,
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
    """ "match@1e-2:99%" -> the gate.  Raises BadInputError, which says what to write."""
    if re.search(":base[+-]", text):
        raise BadInputError(
            f"The gate {text!r} compares with another report.",
            "Give it to 'ssdprof compare --fail-if'.",
        )
    at, limit, parts = _parsed("gate", text)
    return Condition(metric=parts["metric"], at=at, limit=limit, text=text)


def parse_change(text: str) -> Change:
    """ "time@call:base+3%" -> the change.  Raises BadInputError, which says what to write.

    Changes of a metric in percent are in percentage points: `match:base-0.1`.
    """
    at, limit, parts = _parsed("change", text)
    relative = bool(parts["percent"])
    if relative:
        limit /= 100
    return Change(metric=parts["metric"], at=at, limit=limit, relative=relative, text=text)


def number(value: Measured) -> float:
    return value.value if isinstance(value, Estimate) else value


def _parsed(what: Literal["gate", "change"], text: str) -> tuple[str, float, re.Match[str]]:
    """What follows @ or the default, the number, and all parts of the grammar.

    Raises BadInputError for an unknown metric, another grammar, and what the metric does not take.
    """
    name = re.split("[@:]", text, maxsplit=1)[0]
    metric = METRICS.get(name)
    if metric is None:
        raise BadInputError(f"The {what} {text!r} is of an unknown metric.", nearest(name, METRICS))
    pattern, example = (_GATE, metric.gate) if what == "gate" else (_CHANGE, metric.change)
    hint = f"Write {name}:{example}."
    parts = pattern.fullmatch(text)
    if parts is None:
        raise BadInputError(f"The {what} {text!r} cannot be read.", hint)
    at = parts["at"] or metric.default
    limit = float(parts["number"])
    percent = parts["percent"]
    if not metric.has(at):
        raise BadInputError(
            f"The {what} {text!r} has an unknown place.",
            f"{name} takes {', '.join(metric.choices or ()) or 'no @'}.",
        )
    if what == "gate":  # in the metric's unit
        fits = bool(percent) == metric.is_percent and (limit <= 100 or not percent)
    else:  # to the worse; in points of a metric in percent
        worse = parts["sign"] == ("-" if metric.more_is_better else "+")
        fits = worse and not (percent and metric.is_percent)
    if math.isinf(limit) or not fits:
        raise BadInputError(f"The {what} {text!r} has a limit that does not fit {name}.", hint)
    return at, limit, parts


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
