"""Times the whole model's prefill, first token included, with each implementation of its operators.

locate -> fetch -> build prompts -> load with the head -> for each length, and each origin of convolution and norm:
operators alone -> a profiled prefill of each implementation -> all of them in turns
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssdprof import operators
from ssdprof.capture.conv_and_norm import ConvAndNorm
from ssdprof.capture.forward import prefill
from ssdprof.capture.intercept import CallCount, OperatorCall, Result
from ssdprof.capture.memory import choose_segment_length
from ssdprof.checkpoint.meta import Mixer, find_mixers
from ssdprof.core import statistics
from ssdprof.core.base import EXACT_FP32, SMALLEST_DIFFERENCE, DType, KernelOrigin, PrecisionRecord
from ssdprof.core.case import Case, Prefill
from ssdprof.core.report import Condition, LeftOut, Report, Requested, StepTime
from ssdprof.core.subject import LayerRef, Prompt, split_prompt
from ssdprof.core.subject import tokens as tokens_of
from ssdprof.environment.machine import ClockWatch, collect, installed_version
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import limits
from ssdprof.jobs.compare import device_times
from ssdprof.jobs.plan import load, notes
from ssdprof.jobs.request import CaptureRequest
from ssdprof.jobs.run import Resolved
from ssdprof.jobs.subject import Subject, refuse_large
from ssdprof.jobs.subject import find as find_layers
from ssdprof.jobs.substitute import Compute, marking, part_times, parts_marked, substituted
from ssdprof.kernels.launch import no_garbage_collection
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure.first_run import blaming, call_of, forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import FIRST_CALL_S, IsolatedFirstCall
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.timing import CudaTimer, Timer, record
from ssdprof.measure.trace import Trace, traced, work
from ssdprof.operators.dtypes import dtype_name, precision_of
from ssdprof.operators.implementations import own_precisions
from ssdprof.progress import StepClock, Watcher
from ssdprof.store.reports import Writer, draft, opened
from ssdprof.store.reports import load as load_report

NEEDS_GPU = (
    "Prefill times need",
    "Without one nothing is timed; 'ssdprof run' compares the kernels' outputs on any machine.",
)
ALONE = SamplingPlan(min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf)
Profile = Callable[[Callable[[], object]], Trace]


@dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """batch: equal rows of the prompt.  precision: of implementations without their own.

    conv_and_norm: one set of prefills for each kind and length.
    resolved: the implementations; other libraries run only with the first kind.
    first_call_s: time limit of the first call of a user's kernel.
    seconds: of sampling for each set.  budget: seconds of wall clock, loading included; steps that do not fit are left
        out.
    """

    model: CaptureRequest
    batch: int = 1
    precision: PrecisionRecord = EXACT_FP32
    conv_and_norm: tuple[KernelOrigin, ...] = ("model",)
    resolved: Resolved
    first_call_s: float = FIRST_CALL_S
    seconds: float = 20.0
    budget: float | None = None
    smallest_difference: float = SMALLEST_DIFFERENCE
    conditions: tuple[Condition, ...] = ()
    out: Path | None = None
    command: tuple[str, ...] = ()


def find(request: CaptureRequest) -> Subject:
    """The model, with its head and all of its layers, or those up to the last one that was chosen."""
    subject = find_layers(request, whole=request.layers == "all", head=True)
    refuse_large(subject)
    return subject


def time_prefills(request: PrefillRequest, subject: Subject, watcher: Watcher) -> tuple[Path, Report]:
    """Time every length with the first origin of convolution and norm, the shortest first, then with the next.

    Returns the report's folder and the report.  Raises MissingCapabilityError without a GPU.
    """
    device = require_gpu(*NEEDS_GPU)
    steps: list[StepTime] = []

    def on_step(step: StepTime) -> None:
        watcher.say(f"{step.what}: {step.seconds:.1f} s")
        steps.append(step)

    clock = StepClock(request.budget, on_step)
    with clock.step("Loading the model"):
        # Otherwise moving weights or activations would be part of the time.
        loaded = load(replace(request.model, placement="one-gpu"), subject, watcher)
    sites = find_mixers(loaded.whole)
    dtype = dtype_name(loaded.whole.get_input_embeddings().weight.dtype)
    contenders = {kind: tuple(_contenders(request, sites, dtype, kind)) for kind in request.conv_and_norm}
    prompts = {ids.shape[1]: (ids, prompt) for ids, prompt in zip(loaded.ids, loaded.prompts, strict=True)}
    header = draft(
        "prefill",
        subject.ref.repo_id,
        request.command,
        model=subject.ref,
        environment=collect(),
        requested=tuple(
            Requested(_place(kind, seqlen, request.batch), one.name, str(one.precision))
            for kind, seqlen in product(request.conv_and_norm, sorted(prompts))
            for one in contenders[kind]
        ),
        conditions=request.conditions,
        baseline=request.resolved.baseline,
        smallest_difference=request.smallest_difference,
        prompts=loaded.prompts,
        absent=request.resolved.absent,
        notes=notes(subject.ref, loaded.prompts, absent=request.resolved.absent),
    )
    timer, profile = CudaTimer(device), partial(traced, device=device)
    bundled = ConvAndNorm(sites if "bundled" in request.conv_and_norm else ())
    with opened(request.out, header, watcher) as writer, ClockWatch() as clocks, limits.memory_errors():
        writer.update(steps=tuple(steps))
        for kind, seqlen in product(request.conv_and_norm, sorted(prompts)):
            place, spent = _place(kind, seqlen, request.batch), f"the budget of {request.budget or 0:g} s was spent"
            if clock.left() == 0:
                writer.update(left_out=(*writer.report.left_out, LeftOut(place=place, reason=spent)))
                continue
            what = f"{tokens_of(seqlen)}, {kind} convolution and norm"
            ids, prompt = prompts[seqlen]
            length = _Length(
                prompted=PromptedModel(
                    model=loaded.whole,
                    ids=ids.to(device).expand(request.batch, -1),
                    segment_length=request.model.segment_length
                    or choose_segment_length(loaded.whole, seqlen, subject.layers, batch=request.batch),
                    sites=sites,
                    layer=subject.layers[len(subject.layers) // 2],
                    bundled=bundled,
                ),
                contenders=contenders[kind],
                baseline=request.resolved.baseline,
                timer=timer,
                profile=profile,
                seconds=request.seconds,
                smallest_difference=request.smallest_difference,
                clock=clock.within(what),
                case=partial(_case, subject, loaded.whole, len(sites), prompt, kind),
                writer=writer,
            )
            with watcher.step(f"Prefill of {what}"):
                length.run()
            if unseen := length.unseen:
                left = LeftOut(place=place, implementations=unseen, reason=spent)
                writer.update(left_out=(*writer.report.left_out, left))
            clocks.poll()
            writer.update(clocks=clocks.clocks, steps=tuple(steps))
    return load_report(writer.folder)


def _place(kind: KernelOrigin, seqlen: int, batch: int) -> str:
    """As `Case.place`."""
    return f"prefill, {kind} convolution and norm, {tokens_of(seqlen, batch)}"


def _case(
    subject: Subject, model: Any, operator_layers: int, prompt: Prompt, kind: KernelOrigin, prompted: PromptedModel
) -> Case:
    """What all cases of a length have in common."""
    config = model.config.get_text_config()
    batch, seqlen = prompted.ids.shape
    return Case(
        prefill=Prefill(
            conv_and_norm=kind,
            layers=config.num_hidden_layers,
            layer_count=subject.ref.layer_count,
            operator_layers=operator_layers,
            operator_calls=prompted.operator_calls,
            segment_length=min(prompted.segment_length, seqlen),
            alone=prompted.layer,
            attention=getattr(config, "_attn_implementation", None) or "",
            convolution=_convolution_of_the_model(),
        ),
        batch=batch,
        seqlen=seqlen,
        inputs=prompt.token_sha256,
        implementation="",
        precision=EXACT_FP32,
        status="ran",
    )


def _convolution_of_the_model() -> str:
    """The convolution that transformers chose on import."""
    found = installed_version("causal-conv1d")
    return (
        f"causal-conv1d {found}" if found else "torch's depthwise convolution, because causal-conv1d is not installed"
    )


# --- what runs


@dataclass(frozen=True, kw_only=True, eq=False)
class _Contender:
    """One implementation of the operators, with the convolution and gated norm around it.  of: by operator."""

    of: Mapping[str, Implementation]
    precision: PrecisionRecord
    conv_and_norm: KernelOrigin
    isolated: IsolatedFirstCall = field(default_factory=IsolatedFirstCall)

    @property
    def one(self) -> Implementation:
        return next(iter(self.of.values()))

    @property
    def name(self) -> str:
        return self.one.name

    @property
    def label(self) -> str:
        """ "fused, bundled convolution and norm"."""
        return f"{self.name}, {self.conv_and_norm} convolution and norm"

    def compute(self, call: OperatorCall) -> Result:
        result: Result = self.implementation(call).run(call.inputs, precision_of(self.precision))
        return result

    def plan(self, call: OperatorCall) -> Plan:
        return self.implementation(call).plan(call.inputs, precision_of(self.precision))

    def precheck(self, call: OperatorCall) -> None:
        """Raises CallRejected for a user's kernel that fails at its first call."""
        if self.one.kind == "own":
            self.isolated.require(self.implementation(call), call.inputs, self.precision)

    def implementation(self, call: OperatorCall) -> Implementation:
        return self.of[call.mixer.operator]


