"""`ssdprof bench`: the kernels alone, on random inputs of a model's shape, one cell after the other within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ssdprof.core.case import Case, Drawn
from ssdprof.core.report import LeftOut, Report, Requested
from ssdprof.environment.machine import ClockWatch, collect, kernels_hash
from ssdprof.environment.toolchain import require_gpu
from ssdprof.jobs.compare import BudgetSpent, Comparer, Entry
from ssdprof.jobs.request import BenchRequest
from ssdprof.measure.first_run import Call, Deadline, first_line
from ssdprof.measure.isolate import FIRST_CALL_S, IsolatedFirstCall
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.dtypes import precision_of
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import Writer, draft, load, opened

CHECKED_SEQLEN = 4096  # tokens of a sequence that a short check compares
SECONDS_PER_CELL = 1.5  # of sampling, at most
LEAST_SECONDS = 0.1
MAX_ROUNDS = 32  # of a recording
NEEDS_GPU = (
    "A bench needs",
    "Without one nothing is timed; 'ssdprof run demo' compares the kernels' outputs on any machine.",
)


def bench(request: BenchRequest, watcher: Watcher, ranks: Ranks | None = None) -> tuple[Path, Report]:
    """Measure every cell.  Returns the report's folder and the report.

    ranks: processes that share the cells.  The first one returns the report of all.

    A cell that does not fit in the GPU's memory or in the budget is left out, and the report names it.
    """
    device = require_gpu(*NEEDS_GPU)
    operator = request.operator
    header = draft(
        "bench",
        operator.name,
        request.command,
        environment=collect(),
        requested=tuple(
            Requested(_place(cell), implementation.name, str(precision))
            for cell in request.cells
            for implementation, precision in request.compared(cell)
        ),
        conditions=request.conditions,
        baseline=request.baseline,
        matched_with=request.match_with,
        smallest_difference=request.smallest_difference,
        kernels=kernels_hash(operator.name),
        absent=tuple(one.absent for one in request.implementations if one.absent),
    )
    began = time.monotonic()
    end = math.inf if request.budget is None else began + request.budget
    with opened(request.out, header, watcher, ranks) as writer, ClockWatch() as clocks:
        writer.update(ceilings=measure_ceilings(device))
        mine = ranks.share(request.cells) if ranks else request.cells
        comparer = Comparer(
            timer=CudaTimer(device),
            ceilings=writer.report.ceilings,
            process=writer.process,
            isolated=IsolatedFirstCall(min(request.first_call, FIRST_CALL_S)),
            watcher=watcher,
            oracle_must_fit=True,
        )
        cells = _Cells(request, device, comparer, writer)
        with watcher.step("Measuring", len(mine), unit="cells") as advance:
            for done, cell in enumerate(mine):
                try:
                    cells.measure(cell, sampling_seconds(end - time.monotonic(), len(mine) - done), end)
                except BudgetSpent as error:
                    cells.leave_out(cell, f"the budget of {request.budget:g} s was spent{error}")
                except torch.OutOfMemoryError as error:
                    cells.leave_out(cell, f"out of memory: {first_line(error)}")
                clocks.poll()
                writer.update(clocks=clocks.clocks, seconds=time.monotonic() - began)
                advance(1)
    return load(writer.folder)


def sampling_seconds(left: float, cells_left: int) -> float:
    """A third of the next cell's share of the remaining time: the cell is also compiled and compared."""
    return min(SECONDS_PER_CELL, max(LEAST_SECONDS, left / cells_left / 3))


