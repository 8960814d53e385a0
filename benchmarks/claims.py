"""Fill the table of published claims from the recorded results, and judge each of them.

    python benchmarks/claims.py

Reads and writes published/claims.csv, a row for each number that a claim rests on, and the counts
in published/README.md.  published/README.md explains the columns; sources.toml has the sources.
"""

from __future__ import annotations

import csv
import io
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import recorded
from recorded import RESULTS, Cell, RecordedCase

from ssdprof.core import words as fmt
from ssdprof.core.base import intermediates_of, states_of
from ssdprof.core.case import Prefill
from ssdprof.core.report import Report
from ssdprof.core.stalls import KernelStalls, StallReport, StallSamples
from ssdprof.files import write_text
from ssdprof.jobs import documents
from ssdprof.report import markdown
from ssdprof.report.table import strings
from ssdprof.store.reports import load

FOLDER = Path(__file__).parent / "published"
CLAIMS, PAGE = FOLDER / "claims.csv", FOLDER / "README.md"
MARKS = "<!-- {}:start -->\n", "<!-- {}:end -->"
COLUMNS = (
    "study",
    "claim",
    "quoted",
    "result",
    "quantity",
    "of",
    "over",
    "at",
    "must",
    "measured",
    "verdict",
    "note",
)
HOLDS, FAILS, NOT_MEASURED, OTHER_GPU = "holds", "does not hold", "not measured", "other GPU"
TOLERANCES = ("0", "0.001", "0.01")
PICKS: dict[str, Callable[[Iterable[float]], float]] = {
    "least": min,
    "greatest": max,
    "mean": fmean,
}
SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
Row = dict[str, str]


def sources() -> dict[str, Any]:
    """By study: title, source, gpu, choices and the commands that measure it again."""
    return tomllib.loads((FOLDER / "sources.toml").read_text(encoding="utf-8"))


def rows() -> list[Row]:
    return list(csv.DictReader(io.StringIO(CLAIMS.read_text(encoding="utf-8"))))


def filled(given: Sequence[Mapping[str, str]]) -> list[Row]:
    """The rows with `measured` and `verdict` from the results."""
    found: list[Row] = []
    gpus = {name: one["gpu"] for name, one in sources().items()}
    above: float | None = None
    for row in given:
        value = measured(row) if row["quantity"] else None
        verdict = NOT_MEASURED
        if value is not None:
            verdict = verdict_on(row, value, above, gpus[row["study"]], gpu_of(row["result"]))
        found.append(
            {**row, "measured": "" if value is None else number(value), "verdict": verdict}
        )
        above = value
    return found


def verdict_on(
    row: Mapping[str, str], value: float, above: float | None, quoted_gpus: str, gpu: str
) -> str:
    """Ratios can be compared between GPUs; times and rates cannot.  above: the value of the row
    before.

    quoted_gpus: those of the source, such as "A100, H100".
    """
    other = not any(name.strip() in gpu for name in quoted_gpus.split(","))
    if other and (row["quantity"].endswith("_us") or "_gb_per_s_" in row["of"]):
        return OTHER_GPU
    if not row["must"]:
        return ""  # for comparison with the next row
    verdict = HOLDS if holds(row["must"], value, above) else FAILS
    return f"{verdict} ({OTHER_GPU})" if other else verdict


def holds(must: str, value: float, above: float | None) -> bool:
    """must: ">= 1.5 <= 2.51", "> above", or "within 10 % of 178"."""
    within = re.fullmatch(r"within ([\d.]+) % of ([\d.]+)", must)
    if within:
        percent, quoted = map(float, within.groups())
        return abs(value - quoted) <= abs(quoted) * percent / 100
    words = must.split()
    if len(words) % 2 or not set(words[::2]) <= SIGNS.keys():
        raise ValueError(f"{must!r} is no condition")
    limits = [above if word == "above" else float(word) for word in words[1::2]]
    return all(
        limit is not None and SIGNS[sign](value, limit)
        for sign, limit in zip(words[::2], limits, strict=True)
    )


def number(value: float) -> str:
    """Four significant digits; percents of matches need five."""
    return (
        f"{value:.0f}"
        if abs(value) >= 1000
        else f"{value:.5g}"
        if abs(value) >= 10
        else f"{value:.4g}"
    )


