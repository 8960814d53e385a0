"""A stall report as files: JSON, Markdown, and pictures that open from the Markdown's folder."""

from __future__ import annotations

from pathlib import Path

from ssdprof import runs
from ssdprof.report import markdown, stall_document
from ssdprof.report import stall_words as words
from ssdprof.report.stall_groups import designs
from ssdprof.stall_records import StallReport
from ssdprof.stalls import plots

RECORD = "stalls.json"
DOCUMENT = "stalls.md"


def dump(report: StallReport) -> str:
    """One JSON document: the same bytes for the same ncu reports, on every machine."""
    return report.model_dump_json(indent=1)


def write(folder: Path, report: StallReport) -> None:
    """Everything, into a folder that exists: what was there before is replaced."""
    runs.write_text(folder / RECORD, dump(report) + "\n")
    write_markdown(folder / DOCUMENT, report)


def write_markdown(file: Path, report: StallReport, *, replace: bool = True) -> None:
    """A Markdown file, and its pictures beside it: FILE-roofline.svg and a FILE-<design>.svg for each design.

    Raises what `runs.write_text` raises.
    """
    runs.check_target(file, replace=replace)
    figures = {}
    for name, (title, svg) in pictures(report).items():
        picture = file.with_name(f"{file.stem}-{name}.svg")
        runs.write_text(picture, svg)
        figures[title] = picture.name
    document = stall_document.compose(report, figures)
    runs.write_text(file, markdown.render_document(document).rstrip("\n") + "\n")


def pictures(report: StallReport) -> dict[str, tuple[str, str]]:
    """Name -> (title, SVG)."""
    found: dict[str, tuple[str, str]] = {}
    for design in designs(report):
        if design.is_sampled:
            title = f"{design.name}: stages and stall reasons"
            bars = {_label(name): share.reasons for name, share in design.stages.items()}
            found[runs.safe_name(design.name)] = (title, plots.stages(bars, title))
    roofline = plots.roofline(report)
    return found if roofline is None else found | {"roofline": ("Roofline", roofline)}


def _label(stage: str) -> str:
    return f"{stage.split('.')[0]}: {words.part(stage)}" if "." in stage else stage