def _contenders(
    request: PrefillRequest, sites: Sequence[Mixer], dtype: DType, kind: KernelOrigin
) -> Iterator[_Contender]:
    """The baseline first, then the others.  dtype: of the model.

    Other libraries, except a baseline, run only with the first origin of convolution and norm.
    """
    resolved, isolated = request.resolved, IsolatedFirstCall(request.first_call_s)
    records = [operators.get(name) for name in dict.fromkeys(site.operator for site in sites)]
    for name in dict.fromkeys((resolved.baseline, *resolved.present)):
        found = {record.name: resolved.cache.get(record, name) for record in records}
        one = next(iter(found.values()))
        if one.kind == "library" and name != resolved.baseline and kind != request.conv_and_norm[0]:
            continue
        precision = own_precisions(one, dtype, (request.precision,))[0]
        yield _Contender(of=found, precision=precision, conv_and_norm=kind, isolated=isolated)


@dataclass(frozen=True, kw_only=True)
class PromptedModel:
    """A model and a prompt.

    model: a causal language model in eval mode.  ids: (b, l) int64 on its device.
    sites: all of its mixers.  layer: the one whose operator is timed alone.
    bundled: the bundled convolution and norm of the model; unused if no contender has them.
    """

    model: Any
    ids: torch.Tensor
    segment_length: int
    sites: tuple[Mixer, ...]
    layer: LayerRef
    bundled: ConvAndNorm

    @property
    def segments(self) -> int:
        return len(split_prompt(self.ids.shape[1], self.segment_length))

    @property
    def operator_calls(self) -> int:
        return len(self.sites) * self.segments

    def first_token_logits(self) -> torch.Tensor:
        """(b, vocabulary)"""
        return prefill(self.model, self.ids, self.segment_length, keeps_cache=True)[:, -1]

    def first_token(self) -> torch.Tensor:
        """The timed work: the first token of each row, (b)."""
        return self.first_token_logits().argmax(-1)

    @contextmanager
    def running(
        self, contender: _Contender, compute: Compute | None = None, *, marks: bool = False
    ) -> Iterator[CallCount]:
        """While the context is open the model runs with the contender, or with `compute` instead.

        marks: its parts are marked for a profile.
        """
        compute = compute or contender.compute
        with ExitStack() as stack:
            if contender.conv_and_norm == "bundled":
                stack.enter_context(self.bundled.installed())
            if marks:
                stack.enter_context(parts_marked(self.model, self.sites))
            yield stack.enter_context(substituted(self.sites, marking(compute) if marks else compute))

    def check(self, count: CallCount) -> None:
        """Raises BadInputError if one whole prefill bypassed its operator."""
        if count["steps"] or count["calls"] != self.operator_calls:
            raise BadInputError(
                f"This model made {count['calls']} operator calls where {self.operator_calls} were expected: "
                "part of it bypasses its operator.",
                "Choose a --segment that leaves no single token, and load the model without use_kernels.",
            )


