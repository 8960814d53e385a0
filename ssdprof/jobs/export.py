"""A report as the text of a file, in any format, with the stalls that belong to it."""

from collections.abc import Container
from pathlib import Path

from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, nearest
from ssdprof.jobs import stall_files
from ssdprof.report import exports, html, markdown
from ssdprof.report.document import compose
from ssdprof.store import reports

OF_SUFFIX = {
    ".md": "markdown",
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".xml": "junit",
    ".csv": "csv",
}


def format_of(file: Path, formats: Container[str] = OF_SUFFIX.values()) -> str:
    """The format of the file's suffix, one of `formats`; Markdown without a suffix.  Raises
    BadInputError for any other suffix.
    """
    format = OF_SUFFIX.get(file.suffix.lower(), "" if file.suffix else "markdown")
    if format in formats:
        return format
    suffixes = ", ".join(suffix for suffix, named in OF_SUFFIX.items() if named in formats)
    raise BadInputError(
        f"{file}: no format has the suffix {file.suffix}.",
        f"End the name with one of {suffixes}, or name the format.",
    )


def exported(format: str, folder: Path | None, report: Report, target: Path | None = None) -> str:
    """The text of a report.  Markdown and HTML have the stalls of a run, with pictures next to the
    target.
    """
    profiled = stall_files.of_run(folder) if folder else None
    if format == "html":
        return html.render(report, profiled)
    if format == "markdown":
        text = markdown.render(compose(report))
        if profiled is None:
            return text
        figures = stall_files.write_pictures(target, profiled) if target else {}
        return f"{text}\n{stall_files.as_markdown(profiled, figures)}"
    known = {
        "json": reports.dump,
        "baseline": exports.baseline,
        "junit": exports.junit,
        "csv": exports.csv,
    }
    if format not in known:
        raise BadInputError(
            f"There is no format {format!r}.", nearest(format, ("html", "markdown", *known))
        )
    return known[format](report)
