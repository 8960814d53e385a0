"""One search: a configuration for one kind of call, right first, then faster than the committed one or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

import numpy as np
import torch

from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.hopper.config import HopperConfig
from ssdprof.kernels.ssd.hopper.launch import ssd_fused_hopper
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.portable.portable_kernel import ssd_fused_portable
from ssdprof.kernels.ssd.tuned import nchunks
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.faults import blaming, first_line, refuse_if_lost
from ssdprof.measure.sampling import Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.statistics import Samples, ratio_interval, verdict
from ssdprof.measure.timing import Bench, Recording
from ssdprof.tuning.candidates import Config, axes, difference
from ssdprof.tuning.records import Calls, Find, Outcome, Trial, settings_of

SCREENING = SamplingPlan(warmup_rounds=1, min_rounds=7, max_rounds=7, seconds=math.inf)
DECIDING = SamplingPlan(warmup_rounds=2, min_rounds=20, max_rounds=160, seconds=2.0)
MARGIN = 0.01  # a find is faster by more than that, with 95 % confidence: from day to day a GPU differs by as much
CHECKED_CHUNKS = 16  # of 64 positions: a candidate is first judged on so many

Run = Callable[[SSDInputs, Config], SSDOutput]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What one find is for.

    inputs: one call of the Hopper kernel; of the portable kernel one for each length that shall share the find
    tokens: of them, in words
    """

    shape: str
    tokens: str
    calls: Calls
    inputs: tuple[SSDInputs, ...]
    precision: Precision
    committed: Config

    def __str__(self) -> str:
        return f"{self.shape}, {self.tokens}, {self.calls.intermediates}"

    def run(self, inputs: SSDInputs, config: Config) -> SSDOutput:
        if isinstance(config, HopperConfig):
            return ssd_fused_hopper(inputs, self.precision, config=config)
        return ssd_fused_portable(inputs, self.precision, config=config.fitted(inputs))


def search(problem: Problem, bench: Bench, run: Run | None = None) -> Outcome:
    """Go over one axis after the other, each from the best so far; then the best against the committed one, at length.

    run: how a configuration is run, if not by the problem.  Allocates, compiles and launches.
    """
    return _Search(problem, bench, run or problem.run).outcome()


class _Search:
    def __init__(self, problem: Problem, bench: Bench, run: Run) -> None:
        self._problem = problem
        self._bench = bench
        self._run = run
        self._committed = replace(problem.committed, reason="")
        self._wrong: dict[Config, str] = {}  # as checked -> why; empty: right
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
            committed=settings_of(self._committed),
            trials=tuple(self._trials.values()),
            find=find,
            why=why or ("" if find else "no candidate was faster"),
        )

    def _best(self) -> tuple[Config, str]:
        """The fastest in a few rounds; (.., why) if not even the committed configuration can be timed."""
        best = self._committed
        if not self._right([best]):
            return best, f"the committed configuration: {self._trials[best].why}"
        for axis in axes(best):
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
            return None, f"the fastest was not {MARGIN:.0%} faster beyond doubt"
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

    # --- right

    def _right(self, configs: Sequence[Config]) -> list[Config]:
        """Those that the oracle passes on a short input; the others get their trial, which says why not."""
        short = _first_chunks(self._problem.inputs[-1])
        as_checked = {config: _for_check(config, self._problem.inputs[-1]) for config in configs}
        outputs: dict[Config, SSDOutput] = {}
        failed: dict[Config, str] = {}
        for config in dict.fromkeys(as_checked.values()):
            if config in self._wrong:
                continue
            try:
                outputs[config] = self._run(short, config)
                if short.x.is_cuda:
                    torch.cuda.synchronize(short.x.device)
            except Exception as error:  # the compiler's or CUDA's, of any kind: this candidate does not run
                self._refuse_if_lost(config, error)
                failed[config] = f"{type(error).__name__}: {first_line(error)}"
        self._wrong |= _judge(short, outputs, self._problem.precision)
        right = []
        for config, checked in as_checked.items():
            if checked in failed:
                self._trials[config] = self._untimed(config, "does not run", failed[checked])
            elif self._wrong[checked]:
                self._trials[config] = self._untimed(config, "wrong", self._wrong[checked])
            else:
                right.append(config)
        return right

    def _refuse_if_lost(self, config: Config, error: Exception) -> None:
        refuse_if_lost(self._bench.device, self._named(config), error)

    def _named(self, config: Config) -> str:
        return f"The candidate {difference(config, self._committed) or 'the committed configuration'}"

    def _wrong_at_length(self, config: Config) -> str:
        """Why the output is wrong on the very inputs that were timed; empty if it is right.

        A find for the portable kernel serves packed sequences too, and is judged on a few.
        """
        packed = [] if isinstance(config, HopperConfig) else [_packed(self._problem.inputs[-1])]
        for inputs in (*self._problem.inputs, *packed):
            why = blaming(self._bench.device, self._named(config), partial(self._wrong_on, inputs, config))
            if why:
                return why
        return ""

    def _wrong_on(self, inputs: SSDInputs, config: Config) -> str:
        return _judge(inputs, {config: self._run(inputs, config)}, self._problem.precision)[config]

    # --- fast

    def _sample(self, configs: Sequence[Config], plan: SamplingPlan) -> dict[Config, Samples]:
        """Device times in turns: of a round the geometric mean over the inputs.  Without those that cannot be timed."""
        recordings: dict[Config, list[Recording]] = {}
        for config in configs:
            try:
                recordings[config] = [self._record(inputs, config) for inputs in self._problem.inputs]
            except Exception as error:  # of any kind, as above
                self._refuse_if_lost(config, error)
                self._trials[config] = self._untimed(
                    config, "does not run", f"{type(error).__name__}: {first_line(error)}"
                )
        named: dict[str, Sampler] = {
            str(number): partial(blaming, self._bench.device, self._named(config), partial(_mean_us, self._bench, kept))
            for number, (config, kept) in enumerate(recordings.items())
        }
        samples = sample_in_turns(named, plan) if named else {}
        return dict(zip(recordings, samples.values(), strict=True))

    def _record(self, inputs: SSDInputs, config: Config) -> Recording:
        def run() -> SSDOutput:
            self._run(inputs, config)
            return nothing  # the output's memory serves the next recording

        nothing = SSDOutput(inputs.x.new_empty(0), inputs.x.new_empty(0))
        return self._bench.record(run)

    def _slower_lengths(self, config: Config) -> str:
        """Those of several inputs on which the configuration loses."""
        slower = []
        for inputs in self._problem.inputs if len(self._problem.inputs) > 1 else ():
            alone = _Search(replace(self._problem, inputs=(inputs,)), self._bench, self._run)
            samples = alone._sample([self._committed, config], DECIDING)
            if len(samples) < 2 or verdict(ratio_interval(samples[self._committed], samples[config])) == "slower":
                slower.append(f"{inputs.x.shape[1]:,}")
        return " and ".join(slower)

    def _timed(self, config: Config, samples: Samples, committed: Samples) -> Trial:
        interval = ratio_interval(committed, samples)
        own = config == self._committed
        return Trial(
            change=difference(config, self._committed),
            settings=settings_of(config),
            verdict="committed" if own else verdict(interval),
            device_us=float(np.median(samples)),
            device_ratio=float(np.median(committed) / np.median(samples)),
            device_interval=interval,
        )

    def _untimed(self, config: Config, status: Literal["wrong", "does not run"], why: str) -> Trial:
        change = difference(config, self._committed)
        return Trial(change=change, settings=settings_of(config), verdict=status, why=why)