# --- one length


@dataclass(kw_only=True)
class _Progress:
    """What is known of a contender.  compiled: one call of the operator has ended.
    logits: (b, vocabulary), fp32, on the CPU.  fields: of its `Prefill`."""

    case: Case
    compiled: bool = False
    logits: torch.Tensor | None = None

    @property
    def passed(self) -> bool:
        return self.case.result == "passed"

    def update(self, **fields: Any) -> None:
        self.case = self.case.changed(**fields)

    def found(self, **fields: Any) -> None:
        assert self.case.prefill
        self.update(prefill=self.case.prefill.changed(**fields))

    @contextmanager
    def judging(self, device: torch.device, label: str) -> Iterator[None]:
        """Turn errors of an implementation into a status and a reason.

        Passes BadInputError on, and raises MissingCapabilityError, with the label, if the GPU is unusable.
        """
        try:
            yield
        except BadInputError:
            raise
        except Exception as error:
            status, reason = status_of(error, device, label)
            self.update(status=status, reason=reason)


class _Enough(Exception):
    """Ends a prefill when nothing more is needed from it."""


@dataclass(kw_only=True)
class _Length:
    """Runs the whole model on one prompt with each implementation: checks, profiles, then times.

    contenders: all with the same convolution and norm.  baseline: the name of the one that others are compared with.
    seconds: of sampling, all contenders together.  clock: a step begins only if its budget is not spent.
    case: what all cases have in common.
    """

    prompted: PromptedModel
    contenders: Sequence[_Contender]
    baseline: str
    timer: Timer
    profile: Profile
    seconds: float
    smallest_difference: float
    clock: StepClock
    case: Callable[[PromptedModel], Case]
    writer: Writer
    _known: dict[_Contender, _Progress] = field(default_factory=dict, init=False)
    _seen: list[_Contender] = field(default_factory=list, init=False)  # contenders whose prefill has begun

    def run(self) -> None:
        """Raises BadInputError if a part of the model bypasses its operator, MissingCapabilityError if a kernel made
        the GPU unusable.  The report has the results so far in any case."""
        common = self.case(self.prompted)
        assert common.prefill
        left = self.prompted.bundled.left_to_model if common.prefill.conv_and_norm == "bundled" else ()
        for one in self.contenders:
            self._known[one] = _Progress(
                case=common.changed(
                    implementation=one.name,
                    kind=one.one.kind,
                    version=one.one.version if one.one.kind == "library" else "",
                    precision=one.precision,
                    baseline="" if one.name == self.baseline else self.baseline,
                    prefill=common.prefill.changed(left_to_model=left),
                )
            )
        self._try_operators()
        for contender in self.contenders:
            if self.clock.left() == 0:
                return
            self._seen.append(contender)
            known = self._known[contender]
            if known.passed:
                with self.clock.step(f"{contender.name}: a profiled prefill"):
                    self._whole_prefill(contender, known)
            self._compare_logits(known)
            self.writer.case(known.case)
        with self.clock.step("prefills in turns"):
            self._sample()

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names of the contenders that the budget did not reach."""
        return tuple(contender.name for contender in self.contenders if contender not in self._seen)

    # --- operators alone, so that kernels are compiled and tuned

    def _try_operators(self) -> None:
        """Call each contender once, on the inputs of the first operator, and time it on those of `prompted.layer`.

        The inputs are the model's own tensors, while the model waits.  If the model fails before its operator, nothing
        is known.
        """
        tried = False

        def passed() -> list[_Contender]:
            return [contender for contender, known in self._known.items() if known.passed]

        def compute(call: OperatorCall) -> Result:
            nonlocal tried
            if not tried:
                tried = True
                for contender, known in self._known.items():
                    self._first_call(contender, known, call)
            if not passed():
                raise _Enough
            if call.mixer.layer_index != self.prompted.layer.index:
                return passed()[0].compute(call)
            with self.clock.step("one layer's operator alone"):
                self._time_alone(passed(), call)
            raise _Enough

        first = next(iter(self._known))
        unused = _Progress(case=self._known[first].case)
        device = self.timer.device
        with unused.judging(device, first.label), suppress(_Enough), self.prompted.running(first, compute):
            self.prompted.first_token_logits()

    def _first_call(self, contender: _Contender, known: _Progress, call: OperatorCall) -> None:
        device = self.timer.device
        with self.clock.step(f"{contender.name}: first call of the operator"), known.judging(device, contender.label):
            plan = contender.plan(call)
            known.update(variant=plan.variant, plan=plan.reason)
            contender.precheck(call)
            contender.compute(call)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            known.compiled = True

    def _time_alone(self, contenders: Sequence[_Contender], call: OperatorCall) -> None:
        calls = {
            one: [call_of(one.implementation(call), call.inputs, one.precision, label=one.label)] for one in contenders
        }
        for contender, samples in device_times(calls, self.timer, ALONE).items():
            self._known[contender].found(alone_us=statistics.median(samples).value)

    # --- the whole model

    def _whole_prefill(self, contender: _Contender, known: _Progress) -> None:
        """One prefill under the profiler: its answer, the parts of its time, and its memory."""
        device, prompted, logits = self.timer.device, self.prompted, list[torch.Tensor]()

        def run() -> None:
            logits[:] = [prompted.first_token_logits()]
            logits[0].argmax(-1)

        with known.judging(device, contender.label):
            if not known.compiled or prompted.segments > 1:  # keep launches of a tuner out of the profile
                with prompted.running(contender) as count:
                    run()
                prompted.check(count)
            if device.type == "cuda":
                forget_peak(device)
            with prompted.running(contender, marks=True) as count:
                trace = self.profile(run)
            prompted.check(count)
            known.logits = logits[0].float().cpu()
            known.found(parts=part_times(work(trace)), peak_bytes=peak_bytes(device) if device.type == "cuda" else None)
            if not torch.isfinite(known.logits).all():
                known.update(nonfinite=True, reason="the first token's logits have NaN or Inf")

    def _compare_logits(self, known: _Progress) -> None:
        """With those of the baseline."""
        base = next((self._known[one] for one in self._passed() if one.name == self.baseline), None)
        if base is None or not known.passed or known.logits is None or base.logits is None:
            return
        difference = float((known.logits - base.logits).norm() / base.logits.norm())
        same = bool((known.logits.argmax(-1) == base.logits.argmax(-1)).all())
        known.found(logits_rms=difference, same_token=same)

    def _passed(self) -> list[_Contender]:
        return [contender for contender in self._seen if self._known[contender].passed]

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
                self._known[contender].update(reason=reason)
                self.writer.case(self._known[contender].case)
            return

        def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
            if plan.warmup_rounds:  # after a move, the warm-up allocates the memory
                self.timer.reallocate(generator)
            return {("call", str(number)): partial(self._call_us, one) for number, one in enumerate(passed)}

        gc.collect()
        with no_garbage_collection():
            samples = sample_in_turns(set_up, plan)
        for number, contender in enumerate(passed):
            known = self._known[contender]
            known.update(samples=(record(self.writer.process, "call", samples["call", str(number)]),))
            self.writer.case(known.case)

    def _round_s(self, contenders: Sequence[_Contender]) -> float:
        """Seconds of one turn of all contenders: the GPU's work, or the host's if a first turn shows that it is longer.

        That turn is skipped if the GPU's work alone is too long to be repeated often.
        """
        found = [self._known[contender].case.prefill for contender in contenders]
        busy_s = 1e-6 * sum(one.busy_us for one in found if one)
        if sampling_plan(busy_s, self.seconds, self.smallest_difference).warmup_rounds == 0:
            return busy_s
        began = self.clock.now()
        for contender in contenders:
            self._call_us(contender)
        return max(busy_s, self.clock.now() - began)

    def _call_us(self, contender: _Contender) -> float:
        run: Any = self.prompted.first_token  # its result, unlike that of a kernel, is one tensor
        with self.prompted.running(contender):
            return blaming(self.timer.device, contender.label, partial(self.timer.call_us, run))


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
