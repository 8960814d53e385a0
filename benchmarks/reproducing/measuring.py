"""Runs the commands of a document within a budget, and keeps what they reported."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reproducing import reports
from reproducing.published import Measure, Published
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError
from ssdprof.report import format as fmt

HERE = Path(__file__).parent.parent
TO_STOP_S = 30  # beyond its budget, until a command is interrupted, and again until it is killed
LEAST_S = 10  # with less, a measurement is not begun
PUBLISHED = "published"  # a name of --impl that needs a checkout
NAMING = ("--impl", "--against", "--match-with", "--baseline")
Run = Callable[[list[str], float], int]


def measure(
    document: Published, budget: float, published: Path | None, run: Run | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """After each measurement: reports as JSON by the names of their measurements so far; and of those without one, why.

    published: a checkout of the published kernel.  Raises MissingCapabilityError if in the end nothing was measured.
    """
    end = time.monotonic() + budget
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    if published is None and any(PUBLISHED in command for one in document.measure for command in one.commands):
        missing["the published kernel"] = "--published names no checkout of it"
    for one in document.measure:
        left = end - time.monotonic()
        if left < LEAST_S:
            missing[f"measurement {one.name}"] = f"the budget of {budget:.0f} s was spent"
        else:
            with tempfile.TemporaryDirectory() as scratch:
                report, why = _one(one, Path(scratch), left * one.share, published, run or run_within)
            if why:
                missing[f"measurement {one.name}"] = why
            if report is not None:
                found[one.name] = report
        yield found, missing
    if not found:
        reasons = "; ".join(f"{what}: {why}" for what, why in missing.items())
        raise MissingCapabilityError(f"Nothing was measured: {reasons}.", "What the commands said stands above.")


def _one(
    one: Measure, scratch: Path, seconds: float, published: Path | None, run: Run
) -> tuple[dict[str, Any] | None, str]:
    """A report, if there is one; and what went wrong, if anything did.  A report that is there counts anyway."""
    out, end, why = scratch / f"{one.name}.json", time.monotonic() + seconds, ""
    for command in one.commands:
        left = max(end - time.monotonic(), 1.0)
        places = {"out": str(out), "scratch": str(scratch), "budget": f"{left:.0f}"}
        words = words_of(command, places, published)
        print(f"{one.name}, {left:.0f} s: {shlex.join(words)}", file=sys.stderr, flush=True)
        code = run(words, left)
        # of ssdprof, 1 is a verdict; of a script, a traceback
        if code != ExitCode.OK and not (code == ExitCode.GATE_FAILED and command.startswith("ssdprof ")):
            why = f"`{command}` ended with exit code {code}"
            break
    file = Path(one.file.format(scratch=scratch)) if one.file else out
    if not file.is_file():
        return None, why or "it wrote no result"
    return reports.read(one.reads, file).model_dump(mode="json"), why


def words_of(command: str, places: Mapping[str, str], published: Path | None) -> list[str]:
    """A command as the system runs it.  Without a checkout, the published kernel takes no part."""
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


def run_within(words: list[str], seconds: float) -> int:
    """The command's exit code.  It is interrupted when it should have ended long ago, and then killed."""
    process = subprocess.Popen(words, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=sys.stderr)
    for wait_s, then in ((seconds + TO_STOP_S, signal.SIGINT), (TO_STOP_S, signal.SIGKILL)):
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.send_signal(then)
    return process.wait()
