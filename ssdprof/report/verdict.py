"""The verdict of a run: whether it is complete, what failed, what was refused, and what passed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ssdprof.core import words as fmt
from ssdprof.report.case_words import case_words, layer_words
from ssdprof.report.tables import answers
from ssdprof.schema import CaseResult, RunReport
from ssdprof.schema.outcome import RunOutcome, exact_answer_is_finite, outcome

GOOD = ("PASSED", "So far", "The other", "The one", "All", "Answers of")  # prefixes of lines without a failure
_MOST_BROKEN = 6  # rows named for each gate


def verdict_lines(report: RunReport) -> tuple[str, ...]:
    """Lines on whether the run is complete, what failed, what was refused, and what passed."""
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
    """A line for each reason why the run did not pass, if any of its cases ran."""
    if found.broken_off:
        yield f"PARTIAL: {found.broken_off}.  The results here are valid; the rest is missing."
    elif found.missing:
        yield f"MISSING: {fmt.plural(found.missing, 'requested case')}."
    of_inputs = [case for case in found.failed if not exact_answer_is_finite(case)]
    of_kernels = [case for case in found.failed if exact_answer_is_finite(case)]
    if of_inputs:
        where = layer_words([case.layer.index for case in of_inputs])
        yield (
            f"FAILED: the model's inputs, not the kernels.  In {where} the exact answer itself is not finite: weights "
            "or activations hold NaN or infinity, or overflow the output's dtype."
        )
    if of_kernels:
        yield f"FAILED: {len(of_kernels)} of {fmt.plural(found.judged, 'case')}: {case_words(of_kernels)}."
    if found.refused:
        yield f"REFUSED: {case_words(found.refused)}: {_why(found.refused)}"
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
    """The distinct reasons."""
    return ";  ".join(dict.fromkeys(case.reason.rstrip(".") for case in refused)) + "."
