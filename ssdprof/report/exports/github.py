"""What a job of GitHub Actions shows: a step summary, annotations and outputs, within GitHub's limits.

https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ssdprof.report import format as fmt
from ssdprof.report import markdown, summary
from ssdprof.schema import RunReport
from ssdprof.schema.outcome import outcome
from ssdprof.schema.rows import of_run

SUMMARY_BYTES = 1024 * 1024  # of a step; GitHub shows nothing of a longer one
MOST_ANNOTATIONS = 10  # of a kind in a step; GitHub drops the others without a word
LONGEST_MESSAGE = 4_000  # characters
_CUT = "\n\nCut here: a step summary of GitHub holds 1 MiB.  `ssdprof export --format markdown` writes all of it.\n"


def step_summary(report: RunReport, used_bytes: int = 0) -> str:
    """The report as Markdown.  used_bytes: what the step's summary holds already.  Too long a report is cut, and says
    so; if there is no room for that either, nothing is left to append."""
    room = SUMMARY_BYTES - used_bytes
    text = markdown.render(report, limit_bytes=min(markdown.LIMIT_BYTES, room))
    encoded = text.encode()
    if len(encoded) <= room:
        return text
    if room < len(_CUT):
        return ""
    whole = encoded[: room - len(_CUT)].decode(errors="ignore")
    return whole.rsplit("\n", 1)[0] + _CUT


def workflow_commands(report: RunReport) -> Iterator[str]:
    """Annotations, a line each: errors for what keeps the run from passing, warnings for its caveats."""
    found = outcome(report)
    lines = list(summary.shortcomings(found))
    if not found.judged:
        lines.append("Nothing was compared.")
    yield from _commands("error", f"ssdprof: {report.checkpoint.repo_id}", lines)
    yield from _commands("warning", f"ssdprof: {report.checkpoint.repo_id}", summary.caveats(report))


def outputs(report: RunReport) -> dict[str, str]:
    """Outputs of the step.  The last three are the worst of the rows that gates judge, and empty if there are none."""
    found = outcome(report)
    rows = [row for row in of_run(report) if row.gated and row.status == "passed"]
    speedups = [row.speedup.device_ratio for row in rows if row.speedup]
    errors = [row.out for row in rows if row.out]
    matches = [match for one in errors if (match := one.match_pct(1e-3)) is not None]
    ratios = [ratio for one in errors if (ratio := one.over_floor) is not None]
    return {
        "passed": "true" if found.passed else "false",
        "verdict": _cut(" ".join(" ".join(summary.verdict(report)).split())),
        "run": report.run_id,
        "least-speedup": _number(min(speedups, default=None)),
        "least-match": _number(min(matches, default=None)),
        "largest-rms-ratio": _number(max(ratios, default=None)),
    }


def _commands(kind: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    every = list(lines)
    shown = every if len(every) <= MOST_ANNOTATIONS else every[: MOST_ANNOTATIONS - 1]
    for line in shown:
        yield f"::{kind} title={_property(title)}::{_data(_cut(line))}"
    if rest := len(every) - len(shown):
        yield f"::{kind} title={_property(title)}::{fmt.plural(rest, 'line')} more: see the summary of this step."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 3]}..."


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
