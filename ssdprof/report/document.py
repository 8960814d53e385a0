"""What a report says, in which order.  Renderers draw it; none of them decides what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ssdprof.report import summary
from ssdprof.report.groups import Group, groups, tokens
from ssdprof.report.tables import Figure, Note, Table, accuracy, run, speed
from ssdprof.schema import RunReport
from ssdprof.schema.outcome import outcome

Depth = Literal["main", "detail", "file"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """depth: "main" is always in sight; "detail" is folded where it can be; "file" is too long for a terminal."""

    title: str
    blocks: tuple[Table | Figure | Note | str, ...]
    depth: Depth


@dataclass(frozen=True, kw_only=True)
class Document:
    title: str
    verdict: tuple[str, ...]
    failed: bool
    summary: tuple[summary.Statement, ...]
    caveats: tuple[str, ...]
    sections: tuple[Section, ...]
    run_id: str


def compose(report: RunReport) -> Document:
    """The whole report: the answer first, then the tables behind it, then every layer."""
    found = groups(report)
    gpu = report.environment.gpu
    parts = (report.checkpoint.repo_id, tokens(found) if found else "", gpu.name if gpu else "no GPU")
    return Document(
        title=f"ssdprof: {', '.join(part for part in parts if part)}",
        verdict=summary.verdict(report),
        failed=not outcome(report).passed,
        summary=summary.statements(report),
        caveats=summary.caveats(report),
        sections=tuple(section for section in _sections(report, found) if section.blocks),
        run_id=report.run_id,
    )


def _sections(report: RunReport, found: tuple[Group, ...]) -> Iterator[Section]:
    yield _section("Failures and refusals", "main", run.failures(report))
    speeds = [table for group in found if (table := speed.total(group))]
    yield _section("Speed", "main", *speeds, speed.READING if speeds else None)
    matches = [table for group in found for table in _accuracy(group) if table]
    yield _section("Accuracy", "main", *matches, accuracy.READING if matches else None)
    yield _section("Remarks", "main", run.remarks(report))
    yield _section("What ran", "main", run.facts(report))
    yield _section("Kernels as they were launched", "detail", run.launches(report))
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


def _accuracy(group: Group) -> Iterator[Table | None]:
    for name in group.compared:
        for tensor in accuracy.TENSORS:
            yield accuracy.match(group, name, tensor)


def _section(title: str, depth: Depth, *blocks: Table | Note | str | None) -> Section:
    return Section(title=title, depth=depth, blocks=tuple(block for block in blocks if block))
