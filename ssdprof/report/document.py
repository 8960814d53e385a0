"""The contents of a report and their order.  Renderers draw it without changing the contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ssdprof.core import words as fmt
from ssdprof.report.caveats import caveats
from ssdprof.report.groups import Group, groups, tokens
from ssdprof.report.origin import meanings, origin
from ssdprof.report.statements import Statement, statements
from ssdprof.report.tables import Figure, Note, Table, accuracy, answers, prefill, run, speed, warm
from ssdprof.report.verdict import verdict_lines
from ssdprof.schema import RunReport
from ssdprof.schema.outcome import outcome
from ssdprof.schema.prefill import Prefill

Depth = Literal["main", "detail", "file"]
SPEED, ACCURACY = "Speed", "Accuracy"  # titles of the sections to which a page adds pictures


@dataclass(frozen=True, kw_only=True)
class Section:
    """depth: "main" is always visible; "detail" is folded if possible; "file" is too long for a terminal."""

    title: str
    blocks: tuple[Table | Figure | Note | str, ...]
    depth: Depth


@dataclass(frozen=True, kw_only=True)
class Document:
    """origin: (label, value) pairs shown before all numbers."""

    title: str
    origin: tuple[tuple[str, str], ...] = ()
    verdict: tuple[str, ...]
    failed: bool
    summary: tuple[Statement, ...]
    caveats: tuple[str, ...]
    sections: tuple[Section, ...]
    run_id: str


def compose(report: RunReport) -> Document:
    """The whole report: the statements first, then the tables, then every layer."""
    found = groups(report)
    return Document(
        title=heading(report),
        origin=origin(report),
        verdict=verdict_lines(report),
        failed=not outcome(report).passed,
        summary=statements(report),
        caveats=caveats(report),
        sections=tuple(section for section in _sections(report, found) if section.blocks),
        run_id=report.run_id,
    )


def heading(report: RunReport) -> str:
    """ "ssdprof: mamba2-2.7b, 131,072 tokens, NVIDIA H200"."""
    gpu = report.environment.gpu
    parts = (report.checkpoint.repo_id, _lengths(report), gpu.name if gpu else "no GPU")
    return f"ssdprof: {', '.join(part for part in parts if part)}"


def _lengths(report: RunReport) -> str:
    """ "131,072 and 1,024 tokens"; empty if nothing ran."""
    if found := groups(report):
        return tokens(found)
    lengths = [f"{one.seqlen:,}" for one in report.answers]
    return f"{fmt.words(lengths)} tokens" if lengths else ""


def _sections(report: RunReport, found: tuple[Group, ...]) -> Iterator[Section]:
    yield _section("Failures and refusals", "main", run.failures(report))
    speeds = [table for group in found if (table := speed.total(group))]
    yield _section(SPEED, "main", *speeds, speed.READING if speeds else None)
    yield _section("Warm clock", "main", *(warm.total(group) for group in found))
    matches = [table for group in found for table in _accuracy(group) if table]
    yield _section(ACCURACY, "main", *matches, accuracy.READING if matches else None)
    compared = [table for one in report.answers for table in (answers.total(one), answers.by_layer(one)) if table]
    yield _section("Answers", "main", *compared, answers.READING if compared else None)
    if report.prefill:
        yield from prefill_sections(report.prefill)
    yield _section("Remarks", "main", run.remarks(report))
    yield _section("Words", "main", _words(report) if found else None)
    yield _section("What ran", "main", run.facts(report))
    yield _section("Kernels as they were launched", "detail", run.launches(report))
    for one in report.answers:
        yield _section(f"Answers by position at {fmt.tokens(one.seqlen)}", "detail", answers.by_position(one))
    for group in found:
        yield _section(f"Speed of each layer {group.where}", "detail", speed.per_layer(group))
    for group in found:
        made = (make(group, name) for name in group.compared for make in (accuracy.by_layer, accuracy.largest))
        yield _section(f"Errors by layer and position {group.where}", "detail", *made)
    for group in found:
        own = (accuracy.match(group, group.baseline, tensor) for tensor in accuracy.TENSORS)
        yield _section(f"Accuracy of {group.baseline} at other precisions, {group.where}", "file", *own)
    for group in found:
        if len(group.layers) > 1:
            for layer in group.layers:
                yield _section(
                    f"Accuracy of layer {layer.index} ({layer.name}) {group.where}",
                    "file",
                    *_accuracy(group.at_layer(layer)),
                )


def _words(report: RunReport) -> Table:
    return Table(title="Words", headers=("word", "meaning"), rows=meanings(report), align=("left", "left"), wraps=1)


def _accuracy(group: Group) -> Iterator[Table | None]:
    for name in group.compared:
        for tensor in accuracy.TENSORS:
            yield accuracy.match(group, name, tensor)


def prefill_sections(found: Prefill) -> Iterator[Section]:
    """The time of the whole model, and the share of its parts."""
    times = prefill.times(found)
    yield _section("Prefill time", "main", times, prefill.reading(found) if times else None)
    yield _section("Prefills not timed, and predictions", "main", *prefill.failures(found), *prefill.differences(found))
    yield _section(
        "Where the time of a prefill goes", "main", *(prefill.parts(found, length) for length in found.lengths)
    )
    yield _section("Kernels of a prefill", "detail", prefill.ran(found))
    yield _section("Steps of the prefill times", "detail", prefill.steps(found))


def _section(title: str, depth: Depth, *blocks: Table | Note | str | None) -> Section:
    return Section(title=title, depth=depth, blocks=tuple(block for block in blocks if block))
