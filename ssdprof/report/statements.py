"""The sentences at the head of a report: its verdict, where implementations may be used, and
caveats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import (
    BETWEEN_CALLS,
    LONGEST_SEQLEN,
    PRECISIONS,
    PrecisionName,
    grouped,
    intermediates_of,
    states_of,
)
from ssdprof.core.case import Answers, Case, Drawn
from ssdprof.core.conditions import METRICS
from ssdprof.core.outcome import Outcome, Verdict, exact_answer_is_finite
from ssdprof.core.report import Report
from ssdprof.report.calls import baseline_us
from ssdprof.report.facts import gpu_name
from ssdprof.report.groups import Group, Series, groups, layer_words, places
from ssdprof.report.table import VerdictLine, shortened

NOTHING = "Nothing was compared."
# what it means for a user that a kernel breaks a law
CONSEQUENCES = {
    "inputs unchanged": "it overwrites its inputs",
    "other sequences": "sequences of one batch change each other",
    "sequence alone": "a sequence has other results in a batch than alone",
    "causality": "later tokens change earlier outputs",
    "doubling": "twice the values do not give twice the output",
    "cut in two": "a prompt in two parts has other results than in one",
    "single steps": "drafted tokens have other results than one by one",
    "accepted tokens": "states after accepted tokens are wrong",
    "edge inputs": "some inputs that a model may pass are computed wrongly",
    "loud past": "what long past tokens leave is computed wrongly",
    "turning keys": "history that matters is dropped",
    "finer inputs": "fp32 or fp16 inputs are computed wrongly",
}
_MOST_BROKEN = 6  # cases named for each gate
_MUCH_WORSE = 10  # times the error of exact intermediates, from which a precision is not advised
_NOISE = 2  # times the model's noise, up to which answers cannot be told from it
# times the fastest precision's time, up to which a more accurate one is recommended
_CLEARLY_SLOWER = 1.02
# the start of the part of a plan that names a precision with equal results
_SAME_AS = "the same as "


# --- the verdict


def verdict_lines(report: Report) -> tuple[VerdictLine, ...]:
    """Whether the report is complete, what failed, what was refused, what passed, and where it may
    be used.
    """
    found = Outcome(report)
    advised = advice(
        (group, name) for group in groups(report) for name in group.compared if name != "served"
    )
    may = advised if found.passed and report.kind == "run" else ()
    return (*(VerdictLine(line, False) for line in errors(report)), *_passed(report, found), *may)


def errors(report: Report) -> tuple[str, ...]:
    """The reasons why it did not pass."""
    found = Outcome(report)
    lines = shortcomings(found)
    for case in found.answers_failed:
        broken = "; ".join(
            f"{one.condition}: {one.actual}" for one in found.broken if one.case == case.name
        )
        where = f"{case.implementation} ({case.precision}) at {case.seqlen:,} tokens"
        lines.append(f"FAILED: the answers of {where}: {broken or f'{case.result}: {case.why}'}.")
    return (*lines, *([] if found.judged or found.answers else [NOTHING]))


def incomplete(report: Report) -> str:
    """Why a report is incomplete; empty if it is complete."""
    found = Outcome(report)
    missing = f"{found.missing} cases are missing" if found.missing else ""
    return (found.ended_early or missing) if report.cases else NOTHING


def shortcomings(found: Outcome) -> list[str]:
    """A line for each reason why a report's calls did not pass, if any of its cases ran."""
    lines = []
    if found.ended_early:
        lines.append(
            f"PARTIAL: {found.ended_early}.  The results here are valid; the rest is missing."
        )
    elif found.missing:
        lines.append(f"MISSING: {fmt.plural(found.missing, 'requested case')}.")
    finite = grouped(found.failed, exact_answer_is_finite)
    if of_inputs := finite.get(False):
        why = "weights or activations hold NaN or infinity, or overflow the output's dtype"
        where = f"In {layer_words(of_inputs)} the exact answer itself is not finite"
        lines.append(f"FAILED: the model's inputs, not the kernels.  {where}: {why}.")
    if of_kernels := finite.get(True):
        lines.append(
            f"FAILED: {len(of_kernels)} of {fmt.plural(found.judged, 'case')}: "
            f"{case_words(of_kernels)}."
        )
    for name, failed in grouped(found.failed, lambda case: case.implementation).items():
        laws = dict.fromkeys(law.name for case in failed for law in case.broken_laws)
        if faults := dict.fromkeys(_consequence(law) for law in laws):
            lines.append(f"{name} is not safe here: {'; '.join(faults)}.")
    if found.refused:
        why = ";  ".join(dict.fromkeys(case.why.rstrip(".") for case in found.refused))
        lines.append(f"REFUSED: {case_words(found.refused)}: {why}.")
    answers = {case.name for case in found.answers}
    for gate, broken in by_gate(one for one in found.broken if one.case not in answers).items():
        cases = [": ".join(filter(None, (one.case, one.actual))) for one in broken]
        lines.append(f"GATE FAILED: {gate}: {shortened(cases, _MOST_BROKEN)}.")
    return lines


