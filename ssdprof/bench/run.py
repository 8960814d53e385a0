"""The whole bench: measures one cell after the other, within a budget, and reports after each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import torch

from ssdprof import __version__, operators, schema
from ssdprof.bench.cell import Stopwatch, time_cell
from ssdprof.bench.contenders import Contender, Entry, line_up
from ssdprof.bench.first_call import Patience, slower
from ssdprof.bench.judge import BudgetSpent, Judged, Verdict, judge, run_unjudged
from ssdprof.bench.schema import BenchCell, BenchReport, LeftOut
from ssdprof.bench.shared import Outcomes
from ssdprof.environment.machine import ClockWatch, collect, kernels_hash
from ssdprof.environment.ranks import Ranks
from ssdprof.environment.toolchain import require_gpu
from ssdprof.files import uninterrupted
from ssdprof.measure.bench import CudaBench
from ssdprof.measure.faults import first_line
from ssdprof.measure.occupancy import Limits
from ssdprof.measure.rehearsal import FIRST_CALL_S, Rehearsals
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.operators.drawing import Cell, InputDType, Tokens
from ssdprof.operators.named import Named
from ssdprof.operators.operator import Operator
from ssdprof.progress import Watcher
from ssdprof.schema import Clocks

CHECKED_SEQLEN = 4096  # tokens of a sequence that a short check compares
SECONDS_PER_CELL = 1.5  # of sampling, at most
LEAST_SECONDS = 0.1
MAX_ROUNDS = 32  # of a recording
NEEDS_GPU = (
    "A bench needs",
    "Without one nothing is timed; 'ssdprof run demo' compares the kernels' outputs on any machine.",
)


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """precisions: of our implementations, by dtype of the inputs.  budget: seconds of wall clock; None: no limit.

    check: compare outputs at full length, or "short": on one sequence of at most CHECKED_SEQLEN tokens, once for cells
        that share it.
    named: the implementations.  Unavailable ones are left out, and the report says so.
    baseline, match_with: names; outputs are matched with those of `match_with`.
    chunk_sizes: candidates for implementations that take it from the inputs; empty if the operator has none.
    first_call: time limit of a first call, in seconds.
    smallest_difference: relative; see `schema.Speedup`.  warm: also measure with the warm clock: see `SamplingPlan`.
    """

    operator: Operator[Any]
    cells: tuple[Cell, ...]
    precisions: Callable[[InputDType], tuple[schema.PrecisionRecord, ...]]
    named: tuple[Named, ...]
    baseline: str = "unfused"
    match_with: str = "unfused"
    chunk_sizes: tuple[int, ...] = ()
    check: Literal["full", "short"] = "full"
    budget: float | None = None
    first_call: float = math.inf
    smallest_difference: float = 0.01
    warm: bool = False
    gates: schema.Gates = schema.NO_GATES
    command: tuple[str, ...] = ()

    @property
    def present(self) -> tuple[Named, ...]:
        """The implementations that are available."""
        return tuple(one for one in self.named if one.implementation is not None)


def bench(
    request: BenchRequest, watcher: Watcher, on_cell: Callable[[BenchReport], object], ranks: Ranks | None = None
) -> BenchReport:
    """Measure every cell.  on_cell: called with the partial report after each cell.

    ranks: processes that share the cells.  The first one returns the report of all.

    A cell that does not fit in the GPU's memory or in the budget is left out, and the report names it.
    """
    device = require_gpu(*NEEDS_GPU)
    began = time.monotonic()
    end = math.inf if request.budget is None else began + request.budget
    report = BenchReport(
        ssdprof_version=__version__,
        operator=request.operator.name,
        kernels=kernels_hash(request.operator.name) if operators.is_bundled(request.operator.name) else "",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=request.command,
        ranks=ranks.count if ranks else 1,
        environment=collect(),
        peers={one.name: one.source for one in request.present if one.kind == "library"},
        absent=tuple(one.absent for one in request.named if one.absent),
        baseline=request.baseline,
        matched_with=request.match_with,
        gates=request.gates,
        ceilings=measure_ceilings(device),
    )
    bench_of_cells = _Cells(request, device, report.ceilings)
    outcomes = Outcomes(request.cells, ranks)

    def keep(clocks: Clocks | None) -> BenchReport:
        known = outcomes.put_in(report).model_copy(update={"clocks": clocks, "seconds": time.monotonic() - began})
        if outcomes.writes:
            on_cell(known)
        return known

    mine = outcomes.mine
    with ClockWatch() as clocks:
        try:
            with watcher.step("Measuring", len(mine), unit="cells") as advance:
                for done, (number, cell) in enumerate(mine):
                    seconds = sampling_seconds(end - time.monotonic(), len(mine) - done)
                    outcomes.add(number, bench_of_cells.outcome(cell, seconds, end, watcher))
                    clocks.poll()
                    keep(clocks.clocks)
                    advance(1)
            for _ in outcomes.wait():
                pass
        except BaseException as error:
            with uninterrupted():
                if died := outcomes.broken_off(error):
                    keep(clocks.clocks)
            if died:
                raise died from None
            raise
    report = keep(clocks.clocks).model_copy(update={"state": "complete"})
    if outcomes.writes:
        on_cell(report)
    outcomes.end()
    return report


def sampling_seconds(left: float, cells_left: int) -> float:
    """A third of the next cell's share of the remaining time: the cell is also compiled and compared."""
    return min(SECONDS_PER_CELL, max(LEAST_SECONDS, left / cells_left / 3))


