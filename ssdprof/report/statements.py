"""The sentences at the head of a report: the verdict, where implementations may be used, the
recommendation "In short", and the caveats.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain

from ssdprof.core import words as fmt
from ssdprof.core.base import (
    BETWEEN_CALLS,
    ENDED,
    PRECISIONS,
    WHILE_RECORDED,
    PrecisionName,
    Probe,
    distinct,
    grouped,
    intermediates_of,
    states_of,
)
from ssdprof.core.case import Answers, Case, Generated
from ssdprof.core.conditions import METRICS, STATE_BREAKS
from ssdprof.core.outcome import GATED, Outcome, Verdict, exact_answer_is_finite, verdicts
from ssdprof.core.pairs import unfinished
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.report import states
from ssdprof.report.facts import answers_words, gpu_name
from ssdprof.report.groups import (
    Group,
    Series,
    case_words,
    fault_words,
    group_words,
    groups,
    layer_words,
    trouble_words,
)
from ssdprof.report.model import prefills
from ssdprof.report.table import VerdictLine, shortened

NOTHING = "Nothing was compared."
OWN_BASELINE = "our own baseline; no other library was timed here"
# law -> what it means for a user that a kernel breaks the law
CONSEQUENCES = {
    "inputs unchanged": "it overwrites its inputs",
    "other sequences": "sequences of one batch change each other",
    "sequence alone": "a sequence has other results in a batch than alone",
    "causality": "later tokens change earlier outputs",
    "linearity": "twice the values do not give twice the output",
    "cut in two": "a prompt in two parts has other results than in one",
    "single steps": "drafted tokens have other results than one by one",
    "accepted tokens": "states after accepted tokens are wrong",
    "edge inputs": "some inputs that a model may pass are computed wrongly",
    "amplified history": "what long past tokens leave is computed wrongly",
    "turning keys": "history that matters is dropped",
    "finer inputs": "fp32 or fp16 inputs are computed wrongly",
}
_MOST_NAMED = 6  # items of a list that a sentence names, such as the cases that break a gate
# Relaxed intermediates are not advised if their error is at least this many times that of exact
# ones, unless the model's answers decide: see `_doubt`.
_MUCH_WORSE = 10
# Answers that diverge by up to this many times the model's noise cannot be told from noise.
_NOISE = 2
# A more accurate precision is recommended if it takes at most this many times as long as the
# fastest one.
_CLEARLY_SLOWER = 1.02
# A part of a case's plan that begins so names a precision with equal results.
_SAME_AS = "the same as "
_REFUSED = "refused calls"  # a fault of an implementation that is none in other calls


# --- the verdict


def verdict_lines(report: Report) -> tuple[VerdictLine, ...]:
    """The verdict of a report: why it did not pass, what passed, the first state between calls that
    does not fit, and the first fault that was found while a server ran.

    For a run that passed, it also says where the implementations may be used.
    """
    outcome = Outcome(report)
    lines = [VerdictLine(line, good=False) for line in why_not_passed(report)]
    lines += _passed(report, outcome)
    if state_breaks := _state_breaks(report):
        lines.append(
            VerdictLine(f"The states between calls do not fit: {state_breaks[0]}.", good=False)
        )
    lines += [VerdictLine(fault, good=False) for fault in found_while_recorded(report)[:1]]
    if outcome.passed and report.kind == "run":
        lines += advice(groups(report))
    return tuple(lines)


def why_not_passed(report: Report) -> tuple[str, ...]:
    """The reasons why a report did not pass, in sentences; empty if it passed."""
    outcome = Outcome(report)
    lines = shortcomings(outcome)
    for case in outcome.answers_failed:
        reasons = [
            f"{verdict.condition}: {verdict.actual}"
            for verdict in outcome.broken
            if verdict.case == case.name
        ]
        reason = "; ".join(reasons) or f"{case.result}: {case.why}"
        where = f"{case.implementation} ({case.precision}) at {case.seqlen:,} tokens"
        lines.append(f"FAILED: the answers of {where}: {reason}.")
    if not (outcome.compared or outcome.answers):
        lines.append(NOTHING)
    return tuple(lines)


def incomplete(report: Report) -> str:
    """Why requested cases may be absent, as `unfinished` says it; `NOTHING` for a report without
    any case, even if its process reached its end.  Empty if the report is complete.
    """
    return unfinished(report) if report.cases else NOTHING


def shortcomings(outcome: Outcome) -> list[str]:
    """A sentence for each reason why the cases of a report, without its answers, did not pass."""
    lines = []
    if outcome.ended_early:
        lines.append(
            f"PARTIAL: {outcome.ended_early}.  The results here are valid; the rest is missing."
        )
    elif outcome.missing:
        lines.append(f"MISSING: {fmt.plural(outcome.missing, 'requested case')}.")
    failed_by_finite = grouped(outcome.failed, exact_answer_is_finite)
    if faults_of_inputs := failed_by_finite.get(False):
        where = f"In {layer_words(faults_of_inputs)} the exact answer itself is not finite"
        reason = _nonfinite_reason(faults_of_inputs[0])
        lines.append(f"FAILED: the model's inputs, not the kernels.  {where}.{reason}")
    if faults_of_kernels := failed_by_finite.get(True):
        lines.append(
            f"FAILED: {len(faults_of_kernels)} of {fmt.plural(outcome.compared, 'case')}: "
            f"{case_words(faults_of_kernels)}."
        )
    for name, failed in grouped(outcome.failed, lambda case: case.implementation).items():
        laws = distinct(case.broken_laws for case in failed)
        if faults := dict.fromkeys(map(_consequence, laws)):
            lines.append(f"{name} is not safe here: {'; '.join(faults)}.")
    if outcome.refused:
        reasons = ";  ".join(dict.fromkeys(case.why.rstrip(".") for case in outcome.refused))
        lines.append(f"REFUSED: {case_words(outcome.refused)}: {reasons}.")
    answers = {case.name for case in outcome.answers}
    of_calls = (verdict for verdict in outcome.broken if verdict.case not in answers)
    for gate, broken in by_gate(of_calls).items():
        cases = shortened([verdict.what for verdict in broken], _MOST_NAMED)
        lines.append(f"GATE FAILED: {gate}: {cases}.")
    return lines


def _nonfinite_reason(case: Case) -> str:
    """A sentence on why the exact answer of the case is not finite, after two spaces; empty if no
    remark on its accuracy says it.
    """
    remarks = [tensor.remark for tensor in case.accuracy if tensor.floor.nonfinite]
    reason = next(filter(None, remarks), "")
    return f"  It begins in {case.case_key}: {reason}." if reason else ""


def _consequence(law: Probe) -> str:
    """What a broken law means for a user: "it overwrites its inputs"."""
    name = law.name.removeprefix(BETWEEN_CALLS)
    if law.detail.startswith(ENDED):
        return f"a call ends its process, or does not return ({name})"
    if law.name.startswith(BETWEEN_CALLS):
        return f"states between calls are wrong ({name})"
    return CONSEQUENCES.get(name, f"it breaks the law '{name}'")  # of another version of ssdprof


def by_gate(broken: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Gate, as the user gave it -> its verdicts."""
    return grouped(broken, lambda verdict: verdict.condition)


