"""The output of `ssdprof accuracy`: a recommendation, and the match table of the chosen precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.text import Text

from ssdprof.errors import BadInputError
from ssdprof.core import words as fmt
from ssdprof.report import terminal
from ssdprof.report.case_words import trouble_words
from ssdprof.report.caveats import caveats
from ssdprof.report.groups import Group, Series, groups, places, precision_order
from ssdprof.report.tables import accuracy
from ssdprof.report.verdict import shortcomings
from ssdprof.schema import CaseResult, DType, Intermediates, PrecisionRecord, RunReport
from ssdprof.schema.outcome import at_precisions, outcome


def accuracy_table(
    report: RunReport,
    intermediates: Intermediates | Literal["all"] = "all",
    state_dtypes: Sequence[DType] = ("fp32", "fp16", "bf16"),
    *,
    every_state: bool = False,
) -> RenderableType:
    """Match percentages against the baseline and fp64, one column per chosen precision, under a verdict.

    Raises BadInputError if the run compared nothing at these precisions; with `every_state`, also if it compared
    nothing at one of the state dtypes.
    """
    kinds: tuple[Intermediates, ...] = ("exact", "relaxed") if intermediates == "all" else (intermediates,)

    def chosen(case: CaseResult) -> bool:
        return case.precision.intermediates in kinds and case.precision.state_dtype in state_dtypes

    found = [
        (_with_baseline(group, name, chosen), name)
        for group in groups(report)
        for name in group.compared
        if any(chosen(case) for case in group.cases if case.implementation == name)
    ]
    held = {case.precision.state_dtype for group, _ in found for case in group.cases if chosen(case)}
    absent = [state for state in state_dtypes if state not in held]
    if not found or (every_state and absent):
        raise _nothing_compared(report, f"{fmt.words(kinds, 'or')} with {fmt.words(absent, 'or')} states")
    parts: list[RenderableType] = [Text(f"{report.checkpoint.repo_id}, run {report.run_id}", style="bold")]
    shown = at_precisions(
        report, [PrecisionRecord(intermediates=kind, state_dtype=state) for kind in kinds for state in state_dtypes]
    )
    parts += [terminal.verdict(line, good=False) for line in shortcomings(outcome(shown))]
    advised: dict[tuple[str, bool], list[Group]] = {}
    for group, name in found:
        series = group.series(name)
        advised.setdefault((advice(series), all(s.within_budget for s in series)), []).append(group)
    parts += [terminal.verdict(_sentence(places(own), text), good=good) for (text, good), own in advised.items()]
    parts += [terminal.bullet(line) for line in caveats(report)]
    for group, name in found:
        for tensor in accuracy.TENSORS:
            if table := accuracy.match(group, name, tensor):
                parts += ["", terminal.SplitTable(table)]
    return Renderables(*parts)


def advice(series: tuple[Series, ...]) -> str:
    """The precisions of an implementation that may be used, judged by the operator's own output."""
    name = series[0].implementation
    good = [s for s in series if s.within_budget]
    bad = "; ".join(f"{s.precision}: {trouble_words(s)}" for s in series if not s.within_budget)
    if not good:
        return f"{name} may not be used at {bad}."
    layers = len({case.layer for s in good for case in s.cases})
    where = "every layer replayed" if layers > 1 else "the layer replayed"
    which = "; ".join(str(s.precision) for s in good)
    text = f"{name} may be used at {which}: within the error budget in {where}."
    return f"{text}  It may not be used at {bad}." if bad else text


def _sentence(where: str, text: str) -> str:
    return f"{where[0].upper()}{where[1:]}, {text}"


def _with_baseline(group: Group, name: str, chosen: Callable[[CaseResult], bool]) -> Group:
    """The chosen cases of an implementation, and every case of the baseline."""
    return group.keep(
        lambda case: chosen(case) if case.implementation == name else case.implementation == group.baseline
    )


def _nothing_compared(report: RunReport, asked: str) -> BadInputError:
    held = {s.precision for group in groups(report) for name in group.compared for s in group.series(name)}
    if held:
        names = "; ".join(str(precision) for precision in sorted(held, key=precision_order))
        return BadInputError(f"Run {report.run_id} compared nothing at {asked}.", f"It compared: {names}.")
    hint = "It ended before its first comparison.  Run again."
    if report.answers:
        hint = "It holds a model's answers: 'ssdprof export' shows them."
    elif report.cases:
        hint = f"It holds {report.baseline} alone."
    return BadInputError(f"Run {report.run_id} compared no implementation with its baseline.", hint)