# --- from a result to a number


def measured(row: Mapping[str, str]) -> float | None:
    """The number of a row; None if the result does not have it."""
    result = row["result"]
    if result.endswith(".json") and "/" not in result:
        return _of_study(row)
    if result.endswith("stalls.json"):
        return _of_stalls(row, documents.load_stalls(RESULTS / result))
    if result.startswith("h200-prefill"):
        return _of_prefill(row)
    if result.endswith("report.json"):
        return _of_run(row, load(RESULTS / result, "run")[1])
    by_cell = {
        _label(cell): _of_cell(row, cell) for cell in _benches() if cell.bench.name == result
    }
    found = {label: value for label, value in by_cell.items() if value is not None}
    if row["at"] in PICKS:
        return PICKS[row["at"]](found.values()) if found else None
    return found.get(row["at"])


@cache
def _benches() -> list[Cell]:
    return recorded.committed("h200")


def _label(cell: Cell) -> str:
    """The small calls are named by their shapes."""
    return cell.one.shape if " heads of " in cell.one.shape else cell.one.tokens


def _of_cell(row: Mapping[str, str], cell: Cell) -> float | None:
    if row["quantity"] in ("device ratio", "call ratio"):
        of, over = (
            _least_us(cell, row[side], row["quantity"].split()[0]) for side in ("of", "over")
        )
        return over / of if of and over else None
    case = next(
        (case for case in cell.cases if case.fits(row["of"]) and case.status == "passed"), None
    )
    if case is None:
        return None
    if row["quantity"] == "launches":
        return len(case.launches)
    if row["quantity"] == "workspace_bytes":
        return case.workspace_bytes
    out = case.errors["out"]
    if row["quantity"] == "error over floor":
        return out.rms_ratio / out.floor
    return (
        out.matches[TOLERANCES.index(row["quantity"].removeprefix("match "))]
        if out.matches
        else None
    )


def _least_us(cell: Cell, words: str, clock: str) -> float | None:
    """words: "published relaxed fp16"; with a chunk size, "published relaxed fp16 @128"."""
    name, _, chunk = words.partition(" @")
    times = [
        _us(case, clock, chunk)
        for case in cell.cases
        if case.fits(name) and case.status == "passed"
    ]
    return min((us for us in times if us), default=None)


def _us(case: RecordedCase, clock: str, chunk: str) -> float | None:
    if chunk and str(case.chunk_size) != chunk:
        return case.chunk_sizes.get(int(chunk))
    time = case.device_us if clock == "device" else case.call_us
    return time and time[0]


def _of_run(row: Mapping[str, str], report: Report) -> float | None:
    """Matches of the output, by implementation and precision."""
    for case in report.of_calls:
        words = (
            f"{case.implementation} {intermediates_of(case.precision)} {states_of(case.precision)}"
        )
        out = case.tensor("out")
        if words == row["of"] and out and out.vs_baseline and case.result == "passed":
            return out.vs_baseline.match_pct(float(row["quantity"].removeprefix("match ")))
    return None


def _of_prefill(row: Mapping[str, str]) -> float | None:
    """Percent by which a prefill of `at` tokens is faster, with the bundled convolution and
    norm.
    """
    calls = {
        case.implementation: case.call_us.value
        for case in load(RESULTS / row["result"], "prefill")[1].cases
        if f"{case.seqlen:,}" == row["at"]
        and isinstance(case.task, Prefill)
        and case.task.conv_and_norm == "bundled"
        and case.call_us
    }
    return (
        100 * (calls[row["over"]] / calls[row["of"]] - 1)
        if {row["of"], row["over"]} <= calls.keys()
        else None
    )


def _of_study(row: Mapping[str, str]) -> float | None:
    """A value of a study by its name, or a time of a contender at "forward, 512"."""
    file = RESULTS / row["result"]
    result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"values": {}}
    if row["quantity"] == "value":
        return result["values"].get(row["of"])
    of_pass, _, seqlen = row["at"].rpartition(", ")
    for one in result["rows"]:
        if (one["pass"], str(one["seqlen"]), one["contender"]) == (of_pass, seqlen, row["of"]):
            return one.get(row["quantity"])
    return None


