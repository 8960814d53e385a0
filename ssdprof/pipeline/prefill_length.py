"""One prompt through the whole model with each implementation: right first, then where the time goes, then how long.

first calls -> the operator of one layer alone -> a profile of each -> all of them in turns
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.capture.prefill import prefill, split_prompt
from ssdprof.capture.sites import Site
from ssdprof.capture.surroundings import BundledSurroundings
from ssdprof.errors import BadInputError
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels._garbage import no_garbage_collection
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure.amdahl import predicted_speedup
from ssdprof.measure.call import UnfitError, call_of
from ssdprof.measure.engine import device_times
from ssdprof.measure.faults import blaming, first_line, refuse_if_lost
from ssdprof.measure.gpu_trace import Trace, work
from ssdprof.measure.memory import forget_peak, peak_bytes
from ssdprof.measure.rehearsal import Rehearsals
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.statistics import Samples, median_interval, median_us, ratio, ratio_interval, verdict
from ssdprof.measure.timing import Bench
from ssdprof.operators.dtypes import dtype_named
from ssdprof.operators.named import Named
from ssdprof.pipeline.parts import marking, part_times, parts_marked
from ssdprof.pipeline.substitute import Compute, substituted
from ssdprof.progress import Advance
from ssdprof.schema import LayerRef, PrecisionRecord, Status
from ssdprof.schema.prefill import CallTime, PartTime, PrefillCase, PrefillLength, PrefillSpeedup, Surroundings

ALONE = SamplingPlan(min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf)
Profile = Callable[[Callable[[], object]], Trace]


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One implementation in the place of the operators, with the convolution and gated norm around it.

    named: by operator.  version: of another library.  rehearsals: of own kernels' first calls.
    """

    name: str
    named: Mapping[str, Named]
    precision: PrecisionRecord
    surroundings: Surroundings
    version: str = ""
    rehearsals: Rehearsals = field(default_factory=Rehearsals)

    @property
    def label(self) -> str:
        """ "fused, bundled surroundings"."""
        return f"{self.name}, {self.surroundings} surroundings"

    @property
    def _precision(self) -> Precision:
        return Precision(
            intermediates=self.precision.intermediates, state_dtype=dtype_named(self.precision.state_dtype)
        )

    def compute(self, call: OperatorCall) -> Result:
        result: Result = self.implementation(call).run(call.inputs, self._precision)
        return result

    def plan(self, call: OperatorCall) -> Plan:
        return self.implementation(call).plan(call.inputs, self._precision)

    def rehearse(self, call: OperatorCall) -> None:
        """UnfitError if it is an own kernel that fails at its first call."""
        named = self.named[call.site.operator]
        if named.kind == "own":
            self.rehearsals.require(named, call.inputs, self.precision)

    def implementation(self, call: OperatorCall) -> Implementation:
        return self.named[call.site.operator].present


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """A model, and a prompt that it is to run on.

    model: a causal language model in eval mode.  ids: (b, l) int64 on its device.
    sites: all of its mixers.  layer: whose operator is timed alone, one of the sites.
    """

    model: Any
    ids: torch.Tensor
    segment_length: int
    sites: tuple[Site, ...]
    layer: LayerRef

    @property
    def operator_calls(self) -> int:
        return len(self.sites) * len(split_prompt(self.ids.shape[1], self.segment_length))

    def first_token_logits(self) -> torch.Tensor:
        """(b, vocabulary)"""
        return prefill(self.model, self.ids, self.segment_length, keeps_cache=True)[:, -1]

    def first_token(self) -> torch.Tensor:
        """What is timed: (b)."""
        return self.first_token_logits().argmax(-1)


@dataclass(kw_only=True)
class _Found:
    """What is known of a contender so far."""

    status: Status = "passed"
    reason: str = ""
    plan: Plan | None = None
    logits: torch.Tensor | None = None
    peak_bytes: int | None = None
    alone_us: float | None = None
    parts: tuple[PartTime, ...] = ()
    samples: Samples | None = None


