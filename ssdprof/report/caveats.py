"""Caveats of a run's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.core import words as fmt
from ssdprof.report.case_words import case_words, precision_words
from ssdprof.report.groups import Group, groups, precision_order
from ssdprof.schema import CaseResult, Clocks, PrecisionRecord, RunReport

_SAME_AS = "the same as "  # the start of the part of a plan that names a precision with equal results


def caveats(report: RunReport) -> tuple[str, ...]:
    """The run's own notes, and caveats that follow from the results."""
    return (*_of_results(report), *report.notes)


def throttled(clocks: Clocks | None) -> Iterator[str]:
    """A caveat if the GPU slowed down while it was timed."""
    if clocks and clocks.throttle_reasons:
        yield (
            f"The GPU throttled while it was timed ({', '.join(clocks.throttle_reasons)}): absolute times are too "
            "long.  Speedups are valid, because the implementations were timed in turns."
        )


def _of_results(report: RunReport) -> Iterator[str]:
    yield from throttled(report.clocks)
    if report.checkpoint.source == "demo" and any(case.timing for case in report.cases):
        yield "The built-in demo model is too small to fill a GPU: its times do not represent a real model's."
    yield from _of_libraries(report)
    yield from _equal_precisions(report)
    for group in groups(report):
        chunks = {case.dims.chunk_size for case in group.cases if case.dims.chunk_size is not None}
        if chunks and (longest := _longest_sequence(report, group)) is not None and longest <= min(chunks):
            one = group.tokens if group.call is None else f"A sequence of at most {fmt.tokens(longest)}"
            are = "are" if group.call is None and group.seqlen > 1 else "is"
            yield (
                f"{one} {are} no more than one chunk of {fmt.words(map(str, sorted(chunks)), 'or')}: no state "
                "is passed on, so the dtype of the states is not tested."
            )


def _of_libraries(report: RunReport) -> Iterator[str]:
    """Caveats on other libraries, which do not fail a run."""
    own = [case for case in report.cases if case.implementation in report.libraries]
    troubles: dict[tuple[str, str], list[CaseResult]] = {}
    for case in own:
        if case.status != "passed":
            troubles.setdefault((case.implementation, case.reason), []).append(case)
    for (_, reason), cases in troubles.items():
        yield f"Without a time: {case_words(cases)}: {reason.rstrip('.')}."
    sloppy = [case for case in own if case.status == "passed" and not all(one.passed for one in case.accuracy)]
    if sloppy:
        yield f"Outside the error budget, but timed because it is another library's: {case_words(sloppy)}."


def _longest_sequence(report: RunReport, group: Group) -> int | None:
    """Tokens of the group's longest sequence; None if a call begins with a state."""
    if group.call is None or (group.call.kind == "chunk" and group.call.count == 1):
        return group.seqlen
    if group.call.kind != "packed":
        return None
    return max(length for prompt in report.prompts for length in prompt.serving.packed)


def _equal_precisions(report: RunReport) -> Iterator[str]:
    """The precisions of an implementation that give the same bits as another one, from the plans of its cases."""
    found: dict[tuple[str, str], dict[PrecisionRecord, None]] = {}
    for case in report.cases:
        for part in case.plan.split("; "):
            if part.startswith(_SAME_AS):
                found.setdefault((case.implementation, part.removeprefix(_SAME_AS)), {})[case.precision] = None
    for (implementation, other), precisions in found.items():
        asked = {precision_words(case.precision) for case in report.cases if case.implementation == implementation}
        which = fmt.words(precision_words(one) for one in sorted(precisions, key=precision_order))
        if asked <= {other, *map(precision_words, precisions)}:
            which = "every precision"
        said = f"{implementation} computes {which} as {other}: results are bitwise the same"
        if any(case.timing for case in report.cases):
            said += ", and so is the time.  Speedups differ where each is over the baseline at its own state dtype"
        yield f"{said}."
