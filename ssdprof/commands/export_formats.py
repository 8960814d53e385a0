"""The formats of `ssdprof export`: each name has a function that returns the text.

A new format is a line in `FORMATS` and a word in `Format`.  Functions import what they need when they are called.
github is not among them, because it writes to several files: see `github_job`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ssdprof.commands.kept import Kept

Format = Literal["markdown", "html", "json", "junit", "csv", "github", "benchmark-action", "benchmark-action-bigger"]


def _junit(kept: Kept, _output: Path | None) -> str:
    from ssdprof.report.exports import junit

    return junit.render(kept.exported())


def _csv(kept: Kept, _output: Path | None) -> str:
    from ssdprof.report.exports import csv_table

    return csv_table.render(kept.exported())


def _smaller(kept: Kept, _output: Path | None) -> str:
    from ssdprof.report.exports import benchmark_action

    return benchmark_action.smaller(kept.exported())


def _bigger(kept: Kept, _output: Path | None) -> str:
    from ssdprof.report.exports import benchmark_action

    return benchmark_action.bigger(kept.exported())


# called with the stored result and the output file; None for stdout
FORMATS: dict[Format, Callable[[Kept, Path | None], str]] = {
    "markdown": lambda kept, output: kept.markdown(output),
    "html": lambda kept, _output: kept.html(),
    "json": lambda kept, _output: kept.json(),
    "junit": _junit,
    "csv": _csv,
    "benchmark-action": _smaller,
    "benchmark-action-bigger": _bigger,
}
