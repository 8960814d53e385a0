"""The formats of `ssdprof export`: a name, and the function that makes the text of a kept run.

A new format is a line in `FORMATS` and a word in `Format`.  Functions import what they need when they are called.
github is none of them, because it writes to files of its own: see `github_job`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ssdprof.schema import RunReport

Format = Literal["markdown", "html", "json", "junit", "csv", "github", "benchmark-action", "benchmark-action-bigger"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A run that is kept.  output: the file that its text goes to; None for stdout.  Pictures go beside it."""

    folder: Path
    report: RunReport
    output: Path | None


def _markdown(kept: Kept) -> str:
    from ssdprof.pipeline import stall_files
    from ssdprof.report import markdown

    text = markdown.render(kept.report)
    stalls = stall_files.of_run(kept.folder)
    if stalls is None:
        return text
    figures = stall_files.write_pictures(kept.output, stalls) if kept.output else {}
    return f"{text}\n{stall_files.as_markdown(stalls, figures)}"


def _html(kept: Kept) -> str:
    from ssdprof.pipeline import stall_files
    from ssdprof.report import html

    return html.render(kept.report, stall_files.of_run(kept.folder))


def _json(kept: Kept) -> str:
    from ssdprof.runs import document

    return document.dump(kept.report)


def _junit(kept: Kept) -> str:
    from ssdprof.report.exports import junit

    return junit.render(kept.report)


def _csv(kept: Kept) -> str:
    from ssdprof.report.exports import csv_table

    return csv_table.render(kept.report)


def _smaller(kept: Kept) -> str:
    from ssdprof.report.exports import benchmark_action

    return benchmark_action.smaller(kept.report)


def _bigger(kept: Kept) -> str:
    from ssdprof.report.exports import benchmark_action

    return benchmark_action.bigger(kept.report)


FORMATS: dict[Format, Callable[[Kept], str]] = {
    "markdown": _markdown,
    "html": _html,
    "json": _json,
    "junit": _junit,
    "csv": _csv,
    "benchmark-action": _smaller,
    "benchmark-action-bigger": _bigger,
}