@dataclass(kw_only=True)
class LengthTimer:
    """bench, profile: the stopwatch and the profiler.  seconds: of sampling, all contenders together."""

    prompted: Prompted
    contenders: Sequence[Contender]
    baseline: str
    bench: Bench
    profile: Profile
    seconds: float
    smallest_difference: float
    _found: dict[Contender, _Found] = field(default_factory=dict, init=False)
    _bundled: BundledSurroundings = field(init=False)

    def __post_init__(self) -> None:
        bundled = any(contender.surroundings == "bundled" for contender in self.contenders)
        self._bundled = BundledSurroundings(self.prompted.sites if bundled else ())

    @property
    def steps(self) -> int:
        """How many `run` takes."""
        return 2 * len(self.contenders) + 2

    def run(self, advance: Advance = lambda _: None) -> PrefillLength:
        """advance: called with 1 after every step.

        Raises BadInputError for a model of which a part bypasses its operator, MissingCapabilityError if a kernel has
        taken the GPU from this process."""
        for contender in self.contenders:
            self._found[contender] = self._first_call(contender)
            advance(1)
        for surroundings in dict.fromkeys(contender.surroundings for contender in self._passed()):
            self._time_alone(surroundings)
        advance(1)
        for contender in self.contenders:
            if self._found[contender].status == "passed":
                self._found[contender].parts = self._parts(contender)
            advance(1)
        self._sample()
        advance(1)
        prompted = self.prompted
        return PrefillLength(
            seqlen=prompted.ids.shape[1],
            batch=prompted.ids.shape[0],
            segment_length=min(prompted.segment_length, prompted.ids.shape[1]),
            operator_calls=prompted.operator_calls,
            layer=prompted.layer,
            cases=tuple(self._case(contender) for contender in self.contenders),
        )

    def _passed(self) -> list[Contender]:
        return [contender for contender, found in self._found.items() if found.status == "passed"]

    def _baseline_of(self, contender: Contender) -> Contender | None:
        return next(
            (c for c in self._passed() if (c.name, c.surroundings) == (self.baseline, contender.surroundings)), None
        )

    @contextmanager
    def _installed(self, contender: Contender, compute: Compute | None = None, *, marks: bool = False) -> Iterator[Any]:
        """While the context is open the model runs with the contender, or with `compute` in its place."""
        compute = compute or contender.compute
        prompted = self.prompted
        with ExitStack() as stack:
            if contender.surroundings == "bundled":
                stack.enter_context(self._bundled.installed())
            if marks:
                stack.enter_context(parts_marked(prompted.model, prompted.sites))
            yield stack.enter_context(substituted(prompted.sites, marking(compute) if marks else compute))

    # --- right first

    def _first_call(self, contender: Contender) -> _Found:
        """Compiles what has to be compiled.  Whatever an implementation raises becomes a status and a reason."""
        device, plans = self.bench.device, list[Plan]()

        def compute(call: OperatorCall) -> Result:
            if call.site.layer_index == self.prompted.layer.index and not plans:
                plans.append(contender.plan(call))
            contender.rehearse(call)
            return contender.compute(call)

        try:
            if device.type == "cuda":
                forget_peak(device)
            with self._installed(contender, compute) as count:
                logits = self.prompted.first_token_logits().float().cpu()
        except UnfitError as error:
            return _Found(status=error.status, reason=str(error))
        except UnsupportedError as error:
            return _Found(status="refused", reason=str(error))
        except (torch.OutOfMemoryError, MemoryError) as error:
            return _Found(status="out of memory", reason=first_line(error))
        except BadInputError:
            raise
        except Exception as error:
            refuse_if_lost(device, contender.label, error)
            return _Found(status="failed", reason=f"{type(error).__name__}: {first_line(error)}")
        if count.steps or count.calls != self.prompted.operator_calls:
            raise BadInputError(
                f"This model made {count.calls} operator calls where {self.prompted.operator_calls} were expected: "
                "part of it bypasses its operator.",
                "Choose a --segment that leaves no single token, and load the model without use_kernels.",
            )
        found = _Found(plan=plans[0], logits=logits, peak_bytes=peak_bytes(device) if device.type == "cuda" else None)
        if not torch.isfinite(logits).all():
            found.status, found.reason = "nonfinite", "the first token's logits have NaN or Inf"
        return found

    # --- the operator of one layer alone

    def _time_alone(self, surroundings: Surroundings) -> None:
        """On the inputs that the model passes, as they lie in its memory, while the model waits."""
        own = [contender for contender in self._passed() if contender.surroundings == surroundings]
        timed = False

        def compute(call: OperatorCall) -> Result:
            nonlocal timed
            if call.site.layer_index == self.prompted.layer.index and not timed:
                timed = True
                self._time_calls(own, call)
            return own[0].compute(call)

        with self._installed(own[0], compute):
            self.prompted.first_token()

    def _time_calls(self, contenders: Sequence[Contender], call: OperatorCall) -> None:
        calls = {
            one: [call_of(one.implementation(call), call.inputs, one.precision, label=one.label)] for one in contenders
        }
        for contender, samples in device_times(calls, self.bench, ALONE).items():
            self._found[contender].alone_us = median_us(samples)

    # --- where the time goes

    def _parts(self, contender: Contender) -> tuple[PartTime, ...]:
        with self._installed(contender, marks=True):
            trace = blaming(self.bench.device, contender.label, partial(self.profile, self.prompted.first_token))
        return part_times(work(trace))

    # --- how long it takes

    def _sample(self) -> None:
        passed = self._passed()
        if not passed:
            return
        plan = self._plan(passed)

        def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
            if plan.warmup_rounds:  # after a move, memory is allocated anew: that is no prefill's time
                self.bench.relocate(generator)
            return {("call", str(number)): partial(self._call_us, one) for number, one in enumerate(passed)}

        gc.collect()
        with no_garbage_collection():
            samples = sample_in_turns(set_up, plan)
        for number, contender in enumerate(passed):
            self._found[contender].samples = samples["call", str(number)]

    def _plan(self, passed: Sequence[Contender]) -> SamplingPlan:
        busy = [sum(part.gpu_us for part in self._found[contender].parts) for contender in passed]
        round_s = 1e-6 * sum(busy) if all(busy) else math.inf
        return sampling_plan(round_s, self.seconds, self.smallest_difference)

    def _call_us(self, contender: Contender) -> float:
        run: Any = self.prompted.first_token
        with self._installed(contender):
            return blaming(self.bench.device, contender.label, partial(self.bench.call_us, run))

    # --- what came out

    def _case(self, contender: Contender) -> PrefillCase:
        found = self._found[contender]
        baseline = self._baseline_of(contender)
        case = PrefillCase(
            implementation=contender.name,
            version=contender.version,
            variant=found.plan.variant if found.plan else "",
            plan=found.plan.reason if found.plan else "",
            surroundings=contender.surroundings,
            precision=contender.precision,
            status=found.status,
            reason=found.reason,
            call=None if found.samples is None else _call_time(found.samples),
            alone_us=found.alone_us,
            parts=found.parts,
            peak_bytes=found.peak_bytes,
            left_to_model=self._bundled.left_to_model if contender.surroundings == "bundled" else (),
        )
        if baseline is None or found.status != "passed":
            return case
        base = self._found[baseline]
        assert base.logits is not None
        assert found.logits is not None
        difference = float((found.logits - base.logits).norm() / base.logits.norm())
        same = bool((found.logits.argmax(-1) == base.logits.argmax(-1)).all())
        return case.model_copy(
            update={
                "logits_rms": difference,
                "same_token": same,
                "speedup": None if baseline is contender else self._speedup(base, found),
            }
        )

    def _speedup(self, base: _Found, own: _Found) -> PrefillSpeedup:
        assert base.samples is not None
        assert own.samples is not None
        interval = ratio_interval(base.samples, own.samples)
        predicted = None
        if base.alone_us is not None and own.alone_us is not None:
            calls = self.prompted.operator_calls
            predicted = predicted_speedup(median_us(base.samples), calls * base.alone_us, calls * own.alone_us)
        return PrefillSpeedup(
            ratio=ratio(base.samples, own.samples),
            interval=interval,
            verdict=verdict(interval, self.smallest_difference),
            predicted=predicted,
        )


def sampling_plan(round_s: float, seconds: float, smallest_difference: float) -> SamplingPlan:
    """How to sample rounds that take about `round_s` seconds in about `seconds`.

    Recordings in new places, each with a warm-up, if five of them are taken in that time; else the fewest that give an
    interval, one round each, where the model's memory lies: there are no warm-up rounds then.
    """
    short = SamplingPlan(
        smallest_difference=smallest_difference,
        min_recordings=5,
        max_recordings=12,
        warmup_rounds=1,
        min_rounds=2,
        max_rounds=16,
        seconds=seconds,
    )
    if short.min_recordings * (short.warmup_rounds + short.min_rounds) * round_s <= seconds:
        return short
    return replace(short, min_recordings=3, max_recordings=8, warmup_rounds=0, min_rounds=1, max_rounds=1)


def _call_time(samples: Samples) -> CallTime:
    return CallTime(
        median_us=median_us(samples),
        interval_us=median_interval(samples),
        recordings=len(samples),
        samples=sum(map(len, samples)),
    )
