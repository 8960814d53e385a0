"""The sentences at the head of a report: its verdict, statements on the speed and accuracy of implementations, and
caveats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import PrecisionRecord, grouped
from ssdprof.core.case import Case
from ssdprof.core.conditions import JUDGED, METRICS
from ssdprof.core.outcome import Outcome, exact_answer_is_finite, outcome
from ssdprof.core.report import Report, Verdict
from ssdprof.report.groups import Group, Series, groups, layer_of, places, pool, precision_order
from ssdprof.report.table import Statement, VerdictLine, shortened

NOTHING = "Nothing was compared."
_MOST_STATEMENTS = 2  # of an implementation
_MOST_BROKEN = 6  # cases named for each gate
_MUCH_WORSE = 10  # times the error of exact intermediates, from which a precision is not advised
_NOISE = 2  # times the model's noise, up to which answers cannot be told from it
_SAME_AS = "the same as "  # the start of the part of a plan that names a precision with equal results


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
    left = [case.name for case in report.of_calls if case.result == "passed" and not case.time_us]
    if left and any(case.time_us for case in report.of_calls):
        cases = f"{fmt.plural(len(left), 'case')} passed and could not be timed: {shortened(left, _MOST_BROKEN)}"
        lines.append(VerdictLine(f"NO TIME: {cases}.", False))
    return tuple(lines)


def errors(report: Report) -> tuple[str, ...]:
    """The reasons why it did not pass."""
    found = outcome(report)
    gates = [f"GATE FAILED: {one}" for one in found.broken]
    if report.kind == "prefill":
        failed = (f"{case.name}: {case.result}: {case.why}" for case in found.failed)
        return (*filter(None, [incomplete(report)]), *failed, *gates)
    if report.kind == "bench":  # cells that the budget or the memory left out are no failure
        ours = [case for case in report.cases if case.kind != "library"]
        wrong = (
            f"{case.place}: {case.kernel}, {case.precision}: {case.result}: {case.why}"
            for case in ours
            if case.result != "passed" and not (case.only_outside and case in found.outside)
        )
        return (*_unfinished(found), *(wrong if ours else [NOTHING]), *gates)
    lines = shortcomings(found)
    for case in found.answers_failed:
        broken = "; ".join(one.found for one in found.broken if one.case == case.name)
        where = f"{case.implementation} ({case.precision}) at {case.seqlen:,} tokens"
        lines.append(f"FAILED: the answers of {where}: {broken or f'{case.result}: {case.why}'}.")
    return (*lines, *([] if found.judged or found.answers else [NOTHING]))


def incomplete(report: Report) -> str:
    """Why a report is incomplete; empty if it is complete."""
    found = outcome(report)
    if not report.cases:
        return "Nothing was timed." if report.kind == "prefill" else NOTHING
    if report.kind == "prefill":
        return "" if report.complete else "The command did not reach its end."
    missing = f"{found.missing} cases are missing" if found.missing and report.kind != "bench" else ""
    return found.ended_early or missing


def shortcomings(found: Outcome) -> list[str]:
    """A line for each reason why a run's calls did not pass, if any of its cases ran."""
    lines = list(_unfinished(found))
    finite = grouped(found.failed, exact_answer_is_finite)
    if of_inputs := finite.get(False):
        lines.append(
            f"FAILED: the model's inputs, not the kernels.  In {layer_words(of_inputs)} the exact answer "
            "itself is not finite: weights or activations hold NaN or infinity, or overflow the output's dtype."
        )
    if of_kernels := finite.get(True):
        lines.append(f"FAILED: {len(of_kernels)} of {fmt.plural(found.judged, 'case')}: {case_words(of_kernels)}.")
    if found.refused:
        why = ";  ".join(dict.fromkeys(case.why.rstrip(".") for case in found.refused))
        lines.append(f"REFUSED: {case_words(found.refused)}: {why}.")
    answers = {case.name for case in found.answers}
    for gate, broken in by_gate(one for one in found.broken if one.case not in answers).items():
        cases = [": ".join(filter(None, (one.case, one.found))) for one in broken]
        lines.append(f"GATE FAILED: {gate}: {shortened(cases, _MOST_BROKEN)}.")
    return lines


