"""The whole tuning: runs one search after the other, within a budget, and reports after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import torch

from ssdprof import __version__, schema
from ssdprof.environment import machine
from ssdprof.environment.toolchain import require_gpu
from ssdprof.measure.bench import CudaBench
from ssdprof.measure.faults import first_line
from ssdprof.operators.operator import Operator
from ssdprof.progress import Watcher
from ssdprof.tuning.problems import Workload, problems
from ssdprof.tuning.records import TuneReport
from ssdprof.tuning.search import Problem, search


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """budget: seconds of wall clock after which no search begins; None: no limit."""

    operator: Operator[Any]
    sources: tuple[Workload, ...]
    intermediates: tuple[schema.Intermediates, ...]
    budget: float | None = None
    command: tuple[str, ...] = ()


def gpu_to_tune() -> torch.device:
    """The current GPU.  MissingCapabilityError without one."""
    return require_gpu(
        "Tuning needs", "Run it on a machine with the GPU to tune for: what it finds applies to GPUs of the same name."
    )


def tune(
    request: TuneRequest, device: torch.device, watcher: Watcher, on_outcome: Callable[[TuneReport], object]
) -> TuneReport:
    """Search for every source.  on_outcome: called with the report after each search.

    Searches that do not fit in the GPU's memory or in the budget are left out and named.
    """
    began = time.monotonic()
    bench = CudaBench(device)
    report = TuneReport(
        ssdprof_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=request.command,
        environment=machine.collect(),
        operator=request.operator.name,
    )
    for sources, intermediates in _groups(request):
        try:
            for problem in problems(request.operator, sources, intermediates):
                spent = time.monotonic() - began
                if request.budget is not None and spent >= request.budget:
                    report = _left_out(report, f"{problem}: the budget of {request.budget:g} s was spent")
                    continue
                with watcher.step(f"Tuning {problem}"):
                    outcome = search(problem, bench)
                seconds = time.monotonic() - began
                report = report.model_copy(update={"outcomes": (*report.outcomes, outcome), "seconds": seconds})
                on_outcome(report)
        except torch.OutOfMemoryError as error:
            what = f"{'; '.join(map(str, sources))}, {intermediates}"
            report = _left_out(report, f"{what}: not all of it was searched: out of memory: {first_line(error)}")
    return report


def _left_out(report: TuneReport, what: str) -> TuneReport:
    return report.model_copy(update={"left_out": (*report.left_out, what)})


def listed(request: TuneRequest) -> Iterator[Problem]:
    """The searches that `tune` would run."""
    for sources, intermediates in _groups(request):
        yield from problems(request.operator, sources, intermediates)


def _groups(request: TuneRequest) -> Iterator[tuple[Sequence[Workload], schema.Intermediates]]:
    """Sources grouped by layer; those of a layer share a find if the portable kernel runs them."""
    for _, same_layer in groupby(request.sources, key=lambda source: source.layer):
        sources = tuple(same_layer)
        for intermediates in request.intermediates:
            yield sources, intermediates
