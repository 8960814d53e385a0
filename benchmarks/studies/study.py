"""What both studies share: the command line, the budget, the result, and times of calls in
turns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch

from ssdprof import __version__
from ssdprof.cli import INTERNAL_ERROR, INTERRUPTED
from ssdprof.core import statistics
from ssdprof.environment import machine
from ssdprof.errors import ExitCode, MissingCapabilityError, SsdprofError
from ssdprof.files import write_text
from ssdprof.measure.first_run import first_line
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer, time_in_turns

Cell = TypeVar("Cell")
T = TypeVar("T")
Times = dict[str, float]


class Study(ABC, Generic[Cell]):
    """One run of all cells, written to `folder`/NAME.json after each cell.

    budget: seconds.  rows: a record per cell and contender.  values: the numbers for claims.
    wrong: our wrong outputs.
    missing: missing measurement -> reason.  more: other content of the file.
    """

    name: str
    device = "cuda"

    def __init__(self, budget: float, folder: Path) -> None:
        self.budget, self.folder, self.began = budget, folder, time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.values: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        self.wrong: list[str] = []
        self.more: dict[str, Any] = {}

    @cached_property
    def timer(self) -> CudaTimer:
        return CudaTimer(torch.device(self.device))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    def measure(self, cell: Cell) -> None: ...

    @abstractmethod
    def values_so_far(self) -> dict[str, float]: ...

    def keep(self) -> None:
        self.values |= self.values_so_far()
        content = {
            "study": self.name,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": (
                f"python benchmarks/studies/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}"
            ),
            "ssdprof_version": __version__,
            "environment": machine.collect().model_dump(mode="json"),
            "seconds": round(self.seconds, 1),
            **{name: getattr(self, name) for name in ("values", "missing", "wrong", "rows")},
            **self.more,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / f"{self.name}.json", json.dumps(content, indent=1) + "\n")

    def measure_all(
        self, cells: Iterable[Cell], words: Callable[[Cell], str], *, seconds: float
    ) -> None:
        """Measures the GPU's limits, then every cell while `seconds` of the budget are left; the
        others are named.
        """
        self.values["copy_gb_per_s"] = measure_ceilings(self.timer.device).copy_gb_per_s
        for cell in cells:
            if self.budget - self.seconds < seconds:
                self.missing[words(cell)] = f"the budget of {self.budget:.0f} s was spent"
                continue
            self.measure(cell)
            self.keep()
            print(f"{self.seconds:.0f} s: {words(cell)}", file=sys.stderr, flush=True)

    def library(self, name: str, load: Callable[[], T]) -> T | None:
        """The result of `load`.  If the import fails, returns None and lists `name` as missing."""
        try:
            return load()
        except ImportError as error:
            self.missing[name] = f"it cannot be imported here: {error}"
            return None

    def finish(self) -> int:
        """Runs, and keeps the results so far if it is interrupted or fails.  Returns the exit
        code.
        """
        why, code = "", int(ExitCode.OK)
        try:
            self.run()
        except KeyboardInterrupt:
            why, code = "the run was interrupted", INTERRUPTED
        except SsdprofError as error:
            why, code = f"{error.message} {error.hint}", int(error.exit_code)
        except Exception as error:
            traceback.print_exc()
            why, code = first_line(error), INTERNAL_ERROR
        if why:
            self.missing["what comes after"] = why
            print(f"The run ended early: {why}", file=sys.stderr)
        self.keep()
        for line in self.wrong:
            print(f"wrong: {line}", file=sys.stderr)
        return int(ExitCode.GATE_FAILED) if self.wrong else code


class Judge:
    """Measures the distance of tensors (b, l, h, ...) from the exact ones, head by head.

    rounded: the same by formulas, with the roundings that a kernel may have; eps: of the dtype of
    the inputs.
    """

    def __init__(
        self, exact: Mapping[str, torch.Tensor], rounded: Mapping[str, torch.Tensor], eps: float
    ) -> None:
        self._exact = exact
        self._allowed = {
            name: 2 * (_largest(tensor.double() - exact[name]) + eps * _largest(exact[name]))
            for name, tensor in rounded.items()
        }

    def excess(self, found: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """For each tensor, the largest |found - exact| of any head, as a share of the allowed
        error: above 1 is wrong.

        Allowed, as in ssdprof's comparator: 2 * (max|rounded - exact| + eps * max|exact|), per
        head.
        """
        result = {}
        for name, tensor in found.items():
            off = _largest(tensor.double() - self._exact[name])
            # a gradient of 0 has an allowed error of 0
            share = torch.where(off == 0, 0.0, off / self._allowed[name])
            result[name] = float(torch.where(share.isnan(), torch.inf, share).max())
        return result

    def rms_errors(self, found: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """RMS of found - exact, divided by the RMS of exact."""
        return {
            name: float((tensor.double() - self._exact[name]).norm() / self._exact[name].norm())
            for name, tensor in found.items()
        }


def _largest(difference: torch.Tensor) -> torch.Tensor:
    """The largest magnitude per head, (h,)."""
    return difference.abs().transpose(0, 2).flatten(1).amax(1)


def timed(
    runs: Mapping[str, Callable[[], Any]],
    timer: CudaTimer,
    seconds: float,
    wrong: Callable[[str, Any], str],
) -> tuple[dict[str, Times], dict[str, str]]:
    """Times of calls, sampled in turns for about `seconds` (see docs/measuring.md), and the reasons
    for missing ones.

    wrong(key, output): the defect, or "" if the output is right; called after the timed loop.
    """
    every = time_in_turns(
        runs, timer, SamplingPlan(seconds=seconds), check=lambda key, run: wrong(key, run())
    )
    found, untimed = dict[str, Times](), dict[str, str]()
    for key, fields in every.items():
        if "samples" in fields:
            call, device = (statistics.median(one.us) for one in fields["samples"])
            found[key] = {
                "device_us": device.value,
                "device_low_us": device.low,
                "device_high_us": device.high,
                "call_us": call.value,
            }
        else:
            untimed[key] = fields.get("later_fault") or fields["reason"]
    return found, untimed


def options_of(about: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """The options of every study.  about: its docstring.  seconds: its default budget."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="folder for the result"
    )
    parser.add_argument(
        "--budget", type=float, default=seconds, help="seconds of wall clock, for everything"
    )
    return parser


def end(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit code of `main` or of the error that it raises."""
    try:
        if not torch.cuda.is_available():
            raise MissingCapabilityError(
                "The study needs an NVIDIA GPU.", "Run it on a machine that has one."
            )
        sys.exit(main())
    except SsdprofError as error:
        print(f"Error: {error.message} {error.hint}", file=sys.stderr)
        sys.exit(int(error.exit_code))
