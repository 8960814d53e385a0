"""The first lines of a report: how much faster, how exact, and what to mind before trusting it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ssdprof.report import format as fmt
from ssdprof.report import merged
from ssdprof.report.groups import Group, Series, TotalSpeed, groups, pool, precision_order, total_speed
from ssdprof.report.tables import answers
from ssdprof.report.tables.accuracy import floor, vs_baseline, vs_oracle
from ssdprof.schema import CaseResult, Clocks, PrecisionRecord, RunReport
from ssdprof.schema.outcome import RunOutcome, exact_answer_is_finite, outcome

GOOD = ("PASSED", "So far", "The other", "The one", "All", "Answers of")  # how a line begins that holds no bad news
_STATUSES = {"nonfinite": "not finite"}  # the others are words already
_MOST_BROKEN = 6  # rows named for each gate
_SAME_AS = "the same as "  # begins the part of a plan that names a precision with the same bits
_MOST_STATEMENTS = 2  # of an implementation
_NO_ANSWER = "without a finite exact answer"


def verdict(report: RunReport) -> tuple[str, ...]:
    """A line each on whether the run is whole, what failed, what was refused, and what passed."""
    found = outcome(report)
    lines = list(shortcomings(found))
    lines += answers.verdict(report.answers, found.answers_failed)
    if not found.judged:
        lines += [] if found.answers else ["Nothing was compared."]
    elif not found.failed:
        if found.passed:
            who = "PASSED: the one case is" if found.judged == 1 else f"PASSED: all {found.judged} cases are"
        elif found.broken_off:
            who = "So far the one case is" if found.judged == 1 else f"So far all {found.judged} cases are"
        elif found.refused or found.missing:
            who = "The other case is" if found.judged == 1 else f"The other {found.judged} cases are"
        else:
            who = "The one case is" if found.judged == 1 else f"All {found.judged} cases are"
        lines.append(f"{who} within the error budget against the fp64 oracle.")
    return tuple(lines)


def shortcomings(found: RunOutcome) -> Iterator[str]:
    """A line for each thing that keeps a run from passing, if any of its cases ran."""
    if found.broken_off:
        yield f"PARTIAL: {found.broken_off}.  The results here are valid; the rest is missing."
    elif found.missing:
        yield f"MISSING: {fmt.plural(found.missing, 'requested case')}."
    of_inputs = [case for case in found.failed if not exact_answer_is_finite(case)]
    of_kernels = [case for case in found.failed if exact_answer_is_finite(case)]
    if of_inputs:
        yield (
            f"FAILED: the model's inputs, not the kernels.  In {_layers([case.layer.index for case in of_inputs])} the "
            "exact answer itself is not finite: weights or activations hold NaN or infinity, or overflow the output's "
            "dtype."
        )
    if of_kernels:
        yield f"FAILED: {len(of_kernels)} of {fmt.plural(found.judged, 'case')}: {_which(of_kernels)}."
    if found.refused:
        yield f"REFUSED: {_which(found.refused)}: {_why(found.refused)}"
    yield from _gates(found)


def _gates(found: RunOutcome) -> Iterator[str]:
    """A line for each gate that does not hold, with its first rows."""
    gates: dict[str, list[str]] = {}
    for one in found.broken:
        gates.setdefault(one.gate, []).append(": ".join(part for part in (one.row, one.found) if part))
    for gate, rows in gates.items():
        more = f"; and {fmt.plural(len(rows) - _MOST_BROKEN, 'case')} more" if len(rows) > _MOST_BROKEN else ""
        yield f"GATE FAILED: {gate}: {'; '.join(rows[:_MOST_BROKEN])}{more}."


def _why(refused: Iterable[CaseResult]) -> str:
    """The reasons, each once."""
    return ";  ".join(dict.fromkeys(case.reason.rstrip(".") for case in refused)) + "."


@dataclass(frozen=True)
class Statement:
    """subject: what the sentences speak of, to be set apart."""

    subject: str
    text: str


def statements(report: RunReport) -> tuple[Statement, ...]:
    """Statements for each compared implementation, speed first, then accuracy.

    One or two precisions have a statement each; of more there is one, from the least to the greatest.
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
                said.append(Statement(f"{name}, {_with(precision)}:", text))
    return tuple(said)