def _passed(report: Report, outcome: Outcome) -> Iterator[VerdictLine]:
    """The sentences on what passed: the answers, and the other cases."""
    if outcome.answers and not outcome.answers_failed:
        yield _answers_compared(report, outcome)
    if not outcome.compared or outcome.failed:
        return
    is_single = outcome.compared == 1
    who = "the one case" if is_single else f"all {outcome.compared} cases"
    if outcome.passed:
        limit = ""
        if report.state_breaks:
            limit = " for the kernels, not for the states between calls"
        elif found_while_recorded(report):
            limit = " for the kernels, not for what the server did"
        who = f"PASSED{limit}: {who}"
    elif outcome.ended_early:
        who = f"So far {who}"
    elif outcome.refused or outcome.missing:
        who = "The other case" if is_single else f"The other {outcome.compared} cases"
    result = f"{'is' if is_single else 'are'} within the error budget against the fp64 oracle"
    if outcome.tolerated:
        result += f", except for {case_words(outcome.tolerated)}, which is close to the oracle"
    if report.kind == "prefill":
        result = "ran"
    if report.of_states:
        result = "ran; a format that loses heads fails no case"
    is_interpreted = any(case.variant == "interpreter" for case in report.of_calls)
    if is_interpreted:
        result += "; Triton's interpreter ran the portable kernel, and no GPU's kernel was run"
    tested = distinct(
        [law.name for law in case.probes if law.holds in ("yes", "no")] for case in report.cases
    )
    if report.laws == "quick" and tested:
        result += f"; laws tested (--laws quick): {fmt.words(tested)}"
    if report.laws == "quick" and not tested:
        result += "; no law was tested"
    elif is_interpreted and report.kind == "run" and report.laws != "all":
        result += "; laws of bundled kernels were not tested (--laws all tests them)"
    if outcome.others and report.kind in ("bench", "prefill"):
        result += f"; {outcome.others} more of other libraries do not count"
    yield VerdictLine(f"{_capital(who)} {result}.")


