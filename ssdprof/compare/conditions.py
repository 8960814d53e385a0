"""The conditions of --fail-if: METRIC[@TOLERANCE]:LIMIT.

| condition | a case violates it if |
| --- | --- |
| slower:3% | its device time is longer by more than 3 %; on another machine: its speedup is smaller by more than that |
| slower-call:3% | its call time is longer by more than 3 % |
| match:-0.1 | less of its output matches the baseline's within 1e-3, by more than 0.1 percentage points |
| match@1e-2:-0.1 | the same within 1e-2; 0 is the third tolerance |
| rms:5% | the RMS error of its output against fp64 is larger by more than 5 % |
| memory:5% | it allocates more beyond its outputs, by more than 5 % |
| launches:0 | it launches more kernels, by more than 0 |
| kl:0.001 | the mean KL divergence of the model's answers is larger by more than 0.001 nats |
| top1:-0.1 | fewer positions keep their most likely token, by more than 0.1 percentage points |
| perplexity:1% | the perplexity of the prompt is larger by more than 1 % |

A time is longer if its whole 95 % interval is beyond the limit.  A prefill has call times alone: both conditions on
times judge them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ssdprof.errors import BadInputError, nearest
from ssdprof.schema.comparison import Change, Condition, Pair
from ssdprof.schema.gates import TOLERANCE_NAMES
from ssdprof.schema.gating import Broken
from ssdprof.schema.rows import Row

_GRAMMAR = re.compile(
    r"(?P<metric>[a-z0-9-]+)(?:@(?P<tolerance>[^:]+))?:(?P<limit>[+-]?[0-9.]+(?:e-?[0-9]+)?)(?P<unit>%?)"
)
_DEFAULT_TOLERANCE = "1e-3"


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value of a row.  limit: "grows %" is relative, "grows" and "falls" are differences."""

    of: Callable[[Row, float], float | None]
    limit: Literal["grows %", "grows", "falls"]
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Time:
    """The ratio of two times of a pair."""

    of: Callable[[Pair], Change | None]


