"""Runs the commands of a document within a budget, and keeps their reports."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from within import run_within

from reproducing import reports
from reproducing.published import Measure, Published
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.report import format as fmt

HERE = Path(__file__).parent.parent
LEAST_S = 10  # a measurement with less time does not begin
PUBLISHED = "published"  # a name of --impl that needs a checkout
NAMING = ("--impl", "--against", "--match-with", "--baseline")
INTERRUPTED = "the run was interrupted"
Run = Callable[[list[str], float], int]
Found = tuple[dict[str, Any], dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Means:
    """The resources of measurements.

    seconds: of wall clock, for all of them.  published: a checkout of the published kernel.  folder: holds reports
    until they are part of the result.  recorded: existing reports, by the names of their measurements.
    """

    seconds: float
    published: Path | None = None
    folder: Path
    recorded: Mapping[str, Any]


def measure(document: Published, means: Means, run: Run | None = None) -> Iterator[Found]:
    """Yields, after each measurement, the reports so far, as JSON by measurement, and the reasons for missing ones.

    Raises MissingCapabilityError if nothing was measured, and KeyboardInterrupt, after the last report, if the user
    interrupts a measurement.
    """
    end = time.monotonic() + means.seconds
    found: dict[str, Any] = dict(means.recorded)
    missing: dict[str, str] = {}
    measures = [one for one in document.measure if one.name not in found]
    if means.published is None and any(PUBLISHED in command for one in measures for command in one.commands):
        missing["the published kernel"] = "--published names no checkout of it"
    if found:
        yield found, missing
    interrupted = False
    for one in measures:
        left = end - time.monotonic()
        if interrupted:
            missing[f"measurement {one.name}"] = INTERRUPTED
        elif left < LEAST_S:
            missing[f"measurement {one.name}"] = f"the budget of {means.seconds:.0f} s was spent"
        else:
            report, why = _one(one, means, left * one.share, run or run_within)
            interrupted = why == INTERRUPTED
            if why:
                missing[f"measurement {one.name}"] = why
            if report is not None:
                found[one.name] = report
        yield found, missing
    if interrupted:
        raise KeyboardInterrupt
    if not found:
        reasons = "; ".join(f"{what}: {why}" for what, why in missing.items())
        raise MissingCapabilityError(f"Nothing was measured: {reasons}.", "What the commands said stands above.")


@contextmanager
def reports_folder(name: str, beside: Path) -> Iterator[Path]:
    """A folder next to the result, removed at the end.  If the process is killed, it still has the reports.

    Raises MissingCapabilityError if it cannot be made.
    """
    try:
        beside.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-reports-", dir=beside))
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingCapabilityError(
            f"{beside} cannot be written to: {reason}.", "Name a folder with --out."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _one(one: Measure, means: Means, seconds: float, run: Run) -> tuple[dict[str, Any] | None, str]:
    """The report, if it exists, and the error, if there was one.  A report counts despite an error."""
    out, end, why = means.folder / f"{one.name}.json", time.monotonic() + seconds, ""
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as scratch:
        for command in one.commands:
            left = max(end - time.monotonic(), 1.0)
            places = {"out": str(out), "folder": str(means.folder), "scratch": scratch, "budget": f"{left:.0f}"}
            words = words_of(command, places, means.published)
            print(f"{one.name}, {left:.0f} s: {shlex.join(words)}", file=sys.stderr, flush=True)
            try:
                code = run(words, left)
            except KeyboardInterrupt:
                why = INTERRUPTED
                break
            # exit code 1 is a verdict from ssdprof, and a traceback from a script
            if code != ExitCode.OK and not (code == ExitCode.GATE_FAILED and command.startswith("ssdprof ")):
                why = f"`{command}` ended with exit code {code}"
                break
    file = Path(one.file.format(folder=means.folder)) if one.file else out
    if not file.is_file():
        return None, why or "it wrote no result"
    try:
        return reports.read(one.reads, file).model_dump(mode="json"), why
    except SsdprofError as error:  # such as that of a killed command; other reports count
        return None, why or error.message


def words_of(command: str, places: Mapping[str, str], published: Path | None) -> list[str]:
    """The command line of a command.  Without a checkout, the published kernel is left out."""
    program, *rest = shlex.split(command)
    words = [word.format_map(places) for word in rest]
    for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        if before in NAMING:
            names = [f"{PUBLISHED}={published}" if name == PUBLISHED else name for name in word.split(",")]
            words[place] = ",".join(name for name in names if name != f"{PUBLISHED}={None}")
    if program == "ssdprof":
        return [sys.executable, "-m", "ssdprof", *words]
    if program == "python":
        script, *rest = words
        return [sys.executable, str(HERE / script), *rest]
    raise BadInputError(
        f"{program!r} is no program of a measurement.", f"There are {fmt.words(['ssdprof', 'python'])}."
    )