def _answers_compared(report: Report, outcome: Outcome) -> VerdictLine:
    """The verdict on answers that ran and break no limit: whether limits were given for them, and
    could be judged.
    """
    # only answers have verdicts of None
    is_unjudged = any(verdict.holds is None for verdict in verdicts(report))
    limits = "no limit was given"
    if is_unjudged:
        limits = "a limit could not be judged"
    elif any(METRICS[gate.metric].applies(outcome.answers[0]) for gate in report.conditions):
        limits = "they are within the limits"
    compared = f"Answers of {answers_words(report.of_answers)} were compared"
    return VerdictLine(f"{compared}: {limits}.", not is_unjudged)


# --- where an implementation may be used


def advice(compared: Iterable[Group]) -> Iterator[VerdictLine]:
    """The precisions at which the compared implementations of groups may be used, in sentences.

    Groups with the same advice share a sentence.  What a server computed is not a choice, and is
    left out.
    """
    groups_of_line: dict[VerdictLine, list[Group]] = {}
    for group in compared:
        for implementation in group.compared:
            if implementation != "served":
                line = _advice(group.series(implementation))
                groups_of_line.setdefault(line, []).append(group)
    for line, with_same_advice in groups_of_line.items():
        where = _capital(group_words(with_same_advice))
        yield line._replace(text=f"{where}, {line.text}")


def _advice(all_series: Sequence[Series]) -> VerdictLine:
    """Where an implementation may be used, and where it may not: "fused may be used at exact, fp32
    states: ...  It may not be used at ...".

    all_series: the series of one implementation, one for each precision.
    """
    name = all_series[0].implementation
    usable = []
    doubts = []
    for series in all_series:
        doubt = _doubt(series, all_series) if series.within_budget else trouble_words(series)
        if doubt:
            doubts.append(f"{series.precision}: {doubt}")
        else:
            usable.append(series)
    words = []
    if usable:
        layers = {case.layer for case in chain.from_iterable(series.cases for series in usable)}
        where = "every layer replayed" if len(layers) > 1 else "the layer replayed"
        precisions = fmt.words(f"at {series.precision}" for series in usable)
        if not doubts and len(usable) > 4:
            precisions = f"at each of its {len(usable)} precisions"
        words.append(f"{name} may be used {precisions}: it is within the error budget in {where}.")
    if doubts:
        words.append(f"{'It' if usable else name} may not be used at {'; '.join(doubts)}.")
    return VerdictLine("  ".join(words), all(series.within_budget for series in all_series))


def _doubt(series: Series, all_series: Sequence[Series]) -> str:
    """Why a precision is not advised although it is within its budget; empty if it is advised.

    Exact intermediates are always advised, and so are relaxed ones if no exact ones are within
    their budget.  Otherwise the model's answers decide if they and the model's noise were compared,
    and else the error of the output.

    all_series: the series of the same implementation.
    """
    exact = [
        other
        for other in all_series
        if other.within_budget and intermediates_of(other.precision) == "exact"
    ]
    if not exact or series in exact:
        return ""
    divergence, noise = _divergence(series)
    if divergence is not None and noise:
        return _beyond_noise(divergence, noise)
    error = series.pooled("vs_oracle")
    exact_errors = filter(None, (other.pooled("vs_oracle") for other in exact))
    least = min((exact_error.rms_ratio for exact_error in exact_errors), default=math.inf)
    if error is None or not least or error.rms_ratio < _MUCH_WORSE * least:
        return ""
    return f"its error is {error.rms_ratio / least:,.0f} times that of exact intermediates"


# --- what to do


def in_short(report: Report) -> tuple[VerdictLine, ...]:
    """A sentence for the reader who has to decide; empty if the report allows no decision.

    For a run it says what is at fault, the gain at the longest prompt at which something is usable,
    or else in its decode steps, whether the model's answers stay the same, and what to use; for a
    prefill the gain of the whole model; for decoded states the format to use.
    """
    compared = [group for group in groups(report) if group.compared]
    decision: VerdictLine | None
    if report.kind == "run" and compared:
        decision = _decision(report, compared)
    elif report.kind == "prefill":
        decision = _of_prefill(report)
    else:
        decision = states.advice(report)
    if decision is None:
        return ()
    first = ""
    if report.state_breaks:
        first = "explain first why the states between calls do not fit; "
    elif found_while_recorded(report):
        first = "explain first what went wrong while it was recorded; "
    return (VerdictLine(f"In short: {first}{decision.text}.", decision.good and not first),)


