"""`ssdprof bench`: the kernels alone, on random inputs of a model's shape, one cell after the
other, within a budget if there is one.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdprof import kernels, operators
from ssdprof.core.case import Case, Generated
from ssdprof.core.report import Report, Requested
from ssdprof.core.target import Dims
from ssdprof.environment.machine import collect, kernels_hash, read_clocks
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import limits, states
from ssdprof.jobs.compare import Comparer, Entry, Verdicts
from ssdprof.jobs.failures import keeping
from ssdprof.jobs.options import BenchOptions
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.first_run import TimeIsUp, first_line
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
from ssdprof.operators.serving import in_pool
from ssdprof.operators.tensors import requested_precisions
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import Writer, load, opened
from ssdprof.store.tuned import use_saved

BY_TOKEN = "recurrent"  # is compared unasked on cells of decoding (`Tokens.is_decoding`)
CHECKED_SEQLEN = 4096  # the most tokens of the sequence that `--check short` compares
SECONDS_PER_CELL = 1.5  # the longest time for which one cell is sampled
LEAST_SECONDS = 0.1  # the shortest such time
MAX_ROUNDS = 32  # the most rounds of one recording
PROCESSES = 3  # number of processes that take samples, unless --processes or torchrun decide that
NEEDS_GPU = (
    "A bench needs",
    "Without one nothing is timed; 'ssdprof run demo' compares the kernels' outputs on any "
    "machine.",
)


def run_bench(
    options: BenchOptions,
    names: Sequence[str],
    too_large: Iterable[Tokens],
    ranks: Ranks | None,
    watcher: Watcher,
) -> tuple[Path, Report]:
    """Run the requested kind of bench: times of the implementations, or errors of decoded states.

    names: of all implementations to compare; of no effect if states are decoded.
    too_large: layouts of tokens that --max-tokens leaves out, which the user is told.
    ranks: see `bench`.

    Returns the report's folder and the report.

    Raises BadInputError and MissingCapabilityError, as `resolved`, `bench` and `decode_cells` do.
    """
    for tokens in too_large:
        watcher.say(f"{tokens} is left out: it has more than {options.max_tokens} tokens.")
    if options.decode_states:
        return decode_cells(options, operators.get(options.operator), watcher, ranks)
    request = resolved(options, names)
    if not request.no_tuned:
        use_saved(watcher.say)
    return bench(request, operators.get(request.operator), watcher, ranks)


def bench(
    request: BenchOptions, operator: Operator, watcher: Watcher, ranks: Ranks | None = None
) -> tuple[Path, Report]:
    """Measure every cell.  Returns the report's folder and the report.

    request: see `resolved`.
    ranks: processes that share the cells, of which the first one returns the report of all; None:
        this one alone.

    A cell that does not fit in the GPU's memory or in the budget is left out, and the report names
    it.  Raises MissingCapabilityError without a GPU.
    """
    device = require_gpu(*NEEDS_GPU)
    requested: list[Requested] = []
    for cell in request.measured:
        for implementation, precision in compared(request, operator, cell):
            requested.append((_case_key(cell), implementation.name, str(precision)))
    began = time.monotonic()  # the budget includes the opening of the report
    with opened(
        request.out,
        watcher,
        ranks,
        partial(source_files, request.compared),
        sampler=request.sampler,
        kind="bench",
        target=operator.name,
        command=request.command,
        environment=collect(),
        requested=tuple(requested),
        conditions=request.conditions,
        baseline=request.baseline,
        matched_with=request.match_with,
        smallest_difference=request.smallest_difference,
        kernels=kernels_hash(operator.name),
        absent=tuple(known.absent for known in request.compared if known.absent),
        samplers=request.processes or (1 if ranks else PROCESSES),
    ) as writer:
        earlier_seconds = writer.report.first.seconds  # of the interrupted bench that goes on
        ceilings = writer.report.ceilings or measure_ceilings(device)
        writer.update(ceilings=ceilings, clocks=read_clocks())
        cells = ranks.share(request.measured) if ranks else request.measured
        end = math.inf if request.budget is None else began + request.budget
        cell_bench = CellBench(request, operator, device, writer, watcher, end)
        with watcher.step("Measuring", len(cells), unit="cells") as advance:
            for done, cell in enumerate(cells):
                if request.sampler or not cell_bench.is_done(cell):
                    left = end - time.monotonic()
                    cell_bench.measure(cell, sampling_seconds(left, len(cells) - done))
                    seconds = earlier_seconds + time.monotonic() - began
                    writer.update(clocks=read_clocks(), seconds=seconds)
                advance(1)
    return load(writer.folder)


def decode_cells(
    options: BenchOptions, operator: Operator, watcher: Watcher, ranks: Ranks | None
) -> tuple[Path, Report]:
    """Decode the inputs of every cell with states in each format, on the GPU or the CPU.  Returns
    the report's folder and the report.

    ranks: see `bench`.  Raises MissingCapabilityError if this machine cannot run the longest cell.
    """
    device = limits.device()
    longest = max(cell.tokens.sequences * cell.tokens.seqlen for cell in options.measured)
    limits.check_replay((longest,))
    requested: list[Requested] = []
    for cell in options.measured:
        requested += states.requested(_where(cell), str(cell.tokens), options)
    with opened(
        options.out,
        watcher,
        ranks,
        kind="bench",
        target=operator.name,
        command=options.command,
        environment=collect(),
        requested=tuple(requested),
        conditions=options.conditions,
        baseline="",
    ) as writer:
        cells = ranks.share(options.measured) if ranks else options.measured
        with limits.memory_errors(), watcher.step("Decoding", len(cells), unit="cells") as advance:
            for cell in cells:
                inputs = operator.generated.draw(cell, device)
                task = generated_task(cell, None, operator.oracle.dims(inputs))
                states.decode(operator, inputs, task, options, writer, watcher)
                advance(1)
    return load(writer.folder)


def resolved(options: BenchOptions, names: Sequence[str]) -> BenchOptions:
    """The options with their implementations, and the names of the baseline and of the one with
    which outputs are compared: the request of `bench`.

    names: names of all implementations to compare.

    Raises BadInputError for an unknown name, and, without --verify, for a gate of match if
    --match-with names another implementation than the operator's baseline; MissingCapabilityError
    without a GPU, and if the baseline or the implementation of --match-with is unavailable.
    """
    operator = operators.get(options.operator)
    resolve_for_gpu = resolver(torch.device("cuda"))
    requested = [resolve_for_gpu(operator.name, name) for name in names]
    assert options.baseline is not None  # the reading of the options names the default
    baseline = resolve_for_gpu(operator.name, options.baseline)
    matched = resolve_for_gpu(operator.name, options.match_with or operator.baseline)
    # --verify itself takes another implementation to compare outputs with: see `target.bench`
    if (
        not options.verify
        and matched.name != operator.baseline
        and any(gate.metric == "match" for gate in options.conditions)
    ):
        raise BadInputError(
            f"A gate of match is with {operator.baseline}, but --match-with names {matched.name}.",
            "Leave one of them out.",
        )
    require_gpu(*NEEDS_GPU)
    everyone = [*requested, required(baseline)]
    if options.match_with:
        everyone.append(required(matched))
    return replace(
        options,
        compared=tuple({known.name: known for known in everyone}.values()),
        baseline=baseline.name,
        match_with=matched.name,
    )


def compared(
    request: BenchOptions, operator: Operator, cell: Cell
) -> list[tuple[Implementation, Precision]]:
    """The implementations that are compared on a cell, each with one of its precisions: the
    available ones, other libraries first.

    - Libraries and the user's kernels run at the precisions that they declare, else at the
      requested ones.
    - The operator's baseline runs with exact intermediates only, and with the state dtypes of the
      requested precisions.
    - Alternative forms, and `BY_TOKEN`, run once, with exact intermediates and fp32 states.
      `BY_TOKEN` is added if the cell is one of decoding, and the operator has it.
    - Other bundled implementations run at the requested precisions.
    - In decoding on a pool, bundled implementations are called in place if they can be.
    """
    wanted = requested_precisions(cell.dtype, request.intermediates, request.states)
    exact = tuple(dict.fromkeys(replace(each, intermediates="exact") for each in wanted))
    once = {BY_TOKEN, *operator.generated.alternatives}
    present = [known for known in request.compared if not known.absent]
    everyone = sorted(present, key=lambda known: known.kind != "library")
    if cell.tokens.is_decoding and BY_TOKEN in kernels.names(operator.name):
        everyone.append(resolve(operator, BY_TOKEN))
    if cell.tokens.pool and cell.tokens.is_decoding:
        # libraries and the user's kernels address a pool themselves
        everyone = [in_pool(known) if known.kind == "bundled" else known for known in everyone]
    cases: list[tuple[Implementation, Precision]] = []
    for known in {known.name: known for known in everyone}.values():
        if known.kind != "bundled":
            precisions = own_precisions(known, cell.dtype, wanted)
        elif known.name in once:
            precisions = (Precision(),)
        else:
            precisions = exact if known.name == operator.baseline else wanted
        cases += [(known, precision) for precision in precisions]
    return cases


def chunk_sizes(
    request: BenchOptions, operator: Operator, implementation: Implementation
) -> Sequence[int | None]:
    """The chunk sizes that are tried, of which the fastest is reported; (None,) for the user's
    kernels, for implementations that choose their own, and if the operator has no chunk size.
    """
    chunks_itself = operator.generated.chunks_itself
    fixed = (
        implementation.kind == "own"
        or implementation.name in chunks_itself
        or not request.chunk_sizes
    )
    return (None,) if fixed else request.chunk_sizes


def sampling_seconds(left: float, cells_left: int) -> float:
    """Seconds of sampling for the next cell.

    left: seconds until the end of the budget; infinite without one, negative after its end.
    cells_left: cells that are not yet measured, the next one included.

    Sampling gets a third of the cell's share of that time, because the cell is also compiled and
    compared with the oracle; but at least `LEAST_SECONDS` and at most `SECONDS_PER_CELL`.
    """
    return min(SECONDS_PER_CELL, max(LEAST_SECONDS, left / cells_left / 3))


class CellBench:
    """Measures one cell after the other.

    end: the end of the budget, by `time.monotonic`; infinite without one.
    """

    def __init__(
        self,
        request: BenchOptions,
        operator: Operator,
        device: torch.device,
        writer: Writer,
        watcher: Watcher,
        end: float,
    ) -> None:
        """Allocates memory on the GPU, for `CudaTimer`."""
        isolated = IsolatedFirstCall(min(request.first_call_s, FIRST_CALL_S))
        self._request = request
        self._operator = operator
        self._writer = writer
        self._device = device
        self._prober = Prober(isolated, only=TURNING_KEYS)
        # by the short cell whose outputs were compared in place of those of longer cells
        self._verdicts: dict[Cell, Verdicts] = {}
        self._comparer = Comparer(
            timer=CudaTimer(device),
            ceilings=writer.report.ceilings,
            process=writer.process,
            first_call_s=request.first_call_s,
            until=end,
            isolated=isolated,
            watcher=watcher,
            oracle_must_fit=True,
            on_fault=keeping(writer.folder),
        )

    def is_done(self, cell: Cell) -> bool:
        """Whether an interrupted bench, which goes on now, has a result for every case of the
        cell.
        """
        requested = self._writer.report.requested
        names = [", ".join(case) for case in requested if case[0] == _case_key(cell)]
        return all(name in self._writer.earlier for name in names)

    def measure(self, cell: Cell, seconds: float) -> None:
        """Write the cases of a cell, or the reason why it is left out.

        A sampler writes the cases that have samples in the report, with its own samples.

        seconds: how long the cell is sampled.
        """
        request = self._request
        comparer = replace(
            self._comparer,
            sampling=SamplingPlan(
                smallest_difference=request.smallest_difference,
                max_rounds=MAX_ROUNDS,
                seconds=seconds,
            ),
        )
        try:
            if request.sampler:
                entries = self._entries(cell)
                cases = comparer.sample_again(entries, str(cell), self._writer.earlier)
            else:
                cases = self.measured(cell, comparer)
            for case in cases:
                self._writer.case(case)
            return
        except TimeIsUp as error:
            reason = f"the budget of {request.budget:g} s was spent{error}"
        except torch.OutOfMemoryError as error:
            reason = f"out of memory: {first_line(error)}"
        self._writer.leave_out(_case_key(cell), reason)

    def measured(self, cell: Cell, comparer: Comparer) -> Iterable[Case]:
        """The cases of a cell, each once, with its samples if it was timed.

        Raises TimeIsUp at the end of the budget, after which the cell has no case, even if some
        were verified.
        """
        if time.monotonic() >= comparer.until:
            raise TimeIsUp
        verdicts = None
        short_cell = cell
        if self._request.check == "short" and not cell.tokens.packed:
            seqlen = min(cell.tokens.seqlen, CHECKED_SEQLEN)
            short_cell = replace(cell, tokens=replace(cell.tokens, sequences=1, seqlen=seqlen))
        if short_cell != cell:
            verdicts = self._short_verdicts(short_cell, comparer)
        entries = self._entries(cell, short_cell.tokens.seqlen if verdicts else None)
        cases = {case.name: case for case in comparer.compare(entries, str(cell), verdicts)}
        if verdicts:
            # The first calls on the short cell are reported in this cell, and in no later cell that
            # has the same short cell.
            self._verdicts[short_cell] = {
                key: case.changed(first_call=None) for key, case in verdicts.items()
            }
        return cases.values()

    def _short_verdicts(self, short_cell: Cell, comparer: Comparer) -> Verdicts:
        """The verdicts on a short cell, compared in place of a long one, and not timed."""
        if short_cell not in self._verdicts:
            entries = self._entries(short_cell)
            compared = replace(comparer, timer=None).compare(entries, str(short_cell))
            cases = {(case.name, case.chunk_size): case for case in compared}
            self._verdicts[short_cell] = {
                entry.key: cases[entry.case.name, entry.case.chunk_size] for entry in entries
            }
        return self._verdicts[short_cell]

    def _entries(self, cell: Cell, checked: int | None = None) -> list[Entry]:
        """The entries of a cell, which are timed together.

        checked: see `generated_task`.
        """
        request = self._request
        operator = self._operator
        inputs = operator.generated.draw(cell, self._device)
        sized = {size: replace(inputs, chunk_size=size) for size in request.chunk_sizes}
        if sized:  # for implementations that choose their own chunk size
            inputs = sized[min(sized)]
        dims, work = operator.oracle.cost(inputs)
        fields: dict[str, Any] = {
            "task": generated_task(cell, checked, dims),
            "batch": dims.batch,
            "seqlen": dims.seqlen,
            "inputs": ", ".join((cell.dtype, *cell.ways, cell.layout)),
            **work,
        }
        entries: list[Entry] = []
        for implementation, precision in compared(request, operator, cell):
            baseline = "" if implementation.name == request.baseline else request.baseline
            for size in chunk_sizes(request, operator, implementation):
                of_size = sized[size] if size else inputs
                chunk = f", chunk {size}" if size else ""
                entry = Entry.of(
                    implementation,
                    of_size,
                    precision,
                    label=f"{implementation.name} {precision}{chunk}",
                    baseline=baseline,
                    chunk_size=size,
                    **fields,
                )
                entry.probes = partial(self._prober.probe, implementation, of_size, precision)
                entries.append(entry)
        assert request.match_with is not None  # `resolved` names it
        for entry in entries:
            entry.baseline = matched_with(entry, entries, request.match_with)
        return entries


def generated_task(cell: Cell, checked: int | None, dims: Dims) -> Generated:
    """The task of the cell's cases.

    checked: tokens of the sequence whose outputs are compared in place of the cell's; None: the
    cell's own outputs are compared.
    """
    return Generated(
        kind="generated",
        dims=dims,
        shape=cell.shape.name,
        shape_words=str(cell.shape),
        tokens=str(cell.tokens),
        sequences=cell.tokens.sequences,
        packed=cell.tokens.packed,
        layout=cell.layout,
        ways=cell.ways,
        checked=checked,
    )


def matched_with(entry: Entry, entries: Sequence[Entry], name: str) -> Entry | None:
    """The entry of the implementation `name` with whose output that of `entry` is compared.

    Entries with exact intermediates are preferred; among these, those with the same dtype of
    states; among these, those with the same chunk size.  None if the implementation has no entry,
    or if `entry` itself is chosen.
    """

    def likeness(other: Entry) -> tuple[bool, bool, bool]:
        """How well another entry fits `entry`; the largest fits best."""
        precision = other.call.precision
        return (
            precision.exact,
            precision.state_dtype == entry.call.precision.state_dtype,
            other.case.chunk_size == entry.case.chunk_size,
        )

    others = (other for other in entries if other.case.implementation == name)
    most_like = max(others, key=likeness, default=None)
    return None if most_like is entry else most_like


def _case_key(cell: Cell) -> str:
    """The `Case.case_key` of the cell's cases."""
    return f"{_where(cell)}, {cell.tokens}"


def _where(cell: Cell) -> str:
    """The `Generated.where` of the cell's tasks."""
    words = [cell.shape.name, cell.dtype]
    if cell.layout != "contiguous":
        words.append(cell.layout)
    return ", ".join([*words, *cell.ways])
