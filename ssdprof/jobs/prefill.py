"""Times the whole model's prefill, first token included, with each implementation of its operators.

locate -> fetch -> build prompts -> load with the head -> for each length, and each origin of convolution and norm:
operators alone -> a profiled prefill of each implementation -> all of them in turns
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssdprof.capture.conv_and_norm import ConvAndNorm
from ssdprof.capture.forward import prefill
from ssdprof.capture.intercept import CallCount, OperatorCall, Result, intercept
from ssdprof.checkpoint.meta import Mixer, find_mixers
from ssdprof.core import statistics
from ssdprof.core.base import KernelOrigin, PrecisionRecord
from ssdprof.core.case import Case, Prefill
from ssdprof.core.report import LeftOut, Report
from ssdprof.core.subject import LayerRef, Prompt, split_prompt
from ssdprof.core.subject import tokens as tokens_of
from ssdprof.environment.machine import collect, installed_version, watch_clocks
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import limits
from ssdprof.jobs.options import ModelOptions, PrefillOptions
from ssdprof.jobs.plan import load, sources
from ssdprof.jobs.run import Resolved, resolve_implementations
from ssdprof.jobs.subject import Subject, refuse_large
from ssdprof.jobs.subject import find as find_layers
from ssdprof.jobs.substitute import Compute, marking, part_times, parts_marked
from ssdprof.kernels.launch import no_garbage_collection
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.first_run import Call, blaming, forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import IsolatedFirstCall, while_it_runs
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.timing import CudaTimer, device_times, record
from ssdprof.measure.trace import Trace, traced, work
from ssdprof.operators.implementations import own_precisions
from ssdprof.operators.tensors import dtype_name, precision_of
from ssdprof.progress import StepClock, Watcher
from ssdprof.store.reports import Writer, opened
from ssdprof.store.reports import load as load_report

NEEDS_GPU = (
    "Prefill times need",
    "Without one nothing is timed; 'ssdprof run' compares the kernels' outputs on any machine.",
)
ALONE = SamplingPlan(min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf)
Profile = Callable[[Callable[[], object]], Trace]


def find(request: ModelOptions) -> Subject:
    """The model, with its head and all of its layers, or those up to the last one that was chosen."""
    subject = find_layers(request, whole=request.layers == "all", head=True)
    refuse_large(subject)
    return subject


def time_prefills(request: PrefillOptions, subject: Subject, watcher: Watcher) -> tuple[Path, Report]:
    """Time every length with the first origin of convolution and norm, the shortest first, then with the next.

    Returns the report's folder and the report.  Raises MissingCapabilityError without a GPU.
    """
    device = require_gpu(*NEEDS_GPU)
    resolved = resolve_implementations(request.implementations, request.baseline, subject.layers)
    steps: dict[str, float] = {}

    def on_step(what: str, seconds: float) -> None:
        watcher.say(f"{what}: {seconds:.1f} s")
        steps[what] = seconds

    clock = StepClock(request.budget, on_step)
    with clock.step("Loading the model"):
        # Otherwise moving weights or activations would be part of the time.
        loaded = load(replace(subject, request=replace(subject.request, placement="one-gpu")), watcher, request.copies)
    sites = find_mixers(loaded.whole)
    kinds: tuple[KernelOrigin, ...] = ("model",) if request.conv_and_norm == "model" else ("model", "bundled")
    bundled = ConvAndNorm(sites if "bundled" in kinds else ())
    timer, profile = CudaTimer(device), partial(traced, device=device)
    isolated = IsolatedFirstCall(request.first_call_s)
    each = zip(loaded.ids, loaded.prompts, loaded.segment_lengths, strict=True)
    prompts = {ids.shape[1]: (ids.to(device), prompt, length) for ids, prompt, length in each}
    lengths = []
    for kind, seqlen in product(kinds, sorted(prompts)):
        ids, prompt, segment_length = prompts[seqlen]
        one = _Length(
            request=request,
            model=loaded.whole,
            ids=ids.expand(request.copies, -1),
            segment_length=segment_length,
            sites=sites,
            layer=subject.layers[len(subject.layers) // 2],
            bundled=bundled,
            timer=timer,
            profile=profile,
        )
        one.contenders += _contenders(one, subject, prompt, kind, resolved, isolated)
        lengths.append(one)
    report = dict[str, Any](
        kind="prefill",
        subject=subject.ref.repo_id,
        command=request.command,
        model=subject.ref,
        environment=collect(),
        prompts=loaded.prompts,
        notes=subject.located.caveats,
        requested=tuple(
            (one.case.place, one.case.implementation, str(one.case.precision))
            for length in lengths
            for one in length.contenders
        ),
        conditions=request.conditions,
        baseline=resolved.baseline,
        smallest_difference=request.smallest_difference,
        absent=resolved.absent,
    )
    files = partial(sources, subject, (*resolved.found, *resolved.baselines))
    with opened(request.out, watcher, None, files, **report) as writer, limits.memory_errors():
        clocks = watch_clocks()
        writer.update(steps=dict(steps))
        for length in lengths:
            earlier = [writer.earlier.get(one.case.name) for one in length.contenders]
            if all(case and (case.samples or case.reason or case.result != "passed") for case in earlier):
                continue
            what = f"{tokens_of(length.ids.shape[1])}, {length.contenders[0].conv_and_norm}"
            if begun := clock.left() > 0:
                with watcher.step(f"Prefill of {what}"):
                    length.run(writer, clock.within(what))
            if unseen := tuple(one.name for one in length.contenders if one not in length.seen):
                left = LeftOut(
                    place=length.contenders[0].case.place,
                    implementations=unseen if begun else (),
                    reason=f"the budget of {request.budget or 0:g} s was spent",
                )
                writer.update(left_out=(*writer.report.left_out, left))
            if begun:
                writer.update(clocks=clocks(), steps=dict(steps))
    return load_report(writer.folder)


def _contenders(
    length: _Length,
    subject: Subject,
    prompt: Prompt,
    kind: KernelOrigin,
    resolved: Resolved,
    isolated: IsolatedFirstCall,
) -> Iterator[_Contender]:
    """The baseline first; other libraries, except a baseline, only with the model's own convolution and norm."""
    request, model, config = length.request, length.model, length.model.config.get_text_config()
    dtype = dtype_name(model.get_input_embeddings().weight.dtype)
    batch, seqlen = length.ids.shape
    wanted = PrecisionRecord(intermediates=request.intermediates, state_dtype=request.state_dtype)
    convolution = installed_version("causal-conv1d")
    prefill = Prefill(
        conv_and_norm=kind,
        layers=config.num_hidden_layers,
        layer_count=subject.ref.layer_count,
        operator_layers=len(length.sites),
        operator_calls=length.operator_calls,
        segment_length=min(length.segment_length, seqlen),
        alone=length.layer,
        attention=getattr(config, "_attn_implementation", None) or "",
        convolution=f"causal-conv1d {convolution}"
        if convolution
        else "torch's depthwise convolution, because causal-conv1d is not installed",
        left_to_model=length.bundled.left_to_model if kind == "bundled" else (),
    )
    for name in dict.fromkeys((resolved.baseline, *resolved.present)):
        found = {operator: resolved.resolve(operator, name) for operator in {site.operator for site in length.sites}}
        one = next(iter(found.values()))
        if one.kind == "library" and name != resolved.baseline and kind != "model":
            continue
        case = Case(
            prefill=prefill,
            batch=batch,
            seqlen=seqlen,
            inputs=prompt.token_sha256,
            implementation=one.name,
            kind=one.kind,
            version=one.version if one.kind == "library" else "",
            precision=own_precisions(one, dtype, (wanted,))[0],
            baseline="" if one.name == resolved.baseline else resolved.baseline,
            status="ran",
        )
        yield _Contender(of=found, case=case, isolated=isolated)