def _of_prefill(report: Report) -> VerdictLine | None:
    """Whether `fused` and the user's own kernels are faster in the longest prefill, and by how
    much; None if none of them, or no baseline, was timed there.

    Where prefills ran with the model's own convolution and norm and with the bundled ones, those
    with the model's own count.
    """
    all_prefills = prefills(report)
    longest = max((case.seqlen for case, _ in all_prefills), default=0)
    cases: dict[str, Case] = {}  # implementation -> its first case, with the model's convolution
    for case, _ in all_prefills:
        if case.seqlen == longest and (case.implementation == GATED or case.kind == "own"):
            cases.setdefault(case.implementation, case)
    gains = []
    for name, case in cases.items():
        if report.speedup(case):
            size = fmt.tokens(case.seqlen, case.batch)
            gain = _speedups(report, report.baseline, partial(report.speedup, case, None))
            if report.faster(case) == "faster":
                gains.append(f"{name} gives a whole prefill of {size} {gain}")
            else:
                gains.append(f"{name} is not faster in a whole prefill of {size}: it has {gain}")
    if not gains:
        return None
    where = f"on this {gpu_name(report.environment)}"
    return VerdictLine(f"{where}, {'; '.join(gains)}", Outcome(report).passed)


def _speedups(report: Report, baseline: str, speedup: Callable[[str], Estimate | None]) -> str:
    """The speedups over the baseline and over every library that was timed: "a speedup of 3.64x
    over unfused and 2.75x over fla".

    A bundled baseline may be slower than what users have.  The words say that it is bundled if they
    have no speedup over a library, and also that no library was timed if the report has no time of
    one.

    baseline: an implementation that was timed.
    speedup: gives the speedup over an implementation, if there is one.
    """
    kinds = _timed_kinds(report)
    libraries = [name for name, kind in kinds.items() if kind == "library"]
    words = []
    for name in dict.fromkeys((baseline, *libraries)):
        if ratio := speedup(name):
            words.append(f"{fmt.ratio(ratio.value)} over {name}")
    remark = ""
    if kinds[baseline] == "bundled" and len(words) == 1:
        remark = ", our own baseline" if libraries else f", {OWN_BASELINE}"
    return f"a speedup of {fmt.words(words)}{remark}"


def _timed_kinds(report: Report) -> dict[str, str]:
    """Implementation -> the kind of its cases, for implementations with a time."""
    return {case.implementation: case.kind for case in report.cases if case.time_us}


def _decision(report: Report, compared: Sequence[Group]) -> VerdictLine:
    """What is not usable and why, then what to use.

    If the inputs are at fault, that they have to be explained first; if the run is incomplete and
    has no other fault, that it decides nothing.

    compared: the groups in which an implementation was compared, at least one.
    """
    outcome = Outcome(report)
    if report.doubts:
        first = next(iter(report.doubts)).partition(":")[0].rstrip(".")
        return VerdictLine(f"explain the inputs first, which no model has: {first}", good=False)
    if faults_of_inputs := [case for case in outcome.failed if not exact_answer_is_finite(case)]:
        layers = layer_words(faults_of_inputs)
        return VerdictLine(
            f"explain {layers} first, where the exact answer is not finite", good=False
        )
    faults = _faults_in_run(report, outcome)
    if not (faults or outcome.broken or outcome.passed):
        baseline = compared[0].baseline
        return VerdictLine(f"keep {baseline} for now: this run is incomplete", good=False)
    words = []
    unusable: set[tuple[str, PrecisionName]] = set()
    for (name, fault), precisions in faults.items():
        if fault != _REFUSED:  # it may be usable in other calls
            unusable |= {(name, precision) for precision in precisions}
        all_precisions = {case.precision for case in report.cases if case.implementation == name}
        where = f" at {fmt.words(precisions)}" if set(precisions) < all_precisions else ""
        words.append(f"{name} {fault}{where}")
    for verdict in outcome.broken:
        if not verdict.case:
            words.append(f"{verdict.condition} could judge no case")
    advised, is_good = _recommendation(compared, unusable)
    return VerdictLine("; ".join([*words, advised]), is_good and outcome.passed)


