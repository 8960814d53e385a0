"""`ssdprof tune`: finds faster configurations of the fused kernels on this GPU.

A search takes random inputs, as a bench does.  It starts from the committed configuration, the one
that is built in, and changes one setting ("axis") after the other.  The result is stored for later
runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from ssdprof import operators
from ssdprof.core import statistics
from ssdprof.core.base import Intermediates, grouped
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.core.tuned import TunedCalls, TunedConfig
from ssdprof.environment.machine import collect
from ssdprof.environment.toolchain import require_gpu
from ssdprof.jobs.bench import generated_task
from ssdprof.jobs.compare import Comparer, Entry
from ssdprof.jobs.options import TuneOptions
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure.first_run import Call, first_line
from ssdprof.measure.sampling import FIRST_LOOK, SamplingPlan
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.generate import Cell
from ssdprof.operators.operator import Operator
from ssdprof.operators.tensors import requested_precisions
from ssdprof.operators.tuning import Config
from ssdprof.progress import Watcher
from ssdprof.store.header import draft
from ssdprof.store.reports import Writer

# A tuned configuration must be faster by more than this share, with 95 % confidence: the times of a
# GPU vary by as much between days.
MARGIN = 0.01
# how the best candidate is timed against the committed configuration at the end of a search
DECIDING = SamplingPlan(smallest_difference=MARGIN, max_rounds=32, seconds=2.0)
# the name of the built-in configuration; others are named by their difference from it
COMMITTED = "committed"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The target of one search.

    calls: the calls to which the tuned configuration will apply, as it is stored.
    inputs: the inputs of one call, or of several calls, which share the tuned configuration; the
        shortest first.
    cases: for each of these inputs, the case of the committed configuration.
    precision: the precision of all calls.
    committed: the committed configuration for these calls.
    """

    operator: Operator
    calls: TunedCalls
    inputs: tuple[Inputs, ...]
    cases: tuple[Case, ...]
    precision: Precision
    committed: Config

    def __str__(self) -> str:
        return f"{'; '.join(case.case_key for case in self.cases)}, {self.calls['intermediates']}"

    def run(self, inputs: Inputs, config: Config) -> Output:
        return self.operator.tunable.run(inputs, self.precision, config)


def difference(config: Config, committed: Config) -> str:
    """The settings of `config` that differ from the committed ones, in words: "segment 43, ring 2";
    empty if there are none.  The reason of a configuration is no setting.
    """
    committed_settings = asdict(committed)
    return ", ".join(
        f"{name} {value}"
        for name, value in asdict(config).items()
        if name != "reason" and value != committed_settings[name]
    )


# --- the problems of a layer, whose inputs may share a tuned configuration


def problems(
    operator: Operator, cells: Sequence[Cell], intermediates: Intermediates, device: torch.device
) -> Iterator[Problem]:
    """The problems of one layer's cells.

    There is one for each cell, but only one for all cells of a kernel that shares a tuned
    configuration between lengths.
    """
    waiting: dict[str, list[tuple[Cell, Inputs]]] = {}  # kernel -> cells that share a configuration
    for cell in cells:
        inputs = operator.generated.draw(cell, device)
        kernel = operator.tunable.kernel(inputs)
        if operator.tunable.shares_config(kernel):
            waiting.setdefault(kernel, []).append((cell, inputs))
        else:
            yield _problem(operator, [(cell, inputs)], kernel, intermediates)
        # Unless the cell waits, this frees its memory before the next cell's inputs are generated.
        # The caller must also drop the problem.
        del inputs
    for kernel, together in waiting.items():
        yield _problem(operator, together, kernel, intermediates)