def caveats(report: RunReport) -> tuple[str, ...]:
    """What a reader must know to trust the numbers: the run's own notes, and what the results say themselves."""
    return (*_of_results(report), *report.notes)


def throttled(clocks: Clocks | None) -> Iterator[str]:
    """A caveat if the GPU slowed down while it was timed."""
    if clocks and clocks.throttle_reasons:
        yield (
            f"The GPU throttled while it was timed ({', '.join(clocks.throttle_reasons)}): absolute times are too "
            "long.  Speedups are valid, because the implementations were timed in turns."
        )


def nothing_timed(report: RunReport) -> str:
    """Why there is no speed; empty if there is one."""
    if not report.cases or any(case.timing for case in report.cases):
        return ""
    if report.environment.gpu is not None:
        return "nothing was timed in this run."
    interpreted = any(case.variant == "interpreter" for case in report.cases)
    how = "; kernels ran in Triton's interpreter" if interpreted else ""
    return f"nothing was timed, because this machine has no GPU{how}."


def advice(series: tuple[Series, ...]) -> str:
    """Which precisions of an implementation may be used, as far as the operator's own output tells."""
    name = series[0].implementation
    good = [s for s in series if s.within_budget]
    bad = "; ".join(f"{_with(s.precision)}: {_trouble(s)}" for s in series if not s.within_budget)
    if not good:
        return f"{name} may not be used {bad}."
    layers = len({case.layer for s in good for case in s.cases})
    where = "every layer replayed" if layers > 1 else "the layer replayed"
    which = fmt.words((_with(s.precision) for s in good), "or")
    text = f"{name} may be used {which}: it is within the error budget in {where}."
    return f"{text}  It may not be used {bad}." if bad else text


def _trouble(series: Series) -> str:
    """ "not finite in layer 9" """
    found: dict[str, list[int]] = {}
    for case in series.cases:
        if case.status != "passed":
            found.setdefault(_status(case), []).append(case.layer.index)
        elif not all(one.passed for one in case.accuracy):
            found.setdefault("outside the error budget", []).append(case.layer.index)
    return fmt.words(f"{status} in {_layers(layers)}" for status, layers in found.items())


def _together(found: tuple[Group, ...], name: str) -> str:
    series = [s for group in found for s in group.series(name)]
    troubles = list(dict.fromkeys(f"{_with(s.precision)}: {_trouble(s)}" for s in series if _failed(s)))
    compared = [group for group in found if any(pool(s.cases, "out", vs_oracle) for s in group.series(name))]
    parts = (
        f"FAILED: {'; '.join(troubles)}." if troubles else "",
        merged.speed(found, name),
        merged.exactness(compared[0], name) if compared else "",
    )
    return " ".join(part for part in parts if part)


def _text(found: tuple[Group, ...], name: str, precision: PrecisionRecord) -> str:
    own = [(group, s) for group in found for s in group.series(name) if s.precision == precision]
    speeds = [(group, speed) for group, s in own if (speed := total_speed(s)) and speed.device_ratio is not None]
    compared = [(group, s) for group, s in own if pool(s.cases, "out", vs_oracle)]
    parts = []
    if troubles := list(dict.fromkeys(_trouble(s) for _, s in own if _failed(s))):
        parts.append(f"FAILED: {'; '.join(troubles)}." + (" Elsewhere" if speeds else ""))
    if speeds:
        parts.append(_speed(speeds))
    if compared:
        parts.append(_exactness(*compared[0]))
    return " ".join(parts)


def _speed(speeds: list[tuple[Group, TotalSpeed]]) -> str:
    """ "3.10x [3.01, 3.21] faster than unfused by device time (call 3.02x) at 4,096 tokens, summed over 4 layers." """
    group, speed = speeds[0]
    baseline, ratio = group.baseline, fmt.speedup(speed.device_ratio, speed.device_interval)
    said = {
        "faster": f"{ratio} faster than {baseline}",
        "slower": f"slower than {baseline}, {ratio}",
        "no difference": f"as fast as {baseline}, {ratio}",
        None: f"compared with {baseline} {ratio}",
    }[speed.device_verdict]
    layers = f"summed over {_extent(group, speed)}" if len(speed.layers) > 1 else f"in layer {speed.layers[0]}"
    others = [
        f"; {fmt.speedup(other.device_ratio, other.device_interval)} ({_call(other)}) {shorter.where}"
        for shorter, other in speeds[1:]
    ]
    return f"{said} by device time ({_call(speed)}) {group.where}, {layers}{''.join(others)}."