def _faults_in_run(
    report: Report, outcome: Outcome
) -> Mapping[tuple[str, str], Iterable[PrecisionName]]:
    """(implementation, fault) -> the precisions at which a case has this fault, each once.

    The fault says that the case was refused (`_REFUSED`), that it did not pass for another reason,
    or which limits it misses.  States that do not fit are no fault of an implementation.
    """
    of_kernels = [verdict for verdict in outcome.broken if STATE_BREAKS not in verdict.condition]
    broken = grouped(of_kernels, lambda verdict: verdict.case)
    faults: dict[tuple[str, str], dict[PrecisionName, None]] = {}
    for case in report.cases:
        if case in outcome.faulty:
            fault = _REFUSED if case.result == "refused" else "did not pass"
        elif case.name in broken:
            fault = f"misses {fmt.words(verdict.condition for verdict in broken[case.name])}"
        else:
            continue
        faults.setdefault((case.implementation, fault), {})[case.precision] = None
    return faults


def _recommendation(
    compared: Sequence[Group], unusable: Set[tuple[str, PrecisionName]]
) -> VerdictLine:
    """What to use in the first group in which something is usable: of the precisions that are
    faster than the baseline and not clearly slower than the fastest one, the most accurate one.
    Then the speedup of each usable kernel of the user, at its most accurate precision, unless it
    has been named.

    Without times, the precisions that are accurate enough.

    compared: as for `_decision`; the longest prompt is first.
    unusable: (implementation, precision) of those that failed a case or miss a limit.
    """
    for group in compared:
        if usable := _usable(group, unusable):
            break
    else:
        return _nothing_usable(compared[0], unusable)
    where = f"{group.extent} {group.where}"
    timed = [series for series in usable if series.speedup() and len(series.timed) == group.calls]
    if not timed:
        return VerdictLine(_accurate_words(group, usable))
    faster = [series for series in timed if series.verdict == "faster"]
    if not faster:
        names = dict.fromkeys(series.implementation for series in timed)
        not_faster = fmt.words(f"{name} is not faster" for name in names)
        return VerdictLine(f"keep {group.baseline}: {not_faster} {group.where}")
    least_us = min(series.us("device") for series in faster)
    near = [series for series in faster if series.us("device") <= _CLEARLY_SLOWER * least_us]
    best = min(near, key=lambda series: PRECISIONS.index(series.precision))
    baseline_us = best.baseline_us
    assert baseline_us is not None  # because `timed` has only series with a speedup
    saved = f"{fmt.duration(baseline_us - best.us('device'))} less of {fmt.duration(baseline_us)}"
    gain = f"on this {gpu_name(group.report.environment)}, {best.implementation} takes {saved}"
    speedups = _speedups(group.report, group.baseline, lambda name: best.speedup(over=name))
    words = [f"{gain} for {where}, {speedups}", _answers_words(best), f"use {best.precision}"]
    of_own = [series for series in timed if series.cases[0].kind == "own"]
    for name, (series, *_) in grouped(of_own, lambda series: series.implementation).items():
        speedup = series.speedup()
        if speedup and name != best.implementation:
            ratio = f"{fmt.ratio(speedup.value)} over {group.baseline}"
            words.append(f"{name} has a speedup of {ratio} at {series.precision}")
    return VerdictLine("; ".join(words))


def _nothing_usable(group: Group, unusable: Set[tuple[str, PrecisionName]]) -> VerdictLine:
    """What to do if no implementation that was compared with the baseline is usable.

    group: of the longest prompt.  unusable: as for `_recommendation`.
    """
    if group.compared == ("served",) and not unusable:
        where = f"{group.extent} {group.where}"
        return VerdictLine(f"what the server computed is accurate enough for {where}")
    if all(
        series.key in unusable or any(case.result == "refused" for case in series.cases)
        for series in group.series(group.baseline)
    ):
        return VerdictLine("nothing that was compared is usable", good=False)
    return VerdictLine(f"keep {group.baseline}")


def _accurate_words(group: Group, usable: Sequence[Series]) -> str:
    """The precisions at which each implementation is accurate enough, and why no speed is said.

    usable: at least one series, none of which can be compared with the baseline in every call.
    """
    by_name = grouped(usable, lambda series: series.implementation)
    clauses = []
    for name, all_series in by_name.items():
        is_any = len(all_series) == len(group.series(name))
        at_precisions = (
            "" if is_any else f" at {fmt.words(series.precision for series in all_series)}"
        )
        clauses.append(f"{name} is accurate enough{at_precisions}")
    reason = "without a GPU there is no speed"
    if group.report.environment.gpu:
        names = fmt.words([*by_name, group.baseline])
        reason = f"on this GPU not every call of {names} was timed"
    return f"{fmt.words(clauses)} for {group.extent} {group.where}; {reason}"


