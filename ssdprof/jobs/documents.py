"""Reports, and the stall reports that belong to them, as files in every format.

Imports no torch.
"""

from collections.abc import Container, Mapping
from pathlib import Path

from ssdprof import files
from ssdprof.core.report import Report
from ssdprof.core.stalls import STALLS_VERSION, StallReport
from ssdprof.errors import BadInputError, nearest
from ssdprof.report import exports, html, markdown, plots, stalls
from ssdprof.report.document import compose
from ssdprof.store import reports

STALLS_FOLDER = "stalls"  # in a run's folder
STALLS_RECORD = "stalls.json"
STALLS_DOCUMENT = "stalls.md"
_VERSION_HINT = "Profile again, or read it with the ssdprof that wrote it."
FORMATS_BY_SUFFIX = {
    ".md": "markdown",
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".xml": "junit",
    ".csv": "csv",
}


def format_of(file: Path, formats: Container[str] = FORMATS_BY_SUFFIX.values()) -> str:
    """The format that the file's suffix names; Markdown for a file without a suffix.

    formats: those that are possible, Markdown among them.  Raises BadInputError if the suffix names
    none of them.
    """
    format = FORMATS_BY_SUFFIX.get(file.suffix.lower(), "" if file.suffix else "markdown")
    if format in formats:
        return format
    suffixes = ", ".join(suffix for suffix, known in FORMATS_BY_SUFFIX.items() if known in formats)
    raise BadInputError(
        f"{file}: no possible format has the suffix {file.suffix}.",
        f"End the name with one of {suffixes}, or name the format.",
    )


def exported(format: str, folder: Path | None, report: Report, target: Path | None = None) -> str:
    """The text of a report in this format, which may be any of `FORMATS_BY_SUFFIX`, or "baseline".
    Raises BadInputError for an unknown one, and for a damaged stall report.

    folder: the report's folder, whose stalls Markdown and HTML show, if there are any; None: no
        stalls are shown.
    target: the Markdown file for which the text is meant.  The pictures of the stalls are written
        next to it; None: the text has no pictures.
    """
    profiled = stalls_of_run(folder) if folder else None
    if format == "html":
        return html.render(report, profiled)
    if format == "markdown":
        text = markdown.render(compose(report))
        if profiled is None:
            return text
        figures = write_pictures(target, profiled) if target else {}
        return f"{text}\n{stalls_as_markdown(profiled, figures)}"
    renderers = {
        "json": reports.dump,
        "baseline": exports.baseline,
        "junit": exports.junit,
        "csv": exports.csv,
    }
    if format not in renderers:
        known = ("html", "markdown", *renderers)
        raise BadInputError(f"There is no format {format!r}.", nearest(format, known))
    return renderers[format](report)


# --- stall reports


def dump_stalls(report: StallReport) -> str:
    """The report as JSON.  What was read from reports of ncu alone (`stalls --from`) gives the same
    bytes on every machine; what was profiled also has the time and the machine.
    """
    return report.model_dump_json(indent=1)


def load_stalls(file: Path) -> StallReport:
    """Read the output of `dump_stalls`.  Raises what `files.read_stored` raises."""
    return files.read_stored(
        file, StallReport.model_validate, STALLS_VERSION, _VERSION_HINT, key="stalls_version"
    )


def stalls_of_run(folder: Path) -> StallReport | None:
    """The stall report in a run's folder; None if there is none.  Raises as `load_stalls` does."""
    record = folder / STALLS_FOLDER / STALLS_RECORD
    return load_stalls(record) if record.is_file() else None


def stalls_as_markdown(report: StallReport, figures: Mapping[str, str] | None = None) -> str:
    """The report as Markdown.

    figures: title -> file name of a picture in the folder of the Markdown file, from
    `write_pictures`.
    """
    return markdown.render(stalls.compose(report), figures)


def write_stalls(folder: Path, report: StallReport) -> None:
    """Write the report as JSON and as Markdown with pictures into an existing folder.  Replaces
    older files of the same names.
    """
    files.write_text(folder / STALLS_RECORD, dump_stalls(report) + "\n")
    write_stalls_markdown(folder / STALLS_DOCUMENT, report)


def write_stalls_markdown(file: Path, report: StallReport, *, replace: bool = True) -> None:
    """Write a Markdown file, and its pictures (`plots.of_stalls`) next to it: for stalls.md files
    such as stalls-roofline.svg and stalls-fused.svg.

    replace: overwrite the Markdown file.  Pictures are overwritten in any case.
    Raises what `files.write_text` raises.
    """
    files.check_target(file, replace=replace)
    figures = write_pictures(file, report)
    files.write_text(file, stalls_as_markdown(report, figures).rstrip("\n") + "\n")


def write_pictures(file: Path, report: StallReport) -> dict[str, str]:
    """Write the pictures next to `file`, a Markdown file.  Returns title -> file name."""
    figures = {}
    for name, (title, svg) in pictures(report).items():
        picture = file.with_name(f"{file.stem}-{name}.svg")
        files.write_text(picture, svg)
        figures[title] = picture.name
    return figures


def pictures(report: StallReport) -> dict[str, tuple[str, str]]:
    """The end of a picture's file name -> its title, and the picture as SVG."""
    shown = {}
    for name, (title, drawing) in plots.of_stalls(report).items():
        svg, _ = drawing  # and its data, which HTML shows
        shown[files.safe_name(name)] = title, svg
    return shown
