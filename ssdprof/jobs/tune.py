"""`ssdprof tune`: finds faster configurations of the fused kernels on this GPU.

inputs drawn or captured -> a search for each layer, one axis after the other -> configurations for
later runs
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from ssdprof.capture import store as captures
from ssdprof.capture.manifest import is_capture
from ssdprof.core import statistics, words
from ssdprof.core.base import Intermediates, grouped
from ssdprof.core.case import Case, Drawn, LayerCall
from ssdprof.core.report import LeftOut, Report
from ssdprof.core.statistics import Estimate
from ssdprof.core.subject import Dims
from ssdprof.core.tuned import TunedCalls, TunedConfig
from ssdprof.environment.machine import collect
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs.bench import drawn_of
from ssdprof.jobs.compare import Comparer, Entry
from ssdprof.kernels.inputs import Inputs, Output
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure.first_run import Call, first_line
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer
from ssdprof.operators.generate import Cell
from ssdprof.operators.operator import Operator
from ssdprof.operators.tensors import requested_precisions
from ssdprof.operators.tuning import Config
from ssdprof.progress import Watcher
from ssdprof.store.header import draft
from ssdprof.store.reports import CAPTURES, Writer, load

# a find is faster by more than this, with 95 % confidence: times of a GPU vary as much between days
MARGIN = 0.01
SCREENING = SamplingPlan(
    min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf
)
DECIDING = SamplingPlan(smallest_difference=MARGIN, max_rounds=32, seconds=2.0)
# the name of this configuration; another one is named by its difference from it
COMMITTED = "committed"

Run = Callable[[Inputs, Config], Output]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The subject of one search.

    inputs: of one call, or one for each length that shares the find.  cases: of the committed
    configuration on each.
    """

    operator: Operator
    calls: TunedCalls
    inputs: tuple[Inputs, ...]
    cases: tuple[Case, ...]
    precision: Precision
    committed: Config

    def __str__(self) -> str:
        return f"{'; '.join(case.place for case in self.cases)}, {self.calls['intermediates']}"

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


# --- the inputs: of each layer, whose inputs may share a find

# what a case says of inputs of these sizes, and what creates them
TaskOf = Callable[[Dims], LayerCall | Drawn]
Source = tuple[TaskOf, Callable[[], Inputs]]
Sources = Sequence[Sequence[Source]]


def drawn(operator: Operator, cells: Sequence[Cell], device: torch.device) -> Sources:
    """Random inputs of any shape, as in `ssdprof bench`."""
    return [
        [
            (partial(drawn_of, one, None), partial(operator.generated.draw, one, device))
            for one in own
        ]
        for own in grouped(cells, lambda cell: f"{cell.shape} {cell.dtype}").values()
    ]