def _usable(group: Group, unusable: Set[tuple[str, PrecisionName]]) -> list[Series]:
    """The series of a group that may be advised: within their budget, not `unusable`, and without a
    `_doubt`.  What a server computed is not a choice, and is left out.
    """
    usable = []
    for name in group.compared:
        all_series = group.series(name)
        for series in all_series:
            may_be_used = series.within_budget and series.key not in unusable
            if may_be_used and name != "served" and not _doubt(series, all_series):
                usable.append(series)
    return usable


def _answers_words(series: Series) -> str:
    """How much the model's answers change with this series, in words."""
    divergence, noise = _divergence(series)
    if divergence is None:
        return "the model's answers were not compared"
    if not noise:
        return f"its answers diverge by {fmt.small(divergence)} nats"
    return _beyond_noise(divergence, noise) or "its answers stay within the model's own noise"


def _beyond_noise(divergence: float, noise: float) -> str:
    """How far answers are beyond the model's noise, in words; empty if they are within it.

    divergence, noise: mean KL divergences in nats; the noise is above 0.
    """
    if divergence <= _NOISE * noise:
        return ""
    times = f"{divergence / noise:,.1f} times"
    return f"its answers diverge {times} as far as by the model's own noise"


def _divergence(series: Series) -> tuple[float | None, float | None]:
    """The largest mean KL divergence, in nats, of the answers of this implementation and precision,
    and that of the model's noise.  Each is None if it was not measured.
    """
    divergences = []
    noises = []
    for case in series.group.report.of_answers:
        if case.band and isinstance(case.task, Answers) and case.task.change:
            noises.append(case.band.kl_mean)
        is_of_series = (case.implementation, case.precision) == series.key
        if case.band and case.is_gated and is_of_series:
            divergences.append(case.band.kl_mean)
    return max(divergences, default=None), max(noises, default=None)


# --- caveats


def caveats(report: Report) -> Iterator[str]:
    """The caveats: first those that weaken the verdict; then those on speed, baselines, libraries,
    laws and equal precisions, and on what was left out; last the report's remarks, without those of
    `found_while_recorded`, which are in the verdict or among the first.
    """
    yield from weaknesses(report)
    is_timed = any(case.time_us for case in report.of_calls)
    untimed_names = [
        case.name
        for case in report.of_calls
        # what a server computed is never timed
        if case.result == "passed" and not case.time_us and case.kind != "served"
    ]
    if report.of_calls and not is_timed:
        where = " in this run" if report.environment.gpu else ", because this machine has no GPU"
        yield f"No speed: nothing was timed{where}."
    elif untimed_names:
        count_words = f"{fmt.plural(len(untimed_names), 'case')} passed and could not be timed"
        yield f"No time: {count_words}: {shortened(untimed_names, _MOST_NAMED)}."
    if report.clocks and (reasons := report.clocks.throttle_reasons):
        valid = "Speedups are valid, because the implementations were timed in turns."
        yield (
            f"The GPU throttled while it was timed ({', '.join(reasons)}): absolute times are too "
            f"long.  {valid}"
        )
    if report.model and report.model.source == "demo" and is_timed:
        yield (
            "The built-in demo model is too small to fill a GPU: its times do not represent a real "
            "model's."
        )
    kinds = _timed_kinds(report)
    baseline = report.baseline if report.baseline in kinds else "unfused"
    is_over_ours = kinds.get(baseline) == "bundled"
    if report.kind == "bench" and is_over_ours and "library" not in kinds.values():
        yield f"Speedups are over {baseline}, {OWN_BASELINE}."
    yield from _of_baselines(report)
    yield from _of_libraries(report)
    yield from _untested_laws(report)
    yield from _equal_precisions(report, is_timed)
    for left_out in report.left_out:
        subject = left_out.case_key
        if left_out.implementations:
            subject = f"{fmt.words(left_out.implementations)} of {subject}"
        yield f"{_capital(subject)} was left out: {left_out.reason}."
    yield from (text for text in report.remarks if not text.startswith(WHILE_RECORDED))


def _untested_laws(report: Report) -> Iterator[str]:
    """A sentence for each user's kernel and each reason why laws of it were not tested in some
    layers.
    """
    of_own = [case for case in report.cases if case.kind == "own"]
    for name, cases in grouped(of_own, lambda case: case.implementation).items():
        untested = []
        for case in cases:
            untested += [(law, case) for law in case.probes if law.holds == "not tested"]
        for reason, of_reason in grouped(untested, lambda row: row[0].detail).items():
            laws = list(dict.fromkeys(law.name for law, _ in of_reason))
            count = "law was" if len(laws) == 1 else "laws were"
            where = layer_words(case for _, case in of_reason)
            which = f"with {name} in {where} ({fmt.words(laws)})"
            yield f"{len(laws)} {count} not tested {which}: {reason}."