def _of_stalls(row: Mapping[str, str], report: StallReport) -> float | None:
    """Percent of the samples of the longest kernel in the stages of `at` (not in those with a
    minus) that wait for the reasons in `over`; or a resource of that kernel.
    """
    own = [kernel for kernel in report.kernels if kernel.implementation == row["of"]]
    if not own:
        return None
    kernel = max(own, key=lambda one: one.duration_us or 0)
    if row["quantity"] != "samples_pct":
        found: float | None = getattr(kernel, row["quantity"])
        return found
    stages, reasons = list(_stages(kernel, row["at"].split())), row["over"].split()
    samples = sum(
        count
        for stage in stages
        for reason, count in stage.items()
        if not reasons or reason in reasons
    )
    return 100 * samples / kernel.busy_samples if stages and kernel.busy_samples else None


def _stages(kernel: KernelStalls, names: Sequence[str]) -> Iterator[StallSamples]:
    """Samples of the busy stages of these names and their parts, except those after a minus."""
    wanted = [name for name in names if not name.startswith("-")]
    without = [name[1:] for name in names if name.startswith("-")]
    for stage, samples in kernel.stages.items():
        inside, outside = (
            any(f"{stage}.".startswith(f"{name}.") for name in some) for some in (wanted, without)
        )
        if inside and not outside and stage not in kernel.idle:
            yield samples


def gpu_of(result: str) -> str:
    """The GPU that a result is of, in its name; that of a bench is in its record."""
    return "NVIDIA H100 80GB HBM3" if "h100" in result else "NVIDIA H200"


# --- the page


def counts(found: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table: how many claims of each study hold, and how many quoted numbers ("within
    ...") are met.

    A claim holds if all of its rows do.
    """
    claims: dict[tuple[str, str], list[str]] = {}
    met: dict[str, list[bool]] = {study: [] for study in sources()}
    for row in found:
        if row["must"].startswith("within"):
            met[row["study"]] += [row["verdict"].startswith(HOLDS)] if row["measured"] else []
        else:
            claims.setdefault((row["study"], row["claim"]), []).append(row["verdict"])
    lines = []
    for study, about in sources().items():
        own = [_together(verdicts) for (name, _), verdicts in claims.items() if name == study]
        gpu = next(
            gpu_of(row["result"]) for row in found if row["study"] == study and row["result"]
        )
        numbers = f"{sum(met[study])} of {len(met[study])}" if met[study] else fmt.MISSING
        lines.append(
            (
                study,
                about["title"],
                gpu,
                *(str(own.count(word)) for word in (HOLDS, FAILS, NOT_MEASURED)),
                numbers,
            )
        )
    head = (
        "study",
        "about",
        "measured on",
        "holds",
        "does not hold",
        "cannot be said",
        "quoted numbers met",
    )
    return markdown.draw(strings("", head, lines, range(3))) + "\n"


def beside(found: Sequence[Mapping[str, str]]) -> str:
    """What each source states, and what was measured, folded by study."""
    parts = []
    for study, about in sources().items():
        head = ("claim", "the source", "here", "holds if", "verdict")
        shown = tuple(
            tuple(
                row[name].replace("|", "/") or fmt.MISSING
                for name in ("claim", "quoted", "measured", "must", "verdict")
            )
            for row in found
            if row["study"] == study
        )
        rendered = markdown.draw(strings("", head, shown, (0, 3, 4)))
        parts.append(
            f"<details><summary>{study}: {about['title']}</summary>\n\n{rendered}\n\n</details>\n"
        )
    return "\n".join(parts)


def _together(verdicts: Sequence[str]) -> str:
    if {NOT_MEASURED, OTHER_GPU} & set(verdicts):
        return NOT_MEASURED
    return FAILS if any(one.startswith(FAILS) for one in verdicts) else HOLDS


def as_csv(found: Iterable[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def page(text: str, found: Sequence[Mapping[str, str]]) -> str:
    """The text of published/README.md with its generated parts."""
    for name, written in (("counts", counts(found)), ("beside", beside(found))):
        start, end = (mark.format(name) for mark in MARKS)
        head, _, rest = text.partition(start)
        text = f"{head}{start}{written}{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    found = filled(rows())
    write_text(CLAIMS, as_csv(found))
    write_text(PAGE, page(PAGE.read_text(encoding="utf-8"), found))


if __name__ == "__main__":
    main()