def _consequence(law: str) -> str:
    """What a broken law means for a user."""
    if law.startswith(BETWEEN_CALLS):
        return f"states between calls are wrong ({law.removeprefix(BETWEEN_CALLS)})"
    return CONSEQUENCES[law]


def by_gate(broken: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Gate, as the user gave it -> its verdicts."""
    return grouped(broken, lambda verdict: verdict.condition)


def _passed(report: Report, found: Outcome) -> Iterator[VerdictLine]:
    if found.answers and not found.answers_failed:
        answers = found.answers[0]
        gates = [one.text for one in report.conditions if METRICS[one.metric].applies(answers)]
        unknown = any(verdict.condition in gates for verdict in found.broken)
        judged = "they are within the limits" if gates else "no limit was given"
        limits = "a limit could not be judged" if unknown else judged
        yield VerdictLine(
            f"Answers of {fmt.plural(len(found.answers), 'case')} were compared: {limits}.",
            not unknown,
        )
    if not found.judged or found.failed:
        return
    one = found.judged == 1
    who = "the one case" if one else f"all {found.judged} cases"
    if found.passed:
        who = f"PASSED: {who}"
    elif found.ended_early:
        who = f"So far {who}"
    elif found.refused or found.missing:
        who = "The other case" if one else f"The other {found.judged} cases"
    how = f"{'is' if one else 'are'} within the error budget against the fp64 oracle"
    if report.kind == "prefill":
        how = "ran"
    if any(case.variant == "interpreter" for case in report.of_calls):
        how += "; Triton's interpreter ran the portable kernel, and no GPU's kernel was run"
    yield VerdictLine(f"{_capital(who)} {how}.", True)


# --- where an implementation may be used


def advice(found: Iterable[tuple[Group, str]]) -> Iterator[VerdictLine]:
    """The precisions at which the implementations may be used: one line for all groups with the
    same words.
    """
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
        precisions = "; ".join(one.precision for one in good)
        if not bad and len(good) > 4:
            precisions = f"each of its {len(good)} precisions"
        said = f"{name} may be used at {precisions}: within the error budget in {where}."
        words = f"{said}  It{words.removeprefix(name)}" if bad else said
    return VerdictLine(words, all(one.within_budget for one in series))


def _doubt(one: Series, every: Sequence[Series]) -> str:
    """Why a precision within its budget is not advised, by the model's answers, else by the
    output's error; or "".
    """
    exact = [
        other
        for other in every
        if other.within_budget and intermediates_of(other.precision) == "exact"
    ]
    if not exact or one in exact:
        return ""
    own, noise = _divergence(one)
    if own and noise:
        times = own / noise
        return (
            f"its answers diverge {times:,.0f} times as far as by the model's own noise"
            if times > _NOISE
            else ""
        )
    least = min(other.rms_ratio for each in exact if (other := each.pooled("vs_oracle")))
    error = one.pooled("vs_oracle")
    times = error.rms_ratio / least if error and least else 0.0
    return (
        f"its error is {times:,.0f} times that of exact intermediates"
        if times >= _MUCH_WORSE
        else ""
    )


# --- what to do


def in_short(report: Report) -> Iterator[VerdictLine]:
    """A sentence for whoever decides on a run: the gain at the longest prompt, whether answers
    stay, and what to use.

    Recommends the most accurate precision that is not clearly slower than the fastest one.
    """
    judged, group = Outcome(report), next(iter(groups(report)), None)
    if report.kind != "run" or group is None or not group.compared:
        return
    if report.doubts:
        first = min(report.doubts).partition(":")[0].rstrip(".")
        yield VerdictLine(
            f"In short: explain the inputs first, which no model has: {first}.", False
        )
        return
    if not judged.passed:
        wrong = judged.failed or judged.refused or judged.broken or judged.answers_failed
        why = "this run did not pass" if wrong else "this run is incomplete"
        yield VerdictLine(f"In short: keep {group.baseline} for now: {why}.", False)
        return
    of_names = [group.series(name) for name in group.compared if name != "served"]
    every = [one for own in of_names for one in own if one.within_budget and not _doubt(one, own)]
    timed = [one for one in every if one.speedup() and len(one.timed) == group.calls]
    if not timed:
        why = (
            "on this GPU nothing was timed"
            if group.report.environment.gpu
            else "without a GPU there is no speed"
        )
        who = dict.fromkeys(one.implementation for one in every) or group.compared
        verb = ("is" if len(who) == 1 else "are") + ("" if every else " not")
        said = f"{fmt.words(who)} {verb} accurate enough for {group.extent} {group.where}"
        yield VerdictLine(f"In short: {said}; {why}.", bool(every))
        return
    least = min(one.us["device"] for one in timed)
    best = next(one for one in timed if one.us["device"] <= _CLEARLY_SLOWER * least)
    whole = baseline_us(best) or 0.0
    if best.verdict != "faster":
        yield VerdictLine(
            f"In short: keep {group.baseline}: {best.implementation} is not faster {group.where}.",
            True,
        )
        return
    less = (
        f"takes {fmt.duration(whole - best.us['device'])} less of {fmt.duration(whole)} for "
        f"{group.extent}"
    )
    gain = (
        f"on this {gpu_name(group.report.environment)}, {best.implementation} {less} {group.where}"
    )
    yield VerdictLine(f"In short: {gain}; {_answers_words(best)}; use {best.precision}.", True)


def _answers_words(one: Series) -> str:
    """Whether the model's answers stay as they are."""
    own, noise = _divergence(one)
    if not own:
        return "the model's answers were not compared"
    if not noise:
        return f"its answers diverge by {fmt.small(own)} nats"
    if own <= _NOISE * noise:
        return "its answers stay within the model's own noise"
    return f"its answers diverge {own / noise:,.1f} times as far as by the model's own noise"


def _divergence(one: Series) -> tuple[float, float]:
    """The largest mean KL of the answers at this implementation and precision, and that of noise;
    0: unknown.
    """
    key = one.implementation, one.precision
    compared = [(case, band.kl_mean) for case in one.group.report.of_answers if (band := case.band)]
    own = [
        kl for case, kl in compared if case.judged and (case.implementation, case.precision) == key
    ]
    noise = [kl for case, kl in compared if isinstance(case.task, Answers) and case.task.change]
    return max(own, default=0.0), max(noise, default=0.0)


# --- caveats


def caveats(report: Report) -> Iterator[str]:
    """Caveats that follow from the results, and the report's own notes; the gravest first."""
    yield from suspicions(report)
    timed = any(case.time_us for case in report.of_calls)
    if report.of_calls and not timed:
        why = " in this run" if report.environment.gpu else ", because this machine has no GPU"
        yield f"No speed: nothing was timed{why}."
    elif left := [
        case.name for case in report.of_calls if case.result == "passed" and not case.time_us
    ]:
        cases = f"{fmt.plural(len(left), 'case')} passed and could not be timed"
        yield f"No time: {cases}: {shortened(left, _MOST_BROKEN)}."
    if report.clocks and (reasons := report.clocks.throttle_reasons):
        valid = "Speedups are valid, because the implementations were timed in turns."
        yield (
            f"The GPU throttled while it was timed ({', '.join(reasons)}): absolute times are "
            f"too long.  {valid}"
        )
    if report.model and report.model.source == "demo" and timed:
        yield (
            "The built-in demo model is too small to fill a GPU: its times do not represent a "
            "real model's."
        )
    yield from _of_baselines(report)
    yield from _of_libraries(report)
    yield from _equal_precisions(report.of_calls, timed)
    yield from _single_chunks(report)
    for out in report.left_out:
        who = f"{fmt.words(out.implementations)} of " if out.implementations else ""
        yield f"{_capital(f'{who}{out.place}')} was left out: {out.reason}."
    yield from report.remarks


def suspicions(report: Report) -> list[str]:
    """On inputs that no model has: of a server's calls, the recording is wrong before any kernel
    is, and before the server.
    """
    recorded = any(prompt.kind == "recorded" for prompt in report.prompts)
    begin = "Suspect the recording before the kernels and the server: in" if recorded else "In"
    return [
        f"{begin} {fmt.plural(layers, 'layer')}, {text}" for text, layers in report.doubts.items()
    ]


def _single_chunks(report: Report) -> Iterator[str]:
    """A caveat on each group whose longest sequence is no longer than a chunk."""
    for group in groups(report):
        call, longest = group.call, group.seqlen
        if call and call.kind == "packed":
            lengths = (length for prompt in report.prompts for length in prompt.serving.packed)
            longest = max(lengths, default=LONGEST_SEQLEN)  # a recording may begin with states
        elif isinstance(group.cases[0].task, Drawn) or (
            call and not (call.kind == "chunk" and call.count == 1)
        ):
            continue  # of a bench, or it begins with a state
        chunks = {
            case.dims.chunk_size
            for case in group.cases
            if case.dims and case.dims.chunk_size is not None
        }
        if chunks and longest <= min(chunks):
            one = f"A sequence of at most {fmt.tokens(longest)}" if call else group.tokens
            are = "are" if call is None and longest > 1 else "is"
            chunk = f"one chunk of {fmt.words(map(str, sorted(chunks)), 'or')}"
            untested = "no state is passed on, so the dtype of the states is not tested"
            yield f"{one} {are} no more than {chunk}: {untested}."


def _of_baselines(report: Report) -> Iterator[str]:
    """A caveat on each precision of a baseline outside its budget, with the errors where it is
    largest.
    """

    def rms(case: Case) -> float:
        return (
            math.inf if case.error is None or case.error.rms_ratio is None else case.error.rms_ratio
        )

    for label, cases in grouped(Outcome(report).outside, lambda case: case.label).items():
        worst = max(cases, key=rms)
        rated = [
            one for one in report.cases if one.rated_against == (worst.place, worst.implementation)
        ]
        # where there is one, the same precision is shown
        rated.sort(key=lambda one: one.precision == worst.precision)
        errors = {one.implementation: fmt.small(rms(one)) for one in rated if one.accuracy}
        timed = ", but timed" * bool(worst.time_us)
        rated_at = "".join(f", of {name} {error}" for name, error in errors.items())
        found = f"{label} in {worst.place} (rms error {fmt.small(rms(worst))}{rated_at})"
        yield f"The baseline is outside its error budget{timed}: {found}."


def _fails(case: Case) -> bool:
    """Whether a library fails the run, and so is among its failures."""
    return case.named and case.failed


def _of_libraries(report: Report) -> Iterator[str]:
    yield from (f"Not compared: {reason}" for reason in report.absent)
    own = [
        case
        for case in report.cases
        if case.kind == "library" and (case.baseline or isinstance(case.task, Drawn))
    ]
    troubles = (case for case in own if case.result != "passed" and not _fails(case))
    for (_, reason), found in grouped(
        troubles, lambda case: (case.implementation, case.why)
    ).items():
        yield f"Without a time: {case_words(found)}: {reason.rstrip('.')}."
    if outside := [case for case in own if case.result == "passed" and case.outside_budget]:
        yield (
            "Outside the error budget, but timed because it is another library's: "
            f"{case_words(outside)}."
        )


def _equal_precisions(cases: Iterable[Case], timed: bool) -> Iterator[str]:
    """The precisions of an implementation that give the same bits as another one, from the plans of
    its cases.
    """
    same = (
        (case.implementation, part.removeprefix(_SAME_AS), case.precision)
        for case in cases
        for part in case.plan.split("; ")
        if part.startswith(_SAME_AS)
    )

    def words(precision: PrecisionName) -> str:
        return f"{intermediates_of(precision)} with {states_of(precision)} states"

    for (name, other), own in grouped(same, lambda one: one[:2]).items():
        precisions = [words(one) for one in sorted({one[2] for one in own}, key=PRECISIONS.index)]
        ran = {words(case.precision) for case in cases if case.implementation == name}
        which = "every precision" if ran <= {other, *precisions} else fmt.words(precisions)
        said = f"{name} computes {which} as {other}: results are bitwise the same"
        if timed:
            said += (
                ", and so is the time.  Speedups differ where each is over the baseline at "
                "its own state dtype"
            )
        yield f"{said}."


# --- cases in words


def case_words(cases: Iterable[Case]) -> str:
    """ "fused (relaxed, bf16 states) inaccurate in layers 9, 18; ..." """

    def name(case: Case) -> str:
        result = "" if case.result == "refused" else f" {_result_words(case)}"
        return f"{case.implementation} ({case.precision}){result}"

    return "; ".join(
        f"{which} in {layer_words(own)}" for which, own in grouped(cases, name).items()
    )


def trouble_words(series: Series) -> str:
    """The reason why a series did not pass: "not finite in layer 9"."""
    wrong = [case for case in series.cases if case.result != "passed" or case.outside_budget]
    reasons = grouped(
        wrong,
        lambda one: "outside the error budget" if one.result == "passed" else _result_words(one),
    )
    return fmt.words(f"{why} in {layer_words(own)}" for why, own in reasons.items())


def _result_words(case: Case) -> str:
    """Distinguishes cases whose exact answer is not finite either."""
    if not exact_answer_is_finite(case):
        return "without a finite exact answer"
    return "not finite" if case.result == "nonfinite" else case.result


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
