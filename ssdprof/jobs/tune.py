"""`ssdprof tune`: finds faster configurations of the fused kernels on this GPU.

inputs drawn or captured -> a search for each layer, one axis after the other -> configurations for later runs
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from ssdprof import __version__
from ssdprof.capture import store as captures
from ssdprof.capture.manifest import is_capture
from ssdprof.core import statistics
from ssdprof.core.base import Intermediates, grouped, precisions_for
from ssdprof.core.case import Case
from ssdprof.core.subject import LayerRef
from ssdprof.core.tuned import PlannedSearch, SearchOutcome, Trial, TunedCalls, TunedConfig, TuneReport
from ssdprof.environment.machine import collect
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs.compare import Comparer, Entry
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure.first_run import Call, first_line, type_and_message
from ssdprof.measure.sampling import Samples as Recordings
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer, Timer, device_times
from ssdprof.operators.generate import Cell
from ssdprof.operators.operator import Operator, Output
from ssdprof.operators.tensors import precision_of, precision_record
from ssdprof.operators.tuning import Config
from ssdprof.progress import Watcher
from ssdprof.store.reports import CAPTURES, load

MARGIN = 0.01  # a find is faster by more than this, with 95 % confidence: times of a GPU vary as much between days
SCREENING = SamplingPlan(min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf)
DECIDING = SamplingPlan(smallest_difference=MARGIN, max_rounds=32, seconds=2.0)

Run = Callable[[Any, Config], Output]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The subject of one search.

    inputs: of one call, or one for each length that shares the find
    tokens: of them, in words
    """

    operator: Operator[Any]
    shape: str
    tokens: str
    calls: TunedCalls
    inputs: tuple[Any, ...]
    precision: Precision
    committed: Config

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens}, {self.calls.intermediates}"

    def run(self, inputs: Any, config: Config) -> Output:
        output: Output = self.operator.tunable.run(inputs, self.precision, config)
        return output


def difference(config: Config, committed: Config) -> str:
    """The difference in words: "segment 43, ring 2"; empty if there is none."""
    before = asdict(committed)
    return ", ".join(
        f"{name} {value}" for name, value in asdict(config).items() if name != "reason" and value != before[name]
    )


# --- the inputs: of each layer, whose inputs may share a find

Source = tuple[str, str, Callable[[], Any]]  # a shape and tokens in words, and what creates the inputs
Sources = Mapping[str, Sequence[Source]]


def drawn(operator: Operator[Any], cells: Sequence[Cell], device: torch.device) -> Sources:
    """Random inputs of any shape, as in `ssdprof bench`."""
    return {
        layer: [
            (one.shape.name, f"{one.tokens}, {one.dtype}", partial(operator.generated.draw, one, device)) for one in own
        ]
        for layer, own in grouped(cells, lambda cell: f"{cell.shape} {cell.dtype}").items()
    }