def _problem(
    operator: Operator,
    together: Sequence[tuple[Cell, Inputs]],
    kernel: str,
    intermediates: Intermediates,
) -> Problem:
    """The problem of one cell, or of several that share a tuned configuration.

    together: each cell with its inputs.  kernel: the kernel that runs all of them.
    """
    tuning = operator.tunable
    together = sorted(together, key=lambda cell_and_inputs: cell_and_inputs[0].tokens.seqlen)
    longest_cell, longest_inputs = together[-1]
    # as in a bench: exact intermediates with fp32 states, relaxed ones with the inputs' dtype
    (precision,) = requested_precisions(longest_cell.dtype, intermediates, None)
    cases = []
    for cell, inputs in together:
        dims, work = operator.oracle.cost(inputs)
        fields: dict[str, Any] = {"batch": dims.batch, "seqlen": dims.seqlen, **work}
        case = Case(
            task=generated_task(cell, None, dims),
            implementation=COMMITTED,
            precision=str(precision),
            status="ran",
            **fields,
        )
        cases.append(case)
    return Problem(
        operator=operator,
        calls=tuning.calls(longest_inputs, intermediates, kernel),
        inputs=tuple(inputs for _, inputs in together),
        cases=tuple(cases),
        precision=precision,
        committed=tuning.committed(longest_inputs, precision, kernel),
    )


# --- the whole job


def gpu_to_tune() -> torch.device:
    """The current GPU.  MissingCapabilityError without one."""
    return require_gpu(
        "Tuning needs",
        "Run it on a machine with the GPU to tune for: what it finds applies to GPUs of the "
        "same name.",
    )


def tune(
    options: TuneOptions,
    cells: Sequence[Cell],
    device: torch.device,
    watcher: Watcher,
    on_search: Callable[[Report, TunedCalls, TunedConfig | None], object],
) -> Report:
    """Search for a faster configuration for every cell.

    The report has a case for each candidate on each input, and a note for each search that found
    nothing.  It names the searches that are left out because the budget is spent: after that, no
    search begins; the one that runs is finished.  If one does not fit in the GPU's memory, the
    report names its layer, whose further searches are left out, too.

    device: the GPU.
    on_search: called after each search with the report so far, the calls that were tuned, and the
        configuration that was found; None if none was faster.
    """
    began = time.monotonic()
    timer = CudaTimer(device)
    operator = operators.get(options.operator)
    intermediates: tuple[Intermediates, ...] = (
        ("exact", "relaxed") if options.intermediates == "all" else (options.intermediates,)
    )
    header = draft(
        kind="tune",
        target=operator.name,
        command=options.command,
        environment=collect(),
        baseline=COMMITTED,
        smallest_difference=MARGIN,
    )
    writer = Writer(Path(), header, None)  # keeps the report in memory

    layers = grouped(cells, lambda cell: f"{cell.shape} {cell.dtype}").values()
    for cells_of_layer, wanted in product(layers, intermediates):
        try:
            for problem in problems(operator, cells_of_layer, wanted, device):
                spent = time.monotonic() - began
                if options.budget is not None and spent >= options.budget:
                    writer.leave_out(str(problem), f"the budget of {options.budget:g} s was spent")
                    continue
                with watcher.step(f"Tuning {problem}"):
                    cases, outcome = search(problem, timer)
                for case in cases:
                    writer.case(case)
                tuned = None if isinstance(outcome, str) else outcome
                if tuned is None:
                    writer.note(f"{problem}: the committed configuration stays: {outcome}.")
                writer.update(seconds=time.monotonic() - began)
                on_search(writer.report, problem.calls, tuned)
                del problem  # frees its inputs before those of the next one are generated
        except torch.OutOfMemoryError as error:
            writer.leave_out(
                f"{cells_of_layer[0].shape.name}, {cells_of_layer[0].dtype}, {wanted}",
                f"not all of it was searched: out of memory: {first_line(error)}",
            )
    writer.update(complete=True)
    return writer.report


# --- one search


def search(problem: Problem, timer: CudaTimer) -> tuple[tuple[Case, ...], TunedConfig | str]:
    """Search one axis after the other, each from the best configuration so far; then time the best
    against the committed one.

    Returns the cases of the committed configuration and of all candidates, and the tuned
    configuration, or the reason in words why there is none.
    """
    trials = _Trials(problem, timer)
    best = _screened(trials)
    if best is None:
        faults = [trials.cases[case.name].why for case in problem.cases]
        first_fault = next(filter(None, faults), "")
        outcome: TunedConfig | str = f"it cannot be timed: {first_fault}"
    elif best == trials.committed:
        outcome = "no candidate was faster"
    else:
        outcome = _decided(trials, best)
    return tuple(trials.cases.values()), outcome