@dataclass
class _Cells:
    """Measures cells; remembers what short checks found."""

    request: BenchRequest
    device: torch.device
    comparer: Comparer
    writer: Writer
    _verdicts: dict[Cell, Mapping[Hashable, Case]] = field(default_factory=dict)

    def leave_out(self, cell: Cell, reason: str) -> None:
        one = LeftOut(place=_place(cell), reason=reason)
        self.writer.update(left_out=(*self.writer.report.left_out, one))

    def measure(self, cell: Cell, seconds: float, end: float) -> None:
        """seconds: of sampling.  end: of the bench, by time.monotonic.  Raises BudgetSpent, also half-way."""
        request, deadline = self.request, Deadline(most=self.request.first_call, until=end)
        if deadline.exhausted:
            raise BudgetSpent("")
        difference = request.smallest_difference
        sampling = SamplingPlan(smallest_difference=difference, max_rounds=MAX_ROUNDS, seconds=seconds)
        comparer = replace(self.comparer, sampling=sampling, deadline=deadline)
        checked, verdicts = self._checked(cell), None
        if checked != cell:
            if checked not in self._verdicts:
                entries = self._entries(checked, None)
                found = list(replace(comparer, timer=None).compare(entries, str(checked)))
                self._verdicts[checked] = {
                    one.key: next(
                        case for case in found if (case.name, case.chunk_size) == (one.case.name, one.case.chunk_size)
                    )
                    for one in entries
                }
            verdicts = self._verdicts[checked]
        entries = self._entries(cell, None if checked == cell else checked.tokens.seqlen)
        # all at the end: a cell that is left out has no cases, also if some were verified before
        for case in {case.name: case for case in comparer.compare(entries, str(cell), verdicts)}.values():
            self.writer.case(case)
        if verdicts:  # later cells find all kernels compiled
            self._verdicts[checked] = {key: case.changed(first_call=None) for key, case in verdicts.items()}

    def _entries(self, cell: Cell, checked: int | None) -> list[Entry]:
        """An entry for each implementation, precision and chunk size; all of a cell are timed together."""
        request, operator = self.request, self.request.operator
        drawn = Drawn(
            shape=cell.shape.name,
            shape_words=str(cell.shape),
            tokens=str(cell.tokens),
            sequences=cell.tokens.sequences,
            packed=cell.tokens.packed,
            layout=cell.layout,
            ways=cell.drawn,
            checked=checked,
        )
        inputs = operator.generated.draw(cell, self.device)
        sized = {size: operator.generated.with_chunk_size(inputs, size) for size in request.chunk_sizes}
        inputs = sized[min(sized)] if sized else inputs
        dims, work = operator.judged.cost(inputs)
        entries: list[Entry] = []
        for one, precision in request.compared(cell):
            for size in request.sizes(one):
                case = Case(
                    drawn=drawn,
                    dims=dims,
                    batch=dims.batch,
                    seqlen=dims.seqlen,
                    inputs=", ".join((cell.dtype, *cell.drawn, cell.layout)),
                    implementation=one.name,
                    kind=one.kind,
                    version=one.version,
                    precision=precision,
                    baseline="" if one.name == request.baseline else request.baseline,
                    status="ran",
                    work=work,
                    chunk_size=size,
                )
                label = f"{one.name} {precision}{'' if size is None else f', chunk {size}'}"
                own = sized[size] if size else inputs
                call = Call(implementation=one, inputs=own, precision=precision_of(precision), label=label)
                entries.append(Entry(case=case, call=call))
        for entry in entries:
            entry.baseline = matched_with(entry, entries, request.match_with)
        return entries

    def _checked(self, cell: Cell) -> Cell:
        """The cell whose outputs are compared instead of this cell's."""
        if self.request.check == "full" or cell.tokens.packed:
            return cell
        return replace(cell, tokens=Tokens(sequences=1, seqlen=min(cell.tokens.seqlen, CHECKED_SEQLEN)))


def matched_with(entry: Entry, entries: Sequence[Entry], name: str) -> Entry | None:
    """The entry of the implementation `name` that is most like `entry`: with exact intermediates, the same states, the
    same chunk size, in this order.  None if that is `entry` itself, or if there is none.
    """

    def likeness(other: Entry) -> tuple[bool, bool, bool]:
        ours, theirs = entry.case, other.case
        same_states = ours.precision.state_dtype == theirs.precision.state_dtype
        return theirs.precision.intermediates == "exact", same_states, ours.chunk_size == theirs.chunk_size

    found = max((other for other in entries if other.case.implementation == name), key=likeness, default=None)
    return None if found is entry else found


def _place(cell: Cell) -> str:
    """As `Case.place`."""
    views = ("views",) if cell.layout == "views" else ()
    return ", ".join((cell.shape.name, cell.dtype, *views, *cell.drawn, str(cell.tokens)))