@dataclass(kw_only=True, eq=False)
class _Contender:
    """One implementation of the operators, and what is known of it.

    of: by operator.  compiled: one call of the operator has ended.  logits: (b, vocabulary), fp32, on the CPU.
    """

    of: Mapping[str, Implementation]
    case: Case
    isolated: IsolatedFirstCall
    compiled: bool = False
    logits: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return self.case.implementation

    @property
    def conv_and_norm(self) -> str:
        """ "bundled convolution and norm"."""
        return self.case.where.removeprefix("prefill, ")

    @property
    def label(self) -> str:
        return f"{self.name}, {self.conv_and_norm}"

    @property
    def passed(self) -> bool:
        return self.case.result == "passed"

    def call(self, of_model: OperatorCall) -> Call:
        one, inputs, precision = self.of[of_model.mixer.operator], of_model.inputs, precision_of(self.case.precision)
        call = Call(implementation=one, inputs=inputs, precision=precision, label=self.label)
        if one.kind != "own":
            return call
        return replace(call, precheck=partial(self.isolated.require, one, inputs, self.case.precision))

    def compute(self, of_model: OperatorCall) -> Result:
        run = self.of[of_model.mixer.operator].run
        result: Result = run(of_model.inputs, precision_of(self.case.precision))
        return result

    def at_work(self) -> AbstractContextManager[None]:
        """If a user's kernel ends the process in the block, its parent knows the case."""
        return while_it_runs(self.case if self.case.kind == "own" else None)

    def found(self, **fields: Any) -> None:
        """Fields of its `Prefill`."""
        assert self.case.prefill
        self.case = self.case.changed(prefill=self.case.prefill.changed(**fields))

    @contextmanager
    def judging(self, device: torch.device) -> Iterator[None]:
        """Errors of the implementation become its status.  Passes BadInputError and MissingCapabilityError on."""
        try:
            with self.at_work():
                yield
        except BadInputError:
            raise
        except Exception as error:
            status, reason = status_of(error, device, self.label)
            self.case = self.case.changed(status=status, reason=reason)