def _screened(trials: _Trials) -> Config | None:
    """The fastest configuration by a few rounds of samples, searched axis by axis; None if the
    committed configuration is wrong or cannot be timed.
    """
    problem = trials.problem
    committed = trials.committed
    longest = problem.inputs[-1]
    best = committed
    tried = set[Config]()
    if not trials.passing([committed]):
        return None
    # Every configuration that is timed keeps its output in a CUDA graph.  Two of the outputs that
    # fit in memory are those of the committed and the best configuration, which each batch times
    # again.
    entry = trials.entry(committed, problem.cases[-1], longest)
    fitting = max(1, entry.call.outputs_that_fit - 2)
    for axis in problem.operator.tunable.axes(committed):
        candidates = [config for config in axis(best, longest) if config not in tried]
        tried |= {committed, *candidates}
        for start in range(0, len(candidates), fitting):
            batch = candidates[start : start + fitting]
            timed = trials.time([committed, best, *batch], FIRST_LOOK)
            if committed not in timed:
                return None
            # by the product of the times on all inputs, and so by their geometric mean
            fastest = min(timed, key=lambda config: math.prod(_us(timed[config])))
            if best not in timed:
                best = fastest  # the best so far could not be timed again
            if fastest != best:
                ratio = statistics.mean(_ratios(timed[best], timed[fastest]))
                if ratio.verdict(0) == "faster":
                    best = fastest
    return best


