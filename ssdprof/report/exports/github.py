"""The output for a GitHub Actions job: a step summary, annotations and outputs, within GitHub's limits.

https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ssdprof.core import words as fmt
from ssdprof.report import markdown
from ssdprof.report.exports.exported import Exported

SUMMARY_BYTES = 1024 * 1024  # of a step; GitHub shows nothing of a longer one
MOST_ANNOTATIONS = 10  # of a kind in a step; GitHub silently drops the others
LONGEST_MESSAGE = 4_000  # characters
_CUT = "\n\nCut here: a step summary of GitHub holds 1 MiB.  `ssdprof export --format markdown` writes all of it.\n"


def step_summary(exported: Exported, used_bytes: int = 0) -> str:
    """The report as Markdown.  used_bytes: present size of the step's summary.

    A report that is too long is cut, with a note; empty if there is no room for the note."""
    room = SUMMARY_BYTES - used_bytes
    text = exported.markdown(min(markdown.LIMIT_BYTES, room))
    encoded = text.encode()
    if len(encoded) <= room:
        return text
    if room < len(_CUT):
        return ""
    whole = encoded[: room - len(_CUT)].decode(errors="ignore")
    return whole.rsplit("\n", 1)[0] + _CUT


def workflow_commands(exported: Exported) -> Iterator[str]:
    """Annotations, one line each: errors for the reasons why it did not pass, warnings for its caveats."""
    yield from _commands("error", f"ssdprof: {exported.subject}", exported.errors)
    yield from _commands("warning", f"ssdprof: {exported.subject}", exported.caveats)


def outputs(exported: Exported) -> dict[str, str]:
    """Outputs of the step.  The last three are the worst values of rows that gates judge; empty without such rows."""
    rows = [row for row in exported.rows if row.gated and row.status == "passed"]
    speedups = [speedup[0] for row in rows if (speedup := row.over_baseline)]
    errors = [row.out for row in rows if row.out]
    matches = [match for one in errors if (match := one.match_pct(1e-3)) is not None]
    ratios = [ratio for one in errors if (ratio := one.over_floor) is not None]
    return {
        "passed": "true" if exported.passed else "false",
        "verdict": _cut(" ".join(" ".join(exported.verdict).split())),
        "run": exported.identity,
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
