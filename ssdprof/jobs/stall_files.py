"""Reads and writes stall reports: JSON, Markdown and pictures.  Imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from ssdprof import files
from ssdprof.core.stalls import STALLS_VERSION, StallReport
from ssdprof.report import markdown, plots, stalls

FOLDER = "stalls"  # in a run's folder
RECORD = "stalls.json"
DOCUMENT = "stalls.md"
_AGAIN = "Profile again, or read it with the ssdprof that wrote it."


def dump(report: StallReport) -> str:
    """One JSON document: the same bytes for the same ncu reports, on every machine."""
    return report.model_dump_json(indent=1)


def load(file: Path) -> StallReport:
    """Reads the output of `dump`.  Raises what `files.read_stored` raises."""
    return files.read_stored(
        file, StallReport.model_validate, STALLS_VERSION, _AGAIN, key="stalls_version"
    )


def of_run(folder: Path) -> StallReport | None:
    """The stall report in a run's folder, if there is one."""
    record = folder / FOLDER / RECORD
    return load(record) if record.is_file() else None


def as_markdown(report: StallReport, figures: Mapping[str, str] | None = None) -> str:
    """The report as Markdown.  figures: title -> file name of a picture in the Markdown's folder,
    from `write_pictures`.
    """
    return markdown.render(stalls.compose(report), figures)


def write(folder: Path, report: StallReport) -> None:
    """Write all files into an existing folder, and replace older ones."""
    files.write_text(folder / RECORD, dump(report) + "\n")
    write_markdown(folder / DOCUMENT, report)


def write_markdown(file: Path, report: StallReport, *, replace: bool = True) -> None:
    """Write a Markdown file, and next to it FILE-roofline.svg and FILE-<design>.svg for each
    design.

    Raises what `files.write_text` raises.
    """
    files.check_target(file, replace=replace)
    figures = write_pictures(file, report)
    files.write_text(file, as_markdown(report, figures).rstrip("\n") + "\n")


def write_pictures(file: Path, report: StallReport) -> dict[str, str]:
    """Write the pictures next to `file`, a Markdown file.  Returns title -> file name."""
    figures = {}
    for name, (title, svg) in pictures(report).items():
        picture = file.with_name(f"{file.stem}-{name}.svg")
        files.write_text(picture, svg)
        figures[title] = picture.name
    return figures


def pictures(report: StallReport) -> dict[str, tuple[str, str]]:
    """Part of a file's name -> (title, SVG)."""
    shown = {}
    for name, (title, drawing) in plots.of_stalls(report).items():
        svg, _ = drawing
        shown[files.safe_name(name)] = title, svg
    return shown
