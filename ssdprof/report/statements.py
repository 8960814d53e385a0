"""The sentences at the head of a report: its verdict, and statements on the speed and accuracy of implementations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import PrecisionRecord
from ssdprof.core.case import Case
from ssdprof.core.conditions import JUDGED, METRICS
from ssdprof.core.outcome import Outcome, exact_answer_is_finite, outcome
from ssdprof.core.report import Report, Verdict
from ssdprof.report.groups import (
    Group,
    Series,
    TotalSpeed,
    case_words,
    groups,
    layer_of,
    layer_words,
    places,
    pool,
    precision_order,
    precision_words,
    trouble_words,
)
from ssdprof.report.table import Statement, VerdictLine, shortened

_MOST_STATEMENTS = 2  # of an implementation
_MOST_BROKEN = 6  # cases named for each gate
_MUCH_WORSE = 10  # times the error of exact intermediates, from which a precision is not advised
_NOISE = 2  # times the model's noise, up to which answers cannot be told from it


NOTHING = "Nothing was compared."


# --- the verdict


def verdict_lines(report: Report) -> tuple[VerdictLine, ...]:
    """Lines on whether the report is complete, what failed, what was refused, and what passed."""
    if report.kind == "prefill":
        return tuple(_of_prefill(report))
    lines = [VerdictLine(line, False) for line in errors(report)]
    if report.kind != "bench":
        lines += _of_run(report, outcome(report))
    elif not lines:
        passed = sum(case.result == "passed" for case in report.cases)
        lines = [VerdictLine(f"PASSED: {fmt.plural(passed, 'case')} compared with the fp64 oracle.", True)]
    timed = {case.name for case in report.of_calls if case.time_us}
    left = [case.name for case in report.of_calls if case.result == "passed" and case.name not in timed]
    if timed and left:
        said = (
            f"NO TIME: {fmt.plural(len(left), 'case')} passed and could not be timed: {shortened(left, _MOST_BROKEN)}."
        )
        lines.append(VerdictLine(said, False))
    return tuple(lines)


def errors(report: Report) -> tuple[str, ...]:
    """The reasons why it did not pass."""
    found = outcome(report)
    if report.kind == "bench":
        return (*_unfinished(found), *_of_bench(report), *(f"GATE FAILED: {one}" for one in found.broken))
    if report.kind == "prefill":
        failed = (f"{case.name}: {case.result}: {case.why}" for case in found.failed)
        return (*filter(None, [incomplete(report)]), *failed, *(f"GATE FAILED: {one}" for one in found.broken))
    lines = [*shortcomings(found), *(f"FAILED: the answers of {why}." for why in _failed_answers(found))]
    return tuple(lines) if found.judged or found.answers else (*lines, NOTHING)


def incomplete(report: Report) -> str:
    """Why a report is incomplete; empty if it is complete."""
    found = outcome(report)
    if not report.cases:
        return "Nothing was timed." if report.kind == "prefill" else NOTHING
    if report.kind == "prefill":
        return "" if report.complete else "The command did not reach its end."
    missing = f"{found.missing} cases are missing" if found.missing and report.kind != "bench" else ""
    return found.ended_early or missing


def shortcomings(found: Outcome) -> Iterator[str]:
    """A line for each reason why a run's calls did not pass, if any of its cases ran."""
    yield from _unfinished(found)
    of_inputs = [case for case in found.failed if not exact_answer_is_finite(case)]
    of_kernels = [case for case in found.failed if exact_answer_is_finite(case)]
    if of_inputs:
        where = layer_words([layer_of(case) for case in of_inputs])
        yield (
            f"FAILED: the model's inputs, not the kernels.  In {where} the exact answer itself is not finite: weights "
            "or activations hold NaN or infinity, or overflow the output's dtype."
        )
    if of_kernels:
        yield f"FAILED: {len(of_kernels)} of {fmt.plural(found.judged, 'case')}: {case_words(of_kernels)}."
    if found.refused:
        why = ";  ".join(dict.fromkeys(case.why.rstrip(".") for case in found.refused))
        yield f"REFUSED: {case_words(found.refused)}: {why}."
    answers = {case.name for case in found.answers}
    for gate, broken in by_gate(one for one in found.broken if one.case not in answers).items():
        cases = [": ".join(filter(None, (one.case, one.found))) for one in broken]
        yield f"GATE FAILED: {gate}: {shortened(cases, _MOST_BROKEN)}."


def _unfinished(found: Outcome) -> Iterator[str]:
    if found.ended_early:
        yield f"PARTIAL: {found.ended_early}.  The results here are valid; the rest is missing."
    elif found.missing:
        yield f"MISSING: {fmt.plural(found.missing, 'requested case')}."