def _extent(group: Group, speed: TotalSpeed) -> str:
    """The group's own extent if all of its calls were timed."""
    return group.extent if len(speed.layers) == group.calls else fmt.plural(len(speed.layers), "call")


def _call(speed: TotalSpeed) -> str:
    """ "call 3.02x"; "call 1.00x: no difference"."""
    doubt = ": no difference" if speed.call_verdict == "no difference" else ""
    return f"call {fmt.ratio(speed.call_ratio)}{doubt}"


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


def _with(precision: PrecisionRecord) -> str:
    return f"{precision.intermediates} with {precision.state_dtype} states"


def _of_results(report: RunReport) -> Iterator[str]:
    yield from throttled(report.clocks)
    if report.checkpoint.source == "demo" and any(case.timing for case in report.cases):
        yield "The built-in demo model is too small to fill a GPU: its times say nothing of a real model's."
    yield from _of_libraries(report)
    yield from _equal_precisions(report)
    for group in groups(report):
        chunks = {case.dims.chunk_size for case in group.cases if case.dims.chunk_size is not None}
        if chunks and (longest := _longest_sequence(report, group)) is not None and longest <= min(chunks):
            are = "is" if group.seqlen == 1 else "are"
            yield (
                f"{group.tokens} {are} no more than one chunk of {fmt.words(map(str, sorted(chunks)), 'or')}: no state "
                "is passed on, so the dtype of the states is not put to the test."
            )


def _of_libraries(report: RunReport) -> Iterator[str]:
    """What became of other libraries: it fails no run."""
    own = [case for case in report.cases if case.implementation in report.libraries]
    troubles: dict[tuple[str, str], list[CaseResult]] = {}
    for case in own:
        if case.status != "passed":
            troubles.setdefault((case.implementation, case.reason), []).append(case)
    for (_, reason), cases in troubles.items():
        yield f"Without a time: {_which(cases)}: {reason.rstrip('.')}."
    sloppy = [case for case in own if case.status == "passed" and not all(one.passed for one in case.accuracy)]
    if sloppy:
        yield f"Outside the error budget and timed all the same, as another library's: {_which(sloppy)}."


def _longest_sequence(report: RunReport, group: Group) -> int | None:
    """Tokens of the group's longest sequence; None if its calls begin with a state."""
    if group.call is None:
        return group.seqlen
    if group.call.kind != "packed":
        return None
    return max(length for prompt in report.prompts for length in prompt.serving.packed)


def _equal_precisions(report: RunReport) -> Iterator[str]:
    """Which precisions of an implementation give the bits of another one, by the plans of its cases."""
    found: dict[tuple[str, str], dict[PrecisionRecord, None]] = {}
    for case in report.cases:
        for part in case.plan.split("; "):
            if part.startswith(_SAME_AS):
                found.setdefault((case.implementation, part.removeprefix(_SAME_AS)), {})[case.precision] = None
    for (implementation, other), precisions in found.items():
        asked = {_with(case.precision) for case in report.cases if case.implementation == implementation}
        which = fmt.words(_with(one) for one in sorted(precisions, key=precision_order))
        if asked <= {other, *map(_with, precisions)}:
            which = "every precision"
        said = f"{implementation} computes {which} as {other}: results are bitwise the same"
        if any(case.timing for case in report.cases):
            said += ", and so is the time.  Speedups differ where each is over the baseline at its own state dtype"
        yield f"{said}."


def _status(case: CaseResult) -> str:
    """In words; a case whose exact answer is not finite is not its kernel's fault."""
    return _STATUSES.get(case.status, case.status) if exact_answer_is_finite(case) else _NO_ANSWER


def _which(cases: Iterable[CaseResult]) -> str:
    """ "fused (relaxed, bf16 states) inaccurate in layers 9, 18; ..." """
    found: dict[str, list[int]] = {}
    for case in cases:
        status = "" if case.status == "refused" else f" {_status(case)}"
        found.setdefault(f"{case.implementation} ({case.precision}){status}", []).append(case.layer.index)
    return "; ".join(f"{name} in {_layers(layers)}" for name, layers in found.items())


def _layers(indices: list[int]) -> str:
    return f"{'layer' if len(set(indices)) == 1 else 'layers'} {fmt.indices(indices)}"
