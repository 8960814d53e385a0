"""The contents and order of a report on stalls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ssdprof.report import format as fmt
from ssdprof.report.document import Depth, Document, Section
from ssdprof.report.stall_groups import KernelGroup, groups
from ssdprof.report.statements import Statement
from ssdprof.report.tables import Figure, Note, Table, stall_origin, stalls
from ssdprof.schema.stalls import StallReport

_WORTH_PCT = 1.0  # per stage in the summary


def compose(report: StallReport, figures: Mapping[str, str] | None = None) -> Document:
    """The whole report: statements on the stages, then the tables.  figures: title -> path relative to the document."""
    found = groups(report)
    parts = ["ssdprof stalls"]
    if report.layer and report.dims:
        parts += [report.model.split(",")[0], report.layer.name, fmt.tokens(report.dims.seqlen), str(report.precision)]
    parts.append(report.gpu)
    return Document(
        title=", ".join(part for part in parts if part),
        verdict=tuple(_verdict(report, found)),
        failed=bool(report.missing) or any(_failed(report)),
        summary=tuple(_statements(found)),
        caveats=(*_failed(report), *_lacking(report), *_unlabelled(report)),
        sections=tuple(section for section in _sections(report, found, figures or {}) if section.blocks),
        run_id="",
    )


def _verdict(report: StallReport, found: tuple[KernelGroup, ...]) -> Iterator[str]:
    if report.missing:
        yield f"No stalls: {report.missing}"
    for group in found:
        if len(group.kernels) > 1 and group.duration_us is not None:
            yield f"{group.name}: {fmt.duration(group.duration_us)} in {len(group.kernels)} kernels."
        elif group.duration_us is not None:
            yield f"{group.name}: {fmt.duration(group.duration_us)} in one kernel."


def _statements(found: tuple[KernelGroup, ...]) -> Iterator[Statement]:
    """A sentence per stage: its share of the time, its parts, and its stall reasons."""
    for group in found:
        for name, whole in group.whole().items():
            if whole.pct < _WORTH_PCT:
                continue
            parts = {part: share for part, share in group.stages.items() if part.split(".")[0] == name}
            said = []
            for part, share in parts.items():
                if share.pct < _WORTH_PCT:
                    continue
                main = [f"{reason} {pct:.0f}%" for reason, pct in share.most[:3] if pct >= _WORTH_PCT]
                where = "elsewhere" if part == name else group.part(part)
                what = "" if part == name and len(parts) == 1 else f"{share.pct:.0f}% {where}"
                said.append(" ".join(word for word in (what, f"({', '.join(main)})" if main else "") if word))
            details = "; ".join(filter(None, said))
            separator = " " if not details or details.startswith("(") else ": "
            text = f"{whole.pct:.0f}%{separator}{details}".rstrip()
            yield Statement(f"{group.name}, {name}:" if len(found) > 1 else f"{name}:", f"{text}.")


def _sections(report: StallReport, found: tuple[KernelGroup, ...], figures: Mapping[str, str]) -> Iterator[Section]:
    yield _section("Kernel resources", "main", stalls.launched(report) if report.missing else None)
    yield _section("Kernels", "main", stalls.kernels(report), stalls.resources(report))
    yield _section("Figures", "main", *(Figure(title, file) for title, file in figures.items()))
    tables = [table for group in found if (table := stalls.by_stage(group))]
    if tables:
        yield _section("Stages and stall reasons", "main", stalls.side_by_side(found), *tables, stalls.READING)
    yield _section("Stall reasons", "main", stalls.averages(report))
    yield _section("Hints", "main", stalls.hints(found))
    yield _section("Hottest lines", "main", *(stalls.hottest(group) for group in found))
    yield _section("What the reasons mean", "detail", *(stalls.reasons(group) for group in found))
    yield _section("Self-checks", "detail", stall_origin.checks(report))
    yield _section("What was profiled", "detail", stall_origin.facts(report))


def _failed(report: StallReport) -> Iterator[str]:
    for check in report.checks:
        if check.status == "failed":
            yield f"A self-check failed: {check.name}: {check.detail}."
    for kernel in report.kernels:
        for check in kernel.checks:
            if check.status == "failed":
                yield f"A self-check of {kernel.kernel} failed: {check.name}: {check.detail}."


def _lacking(report: StallReport) -> Iterator[str]:
    """Sentences on unavailable implementations, and on those that lack the requested precision."""
    yield from report.left_out
    for one in report.launched:
        if one.precision != report.precision:
            yield f"{one.implementation} ran with {one.precision}: it does not have {report.precision}."


def _unlabelled(report: StallReport) -> Iterator[str]:
    """Sentences on files whose stages are unknown."""
    files: dict[str, list[str]] = {}
    for kernel in report.kernels:
        for file in kernel.unlabelled:
            files.setdefault(file, []).append(kernel.kernel)
    for file, kernels in files.items():
        yield (
            f"The stages of {file} are not known ({fmt.words(dict.fromkeys(kernels))}): its samples are listed by "
            "function, and by line under the hottest lines."
        )


def _section(title: str, depth: Depth, *blocks: Table | Figure | Note | str | None) -> Section:
    return Section(title=title, depth=depth, blocks=tuple(block for block in blocks if block))
