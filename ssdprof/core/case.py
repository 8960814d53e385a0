"""A case, and what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from ssdprof.core import statistics
from ssdprof.core.accuracy import Accuracy, Deviation
from ssdprof.core.base import (
    PRECISIONS,
    REPEATS,
    CaseResult,
    Clock,
    Count,
    DType,
    KernelOrigin,
    Length,
    Microseconds,
    NotNegative,
    PartName,
    Percent,
    PrecisionName,
    Probe,
    Record,
    Size,
    Status,
    TensorName,
    Text,
    check_unique,
)
from ssdprof.core.statistics import Estimate
from ssdprof.core.target import CallRef, Ceilings, Dims, LayerRef, tokens

CLOSE: Final = 0.01  # RMS error up to which another library's output outside of the budget is timed
DECODER: Final = "recurrent"  # decodes with states in a format, step by step
BUDGET: Final = 10  # times the error of a format's first rounding, up to which it keeps a head
BUDGETS: Final = (2**-9, 0.5)  # below is the rounding of inputs in bf16, above no digit is right


class LayerCall(Record):
    """A captured call of a layer's operator.

    call: which of the layer's calls; None: the whole of a prompt.
    """

    kind: Literal["layer"]
    layer: LayerRef
    call: CallRef | None = None
    dims: Dims

    @property
    def where(self) -> str:
        """ "layer 3"."""
        return f"layer {self.layer.index}"

    @property
    def sizes(self) -> str:
        """The call's operator and sizes, in words."""
        return f"{self.dims.operator}, {self.dims}"


class Generated(Record):
    """The inputs of a bench's case, generated for the sizes of a model.

    shape: name of the sizes.  shape_words: "80x64, N 128, G 1".  tokens: "8 x 4,096", "64 packed x
    1k-4k".
    ways: words of --draw; empty for the default inputs.
    checked: tokens of the sequence on which the outputs were compared; None: on all.
    """

    kind: Literal["generated"]
    dims: Dims
    shape: Text
    shape_words: Text
    tokens: Text
    sequences: Size
    packed: bool = False
    layout: Literal["contiguous", "views", "transposed"] = "contiguous"
    ways: tuple[Text, ...] = ()
    checked: Size | None = None

    @property
    def where(self) -> str:
        """ "mamba2-2.7b, bf16"."""
        layout = () if self.layout == "contiguous" else (self.layout,)
        return ", ".join((self.shape, self.dims.dtype, *layout, *self.ways))

    @property
    def sizes(self) -> str:
        """Without the chunk size: each implementation takes its fastest one."""
        return f"{self.dims.operator}, {self.dims.words}, {self.dims.dtype}, {self.layout}"


def call_size(seqlen: int, batch: int, call: CallRef | None) -> str:
    """ "131,072 tokens", "8 tokens, chunk 2 of 5 of 40 tokens"."""
    size = tokens(seqlen, batch)
    if call is None:
        return size
    if call.kind != "packed":
        return f"{size}, {call}"
    return f"{size} {call}" if batch == 1 else f"{size} drafted{call.of_server}"


class Samples(Record):
    """Times of one process.

    us: microseconds of each round of each recording; implementations of one process have their
    turns in common.
    """

    process: Text
    clock: Clock
    us: Annotated[
        tuple[Annotated[tuple[Microseconds, ...], Field(min_length=1)], ...], Field(min_length=2)
    ]


class Summary(Record):
    """Times in microseconds with their 95 % intervals, of a case whose samples are not stored.

    over: the speedup over the case's baseline, as it was measured in common rounds.
    """

    call: Estimate | None = None
    device: Estimate | None = None
    over: dict[Clock, Estimate] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _ordered(self) -> Summary:
        for time in filter(None, (self.call, self.device, *self.over.values())):
            if not 1e-12 < time.low <= time.value <= time.high < 1e12:
                raise ValueError(f"{time.value} is not within its interval, or impossible")
        return self


class Launch(Record):
    """One kernel as it ran."""

    kernel: Text
    config: dict[Text, int | Text | bool]
    registers: Count | None = None
    spills: Count | None = None
    shared_bytes: Count | None = None
    warps_pct: Percent | None = None  # resident warps as a share of the most that an SM holds
    blocks_per_sm: Count | None = None

    @property
    def digest(self) -> str:
        """Six characters for the configuration, which are all that a baseline has of it."""
        return str(self.config.get("digest", sha256(str(self.config).encode()).hexdigest()[:6]))


