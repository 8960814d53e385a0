"""The contents and order of a report on stalls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ssdprof.core import words as fmt
from ssdprof.report.document import Depth, Document, Section
from ssdprof.report.stall_groups import Design, designs
from ssdprof.report.statements import Statement
from ssdprof.report.tables import Figure, Note, Table, stall_origin, stalls
from ssdprof.schema.stalls import StallReport

_WORTH_PCT = 1.0  # per stage in the summary


def compose(report: StallReport, figures: Mapping[str, str] | None = None) -> Document:
    """The whole report: statements on the stages, then the tables.  figures: title -> path relative to the document."""
    found = designs(report)
    subject = report.subject
    parts = [
        "ssdprof stalls",
        *(
            [subject.model.split(",")[0], subject.layer.name, fmt.tokens(subject.dims.seqlen), str(subject.precision)]
            if subject
            else ()
        ),
        report.gpu,
    ]
    return Document(
        title=", ".join(part for part in parts if part),
        verdict=tuple(_verdict(report, found)),
        failed=bool(report.missing) or any(_failed(report)),
        summary=tuple(_statements(found)),
        caveats=(*_failed(report), *_lacking(report), *_unlabelled(report)),
        sections=tuple(section for section in _sections(report, found, figures or {}) if section.blocks),
        run_id="",
    )


def _verdict(report: StallReport, found: tuple[Design, ...]) -> Iterator[str]:
    if report.missing:
        yield f"No stalls: {report.missing}"
    for design in found:
        if len(design.kernels) > 1 and design.duration_us is not None:
            yield f"{design.name}: {fmt.duration(design.duration_us)} in {len(design.kernels)} kernels."
        elif design.duration_us is not None:
            yield f"{design.name}: {fmt.duration(design.duration_us)} in one kernel."


def _statements(found: tuple[Design, ...]) -> Iterator[Statement]:
    """A sentence per stage: its share of the time, its parts, and its stall reasons."""
    for design in found:
        for name, whole in design.whole().items():
            if whole.pct < _WORTH_PCT:
                continue
            parts = {part: share for part, share in design.stages.items() if part.split(".")[0] == name}
            said = []
            for part, share in parts.items():
                if share.pct < _WORTH_PCT:
                    continue
                main = [f"{reason} {pct:.0f}%" for reason, pct in share.most[:3] if pct >= _WORTH_PCT]
                where = "elsewhere" if part == name else design.part(part)
                what = "" if part == name and len(parts) == 1 else f"{share.pct:.0f}% {where}"
                said.append(" ".join(word for word in (what, f"({', '.join(main)})" if main else "") if word))
            details = "; ".join(filter(None, said))
            separator = " " if not details or details.startswith("(") else ": "
            text = f"{whole.pct:.0f}%{separator}{details}".rstrip()
            yield Statement(f"{design.name}, {name}:" if len(found) > 1 else f"{name}:", f"{text}.")


def _sections(report: StallReport, found: tuple[Design, ...], figures: Mapping[str, str]) -> Iterator[Section]:
    yield _section("Kernel resources", "main", stalls.launched(report) if report.missing else None)
    yield _section("Kernels", "main", stalls.kernels(report), stalls.resources(report))
    yield _section("Figures", "main", *(Figure(title, file) for title, file in figures.items()))
    tables = [table for design in found if (table := stalls.by_stage(design))]
    if tables:
        yield _section("Stages and stall reasons", "main", stalls.side_by_side(found), *tables, stalls.READING)
    yield _section("Stall reasons", "main", stalls.averages(report))
    yield _section("Hints", "main", stalls.hints(found))
    yield _section("Hottest lines", "main", *(stalls.hottest(design) for design in found))
    yield _section("What the reasons mean", "detail", *(stalls.reasons(design) for design in found))
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
    subject = report.subject
    yield from subject.left_out if subject else ()
    for one in subject.launched if subject else ():
        if subject and one.precision not in (None, subject.precision):
            yield f"{one.implementation} ran with {one.precision}: it does not have {subject.precision}."


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