def _unfinished(found: Outcome) -> Iterator[str]:
    if found.ended_early:
        yield f"PARTIAL: {found.ended_early}.  The results here are valid; the rest is missing."
    elif found.missing:
        yield f"MISSING: {fmt.plural(found.missing, 'requested case')}."


def by_gate(broken: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Gate, as the user spelled it -> its verdicts."""
    return grouped(broken, lambda one: one.condition.spelling)


def _of_run(report: Report, found: Outcome) -> Iterator[VerdictLine]:
    if found.answers and not found.answers_failed:
        gates = any(METRICS[one.metric].applies(found.answers[0]) for one in report.conditions)
        limits = "they are within the limits" if gates else "no limit was given"
        yield VerdictLine(f"Answers of {fmt.plural(len(found.answers), 'case')} were compared: {limits}.", True)
    if not found.judged or found.failed:
        return
    who = "the one case is" if found.judged == 1 else f"all {found.judged} cases are"
    if found.passed:
        who = f"PASSED: {who}"
    elif found.ended_early:
        who = f"So far {who}"
    elif found.refused or found.missing:
        who = "The other case is" if found.judged == 1 else f"The other {found.judged} cases are"
    interpreted = any(case.variant == "interpreter" for case in report.of_calls)
    how = "; Triton's interpreter ran the portable kernel, and no GPU's kernel was run" if interpreted else ""
    yield VerdictLine(f"{_capital(who)} within the error budget against the fp64 oracle{how}.", True)


def _of_prefill(report: Report) -> Iterator[VerdictLine]:
    found = outcome(report)
    yield from (VerdictLine(f"FAILED: {one}.", False) for one in found.broken)
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


# --- where an implementation may be used


def advice(found: Iterable[tuple[Group, str]]) -> Iterator[VerdictLine]:
    """The precisions at which the implementations may be used: one line for all groups with the same words."""
    for line, own in grouped(found, lambda one: _advice(one[0].series(one[1]))).items():
        yield line._replace(text=f"{_capital(places(group for group, _ in own))}, {line.text}")


def _advice(series: Sequence[Series]) -> VerdictLine:
    name, good, bad = series[0].implementation, list[Series](), list[str]()
    for one in series:
        doubt = _doubt(one, series) if one.within_budget else trouble_words(one)
        if doubt:
            bad.append(f"{one.precision}: {doubt}")
        else:
            good.append(one)
    words = f"{name} may not be used at {'; '.join(bad)}."
    if good:
        layers = len({case.layer for one in good for case in one.cases})
        where = "every layer replayed" if layers > 1 else "the layer replayed"
        precisions = "; ".join(str(one.precision) for one in good)
        said = f"{name} may be used at {precisions}: within the error budget in {where}."
        words = f"{said}  It{words.removeprefix(name)}" if bad else said
    return VerdictLine(words, all(one.within_budget for one in series))


def _doubt(one: Series, every: Sequence[Series]) -> str:
    """Why a precision within its budget is not advised, by the model's answers, else by the output's error; or ""."""
    exact = [other for other in every if other.within_budget and other.precision.intermediates == "exact"]
    if not exact or one in exact:
        return ""
    key = one.implementation, one.precision
    compared = [(case, band.kl_mean) for case in one.group.report.of_answers if (band := case.band)]
    own = [kl for case, kl in compared if case.judged and (case.implementation, case.precision) == key]
    noise = [kl for case, kl in compared if case.answers and case.answers.change]
    if own and any(noise):
        times = max(own) / max(noise)
        return f"its answers diverge {times:,.0f} times as far as by the model's own noise" if times > _NOISE else ""
    least = min(other.rms_ratio for each in exact if (other := each.pooled("vs_oracle")))
    error = one.pooled("vs_oracle")
    times = error.rms_ratio / least if error and least else 0.0
    return f"its error is {times:,.0f} times that of exact intermediates" if times >= _MUCH_WORSE else ""


# --- statements


def statements(report: Report) -> tuple[Statement, ...]:
    """Statements for each compared implementation, speed first, then accuracy; of a prefill, one for each speedup.

    One or two precisions have a statement each; more share one statement with ranges.
    """
    if report.kind == "prefill":
        return tuple(_on_prefills(report))
    found = groups(report)
    said = [("No speed:", untimed)] if (untimed := nothing_timed(report)) else []
    for name in dict.fromkeys(name for group in found for name in group.compared):
        precisions = sorted({one.precision for group in found for one in group.series(name)}, key=precision_order)
        parts = {precision_words(one): [one] for one in precisions}
        if len(precisions) > _MOST_STATEMENTS:
            parts = {f"{len(precisions)} precisions": precisions}
        said += [(f"{name}, {which}:", words) for which, own in parts.items() if (words := _on(found, name, own))]
    return tuple(said)


def nothing_timed(report: Report) -> str:
    """The reason why there are no times; empty if there are."""
    if not report.of_calls or any(case.time_us for case in report.of_calls):
        return ""
    if report.environment.gpu is not None:
        return "nothing was timed in this run."
    return "nothing was timed, because this machine has no GPU."


def _on_prefills(report: Report) -> Iterator[Statement]:
    """ "1.12x [1.11, 1.13] (+12.0%) over unfused at 131,072 tokens, faster; Amdahl's law predicts 1.12x." """
    for case in sorted(report.of_prefill, key=lambda case: (-case.seqlen, -case.batch)):
        if (found := report.speedup(case)) and case.prefill:
            predicted = report.predicted(case)
            law = "" if predicted is None else f"; Amdahl's law predicts {fmt.ratio(predicted)}"
            yield (
                f"{full_name(case)}, {case.prefill.conv_and_norm} convolution and norm:",
                f"{fmt.speedup(found)} ({100 * (found.value - 1):+.1f}%) over {case.baseline} at "
                f"{fmt.tokens(case.seqlen, case.batch)}, {found.verdict(report.smallest_difference)}{law}.",
            )


def full_name(case: Case) -> str:
    """ "fused hopper", "mamba_ssm 2.3"."""
    return f"{case.implementation} {case.version}" if case.version else case.kernel


def _on(found: Sequence[Group], name: str, precisions: Sequence[PrecisionRecord]) -> str:
    """What failed, the speeds, and the accuracy in the first group that was compared."""
    own = [(group, [one for one in group.series(name) if one.precision in precisions]) for group in found]
    troubles = dict.fromkeys(
        trouble_words(one) if len(precisions) == 1 else f"{precision_words(one.precision)}: {trouble_words(one)}"
        for _, series in own
        for one in series
        if any(case.failed for case in one.cases)
    )
    speeds = _speed(own) if len(precisions) == 1 else "; ".join(_speeds(own))
    parts = []
    if troubles:
        parts.append(f"FAILED: {'; '.join(troubles)}." + " Elsewhere" * bool(len(precisions) == 1 and speeds))
    if speeds:
        parts.append(f"{speeds}.")
    compared = [
        (group, pooled) for group, series in own if (pooled := [one for one in series if one.pooled("vs_oracle")])
    ]
    if compared:
        group, series = compared[0]
        said = _exactness(group, series)
        parts.append(f"{_capital(group.where)}, {said}" if len(compared) > 1 else said)
    return " ".join(parts)


def _speed(own: Sequence[tuple[Group, Sequence[Series]]]) -> str:
    """ "3.10x [3.01, 3.21] faster than unfused by device time (call 3.02x) at 4,096 tokens, summed over 4 layers"."""
    speeds = [one for _, series in own for one in series if one.device.speedup]
    if not speeds:
        return ""

    def call(speed: Series) -> str:
        doubt = ": no difference" if speed.call.verdict == "no difference" else ""
        return f"call {fmt.ratio(speed.call.speedup.value if speed.call.speedup else None)}{doubt}"

    speed, *shorter = speeds
    group, ratio = speed.group, fmt.speedup(speed.device.speedup)
    said = {
        "faster": f"{ratio} faster than {group.baseline}",
        "slower": f"slower than {group.baseline}, {ratio}",
        "no difference": f"as fast as {group.baseline}, {ratio}",
    }[speed.device.verdict or "no difference"]
    every = len(speed.layers)
    extent = group.extent if every == group.calls else fmt.plural(every, "call")
    layers = f"summed over {extent}" if every > 1 else f"in layer {speed.layers[0]}"
    others = (f"; {fmt.speedup(one.device.speedup)} ({call(one)}) {one.group.where}" for one in shorter)
    return f"{said} by device time ({call(speed)}) {group.where}, {layers}{''.join(others)}"


def _speeds(own: Sequence[tuple[Group, Sequence[Series]]]) -> Iterator[str]:
    """ "3.30x to 3.80x faster than unfused by device time (call 3.13x to 3.51x) at 131,072 tokens", of each group."""
    first = True
    for group, series in own:
        timed = [one for one in series if one.device.speedup and one.call.speedup]
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


def _verdicts(timed: Sequence[Series], baseline: str) -> str:
    verdicts = Counter(one.device.verdict or "compared" for one in timed)
    same = f"as fast as {baseline}"
    if len(verdicts) == 1:
        return {"faster": f"faster than {baseline}", "slower": f"{same}: slower"}.get(min(verdicts), same)
    counts = (f"{verdict} at {count}" for verdict, count in verdicts.items())
    return f"{same} ({fmt.words(counts)} of {len(timed)} precisions)"


def _exactness(group: Group, series: Sequence[Series]) -> str:
    """ "78.098% to 93.707% of output elements are equal to those of unfused; rms error against fp64 1.81e-3 (...)"."""

    def rms(series: Iterable[Series]) -> str:
        return _range((one.rms_ratio for own in series if (one := own.pooled("vs_oracle"))), fmt.small)

    parts, baseline = [], group.baseline
    if against := [pooled for one in series if (pooled := one.pooled("vs_baseline"))]:
        equal = _range((one.match_pct(0.0) for one in against), fmt.percent)
        near = f", {fmt.percent(against[0].match_pct(1e-3))} within 1e-3" if len(series) == 1 else ""
        parts.append(f"{equal} of output elements are equal to those of {baseline}{near}")
    originals = [original for one in series if (original := one.original)]
    beside = [f"{baseline} {rms(originals)}"] if any(one.pooled("vs_oracle") for one in originals) else []
    if limit := pool((case for one in series for case in one.cases), "out", "floor"):
        beside.append(f"floor {fmt.small(limit.rms_ratio)}")
    return "; ".join((*parts, f"rms error against fp64 {rms(series)} ({', '.join(beside)})")) + "."


def _range(values: Iterable[float | None], show: Callable[[float | None], str]) -> str:
    """ "1.81e-3 to 2.04e-3"; a single number if both ends have the same text."""
    found = sorted(math.inf if value is None else value for value in values)
    return " to ".join(dict.fromkeys(show(value) for value in (found[0], found[-1]))) if found else fmt.MISSING


# --- caveats


def caveats(report: Report) -> tuple[str, ...]:
    """Caveats that follow from the results, and the report's own notes."""
    if report.kind == "bench":
        left_out = (f"{one.place} was left out: {one.reason}" for one in report.left_out)
        return (*_of_baselines(report), *left_out)
    found = []
    if report.clocks and (reasons := report.clocks.throttle_reasons):
        found.append(
            f"The GPU throttled while it was timed ({', '.join(reasons)}): absolute times are too long.  Speedups are "
            "valid, because the implementations were timed in turns."
        )
    timed = any(case.time_us for case in report.of_calls)
    if report.model and report.model.source == "demo" and timed:
        found.append("The built-in demo model is too small to fill a GPU: its times do not represent a real model's.")
    found += [*_of_baselines(report), *_of_libraries(report.of_calls), *_equal_precisions(report.of_calls, timed)]
    return (*found, *_single_chunks(report), *report.remarks)


def _single_chunks(report: Report) -> Iterator[str]:
    """A caveat on each group whose longest sequence is no longer than a chunk."""
    for group in groups(report):
        call, longest = group.call, group.seqlen
        if call and call.kind == "packed":
            longest = max(length for prompt in report.prompts for length in prompt.serving.packed)
        elif call and not (call.kind == "chunk" and call.count == 1):
            continue  # it begins with a state
        chunks = {case.dims.chunk_size for case in group.cases if case.dims and case.dims.chunk_size is not None}
        if chunks and longest <= min(chunks):
            one = f"A sequence of at most {fmt.tokens(longest)}" if call else group.tokens
            are = "are" if call is None and longest > 1 else "is"
            yield (
                f"{one} {are} no more than one chunk of {fmt.words(map(str, sorted(chunks)), 'or')}: no state "
                "is passed on, so the dtype of the states is not tested."
            )


def _of_baselines(report: Report) -> Iterator[str]:
    """A caveat on each precision of a baseline outside its budget, with the errors where it is largest."""

    def rms(case: Case) -> float:
        return math.inf if case.error is None or case.error.rms_ratio is None else case.error.rms_ratio

    for label, cases in grouped(outcome(report).outside, lambda case: case.label).items():
        worst = max(cases, key=rms)
        rated = [one for one in report.cases if one.rated_against == (worst.place, worst.implementation)]
        rated.sort(key=lambda one: one.precision == worst.precision)  # where there is one, the same precision is shown
        errors = {one.implementation: fmt.small(rms(one)) for one in rated if one.accuracy}
        timed = ", but timed" if worst.time_us else ""
        others = "".join(f", of {name} {error}" for name, error in errors.items())
        yield (
            f"The baseline is outside its error budget{timed}: {label} in {worst.place} (rms error "
            f"{fmt.small(rms(worst))}{others})."
        )


def _of_libraries(cases: Iterable[Case]) -> Iterator[str]:
    """Caveats on other libraries, which do not fail a run."""
    own = [case for case in cases if case.kind == "library" and case.baseline]
    troubles = (case for case in own if case.result != "passed")
    for (_, reason), found in grouped(troubles, lambda case: (case.implementation, case.why)).items():
        yield f"Without a time: {case_words(found)}: {reason.rstrip('.')}."
    if outside := [case for case in own if case.result == "passed" and case.outside_budget]:
        yield f"Outside the error budget, but timed because it is another library's: {case_words(outside)}."


def _equal_precisions(cases: Iterable[Case], timed: bool) -> Iterator[str]:
    """The precisions of an implementation that give the same bits as another one, from the plans of its cases."""
    same = (
        (case.implementation, part.removeprefix(_SAME_AS), case.precision)
        for case in cases
        for part in case.plan.split("; ")
        if part.startswith(_SAME_AS)
    )
    for (name, other), own in grouped(same, lambda one: one[:2]).items():
        precisions = [precision_words(one) for one in sorted({one[2] for one in own}, key=precision_order)]
        ran = {precision_words(case.precision) for case in cases if case.implementation == name}
        which = "every precision" if ran <= {other, *precisions} else fmt.words(precisions)
        said = f"{name} computes {which} as {other}: results are bitwise the same"
        if timed:
            said += ", and so is the time.  Speedups differ where each is over the baseline at its own state dtype"
        yield f"{said}."


# --- cases and precisions in words


def case_words(cases: Iterable[Case]) -> str:
    """ "fused (relaxed, bf16 states) inaccurate in layers 9, 18; ..." """

    def name(case: Case) -> str:
        result = "" if case.result == "refused" else f" {_result_words(case)}"
        return f"{case.implementation} ({case.precision}){result}"

    return "; ".join(f"{which} in {layer_words(own)}" for which, own in grouped(cases, name).items())


def trouble_words(series: Series) -> str:
    """The reason why a series did not pass: "not finite in layer 9"."""
    wrong = [case for case in series.cases if case.result != "passed" or case.outside_budget]
    reasons = grouped(wrong, lambda one: "outside the error budget" if one.result == "passed" else _result_words(one))
    return fmt.words(f"{why} in {layer_words(own)}" for why, own in reasons.items())


def _result_words(case: Case) -> str:
    """Distinguishes cases whose exact answer is not finite either."""
    if not exact_answer_is_finite(case):
        return "without a finite exact answer"
    return "not finite" if case.result == "nonfinite" else case.result


def precision_words(precision: PrecisionRecord) -> str:
    """ "exact with fp32 states"."""
    return f"{precision.intermediates} with {precision.state_dtype} states"


def layer_words(cases: Iterable[Case]) -> str:
    """ "layer 9", "layers 9, 18"."""
    indices = {layer_of(case) for case in cases}
    return f"{'layer' if len(indices) == 1 else 'layers'} {fmt.indices(indices)}"


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