class FirstCall(Record):
    """Seconds from a call to the end of the GPU's work, and of compiling each kernel that was not
    in Triton's cache.
    """

    seconds: NotNegative
    compiled: dict[Text, NotNegative]


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("low is above high")
    return interval


# of 95 %, where no samples are stored
Interval = Annotated[tuple[float, float], AfterValidator(_ordered)]


class AnswerBand(Record):
    """Positions start..stop of the prompt.

    flips: positions at which the two have different most likely tokens; margin: the reference's
    log-probability of its own token minus that of the other one, in nats; flip_position: that of
    the largest.
    perplexity_increase_pct: relative to the reference's, and its 95 % interval: from the
    differences at each position, resampled in blocks.  The perplexities are None if no next token
    is known.
    """

    start: Count
    stop: Count
    kl_mean: float
    kl_p99: float
    kl_max: float
    kl_max_position: Count
    top1_pct: Percent  # positions at which both have the same most likely token
    flips: Count
    flip_margin_median: float | None
    flip_margin_max: float | None
    flip_position: Count | None
    reference_perplexity: NotNegative | None
    perplexity: NotNegative | None
    perplexity_increase_pct: float | None
    perplexity_interval_pct: Interval | None


class Answers(Record):
    """The model's next-token distributions with its operators replaced, compared with those of a
    reference.

    The divergence is KL(reference || candidate), in nats.  Position t is that of the distribution
    of token t + 1.

    reference: computed the operators in the reference model.  remark: the reason of this choice.
    weights: the dtype of the model outside of its operators; own_weights: it is the checkpoint's.
    layers: decoder layers in which the implementation computed; elsewhere the reference did.
    change: for a case that shows noise: the change, in words.
    alone: the only decoder layer that the implementation computed; None: all of `layers`.
    bands: of all positions, then of parts of a long prompt.  Empty unless it ran.
    nonfinite: the first position whose distribution is not finite.
    generated: number of greedy tokens after the prompt.  first_difference: the first that differs
    from the reference's.
    """

    kind: Literal["answers"]
    reference: Text
    remark: Text = ""
    weights: DType
    own_weights: bool = True
    layers: tuple[int, ...]
    segment_length: Size
    change: Text = ""
    alone: int | None = None
    bands: tuple[AnswerBand, ...] = ()
    nonfinite: Count | None = None
    generated: Count = 0
    first_difference: Count | None = None

    @property
    def where(self) -> str:
        """ "answers", "answers of layer 3 alone"."""
        alone = "" if self.alone is None else f" of layer {self.alone} alone"
        return ", ".join(filter(None, (f"answers{alone}", self.change)))

    @property
    def sizes(self) -> str:
        """The precision of the weights, the reference and the layers, in words."""
        layers = ", ".join(map(str, self.layers))
        return f"{self.weights} weights, reference {self.reference}, layers {layers}"


# relative and RMS, (marks, heads).  None: it is not finite, or the exact value is 0
StateErrors = tuple[tuple[NotNegative | None, ...], ...]


