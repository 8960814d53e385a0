"""One search: finds a configuration for one kind of call that passes and is faster than the committed one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Plan
from ssdprof.measure.first_run import attempt
from ssdprof.measure.timing import Bench
from ssdprof.measure.first_run import Call
from ssdprof.measure.engine import device_times, objection, verify
from ssdprof.measure.first_run import type_and_message
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.core.statistics import Samples, median_us, ratio, ratio_interval
from ssdprof.operators.operator import Operator, Output
from ssdprof.operators.tuning import Calls, Config
from ssdprof.core.base import Intermediates
from ssdprof.core.report import Verdict
from ssdprof.tuning.records import Find, Outcome, Trial

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
    intermediates: Intermediates
    calls: Calls
    inputs: tuple[Any, ...]
    precision: Precision
    committed: Config

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens}, {self.intermediates}"

    def run(self, inputs: Any, config: Config) -> Output:
        output: Output = self.operator.tunable.run(inputs, self.precision, config)
        return output


def difference(config: Config, committed: Config) -> str:
    """The difference in words: "segment 43, ring 2"; empty if there is none."""
    before = asdict(committed)
    return ", ".join(
        f"{name} {value}" for name, value in asdict(config).items() if name != "reason" and value != before[name]
    )


def search(problem: Problem, bench: Bench, run: Run | None = None) -> Outcome:
    """Search one axis after the other, each from the best so far; then time the best against the committed one.

    run: runs a configuration; by default the problem does.  Allocates, compiles and launches.
    """
    return _Search(problem, bench, run or problem.run).outcome()


class _Search:
    def __init__(self, problem: Problem, bench: Bench, run: Run) -> None:
        self._problem = problem
        self._tuning = problem.operator.tunable
        self._bench = bench
        self._run = run
        self._committed = replace(problem.committed, reason="")
        self._wrong: dict[Config, str] = {}  # configuration for the short input -> error; empty: passed
        self._trials: dict[Config, Trial] = {}

    def outcome(self) -> Outcome:
        best, why = self._best()
        find = None
        if not why and best != self._committed:
            find, why = self._decide(best)
        return Outcome(
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
            field = list(dict.fromkeys([self._committed, best, *self._right(options)]))
            samples = self._sample(field, SCREENING)
            if self._committed not in samples:
                return best, f"the committed configuration: {self._trials[self._committed].why}"
            for config, values in samples.items():
                self._trials[config] = self._timed(config, values, samples[self._committed])
            best = _faster(best, samples)
        return best, ""

    def _decide(self, best: Config) -> tuple[Find | None, str]:
        samples = self._sample([self._committed, best], DECIDING)
        if len(samples) < 2:
            return None, "the fastest could not be timed again"
        trial = self._trials[best] = self._timed(best, samples[best], samples[self._committed])
        assert trial.device_ratio is not None
        assert trial.device_interval is not None
        if trial.device_interval.low <= 1 + MARGIN:
            return None, f"the fastest was not {MARGIN:.0%} faster with 95 % confidence"
        slower = self._slower_lengths(best)
        if slower:
            return None, f"the fastest was slower at {slower} tokens"
        wrong = self._wrong_at_length(best)
        if wrong:
            self._trials[best] = trial.model_copy(update={"verdict": "wrong", "why": wrong})
            return None, f"the fastest was wrong: {wrong}"
        find = Find(
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
        short = self._tuning.short(longest)
        as_checked = {config: self._tuning.for_short(config, longest) for config in configs}
        new = [config for config in dict.fromkeys(as_checked.values()) if config not in self._wrong]
        calls = {config: self._call(config, short) for config in new}
        attempts = {call: attempt(call) for call in calls.values()}
        failed = {config: attempts[call].reason for config, call in calls.items() if attempts[call].output is None}
        verified = verify(attempts, short)
        for config, call in calls.items():
            found = verified[call].comparison
            if found is not None:
                self._wrong[config] = objection(found)
        right = []
        for config, checked in as_checked.items():
            if checked in failed:
                self._trials[config] = self._untimed(config, "does not run", failed[checked])
            elif self._wrong[checked]:
                self._trials[config] = self._untimed(config, "wrong", self._wrong[checked])
            else:
                right.append(config)
        return right

    def _wrong_at_length(self, config: Config) -> str:
        """The error of the output on the timed inputs, or on others to which a find would apply; empty if it
        passes."""
        others = self._tuning.also_judged(config, self._problem.inputs[-1])
        for inputs in (*self._problem.inputs, *others):
            call = self._call(config, inputs)
            verified = verify({call: attempt(call)}, inputs)[call]
            why = verified.attempt.reason if verified.comparison is None else objection(verified.comparison)
            if why:
                return why
        return ""

    def _call(self, config: Config, inputs: Any) -> Call:
        name = f"The candidate {difference(config, self._committed) or 'the committed configuration'}"
        kernel = self._problem.calls.kernel
        return Call(
            implementation=name,
            label=name,
            inputs=inputs,
            precision=self._problem.precision,
            run=lambda: self._run(inputs, config),
            plan=lambda: Plan(variant=kernel, launches=1),
        )

    # --- speed

    def _sample(
        self, configs: Sequence[Config], plan: SamplingPlan, inputs: Sequence[Any] | None = None
    ) -> dict[Config, Samples]:
        """Device times in turns: for each configuration the geometric mean over the inputs (None: the problem's).

        Configurations that cannot be timed are left out, and their trials have the reason.
        """
        own = self._problem.inputs if inputs is None else inputs

        def untimed(config: Config, error: Exception) -> None:
            self._trials[config] = self._untimed(config, "does not run", type_and_message(error))

        calls = {config: [self._call(config, one) for one in own] for config in configs}
        return device_times(calls, self._bench, plan, on_untimed=untimed)

    def _slower_lengths(self, config: Config) -> str:
        """The lengths at which the configuration is slower, if there are several inputs."""
        slower = []
        for inputs in self._problem.inputs if len(self._problem.inputs) > 1 else ():
            samples = self._sample([self._committed, config], DECIDING, [inputs])
            if len(samples) < 2 or _verdict(samples[self._committed], samples[config]) == "slower":
                slower.append(f"{self._problem.operator.costed.dims(inputs).seqlen:,}")
        return " and ".join(slower)

    def _timed(self, config: Config, samples: Samples, committed: Samples) -> Trial:
        interval = ratio_interval(committed, samples)
        own = config == self._committed
        return Trial(
            change=difference(config, self._committed),
            settings=self._tuning.settings(config),
            verdict="committed" if own else _verdict(committed, samples),
            device_us=median_us(samples),
            device_ratio=ratio(committed, samples),
            device_interval=interval,
        )

    def _untimed(self, config: Config, status: Literal["wrong", "does not run"], why: str) -> Trial:
        change = difference(config, self._committed)
        return Trial(change=change, settings=self._tuning.settings(config), verdict=status, why=why)


def _faster(best: Config, samples: Mapping[Config, Samples]) -> Config:
    """The fastest; `best` if no other is faster with confidence."""
    fastest = min(samples, key=lambda config: median_us(samples[config]))
    if best in samples and _verdict(samples[best], samples[fastest], smallest_difference=0.0) != "faster":
        return best
    return fastest


def _verdict(committed: Samples, samples: Samples, *, smallest_difference: float = MARGIN) -> Verdict:
    return ratio_interval(committed, samples).verdict(smallest_difference)