def weaknesses(report: Report) -> list[str]:
    """The caveats that weaken the verdict: further faults that were found while a server ran,
    states that do not fit, inputs that no model has, what a server computed from them, and
    sequences of one chunk.
    """
    caveats = found_while_recorded(report)[1:]  # the verdict has the first one
    if state_breaks := _state_breaks(report):
        others = shortened(state_breaks[1:], _MOST_NAMED)
        caveats.append(
            "Cached prefixes, forks and calls that were not recorded may leave states that do not "
            "fit; otherwise a sequence got wrong states" + (f".  Also {others}." if others else ".")
        )
    for text, layers in report.doubts.items():
        caveats.append(f"In {fmt.plural(layers, 'layer')}, inputs that no model has: {text}")
    return [*caveats, *_server_or_recording(report), *_single_chunks(report)]


def found_while_recorded(report: Report) -> list[str]:
    """The remarks on faults that were found while a server ran: "While it was recorded: ..."."""
    return [text for text in report.remarks if text.startswith(WHILE_RECORDED)]


def _state_breaks(report: Report) -> list[str]:
    """Rows that begin with wrong states, in words: "in layers 3, 9, row 1 of call 6 begins with a
    state that no earlier call left".
    """
    return [
        f"in {layer_words(cases)}, {text.removesuffix('.')}"
        for text, cases in report.state_breaks.items()
    ]


def _server_or_recording(report: Report) -> Iterator[str]:
    """A caveat that says what is known of a server whose output is wrong, or whose inputs no model
    has: whether the server or its recording is at fault.

    No caveat without these faults, and none on the inputs if an output was recorded that could not
    be compared.
    """
    if not report.is_recorded:
        return
    served = [case for case in report.cases if case.kind == "served"]
    wrong = [
        case
        for case in served
        if case.result in ("inaccurate", "nonfinite") and exact_answer_is_finite(case)
    ]
    if wrong:
        yield (
            f"In {layer_words(wrong)}, what the server computed differs from the fp64 oracle for "
            "the recorded inputs: its kernel is wrong, or the recording misreads the kernel's "
            "arguments.  'ssdprof run DIR --impl fla', or vllm, sglang, flashinfer, calls a "
            "library without the server: if it fails, too, its kernel is wrong."
        )
    elif report.doubts and served and all(case.result == "passed" for case in served):
        yield (
            "What the server computed from these inputs is right: the server passes them, and the "
            "recording reads them as its kernel does."
        )
    elif report.doubts and not served:
        yield (
            "The server passes these inputs, or the recording misreads them.  Its output, which "
            "would tell, was not recorded."
        )


def _single_chunks(report: Report) -> Iterator[str]:
    """A caveat on each group whose longest sequence is no longer than a chunk of each layer.

    "40 tokens are no more than one chunk of 64 or 128: no state is passed on, so the dtype of the
    states is not tested."
    """
    for group in groups(report):
        longest = _longest_from_zeros(group, report)
        all_dims = (case.dims for case in group.cases if case.dims)
        chunks = sorted({dims.chunk_size for dims in all_dims if dims.chunk_size})
        if longest is None or not chunks or longest > chunks[0]:
            continue
        if group.call:
            subject = f"A sequence of at most {fmt.tokens(longest)} is"
        else:
            subject = f"{group.tokens} {'is' if longest == 1 else 'are'}"
        chunk = f"one chunk of {fmt.words(map(str, chunks), 'or')}"
        untested = "no state is passed on, so the dtype of the states is not tested"
        yield f"{subject} no more than {chunk}: {untested}."


def _longest_from_zeros(group: Group, report: Report) -> int | None:
    """The length of the longest sequence of a group.

    None if the sequences begin with a state, so that the dtype of states matters for any length, or
    may begin with one, as those of a recording, and in a bench.
    """
    call = group.call
    if isinstance(group.cases[0].task, Generated):
        return None
    if call is None or (call.kind == "chunk" and call.count == 1):
        return group.seqlen
    if call.kind != "packed":
        return None
    lengths = list(chain.from_iterable(prompt.serving.packed for prompt in report.prompts))
    return max(lengths, default=None)  # a recording has no lengths here