class DecodedStates(Record):
    """A prompt token by token, with the state rounded to a format as a server's pool holds it.

    The format is that of the case's precision: "exact, int8 states".

    of: the call whose inputs these are.  step: tokens from one rounding to the next.
    marks: numbers of tokens after which errors are known, in order; the last is all of them.
    out_errors, state_errors: against fp64: of the output since the mark before, and of the state
        that the pool holds then.  Empty unless it ran.
    memories: of each head: within how many of `MEMORIES` it does not forget.
    slot_bytes: of one sequence's state in this layer.
    """

    kind: Literal["states"]
    of: Annotated[LayerCall | Generated, Field(discriminator="kind")]
    step: Size
    marks: tuple[Size, ...]
    out_errors: StateErrors = ()
    state_errors: StateErrors = ()
    memories: tuple[Count, ...] = ()
    slot_bytes: Count | None = None

    @model_validator(mode="after")
    def _shaped(self) -> DecodedStates:
        """An error for each mark and head, unless it did not run."""
        heads, marks = len(self.memories), len(self.marks)
        for errors in (self.out_errors, self.state_errors):
            if errors and (not heads or [*map(len, errors)] != [heads] * marks):
                raise ValueError("errors are of each mark and head")
        return self

    @property
    def where(self) -> str:
        """ "layer 3, decoded", "layer 3, decoded by 4"."""
        return f"{self.of.where}, {decoded_words(self.step)}"

    @property
    def sizes(self) -> str:
        return self.of.sizes

    @property
    def budget(self) -> float:
        """The largest error of a state that is kept: `BUDGET` times that of the format's first
        rounding, which is the median of the heads at the first mark, within `BUDGETS`.
        """
        first = sorted(worst([error]) for error in self.state_errors[0])
        least, most = BUDGETS
        return min(max(BUDGET * first[(len(first) - 1) // 2], least), most)

    @cached_property
    def lost(self) -> tuple[int | None, ...]:
        """The first mark at which the state of each head is outside the budget; None: it never
        is.
        """
        steps: list[int | None] = []
        budget = self.budget if self.state_errors else 0.0
        for errors in zip(*self.state_errors, strict=True):
            outside = [error is None or error > budget for error in errors]
            steps.append(self.marks[outside.index(True)] if any(outside) else None)
        return tuple(steps)

    @property
    def kept_steps(self) -> int | None:
        """Tokens after which every head is still kept; None: it did not run."""
        if not self.state_errors:
            return None
        first = min(filter(None, self.lost), default=None)
        return max((mark for mark in self.marks if first is None or mark < first), default=0)

    def last(self, errors: StateErrors) -> float | None:
        """The largest error of a head at the last mark; infinite if one is not known; None: it did
        not run.
        """
        return worst(errors[-1]) if errors else None


def decoded_words(step: int) -> str:
    """ "decoded", "decoded by 4"."""
    return f"decoded by {step}" if step > 1 else "decoded"


def worst(errors: Iterable[float | None]) -> float:
    """The largest one, infinite if one is not known."""
    return max(math.inf if error is None else error for error in errors)


class Prefill(Record):
    """A prefill of the whole model, first token included; its samples are of the call clock.

    conv_and_norm: the origin of the convolution and the gated norm around the operators.
    layers: decoder layers that were loaded, of layer_count.  operator_layers: those with an
    operator.
    operator_calls: in one prefill: layers times segments.  alone: the layer whose operator was
    timed alone.
    attention, convolution: the model's own, in words.
    alone_us: device time of that layer's operator, on its inputs in this model.
    parts: microseconds of the kernels with the longest times, and of all "others", in one profiled
        prefill.  "mixer": a mixer without its operator, convolution and gated norm: its
        projections.  "rest": embedding, norms, residual sums, language-model head, and everything
        else.
    peak_bytes: GPU memory allocated during the profiled prefill, weights included.
    logits_rms: RMS of the difference of the first token's logits to the baseline's with the same
        convolution and norm, over RMS of the baseline's.
    left_to_model: parts that the model computed itself although the bundled kernels were requested,
    in words.
    """

    kind: Literal["prefill"]
    conv_and_norm: KernelOrigin
    layers: Size
    layer_count: Size
    operator_layers: Size
    operator_calls: Size
    segment_length: Size
    alone: LayerRef
    attention: Text
    convolution: Text
    alone_us: NotNegative | None = None
    parts: dict[PartName, dict[Text, NotNegative]] = Field(default_factory=dict)
    peak_bytes: Count | None = None
    logits_rms: NotNegative | None = None
    same_token: bool | None = None
    left_to_model: tuple[Text, ...] = ()

    @property
    def where(self) -> str:
        """ "prefill, bundled convolution and norm"."""
        return f"prefill, {self.conv_and_norm} convolution and norm"

    @property
    def sizes(self) -> str:
        """The loaded part of the model, in words."""
        return f"{self.layers} of {self.layer_count} layers"

    @property
    def part_us(self) -> dict[str, float]:
        """The GPU's work of each part."""
        return {name: math.fsum(kernels.values()) for name, kernels in self.parts.items()}


class Case(Record):
    """One implementation at one precision: on one call of a layer, or in the whole model.

    task: what it computed: a captured call, generated inputs, either token by token, the model's
        answers, or a prefill of the model.
    inputs: SHA-256 of the prompt's ids, or the words of the draw: errors of equal inputs compare.
    kind: a library's refusals fail no run; those of the user's own kernel do.  What a server
        computed is not timed.
    named: a library that the user asked for, whose failures and broken laws fail the run; those of
        a library that only came along do not.
    version: of a library; module:function of an own kernel.
    variant: which of the implementation's kernels ran: "portable", "hopper", "interpreter", ...
    baseline: the implementation that it is compared with; empty for the baseline itself, whose
        other precisions are compared with its exact one.
    reason: why it did not run, or a remark.  plan: the reason for this kernel and configuration.
    later_fault: an error after the first call, while it was timed; then there is no time.
    nonfinite: an element of an output that was not compared is not finite.
    summary: the times, if there are no samples of them.
    bytes_moved, flops: the least that the call must do: every input read once, every output written
    once.
    workspace_bytes: the peak that the call allocates beyond its outputs.
    chunk_size: the fastest of `trials`; None if the implementation chooses its own.
    trials: device time of a few replays at each chunk size; None if it did not pass, or was the
    only one.
    first_call: at this chunk size; what was compiled for any of them.
    probes: laws that were tested with this call; empty if they were tested with another one.
    """

    task: Annotated[
        LayerCall | Generated | DecodedStates | Answers | Prefill, Field(discriminator="kind")
    ]
    batch: Length
    seqlen: Length
    inputs: Text = ""
    implementation: Text
    kind: Literal["bundled", "library", "own", "served"] = "bundled"
    named: bool = False
    version: Text = ""
    variant: Text = ""
    precision: PrecisionName
    baseline: Text = ""
    status: Status
    reason: Text = ""
    later_fault: Text = ""
    nonfinite: bool = False
    plan: Text = ""
    accuracy: tuple[Accuracy, ...] = ()
    probes: tuple[Probe, ...] = ()
    samples: tuple[Samples, ...] = ()
    summary: Summary | None = None
    bytes_moved: Count | None = None
    flops: Count | None = None
    workspace_bytes: Count | None = None
    launches: tuple[Launch, ...] = ()
    chunk_size: Length | None = None
    trials: dict[Length, Microseconds | None] = Field(default_factory=dict)
    first_call: FirstCall | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Case:
        if (self.samples or self.summary) and (
            self.status != "ran" or self.later_fault or self.nonfinite
        ):
            raise ValueError("times belong only to a case that ran")
        if self.samples and self.summary:
            raise ValueError("times are either samples or a summary")
        if self.precision not in PRECISIONS and not isinstance(self.task, DecodedStates | Answers):
            raise ValueError("only states of decoded tokens have other formats")
        if self.layer and any(len(tensor.vs_oracle.worst_position) < 2 for tensor in self.accuracy):
            raise ValueError("a position has an index for each axis")
        check_unique("samples", [(samples.process, samples.clock) for samples in self.samples])
        check_unique("a tensor", [tensor.tensor for tensor in self.accuracy])
        return self

    # --- the task

    @property
    def inputs_of(self) -> LayerCall | Generated | None:
        """The captured call or the generated inputs."""
        task = self.task.of if isinstance(self.task, DecodedStates) else self.task
        return task if isinstance(task, LayerCall | Generated) else None

    @property
    def is_call(self) -> bool:
        """Whether it is a call of an implementation, with errors and times."""
        return isinstance(self.task, LayerCall | Generated)

    @property
    def layer(self) -> LayerRef | None:
        """The layer of a captured call."""
        return self.inputs_of.layer if isinstance(self.inputs_of, LayerCall) else None

    @property
    def call(self) -> CallRef | None:
        """The call of its layer; None if that call is a whole prompt."""
        return self.task.call if isinstance(self.task, LayerCall) else None

    @property
    def dims(self) -> Dims | None:
        """The sizes of a captured call or of generated inputs."""
        return self.inputs_of.dims if self.inputs_of else None

    @property
    def clock(self) -> Clock:
        """The one that verdicts use."""
        return "call" if isinstance(self.task, Prefill) else "device"

    # --- names

    @property
    def where(self) -> str:
        """ "layer 3"; "mamba2-2.7b, bf16" of a bench; "answers"; "prefill, bundled convolution and
        norm".
        """
        return self.task.where

    @property
    def size(self) -> str:
        """ "131,072 tokens", "8 tokens, chunk 2 of 5 of 40 tokens": which call it is, as no other
        one of its layer.
        """
        if isinstance(self.inputs_of, Generated):
            return self.inputs_of.tokens
        return call_size(self.seqlen, self.batch, self.call)

    @property
    def case_key(self) -> str:
        """ "layer 3, 131,072 tokens"."""
        return f"{self.where}, {self.size}"

    @property
    def name(self) -> str:
        """ "layer 3, 131,072 tokens, fused, exact, fp32 states": the same case has the same name in
        every report.
        """
        return f"{self.case_key}, {self.label}"

    @property
    def id(self) -> str:
        """Six characters that `ssdprof case` takes: the same case has the same ones in every
        report.
        """
        return sha256(self.name.encode()).hexdigest()[:6]

    @property
    def label(self) -> str:
        """ "fused, exact, fp32 states"."""
        return f"{self.implementation}, {self.precision}"

    @property
    def kernel(self) -> str:
        """ "fused hopper"; the variant only if it differs from the name."""
        names = (self.implementation, "" if self.variant == self.implementation else self.variant)
        return " ".join(filter(None, names))

    @property
    def prompt(self) -> str:
        """The tokens of the prompt that the call belongs to; of all packed sequences together."""
        if self.call is None or self.call.kind == "packed":
            return tokens(self.seqlen, self.batch)
        return tokens(self.call.prompt_seqlen, self.call.sequences)

    @property
    def calls(self) -> str:
        """The calls that add up: "decode steps after 512 tokens", "chunks of 8 tokens of 40
        tokens"; else the size.
        """
        if self.call and self.call.kind == "decode":
            return f"decode steps after {self.prompt}"
        if self.call and self.call.kind == "chunk":
            return f"chunks of {tokens(self.seqlen, self.batch)} of {self.prompt}"
        if self.call and self.call.kind == "packed":  # all passes of all ranks
            whole = self.call.changed(number=1, count=1, rank=None)
            return call_size(self.seqlen, self.batch, whole)
        return self.size

    @property
    def kernels(self) -> int | None:
        """Number of launched Triton kernels; None if none was recorded (`launches` has the planned
        number).
        """
        return sum(launch.registers is not None for launch in self.launches) or None

    # --- accuracy

    def tensor(self, name: TensorName) -> Accuracy | None:
        return next((tensor for tensor in self.accuracy if tensor.tensor == name), None)

    @property
    def error(self) -> Deviation | None:
        """The deviation of the output from the fp64 oracle."""
        return out.vs_oracle if (out := self.tensor("out")) else None

    def match_pct(self, tolerance: float) -> float | None:
        """The share of the output that matches the baseline's."""
        out = self.tensor("out")
        return out.vs_baseline.match_pct(tolerance) if out and out.vs_baseline else None

    @property
    def band(self) -> AnswerBand | None:
        """The comparison of the answers at all positions."""
        bands = self.task.bands if isinstance(self.task, Answers) else ()
        return bands[0] if bands else None

    @property
    def _nonfinite_answer(self) -> int | None:
        return self.task.nonfinite if isinstance(self.task, Answers) else None

    @cached_property
    def result(self) -> CaseResult:
        """The result, from the status, the errors and the laws."""
        if self.status != "ran":
            return self.status
        if self.nonfinite or any(tensor.vs_oracle.nonfinite for tensor in self.accuracy):
            return "nonfinite"
        if self._nonfinite_answer is not None:
            return "nonfinite"
        if self.later_fault or self.broken_laws or (self.outside_budget and not self.tolerated):
            return "inaccurate"
        return "passed"

    @property
    def failed(self) -> bool:
        return self.result not in ("passed", "refused")

    @property
    def broken_laws(self) -> tuple[Probe, ...]:
        """The broken laws that make the case fail.  None of a library that was not requested: its
        laws are only shown.
        """
        if self.kind == "library" and not self.named:
            return ()
        return tuple(law for law in self.probes if law.holds == "no" and law.name != REPEATS)

    @property
    def outside_budget(self) -> str:
        """The reasons, and the laws that it breaks; empty if all is well."""
        reasons = [tensor.reason for tensor in self.accuracy if tensor.reason]
        laws = [f"law '{law.name}': {law.detail}" for law in self.broken_laws]
        return "; ".join([*reasons, *laws])

    @property
    def only_outside(self) -> bool:
        """Whether nothing is wrong with it but an error outside the budget, found before it was
        timed.
        """
        return self.result == "inaccurate" and not self.later_fault

    @property
    def tolerated(self) -> bool:
        """Whether it is timed although it is outside the budget: another library's, close enough to
        be the operator.
        """
        ratios = [tensor.vs_oracle.rms_ratio for tensor in self.accuracy]
        close = all(ratio is not None and ratio <= CLOSE for ratio in ratios)
        return close and self.kind in ("library", "served")

    @property
    def why(self) -> str:
        """Why it did not pass, or a remark on it; empty if there is nothing to say."""
        if self.later_fault:
            return self.later_fault
        if self._nonfinite_answer is not None:
            return f"the distribution at position {self._nonfinite_answer:,} is not finite"
        nonfinite = "some element is not finite" if self.nonfinite else ""
        return self.reason or nonfinite or self.outside_budget

    @property
    def is_gated(self) -> bool:
        """Whether gates apply: not to the baseline, other libraries, what was served, noise, and
        single layers.
        """
        if isinstance(self.task, Answers):
            return not self.task.change and self.task.alone is None
        if isinstance(self.task, DecodedStates):
            return True
        return self.rated_against is not None and self.kind not in ("library", "served")

    @property
    def rated_against(self) -> tuple[str, str] | None:
        """The key and the name of its baseline; None if it is of the baseline itself."""
        return (
            None if self.baseline in ("", self.implementation) else (self.case_key, self.baseline)
        )

    # --- times

    def _of(self, clock: Clock) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Microseconds of each recording of each process."""
        return {samples.process: samples.us for samples in self.samples if samples.clock == clock}

    def by_clock(self, clock: Clock) -> Estimate | None:
        """The time in microseconds."""
        if processes := self._of(clock):
            return statistics.of_processes([statistics.median(us) for us in processes.values()])
        if self.summary is None:
            return None
        return self.summary.call if clock == "call" else self.summary.device

    @cached_property
    def call_us(self) -> Estimate | None:
        return self.by_clock("call")

    @cached_property
    def device_us(self) -> Estimate | None:
        return self.by_clock("device")

    @property
    def time_us(self) -> Estimate | None:
        """The time by the clock that verdicts use: the device's; for a prefill the call's."""
        return self.device_us or self.call_us

    def over(self, other: Case | None, clock: Clock = "device") -> Estimate | None:
        """How many times as fast it is as `other`; None if one of them was not timed.

        By the rounds that both were timed in; without those the recorded speedup, or the quotient
        of the two times.
        """
        time = self.by_clock(clock)
        other_time = other.by_clock(clock) if other else None
        if other is None or other is self or not time or not other_time:
            return None
        rounds = self._of(clock)
        other_rounds = other._of(clock)
        ratios = [
            statistics.ratio(other_rounds[process], us)
            for process, us in rounds.items()
            if len(us) == len(other_rounds.get(process, ()))
        ]
        if ratios:
            return statistics.of_processes(ratios, statistics.SPREAD[clock])
        if self.summary and clock in self.summary.over and other.implementation == self.baseline:
            return self.summary.over[clock]
        return statistics.quotient(other_time, time)

    def floor_us(self, ceilings: Ceilings | None) -> float | None:
        """The least time in which this GPU can move the bytes and do the arithmetic."""
        if ceilings is None or self.bytes_moved is None or self.flops is None:
            return None
        memory_us = self.bytes_moved / ceilings.copy_gb_per_s / 1e3
        return max(memory_us, self.flops / ceilings.matmul_tflops / 1e6)

    def floor_pct(self, ceilings: Ceilings | None) -> float | None:
        """The floor as a share of the device time."""
        floor = self.floor_us(ceilings)
        return 100 * floor / self.device_us.value if floor and self.device_us else None

    def joined(self, later: Case) -> Case:
        """This case with what a later line says of it: samples, or a fault."""
        if self.name != later.name:
            raise ValueError(f"{later.name} is not {self.name}")
        return later if later.accuracy else later.changed(accuracy=self.accuracy)

    def sampled(self, again: Case) -> Case:
        """This case with the samples of another process, or with the fault that it found."""
        if again.result == "passed":
            return self.changed(samples=(*self.samples, *again.samples))
        fields = ("status", "reason", "later_fault", "nonfinite")
        return self.changed(samples=(), **{name: getattr(again, name) for name in fields})
