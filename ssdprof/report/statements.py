"""Sentences on the speed and the accuracy of each implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdprof.core import words as fmt
from ssdprof.report import merged_statement
from ssdprof.report.case_words import precision_words, trouble_words
from ssdprof.report.groups import Group, Series, groups, precision_order
from ssdprof.report.pooled import pool
from ssdprof.report.tables.accuracy import floor, vs_baseline, vs_oracle
from ssdprof.report.total_speed import TotalSpeed, total_speed
from ssdprof.schema import PrecisionRecord, RunReport

_MOST_STATEMENTS = 2  # of an implementation


@dataclass(frozen=True)
class Statement:
    """subject: of the sentences, shown in bold."""

    subject: str
    text: str


def statements(report: RunReport) -> tuple[Statement, ...]:
    """Statements for each compared implementation, speed first, then accuracy.

    One or two precisions have a statement each; more share one statement with ranges.
    """
    found = groups(report)
    names = dict.fromkeys(name for group in found for name in group.compared)
    said = [Statement("No speed:", untimed)] if (untimed := nothing_timed(report)) else []
    for name in names:
        precisions = {s.precision for group in found for s in group.series(name)}
        if len(precisions) > _MOST_STATEMENTS:
            if text := _together(found, name):
                said.append(Statement(f"{name}, {len(precisions)} precisions:", text))
            continue
        for precision in sorted(precisions, key=precision_order):
            if text := _text(found, name, precision):
                said.append(Statement(f"{name}, {precision_words(precision)}:", text))
    return tuple(said)


def nothing_timed(report: RunReport) -> str:
    """The reason why there are no times; empty if there are."""
    if not report.cases or any(case.timing for case in report.cases):
        return ""
    if report.environment.gpu is not None:
        return "nothing was timed in this run."
    interpreted = any(case.variant == "interpreter" for case in report.cases)
    how = "; kernels ran in Triton's interpreter" if interpreted else ""
    return f"nothing was timed, because this machine has no GPU{how}."


def _together(found: tuple[Group, ...], name: str) -> str:
    series = [s for group in found for s in group.series(name)]
    troubles = list(dict.fromkeys(f"{precision_words(s.precision)}: {trouble_words(s)}" for s in series if _failed(s)))
    compared = [group for group in found if any(pool(s.cases, "out", vs_oracle) for s in group.series(name))]
    parts = (
        f"FAILED: {'; '.join(troubles)}." if troubles else "",
        merged_statement.speed(found, name),
        _placed(merged_statement.exactness(compared[0], name), compared) if compared else "",
    )
    return " ".join(part for part in parts if part)


def _text(found: tuple[Group, ...], name: str, precision: PrecisionRecord) -> str:
    own = [(group, s) for group in found for s in group.series(name) if s.precision == precision]
    speeds = [(group, speed) for group, s in own if (speed := total_speed(s)) and speed.device.ratio is not None]
    compared = [(group, s) for group, s in own if pool(s.cases, "out", vs_oracle)]
    parts = []
    if troubles := list(dict.fromkeys(trouble_words(s) for _, s in own if _failed(s))):
        parts.append(f"FAILED: {'; '.join(troubles)}." + (" Elsewhere" if speeds else ""))
    if speeds:
        parts.append(_speed(speeds))
    if compared:
        parts.append(_placed(_exactness(*compared[0]), [group for group, _ in compared]))
    return " ".join(parts)


def _placed(text: str, compared: Sequence[Group]) -> str:
    """A sentence on the first of the groups, which it names if it is not the only one."""
    where = compared[0].where
    return f"{where[0].upper()}{where[1:]}, {text}" if len(compared) > 1 else text


def _speed(speeds: list[tuple[Group, TotalSpeed]]) -> str:
    """ "3.10x [3.01, 3.21] faster than unfused by device time (call 3.02x) at 4,096 tokens, summed over 4 layers." """
    group, speed = speeds[0]
    baseline, ratio = group.baseline, fmt.speedup(speed.device.ratio, speed.device.interval)
    said = {
        "faster": f"{ratio} faster than {baseline}",
        "slower": f"slower than {baseline}, {ratio}",
        "no difference": f"as fast as {baseline}, {ratio}",
        None: f"compared with {baseline} {ratio}",
    }[speed.device.verdict]
    layers = f"summed over {_extent(group, speed)}" if len(speed.layers) > 1 else f"in layer {speed.layers[0]}"
    others = [
        f"; {fmt.speedup(other.device.ratio, other.device.interval)} ({_call(other)}) {shorter.where}"
        for shorter, other in speeds[1:]
    ]
    return f"{said} by device time ({_call(speed)}) {group.where}, {layers}{''.join(others)}."


def _extent(group: Group, speed: TotalSpeed) -> str:
    """The group's own extent if all of its calls were timed."""
    return group.extent if len(speed.layers) == group.calls else fmt.plural(len(speed.layers), "call")


def _call(speed: TotalSpeed) -> str:
    """ "call 3.02x"; "call 1.00x: no difference"."""
    doubt = ": no difference" if speed.call.verdict == "no difference" else ""
    return f"call {fmt.ratio(speed.call.ratio)}{doubt}"


def _exactness(group: Group, series: Series) -> str:
    baseline = group.baseline
    ours, limit = pool(series.cases, "out", vs_oracle), pool(series.cases, "out", floor)
    against = pool(series.cases, "out", vs_baseline)
    original = group.baseline_of(series)
    theirs = pool(original.cases, "out", vs_oracle) if original else None
    parts = []
    if against:
        equal, near = (fmt.percent(against.match_pct(tolerance)) for tolerance in (0.0, 1e-3))
        parts.append(f"{equal} of output elements are equal to those of {baseline}, {near} within 1e-3")
    beside = [f"{baseline} {fmt.small(theirs.rms_ratio)}"] if theirs else []
    beside += [f"floor {fmt.small(limit.rms_ratio)}"] if limit else []
    parts.append(f"rms error against fp64 {fmt.small(ours.rms_ratio if ours else None)} ({', '.join(beside)})")
    return f"{'; '.join(parts)}."


def _failed(series: Series) -> bool:
    return any(case.status not in ("passed", "refused") for case in series.cases)
