"""`ssdprof bench`: the kernels alone, on random inputs of a model's shape, one cell after the other
within a budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdprof import kernels, operators
from ssdprof.core.case import Case, Drawn
from ssdprof.core.report import LeftOut, Report
from ssdprof.core.subject import Dims
from ssdprof.environment.machine import collect, kernels_hash, watch_clocks
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs.compare import Comparer, Entry, Verdicts
from ssdprof.jobs.options import BenchOptions
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.first_run import Call, TimeIsUp, first_line
from ssdprof.measure.isolate import FIRST_CALL_S, IsolatedFirstCall
from ssdprof.measure.laws import TURNING_KEYS
from ssdprof.measure.probes import Prober
from ssdprof.measure.roofline import measure_ceilings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.implementations import (
    own_precisions,
    required,
    resolve,
    resolver,
    source_files,
)
from ssdprof.operators.operator import Operator
from ssdprof.operators.tensors import requested_precisions
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import load, opened

BY_TOKEN = "recurrent"  # runs if sequences have only a few tokens
CHECKED_SEQLEN = 4096  # tokens of a sequence that a short check compares
SECONDS_PER_CELL = 1.5  # of sampling, at most
LEAST_SECONDS = 0.1
MAX_ROUNDS = 32  # of a recording
PROCESSES = 3  # that take samples
NEEDS_GPU = (
    "A bench needs",
    (
        "Without one nothing is timed; 'ssdprof run demo' compares the kernels' outputs on any "
        "machine."
    ),
)


def bench(
    request: BenchOptions, operator: Operator, watcher: Watcher, ranks: Ranks | None = None
) -> tuple[Path, Report]:
    """Measure every cell.  Returns the report's folder and the report.

    ranks: processes that share the cells.  The first one returns the report of all.

    A cell that does not fit in the GPU's memory or in the budget is left out, and the report names
    it.
    """
    device = require_gpu(*NEEDS_GPU)
    header = dict[str, Any](
        kind="bench",
        subject=operator.name,
        command=request.command,
        environment=collect(),
        requested=tuple(
            (_place(cell), implementation.name, str(precision))
            for cell in request.measured
            for implementation, precision in compared(request, operator, cell)
        ),
        conditions=request.conditions,
        baseline=request.baseline,
        matched_with=request.match_with or operator.baseline,
        smallest_difference=request.smallest_difference,
        kernels=kernels_hash(operator.name),
        absent=tuple(one.absent for one in request.compared if one.absent),
        samplers=request.processes or (1 if ranks else PROCESSES),
    )
    began = time.monotonic()
    end = math.inf if request.budget is None else began + request.budget
    files = partial(source_files, request.compared)
    with opened(request.out, watcher, ranks, files, sampler=request.sampler, **header) as writer:
        clocks = watch_clocks()
        began -= writer.report.first.seconds
        writer.update(ceilings=writer.report.ceilings or measure_ceilings(device))
        mine = ranks.share(request.measured) if ranks else request.measured
        comparer = Comparer(
            timer=CudaTimer(device),
            ceilings=writer.report.ceilings,
            process=writer.process,
            isolated=IsolatedFirstCall(min(request.first_call, FIRST_CALL_S)),
            watcher=watcher,
            oracle_must_fit=True,
        )
        verdicts: dict[Cell, Verdicts] = {}
        assert comparer.isolated
        prober = Prober(comparer.isolated, only=TURNING_KEYS)
        with watcher.step("Measuring", len(mine), unit="cells") as advance:
            for done, cell in enumerate(mine):
                there = [
                    ", ".join(one) in writer.earlier
                    for one in writer.report.requested
                    if one[0] == _place(cell)
                ]
                if all(there) and not request.sampler:
                    advance(1)
                    continue
                seconds, left = sampling_seconds(end - time.monotonic(), len(mine) - done), ""
                smallest = request.smallest_difference
                sampling = SamplingPlan(
                    smallest_difference=smallest, max_rounds=MAX_ROUNDS, seconds=seconds
                )
                own = replace(
                    comparer, sampling=sampling, first_call_s=request.first_call, until=end
                )
                try:
                    cases: Iterable[Case]
                    if request.sampler:
                        entries = _entries(request, operator, cell, device, None, prober)
                        cases = own.sample_again(entries, str(cell), writer.earlier)
                    else:
                        cases = measured(request, operator, cell, device, own, verdicts, prober)
                    for case in cases:
                        writer.case(case)
                except TimeIsUp as error:
                    left = f"the budget of {request.budget:g} s was spent{error}"
                except torch.OutOfMemoryError as error:
                    left = f"out of memory: {first_line(error)}"
                if left:
                    writer.update(
                        left_out=(*writer.report.left_out, LeftOut(place=_place(cell), reason=left))
                    )
                writer.update(clocks=clocks(), seconds=time.monotonic() - began)
                advance(1)
    return load(writer.folder)


def resolved(
    asked: BenchOptions, names: Sequence[str], too_large: Iterable[Tokens], watcher: Watcher
) -> BenchOptions:
    """The request with its implementations.  names: of all.  too_large: left out, which the watcher
    is told.

    Raises BadInputError for a name that is unknown, MissingCapabilityError without a GPU and for a
    baseline that is unavailable.
    """
    operator, get = operators.get(asked.operator), resolver(torch.device("cuda"))
    found = [get(operator.name, name) for name in names]
    over, matched = (
        get(operator.name, name)
        for name in (asked.baseline or "", asked.match_with or operator.baseline)
    )
    if (
        not asked.verify
        and matched.name != operator.baseline
        and any(gate.metric == "match" for gate in asked.conditions)
    ):
        raise BadInputError(
            f"A gate of match is with {operator.baseline}, but --match-with names {matched.name}.",
            "Leave one of them out.",
        )
    require_gpu(*NEEDS_GPU)
    compared = {
        one.name: one
        for one in (*found, required(over), *([required(matched)] if asked.match_with else []))
    }
    for one in too_large:
        watcher.say(f"{one} is left out: it has more than {asked.max_tokens} tokens.")
    return replace(
        asked, compared=tuple(compared.values()), baseline=over.name, match_with=matched.name
    )


def compared(
    request: BenchOptions, operator: Operator, cell: Cell
) -> list[tuple[Implementation, Precision]]:
    """Other libraries, then the others, each at its own precisions or at the wanted ones.

    The baseline of the operator runs with exact intermediates only, and with the wanted state
    dtypes.  Alternative forms run once, with exact intermediates and fp32 states.  So do
    implementations that go token by token; if the cell's sequences have a few tokens, they take
    part even if they are not named.
    """
    wanted = requested_precisions(cell.dtype, request.intermediates, request.states)
    once = {BY_TOKEN, *operator.generated.alternatives}
    everyone = sorted(
        (one for one in request.compared if not one.absent), key=lambda one: one.kind != "library"
    )
    if cell.tokens.steps and BY_TOKEN in kernels.names(operator.name):
        everyone.append(resolve(operator, BY_TOKEN))

    def precisions(one: Implementation) -> Sequence[Precision]:
        if one.kind != "bundled":
            return own_precisions(one, cell.dtype, wanted)
        if one.name in once:
            return (Precision(),)
        return (
            tuple(dict.fromkeys(replace(precision, intermediates="exact") for precision in wanted))
            if one.name == operator.baseline
            else wanted
        )

    named = {one.name: one for one in everyone}
    return [(one, precision) for one in named.values() for precision in precisions(one)]


def sizes(
    request: BenchOptions, operator: Operator, implementation: Implementation
) -> Sequence[int | None]:
    """The chunk sizes from which the implementation takes the fastest; (None,) if it chooses its
    own.
    """
    chunks_itself = operator.generated.chunks_itself
    fixed = (
        implementation.kind == "own" or implementation.name in chunks_itself or not request.sizes
    )
    return (None,) if fixed else request.sizes


def sampling_seconds(left: float, cells_left: int) -> float:
    """A third of the next cell's share of the remaining time: the cell is also compiled and
    compared.
    """
    return min(SECONDS_PER_CELL, max(LEAST_SECONDS, left / cells_left / 3))


def measured(
    request: BenchOptions,
    operator: Operator,
    cell: Cell,
    device: torch.device,
    comparer: Comparer,
    verdicts: dict[Cell, Verdicts],
    prober: Prober,
) -> Iterable[Case]:
    """The cases of a cell: a cell that is left out has none, also if some were verified before.

    verdicts: what short checks found.  Raises TimeIsUp, also half-way.
    """
    if time.monotonic() >= comparer.until:
        raise TimeIsUp
    checked, known = cell, None
    if request.check == "short" and not cell.tokens.packed:
        checked = replace(
            cell,
            tokens=replace(
                cell.tokens, sequences=1, seqlen=min(cell.tokens.seqlen, CHECKED_SEQLEN)
            ),
        )
    if checked != cell:
        if checked not in verdicts:
            entries = _entries(request, operator, checked, device, None, prober)
            compared = replace(comparer, timer=None).compare(entries, str(checked))
            found = {(case.name, case.chunk_size): case for case in compared}
            verdicts[checked] = {
                one.key: found[one.case.name, one.case.chunk_size] for one in entries
            }
        known = verdicts[checked]
    tokens = checked.tokens.seqlen if known else None
    entries = _entries(request, operator, cell, device, tokens, prober)
    cases = {case.name: case for case in comparer.compare(entries, str(cell), known)}
    if known:  # later cells find all kernels compiled
        verdicts[checked] = {key: case.changed(first_call=None) for key, case in known.items()}
    return cases.values()


def _entries(
    request: BenchOptions,
    operator: Operator,
    cell: Cell,
    device: torch.device,
    checked: int | None,
    prober: Prober,
) -> list[Entry]:
    """All of a cell, timed together.  checked: tokens of the cell whose outputs are compared
    instead; None: its own.  prober: of the law that a bench tests.
    """
    inputs = operator.generated.draw(cell, device)
    sized = {size: replace(inputs, chunk_size=size) for size in request.sizes}
    inputs = sized[min(sized)] if sized else inputs
    dims, work = operator.judged.cost(inputs)
    words = ", ".join((cell.dtype, *cell.drawn, cell.layout))
    common: dict[str, Any] = {
        "task": drawn_of(cell, checked, dims),
        "batch": dims.batch,
        "seqlen": dims.seqlen,
        "inputs": words,
        **work,
    }
    entries: list[Entry] = []
    for one, precision in compared(request, operator, cell):
        own = dict(
            common,
            implementation=one.name,
            kind=one.kind,
            version=one.version,
            precision=str(precision),
        )
        own["baseline"] = "" if one.name == request.baseline else request.baseline
        for size in sizes(request, operator, one):
            given = sized[size] if size else inputs
            label = f"{one.name} {precision}{f', chunk {size}' if size else ''}"
            call = Call(
                operator=operator,
                implementation=one,
                inputs=given,
                precision=precision,
                label=label,
            )
            case = Case(**own, chunk_size=size, status="ran")
            probes = partial(prober.probe, one, given, precision)
            entries.append(Entry(case=case, call=call, probes=probes))
    for entry in entries:
        entry.baseline = matched_with(entry, entries, request.match_with or operator.baseline)
    return entries


def drawn_of(cell: Cell, checked: int | None, dims: Dims) -> Drawn:
    """What cases say of the cell."""
    return Drawn(
        kind="drawn",
        dims=dims,
        shape=cell.shape.name,
        shape_words=str(cell.shape),
        tokens=str(cell.tokens),
        sequences=cell.tokens.sequences,
        packed=cell.tokens.packed,
        layout=cell.layout,
        ways=cell.drawn,
        checked=checked,
    )


def matched_with(entry: Entry, entries: Sequence[Entry], name: str) -> Entry | None:
    """The entry of the implementation `name` that is most like `entry`: with exact intermediates,
    the same states, the same chunk size, in this order.  None if that is `entry` itself, or if
    there is none.
    """

    def likeness(other: Entry) -> tuple[bool, bool, bool]:
        ours, theirs = entry.case, other.case
        our_precision, their_precision = entry.call.precision, other.call.precision
        return (
            their_precision.exact,
            our_precision.state_dtype == their_precision.state_dtype,
            ours.chunk_size == theirs.chunk_size,
        )

    found = max(
        (other for other in entries if other.case.implementation == name),
        key=likeness,
        default=None,
    )
    return None if found is entry else found


def _place(cell: Cell) -> str:
    """As `Case.place`."""
    layout = () if cell.layout == "contiguous" else (cell.layout,)
    return ", ".join((cell.shape.name, cell.dtype, *layout, *cell.drawn, str(cell.tokens)))