def _faster(best: Config, samples: Mapping[Config, Samples]) -> Config:
    """The fastest; `best` if that is not faster beyond doubt."""
    fastest = min(samples, key=lambda config: float(np.median(samples[config])))
    if best in samples and verdict(ratio_interval(samples[best], samples[fastest])) != "faster":
        return best
    return fastest


def _mean_us(bench: Bench, recordings: Sequence[Recording]) -> float:
    return math.exp(sum(math.log(bench.device_us(recording)) for recording in recordings) / len(recordings))


def _judge(inputs: SSDInputs, outputs: Mapping[Config, SSDOutput], precision: Precision) -> dict[Config, str]:
    """Why each is wrong; empty if it is right."""
    if not outputs:
        return {}
    named = {
        str(number): Candidate(output=output, precision=precision) for number, output in enumerate(outputs.values())
    }
    compared = compare(inputs, named)
    return {
        config: "" if one.status == "passed" else one.reason
        for config, one in zip(outputs, compared.values(), strict=True)
    }


def _first_chunks(inputs: SSDInputs) -> SSDInputs:
    """The beginning of each sequence, of a length that is whole chunks if theirs is: what is compiled is the same."""
    length = inputs.x.shape[1]
    short = min(length, 64 * CHECKED_CHUNKS + length % 64)
    cut = {name: getattr(inputs, name)[:, :short] for name in ("x", "dt", "B", "C")}
    return replace(inputs, **cut, z=None if inputs.z is None else inputs.z[:, :short])


def _packed(inputs: SSDInputs) -> SSDInputs:
    """The beginning of the first sequence as three packed ones."""
    short = _first_chunks(inputs)
    length = short.x.shape[1]
    alone = {name: getattr(short, name)[:1] for name in ("x", "dt", "B", "C")}
    boundaries = torch.tensor([0, length // 5, length // 2, length], dtype=torch.int32, device=short.x.device)
    z = None if short.z is None else short.z[:1]
    return replace(short, **alone, z=z, initial_states=None, cu_seqlens=boundaries)


def _for_check(config: Config, inputs: SSDInputs) -> Config:
    """As `_first_chunks` of the inputs are run: cut into segments if the whole sequence is."""
    if not isinstance(config, HopperConfig):
        return config
    if config.count(nchunks(inputs)) == 1:
        return replace(config, segment=nchunks(_first_chunks(inputs)), long_count=0, long_segment=0)
    half = CHECKED_CHUNKS // 2
    return replace(
        config,
        segment=min(config.segment, 5),
        long_segment=min(config.long_segment, max(1, half // (config.long_count or 1))),
    )