class _Cells:
    """Measures cells; remembers what short checks found."""

    def __init__(self, request: BenchRequest, device: torch.device, ceilings: schema.Ceilings | None) -> None:
        assert ceilings is not None
        self._request = request
        self._match_with = request.match_with
        self._device = device
        self._ceilings = ceilings
        self._bench = CudaBench(device)
        self._limits = Limits.of(device)
        self._rehearsals = Rehearsals(min(request.first_call, FIRST_CALL_S))
        self._verdicts: dict[Cell, dict[Hashable, Verdict]] = {}

    def outcome(self, cell: Cell, seconds: float, end: float, watcher: Watcher) -> BenchCell | LeftOut:
        """seconds: of sampling.  end: of the bench, by time.monotonic."""
        try:
            return self.measure(cell, seconds, end, watcher)
        except BudgetSpent as error:
            return LeftOut(cell=str(cell), reason=f"the budget of {self._request.budget:g} s was spent{error}")
        except torch.OutOfMemoryError as error:
            return LeftOut(cell=str(cell), reason=f"out of memory: {first_line(error)}")

    def measure(self, cell: Cell, seconds: float, end: float, watcher: Watcher) -> BenchCell:
        """Raises BudgetSpent, also half-way."""
        request = self._request
        patience = Patience(most=request.first_call, until=end)
        if patience.exhausted:
            raise BudgetSpent("")
        contenders = line_up(
            request.operator,
            cell,
            request.precisions(cell.dtype),
            request.present,
            request.chunk_sizes,
            self._rehearsals,
        )
        inputs = self._draw(cell)
        entries = [entry for contender in contenders for entry in contender.entries(request.operator, inputs)]
        checked = self._checked(cell)
        with watcher.step(f"{cell}: comparing with the fp64 oracle", unit="tokens") as advance:
            if checked == cell:
                judged = judge(entries, advance, patience, match_with=self._match_with)
            else:
                judged = self._judge_short(entries, contenders, checked, patience)
        watch = Stopwatch(
            bench=self._bench,
            sampling=SamplingPlan(
                smallest_difference=request.smallest_difference,
                max_rounds=MAX_ROUNDS,
                seconds=seconds,
                warm=request.warm,
            ),
            ceilings=self._ceilings,
            limits=self._limits,
        )
        with watcher.step(f"{cell}: timing"):
            cases = time_cell(inputs, contenders, judged, watch)
        return BenchCell(
            shape=cell.shape.name,
            sizes=str(cell.shape),
            dims=request.operator.costed.dims(inputs),
            sequences=cell.tokens.sequences,
            layout=cell.layout,
            packed=cell.tokens.packed,
            drawn=cell.drawn,
            tokens=str(cell.tokens),
            checked=None if checked == cell else checked.tokens.seqlen,
            cases=cases,
        )

    def _draw(self, cell: Cell) -> Any:
        drawing, sizes = self._request.operator.drawing, self._request.chunk_sizes
        inputs = drawing.draw(cell, self._device)
        return drawing.with_chunk_size(inputs, min(sizes)) if sizes else inputs

    def _checked(self, cell: Cell) -> Cell:
        """The cell whose outputs are compared instead of this cell's."""
        if self._request.check == "full" or cell.tokens.packed:
            return cell
        return replace(cell, tokens=Tokens(sequences=1, seqlen=min(cell.tokens.seqlen, CHECKED_SEQLEN)))

    def _judge_short(
        self, entries: Sequence[Entry], contenders: Sequence[Contender], checked: Cell, patience: Patience
    ) -> list[Judged]:
        if checked in self._verdicts:
            return run_unjudged(entries, self._verdicts[checked], patience)
        operator, inputs = self._request.operator, self._draw(checked)
        short = judge(
            [one for contender in contenders for one in contender.entries(operator, inputs)],
            patience=patience,
            match_with=self._match_with,
        )
        self._verdicts[checked] = {one.entry.key: one.verdict for one in short}
        judged = run_unjudged(entries, self._verdicts[checked], patience)
        return [
            replace(one, first_call=slower(one.first_call, before.first_call))
            for one, before in zip(judged, short, strict=True)
        ]
