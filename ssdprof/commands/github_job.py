"""Reports a run or a bench to the GitHub Actions job in which this process is a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdprof.report.exports.exported import Exported

SUMMARY = "GITHUB_STEP_SUMMARY"
OUTPUT = "GITHUB_OUTPUT"


def check() -> None:
    """Raises BadInputError outside of a job."""
    from ssdprof.errors import BadInputError

    if not (os.environ.get(SUMMARY) and os.environ.get(OUTPUT)):
        raise BadInputError(
            f"--format github is for a step of GitHub Actions, which sets {SUMMARY} and {OUTPUT}.",
            "Elsewhere take --format markdown, or name files with these variables.",
        )


def write(exported: Exported) -> None:
    """Append the summary and the outputs to the files that GitHub names, and print the annotations on stdout."""
    from ssdprof import files
    from ssdprof.report.exports import github

    summary = Path(os.environ[SUMMARY])
    used = summary.stat().st_size if summary.is_file() else 0
    files.append_text(summary, github.step_summary(exported, used))
    lines = (f"{name}={value}\n" for name, value in github.outputs(exported).items())
    files.append_text(Path(os.environ[OUTPUT]), "".join(lines))
    for line in github.workflow_commands(exported):
        print(line)
