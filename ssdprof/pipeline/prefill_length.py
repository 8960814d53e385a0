"""Runs the whole model on one prompt with each implementation: checks, profiles, then times.

operators alone (prefill_layer.py) -> a profiled prefill of each -> all of them in turns
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from ssdprof.kernels.launch import no_garbage_collection
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
    """contenders: all with the same surroundings.  baseline: the name of the one that the others are compared with.

    bench, profile: the stopwatch and the profiler.  seconds: of sampling, all contenders together.
    clock: a step begins only if its budget is not spent.
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
    _seen: list[Contender] = field(default_factory=list, init=False)  # contenders whose prefill has begun

    def run(self) -> None:
        """Raises BadInputError if a part of the model bypasses its operator, MissingCapabilityError if a kernel made
        the GPU unusable.  `result` has the results so far in any case."""
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
        """The results so far."""
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
        """One prefill under the profiler: its answer, the parts of its time, and its memory."""
        device, prompted, logits = self.bench.device, self.prompted, list[torch.Tensor]()

        def run() -> None:
            logits[:] = [prompted.first_token_logits()]
            logits[0].argmax(-1)

        with judging(found, device, contender.label):
            if not found.compiled or prompted.segments > 1:  # keep launches of a tuner out of the profile
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
            if plan.warmup_rounds:  # after a move, the warm-up allocates the memory
                self.bench.relocate(generator)
            return {("call", str(number)): partial(self._call_us, one) for number, one in enumerate(passed)}

        gc.collect()
        with no_garbage_collection():
            samples = sample_in_turns(set_up, plan)
        for number, contender in enumerate(passed):
            self._found[contender].samples = samples["call", str(number)]

    def _round_s(self, contenders: Sequence[Contender]) -> float:
        """Seconds of one turn of all contenders: the GPU's work, or the host's if a first turn shows that it is longer.

        That turn is skipped if the GPU's work alone is too long to be repeated often.
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
            case, own, base, operator_calls=self.prompted.operator_calls, smallest_difference=self.smallest_difference
        )


def sampling_plan(round_s: float, seconds: float, smallest_difference: float) -> SamplingPlan:
    """How to sample rounds that take about `round_s` seconds in about `seconds`.

    Five or more recordings at new addresses, each with a warm-up, if the time allows; else the fewest that give an
    interval, with one round each, in the same memory and without a warm-up.
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
