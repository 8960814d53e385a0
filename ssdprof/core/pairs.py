"""The comparison of two reports of the same kind, BASE and NEW, case by case: which values can be
compared, and how they changed.

Ratios are BASE's time over NEW's, so a ratio above 1 means that NEW is faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import PlainSerializer, TypeAdapter, computed_field

from ssdprof.core import statistics
from ssdprof.core.base import PrecisionName, distinct, grouped
from ssdprof.core.case import Answers, Case, Generated, Prefill
from ssdprof.core.conditions import METRICS, SPEED_METRICS, Change, number
from ssdprof.core.outcome import Outcome, Verdict
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster
from ssdprof.errors import BadInputError

TotalBy = Literal["device time", "call time", "speedup", "call speedup"]
TotalOver = Literal["layer", "call", "length"]


def target(report: Report) -> str:
    """The model of a report with its revision, or the operator of a bench."""
    return str(report.model) if report.model else f"{report.target} on random inputs"


def unfinished(report: Report) -> str:
    """Why a report is incomplete; empty if it is complete."""
    outcome = Outcome(report)
    missing = f"{outcome.missing} of the requested cases are missing" if outcome.missing else ""
    return outcome.ended_early or missing


def _side(side: tuple[str, Report]) -> dict[Literal["name", "unfinished", "id", "target"], str]:
    """What the JSON document contains of a report: the name that the user gave, and these
    fields.
    """
    name, report = side
    return {
        "name": name,
        "unfinished": unfinished(report),
        "id": report.id,
        "target": target(report),
    }


# the name of a report as the user gave it, and the report
Side = Annotated[tuple[str, Report], PlainSerializer(_side)]


def _values(case: Case | None) -> dict[str, str | int | float | None] | None:
    """What the JSON document contains of a case: its result, its times in microseconds, and the
    errors of the output against the fp64 oracle.
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


_Case = Annotated[Case | None, PlainSerializer(_values)]


@dataclass(frozen=True, kw_only=True)
class CasePair:
    """The cases of one name in BASE and NEW.

    base, new: None if the report has no such case.
    verdict: "faster", "slower", "no difference", "not comparable", "not timed", "only in BASE" or
        "only in NEW".
    time: the ratio of the device times; of a prefill, which has none, that of the call times.  None
        if the times cannot be compared or do not exist.
    call: the same of the call times.
    over_baseline: the speedup over the baseline in NEW, divided by that in BASE.
    incomparable: the reasons why absolute times cannot be compared.
    other_inputs: why errors cannot be compared; empty if both cases had the same inputs.
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
        """The case in NEW, or in BASE if NEW has none."""
        case = self.new or self.base
        assert case is not None
        return case

    @property
    def apart(self) -> tuple[str, ...]:
        """The reasons why neither times, nor speedups, nor errors were compared; empty if one of
        them was, and for comparable prefills without times.
        """
        if self.base is None or self.new is None:
            return (self.verdict,)
        if self.time or self.call or self.over_baseline:
            return ()
        if isinstance(self.case.task, Prefill):
            return self.incomparable
        return (self.other_inputs,) if self.other_inputs else ()


@dataclass(frozen=True, kw_only=True)
class Total:
    """The mean change of several cases of one implementation and precision.

    where: the size that the cases have in common: "131,072 tokens", "chunks of 8 tokens of 40
        tokens"; in a bench and for prefills, which differ in their length, `Case.where`.
    over: in what the cases differ.
    cases: their number.
    by: the ratio that was averaged: of times, or of speedups over the baseline.
    change: the geometric mean of the ratios.  Its interval assumes that all cases are at the same
        end of their intervals.
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
    """Two reports, and their cases in pairs.

    machine: the differences between the machines, which prevent a comparison of absolute times.
    verdicts: an allowed change, as the user wrote it -> verdicts on the cases that changed by more;
        empty if there are none.
    """

    base: Side
    new: Side
    smallest_difference: float
    machine: tuple[str, ...]
    pairs: tuple[CasePair, ...]
    totals: tuple[Total, ...]
    verdicts: dict[str, tuple[Verdict, ...]]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def nothing_compared(self) -> str:
        """The reason why no case was compared; empty if one was."""
        if any(not pair.apart for pair in self.pairs):
            return ""
        both = (pair for pair in self.pairs if pair.base and pair.new)
        return "; ".join(distinct(pair.apart for pair in both)) or "no case is in both"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        return not self.nothing_compared and not any(self.verdicts.values())


