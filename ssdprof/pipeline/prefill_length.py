"""One prompt through the whole model with each implementation: right first, then where the time goes, then how long.

operators alone (prefill_layer.py) -> a profiled prefill of each -> all of them in turns
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from ssdprof.kernels._garbage import no_garbage_collection
from ssdprof.measure.bench import Bench
from ssdprof.measure.faults import blaming
from ssdprof.measure.gpu_trace import Trace, work
from ssdprof.measure.memory import forget_peak, peak_bytes
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.pipeline.parts import part_times
from ssdprof.pipeline.prefill_contender import Contender, Prompted
from ssdprof.pipeline.prefill_found import Found, case_of, compared, judging
from ssdprof.pipeline.prefill_layer import try_operators
from ssdprof.pipeline.step_clock import StepClock
from ssdprof.schema.prefill import PrefillCase, PrefillLength

Profile = Callable[[Callable[[], object]], Trace]


@dataclass(kw_only=True)
class LengthTimer:
    """contenders: all with the same surroundings.  baseline: the name of the one that others are compared with.

    bench, profile: the stopwatch and the profiler.  seconds: of sampling, all contenders together.
    clock: a step is begun only while its budget lasts.
    """

    prompted: Prompted
    contenders: Sequence[Contender]
    baseline: str
    bench: Bench
    profile: Profile
    seconds: float
    smallest_difference: float
    clock: StepClock = field(default_factory=StepClock)
    _found: dict[Contender, Found] = field(default_factory=dict, init=False)
    _seen: list[Contender] = field(default_factory=list, init=False)  # those that a prefill was begun with

    def run(self) -> None:
        """Raises BadInputError for a model of which a part bypasses its operator, MissingCapabilityError if a kernel
        has taken the GPU from this process.  Whatever ends it, `result` has what was found."""
        self._found = {contender: Found() for contender in self.contenders}
        try_operators(self._found, self.prompted, self.bench, self.clock)
        for contender in self.contenders:
            if self.clock.left() == 0:
                return
            self._seen.append(contender)
            if self._found[contender].status == "passed":
                with self.clock.step(f"{contender.name}: a profiled prefill"):
                    self._whole_prefill(contender, self._found[contender])
        with self.clock.step("prefills in turns"):
            self._sample()

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names of the contenders that the budget did not reach."""
        return tuple(contender.name for contender in self.contenders if contender not in self._seen)

    def result(self) -> PrefillLength:
        """What is known by now."""
        prompted = self.prompted
        return PrefillLength(
            seqlen=prompted.ids.shape[1],
            batch=prompted.ids.shape[0],
            segment_length=min(prompted.segment_length, prompted.ids.shape[1]),
            operator_calls=prompted.operator_calls,
            layer=prompted.layer,
            cases=tuple(self._case(contender) for contender in self._seen),
        )

    def _passed(self) -> list[Contender]:
        return [contender for contender in self._seen if self._found[contender].status == "passed"]

    def _whole_prefill(self, contender: Contender, found: Found) -> None:
        """Its answer, the parts of its time, and its memory."""
        device, prompted, logits = self.bench.device, self.prompted, list[torch.Tensor]()

        def run() -> None:
            logits[:] = [prompted.first_token_logits()]
            logits[0].argmax(-1)

        with judging(found, device, contender.label):
            if not found.compiled or prompted.segments > 1:  # a profile must not hold what a tuner launches
                with prompted.running(contender) as count:
                    run()
                prompted.check(count)
            if device.type == "cuda":
                forget_peak(device)
            with prompted.running(contender, marks=True) as count:
                trace = self.profile(run)
            prompted.check(count)
            found.logits = logits[0].float().cpu()
            found.parts = part_times(work(trace))
            found.peak_bytes = peak_bytes(device) if device.type == "cuda" else None
            if not torch.isfinite(found.logits).all():
                found.status, found.reason = "nonfinite", "the first token's logits have NaN or Inf"

    def _sample(self) -> None:
        passed = self._passed()
        if not passed:
            return
        round_s = self._round_s(passed)
        seconds = min(self.seconds, self.clock.left())
        plan = sampling_plan(round_s, seconds, self.smallest_difference)
        needed, left = plan.min_recordings * round_s, self.clock.left()
        if left < needed:
            reason = f"the turns need {needed:.0f} s, and {left:.0f} s of the budget were left"
            for contender in passed:
                self._found[contender].reason = reason
            return

        def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
            if plan.warmup_rounds:  # after a move, memory is allocated anew: that is no prefill's time
                self.bench.relocate(generator)
            return {("call", str(number)): partial(self._call_us, one) for number, one in enumerate(passed)}

        gc.collect()
        with no_garbage_collection():
            samples = sample_in_turns(set_up, plan)
        for number, contender in enumerate(passed):
            self._found[contender].samples = samples["call", str(number)]

    def _round_s(self, contenders: Sequence[Contender]) -> float:
        """Seconds that one turn of each takes: the GPU's work, or the host's where a first turn shows that it is more.

        That turn is left out where the GPU's work alone is too long to be repeated often.
        """
        busy_s = 1e-6 * sum(self._found[contender].busy_us for contender in contenders)
        if sampling_plan(busy_s, self.seconds, self.smallest_difference).warmup_rounds == 0:
            return busy_s
        began = self.clock.now()
        for contender in contenders:
            self._call_us(contender)
        return max(busy_s, self.clock.now() - began)

    def _call_us(self, contender: Contender) -> float:
        run = self.prompted.first_token
        with self.prompted.running(contender):
            return blaming(self.bench.device, contender.label, partial(self.bench.call_us, run))  # type: ignore[arg-type]

    def _case(self, contender: Contender) -> PrefillCase:
        own = self._found[contender]
        case = case_of(contender, own, self.prompted.bundled.left_to_model)
        base = next((self._found[one] for one in self._passed() if one.name == self.baseline), None)
        if base is None or own.status != "passed":
            return case
        return compared(
            case,
            own,
            base,
            operator_calls=self.prompted.operator_calls,
            smallest_difference=self.smallest_difference,
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
