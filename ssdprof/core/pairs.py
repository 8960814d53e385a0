"""Two reports of a kind, case by case: which values can be compared, and how they changed.

Ratios are BASE's time over NEW's, so a ratio above 1 means that NEW is faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import PlainSerializer, TypeAdapter, computed_field

from ssdprof.core import statistics
from ssdprof.core.base import PrecisionName, distinct, grouped
from ssdprof.core.case import Answers, Case, Generated, Prefill
from ssdprof.core.conditions import METRICS, OF_SPEED, Change, number
from ssdprof.core.outcome import Outcome, Verdict
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate, Faster
from ssdprof.errors import BadInputError

TotalBy = Literal["device time", "call time", "speedup", "call speedup"]
TotalOver = Literal["layer", "call", "length"]


def target(report: Report) -> str:
    """A model, or the operator of a bench."""
    return str(report.model) if report.model else f"{report.target} on random inputs"


def unfinished(report: Report) -> str:
    """Why it is incomplete; empty if it is complete."""
    outcome = Outcome(report)
    missing = f"{outcome.missing} of the requested cases are missing" if outcome.missing else ""
    return outcome.ended_early or missing


def _side(side: tuple[str, Report]) -> dict[Literal["name", "unfinished", "id", "target"], str]:
    """What the document has of a report, after its name as the user gave it."""
    name, report = side
    return {
        "name": name,
        "unfinished": unfinished(report),
        "id": report.id,
        "target": target(report),
    }


Side = Annotated[tuple[str, Report], PlainSerializer(_side)]


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


_Case = Annotated[Case | None, PlainSerializer(_values)]


@dataclass(frozen=True, kw_only=True)
class CasePair:
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
        case = self.new or self.base
        assert case is not None
        return case

    @property
    def apart(self) -> tuple[str, ...]:
        """Why neither times nor errors of the two were compared; empty if something was."""
        if self.base is None or self.new is None:
            return (self.verdict,)
        if self.time or self.call or self.over_baseline:
            return ()
        if isinstance(self.case.task, Prefill):
            return self.incomparable
        return (self.other_inputs,) if self.other_inputs else ()


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
    """Two reports, and their cases in pairs.

    machine: the differences between the machines, which prevent a comparison of absolute times.
    verdicts: the allowed changes, as the user gave them -> the cases that changed more, or none.
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
        """The reason why nothing was compared; empty if some case was."""
        if any(not pair.apart for pair in self.pairs):
            return ""
        both = (pair for pair in self.pairs if pair.base and pair.new)
        return "; ".join(distinct(pair.apart for pair in both)) or "no case is in both"

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
    allowed: Sequence[Change] = (),
) -> Comparison:
    """Compare two reports case by case.

    base, new: the name as the user gave it, and the report.
    smallest_difference: the smallest relative difference of two times that counts.
    allowed: how much cases may change.

    Raises BadInputError if the two are of different kinds.
    """
    base_report = base[1]
    new_report = new[1]
    if base_report.kind != new_report.kind:
        raise BadInputError(
            f"BASE is a {base_report.kind} and NEW is a {new_report.kind}.",
            "Compare two runs, two benches, or two results of ssdprof prefill.",
        )
    before = {case.name: case for case in compared(base_report)}
    after = {case.name: case for case in compared(new_report)}
    # in the order of NEW; those that are only in BASE come last
    pairs = [
        _pair(name, before.get(name), after.get(name), base_report, new_report, smallest_difference)
        for name in after | before
    ]
    return Comparison(
        base=base,
        new=new,
        smallest_difference=smallest_difference,
        machine=_different(_needs(base_report), _needs(new_report)),
        pairs=tuple(pairs),
        totals=tuple(_totals(pairs, smallest_difference)),
        verdicts={
            change.text: tuple(_offenders(change, pairs, base_report, new_report))
            for change in allowed
        },
    )


def compared(report: Report) -> tuple[Case, ...]:
    """The cases that take part: all but answers without gates."""
    return tuple(
        case for case in report.cases if not isinstance(case.task, Answers) or case.is_gated
    )