class _Enough(Exception):
    """Ends a prefill when nothing more is needed from it."""


@dataclass(kw_only=True)
class _Length:
    """Runs the whole model on one prompt with each implementation: checks, profiles, then times.

    model: a causal language model in eval mode.  ids: (b, l) int64 on its device.
    sites: all of its mixers.  layer: the one whose operator is timed alone.
    bundled: the bundled convolution and norm of the model; unused if no contender has them.
    contenders: all with the same convolution and norm.  seen: those whose prefill has begun.
    """

    request: PrefillOptions
    model: Any
    ids: torch.Tensor
    segment_length: int
    sites: tuple[Mixer, ...]
    layer: LayerRef
    bundled: ConvAndNorm
    timer: CudaTimer
    profile: Profile
    contenders: list[_Contender] = field(default_factory=list)
    seen: list[_Contender] = field(default_factory=list)

    @property
    def segments(self) -> int:
        return len(split_prompt(self.ids.shape[1], self.segment_length))

    @property
    def operator_calls(self) -> int:
        return len(self.sites) * self.segments

    def run(self, writer: Writer, clock: StepClock) -> None:
        """A step begins only if the budget is not spent.  BadInputError if the model bypasses its operator."""
        self._try_operators(clock)
        for contender in self.contenders:
            if clock.left() == 0:
                return
            self.seen.append(contender)
            if contender.passed:
                with clock.step(f"{contender.name}: a profiled prefill"):
                    self._whole_prefill(contender)
            self._compare_logits(contender)
            writer.case(contender.case)
        with clock.step("prefills in turns"):
            self._sample(writer, clock)

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
        """The model runs with the contender, or with `compute`.  marks: its parts are marked for a profile."""
        compute = compute or contender.compute
        with ExitStack() as stack:
            if contender.conv_and_norm.startswith("bundled"):
                stack.enter_context(self.bundled.installed())
            if marks:
                stack.enter_context(parts_marked(self.model, self.sites))
            yield stack.enter_context(intercept(self.sites, marking("operator", compute) if marks else compute))

    # --- operators alone, so that kernels are compiled and tuned

    def _try_operators(self, clock: StepClock) -> None:
        """Call each contender once, on the model's own tensors while it waits, and time it on those of `layer`."""
        tried = False

        def compute(call: OperatorCall) -> Result:
            nonlocal tried
            for contender in () if tried else self.contenders:
                with clock.step(f"{contender.name}: first call of the operator"), contender.at_work():
                    output, fields = contender.call(call).first_run()
                own = {name: fields[name] for name in ("status", "reason", "variant", "plan") if name in fields}
                contender.case, contender.compiled = contender.case.changed(**own), output is not None
                del output
            tried = True
            passed = [one for one in self.contenders if one.passed]
            if not passed:
                raise _Enough
            if call.mixer.layer_index != self.layer.index:
                with passed[0].at_work():
                    return passed[0].compute(call)
            users = next((one for one in passed if one.case.kind == "own"), passed[0])
            with clock.step("one layer's operator alone"), users.at_work():
                alone = device_times({one: one.call(call) for one in passed}, self.timer, ALONE)
                for contender, samples in alone.items():
                    contender.found(alone_us=statistics.median(samples).value)
            raise _Enough

        first = self.contenders[0]
        nobody = replace(first)  # errors of the model itself
        with nobody.judging(self.timer.device), suppress(_Enough), self.running(first, compute):
            self.first_token_logits()

    # --- the whole model

    def _whole_prefill(self, contender: _Contender) -> None:
        """One prefill under the profiler: its answer, the parts of its time, and its memory."""
        device, logits = self.timer.device, list[torch.Tensor]()

        def run() -> None:
            logits[:] = [self.first_token_logits()]
            logits[0].argmax(-1)

        with contender.judging(device):
            if not contender.compiled or self.segments > 1:  # keep launches of a tuner out of the profile
                with self.running(contender) as count:
                    run()
                self._check(count)
            if device.type == "cuda":
                forget_peak(device)
            with self.running(contender, marks=True) as count:
                trace = self.profile(run)
            self._check(count)
            contender.logits = logits[0].float().cpu()
            peak = peak_bytes(device) if device.type == "cuda" else None
            contender.found(parts=part_times(work(trace)), peak_bytes=peak)
            if not torch.isfinite(contender.logits).all():
                reason = "the first token's logits have NaN or Inf"
                contender.case = contender.case.changed(nonfinite=True, reason=reason)

    def _check(self, count: CallCount) -> None:
        """Raises BadInputError if one whole prefill bypassed its operator."""
        if count["steps"] or count["calls"] != self.operator_calls:
            raise BadInputError(
                f"This model made {count['calls']} operator calls where {self.operator_calls} were expected: "
                "part of it bypasses its operator.",
                "Choose a --segment that leaves no single token, and load the model without use_kernels.",
            )

    def _compare_logits(self, contender: _Contender) -> None:
        """With those of the baseline."""
        name = contender.case.baseline or contender.name
        base = next((one.logits for one in self.seen if one.passed and one.name == name), None)
        own = contender.logits
        if contender.passed and own is not None and base is not None:
            difference = float((own - base).norm() / base.norm())
            same = bool((own.argmax(-1) == base.argmax(-1)).all())
            contender.found(logits_rms=difference, same_token=same)

    def _sample(self, writer: Writer, clock: StepClock) -> None:
        passed = [one for one in self.seen if one.passed]
        if not passed:
            return
        round_s, smallest = self._round_s(passed, clock), self.request.smallest_difference
        plan = sampling_plan(round_s, min(self.request.seconds, clock.left()), smallest)
        needed, left = plan.min_recordings * round_s, clock.left()
        if left < needed:
            reason = f"the turns need {needed:.0f} s, and {left:.0f} s of the budget were left"
            for contender in passed:
                contender.case = contender.case.changed(reason=reason)
                writer.case(contender.case)
            return

        def set_up(generator: np.random.Generator) -> dict[Name, Sampler]:
            if plan.warmup_rounds:  # after a move, the warm-up allocates the memory
                self.timer.reallocate(generator)
            return {("call", str(number)): partial(self._call_us, one) for number, one in enumerate(passed)}

        gc.collect()
        with no_garbage_collection():
            samples = sample_in_turns(set_up, plan)
        for number, contender in enumerate(passed):
            taken = record(writer.process, "call", samples["call", str(number)])
            contender.case = contender.case.changed(samples=(taken,))
            writer.case(contender.case)

    def _round_s(self, contenders: Sequence[_Contender], clock: StepClock) -> float:
        """Seconds of a turn of all: the GPU's work, or the host's by a first turn, skipped if that work is long."""
        busy_s = 1e-6 * sum(us for one in contenders if one.case.prefill for us in one.case.prefill.part_us.values())
        if sampling_plan(busy_s, self.request.seconds, self.request.smallest_difference).warmup_rounds == 0:
            return busy_s
        began = clock.now()
        for contender in contenders:
            self._call_us(contender)
        return max(busy_s, clock.now() - began)

    def _call_us(self, contender: _Contender) -> float:
        run: Any = self.first_token  # its result, unlike that of a kernel, is one tensor
        with contender.at_work(), self.running(contender):
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
