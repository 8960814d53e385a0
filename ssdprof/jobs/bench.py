"""`ssdprof bench`: the kernels alone, on random inputs of a model's shape, one cell after the other within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ssdprof import kernels
from ssdprof.core.base import EXACT_FP32, SMALLEST_DIFFERENCE, PrecisionRecord
from ssdprof.core.case import Case, Drawn
from ssdprof.core.report import Condition, LeftOut, Report, Requested
from ssdprof.environment.machine import ClockWatch, collect, kernels_hash
from ssdprof.environment.toolchain import require_gpu
from ssdprof.jobs.compare import BudgetSpent, Comparer, Entry
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.first_run import Deadline, first_line
from ssdprof.measure.isolate import FIRST_CALL_S, BoundKernel, IsolatedFirstCall
from ssdprof.measure.roofline import measure_ceilings, work_of
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.generate import Cell, InputDType, Tokens
from ssdprof.operators.implementations import own_precisions, resolve
from ssdprof.operators.operator import Operator
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import Writer, draft, load, opened

CHECKED_SEQLEN = 4096  # tokens of a sequence that a short check compares
SECONDS_PER_CELL = 1.5  # of sampling, at most
LEAST_SECONDS = 0.1
MAX_ROUNDS = 32  # of a recording
BY_TOKEN = "recurrent"  # runs if sequences have only a few tokens
NEEDS_GPU = (
    "A bench needs",
    "Without one nothing is timed; 'ssdprof run demo' compares the kernels' outputs on any machine.",
)


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """precisions: of our implementations, by dtype of the inputs.  budget: seconds of wall clock; None: no limit.

    check: compare outputs at full length, or "short": on one sequence of at most CHECKED_SEQLEN tokens, once for cells
        that share it.
    implementations: unavailable ones are left out, and the report says so.
    baseline, match_with: names; outputs are matched with those of `match_with`.
    chunk_sizes: candidates for implementations that take it from the inputs; empty if the operator has none.
    first_call: time limit of a first call, in seconds.
    """

    operator: Operator[Any]
    cells: tuple[Cell, ...]
    precisions: Callable[[InputDType], tuple[PrecisionRecord, ...]]
    implementations: tuple[Implementation, ...]
    baseline: str = "unfused"
    match_with: str = "unfused"
    chunk_sizes: tuple[int, ...] = ()
    check: Literal["full", "short"] = "full"
    budget: float | None = None
    first_call: float = math.inf
    smallest_difference: float = SMALLEST_DIFFERENCE
    conditions: tuple[Condition, ...] = ()
    out: Path | None = None
    command: tuple[str, ...] = ()

    def compared(self, cell: Cell) -> list[tuple[Implementation, PrecisionRecord]]:
        """Other libraries, then the others, each at its own precisions or at the wanted ones.

        The baseline of the operator runs with exact intermediates only, and with the wanted state dtypes.  Alternative
        forms run once, with exact intermediates and fp32 states.  So do implementations that go token by token; if the
        cell's sequences have a few tokens, they take part even if they are not named.
        """
        operator, wanted = self.operator, self.precisions(cell.dtype)
        once = {BY_TOKEN, *operator.generated.alternatives}
        everyone = sorted(
            (one for one in self.implementations if not one.absent), key=lambda one: one.kind != "library"
        )
        if cell.tokens.steps and BY_TOKEN in kernels.names(operator.name):
            everyone.append(resolve(operator, BY_TOKEN))

        def precisions(one: Implementation) -> Sequence[PrecisionRecord]:
            if one.kind != "bundled":
                return own_precisions(one, cell.dtype, tuple(wanted))
            if one.name in once:
                return (EXACT_FP32,)
            return tuple(dict.fromkeys(own.exact for own in wanted)) if one.name == operator.baseline else wanted

        named = {one.name: one for one in everyone}
        return [(one, precision) for one in named.values() for precision in precisions(one)]

    def sizes(self, implementation: Implementation) -> Sequence[int | None]:
        """The chunk sizes from which the implementation takes the fastest; (None,) if it chooses its own."""
        chunks_itself = self.operator.generated.chunks_itself
        fixed = implementation.kind == "own" or implementation.name in chunks_itself or not self.chunk_sizes
        return (None,) if fixed else self.chunk_sizes


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
        bench_of_cells = _Cells(request, device, writer, watcher)
        with watcher.step("Measuring", len(mine), unit="cells") as advance:
            for done, cell in enumerate(mine):
                bench_of_cells.measure(cell, sampling_seconds(end - time.monotonic(), len(mine) - done), end)
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
    writer: Writer
    watcher: Watcher

    def __post_init__(self) -> None:
        self._timer = CudaTimer(self.device)
        self._isolated = IsolatedFirstCall(min(self.request.first_call, FIRST_CALL_S))
        self._verdicts: dict[Cell, Mapping[Hashable, Case]] = {}

    def measure(self, cell: Cell, seconds: float, end: float) -> None:
        """seconds: of sampling.  end: of the bench, by time.monotonic."""
        left_out = partial(self._leave_out, cell)
        try:
            deadline = Deadline(most=self.request.first_call, until=end)
            if deadline.exhausted:
                raise BudgetSpent("")
            self._measure(cell, seconds, deadline)
        except BudgetSpent as error:
            left_out(f"the budget of {self.request.budget:g} s was spent{error}")
        except torch.OutOfMemoryError as error:
            left_out(f"out of memory: {first_line(error)}")

    def _leave_out(self, cell: Cell, reason: str) -> None:
        one = LeftOut(place=_place(cell), reason=reason)
        self.writer.update(left_out=(*self.writer.report.left_out, one))

    def _measure(self, cell: Cell, seconds: float, deadline: Deadline) -> None:
        """Raises BudgetSpent, also half-way."""
        comparer = Comparer(
            timer=self._timer,
            ceilings=self.writer.report.ceilings,
            sampling=SamplingPlan(
                smallest_difference=self.request.smallest_difference, max_rounds=MAX_ROUNDS, seconds=seconds
            ),
            process=self.writer.process,
            deadline=deadline,
            watcher=self.watcher,
            oracle_must_fit=True,
        )
        checked = self._checked(cell)
        verdicts = None
        if checked != cell:
            if checked not in self._verdicts:
                entries = self._entries(checked, None)
                short = replace(comparer, timer=None)
                compared = {one.key: one for one in entries}
                found = list(short.compare(entries, str(checked)))
                self._verdicts[checked] = {
                    key: next(
                        case for case in found if (case.name, case.chunk_size) == (one.case.name, one.case.chunk_size)
                    )
                    for key, one in compared.items()
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
        inputs = operator.generated.draw(cell, self.device)
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
        entries: list[Entry] = []
        sized = {
            size: inputs if size is None else operator.generated.with_chunk_size(inputs, size)
            for size in (None, *request.chunk_sizes)
        }
        if request.chunk_sizes:
            sized[None] = sized[min(request.chunk_sizes)]
        dims = operator.judged.dims(sized[None])
        work = work_of(sized[None])
        for implementation, precision in request.compared(cell):
            for size in request.sizes(implementation):
                label = f"{implementation.name} {precision}{'' if size is None else f', chunk {size}'}"
                bound = BoundKernel(implementation, sized[size], self._isolated)
                case = Case(
                    drawn=drawn,
                    dims=dims,
                    batch=dims.batch,
                    seqlen=dims.seqlen,
                    inputs=", ".join((cell.dtype, *cell.drawn, cell.layout)),
                    implementation=implementation.name,
                    kind=implementation.kind,
                    version=implementation.version,
                    precision=precision,
                    baseline="" if implementation.name == request.baseline else request.baseline,
                    status="ran",
                    work=work,
                    chunk_size=size,
                )
                entries.append(Entry(case=case, call=bound.call(precision, label=label)))
        for one in entries:
            one.baseline = matched_with(one, entries, request.match_with)
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
