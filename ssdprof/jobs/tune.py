"""`ssdprof tune`: finds faster configurations of the fused kernels on this GPU.

random inputs, as in a bench -> a search for each layer, one axis after the other ->
configurations for later runs
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

# a tuned configuration is faster by more than this, with 95 % confidence: times of a GPU vary as
# much between days
MARGIN = 0.01
DECIDING = SamplingPlan(smallest_difference=MARGIN, max_rounds=32, seconds=2.0)
# the name of this configuration; another one is named by its difference from it
COMMITTED = "committed"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The target of one search.

    inputs: of one call, or one for each length that shares the tuned configuration.  cases: of the
    committed configuration on each.
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
    """The difference in words: "segment 43, ring 2"; empty if there is none."""
    before = asdict(committed)
    return ", ".join(
        f"{name} {value}"
        for name, value in asdict(config).items()
        if name != "reason" and value != before[name]
    )


# --- the problems of a layer, whose inputs may share a tuned configuration


def problems(
    operator: Operator, cells: Sequence[Cell], intermediates: Intermediates, device: torch.device
) -> Iterator[Problem]:
    """The problems of one layer's cells: one for each, or one for all if they share a tuned
    configuration.
    """
    waiting: dict[str, list[tuple[Cell, Inputs]]] = {}
    for cell in cells:
        inputs = operator.generated.draw(cell, device)
        kernel = operator.tunable.kernel(inputs)
        if operator.tunable.shares_config(kernel):
            waiting.setdefault(kernel, []).append((cell, inputs))
        else:
            yield _problem(operator, [(cell, inputs)], kernel, intermediates)
        del inputs
    for kernel, together in waiting.items():
        yield _problem(operator, together, kernel, intermediates)


def _problem(
    operator: Operator,
    together: Sequence[tuple[Cell, Inputs]],
    kernel: str,
    intermediates: Intermediates,
) -> Problem:
    """The problem of inputs that share a tuned configuration, the shortest first."""
    tuning = operator.tunable
    together = sorted(together, key=lambda generated: generated[0].tokens.seqlen)
    largest, longest = together[-1]
    # fp32 states with exact intermediates, the inputs' dtype with relaxed ones, as in a bench
    (precision,) = requested_precisions(largest.dtype, intermediates, None)
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
        calls=tuning.calls(longest, intermediates, kernel),
        inputs=tuple(inputs for _, inputs in together),
        cases=tuple(cases),
        precision=precision,
        committed=tuning.committed(longest, kernel),
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
    """Search for every cell.  The report has a case for each candidate on each input, and a note
    for each search that found nothing.

    on_search: called after each with the report so far, the calls that it was for, and what it
    found.
    Searches that do not fit in the GPU's memory or in the budget are left out and named.
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
    writer = Writer(Path(), header, None)

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
        except torch.OutOfMemoryError as error:
            writer.leave_out(
                f"{operator.name}, {wanted}",
                f"not all of it was searched: out of memory: {first_line(error)}",
            )
    writer.update(complete=True)
    return writer.report


# --- one search


def search(problem: Problem, timer: CudaTimer) -> tuple[tuple[Case, ...], TunedConfig | str]:
    """Search one axis after the other, each from the best so far; then time the best against the
    committed one.

    Returns the cases of all candidates, and what was found, or else the reason in words.
    """
    trials = _Trials(problem, timer)
    best = _screened(trials)
    if best is None:
        faults = (trials.cases[case.name].why for case in problem.cases)
        outcome: TunedConfig | str = f"of itself: {next(filter(None, faults), '')}"
    elif best == trials.committed:
        outcome = "no candidate was faster"
    else:
        outcome = _decided(trials, best)
    return tuple(trials.cases.values()), outcome


def _screened(trials: _Trials) -> Config | None:
    """The fastest in a few rounds, axis by axis; None if the committed configuration cannot be
    timed.
    """
    problem = trials.problem
    committed = trials.committed
    longest = problem.inputs[-1]
    best = committed
    tried = set[Config]()
    if not trials.passing([committed]):
        return None
    # the graphs of all that take turns keep their outputs
    entry = trials.entry(committed, problem.cases[-1], longest)
    fitting = max(1, entry.call.outputs_that_fit - 2)
    for axis in problem.operator.tunable.axes(committed):
        options = [config for config in axis(best, longest) if config not in tried]
        tried |= {committed, *options}
        for start in range(0, len(options), fitting):
            some = options[start : start + fitting]
            timed = trials.time([committed, best, *some], FIRST_LOOK)
            if committed not in timed:
                return None
            fastest = min(timed, key=lambda config: math.prod(_us(timed[config])))
            if best not in timed or (
                fastest != best and _ratio(timed[best], timed[fastest]).verdict(0) == "faster"
            ):
                best = fastest
    return best