def by_gate(broken: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Gate, as the user spelled it -> its verdicts."""
    found: dict[str, list[Verdict]] = {}
    for one in broken:
        found.setdefault(one.condition.spelling, []).append(one)
    return found


def _failed_answers(found: Outcome) -> Iterator[str]:
    for case in found.answers_failed:
        broken = "; ".join(one.found for one in found.broken if one.case == case.name)
        why = broken or f"{case.result}: {case.why}"
        yield f"{case.implementation} ({case.precision}) at {case.seqlen:,} tokens: {why}"


def _of_run(report: Report, found: Outcome) -> Iterator[VerdictLine]:
    if found.answers and not found.answers_failed:
        gates = [one for one in report.conditions if METRICS[one.metric].applies(found.answers[0])]
        limits = "they are within the limits" if gates else "no limit was given"
        count = fmt.plural(len(found.answers), "case")
        yield VerdictLine(f"Answers of {count} were compared: {limits}.", True)
    if not found.judged or found.failed:
        return
    one = found.judged == 1
    if found.passed:
        who = "PASSED: the one case is" if one else f"PASSED: all {found.judged} cases are"
    elif found.ended_early:
        who = "So far the one case is" if one else f"So far all {found.judged} cases are"
    elif found.refused or found.missing:
        who = "The other case is" if one else f"The other {found.judged} cases are"
    else:
        who = "The one case is" if one else f"All {found.judged} cases are"
    interpreted = any(case.variant == "interpreter" for case in report.of_calls)
    how = "; Triton's interpreter ran the portable kernel, and no GPU's kernel was run" if interpreted else ""
    yield VerdictLine(f"{who} within the error budget against the fp64 oracle{how}.", True)


# --- where an implementation may be used


def advice(found: Iterable[tuple[Group, str]]) -> Iterator[VerdictLine]:
    """The precisions at which the implementations may be used: one line for all groups with the same words."""
    advised: dict[tuple[str, bool], list[Group]] = {}
    for group, name in found:
        series = group.series(name)
        advised.setdefault((_advice(series), all(one.within_budget for one in series)), []).append(group)
    for (words, good), own in advised.items():
        where = places(own)
        yield VerdictLine(f"{where[0].upper()}{where[1:]}, {words}", good)


def _advice(series: Sequence[Series]) -> str:
    name = series[0].implementation
    good = [one for one in series if one.within_budget and not _doubt(one, series)]
    bad = "; ".join(
        f"{one.precision}: {_doubt(one, series) if one.within_budget else trouble_words(one)}"
        for one in series
        if one not in good
    )
    if not good:
        return f"{name} may not be used at {bad}."
    layers = len({case.layer for one in good for case in one.cases})
    where = "every layer replayed" if layers > 1 else "the layer replayed"
    words = (
        f"{name} may be used at {'; '.join(str(one.precision) for one in good)}: within the error budget in {where}."
    )
    return f"{words}  It may not be used at {bad}." if bad else words


def _doubt(one: Series, every: Sequence[Series]) -> str:
    """Why a precision within its budget is not advised; empty if it is: by the model's answers if they were compared,
    else by the output's error."""
    exact = [other for other in every if other.within_budget and other.precision.intermediates == "exact"]
    if not exact or one in exact:
        return ""
    if (noise := _over_noise(one)) is not None:
        return f"its answers diverge {noise:,.0f} times as far as by the model's own noise" if noise > _NOISE else ""
    least = min(other.rms_ratio for each in exact if (other := each.pooled("vs_oracle")))
    own = one.pooled("vs_oracle")
    times = own.rms_ratio / least if own and least else 0.0
    return f"its error is {times:,.0f} times that of exact intermediates" if times >= _MUCH_WORSE else ""


def _over_noise(one: Series) -> float | None:
    """The divergence of the model's answers over that of its noise; None if they were not compared."""
    own, noise = list[float](), list[float]()
    for case in one.group.report.of_answers:
        same = case.judged and (case.implementation, case.precision) == (one.implementation, one.precision)
        if case.answers and case.answers.bands and (same or case.answers.change):
            into = own if same else noise
            into.append(case.answers.bands[0].kl_mean)
    return max(own) / max(noise) if own and any(noise) else None


# --- benches and prefills


def _of_bench(report: Report) -> Iterator[str]:
    """One sentence for each case of ssdprof's that was refused or wrong, or one sentence if there was none at all.

    Cells that the budget or the memory left out are named in the report and are no failure.
    """
    ours = [case for case in report.cases if case.kind != "library"]
    if not ours:
        yield NOTHING
    excused = outcome(report).outside
    for case in ours:
        if case.result != "passed" and not (case.only_outside and case in excused):
            yield f"{case.place}: {case.kernel}, {case.precision}: {case.result}: {case.why}"


def _of_prefill(report: Report) -> Iterator[VerdictLine]:
    found = outcome(report)
    for one in found.broken:
        yield VerdictLine(f"FAILED: {one}.", False)
    if report.conditions and not found.broken:
        held = fmt.words(dict.fromkeys(one.spelling for one in report.conditions))
        yield VerdictLine(f"PASSED: every prefill of {JUDGED} holds {held}.", True)
    if report.complete:
        lengths = {(case.seqlen, case.batch) for case in report.of_prefill}
        yield VerdictLine(f"Prefill times of {fmt.plural(len(lengths), 'length')}.", True)
    else:
        yield VerdictLine("Partial: the command did not end.", False)
    if report.left_out or any(case.result == "passed" and not case.call_us for case in report.of_prefill):
        yield VerdictLine("Some requested prefills were not timed.", False)
    if found.failed:
        yield VerdictLine(f"{fmt.plural(len(found.failed), 'case')} failed.", False)


# --- statements


def statements(report: Report) -> tuple[Statement, ...]:
    """Statements for each compared implementation, speed first, then accuracy; of a prefill, one for each speedup.

    One or two precisions have a statement each; more share one statement with ranges.
    """
    if report.kind == "prefill":
        return tuple(_on_prefills(report))
    found = groups(report)
    said = [Statement("No speed:", untimed)] if (untimed := nothing_timed(report)) else []
    for name in dict.fromkeys(name for group in found for name in group.compared):
        precisions = {one.precision for group in found for one in group.series(name)}
        if len(precisions) > _MOST_STATEMENTS:
            if words := _together(found, name):
                said.append(Statement(f"{name}, {len(precisions)} precisions:", words))
            continue
        for precision in sorted(precisions, key=precision_order):
            if words := _on(found, name, precision):
                said.append(Statement(f"{name}, {precision_words(precision)}:", words))
    return tuple(said)


def nothing_timed(report: Report) -> str:
    """The reason why there are no times; empty if there are."""
    cases = report.of_calls
    if not cases or any(case.time_us for case in cases):
        return ""
    if report.environment.gpu is not None:
        return "nothing was timed in this run."
    return "nothing was timed, because this machine has no GPU."


def _on_prefills(report: Report) -> Iterator[Statement]:
    """ "1.12x [1.11, 1.13] (+12.0%) over unfused at 131,072 tokens, faster; Amdahl's law predicts 1.12x." """
    for seqlen, batch in sorted({(case.seqlen, case.batch) for case in report.of_prefill}, reverse=True):
        for case in report.of_prefill:
            found = report.speedup(case) if (case.seqlen, case.batch) == (seqlen, batch) else None
            if found and case.prefill:
                predicted = report.predicted(case)
                law = "" if predicted is None else f"; Amdahl's law predicts {fmt.ratio(predicted)}"
                yield Statement(
                    f"{full_name(case)}, {case.prefill.conv_and_norm} convolution and norm:",
                    f"{fmt.speedup(found)} ({100 * (found.value - 1):+.1f}%) over {case.baseline} at "
                    f"{fmt.tokens(seqlen, batch)}, {found.verdict(report.smallest_difference)}{law}.",
                )


def full_name(case: Case) -> str:
    """ "fused hopper", "mamba_ssm 2.3"."""
    return f"{case.implementation} {case.version}" if case.version else case.kernel


def _on(found: Sequence[Group], name: str, precision: PrecisionRecord) -> str:
    own = [(group, one) for group in found for one in group.series(name) if one.precision == precision]
    speeds = [(group, speed) for group, one in own if (speed := one.speed) and speed.device.speedup]
    compared = [(group, one) for group, one in own if one.pooled("vs_oracle")]
    parts = []
    if troubles := list(dict.fromkeys(trouble_words(one) for _, one in own if _failed(one))):
        parts.append(f"FAILED: {'; '.join(troubles)}." + (" Elsewhere" if speeds else ""))
    if speeds:
        parts.append(_speed(speeds))
    if compared:
        group, first = compared[0]
        parts.append(_placed(_exactness(group, [first]), [group for group, _ in compared]))
    return " ".join(parts)


def _together(found: Sequence[Group], name: str) -> str:
    series = [one for group in found for one in group.series(name)]
    troubles = dict.fromkeys(
        f"{precision_words(one.precision)}: {trouble_words(one)}" for one in series if _failed(one)
    )
    parts = [f"FAILED: {'; '.join(troubles)}."] if troubles else []
    if speeds := list(_speeds(found, name)):
        parts.append(f"{'; '.join(speeds)}.")
    compared = [group for group in found if any(one.pooled("vs_oracle") for one in group.series(name))]
    if compared:
        own = [one for one in compared[0].series(name) if one.pooled("vs_oracle")]
        parts.append(_placed(_exactness(compared[0], own), compared))
    return " ".join(parts)


def _placed(sentence: str, compared: Sequence[Group]) -> str:
    """A sentence on the first of the groups, which it names if it is not the only one."""
    where = compared[0].where
    return f"{where[0].upper()}{where[1:]}, {sentence}" if len(compared) > 1 else sentence


def _speed(speeds: list[tuple[Group, TotalSpeed]]) -> str:
    """ "3.10x [3.01, 3.21] faster than unfused by device time (call 3.02x) at 4,096 tokens, summed over 4 layers." """
    group, speed = speeds[0]
    ratio = fmt.speedup(speed.device.speedup)
    said = {
        "faster": f"{ratio} faster than {group.baseline}",
        "slower": f"slower than {group.baseline}, {ratio}",
        "no difference": f"as fast as {group.baseline}, {ratio}",
    }[speed.device.verdict or "no difference"]
    every = len(speed.layers)
    extent = group.extent if every == group.calls else fmt.plural(every, "call")
    layers = f"summed over {extent}" if every > 1 else f"in layer {speed.layers[0]}"
    others = (f"; {fmt.speedup(one.device.speedup)} ({_call(one)}) {shorter.where}" for shorter, one in speeds[1:])
    return f"{said} by device time ({_call(speed)}) {group.where}, {layers}{''.join(others)}."


def _call(speed: TotalSpeed) -> str:
    """ "call 3.02x"; "call 1.00x: no difference"."""
    doubt = ": no difference" if speed.call.verdict == "no difference" else ""
    return f"call {fmt.ratio(speed.call.speedup.value if speed.call.speedup else None)}{doubt}"


def _speeds(found: Sequence[Group], name: str) -> Iterator[str]:
    """ "3.30x to 3.80x faster than unfused by device time (call 3.13x to 3.51x) at 131,072 tokens", of each group."""
    first = True
    for group in found:
        speeds = (one.speed for one in group.series(name))
        timed = [speed for speed in speeds if speed and speed.device.speedup and speed.call.speedup]
        if not timed:
            continue
        device = _range((one.device.speedup.value for one in timed if one.device.speedup), fmt.ratio)
        call = _range((one.call.speedup.value for one in timed if one.call.speedup), fmt.ratio)
        if first:
            layers = {len(one.layers) for one in timed}
            where = f", summed over {layers.pop()} layers" if len(layers) == 1 and max(layers) > 1 else ""
            yield f"{device} {_verdicts(timed, group.baseline)} by device time (call {call}) {group.where}{where}"
        else:
            yield f"{device} (call {call}) {group.where}"
        first = False


def _verdicts(timed: Sequence[TotalSpeed], baseline: str) -> str:
    verdicts = Counter(one.device.verdict or "compared" for one in timed)
    if len(verdicts) == 1:
        (verdict,) = verdicts
        same = f"as fast as {baseline}"
        return {"faster": f"faster than {baseline}", "slower": f"{same}: slower"}.get(verdict, same)
    counts = (f"{verdict} at {count}" for verdict, count in verdicts.items())
    return f"as fast as {baseline} ({fmt.words(counts)} of {len(timed)} precisions)"


def _exactness(group: Group, series: Sequence[Series]) -> str:
    """ "78.098% to 93.707% of output elements are equal to those of unfused; rms error against fp64 1.81e-3 (...)"."""
    baseline = group.baseline
    against = [pooled for one in series if (pooled := one.pooled("vs_baseline"))]
    parts = []
    if against:
        equal = _range((one.match_pct(0.0) for one in against), fmt.percent)
        near = f", {fmt.percent(against[0].match_pct(1e-3))} within 1e-3" if len(series) == 1 else ""
        parts.append(f"{equal} of output elements are equal to those of {baseline}{near}")
    originals = [original for one in series if (original := one.original)]
    beside = [f"{baseline} {_rms(originals)}"] if any(one.pooled("vs_oracle") for one in originals) else []
    if limit := pool((case for one in series for case in one.cases), "out", "floor"):
        beside.append(f"floor {fmt.small(limit.rms_ratio)}")
    parts.append(f"rms error against fp64 {_rms(series)} ({', '.join(beside)})")
    return f"{'; '.join(parts)}."


def _rms(series: Sequence[Series]) -> str:
    return _range((one.rms_ratio for own in series if (one := own.pooled("vs_oracle"))), fmt.small)


def _range(values: Iterable[float | None], show: Callable[[float | None], str]) -> str:
    """ "1.81e-3 to 2.04e-3"; a single number if both ends have the same text."""
    found = sorted(math.inf if value is None else value for value in values)
    return " to ".join(dict.fromkeys(show(value) for value in (found[0], found[-1]))) if found else fmt.MISSING


def _failed(series: Series) -> bool:
    return any(case.result not in ("passed", "refused") for case in series.cases)
