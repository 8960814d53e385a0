"""Times a whole model's prefill, up to the first token, with each implementation of its operators.

locate -> fetch -> build prompts -> load with the head.  Then, for each prompt, with the model's own
convolution and norm and perhaps with the bundled ones: time the operator of one layer alone ->
profile one prefill of each implementation -> time the prefills of all implementations in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ssdprof.capture.conv_and_norm import ConvAndNorm
from ssdprof.capture.forward import prefill as model_prefill
from ssdprof.capture.intercept import CallCount, OperatorCall, Result, intercept
from ssdprof.checkpoint.mixers import Mixer, find_mixers
from ssdprof.core.case import Case, Prefill
from ssdprof.core.report import Report, Requested
from ssdprof.core.target import LayerRef, Prompt, split_prompt
from ssdprof.environment.machine import collect, installed_version, read_clocks
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError
from ssdprof.jobs import limits
from ssdprof.jobs.compare import Comparer, Entry
from ssdprof.jobs.options import ModelOptions, PrefillOptions
from ssdprof.jobs.plan import Loaded, load, sources
from ssdprof.jobs.replay import Resolved, resolve_implementations
from ssdprof.jobs.substitute import Compute, marking, part_times, parts_marked
from ssdprof.jobs.target import Target, refuse_large
from ssdprof.jobs.target import find as find_layers
from ssdprof.kernels.precision import Precision
from ssdprof.measure.first_run import Call, blaming, forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import IsolatedFirstCall, while_it_runs
from ssdprof.measure.sampling import FIRST_LOOK, SamplingPlan
from ssdprof.measure.timing import CudaTimer, time_in_turns
from ssdprof.measure.trace import Trace, traced, work
from ssdprof.operators.implementations import Resolve, own_precisions
from ssdprof.operators.tensors import dtype_name
from ssdprof.progress import StepClock, Watcher
from ssdprof.store.reports import Writer, opened
from ssdprof.store.reports import load as load_report
from ssdprof.store.tuned import use_saved

NEEDS_GPU = (
    "Prefill times need",
    "Without one nothing is timed; 'ssdprof run' compares the kernels' outputs on any machine.",
)


def find(request: ModelOptions) -> Target:
    """The model with its head, and with its layers up to the last one that --layers names.

    Raises the errors of `target.find` and `refuse_large`.
    """
    target = find_layers(request, whole=request.layers == "all", head=True)
    refuse_large(target.ref, target.sizes)
    return target


def prefill(request: PrefillOptions, watcher: Watcher) -> tuple[Path, Report]:
    """Find the model, and time its prefills.  Returns what `time_prefills` returns."""
    require_gpu(*NEEDS_GPU)
    target = find(request)
    if not request.no_tuned:
        use_saved(watcher.say)
    return time_prefills(request, target, watcher)


def time_prefills(request: PrefillOptions, target: Target, watcher: Watcher) -> tuple[Path, Report]:
    """Time every prompt, the shortest first: all with the model's own convolution and norm, then
    all with the bundled ones if they are requested.

    Returns the report's folder and the report.  Raises MissingCapabilityError without a GPU, and if
    memory runs out outside of the case of an implementation; BadInputError if the model bypasses
    its operator.
    """
    device = require_gpu(*NEEDS_GPU)
    operator_names = dict.fromkeys(layer.operator for layer in target.layers)
    resolved = resolve_implementations(request, tuple(operator_names))
    # With other placements, moving weights or activations would be part of the time.
    on_gpu = replace(target, request=replace(target.request, placement="one-gpu"))
    steps: dict[str, float] = {}  # step of the command -> its seconds

    def on_step(name: str, seconds: float) -> None:
        watcher.say(f"{name}: {seconds:.1f} s")
        steps[name] = seconds

    clock = StepClock(request.budget, on_step)
    with clock.step("Loading the model"):
        loaded = load(on_gpu, watcher, request.copies)
    prompt_runs = _prompt_runs(request, loaded, resolved, device)
    requested: list[Requested] = []
    for prompt_run in prompt_runs:
        for case in prompt_run.cases.values():
            requested.append((case.case_key, case.implementation, case.precision))
    with (
        opened(
            request.out,
            watcher,
            sources=partial(sources, target, resolved.all),
            kind="prefill",
            command=request.command,
            environment=collect(),
            requested=tuple(requested),
            conditions=request.conditions,
            baseline=resolved.baseline,
            smallest_difference=request.smallest_difference,
            absent=resolved.absent,
            **loaded.header,
        ) as writer,
        limits.memory_errors(),
    ):
        writer.update(clocks=read_clocks(), steps=dict(steps))
        for prompt_run in prompt_runs:
            if prompt_run.is_done(writer.earlier):
                continue
            has_budget = clock.left() > 0
            if has_budget:
                with watcher.step(f"Prefill of {prompt_run.what}"):
                    prompt_run.run(writer, clock)
            prompt_run.leave_out_unseen(writer, has_budget)
            if has_budget:
                writer.update(clocks=read_clocks(), steps=dict(steps))
    return load_report(writer.folder)


def _prompt_runs(
    request: PrefillOptions, loaded: Loaded, resolved: Resolved, device: torch.device
) -> list[_PromptRun]:
    """Every prompt, in the order in which they are timed, with its cases: first all prompts with
    the model's own convolution and norm, then all with the bundled ones if they are requested, each
    time the shortest first.
    """
    target = loaded.target
    mixers = find_mixers(loaded.whole)
    conv_and_norms: list[ConvAndNorm | None] = [None]  # None: the model's own
    if request.conv_and_norm != "model":
        conv_and_norms.append(ConvAndNorm(mixers))
    timer = CudaTimer(device)
    isolated = IsolatedFirstCall(request.first_call_s)
    prompts = sorted(
        zip(loaded.ids, loaded.prompts, loaded.segment_lengths, strict=True),
        key=lambda ids_prompt_length: ids_prompt_length[1].seqlen,
    )
    prompt_runs: list[_PromptRun] = []
    for bundled, (ids, prompt, segment_length) in product(conv_and_norms, prompts):
        prompt_run = _PromptRun(
            request=request,
            resolve=resolved.resolve,
            model=loaded.whole,
            ids=ids.to(device).expand(request.copies, -1),
            segment_length=segment_length,
            mixers=mixers,
            layer=target.layers[len(target.layers) // 2],
            bundled=bundled,
            comparer=Comparer(timer=timer, sampling=FIRST_LOOK, isolated=isolated),
            timer=timer,
            profile=partial(traced, device=device),
        )
        for case in _cases(prompt_run, target, prompt, resolved):
            prompt_run.cases[case.implementation] = case
        prompt_runs.append(prompt_run)
    return prompt_runs


def _cases(
    prompt_run: _PromptRun, target: Target, prompt: Prompt, resolved: Resolved
) -> Iterator[Case]:
    """The cases of a prompt, the baseline's first, before they have run.

    An implementation with precisions of its own runs at the first of them, the others at the
    requested one.  With bundled convolution and norm, libraries have no case, unless one is the
    baseline.
    """
    config = prompt_run.model.config.get_text_config()
    dtype = dtype_name(prompt_run.model.get_input_embeddings().weight.dtype)
    batch, seqlen = prompt_run.ids.shape
    wanted = resolved.precisions(dtype)
    convolution = "torch's depthwise convolution, because causal-conv1d is not installed"
    if version := installed_version("causal-conv1d"):
        convolution = f"causal-conv1d {version}"
    prefill = Prefill(
        kind="prefill",
        conv_and_norm="bundled" if prompt_run.bundled else "model",
        layers=config.num_hidden_layers,
        layer_count=target.ref.layer_count,
        operator_layers=len(prompt_run.mixers),
        operator_calls=prompt_run.operator_calls,
        segment_length=min(prompt_run.segment_length, seqlen),
        alone=prompt_run.layer,
        attention=getattr(config, "_attn_implementation", None) or "",
        convolution=convolution,
        left_to_model=prompt_run.bundled.left_to_model if prompt_run.bundled else (),
    )
    for name in dict.fromkeys((resolved.baseline, *resolved.present)):
        known = resolved.resolve(prompt_run.layer.operator, name)
        if known.kind == "library" and name != resolved.baseline and prompt_run.bundled:
            continue
        yield Case(
            task=prefill,
            batch=batch,
            seqlen=seqlen,
            inputs=prompt.token_sha256,
            implementation=known.name,
            kind=known.kind,
            version=known.version,
            precision=str(own_precisions(known, dtype, wanted)[0]),
            baseline="" if known.name == resolved.baseline else resolved.baseline,
            status="ran",
        )


@dataclass(kw_only=True)
class _PromptRun:
    """Runs the whole model on one prompt: times one layer's operator alone, profiles a prefill with
    each implementation, then times prefills with all of them.

    resolve: gives an implementation of an operator by its name.
    model: a causal language model in eval mode.
    ids: the token ids, (b, l) int64, on the model's device.
    segment_length: tokens per forward call.
    mixers: all modules of the model that call an operator.
    layer: the layer whose operator is timed alone.
    bundled: the convolution and norm that replace the model's own; None: the model's own run.
    comparer: times the layer's operator alone.
    timer: times whole prefills.
    profile: runs a function under torch's profiler, and returns the trace.
    cases: the cases by implementation, the baseline's first.
    seen: the implementations that the budget has reached.
    logits: the baseline's logits of the first token, (b, vocabulary), fp32, on the CPU; None until
        its prefill has run, and if that failed or gave some that are not finite.
    """

    request: PrefillOptions
    resolve: Resolve
    model: Any
    ids: torch.Tensor
    segment_length: int
    mixers: tuple[Mixer, ...]
    layer: LayerRef
    bundled: ConvAndNorm | None
    comparer: Comparer
    timer: CudaTimer
    profile: Callable[[Callable[[], object]], Trace]
    cases: dict[str, Case] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    logits: torch.Tensor | None = None

    @property
    def segment_count(self) -> int:
        """The number of forward calls in one prefill."""
        return len(split_prompt(self.ids.shape[1], self.segment_length))

    @property
    def operator_calls(self) -> int:
        """The number of operator calls in one prefill."""
        return len(self.mixers) * self.segment_count

    @property
    def what(self) -> str:
        """The prompt in words: "1,024 tokens, bundled convolution and norm"."""
        first = next(iter(self.cases.values()))
        return f"{first.size}, {first.where.removeprefix('prefill, ')}"

    def is_done(self, earlier: Mapping[str, Case]) -> bool:
        """Whether an interrupted command, which goes on now, is done with all cases: each one was
        timed, did not pass, or has a reason why it was not timed.  A case that the budget left out
        is not done.

        earlier: the cases that it has written, by name.
        """
        for case in self.cases.values():
            known = earlier.get(case.name)
            if known is None:
                return False
            if known.result == "passed" and not (known.samples or known.reason):
                return False
        return True

    def leave_out_unseen(self, writer: Writer, has_budget: bool) -> None:
        """Note in the report the cases that the budget did not reach.

        has_budget: whether some of the budget was left when it was this prompt's turn.  If none
            was, the whole prompt is left out.
        """
        unseen = tuple(name for name in self.cases if name not in self.seen)
        if unseen:
            case_key = next(iter(self.cases.values())).case_key
            # there is a budget, because nothing else leaves cases out
            reason = f"the budget of {self.request.budget:g} s was spent"
            # (): all implementations
            writer.leave_out(case_key, reason, unseen if has_budget else ())

    def run(self, writer: Writer, clock: StepClock) -> None:
        """Run all steps on this prompt, and write the cases.

        clock: its budget is not spent yet.  Once it is, the step that runs is finished, no further
        implementation is profiled, and the cases that were profiled say why they are not timed.

        Raises BadInputError if the model bypasses its operator, and MissingCapabilityError if an
        implementation makes the GPU unusable.
        """
        with clock.step(f"{self.what}, one layer's operator alone"):
            self._compare_operators()
        for name in self.cases:
            if clock.left() == 0:
                break
            self.seen.append(name)
            if self.cases[name].result == "passed":
                with clock.step(f"{self.what}, {name}: a profiled prefill"):
                    self._whole_prefill(name)
            writer.case(self.cases[name])
        with clock.step(f"{self.what}, prefills in turns"):
            self._sample(writer, clock)

    def first_token_logits(self) -> torch.Tensor:
        """Run a prefill.  Returns the logits of the first generated token, (b, vocabulary)."""
        return model_prefill(self.model, self.ids, self.segment_length)[:, -1]

    def first_token(self) -> torch.Tensor:
        """The timed work: the id of the first generated token of each row, (b)."""
        return self.first_token_logits().argmax(-1)

    @contextmanager
    def running(self, compute: Compute, *, marks: bool = False) -> Iterator[CallCount]:
        """While the context is open, `compute` replaces the model's operators, and the bundled
        convolution and norm replace the model's own, if this run has them.

        The value of the context counts the operator's calls.  marks: also mark the parts of the
        model for a profile.
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
        """The implementation `name`, at the precision of its case, as a model's operator."""
        precision = Precision.named(self.cases[name].precision)

        def compute(call: OperatorCall) -> Result:
            return self.resolve(call.mixer.operator, name).run(call.inputs, precision)

        return compute

    @contextmanager
    def _noting_errors(self, *names: str) -> Iterator[None]:
        """An error in the block becomes the status of these implementations' cases.  Without names
        it is dropped.

        Passes BadInputError on, and raises MissingCapabilityError if the GPU has become unusable.
        """
        try:
            with self._blaming_user(names):
                yield
        except BadInputError:  # the model bypasses its operator, or calls it as no inputs express
            raise
        except Exception as error:
            status, reason = status_of(error, self.timer.device, ", ".join(names) or "the model")
            for name in names:
                self._change(name, status=status, reason=reason)

    def _blaming_user(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """A context.  If the process ends in it, its parent blames the first of `names` that is a
        user's kernel.  Without one, it blames nobody.  At the end the working directory, torch's
        default dtype and whether it records gradients are restored.
        """
        users = [self.cases[name] for name in names if self.cases[name].kind == "own"]
        return while_it_runs(users[0] if users else None)

    def _change(self, name: str, **fields: object) -> None:
        """Change these fields of the implementation's case."""
        self.cases[name] = self.cases[name].changed(**fields)

    def _change_task(self, name: str, **fields: object) -> None:
        """Change these fields of the task, a `Prefill`, of the implementation's case."""
        self._change(name, task=self.cases[name].task.changed(**fields))

    def _compare_operators(self) -> None:
        """Time the operator of `layer` alone with each implementation, on the model's own tensors,
        when the model calls it for the first time.

        This also compiles the kernels and tunes libraries.  Outputs are not compared with the
        oracle: `ssdprof run` does that.
        """
        is_compared = False

        def compute(call: OperatorCall) -> Result:
            nonlocal is_compared
            if call.mixer.layer_index == self.layer.index and not is_compared:
                is_compared = True
                self._compare_on(call)
            return call.replacement()

        # Errors of the model itself are dropped here: its next prefill raises them again, and they
        # become the fault of the implementation that runs in it.
        with self._noting_errors(), self.running(compute):
            self.first_token_logits()

    def _compare_on(self, call: OperatorCall) -> None:
        """Time all implementations on this call.  Faults become those of their cases; a reason why
        one that passed was not timed alone is dropped, because its prefill may still be timed.
        """
        entries: list[Entry] = []
        for name, case in self.cases.items():
            bound = Call(
                implementation=self.resolve(call.mixer.operator, name),
                inputs=call.inputs,
                precision=Precision.named(case.precision),
                label=name,
            )
            entries.append(Entry(case=case, call=bound))
        verdicts = {entry.key: entry.case for entry in entries}
        for case in self.comparer.compare(entries, self.layer.name, verdicts):
            name = case.implementation
            self._change(
                name,
                status=case.status,
                later_fault=case.later_fault,
                nonfinite=case.nonfinite,
                variant=case.variant,
                plan=case.plan,
                reason="" if case.result == "passed" else case.reason,
            )
            if case.device_us:
                self._change_task(name, alone_us=case.device_us.value)

    def _whole_prefill(self, name: str) -> None:
        """Run one prefill under the profiler, after one without it if there are several segments.
        Add its memory, the times of the model's parts, and the comparison of its logits with the
        baseline's to the case; or the error, if there is one.
        """
        device = self.timer.device
        latest = list[torch.Tensor]()  # the logits of the latest run

        def run() -> None:
            latest[:] = [self.first_token_logits()]
            latest[0].argmax(-1)

        with self._noting_errors(name):
            # `_compare_operators` has warmed up the calls of the first segment only.  A later one
            # may compile or tune kernels, which must not be in the profile.
            if self.segment_count > 1:
                with self.running(self._compute(name)) as count:
                    run()
                self._check(count)
            forget_peak(device)
            with self.running(self._compute(name), marks=True) as count:
                trace = self.profile(run)
            self._check(count)
            peak = peak_bytes(device) or None
            self._change_task(name, parts=part_times(work(trace)), peak_bytes=peak)
            self._compare_logits(name, latest[0].float().cpu())

    def _compare_logits(self, name: str, logits: torch.Tensor) -> None:
        """Add to the case the difference of finite logits from those of the baseline, if that has
        some.  Logits that are not finite make the case fail.

        logits: (b, vocabulary), fp32, on the CPU.
        """
        if not torch.isfinite(logits).all():
            reason = "the first token's logits have NaN or Inf"
            self._change(name, nonfinite=True, reason=reason)
            return
        if not self.cases[name].baseline:  # it is the baseline
            self.logits = logits
        if self.logits is not None:
            difference = float((logits - self.logits).norm() / self.logits.norm())
            same = bool((logits.argmax(-1) == self.logits.argmax(-1)).all())
            self._change_task(name, logits_rms=difference, same_token=same)

    def _check(self, count: CallCount) -> None:
        """Raises BadInputError if the model bypassed its operator in one prefill.

        count: the calls of operators in it, and of the functions for single tokens ("steps").
        """
        if count["steps"] or count["calls"] != self.operator_calls:
            raise BadInputError(
                f"This model made {count['calls']} operator calls where {self.operator_calls} were "
                "expected: part of it bypasses its operator.",
                "Choose a --segment that leaves no single token, and load the model without "
                "use_kernels.",
            )

    def _sample(self, writer: Writer, clock: StepClock) -> None:
        """Time whole prefills of all implementations that passed in turns.  If the rest of the
        budget is too short for that, their cases say so.
        """
        passed = [name for name in self.seen if self.cases[name].result == "passed"]
        if not passed:
            return
        runs = {name: partial(self._timed, self._compute(name)) for name in passed}
        with self._blaming_user(passed):
            round_s = self._round_s(runs, clock)
            left = clock.left()
            plan = sampling_plan(
                round_s, min(self.request.seconds, left), self.request.smallest_difference
            )
            needed = plan.min_recordings * round_s
            fields: Mapping[str, Mapping[str, Any]]
            if left <= needed:
                reason = f"the turns need {needed:.0f} s, and {left:.0f} s of the budget were left"
                fields = {name: {"reason": reason} for name in runs}
            else:
                fields = time_in_turns(
                    runs, self.timer, plan, check=None, process=writer.process, clocks=("call",)
                )
        for name in runs:
            self._change(name, **fields[name])
            writer.case(self.cases[name])

    def _timed(self, compute: Compute) -> Any:
        """A prefill with these operators, which is timed.  Returns the first tokens; typed as Any,
        because the timer expects the output of an operator.
        """
        with self.running(compute):
            return self.first_token()

    def _round_s(self, runs: Mapping[str, Callable[[], Any]], clock: StepClock) -> float:
        """Estimated seconds of one round: one prefill of every implementation.

        If the GPU's work by the profiles is so long that samples will have no warm-up, or if the
        budget is spent, that work is the estimate.  Otherwise one round is run, which also shows
        the time of the host.
        """
        busy_s = 0.0
        for name in runs:
            task = self.cases[name].task
            if isinstance(task, Prefill):
                busy_s += 1e-6 * sum(task.part_us.values())
        plan = sampling_plan(busy_s, self.request.seconds, self.request.smallest_difference)
        if not plan.warmup_rounds or clock.left() == 0:
            return busy_s
        began = clock.now()
        for name, run in runs.items():
            blaming(self.timer.device, name, partial(self.timer.call_us, run))
        return max(busy_s, clock.now() - began)


def sampling_plan(round_s: float, seconds: float, smallest_difference: float) -> SamplingPlan:
    """How to sample rounds that take about `round_s` seconds in about `seconds` seconds.

    smallest_difference: see `SamplingPlan`.

    If the time allows, five or more recordings are made, each in new memory and with a warm-up.
    Else three or more are made (three are the fewest that give an interval), each with one round,
    in the same memory and without a warm-up.
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