def captured(
    operator: Operator, where: str, seqlens: Sequence[int] | None, device: torch.device
) -> Sources:
    """The operator's middle layer in a folder of captures, or in a run with stored captures, at
    each length.

    Decode steps are left out, because the tuned kernels are made for prompts.
    seqlens: lengths; None: all.  Raises BadInputError if there is no such layer.
    """
    folder = Path(where).expanduser()
    if not is_capture(folder):
        folder = load(where)[0] / CAPTURES
        if not is_capture(folder):
            raise BadInputError(
                f"The run {where} has kept no captures.",
                "Run it with --save-captures, or name a --shape.",
            )
    manifest, read = captures.load(folder)
    found = (
        one
        for one in manifest.layers
        if one.layer.operator == operator.name and not (one.call and one.call.kind == "decode")
    )
    by_length = grouped(found, lambda stored: stored.seqlen)
    lengths = sorted(by_length.keys() & set(seqlens or by_length))
    if not lengths:
        raise BadInputError(
            f"{folder} holds no {operator.layers} layer of these lengths.",
            f"It holds {', '.join(map(str, sorted(by_length))) or 'none'}.",
        )

    def source(length: int) -> Source:
        stored = by_length[length][len(by_length[length]) // 2]

        def place(dims: Dims) -> LayerCall:
            return LayerCall(kind="layer", layer=stored.layer, call=stored.call, dims=dims)

        return place, lambda: read(stored, device).inputs

    return [list(map(source, lengths))]


def problems(
    operator: Operator, sources: Sequence[Source], intermediates: Intermediates
) -> Iterator[Problem]:
    """The problems of one layer's sources: one for each, or one for all if they share a find."""
    waiting: dict[str, list[tuple[TaskOf, Inputs]]] = {}
    for place, create in sources:
        inputs = create()
        kernel = operator.tunable.kernel(inputs)
        if operator.tunable.shares_find(kernel):
            waiting.setdefault(kernel, []).append((place, inputs))
        else:
            yield _problem(operator, [(place, inputs)], kernel, intermediates)
        del inputs
    for kernel, loaded in waiting.items():
        yield _problem(operator, loaded, kernel, intermediates)


def _problem(
    operator: Operator,
    loaded: Sequence[tuple[TaskOf, Inputs]],
    kernel: str,
    intermediates: Intermediates,
) -> Problem:
    tuning, judged = operator.tunable, operator.judged
    loaded = sorted(loaded, key=lambda one: judged.dims(one[1]).seqlen)
    longest = loaded[-1][1]
    # fp32 states with exact intermediates, the inputs' dtype with relaxed ones, as in a bench
    (precision,) = requested_precisions(judged.dims(longest).dtype, intermediates, None)
    cases = []
    for place, inputs in loaded:
        dims, work = judged.cost(inputs)
        size: dict[str, Any] = {"batch": dims.batch, "seqlen": dims.seqlen, **work}
        case = Case(
            task=place(dims),
            **size,
            implementation=COMMITTED,
            precision=str(precision),
            status="ran",
        )
        cases.append(case)
    return Problem(
        operator=operator,
        calls=tuning.calls(longest, intermediates, kernel),
        inputs=tuple(inputs for _, inputs in loaded),
        cases=tuple(cases),
        precision=precision,
        committed=tuning.committed(longest, kernel),
    )


# --- the whole job


def gpu_to_tune() -> torch.device:
    """The current GPU.  MissingCapabilityError without one."""
    return require_gpu(
        "Tuning needs",
        (
            "Run it on a machine with the GPU to tune for: what it finds applies to GPUs of the "
            "same "
            "name."
        ),
    )


def tune(
    operator: Operator,
    sources: Sources,
    intermediates: Sequence[Intermediates],
    device: torch.device,
    watcher: Watcher,
    on_search: Callable[[Report, TunedCalls, TunedConfig | None], object],
    *,
    budget: float | None = None,
    **header: Any,
) -> Report:
    """Search for every source.  The report has a case for each candidate on each input, and a note
    for each search.

    on_search: called after each with the report so far, the calls that it was for, and what it
    found.
    budget: seconds of wall clock after which no search begins; None: no limit.
    Searches that do not fit in the GPU's memory or in the budget are left out and named.
    """
    began, timer = time.monotonic(), CudaTimer(device)
    fields: dict[str, Any] = {
        "environment": collect(),
        "baseline": COMMITTED,
        "smallest_difference": MARGIN,
    }
    writer = Writer(Path(), draft(kind="tune", **fields, **header), None)

    def leave_out(place: str, reason: str) -> None:
        writer.update(left_out=(*writer.report.left_out, LeftOut(place=place, reason=reason)))

    for group, wanted in product(sources, intermediates):
        try:
            for problem in problems(operator, group, wanted):
                spent = time.monotonic() - began
                if budget is not None and spent >= budget:
                    leave_out(str(problem), f"the budget of {budget:g} s was spent")
                    continue
                with watcher.step(f"Tuning {problem}"):
                    cases, find, why = search(problem, timer)
                for case in cases:
                    writer.case(case)
                writer.note(f"{problem}: {why}.")
                writer.update(seconds=time.monotonic() - began)
                on_search(writer.report, problem.calls, find)
        except torch.OutOfMemoryError as error:
            leave_out(
                f"{operator.name}, {wanted}",
                f"not all of it was searched: out of memory: {first_line(error)}",
            )
    writer.update(complete=True)
    return writer.report


# --- one search


def search(
    problem: Problem, timer: CudaTimer, run: Run | None = None
) -> tuple[tuple[Case, ...], TunedConfig | None, str]:
    """Search one axis after the other, each from the best so far; then time the best against the
    committed one.

    run: runs a configuration; by default the problem does.  Allocates, compiles and launches.
    Returns the cases of all candidates, what was found, and the outcome in words.
    """
    run, tuning, longest = run or problem.run, problem.operator.tunable, problem.inputs[-1]
    comparer = Comparer(timer=timer, oracle_must_fit=True)
    committed = replace(problem.committed, reason="")
    on_short: dict[Config, Case] = {}  # by the configuration for a short input
    # by name; those of the committed configuration have the samples of all turns, others of their
    # latest
    every: dict[str, Case] = {}
    turns = count(1)

    def screened() -> tuple[Config, str]:
        """The fastest in a few rounds; (.., why) if the committed configuration cannot be timed."""
        best, tried = committed, set[Config]()
        # the graphs of all that take turns keep their outputs
        fitting = max(1, entry_of(best, problem.cases[-1], longest).call.outputs_that_fit - 2)
        right = bool(passing([best]))
        for axis in tuning.axes(best):
            options = [one for one in axis(best, longest) if one not in tried]
            tried |= {committed, *options}
            while right and options:
                timed = in_turns([committed, best, *options[:fitting]], SCREENING)
                options, right = options[fitting:], committed in timed
                fastest = min(timed, key=lambda one: math.prod(_us(timed[one])), default=best)
                if best not in timed or (
                    fastest != best and _ratio(timed[best], timed[fastest]).verdict(0) == "faster"
                ):
                    best = fastest
        whys = (every[case.name].why for case in problem.cases if not right)
        return best, next((f"of itself: {why}" for why in whys if why), "")

    def decided(best: Config) -> tuple[TunedConfig | None, str]:
        timed = in_turns([committed, best], DECIDING)
        if len(timed) < 2:
            return None, "the fastest could not be timed again"
        each = _ratios(timed[committed], timed[best])
        found = statistics.mean(each)
        if found.low <= 1 + MARGIN:
            return None, f"the fastest was not {MARGIN:.0%} faster with 95 % confidence"
        cases = zip(timed[best], each, strict=True)
        if slower := [f"{case.seqlen:,}" for case, one in cases if one.verdict(MARGIN) == "slower"]:
            return None, f"the fastest was slower at {' and '.join(slower)} tokens"
        # the timed inputs, and others to which a find would apply
        for inputs in (*problem.inputs, *tuning.also_judged(best, longest)):
            (judged,) = compared([best], inputs)
            if judged.result != "passed":
                for case in timed[best]:
                    keep(case.changed(samples=(), later_fault=judged.why))
                return None, f"the fastest was wrong: {judged.why}"
        find = TunedConfig(
            calls=problem.calls,
            settings=tuning.settings(best),
            device_ratio=found.value,
            device_interval=(found.low, found.high),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return find, f"found {difference(best, committed)}, {words.speedup(found)}"

    def passing(configs: Iterable[Config]) -> list[Config]:
        """The configurations that pass on a short input; the others' cases say why not."""
        short = {config: tuning.for_short(config, longest) for config in configs}
        new = list(dict.fromkeys(one for one in short.values() if one not in on_short))
        on_short.update(zip(new, compared(new, tuning.short(longest)), strict=True))
        right = []
        for config, as_checked in short.items():
            found = on_short[as_checked]
            if found.result == "passed":
                right.append(config)
            else:
                fields = {name: getattr(found, name) for name in ("status", "reason", "accuracy")}
                for place in problem.cases:
                    keep(entry_of(config, place, longest).case.changed(**fields))
        return right

    def compared(configs: Sequence[Config], inputs: Inputs) -> list[Case]:
        """Each configuration's case on these inputs, verified and not timed."""
        entries = [entry_of(config, problem.cases[-1], inputs) for config in configs]
        return list(replace(comparer, timer=None).compare(entries, str(problem)))

    def in_turns(configs: Iterable[Config], plan: SamplingPlan) -> dict[Config, list[Case]]:
        """The cases, one for each input, of the configurations that are right and could be
        timed.
        """
        turn = replace(comparer, sampling=plan, process=str(next(turns)))
        found: dict[Config, list[Case]] = {config: [] for config in passing(dict.fromkeys(configs))}
        for place, inputs in zip(problem.cases, problem.inputs, strict=True):
            entries = {config: entry_of(config, place, inputs) for config in found}
            verdicts = {
                entry.key: on_short[tuning.for_short(config, longest)]
                for config, entry in entries.items()
            }
            cases = turn.compare(list(entries.values()), str(problem), verdicts)
            latest = {case.name: case for case in cases}
            for config, entry in entries.items():
                found[config].append(latest[entry.case.name])
                keep(latest[entry.case.name])
        return {
            config: cases for config, cases in found.items() if all(case.samples for case in cases)
        }

    def keep(case: Case) -> None:
        known = every.get(case.name)
        if known and case.samples and case.implementation == COMMITTED:
            case = case.changed(samples=(*known.samples, *case.samples))
        every[case.name] = case

    def entry_of(config: Config, place: Case, inputs: Inputs) -> Entry:
        """place: the case of the committed configuration there."""
        change, kernel = difference(config, committed), str(problem.calls["kernel"])
        settings = ", ".join(f"{name} {value}" for name, value in tuning.settings(config).items())
        label = f"The candidate {change or 'the committed configuration'}"
        candidate = Implementation(
            operator=problem.operator.name,
            name=label,
            run=lambda inputs, _precision: run(inputs, config),
            plan=lambda *_: Plan(variant=kernel, launches=1, reason=settings),
        )
        names = {"implementation": change, "baseline": COMMITTED} if change else {}
        return Entry(
            case=place.changed(**names, variant=kernel, plan=settings),
            call=Call(
                operator=problem.operator,
                implementation=candidate,
                inputs=inputs,
                precision=problem.precision,
                label=label,
            ),
        )

    best, why = screened()
    find = None
    if best != committed and not why:
        find, why = decided(best)
    if find is None:
        why = f"the committed configuration stays: {why or 'no candidate was faster'}"
    return tuple(every.values()), find, why


def _us(cases: Sequence[Case]) -> list[float]:
    return [case.device_us.value for case in cases if case.device_us]


def _ratios(base: Sequence[Case], cases: Sequence[Case]) -> list[Estimate]:
    """How many times as fast each is."""
    return [found for own, other in zip(cases, base, strict=True) if (found := own.over(other))]


def _ratio(base: Sequence[Case], cases: Sequence[Case]) -> Estimate:
    return statistics.mean(_ratios(base, cases))
