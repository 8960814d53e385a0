"""The whole bench: cell after cell, within a budget, on record after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import torch

from ssdprof import __version__, environment, schema
from ssdprof.bench.cell import Stopwatch, time_cell
from ssdprof.bench.contenders import CHUNK_SIZES, Contender, Entry, Peer, line_up
from ssdprof.bench.grid import Cell, InputDType, Tokens
from ssdprof.bench.inputs import draw
from ssdprof.bench.judge import Judged, Verdict, judge, run_unjudged
from ssdprof.bench.schema import BenchCell, BenchReport, LeftOut
from ssdprof.environment import ClockWatch
from ssdprof.errors import MissingCapabilityError
from ssdprof.kernels._triton import INTERPRETED
from ssdprof.measure.attempt import first_line
from ssdprof.measure.occupancy import Limits
from ssdprof.measure.roofline import dims_of, measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaBench
from ssdprof.progress import Watcher

CHECKED_SEQLEN = 4096  # tokens of a sequence that a short check compares
SECONDS_PER_CELL = 1.5  # of sampling, at most
LEAST_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """precisions: of ours, for inputs of a dtype.  budget: seconds of wall clock; None for no end.

    check: compare outputs at full length, or "short": on one sequence of at most CHECKED_SEQLEN tokens, once for cells
        that share it.
    baseline: an implementation's name.
    """

    cells: tuple[Cell, ...]
    precisions: Callable[[InputDType], tuple[schema.Precision, ...]]
    peers: tuple[Peer, ...] = ()
    baseline: str = "unfused"
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES
    check: Literal["full", "short"] = "full"
    budget: float | None = None
    command: tuple[str, ...] = ()


def require_gpu() -> torch.device:
    """The current GPU.  MissingCapabilityError without one, or where Triton is told to interpret."""
    if not torch.cuda.is_available() or INTERPRETED:
        why = "Triton's interpreter is on" if torch.cuda.is_available() else "torch sees none"
        raise MissingCapabilityError(
            f"A bench needs an NVIDIA GPU, and {why}.",
            "Without one nothing is timed; 'ssdprof run demo' compares the kernels' outputs on any machine.",
        )
    return torch.device("cuda", torch.cuda.current_device())


def bench(request: BenchRequest, watcher: Watcher, on_cell: Callable[[BenchReport], object]) -> BenchReport:
    """Measure every cell.  on_cell: called with the report, partial yet, after each.

    A cell that the GPU's memory does not hold, or for which the budget has no time, is left out and says so.
    """
    device = require_gpu()
    began = time.monotonic()
    report = BenchReport(
        ssdprof_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=request.command,
        environment=environment.collect(),
        peers={peer.implementation.name: peer.version for peer in request.peers},
        baseline=request.baseline,
        ceilings=measure_ceilings(device),
    )
    bench_of_cells = _Cells(request, device, report.ceilings)
    with ClockWatch() as clocks, watcher.step("Measuring", len(request.cells), unit="cells") as advance:
        for number, cell in enumerate(request.cells):
            spent = time.monotonic() - began
            if request.budget is not None and spent >= request.budget:
                late = LeftOut(cell=str(cell), reason=f"the budget of {request.budget:g} s was spent")
                report = report.model_copy(update={"left_out": (*report.left_out, late)})
            else:
                seconds = sampling_seconds(request.budget, spent, len(request.cells) - number)
                report = _with(report, cell, bench_of_cells, seconds, watcher)
            clocks.poll()
            report = report.model_copy(update={"clocks": clocks.clocks, "seconds": time.monotonic() - began})
            on_cell(report)
            advance(1)
    report = report.model_copy(update={"state": "complete"})
    on_cell(report)
    return report


def sampling_seconds(budget: float | None, spent: float, cells_left: int) -> float:
    """For the next cell: a third of its share of what is left; the rest goes to compiling and comparing."""
    if budget is None:
        return SECONDS_PER_CELL
    return min(SECONDS_PER_CELL, max(LEAST_SECONDS, (budget - spent) / cells_left / 3))


def _with(report: BenchReport, cell: Cell, cells: _Cells, seconds: float, watcher: Watcher) -> BenchReport:
    """The report and the cell, measured or left out."""
    try:
        measured = cells.measure(cell, seconds, watcher)
    except torch.OutOfMemoryError as error:
        without_room = LeftOut(cell=str(cell), reason=f"out of memory: {first_line(error)}")
        return report.model_copy(update={"left_out": (*report.left_out, without_room)})
    return report.model_copy(update={"cells": (*report.cells, measured)})


class _Cells:
    """Measures cells; remembers what short checks found."""

    def __init__(self, request: BenchRequest, device: torch.device, ceilings: schema.Ceilings | None) -> None:
        assert ceilings is not None
        self._request = request
        self._device = device
        self._ceilings = ceilings
        self._bench = CudaBench(device)
        self._limits = Limits.of(device)
        self._verdicts: dict[Cell, dict[str, Verdict]] = {}

    def measure(self, cell: Cell, seconds: float, watcher: Watcher) -> BenchCell:
        request = self._request
        contenders = line_up(cell.dtype, request.precisions(cell.dtype), request.peers, request.chunk_sizes)
        inputs = draw(cell, self._device, chunk_size=min(request.chunk_sizes))
        entries = [entry for contender in contenders for entry in contender.entries(inputs)]
        checked = self._checked(cell)
        with watcher.step(f"{cell}: comparing with the fp64 oracle", unit="tokens") as advance:
            judged = judge(entries, advance) if checked == cell else self._judge_short(entries, contenders, checked)
        watch = Stopwatch(
            bench=self._bench,
            sampling=SamplingPlan(warmup_rounds=2, min_rounds=15, max_rounds=80, seconds=seconds),
            ceilings=self._ceilings,
            limits=self._limits,
        )
        with watcher.step(f"{cell}: timing"):
            cases = time_cell(inputs, contenders, judged, watch)
        return BenchCell(
            shape=cell.shape.name,
            dims=dims_of(inputs),
            sequences=inputs.sequences,
            layout=cell.layout,
            packed=cell.tokens.packed,
            tokens=str(cell.tokens),
            checked=None if checked == cell else checked.tokens.seqlen,
            cases=cases,
        )

    def _checked(self, cell: Cell) -> Cell:
        """The cell whose outputs are compared for this one."""
        if self._request.check == "full" or cell.tokens.packed:
            return cell
        return replace(cell, tokens=Tokens(sequences=1, seqlen=min(cell.tokens.seqlen, CHECKED_SEQLEN)))

    def _judge_short(self, entries: Sequence[Entry], contenders: Sequence[Contender], checked: Cell) -> list[Judged]:
        if checked not in self._verdicts:
            inputs = draw(checked, self._device, chunk_size=min(self._request.chunk_sizes))
            short = judge([entry for contender in contenders for entry in contender.entries(inputs)])
            self._verdicts[checked] = {one.entry.label: one.verdict for one in short}
        return run_unjudged(entries, self._verdicts[checked])
