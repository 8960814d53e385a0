"""Two reports of a kind, case by case: which values can be compared, the changes, and the
conditions on them.

Ratios are BASE's time over NEW's, so a ratio above 1 means that NEW is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import PlainSerializer, TypeAdapter, computed_field

from ssdprof.core import statistics
from ssdprof.core.base import PrecisionName, grouped
from ssdprof.core.case import Answers, Case, Drawn, Prefill
from ssdprof.core.conditions import SLOWER, Condition, Outcome, Verdict, judge, metric_of, number
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster
from ssdprof.errors import BadInputError

TotalBy = Literal["device time", "call time", "speedup", "call speedup"]
TotalOver = Literal["layer", "call", "length"]
_TIMED = (*SLOWER, "time", "speedup")  # metrics of times


def subject(report: Report) -> str:
    """A model, or the operator of a bench."""
    return str(report.model) if report.model else f"{report.subject} on random inputs"


def unfinished(report: Report) -> str:
    """Why it is incomplete; empty if it is complete."""
    found = Outcome(report)
    return found.ended_early or (
        f"{found.missing} of the requested cases are missing" if found.missing else ""
    )


# a report, after its name as the user gave it
Side = Annotated[
    tuple[str, Report],
    PlainSerializer(
        lambda side: {
            "name": side[0],
            "unfinished": unfinished(side[1]),
            "id": side[1].id,
            "subject": subject(side[1]),
        },
        return_type=dict[Literal["name", "unfinished", "id", "subject"], str],
    ),
]


def _values(case: Case | None) -> dict[str, str | int | float | None] | None:
    """What the document has of a case: times in us, and the output's errors against the fp64
    oracle.
    """
    if case is None:
        return None
    return {
        "result": case.result,
        "why": case.why,
        "device_us": case.device_us.value if case.device_us else None,
        "call_us": case.call_us.value if case.call_us else None,
        "rms_ratio": case.error.rms_ratio if case.error else None,
        "max_abs": case.error.max_abs if case.error else None,
        "workspace_bytes": case.workspace_bytes,
    }


_Case = Annotated[
    Case | None, PlainSerializer(_values, return_type=dict[str, str | int | float | None] | None)
]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A case of both, or of one of them.

    verdict: "faster", "slower", "no difference", "not comparable", "not timed", "only in BASE" or
    "only in NEW".
    time, call: changes of device and call times, both of the call time for a prefill; None if the
        times cannot be compared or do not exist.
    over_baseline: the speedup of NEW over its baseline, over that of BASE over its own.
    incomparable: why absolute times cannot be compared.
    other_inputs: why errors cannot be compared; empty if both had the same inputs.
    """

    name: str
    base: _Case
    new: _Case
    verdict: str
    time: Estimate | None = None
    call: Estimate | None = None
    over_baseline: Estimate | None = None
    incomparable: tuple[str, ...] = ()
    other_inputs: str = ""

    @property
    def case(self) -> Case:
        found = self.new or self.base
        assert found is not None
        return found

    @property
    def apart(self) -> tuple[str, ...]:
        """Why neither times nor errors of the two were compared; empty if something was."""
        if self.base is None or self.new is None:
            return (self.verdict,)
        if self.time or self.call or self.over_baseline:
            return ()
        return (
            self.incomparable
            if isinstance(self.case.task, Prefill)
            else tuple(filter(None, [self.other_inputs]))
        )