COMPARISON_DOCUMENT: TypeAdapter[Comparison] = TypeAdapter(Comparison)  # what --json prints


def compare(
    base: tuple[str, Report],
    new: tuple[str, Report],
    *,
    smallest_difference: float,
    allowed: Sequence[Change] = (),
) -> Comparison:
    """Compare two reports case by case.

    base, new: the name of each report as the user gave it, and the report.
    smallest_difference: the smallest relative difference of two times that counts.
    allowed: the changes that are allowed.

    Raises BadInputError if the two reports are of different kinds.
    """
    base_report = base[1]
    new_report = new[1]
    if base_report.kind != new_report.kind:
        raise BadInputError(
            f"BASE is of {base_report.kind}, and NEW of {new_report.kind}.",
            "Compare two reports of one of these commands: run, bench, prefill, answers.",
        )
    in_base = {case.name: case for case in compared(base_report)}
    in_new = {case.name: case for case in compared(new_report)}
    names = list(in_new | in_base)  # in the order of NEW; cases that are only in BASE come last
    pairs = [
        _pair(
            name, in_base.get(name), in_new.get(name), base_report, new_report, smallest_difference
        )
        for name in names
    ]
    return Comparison(
        base=base,
        new=new,
        smallest_difference=smallest_difference,
        machine=_differences(_needs(base_report), _needs(new_report)),
        pairs=tuple(pairs),
        totals=tuple(_totals(pairs, smallest_difference)),
        verdicts={
            change.text: tuple(_offenders(change, pairs, base_report, new_report))
            for change in allowed
        },
    )


def compared(report: Report) -> tuple[Case, ...]:
    """The cases of a report that are compared: all but answers that gates do not apply to."""
    return tuple(
        case for case in report.cases if not isinstance(case.task, Answers) or case.is_gated
    )


def _needs(report: Report, case: Case | None = None) -> dict[str, str]:
    """What two reports must have in common before their absolute times are compared, by name.

    Empty without a GPU.

    case: if it is a prefill, the libraries, the attention, the segment length and a convolution of
        the model's own are among the needs.
    """
    gpu = report.environment.gpu
    if gpu is None:
        return {}
    needs = {"GPU": gpu.name, "driver": gpu.driver}
    packages = {"Triton": "triton"}
    if case and isinstance(case.task, Prefill):
        prefill = case.task
        packages |= {"PyTorch": "torch", "transformers": "transformers"}
        needs["attention"] = prefill.attention or "none"
        needs["segment length"] = f"{prefill.segment_length:,}"
        if prefill.conv_and_norm == "model" or prefill.left_to_model:
            needs["convolution"] = prefill.convolution
    for name, package in packages.items():
        needs[name] = report.environment.packages.get(package, "unknown")
    return needs


