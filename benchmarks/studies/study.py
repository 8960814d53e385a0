"""Shared parts of the studies' runners: their command line, and the measurement of cells in turn."""

from __future__ import annotations

import argparse
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
from study_result import Result, stored

from ssdprof.cli import INTERNAL_ERROR, INTERRUPTED
from ssdprof.errors import ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.measure.bench import CudaBench
from ssdprof.measure.faults import first_line
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import time_in_turns

Cell = TypeVar("Cell")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Time:
    """Medians, from a cold L2; low and high: 95 % interval of the device time.  See docs/measuring.md."""

    device_us: float
    device_low_us: float
    device_high_us: float
    call_us: float


class Study(ABC, Generic[Cell]):
    """One run of all cells.  budget: seconds.  folder: holds the result, which is written after each cell."""

    device = "cuda"

    def __init__(self, name: str, budget: float, folder: Path) -> None:
        self.result = Result(study=name)
        self.budget = budget
        self.folder = folder

    @cached_property
    def bench(self) -> CudaBench:
        return CudaBench(torch.device(self.device))

    @property
    def left(self) -> float:
        """Remaining seconds of the budget."""
        return self.budget - self.result.seconds

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    def measure(self, cell: Cell) -> None: ...

    @abstractmethod
    def keep(self) -> dict[str, Any]:
        """Writes <study>.json, and returns its content."""

    def measure_all(self, cells: Iterable[Cell], words: Callable[[Cell], str], *, seconds: float) -> None:
        """Measures the GPU's limits, then every cell while `seconds` of the budget are left; the others are named."""
        self.result.values["copy_gb_per_s"] = measure_ceilings(self.bench.device).copy_gb_per_s
        for cell in cells:
            if self.left < seconds:
                self.result.missing[words(cell)] = f"the budget of {self.budget:.0f} s was spent"
                continue
            self.measure(cell)
            self.keep()
            print(f"{self.result.seconds:.0f} s: {words(cell)}", file=sys.stderr, flush=True)

    def library(self, name: str, load: Callable[[], T]) -> T | None:
        """The result of `load`.  If the import fails, returns None and lists `name` as missing."""
        try:
            return load()
        except ImportError as error:
            self.result.missing[name] = f"it cannot be imported here: {error}"
            return None


Pages = Callable[[Mapping[str, Any], Path], None]  # (content of <study>.json, folder) writes the other two files


# --- the command line


def options_of(about: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """The options of every runner.  about: its docstring.  seconds: its default budget."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="folder for the three files")
    where.add_argument(
        "--from", dest="file", type=Path, metavar="RESULT.json", help="write the pages of a result again"
    )
    parser.add_argument("--budget", type=float, default=seconds, help="seconds of wall clock, for everything")
    return parser


def carried_out(name: str, options: argparse.Namespace, begin: Callable[[], Study[Any]], pages: Pages) -> int:
    """Measures, or with --from writes the pages of a result again.  Returns the exit code."""
    if options.file:
        pages(stored(name, options.file), options.file.parent)
        return int(ExitCode.OK)
    if not torch.cuda.is_available():
        raise MissingCapabilityError("The study needs an NVIDIA GPU.", "Run it on a machine that has one.")
    study = begin()
    code = measured(study.result, study.run)
    pages(study.keep(), options.out)
    return exit_code(study.result, code)


def end(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit code of `main` or of the error that it raises."""
    try:
        sys.exit(main())
    except SsdprofError as error:
        print(f"Error: {error.message} {error.hint}", file=sys.stderr)
        sys.exit(int(error.exit_code))


# --- measuring


def timed(
    runs: Mapping[str, Callable[[], Any]], bench: CudaBench, seconds: float, wrong: Callable[[str, Any], str]
) -> tuple[dict[str, Time], dict[str, str], dict[str, str]]:
    """Times of calls, sampled in turns for about `seconds`; reasons for missing times; and defects of outputs.

    wrong(key, output): the defect, or "" if the output is right; called after the timed loop.
    """
    session = time_in_turns(runs, bench, SamplingPlan(seconds=seconds), check=wrong)
    found = {}
    for key, sampled in session.sampled.items():
        timing = sampled.timing()
        found[key] = Time(
            device_us=timing.device_median_us,
            device_low_us=timing.device_interval_us.low,
            device_high_us=timing.device_interval_us.high,
            call_us=timing.call_median_us,
        )
    return found, session.untimed, {key: spoilt.reason for key, spoilt in session.spoilt.items()}


def row(cell: Mapping[str, Any], contender: str, time_of: Time | None, **more: Any) -> dict[str, Any]:
    """A record of `Result.rows`."""
    return {**cell, "contender": contender, **(asdict(time_of) if time_of else {}), **more}


def measured(result: Result, run: Callable[[], None]) -> int:
    """Runs `run` and keeps its results so far if it is interrupted or fails.  Returns the exit code."""
    try:
        run()
    except KeyboardInterrupt:
        why, code = "the run was interrupted", INTERRUPTED
    except SsdprofError as error:
        why, code = f"{error.message} {error.hint}", int(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        why, code = first_line(error), INTERNAL_ERROR
    else:
        return int(ExitCode.OK)
    result.missing["what comes after"] = why
    print(f"The run ended early: {why}", file=sys.stderr)
    return code


def exit_code(result: Result, so_far: int) -> int:
    """1 for a wrong output, else the exit code of `measured`.  Prints wrong outputs on stderr."""
    for line in result.wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return int(ExitCode.GATE_FAILED) if result.wrong else so_far