def _needs(report: Report, case: Case | None = None) -> dict[str, str]:
    """What two reports must have in common before their absolute times are compared, by name; empty
    without a GPU.

    case: a prefill, which also depends on libraries and the segment length.
    """
    gpu = report.environment.gpu
    packages = {"Triton": "triton"}
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
        name: report.environment.packages.get(package, "unknown")
        for name, package in packages.items()
    }


def _different(base: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """ "other driver: 1.2, now 1.3"; nothing if one of the two has no times."""
    if not (base and new):
        return ()
    # `dict.fromkeys`: each name once, in the order of `base`, then those of `new` alone
    return tuple(
        f"other {what}: {base.get(what, 'none')}, now {new.get(what, 'none')}"
        for what in dict.fromkeys((*base, *new))
        if base.get(what) != new.get(what)
    )


def _pair(
    name: str,
    base: Case | None,
    new: Case | None,
    base_report: Report,
    new_report: Report,
    smallest: float,
) -> CasePair:
    """What changed between the two cases, as far as they can be compared."""
    if base is None or new is None:
        only_in = "only in BASE" if base else "only in NEW"
        return CasePair(name=name, base=base, new=new, verdict=only_in)
    is_prefill = isinstance(new.task, Prefill)
    verdict = "not comparable" if base.time_us and new.time_us else "not timed"
    time = call = over_baseline = None
    sizes = _different(_shape(base, base_report), _shape(new, new_report))
    machines = _different(_needs(base_report, base), _needs(new_report, new))
    if not (sizes or machines):
        call = _quotient(base.call_us, new.call_us)
        time = call if is_prefill else _quotient(base.device_us, new.device_us)
    if not sizes and base.baseline == new.baseline:
        over_baseline = _quotient(new_report.speedup(new), base_report.speedup(base))
    if ratio := time or over_baseline:
        verdict = ratio.verdict(smallest)
    inputs = sizes or _different(_inputs(base, base_report), _inputs(new, new_report))
    return CasePair(
        name=name,
        base=base,
        new=new,
        verdict=verdict,
        time=time,
        call=call,
        over_baseline=over_baseline,
        incomparable=sizes or machines,
        other_inputs="" if is_prefill else "".join(inputs),
    )


def _inputs(case: Case, report: Report) -> dict[str, str]:
    """The model and the prompt of a captured call; those of a bench are generated from a fixed
    seed.
    """
    if isinstance(case.inputs_of, Generated):
        return {}
    return {"inputs": f"{target(report)}, prompt {case.inputs[:16]}"}


def _shape(case: Case, report: Report) -> dict[str, str]:
    """The sizes of the call, and whether its inputs were cast; of the whole model, which model it
    is.
    """
    if isinstance(case.task, Prefill):
        assert report.model
        model = f"{report.model.repo_id} ({report.model.model_type}), {case.task.sizes}"
        return {"model": model}
    cast = report.cast_words if case.layer else ""
    return {"shape": ", ".join(filter(None, (case.task.sizes, cast)))}


def _quotient(above: Estimate | None, below: Estimate | None) -> Estimate | None:
    return statistics.quotient(above, below) if above and below else None


def _totals(pairs: Sequence[CasePair], smallest: float) -> Iterator[Total]:
    """The totals of each implementation and precision: over layers, over calls, or over lengths of
    one kind.
    """

    def key(pair: CasePair) -> tuple[str, TotalOver, str, PrecisionName, TotalBy]:
        case = pair.case
        by: TotalBy = "device time" if pair.time else "speedup"
        if case.clock == "call":
            by = "call time" if pair.time else "call speedup"
        return *_calls(case), case.implementation, case.precision, by

    compared = (pair for pair in pairs if pair.time or pair.over_baseline)
    for (where, over, name, precision, by), group in grouped(compared, key).items():
        ratios = [ratio for pair in group if (ratio := pair.time or pair.over_baseline)]
        change = statistics.mean(ratios)
        yield Total(
            where=where,
            over=over,
            implementation=name,
            precision=precision,
            cases=len(group),
            by=by,
            change=change,
            verdict=change.verdict(smallest),
        )


def _calls(case: Case) -> tuple[str, TotalOver]:
    """All calls that add up with the case, in words, and what they are over."""
    if case.layer is None:
        return case.where, "length"
    if case.call is None or case.call.kind in ("packed", "verify"):
        return case.calls, "layer"
    return case.calls, "call"


# --- allowed changes


def _offenders(
    change: Change, pairs: Sequence[CasePair], base: Report, new: Report
) -> Iterator[Verdict]:
    """The cases that changed by more than is allowed.

    An incomplete NEW breaks the condition too, as does a NEW without an implementation of BASE, or
    without a case to compare.
    """
    both = [pair for pair in pairs if pair.base and pair.new]
    faults = {pair.name: _fault(change, pair, base, new) for pair in both}
    offences = [(name, fault) for name, fault in faults.items() if fault]
    if both and (lost := _lost(change, pairs, new)):
        offences.append(("", f"NEW has no case of {', '.join(lost)}"))
    if incomplete := unfinished(new):
        offences.append(("", f"NEW is incomplete: {incomplete}"))
    elif all(fault is None for fault in faults.values()):
        offences.append(("", f"no case could be judged: {_why_none(change, both)}"))
    for name, fault in offences:
        yield Verdict(condition=change.text, case=name, holds=False, actual=fault)


def _lost(change: Change, pairs: Sequence[CasePair], new: Report) -> list[str]:
    """The implementations with such values in BASE that have no case in NEW."""
    applies = METRICS[change.metric].applies
    only_in_base = [pair.case for pair in pairs if pair.new is None]
    present = {case.implementation for case in new.cases}
    lost = [
        case.implementation
        for case in only_in_base
        if case.is_gated and applies(case) and case.implementation not in present
    ]
    return list(dict.fromkeys(lost))


def _why_none(change: Change, both: Sequence[CasePair]) -> str:
    """Why no pair has two values that can be compared."""
    timed = change.metric in OF_SPEED
    reasons = distinct(pair.incomparable if timed else [pair.other_inputs] for pair in both)
    if known := "; ".join(filter(None, reasons)):
        return known
    if not both:
        return "no case is in both"
    return f"BASE has no {'times' if timed else 'such value'}"


def _fault(change: Change, pair: CasePair, base_report: Report, new_report: Report) -> str | None:
    """What is wrong with a pair; "" if nothing is; None if it cannot be judged."""
    base = pair.base
    new = pair.new
    metric = METRICS[change.metric]
    assert base
    assert new
    if not metric.applies(new):
        return None
    if change.metric in OF_SPEED and base.time_us and not new.time_us:
        return f"timed in BASE; {_status(new)} in NEW"
    if not _comparable(change, pair, base_report, new_report):
        return None
    before = metric.value(base, change.at, base_report.speedup)
    if before is None:
        return None
    now = metric.value(new, change.at, new_report.speedup)
    if now is None:
        return f"{metric.shown(number(before))} in BASE; {_status(new)} in NEW"
    if isinstance(before, Estimate) and isinstance(now, Estimate):
        return _worse_interval(change, before, now, pair)
    before = number(before)
    now = number(now)
    step = change.limit * before if change.relative else change.limit
    worsened = now < before - step if metric.more_is_better else now > before + step
    return f"{metric.shown(before)} in BASE, {metric.shown(now)} in NEW" if worsened else ""


def _comparable(change: Change, pair: CasePair, base_report: Report, new_report: Report) -> bool:
    """Whether the values of a pair depend on the kernels alone: see `CasePair`."""
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
    """Why NEW has no value."""
    return "no such value" if new.result == "passed" else new.result


def _worse_interval(change: Change, before: Estimate, now: Estimate, pair: CasePair) -> str:
    """The ratio of two times or speedups, if the whole interval of the change is above the limit;
    else "".
    """
    ratio = statistics.quotient(now, before)
    if METRICS[change.metric].more_is_better:
        worsened = 1 - ratio.high if change.relative else statistics.difference(before, now).low
    else:
        worsened = ratio.low - 1 if change.relative else statistics.difference(now, before).low
    by_call = change.at == "call" or pair.case.clock == "call"
    interval = "" if by_call else f" [{ratio.low:.4g}, {ratio.high:.4g}]"
    words = f"{ratio.value:.4g} times BASE's {change.metric}{interval}"
    return words if worsened > change.limit else ""