def _decided(trials: _Trials, best: Config) -> TunedConfig | str:
    """The tuned configuration, or the reason why the committed configuration stays."""
    problem = trials.problem
    tuning = trials.problem.operator.tunable
    timed = trials.time([trials.committed, best], DECIDING)
    if len(timed) < 2:
        return "the fastest could not be timed again"
    ratios = _ratios(timed[trials.committed], timed[best])
    ratio = statistics.mean(ratios)
    if ratio.low <= 1 + MARGIN:
        return f"the fastest was not {MARGIN:.0%} faster with 95 % confidence"
    slower = [
        f"{case.seqlen:,}"
        for case, of_length in zip(timed[best], ratios, strict=True)
        if of_length.verdict(MARGIN) == "slower"
    ]
    if slower:
        return f"the fastest was slower at {' and '.join(slower)} tokens"
    # the timed inputs, and others to which a tuned configuration would apply
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
    """Verifies and times configurations.

    cases: by name; those of the committed configuration have the samples of all turns, others of
        their latest.
    """

    def __init__(self, problem: Problem, timer: CudaTimer) -> None:
        self.problem = problem
        self._tuning = problem.operator.tunable
        self._longest = problem.inputs[-1]
        self.committed = replace(problem.committed, reason="")
        self.cases: dict[str, Case] = {}
        self._comparer = Comparer(timer=timer, oracle_must_fit=True)
        self._turns = count(1)
        self._on_short: dict[Config, Case] = {}  # by the configuration for a short input

    def passing(self, configs: Sequence[Config]) -> list[Config]:
        """The configurations that pass on a short input; the others' cases say why not."""
        short = {config: self._for_short(config) for config in configs}
        new = [config for config in dict.fromkeys(short.values()) if config not in self._on_short]
        self._on_short.update(
            zip(new, self.verify(new, self._tuning.short(self._longest)), strict=True)
        )
        passed = []
        for config, as_checked in short.items():
            verified = self._on_short[as_checked]
            if verified.result == "passed":
                passed.append(config)
                continue
            for committed_case in self.problem.cases:
                case = self.entry(config, committed_case, self._longest).case
                fault = {name: getattr(verified, name) for name in ("status", "reason", "accuracy")}
                self.keep(case.changed(**fault))
        return passed

    def verify(self, configs: Sequence[Config], inputs: Inputs) -> list[Case]:
        """Each configuration's case on these inputs, verified and not timed."""
        entries = [self.entry(config, self.problem.cases[-1], inputs) for config in configs]
        return list(replace(self._comparer, timer=None).compare(entries, str(self.problem)))

    def time(self, configs: Iterable[Config], plan: SamplingPlan) -> dict[Config, list[Case]]:
        """The cases, one for each input, of the configurations that are right and could be
        timed.
        """
        comparer = replace(self._comparer, sampling=plan, process=str(next(self._turns)))
        timed: dict[Config, list[Case]] = {
            config: [] for config in self.passing(list(dict.fromkeys(configs)))
        }
        for committed_case, inputs in zip(self.problem.cases, self.problem.inputs, strict=True):
            entries = {config: self.entry(config, committed_case, inputs) for config in timed}
            verdicts = {
                entry.key: self._on_short[self._for_short(config)]
                for config, entry in entries.items()
            }
            compared = comparer.compare(list(entries.values()), str(self.problem), verdicts)
            latest = {case.name: case for case in compared}
            for config, entry in entries.items():
                timed[config].append(latest[entry.case.name])
                self.keep(latest[entry.case.name])
        return {
            config: cases for config, cases in timed.items() if all(case.samples for case in cases)
        }

    def _for_short(self, config: Config) -> Config:
        return self._tuning.for_short(config, self._longest)

    def keep(self, case: Case) -> None:
        known = self.cases.get(case.name)
        if known and case.samples and case.implementation == COMMITTED:
            case = case.changed(samples=(*known.samples, *case.samples))
        self.cases[case.name] = case

    def entry(self, config: Config, committed_case: Case, inputs: Inputs) -> Entry:
        """The entry that compares a configuration with the committed one, on these inputs.

        committed_case: that of the committed configuration.
        """
        problem = self.problem
        change = difference(config, self.committed)
        kernel = str(problem.calls["kernel"])
        values = self._tuning.settings(config)
        settings = ", ".join(f"{name} {value}" for name, value in values.items())
        label = f"The candidate {change or 'the committed configuration'}"

        def run(inputs: Inputs, _precision: Precision) -> Output:
            return problem.run(inputs, config)

        def plan(_inputs: Inputs, _precision: Precision) -> Plan:
            return Plan(variant=kernel, launches=1, reason=settings)

        candidate = Implementation(operator=problem.operator.name, name=label, run=run, plan=plan)
        call = Call(
            implementation=candidate, inputs=inputs, precision=problem.precision, label=label
        )
        if change:
            committed_case = committed_case.changed(implementation=change, baseline=COMMITTED)
        return Entry(case=committed_case.changed(variant=kernel, plan=settings), call=call)


def _us(cases: Sequence[Case]) -> list[float]:
    return [case.device_us.value for case in cases if case.device_us]


def _ratios(base: Sequence[Case], cases: Sequence[Case]) -> list[Estimate]:
    """How many times as fast each is."""
    pairs = zip(cases, base, strict=True)
    return list(filter(None, (case.over(of_base) for case, of_base in pairs)))


def _ratio(base: Sequence[Case], cases: Sequence[Case]) -> Estimate:
    return statistics.mean(_ratios(base, cases))