@dataclass(frozen=True, kw_only=True)
class Total:
    """Cases of one implementation and precision together: the geometric mean of their ratios.

    Its interval assumes that all cases are at the same end of their intervals.

    where: "131,072 tokens", "chunks of 8 tokens of 40 tokens"; of a bench a shape and a dtype.
    over: what it is over.
    """

    where: str
    over: TotalOver
    implementation: str
    precision: PrecisionName
    cases: int
    by: TotalBy
    change: Estimate
    verdict: Faster


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """machine: the differences between the machines, which prevent a comparison of absolute times.
    verdicts: of the conditions: for each its offenders, or none."""

    base: Side
    new: Side
    smallest_difference: float
    machine: tuple[str, ...]
    pairs: tuple[Pair, ...]
    totals: tuple[Total, ...]
    verdicts: Annotated[
        Mapping[Condition, tuple[Verdict, ...]],
        PlainSerializer(
            lambda found: {one.spelling: offenders for one, offenders in found.items()},
            return_type=dict[str, tuple[Verdict, ...]],
        ),
    ]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def nothing_compared(self) -> str:
        """The reason why nothing was compared; empty if some case was."""
        if any(not pair.apart for pair in self.pairs):
            return ""
        both = [pair for pair in self.pairs if pair.base and pair.new]
        return (
            "; ".join(dict.fromkeys(why for pair in both for why in pair.apart))
            or "no case is in both"
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        return not self.nothing_compared and not any(self.verdicts.values())


DOCUMENT: TypeAdapter[Comparison] = TypeAdapter(Comparison)  # what --json prints


def compare(
    base: tuple[str, Report],
    new: tuple[str, Report],
    *,
    smallest_difference: float,
    conditions: Sequence[Condition] = (),
) -> Comparison:
    """base, new: the name as the user gave it, and the report.

    smallest_difference: the smallest relative difference of two times that counts.
    Raises BadInputError if the two are of different kinds.
    """
    one, other = base[1], new[1]
    if one.kind != other.kind:
        raise BadInputError(
            f"BASE is a {one.kind} and NEW is a {other.kind}.",
            "Compare two runs, two benches, or two results of ssdprof prefill.",
        )
    # by name, in the order of NEW; those that are only in BASE come last
    theirs, ours = (
        {
            case.name: case
            for case in report.cases
            if not isinstance(case.task, Answers) or case.judged
        }
        for report in (one, other)
    )
    pairs = [
        _pair(name, theirs.get(name), ours.get(name), one, other, smallest_difference)
        for name in dict.fromkeys((*ours, *theirs))
    ]
    return Comparison(
        base=base,
        new=new,
        smallest_difference=smallest_difference,
        machine=_different(_needs(one), _needs(other)),
        pairs=tuple(pairs),
        totals=tuple(_totals(pairs, smallest_difference)),
        verdicts={
            condition: tuple(_offenders(condition, pairs, one, other)) for condition in conditions
        },
    )


def _needs(report: Report, case: Case | None = None) -> dict[str, str]:
    """What must be the same in both for a comparison of absolute times; empty without a GPU.  case:
    of a prefill.
    """
    gpu, packages = report.environment.gpu, {"Triton": "triton"}
    if gpu is None:
        return {}
    needs = {"GPU": gpu.name, "driver": gpu.driver}
    if case and isinstance(whole := case.task, Prefill):
        packages |= {"PyTorch": "torch", "transformers": "transformers"}
        needs |= {
            "attention": whole.attention or "none",
            "segment length": f"{whole.segment_length:,}",
        }
        if whole.conv_and_norm == "model" or whole.left_to_model:
            needs["convolution"] = whole.convolution
    return needs | {
        name: report.environment.packages.get(one, "unknown") for name, one in packages.items()
    }


def _different(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """ "other driver: 1.2, now 1.3"; nothing if one of the two has no times."""
    return tuple(
        f"other {what}: {base.get(what, 'none')}, now {new.get(what, 'none')}"
        for what in (dict.fromkeys((*base, *new)) if base and new else ())
        if base.get(what) != new.get(what)
    )


def _pair(
    name: str, base: Case | None, new: Case | None, one: Report, other: Report, smallest: float
) -> Pair:
    """one, other: the reports of the two cases."""
    if base is None or new is None:
        return Pair(
            name=name, base=base, new=new, verdict="only in BASE" if base else "only in NEW"
        )
    whole, timed = (
        isinstance(new.task, Prefill),
        "not comparable" if base.time_us and new.time_us else "not timed",
    )
    if differ := _different({"shape": _shape(base, one)}, {"shape": _shape(new, other)}):
        why = differ[0].replace("shape", "model", whole)
        inputs = "" if whole else why
        return Pair(
            name=name, base=base, new=new, verdict=timed, incomparable=(why,), other_inputs=inputs
        )
    differ = _different(_needs(one, base), _needs(other, new))
    # those of a bench are drawn with a fixed seed
    prompts = [
        {}
        if whole or isinstance(case.task, Drawn)
        else {"inputs": f"{subject(report)}, prompt {case.inputs[:16]}"}
        for case, report in ((base, one), (new, other))
    ]
    call = None if differ else _quotient(base.call_us, new.call_us)
    time = None if differ else call if whole else _quotient(base.device_us, new.device_us)
    same_baseline = base.baseline == new.baseline
    over_baseline = _quotient(other.speedup(new), one.speedup(base)) if same_baseline else None
    judged_by = time or over_baseline
    return Pair(
        name=name,
        base=base,
        new=new,
        verdict=judged_by.verdict(smallest) if judged_by else timed,
        time=time,
        call=call,
        over_baseline=over_baseline,
        incomparable=differ,
        other_inputs="".join(_different(*prompts)),
    )


def _shape(case: Case, report: Report) -> str:
    """The sizes of the call, and whether its inputs were cast; of the whole model, which model it
    is.
    """
    if isinstance(case.task, Prefill):
        assert report.model
        return f"{report.model.repo_id} ({report.model.model_type}), {case.task.sizes}"
    if case.layer and report.cast:
        return f"{case.task.sizes}, {report.cast_words}"
    return case.task.sizes


def _quotient(above: Estimate | None, below: Estimate | None) -> Estimate | None:
    return statistics.quotient(above, below) if above and below else None


def _totals(pairs: Sequence[Pair], smallest: float) -> Iterator[Total]:
    """For every implementation and precision all layers, calls, or lengths of one kind together."""

    def key(pair: Pair) -> tuple[str, TotalOver, str, PrecisionName, TotalBy]:
        case = pair.case
        by: TotalBy = "device time" if pair.time else "speedup"
        if case.clock == "call":
            by = "call time" if pair.time else "call speedup"
        return *_calls(case), case.implementation, case.precision, by

    judged = (pair for pair in pairs if pair.time or pair.over_baseline)
    for (where, over, name, precision, by), own in grouped(judged, key).items():
        change = statistics.mean([ratio for one in own if (ratio := one.time or one.over_baseline)])
        yield Total(
            where=where,
            over=over,
            implementation=name,
            precision=precision,
            cases=len(own),
            by=by,
            change=change,
            verdict=change.verdict(smallest),
        )


def _calls(case: Case) -> tuple[str, TotalOver]:
    """All calls that add up with the case, in words, and what they are over."""
    if case.layer is None:
        return case.where, "length"
    return case.calls, "layer" if case.call is None or case.call.kind in (
        "packed",
        "verify",
    ) else "call"


# --- conditions


def _offenders(
    condition: Condition, pairs: Sequence[Pair], base: Report, new: Report
) -> Iterator[Verdict]:
    """The cases that violate the condition.

    An incomplete NEW violates it too, as does a NEW without an implementation of BASE, or without a
    case to judge.
    """
    both = [pair for pair in pairs if pair.base and pair.new]
    found = {pair.name: _judged(condition, pair, base, new) for pair in both}
    said = [(name, why) for name, why in found.items() if why]
    timed = condition.metric in _TIMED
    applies, there = (
        metric_of(condition.metric).applies,
        {case.implementation for case in new.cases},
    )
    only_base = (
        pair.case for pair in pairs if not pair.new and pair.case.judged and applies(pair.case)
    )
    lost = dict.fromkeys(
        case.implementation for case in only_base if case.implementation not in there
    )
    if both and lost:
        said.append(("", f"NEW has no case of {', '.join(lost)}"))
    if incomplete := unfinished(new):
        said.append(("", f"NEW is incomplete: {incomplete}"))
    elif all(why is None for why in found.values()):
        nothing = (
            f"BASE has no {'times' if timed else 'such value'}" if both else "no case is in both"
        )
        reasons = (
            why
            for one in both
            for why in (one.incomparable if timed else [one.other_inputs])
            if why
        )
        said.append(
            ("", f"no case could be judged: {'; '.join(dict.fromkeys(reasons)) or nothing}")
        )
    for name, why in said:
        yield Verdict(condition=condition, case=name, holds=False, found=why)


def _judged(condition: Condition, pair: Pair, one: Report, other: Report) -> str | None:
    """What is wrong with a pair; "" if nothing is; None if it cannot be judged."""
    base, new, metric = pair.base, pair.new, metric_of(condition.metric)
    assert base
    assert new
    if not metric.applies(new) or not (condition.to_base or new.judged):
        return None
    if not condition.to_base:
        return judge(condition, new, other)[1]
    status = "no such value" if new.result == "passed" else new.result
    if condition.metric in _TIMED:
        if base.time_us and not new.time_us:
            return f"timed in BASE; {status} in NEW"
        return _slower(condition, pair, (one, base), (other, new))
    of = (metric.changes if condition.percent else None) or metric.of
    before, now = (
        number(of(case, condition.at, report)) for report, case in ((one, base), (other, new))
    )
    if before is None or pair.other_inputs:
        return None
    in_base, in_new = (
        f"{it:{',' if isinstance(it, int) else '.6g'}}{metric.unit}" for it in (before, now or 0)
    )
    if now is None:
        return f"{in_base} in BASE; {status} in NEW"
    step = condition.limit / 100 * before if condition.percent else condition.limit
    holds = now >= before - step if metric.more else now <= before + step
    return "" if holds else f"{in_base} in BASE, {in_new} in NEW"


def _slower(condition: Condition, pair: Pair, *both: tuple[Report, Case]) -> str | None:
    """both: BASE's report and case, then NEW's."""
    by_call = condition.at == "call" or pair.case.clock == "call"
    by_speedup = condition.metric == "speedup" or (
        condition.metric == "slower" and pair.time is None
    )
    over = condition.at if condition.metric == "speedup" else ""
    same_call = pair.call if condition.at == "call" else pair.time
    if not (over or pair.over_baseline if by_speedup else same_call):
        return None
    before, now = (
        report.speedup(case, over=over)
        if by_speedup
        else case.call_us
        if by_call
        else case.device_us
        for report, case in both
    )
    if before and not now:
        return f"a speedup over {over} in BASE, none in NEW"
    if before is None or now is None:
        return None
    change, limit = statistics.quotient(now, before), condition.limit / 100
    if condition.percent:
        slower = change.high < 1 - limit if by_speedup else change.low > 1 + limit
    else:
        slower = (
            statistics.difference(*((before, now) if by_speedup else (now, before))).low
            > condition.limit
        )
    interval = "" if by_call else f" [{change.low:.4g}, {change.high:.4g}]"
    return (
        f"{change.value:.4g} times BASE's {'speedup' if by_speedup else 'time'}{interval}"
        if slower
        else ""
    )