def _of_baselines(report: Report) -> Iterator[str]:
    """A caveat on each precision at which a baseline is outside its error budget or breaks a law.

    It names the baseline's worst case, and the errors of the implementations that are compared with
    this case.
    """
    for label, cases in grouped(Outcome(report).outside, lambda case: case.label).items():
        worst = max(cases, key=_rms)
        worst_key = worst.case_key, worst.implementation
        compared = [
            case for case in report.cases if case.rated_against == worst_key and case.accuracy
        ]
        # Each implementation has one error.  That of its last case counts, so the cases at the
        # precision of the baseline come last.
        compared.sort(key=lambda case: case.precision == worst.precision)
        errors = {case.implementation: fmt.small(_rms(case)) for case in compared}
        other_errors = "".join(f", of {name} {error}" for name, error in errors.items())
        timed = ", but was timed" if worst.time_us else ""
        where = f"{label} {fault_words(worst)} in {worst.case_key}"
        rms = f"rms error of the output {fmt.small(_rms(worst))}{other_errors}"
        yield f"The baseline has a fault{timed}: {where} ({rms})."


def _rms(case: Case) -> float:
    """The relative RMS error of a case's output; infinite if the output was not compared, too."""
    return case.error.rms_of_all if case.error else math.inf


def _of_libraries(report: Report) -> Iterator[str]:
    """The caveats on implementations that are unavailable, and on libraries in a bench or beside a
    baseline: those that did not pass and therefore have no time, and those that passed although
    they are outside the error budget.
    """
    yield from (f"Not compared: {reason}" for reason in report.absent)
    libraries = [
        case
        for case in report.cases
        if case.kind == "library" and (case.baseline or isinstance(case.task, Generated))
    ]
    # libraries that the user named and that failed are among the failures of the run
    not_passed = (
        case for case in libraries if case.result != "passed" and not (case.named and case.failed)
    )
    by_reason = grouped(not_passed, lambda case: (case.implementation, case.why))
    for (_, reason), cases in by_reason.items():
        yield f"Without a time: {case_words(cases)}: {reason.rstrip('.')}."
    outside = [case for case in libraries if case.result == "passed" and case.accuracy_faults]
    if outside:
        yield (
            "Outside the error budget, but passed because it is another library's: "
            f"{case_words(outside)}."
        )


def _equal_precisions(report: Report, is_timed: bool) -> Iterator[str]:
    """A caveat on each precision with which an implementation computes the same bits as with other
    precisions, according to the plans of its cases.

    It names the calls for which this holds, unless it holds for all calls at the precision: short
    calls may run another kernel than long ones.

    is_timed: whether any case has a time.
    """
    planned = (case for case in report.of_calls if case.plan)
    by_precision = grouped(planned, lambda case: (case.implementation, case.precision))
    # (implementation, the precision that it computes, the calls) -> the precisions asked for
    same_bits: dict[tuple[str, str, str], list[PrecisionName]] = {}
    for (name, precision), cases in by_precision.items():
        by_computed = grouped(cases, _computed_precision)
        for computed, equal in by_computed.items():
            if computed:
                where = "" if len(by_computed) == 1 else _calls_words(report, equal)
                same_bits.setdefault((name, computed, where), []).append(precision)
    equal_times = ", and its times differ by noise only" if is_timed else ""
    for (name, computed, where), precisions in same_bits.items():
        asked = "; ".join(sorted(precisions, key=PRECISIONS.index))
        line = (
            f"{name} computes {asked} as {computed}{where}: its outputs are the same{equal_times}."
        )
        if any(
            not computed.endswith(f" {states_of(precision)} states") for precision in precisions
        ):
            line += (
                "  Their rows may differ, because each is compared with the baseline at its own "
                "state dtype."
            )
        yield line


def _computed_precision(case: Case) -> str:
    """The precision that a case computed in place of its own, according to its plan: "exact with
    fp32 states".  Empty if it computed its own.
    """
    parts = (part for part in case.plan.split("; ") if part.startswith(_SAME_AS))
    return next(parts, "").removeprefix(_SAME_AS)


def _calls_words(report: Report, cases: Sequence[Case]) -> str:
    """The calls of the cases: " in layers 0-1 at 8 tokens", or the inputs of a bench's cases."""
    words = []
    ordered = sorted(cases, key=lambda case: -case.seqlen)
    by_calls = grouped(ordered, lambda case: case.calls if case.layer else case.case_key)
    for equal in by_calls.values():
        where = f" {Group(report, equal).where}" if equal[0].layer else ""
        words.append(f"{layer_words(equal)}{where}")
    return f" in {shortened(words, _MOST_NAMED)}"


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