METRICS: dict[str, Value | Time] = {
    "slower": Time(of=lambda pair: pair.judged_by),
    "slower-call": Time(of=lambda pair: pair.call),
    "match": Value(
        of=lambda row, tolerance: row.out.match_pct(tolerance) if row.out else None, limit="falls", unit="%"
    ),
    "rms": Value(of=lambda row, _: row.out.rms_ratio if row.out else None, limit="grows %"),
    "memory": Value(
        of=lambda row, _: row.memory.workspace_bytes if row.memory else None, limit="grows %", unit=" bytes"
    ),
    "launches": Value(of=lambda row, _: row.kernels, limit="grows"),
    "kl": Value(of=lambda row, _: row.answers.kl_mean if row.answers else None, limit="grows", unit=" nats"),
    "top1": Value(of=lambda row, _: row.answers.top1_pct if row.answers else None, limit="falls", unit="%"),
    "perplexity": Value(of=lambda row, _: row.answers.perplexity if row.answers else None, limit="grows %"),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A parsed condition.  limit: 0.03 for "3%", 0.1 for a match that may fall by 0.1 points."""

    text: str
    metric: str
    tolerance: float
    limit: float


def parse(text: str) -> Asked:
    """Raises BadInputError for an unknown metric, with the nearest one, and for a limit that does not fit."""
    name = re.split("[@:]", text, maxsplit=1)[0]
    if name not in METRICS:
        raise BadInputError(f"--fail-if does not know {name!r}.", nearest(name, METRICS))
    found = _GRAMMAR.fullmatch(text)
    if found is None:
        raise BadInputError(f"--fail-if cannot read {text!r}.", f"Write {_example(name)}.")
    tolerance = found["tolerance"]
    if tolerance is not None and (name != "match" or tolerance not in TOLERANCE_NAMES):
        raise BadInputError(
            f"--fail-if knows no {name} at {tolerance}.", f"A match has a tolerance: {', '.join(TOLERANCE_NAMES)}."
        )
    metric = METRICS[name]
    falls = isinstance(metric, Value) and metric.limit == "falls"
    percent = isinstance(metric, Time) or metric.limit == "grows %"
    try:
        limit = float(found["limit"])
    except ValueError:
        raise BadInputError(f"--fail-if has no number in {text!r}.", f"Write {_example(name)}.") from None
    if bool(found["unit"]) != percent or (limit > 0 if falls else limit < 0):
        raise BadInputError(f"--fail-if has a limit that does not fit {name}: {text!r}.", f"Write {_example(name)}.")
    return Asked(
        text=text,
        metric=name,
        tolerance=TOLERANCE_NAMES[tolerance or _DEFAULT_TOLERANCE],
        limit=abs(limit) / 100 if percent else abs(limit),
    )


def judge(asked: Asked, pairs: Sequence[Pair], unfinished: str) -> Condition:
    """The condition with the rows that violate it.  unfinished: why NEW is incomplete, which violates it as well.

    A condition that applies to no case is violated too.
    """
    verdicts = {pair.row.name: _verdict(asked, pair) for pair in pairs if pair.base and pair.new}
    offenders = [Broken(gate=asked.text, row=name, found=found) for name, found in verdicts.items() if found]
    if unfinished:
        offenders.append(Broken(gate=asked.text, row="", found=f"NEW is incomplete: {unfinished}"))
    elif all(found is None for found in verdicts.values()):
        offenders.append(Broken(gate=asked.text, row="", found=f"no case could be judged: {_why_none(asked, pairs)}"))
    return Condition(text=asked.text, offenders=tuple(offenders))


def _verdict(asked: Asked, pair: Pair) -> str | None:
    """What is wrong with a pair; "" if nothing is; None if it cannot be judged."""
    assert pair.base is not None
    assert pair.new is not None
    metric = METRICS[asked.metric]
    if isinstance(metric, Time):
        if pair.base.time and not pair.new.time:
            return f"timed in BASE; {_status(pair.new)} in NEW"
        change = metric.of(pair)
        return None if change is None else _slower(asked, change, by_speedup=pair.time is None)
    before, now = metric.of(pair.base, asked.tolerance), metric.of(pair.new, asked.tolerance)
    if before is None or pair.other_inputs:
        return None
    if now is None:
        return f"{_number(before, metric)} in BASE; {_status(pair.new)} in NEW"
    limits = {"falls": before - asked.limit, "grows": before + asked.limit, "grows %": before * (1 + asked.limit)}
    limit = limits[metric.limit]
    holds = now >= limit if metric.limit == "falls" else now <= limit
    return "" if holds else f"{_number(before, metric)} in BASE, {_number(now, metric)} in NEW"


def _number(value: float, metric: Value) -> str:
    return f"{value:,}{metric.unit}" if isinstance(value, int) else f"{value:.6g}{metric.unit}"


def _slower(asked: Asked, change: Change, *, by_speedup: bool) -> str:
    if change.interval.verdict(asked.limit) != "slower":
        return ""
    interval = change.interval
    if by_speedup:
        return f"{change.ratio:.4g} times BASE's speedup [{interval.low:.4g}, {interval.high:.4g}]"
    return f"{1 / change.ratio:.4g} times BASE's time [{1 / interval.high:.4g}, {1 / interval.low:.4g}]"


def _status(row: Row) -> str:
    return "no such value" if row.status == "passed" else row.status


def _why_none(asked: Asked, pairs: Sequence[Pair]) -> str:
    both = [pair for pair in pairs if pair.base and pair.new]
    if not both:
        return "no case is in both"
    if isinstance(METRICS[asked.metric], Time):
        reasons = dict.fromkeys(reason for pair in both for reason in pair.incomparable)
        return "; ".join(reasons) or "BASE has no times"
    return "; ".join(dict.fromkeys(pair.other_inputs for pair in both if pair.other_inputs)) or "BASE has no such value"


def _example(name: str) -> str:
    metric = METRICS[name]
    if isinstance(metric, Time) or metric.limit == "grows %":
        return f"{name}:3%"
    return f"{name}:-0.1" if metric.limit == "falls" else f"{name}:0"