def captured(operator: Operator[Any], where: str, seqlens: Sequence[int] | None, device: torch.device) -> Sources:
    """The operator's middle layer in a folder of captures, or in a run with stored captures, at each length.

    Decode steps are left out, because the tuned kernels are made for prompts.
    seqlens: lengths; None: all.  Raises BadInputError if there is no such layer.
    """
    folder = Path(where).expanduser()
    if not is_capture(folder):
        folder = load(where)[0] / CAPTURES
        if not is_capture(folder):
            raise BadInputError(
                f"The run {where} has kept no captures.", "Run it with --save-captures, or name a --shape."
            )
    manifest, read = captures.load(folder)
    repo = manifest.checkpoint.repo_id
    found = (one for one in manifest.layers if one.layer.operator == operator.name and not one.is_step)
    by_length = grouped(found, lambda stored: stored.seqlen)
    lengths = sorted(by_length.keys() & set(seqlens or by_length))
    if not lengths:
        raise BadInputError(
            f"{folder} holds no {operator.layers} layer of these lengths.",
            f"It holds {', '.join(map(str, sorted(by_length))) or 'none'}.",
        )

    def source(length: int) -> Source:
        stored = by_length[length][len(by_length[length]) // 2]
        return f"{repo} layer {stored.layer.index}", f"{length:,} tokens", lambda: read(stored, device).inputs

    return {repo: list(map(source, lengths))}


def problems(operator: Operator[Any], sources: Sequence[Source], intermediates: Intermediates) -> Iterator[Problem]:
    """The problems of one layer's sources: one for each, or one for all if they share a find."""
    waiting: dict[str, list[tuple[str, str, Any]]] = {}
    for shape, tokens, create in sources:
        inputs = create()
        kernel = operator.tunable.kernel(inputs)
        if operator.tunable.shares_find(kernel):
            waiting.setdefault(kernel, []).append((shape, tokens, inputs))
        else:
            yield _problem(operator, [(shape, tokens, inputs)], kernel, intermediates)
        del inputs
    for kernel, loaded in waiting.items():
        yield _problem(operator, loaded, kernel, intermediates)


def _problem(
    operator: Operator[Any], loaded: Sequence[tuple[str, str, Any]], kernel: str, intermediates: Intermediates
) -> Problem:
    tuning, dims = operator.tunable, operator.judged.dims
    loaded = sorted(loaded, key=lambda one: dims(one[2]).seqlen)
    longest = loaded[-1][2]
    # fp32 states with exact intermediates, the inputs' dtype with relaxed ones, as in a bench
    (wanted,) = precisions_for(dims(longest).dtype, intermediates, None)
    return Problem(
        operator=operator,
        shape=loaded[0][0],
        tokens="; ".join(tokens for _, tokens, _ in loaded),
        calls=tuning.calls(longest, intermediates, kernel),
        inputs=tuple(inputs for _, _, inputs in loaded),
        precision=precision_of(wanted),
        committed=tuning.committed(longest, kernel),
    )


# --- the whole job


def gpu_to_tune() -> torch.device:
    """The current GPU.  MissingCapabilityError without one."""
    return require_gpu(
        "Tuning needs", "Run it on a machine with the GPU to tune for: what it finds applies to GPUs of the same name."
    )


def tune(
    operator: Operator[Any],
    sources: Sources,
    intermediates: Sequence[Intermediates],
    device: torch.device,
    watcher: Watcher,
    on_outcome: Callable[[TuneReport], object],
    *,
    budget: float | None = None,
    command: tuple[str, ...] = (),
) -> TuneReport:
    """Search for every source.  on_outcome: called with the report after each search.

    budget: seconds of wall clock after which no search begins; None: no limit.
    Searches that do not fit in the GPU's memory or in the budget are left out and named.
    """
    began, timer = time.monotonic(), CudaTimer(device)
    report = TuneReport(
        ssdprof_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        environment=collect(),
        operator=operator.name,
    )
    for group, wanted in product(sources.values(), intermediates):
        try:
            for problem in problems(operator, group, wanted):
                spent = time.monotonic() - began
                if budget is not None and spent >= budget:
                    left = f"{problem}: the budget of {budget:g} s was spent"
                    report = report.changed(left_out=(*report.left_out, left))
                    continue
                with watcher.step(f"Tuning {problem}"):
                    outcome = search(problem, timer)
                seconds = time.monotonic() - began
                report = report.changed(outcomes=(*report.outcomes, outcome), seconds=seconds)
                on_outcome(report)
        except torch.OutOfMemoryError as error:
            what = "; ".join(f"{shape}, {tokens}" for shape, tokens, _ in group)
            left = f"{what}, {wanted}: not all of it was searched: out of memory: {first_line(error)}"
            report = report.changed(left_out=(*report.left_out, left))
    return report


def planned(
    operator: Operator[Any], sources: Sources, intermediates: Sequence[Intermediates]
) -> Iterator[PlannedSearch]:
    """The first candidates of the searches that `tune` would run, a record for each varied setting.

    Later candidates start from the best one.
    """
    for group, wanted in product(sources.values(), intermediates):
        for problem in problems(operator, group, wanted):
            for axis in operator.tunable.axes(problem.committed):
                options = axis(problem.committed, problem.inputs[-1])
                changes = (change for option in options if (change := difference(option, problem.committed)))
                yield PlannedSearch(
                    shape=problem.shape, tokens=problem.tokens, intermediates=wanted, candidates=tuple(changes)
                )


# --- one search


def search(problem: Problem, timer: Timer, run: Run | None = None) -> SearchOutcome:
    """Search one axis after the other, each from the best so far; then time the best against the committed one.

    run: runs a configuration; by default the problem does.  Allocates, compiles and launches.
    """
    return _Search(problem, timer, run or problem.run).outcome()


class _Search:
    def __init__(self, problem: Problem, timer: Timer, run: Run) -> None:
        self._problem = problem
        self._tuning = problem.operator.tunable
        self._timer = timer
        self._run = run
        self._committed = replace(problem.committed, reason="")
        self._verified: dict[Config, Case] = {}  # by the configuration for the short input
        self._trials: dict[Config, Trial] = {}

    def outcome(self) -> SearchOutcome:
        best, why = self._best()
        find = None
        if not why and best != self._committed:
            find, why = self._decide(best)
        return SearchOutcome(
            shape=self._problem.shape,
            tokens=self._problem.tokens,
            calls=self._problem.calls,
            committed=self._tuning.settings(self._committed),
            trials=tuple(self._trials.values()),
            find=find,
            why=why or ("" if find else "no candidate was faster"),
        )

    def _best(self) -> tuple[Config, str]:
        """The fastest in a few rounds; (.., why) if the committed configuration cannot be timed."""
        best = self._committed
        if not self._right([best]):
            return best, f"the committed configuration: {self._trials[best].why}"
        for axis in self._tuning.axes(best):
            options = [option for option in axis(best, self._problem.inputs[-1]) if option not in self._trials]
            samples = self._sample([self._committed, best, *self._right(options)], SCREENING)
            if self._committed not in samples:
                return best, f"the committed configuration: {self._trials[self._committed].why}"
            for config, values in samples.items():
                self._timed(config, values, samples[self._committed])
            fastest = min(samples, key=lambda config: statistics.median(samples[config]).value)
            if best not in samples or statistics.ratio(samples[best], samples[fastest]).verdict(0.0) == "faster":
                best = fastest
        return best, ""

    def _decide(self, best: Config) -> tuple[TunedConfig | None, str]:
        samples = self._sample([self._committed, best], DECIDING)
        if len(samples) < 2:
            return None, "the fastest could not be timed again"
        trial = self._timed(best, samples[best], samples[self._committed])
        assert trial.device_ratio is not None
        assert trial.device_interval is not None
        if trial.device_interval[0] <= 1 + MARGIN:
            return None, f"the fastest was not {MARGIN:.0%} faster with 95 % confidence"
        if slower := self._slower_lengths(best):
            return None, f"the fastest was slower at {slower} tokens"
        # the timed inputs, and others to which a find would apply
        for inputs in (*self._problem.inputs, *self._tuning.also_judged(best, self._problem.inputs[-1])):
            (case,) = self._compared([best], inputs).values()
            if case.why:
                self._trials[best] = trial.changed(verdict="wrong", why=case.why)
                return None, f"the fastest was wrong: {case.why}"
        find = TunedConfig(
            calls=self._problem.calls,
            settings=trial.settings,
            device_ratio=trial.device_ratio,
            device_interval=trial.device_interval,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return find, ""

    # --- accuracy

    def _right(self, configs: Sequence[Config]) -> list[Config]:
        """The configurations that pass on a short input; the others get a trial with the reason."""
        longest = self._problem.inputs[-1]
        short = {config: self._tuning.for_short(config, longest) for config in configs}
        new = dict.fromkeys(one for one in short.values() if one not in self._verified)
        self._verified |= self._compared(list(new), self._tuning.short(longest))
        right = []
        for config, as_checked in short.items():
            case = self._verified[as_checked]
            if not case.why:
                right.append(config)
            else:
                self._untimed(config, "wrong" if case.status == "ran" else "does not run", case.why)
        return right

    def _compared(self, configs: Sequence[Config], inputs: Any) -> dict[Config, Case]:
        """Each configuration's case on these inputs, verified and not timed."""
        dims = self._problem.operator.judged.dims(inputs)
        layer = LayerRef(index=0, name=self._problem.shape, operator=self._problem.operator.name)
        common: dict[str, Any] = {"layer": layer, "dims": dims, "batch": dims.batch, "seqlen": dims.seqlen}
        common |= {"precision": precision_record(self._problem.precision), "status": "ran"}
        calls = [self._call(config, inputs) for config in configs]
        entries = [Entry(case=Case(**common, implementation=one.label), call=one) for one in calls]
        return dict(zip(configs, Comparer(oracle_must_fit=True).compare(entries, "a candidate"), strict=True))

    def _call(self, config: Config, inputs: Any) -> Call:
        name = f"The candidate {difference(config, self._committed) or 'the committed configuration'}"
        candidate = Implementation(
            operator=self._problem.operator.name,
            name=name,
            run=lambda inputs, _precision: self._run(inputs, config),
            plan=lambda *_: Plan(variant=self._problem.calls.kernel, launches=1),
        )
        return Call(implementation=candidate, inputs=inputs, precision=self._problem.precision, label=name)

    # --- speed

    def _sample(
        self, configs: Sequence[Config], plan: SamplingPlan, inputs: Sequence[Any] | None = None
    ) -> dict[Config, Recordings]:
        """Device times in turns: for each configuration the geometric mean over the inputs (None: the problem's).

        Configurations that cannot be timed are left out, and their trials have the reason.
        """
        own = self._problem.inputs if inputs is None else inputs

        def untimed(config: Config, error: Exception) -> None:
            self._untimed(config, "does not run", type_and_message(error))

        calls = {config: [self._call(config, one) for one in own] for config in configs}
        return device_times(calls, self._timer, plan, on_untimed=untimed)

    def _slower_lengths(self, config: Config) -> str:
        """The lengths at which the configuration is slower, if there are several inputs."""
        slower = []
        for inputs in self._problem.inputs if len(self._problem.inputs) > 1 else ():
            samples = self._sample([self._committed, config], DECIDING, [inputs])
            timed = len(samples) == 2
            if not timed or statistics.ratio(samples[self._committed], samples[config]).verdict(MARGIN) == "slower":
                slower.append(f"{self._problem.operator.judged.dims(inputs).seqlen:,}")
        return " and ".join(slower)

    def _timed(self, config: Config, samples: Recordings, committed: Recordings) -> Trial:
        found = statistics.ratio(committed, samples)
        trial = self._trials[config] = Trial(
            change=difference(config, self._committed),
            settings=self._tuning.settings(config),
            verdict="committed" if config == self._committed else found.verdict(MARGIN),
            device_us=statistics.median(samples).value,
            device_ratio=found.value,
            device_interval=(found.low, found.high),
        )
        return trial

    def _untimed(self, config: Config, status: Literal["wrong", "does not run"], why: str) -> None:
        change = difference(config, self._committed)
        self._trials[config] = Trial(change=change, settings=self._tuning.settings(config), verdict=status, why=why)
