"""The report on one screen: the subject, a table of speed, one of accuracy, caveats, a pointer, then the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ssdprof.core import words as fmt
from ssdprof.report import terminal
from ssdprof.report.caveats import caveats
from ssdprof.report.document import heading
from ssdprof.report.groups import groups
from ssdprof.report.origin import meanings, origin
from ssdprof.report.statements import nothing_timed
from ssdprof.report.tables import answers, brief, prefill, warm
from ssdprof.report.verdict import GOOD, verdict_lines
from ssdprof.schema import RunReport
from ssdprof.schema.outcome import outcome

_MOST_CAVEATS = 3
_MOST_REASONS = 2
_LONGEST = 170  # characters of a sentence
_MORE = "All layers, plots, what ran: ssdprof export --format html -o report.html"


def render(report: RunReport) -> RenderableType:
    """At most about forty lines of eighty columns."""
    return Group(*_parts(report))


def _parts(report: RunReport) -> Iterator[RenderableType]:
    found = groups(report)
    yield Text(heading(report), style="bold")
    yield terminal.origin(origin(report))
    if untimed := nothing_timed(report):
        yield from ("", Text(f"No speed: {untimed}"))
    for table in (brief.speed(found), brief.accuracy(found)):
        if table:
            yield from ("", terminal.SplitTable(table))
    for table in filter(None, map(warm.total, found)):
        yield from ("", terminal.SplitTable(table))
    for one in report.answers:
        if table := answers.total(one):
            yield from ("", terminal.SplitTable(table))
    if report.prefill and (table := prefill.times(report.prefill)):
        yield from ("", terminal.SplitTable(table))
    if found:
        yield ""
    for word, meaning in meanings(report) if found else ():
        yield Text(f"{word}: {meaning}", style="dim")
    if warnings := caveats(report):
        yield Text("Caveats:", style="yellow")
        yield from (terminal.bullet(_short(line)) for line in warnings[:_MOST_CAVEATS])
        if len(warnings) > _MOST_CAVEATS:
            yield Text(f"  {fmt.plural(len(warnings) - _MOST_CAVEATS, 'more caveat')} with --full.")
    reasons = _reasons(report)
    yield from (terminal.bullet(reason) for reason in reasons[:_MOST_REASONS])
    if len(reasons) > _MOST_REASONS:
        yield Text(f"  {fmt.plural(len(reasons) - _MOST_REASONS, 'more reason')} with --full.")
    yield Text(_MORE, style="dim")
    for line in verdict_lines(report):
        yield terminal.verdict(_short(line), good=line.startswith(GOOD))


def _reasons(report: RunReport) -> list[str]:
    """The distinct reasons of failed cases."""
    found = {case.reason: case for case in reversed(outcome(report).failed) if case.reason}
    return [
        _short(f"layer {case.layer.index}, {case.implementation} ({case.precision}): {reason}")
        for reason, case in reversed(found.items())
    ]


def _short(sentence: str) -> str:
    """Cut after a word."""
    return sentence if len(sentence) <= _LONGEST else f"{sentence[: _LONGEST - 3].rpartition(' ')[0]} ..."