def _differences(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """The differences of two descriptions: "other driver: 1.2, now 1.3".

    Empty if one of them is empty, as without a GPU.
    """
    if not (base and new):
        return ()
    names = dict.fromkeys((*base, *new))
    return tuple(
        f"other {name}: {base.get(name, 'none')}, now {new.get(name, 'none')}"
        for name in names
        if base.get(name) != new.get(name)
    )


def _pair(
    name: str,
    base: Case | None,
    new: Case | None,
    base_report: Report,
    new_report: Report,
    smallest: float,
) -> CasePair:
    """The pair of two cases of a name, with the ratios that can be compared.

    smallest: the smallest relative difference of two times that counts.
    """
    if base is None or new is None:
        only_in = "only in BASE" if base else "only in NEW"
        return CasePair(name=name, base=base, new=new, verdict=only_in)
    is_prefill = isinstance(new.task, Prefill)
    verdict = "not comparable" if base.time_us and new.time_us else "not timed"
    time = call = over_baseline = None
    size_differences = _differences(_shape(base, base_report), _shape(new, new_report))
    machine_differences = _differences(_needs(base_report, base), _needs(new_report, new))
    incomparable = size_differences or machine_differences
    if not incomparable:
        call = _quotient(base.call_us, new.call_us)
        time = call if is_prefill else _quotient(base.device_us, new.device_us)
    if not size_differences and base.baseline == new.baseline:
        over_baseline = _quotient(new_report.speedup(new), base_report.speedup(base))
    if ratio := time or over_baseline:
        verdict = ratio.verdict(smallest)
    other_inputs = ""
    if not is_prefill:
        input_differences = _differences(_inputs(base, base_report), _inputs(new, new_report))
        other_inputs = "; ".join(size_differences or input_differences)
    return CasePair(
        name=name,
        base=base,
        new=new,
        verdict=verdict,
        time=time,
        call=call,
        over_baseline=over_baseline,
        incomparable=incomparable,
        other_inputs=other_inputs,
    )


def _inputs(case: Case, report: Report) -> dict[str, str]:
    """The model and the prompt of a captured call, by name.

    Empty for a bench, whose inputs are generated from a fixed seed.
    """
    if isinstance(case.inputs_of, Generated):
        return {}
    return {"inputs": f"{target(report)}, prompt {case.inputs[:16]}"}


def _shape(case: Case, report: Report) -> dict[str, str]:
    """The sizes of a call and whether its inputs were cast, by name; of a prefill, the model."""
    if isinstance(case.task, Prefill):
        assert report.model
        model = f"{report.model.repo_id} ({report.model.model_type}), {case.task.sizes}"
        return {"model": model}
    cast = report.cast_words if case.layer else ""
    return {"shape": ", ".join(filter(None, (case.task.sizes, cast)))}


def _quotient(above: Estimate | None, below: Estimate | None) -> Estimate | None:
    return statistics.quotient(above, below) if above and below else None


def _totals(pairs: Sequence[CasePair], smallest: float) -> Iterator[Total]:
    """A total for each size, implementation, precision and kind of ratio: over layers, over calls,
    or over lengths.
    """

    def key(pair: CasePair) -> tuple[str, TotalOver, str, PrecisionName, TotalBy]:
        case = pair.case
        by: TotalBy = "device time" if pair.time else "speedup"
        if case.clock == "call":
            by = "call time" if pair.time else "call speedup"
        return *_calls(case), case.implementation, case.precision, by

    with_ratio = (pair for pair in pairs if pair.time or pair.over_baseline)
    for (where, over, implementation, precision, by), group in grouped(with_ratio, key).items():
        ratios = filter(None, (pair.time or pair.over_baseline for pair in group))
        change = statistics.mean(list(ratios))
        yield Total(
            where=where,
            over=over,
            implementation=implementation,
            precision=precision,
            cases=len(group),
            by=by,
            change=change,
            verdict=change.verdict(smallest),
        )


def _calls(case: Case) -> tuple[str, TotalOver]:
    """The cases that share a total with this case, in words, and in what they differ."""
    if case.layer is None:
        return case.where, "length"
    if case.call is None or case.call.kind in ("packed", "verify"):
        return case.calls, "layer"
    return case.calls, "call"


# --- allowed changes


def _offenders(
    change: Change, pairs: Sequence[CasePair], base: Report, new: Report
) -> Iterator[Verdict]:
    """The verdicts on cases that changed by more than is allowed.

    NEW also breaks the condition, without naming a case, if it is incomplete, if it lacks an
    implementation of BASE, or, while it is complete, if no case can be judged.
    """
    in_both = [pair for pair in pairs if pair.base and pair.new]
    faults = {pair.name: _fault(change, pair, base, new) for pair in in_both}
    offences = [(name, fault) for name, fault in faults.items() if fault]
    if in_both and (lost := _lost(change, pairs, new)):
        offences.append(("", f"NEW has no case of {', '.join(lost)}"))
    if reason := unfinished(new):
        offences.append(("", f"NEW is incomplete: {reason}"))
    elif all(fault is None for fault in faults.values()):
        why = _why_none(change, in_both, base, new)
        offences.append(("", f"no case could be judged: {why}"))
    for name, fault in offences:
        yield Verdict(condition=change.text, case=name, holds=False, actual=fault)


def _lost(change: Change, pairs: Sequence[CasePair], new: Report) -> list[str]:
    """The implementations to which the condition applies in BASE, and which have no case in NEW."""
    applies = METRICS[change.metric].applies
    only_in_base = [pair.case for pair in pairs if pair.new is None]
    present = {case.implementation for case in new.cases}
    lost = [
        case.implementation
        for case in only_in_base
        if case.is_gated and applies(case) and case.implementation not in present
    ]
    return list(dict.fromkeys(lost))


def _why_none(
    change: Change, pairs: Sequence[CasePair], base_report: Report, new_report: Report
) -> str:
    """Why none of the pairs has values to compare.  pairs: of cases that are in both reports."""
    if not pairs:
        return "no case is in both"
    missing = "BASE has no such value"
    if change.metric == "time":
        reasons = [pair.incomparable for pair in pairs]
        missing = "BASE has no times"
    elif change.metric == "speedup":
        reasons = [
            _differences(
                _needs_of_speedup(change, pair.base, base_report),
                _needs_of_speedup(change, pair.new, new_report),
            )
            for pair in pairs
            if pair.base and pair.new
        ]
        missing = f"BASE has no speedup over {change.at or 'a baseline'}"
    else:
        reasons = [(pair.other_inputs,) for pair in pairs]
    return "; ".join(filter(None, distinct(reasons))) or missing


def _needs_of_speedup(change: Change, case: Case, report: Report) -> dict[str, str]:
    """What two cases must have in common before their speedups are compared, by name: the shape,
    and the baseline, unless the condition names the implementation that the speedup is over.
    """
    needs = _shape(case, report)
    if not change.at:
        needs["baseline"] = case.baseline or "none"
    return needs


def _fault(change: Change, pair: CasePair, base_report: Report, new_report: Report) -> str | None:
    """How a pair breaks a condition; "" if it does not, None if it cannot be judged.

    pair: of a case that is in both reports.
    """
    base = pair.base
    new = pair.new
    metric = METRICS[change.metric]
    assert base
    assert new
    if not metric.applies(new):
        return None
    if base.result == "passed" and new.result == "nonfinite":
        return "passed in BASE; nonfinite in NEW"
    if change.metric in SPEED_METRICS and base.time_us and not new.time_us:
        return f"timed in BASE; {_status(new)} in NEW"
    if not _comparable(change, pair, base_report, new_report):
        return None
    in_base = metric.value(base, change.at, base_report.speedup)
    if in_base is None:
        return None
    in_new = metric.value(new, change.at, new_report.speedup)
    if in_new is None:
        return f"{metric.shown(number(in_base))} in BASE; {_status(new)} in NEW"
    if isinstance(in_base, Estimate) and isinstance(in_new, Estimate):
        return _worse_interval(change, in_base, in_new, pair)
    before = number(in_base)
    now = number(in_new)
    step = change.limit * before if change.relative else change.limit
    is_worse = now < before - step if metric.more_is_better else now > before + step
    return f"{metric.shown(before)} in BASE, {metric.shown(now)} in NEW" if is_worse else ""


def _comparable(change: Change, pair: CasePair, base_report: Report, new_report: Report) -> bool:
    """Whether the values of a pair differ by the kernels alone, so that they can be compared."""
    assert pair.base
    assert pair.new
    if change.metric == "time":
        return bool(pair.call if change.at == "call" else pair.time)
    if _shape(pair.base, base_report) != _shape(pair.new, new_report):
        return False
    if change.metric == "speedup":
        return bool(change.at or pair.over_baseline)
    return not pair.other_inputs


def _status(new: Case) -> str:
    """Why a case in NEW has no value."""
    return "no such value" if new.result == "passed" else new.result


def _worse_interval(change: Change, before: Estimate, now: Estimate, pair: CasePair) -> str:
    """How a time or a speedup changed, in words, if the whole interval of the change is beyond the
    limit; otherwise empty.
    """
    ratio = statistics.quotient(now, before)
    if METRICS[change.metric].more_is_better:
        loss = 1 - ratio.high if change.relative else statistics.difference(before, now).low
    else:
        loss = ratio.low - 1 if change.relative else statistics.difference(now, before).low
    if loss <= change.limit:
        return ""
    is_by_call = change.at == "call" or pair.case.clock == "call"
    interval = "" if is_by_call else f" [{ratio.low:.4g}, {ratio.high:.4g}]"
    return f"{ratio.value:.4g} times BASE's {change.metric}{interval}"
