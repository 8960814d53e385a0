"""Times the whole model's prefill, first token included, with each implementation of its operators.

locate -> fetch -> build prompts -> load with the head -> for each length, and each origin of
convolution and norm: operators alone -> a profiled prefill of each implementation -> all of them in
turns
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssdprof.capture.conv_and_norm import ConvAndNorm
from ssdprof.capture.forward import prefill
from ssdprof.capture.intercept import CallCount, OperatorCall, Result, intercept
from ssdprof.checkpoint.meta import Mixer, find_mixers
from ssdprof.core.base import KernelOrigin
from ssdprof.core.case import Case, Prefill
from ssdprof.core.report import LeftOut, Report
from ssdprof.core.subject import LayerRef, Prompt, split_prompt
from ssdprof.environment.machine import collect, installed_version, watch_clocks
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import limits
from ssdprof.jobs.compare import Comparer, Entry
from ssdprof.jobs.options import ModelOptions, PrefillOptions
from ssdprof.jobs.plan import load, sources
from ssdprof.jobs.run import Resolved, resolve_implementations
from ssdprof.jobs.subject import Subject, refuse_large
from ssdprof.jobs.subject import find as find_layers
from ssdprof.jobs.substitute import Compute, marking, part_times, parts_marked
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.first_run import Call, blaming, forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import IsolatedFirstCall, while_it_runs
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CudaTimer, time_in_turns
from ssdprof.measure.trace import Trace, traced, work
from ssdprof.operators.implementations import own_precisions
from ssdprof.operators.tensors import dtype_name, requested_precisions
from ssdprof.progress import StepClock, Watcher
from ssdprof.store.reports import Writer, opened
from ssdprof.store.reports import load as load_report

NEEDS_GPU = (
    "Prefill times need",
    "Without one nothing is timed; 'ssdprof run' compares the kernels' outputs on any machine.",
)
ALONE = SamplingPlan(
    min_recordings=3, max_recordings=3, min_rounds=3, max_rounds=3, seconds=math.inf
)


def find(request: ModelOptions) -> Subject:
    """The model, with its head and all of its layers, or those up to the last one that was
    chosen.
    """
    subject = find_layers(request, whole=request.layers == "all", head=True)
    refuse_large(subject)
    return subject


def time_prefills(
    request: PrefillOptions, subject: Subject, watcher: Watcher
) -> tuple[Path, Report]:
    """Time every length with the first origin of convolution and norm, the shortest first, then
    with the next.

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
        loaded = load(
            replace(subject, request=replace(subject.request, placement="one-gpu")),
            watcher,
            request.copies,
        )
    mixers = find_mixers(loaded.whole)
    kinds: tuple[KernelOrigin, ...] = (
        ("model",) if request.conv_and_norm == "model" else ("model", "bundled")
    )
    bundled = ConvAndNorm(mixers if "bundled" in kinds else ())
    timer, isolated = CudaTimer(device), IsolatedFirstCall(request.first_call_s)
    each = zip(loaded.ids, loaded.prompts, loaded.segment_lengths, strict=True)
    lengths = []
    for kind, (ids, prompt, segment_length) in product(
        kinds, sorted(each, key=lambda one: one[1].seqlen)
    ):
        length = _Length(
            request=request,
            model=loaded.whole,
            ids=ids.to(device).expand(request.copies, -1),
            segment_length=segment_length,
            mixers=mixers,
            layer=subject.layers[len(subject.layers) // 2],
            bundled=bundled if kind == "bundled" else None,
            comparer=Comparer(timer=timer, sampling=ALONE, isolated=isolated),
            timer=timer,
            profile=partial(traced, device=device),
        )
        for case, of in _cases(length, subject, prompt, resolved):
            length.cases[case.implementation], length.of[case.implementation] = case, of
        lengths.append(length)
    report = dict[str, Any](
        kind="prefill",
        subject=subject.ref.repo_id,
        command=request.command,
        model=subject.ref,
        environment=collect(),
        prompts=loaded.prompts,
        notes=tuple(subject.located.caveats),
        requested=tuple(
            (case.place, case.implementation, case.precision)
            for length in lengths
            for case in length.cases.values()
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
            earlier = [writer.earlier.get(case.name) for case in length.cases.values()]
            if all(
                case and (case.samples or case.reason or case.result != "passed")
                for case in earlier
            ):
                continue
            first = next(iter(length.cases.values()))
            what = f"{first.size}, {first.where.removeprefix('prefill, ')}"
            if begun := clock.left() > 0:
                with watcher.step(f"Prefill of {what}"):
                    length.run(writer, clock.within(what))
            if unseen := tuple(name for name in length.cases if name not in length.seen):
                left = LeftOut(
                    place=first.place,
                    implementations=unseen if begun else (),
                    reason=f"the budget of {request.budget or 0:g} s was spent",
                )
                writer.update(left_out=(*writer.report.left_out, left))
            if begun:
                writer.update(clocks=clocks(), steps=dict(steps))
    return load_report(writer.folder)


def _cases(
    length: _Length, subject: Subject, prompt: Prompt, resolved: Resolved
) -> Iterator[tuple[Case, dict[str, Implementation]]]:
    """The baseline's case first; other libraries, except a baseline, only with the model's own
    convolution and norm.

    With the implementation, by operator.
    """
    request, model, config = length.request, length.model, length.model.config.get_text_config()
    dtype = dtype_name(model.get_input_embeddings().weight.dtype)
    batch, seqlen = length.ids.shape
    wanted = requested_precisions(dtype, request.intermediates, (request.state_dtype,))
    convolution = installed_version("causal-conv1d")
    prefill = Prefill(
        kind="prefill",
        conv_and_norm="bundled" if length.bundled else "model",
        layers=config.num_hidden_layers,
        layer_count=subject.ref.layer_count,
        operator_layers=len(length.mixers),
        operator_calls=length.operator_calls,
        segment_length=min(length.segment_length, seqlen),
        alone=length.layer,
        attention=getattr(config, "_attn_implementation", None) or "",
        convolution=f"causal-conv1d {convolution}"
        if convolution
        else "torch's depthwise convolution, because causal-conv1d is not installed",
        left_to_model=length.bundled.left_to_model if length.bundled else (),
    )
    for name in dict.fromkeys((resolved.baseline, *resolved.present)):
        of = {mixer.operator: resolved.resolve(mixer.operator, name) for mixer in length.mixers}
        one = next(iter(of.values()))
        if one.kind == "library" and name != resolved.baseline and length.bundled:
            continue
        case = Case(
            task=prefill,
            batch=batch,
            seqlen=seqlen,
            inputs=prompt.token_sha256,
            implementation=one.name,
            kind=one.kind,
            version=one.version if one.kind == "library" else "",
            precision=str(own_precisions(one, dtype, wanted)[0]),
            baseline="" if one.name == resolved.baseline else resolved.baseline,
            status="ran",
        )
        yield case, of


@dataclass(kw_only=True)
class _Length:
    """Runs the whole model on one prompt with each implementation: compares operators, profiles,
    then times.

    model: a causal language model in eval mode.  ids: (b, l) int64 on its device.
    mixers: all of its.  layer: the one whose operator is timed alone.
    bundled: the convolution and norm of the model that run; None: its own.
    comparer: of the operators.
    cases: by implementation.  of: the implementation of each operator.  seen: those whose prefill
    has begun.
    logits: (b, vocabulary), fp32, on the CPU: the baseline's.
    """

    request: PrefillOptions
    model: Any
    ids: Tensor
    segment_length: int
    mixers: tuple[Mixer, ...]
    layer: LayerRef
    bundled: ConvAndNorm | None
    comparer: Comparer
    timer: CudaTimer
    profile: Callable[[Callable[[], object]], Trace]
    cases: dict[str, Case] = field(default_factory=dict)
    of: dict[str, dict[str, Implementation]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    logits: Tensor | None = None

    @property
    def segments(self) -> int:
        return len(split_prompt(self.ids.shape[1], self.segment_length))

    @property
    def operator_calls(self) -> int:
        return len(self.mixers) * self.segments

    def run(self, writer: Writer, clock: StepClock) -> None:
        """A step begins only if the budget is not spent.  BadInputError if the model bypasses its
        operator.
        """
        with clock.step("one layer's operator alone"):
            self._compare_operators()
        for name in self.cases:
            if clock.left() == 0:
                return
            self.seen.append(name)
            if self.cases[name].result == "passed":
                with clock.step(f"{name}: a profiled prefill"):
                    self._whole_prefill(name)
            writer.case(self.cases[name])
        with clock.step("prefills in turns"):
            self._sample(writer, clock)

    def first_token_logits(self) -> Tensor:
        """(b, vocabulary)"""
        return prefill(self.model, self.ids, self.segment_length, keeps_cache=True)[:, -1]

    def first_token(self) -> Tensor:
        """The timed work: the first token of each row, (b)."""
        return self.first_token_logits().argmax(-1)

    @contextmanager
    def running(self, compute: Compute, *, marks: bool = False) -> Iterator[CallCount]:
        """The model runs with `compute` as its operator.  marks: its parts are marked for a
        profile.
        """
        with ExitStack() as stack:
            if self.bundled:
                stack.enter_context(self.bundled.installed())
            if marks:
                stack.enter_context(parts_marked(self.model, self.mixers))
            yield stack.enter_context(
                intercept(self.mixers, marking("operator", compute) if marks else compute)
            )

    def _compute(self, name: str) -> Compute:
        precision = Precision.named(self.cases[name].precision)
        return lambda call: self.of[name][call.mixer.operator].run(call.inputs, precision)

    @contextmanager
    def _judging(self, *names: str) -> Iterator[None]:
        """Errors of the implementation become its status.  Passes BadInputError and
        MissingCapabilityError on.
        """
        owns = [self.cases[name] for name in names if self.cases[name].kind == "own"]
        try:
            with while_it_runs(next(iter(owns), None)):
                yield
        except BadInputError:
            raise
        except Exception as error:
            status, reason = status_of(error, self.timer.device, ", ".join(names) or "the model")
            self.cases |= {
                name: self.cases[name].changed(status=status, reason=reason) for name in names
            }

    def _found(self, name: str, **fields: Any) -> None:
        """Fields of the case's `Prefill`."""
        case = self.cases[name]
        self.cases[name] = case.changed(task=case.task.changed(**fields))

    def _compare_operators(self) -> None:
        """On the model's own tensors while it waits in `layer`: kernels are compiled and tuned, and
        timed alone.

        Their outputs are not judged: `ssdprof run` does that.
        """

        def compute(call: OperatorCall) -> Result:
            if call.mixer.layer_index == self.layer.index and not compared:
                compared.append(call.mixer.name)
                entries = []
                for name, case in self.cases.items():
                    one = self.of[name][call.mixer.operator]
                    precision = Precision.named(case.precision)
                    bound = Call(
                        operator=call.operator,
                        implementation=one,
                        inputs=call.inputs,
                        precision=precision,
                        label=name,
                    )
                    entries.append(Entry(case=case, call=bound))
                verdicts = {entry.key: entry.case for entry in entries}
                for found in self.comparer.compare(entries, self.layer.name, verdicts):
                    name = found.implementation
                    told = {
                        key: getattr(found, key)
                        for key in ("status", "later_fault", "nonfinite", "variant", "plan")
                    }
                    reason = "" if found.result == "passed" else found.reason
                    self.cases[name] = self.cases[name].changed(**told, reason=reason)
                    if found.device_us:
                        self._found(name, alone_us=found.device_us.value)
            return call.replacement()

        compared: list[str] = []
        with self._judging(), self.running(compute):  # errors of the model itself come again
            self.first_token_logits()

    def _whole_prefill(self, name: str) -> None:
        """One prefill under the profiler: its answer, the parts of its time, and its memory."""
        device, logits = self.timer.device, list[Tensor]()

        def run() -> None:
            logits[:] = [self.first_token_logits()]
            logits[0].argmax(-1)

        with self._judging(name):
            if self.segments > 1:  # keep launches of a tuner out of the profile
                with self.running(self._compute(name)) as count:
                    run()
                self._check(count)
            if device.type == "cuda":
                forget_peak(device)
            with self.running(self._compute(name), marks=True) as count:
                trace = self.profile(run)
            self._check(count)
            own = logits[0].float().cpu()
            peak = peak_bytes(device) if device.type == "cuda" else None
            self._found(name, parts=part_times(work(trace)), peak_bytes=peak)
            if not torch.isfinite(own).all():
                reason = "the first token's logits have NaN or Inf"
                self.cases[name] = self.cases[name].changed(nonfinite=True, reason=reason)
                return
            if not self.cases[name].baseline:
                self.logits = own
            if self.logits is not None:
                difference = float((own - self.logits).norm() / self.logits.norm())
                same = bool((own.argmax(-1) == self.logits.argmax(-1)).all())
                self._found(name, logits_rms=difference, same_token=same)

    def _check(self, count: CallCount) -> None:
        """Raises BadInputError if one whole prefill bypassed its operator."""
        if count["steps"] or count["calls"] != self.operator_calls:
            raise BadInputError(
                f"This model made {count['calls']} operator calls where {self.operator_calls} "
                "were expected: "
                "part of it bypasses its operator.",
                (
                    "Choose a --segment that leaves no single token, and load the model without "
                    "use_kernels."
                ),
            )

    def _sample(self, writer: Writer, clock: StepClock) -> None:
        passed = {
            name: self.cases[name] for name in self.seen if self.cases[name].result == "passed"
        }
        if not passed:
            return
        runs = {name: partial(self._timed, self._compute(name)) for name in passed}
        with while_it_runs(next((case for case in passed.values() if case.kind == "own"), None)):
            round_s, smallest = self._round_s(runs, clock), self.request.smallest_difference
            plan = sampling_plan(round_s, min(self.request.seconds, clock.left()), smallest)
            needed, left = plan.min_recordings * round_s, clock.left()
            if left < needed:
                reason = f"the turns need {needed:.0f} s, and {left:.0f} s of the budget were left"
                found = {name: {"reason": reason} for name in passed}
            else:
                found = time_in_turns(
                    runs,
                    self.timer,
                    plan,
                    check=lambda *_: "",
                    process=writer.process,
                    clocks=("call",),
                )
        for name, case in passed.items():
            self.cases[name] = case.changed(**found[name])
            writer.case(self.cases[name])

    def _timed(self, compute: Compute) -> Any:
        with self.running(compute):
            return self.first_token()

    def _round_s(self, runs: Mapping[str, Callable[[], Any]], clock: StepClock) -> float:
        """Seconds of a turn of all: the GPU's work, or the host's by a first turn, skipped if that
        work is long.
        """
        tasks = (self.cases[name].task for name in runs)
        prefills = (task for task in tasks if isinstance(task, Prefill))
        busy_s = 1e-6 * sum(sum(one.part_us.values()) for one in prefills)
        if (
            sampling_plan(
                busy_s, self.request.seconds, self.request.smallest_difference
            ).warmup_rounds
            == 0
        ):
            return busy_s
        began = clock.now()
        for name, run in runs.items():
            blaming(self.timer.device, name, partial(self.timer.call_us, run))
        return max(busy_s, clock.now() - began)


def sampling_plan(round_s: float, seconds: float, smallest_difference: float) -> SamplingPlan:
    """How to sample rounds that take about `round_s` seconds in about `seconds`.

    Five or more recordings at new addresses, each with a warm-up, if the time allows; else the
    fewest that give an interval, with one round each, in the same memory and without a warm-up.
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
    return replace(
        short, min_recordings=3, max_recordings=8, warmup_rounds=0, min_rounds=1, max_rounds=1
    )