def _decided(trials: _Trials, best: Config) -> TunedConfig | str:
    """Time `best` against the committed configuration with many samples.

    Returns the tuned configuration, or the reason why the committed one stays: one of the two
    cannot be timed again, or `best` is not faster by `MARGIN`, is slower at some length, or is
    wrong on inputs to which it would apply.
    """
    problem = trials.problem
    tuning = problem.operator.tunable
    timed = trials.time([trials.committed, best], DECIDING)
    if len(timed) < 2:
        return "the fastest could not be timed against it again"
    ratios = _ratios(timed[trials.committed], timed[best])
    ratio = statistics.mean(ratios)
    if ratio.low <= 1 + MARGIN:
        return f"the fastest was not {MARGIN:.0%} faster with 95 % confidence"
    slower = [
        f"{case.seqlen:,}"
        for case, ratio_of_case in zip(timed[best], ratios, strict=True)
        if ratio_of_case.verdict(MARGIN) == "slower"
    ]
    if slower:
        return f"the fastest was slower at {' and '.join(slower)} tokens"
    # `time` has verified `best` on the short input only
    for inputs in (*problem.inputs, *tuning.also_checked(best, problem.inputs[-1])):
        (verified,) = trials.verify([best], inputs)
        if verified.result != "passed":
            for case in timed[best]:
                trials.keep(case.changed(samples=(), later_fault=verified.why))
            return f"the fastest was wrong: {verified.why}"
    return TunedConfig(
        calls=problem.calls,
        settings=tuning.settings(best),
        device_ratio=ratio.value,
        device_interval=(ratio.low, ratio.high),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Trials:
    """Verifies and times the configurations of one search.

    committed: the committed configuration, without its reason, so that it equals a candidate with
        the same settings.
    cases: the cases by name.  A case of the committed configuration has the samples of every call
        of `time`, unless it failed since; a case of another one those of the latest call.
    """

    def __init__(self, problem: Problem, timer: CudaTimer) -> None:
        self.problem = problem
        self._tuning = problem.operator.tunable
        self._longest = problem.inputs[-1]
        self.committed = replace(problem.committed, reason="")
        self.cases: dict[str, Case] = {}
        self._comparer = Comparer(timer=timer, oracle_must_fit=True)
        self._turns = count(1)  # a name for the samples of each call of `time`
        # configuration for the short input -> its verified case on that input
        self._on_short: dict[Config, Case] = {}

    def passing(self, configs: Sequence[Config]) -> list[Config]:
        """The configurations whose outputs are right on the short input, which is the beginning of
        the longest one (`Tuning.short`).

        For each of the others, `cases` gets a case with the fault on each of the problem's inputs.
        """
        short_configs = {config: self._for_short(config) for config in configs}
        distinct = dict.fromkeys(short_configs.values())
        new = [config for config in distinct if config not in self._on_short]
        verified_cases = self.verify(new, self._tuning.short(self._longest))
        self._on_short.update(zip(new, verified_cases, strict=True))
        passed = []
        for config, short_config in short_configs.items():
            verified = self._on_short[short_config]
            if verified.result == "passed":
                passed.append(config)
                continue
            for committed_case in self.problem.cases:
                case = self.entry(config, committed_case, self._longest).case
                fault = case.changed(
                    status=verified.status, reason=verified.reason, accuracy=verified.accuracy
                )
                self.keep(fault)
        return passed

    def verify(self, configs: Sequence[Config], inputs: Inputs) -> list[Case]:
        """Each configuration's case on these inputs, compared with the oracle but not timed.

        The sizes in these cases are those of the problem's longest input.
        """
        entries = [self.entry(config, self.problem.cases[-1], inputs) for config in configs]
        return list(replace(self._comparer, timer=None).compare(entries, str(self.problem)))

    def time(self, configs: Iterable[Config], plan: SamplingPlan) -> dict[Config, list[Case]]:
        """Time the configurations in turns on each of the problem's inputs.

        Returns the cases, one for each input, of the configurations that are right on the short
        input and could be timed on all inputs.  All cases are kept in `cases`.
        """
        comparer = replace(self._comparer, sampling=plan, process=str(next(self._turns)))
        passing = self.passing(list(dict.fromkeys(configs)))
        timed: dict[Config, list[Case]] = {config: [] for config in passing}
        for committed_case, inputs in zip(self.problem.cases, self.problem.inputs, strict=True):
            entries = {config: self.entry(config, committed_case, inputs) for config in timed}
            verdicts = {
                entry.key: self._on_short[self._for_short(config)]
                for config, entry in entries.items()
            }
            compared = comparer.compare(list(entries.values()), str(self.problem), verdicts)
            # a case that is timed comes twice, first without samples: the second one counts
            latest = {case.name: case for case in compared}
            for config, entry in entries.items():
                timed[config].append(latest[entry.case.name])
                self.keep(latest[entry.case.name])
        return {
            config: cases for config, cases in timed.items() if all(case.samples for case in cases)
        }

    def _for_short(self, config: Config) -> Config:
        """The configuration with which a candidate is verified on the short input."""
        return self._tuning.for_short(config, self._longest)

    def keep(self, case: Case) -> None:
        """Add the case to `cases`, in place of an earlier one of its name.

        New samples of the committed configuration are added to its earlier ones.
        """
        known = self.cases.get(case.name)
        if known and case.samples and case.implementation == COMMITTED:
            case = case.changed(samples=(*known.samples, *case.samples))
        self.cases[case.name] = case

    def entry(self, config: Config, committed_case: Case, inputs: Inputs) -> Entry:
        """The entry of a configuration on these inputs.

        committed_case: the committed configuration's case, from which the entry's case is made.  It
            says the sizes, also if the inputs are shorter.
        """
        problem = self.problem
        change = difference(config, self.committed)
        kernel = str(problem.calls["kernel"])
        settings = self._tuning.settings(config)
        settings_words = ", ".join(f"{name} {value}" for name, value in settings.items())
        label = f"The candidate {change}" if change else "The committed configuration"

        def run(inputs: Inputs, _precision: Precision) -> Output:
            return problem.run(inputs, config)

        def plan(_inputs: Inputs, _precision: Precision) -> Plan:
            return Plan(variant=kernel, launches=1, reason=settings_words)

        candidate = Implementation(operator=problem.operator.name, name=label, run=run, plan=plan)
        call = Call(
            implementation=candidate, inputs=inputs, precision=problem.precision, label=label
        )
        if change:
            committed_case = committed_case.changed(implementation=change, baseline=COMMITTED)
        return Entry(case=committed_case.changed(variant=kernel, plan=settings_words), call=call)


def _us(cases: Sequence[Case]) -> list[float]:
    """The device times in microseconds of the cases that have one."""
    return [case.device_us.value for case in cases if case.device_us]


def _ratios(base: Sequence[Case], cases: Sequence[Case]) -> list[Estimate]:
    """How many times as fast each case is as that of `base` on the same input, by device time.

    Pairs of which one was not timed are left out.
    """
    pairs = zip(cases, base, strict=True)
    return list(filter(None, (case.over(base_case) for case, base_case in pairs)))
