"""A case: one implementation at one precision on one task, with everything measured of it."""

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

# What a library or a server computed passes although it is outside the error budget, up to this
# relative RMS error.
CLOSE: Final = 0.01
DECODER: Final = "recurrent"  # the implementation that decodes with states in any format
# A format keeps a head while the relative RMS error of its state is at most this many times that of
# the first rounding to the format, within these limits.  The lower one is about the error of
# rounding inputs to bf16; at the upper one no digit is right.
BUDGET_FACTOR: Final = 10
LEAST_BUDGET: Final = 2**-9
MOST_BUDGET: Final = 0.5


class LayerCall(Record):
    """A captured call of a layer's operator.

    call: which of the layer's calls; None for a call on the whole prompt.
    state_break: a sentence on the first row that begins with another state than zeros or the one
        that an earlier call left for it; empty if all states fit, or nothing is known of them.
    """

    kind: Literal["layer"]
    layer: LayerRef
    call: CallRef | None = None
    dims: Dims
    state_break: Text = ""

    @property
    def where(self) -> str:
        """The layer: "layer 3"."""
        return f"layer {self.layer.index}"

    @property
    def sizes(self) -> str:
        """The call's operator and sizes, in words."""
        return f"{self.dims.operator}, {self.dims}"


class Generated(Record):
    """The inputs of a bench's case, generated for the sizes of a model.

    shape: the name of the sizes: "mamba2-2.7b".
    shape_words: the sizes in words: "80x64, N 128, G 1".
    tokens: the sequences in words: "8 x 4,096", "64 packed x 1k-4k".
    ways: the words of `--draw`; empty for the default inputs.
    checked: the length of the sequence on which the outputs were compared; None if they were
        compared on all tokens that were timed.
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
        """The inputs without their length: "mamba2-2.7b, bf16"."""
        layout = () if self.layout == "contiguous" else (self.layout,)
        return ", ".join((self.shape, self.dims.dtype, *layout, *self.ways))

    @property
    def sizes(self) -> str:
        """The operator, its sizes, the dtype and the layout, in words.

        The chunk size is left out, because each implementation takes its fastest one.
        """
        return f"{self.dims.operator}, {self.dims.words}, {self.dims.dtype}, {self.layout}"


def call_size(seqlen: int, batch: int, call: CallRef | None) -> str:
    """The size of a call in words: "131,072 tokens", "8 tokens, chunk 2 of 5 of 40 tokens", "40
    tokens in 3 packed sequences", "2 x 8 tokens drafted, pass 2 of 5".
    """
    size = tokens(seqlen, batch)
    if call is None:
        return size
    if call.kind != "packed":
        return f"{size}, {call}"
    return f"{size} {call}" if batch == 1 else f"{size} drafted{call.pass_and_rank_suffix}"


class Samples(Record):
    """The times of a case that one process measured by one clock.

    us: for each recording, the microseconds of each of its rounds.  All implementations of a
        process take turns within a round, so equal indices were measured at nearly the same time.
    """

    process: Text
    clock: Clock
    us: Annotated[
        tuple[Annotated[tuple[Microseconds, ...], Field(min_length=1)], ...], Field(min_length=2)
    ]


class Summary(Record):
    """The times of a case whose samples are not stored, in microseconds with 95 % intervals.

    over: clock -> the speedup over the case's baseline, computed from rounds in which both ran.
    """

    call: Estimate | None = None
    device: Estimate | None = None
    over: dict[Clock, Estimate] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_possible(self) -> Summary:
        for estimate in filter(None, (self.call, self.device, *self.over.values())):
            if not 1e-12 < estimate.low <= estimate.value <= estimate.high < 1e12:
                raise ValueError(f"{estimate.value} is not within its interval, or impossible")
        return self


class Launch(Record):
    """One kernel as it ran."""

    kernel: Text
    config: dict[Text, int | Text | bool]
    registers: Count | None = None  # per thread
    spills: Count | None = None  # 32-bit words of local memory per thread
    shared_bytes: Count | None = None
    warps_pct: Percent | None = None  # resident warps as a share of the most that an SM holds
    blocks_per_sm: Count | None = None

    @property
    def digest(self) -> str:
        """Six characters that identify the configuration.

        A stored baseline's config has only this digest.
        """
        return str(self.config.get("digest", sha256(str(self.config).encode()).hexdigest()[:6]))


class FirstCall(Record):
    """The first call of an implementation.

    seconds: from the call to the end of the GPU's work.
    compiled: kernel -> the seconds of compiling it, for each kernel that was not in Triton's cache.
        If a kernel was compiled several times, the longest compilation counts.
    """

    seconds: NotNegative
    compiled: dict[Text, NotNegative]


def _ordered(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise ValueError("low is above high")
    return interval


# the ends of a 95 % interval, of a value whose samples are not stored
Interval = Annotated[tuple[float, float], AfterValidator(_ordered)]


class AnswerBand(Record):
    """The answers at positions start, ..., stop - 1 of the prompt, compared with the reference's.

    kl_mean, kl_p99, kl_max: of the KL divergence at each position, in nats.
    flips: the number of positions at which the two have different most likely tokens.
    flip_margin_median, flip_margin_max: of the margin at a flip: the reference's log-probability of
        its own token minus that of the candidate's token, in nats.
    flip_position: the position of the largest margin; None, as the margins are, without flips.
    perplexity_increase_pct: relative to the reference's perplexity.
    perplexity_interval_pct: its 95 % interval, from the differences at each position, resampled in
        blocks.

    The last four fields are None if no next token is known.
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

    reference: the implementation that computed the operators in the reference model.
    remark: the reason why it is the reference.
    weights: the dtype of the model outside of its operators.
    own_weights: whether this is the dtype of the checkpoint.
    layers: the decoder layers that were compared: the implementation computed in all of them, or
        in one (`alone`), and the reference in all others.
    change: in a case that shows noise, what was changed, in words; otherwise empty.
    alone: the only one of `layers` in which the implementation computed; None if it computed in all
        of them.
    bands: all positions, then parts of a long prompt.  Empty if the case did not run.
    nonfinite: the first position whose distribution is not finite; None if there is none.
    generated: the number of greedy tokens after the prompt.
    first_difference: the index of the first of them that differs from the reference's; None if none
        differs.
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
        """What was answered: "answers", "answers of layer 3 alone"."""
        alone = "" if self.alone is None else f" of layer {self.alone} alone"
        return ", ".join(filter(None, (f"answers{alone}", self.change)))

    @property
    def sizes(self) -> str:
        """The precision of the weights, the reference and the layers, in words."""
        layers = ", ".join(map(str, self.layers))
        return f"{self.weights} weights, reference {self.reference}, layers {layers}"


# Relative RMS errors, (marks, heads).  None: the error is not finite, or the exact value is 0.
StateErrors = tuple[tuple[NotNegative | None, ...], ...]


class DecodedStates(Record):
    """A prompt that was decoded token by token, with the state rounded to a format, as in a
    server's pool of states.

    The format is part of the case's precision: "exact, int8 states".

    of: the call whose inputs were decoded.
    step: the number of tokens from one rounding to the next.
    marks: the numbers of tokens after which errors are known, ascending; the last one is the
        length of the prompt.
    out_errors: relative RMS errors against fp64 of the output since the previous mark.
    state_errors: relative RMS errors against fp64 of the state in the pool at the mark.  Both are
        empty if the case did not run.
    memories: for each head, the number of `MEMORIES` within which it does not forget.
    slot_bytes: the size of the state of one sequence in this layer; None if it is not known.
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
        """Check that there is an error for each mark and head, unless the case did not run."""
        heads = len(self.memories)
        for errors in (self.out_errors, self.state_errors):
            heads_at_marks = [len(of_mark) for of_mark in errors]
            if errors and (heads == 0 or heads_at_marks != [heads] * len(self.marks)):
                raise ValueError("errors are of each mark and head")
        return self

    @property
    def where(self) -> str:
        """The call, and the tokens of a step: "layer 3, decoded", "layer 3, decoded by 4"."""
        return f"{self.of.where}, {decoded_words(self.step)}"

    @property
    def sizes(self) -> str:
        return self.of.sizes

    @property
    def budget(self) -> float:
        """The largest error of a state that counts as kept.

        It is `BUDGET_FACTOR` times the error of the format's first rounding, within `LEAST_BUDGET`
        and `MOST_BUDGET`.  The error of the first rounding is the lower median of the heads at the
        first mark.  The case must have run.
        """
        first_errors = sorted(
            math.inf if error is None else error for error in self.state_errors[0]
        )
        median = first_errors[(len(first_errors) - 1) // 2]
        return min(max(BUDGET_FACTOR * median, LEAST_BUDGET), MOST_BUDGET)

    @cached_property
    def lost(self) -> tuple[int | None, ...]:
        """For each head, the first mark at which its state is outside the budget; None if it never
        is.  Empty if the case did not run.
        """
        lost_at: list[int | None] = []
        budget = self.budget if self.state_errors else 0.0
        for errors_of_head in zip(*self.state_errors, strict=True):
            outside = [error is None or error > budget for error in errors_of_head]
            lost_at.append(self.marks[outside.index(True)] if any(outside) else None)
        return tuple(lost_at)

    @property
    def kept_steps(self) -> int | None:
        """The last mark before a head is lost, 0 if one is lost at the first mark; None if the case
        did not run.
        """
        if not self.state_errors:
            return None
        first_lost = min(filter(None, self.lost), default=math.inf)
        return max((mark for mark in self.marks if mark < first_lost), default=0)

    def last(self, errors: StateErrors) -> float | None:
        """The largest error of a head at the last mark; infinite if an error is None, None if the
        case did not run.

        errors: `out_errors` or `state_errors`.
        """
        return worst(errors[-1]) if errors else None


def decoded_words(step: int) -> str:
    """How a prompt was decoded: "decoded" token by token, "decoded by 4"."""
    return f"decoded by {step}" if step > 1 else "decoded"


def worst(errors: Iterable[float | None]) -> float:
    """The largest of at least one error; infinite if an error is None."""
    return max(math.inf if error is None else error for error in errors)


class Prefill(Record):
    """A prefill of the whole model, up to the first token.  Its samples are call times.

    conv_and_norm: the origin of the convolution and the gated norm around the operators.
    layers: the number of decoder layers that were loaded, of `layer_count` in the model.
    operator_layers: the number of loaded layers that have an operator.
    operator_calls: the number of operator calls in one prefill: operator layers times segments.
    attention, convolution: the model's implementations, in words.
    alone: the layer whose operator was also timed alone.
    alone_us: the device time of that operator, on its inputs in this model.
    parts: part of the model -> kernel -> microseconds in one profiled prefill.  The kernels with
        the longest times have names; the others are summed as "others".  The part "mixer" is a
        mixer without its operator, convolution and gated norm, that is, its projections.  The part
        "rest" is the embedding, norms, residual sums, language-model head, and everything else.
    peak_bytes: the GPU memory allocated during the profiled prefill, weights included.
    logits_rms: the RMS of the difference of the first token's logits to the baseline's with the
        same convolution and norm, over the RMS of the baseline's.
    same_token: whether the first token is that of the baseline.
    left_to_model: the parts, in words, that the model computed itself although the bundled kernels
        were requested.
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
        """The kind of prefill: "prefill, bundled convolution and norm"."""
        return f"prefill, {self.conv_and_norm} convolution and norm"

    @property
    def sizes(self) -> str:
        """The loaded part of the model, in words."""
        return f"{self.layers} of {self.layer_count} layers"

    @property
    def part_us(self) -> dict[str, float]:
        """Part of the model -> the microseconds of its kernels."""
        return {name: math.fsum(kernels.values()) for name, kernels in self.parts.items()}


class Case(Record):
    """One implementation at one precision, on one call of a layer or in the whole model.

    task: what was computed: a captured call, generated inputs, one of these decoded token by token,
        the model's answers, or a prefill of the model.
    inputs: the SHA-256 of the prompt's ids, or the words of the draw.  Errors can be compared
        between cases with equal inputs.
    kind: the origin of the implementation.  A case that a library refuses does not fail a run; a
        case that the user's own kernel refuses does.  What a server computed is not timed.
    named: whether the user asked for this library by name.  Only then do its failures and broken
        laws fail the run.
    version: the version of a library, or "module:function" of the user's own kernel.
    variant: which of the implementation's kernels ran: "portable", "hopper", "interpreter", ...
    baseline: the implementation that the case is compared with; empty if there is none, as for the
        baseline itself.  Cases of the baseline at other precisions name it, too, and are compared
        with its exact one.
    reason: why the case did not run, or a remark.
    later_fault: an error after the first call, while the case was timed; it then has no time.
    nonfinite: whether an output that was not compared has an element that is not finite.
    plan: the reasons for this kernel and configuration.
    summary: the times, if the samples are not stored.
    bytes_moved, flops: the least that any implementation must move and compute, with every input
        read once and every output written once.
    workspace_bytes: the peak memory that the call allocates beyond its outputs.
    chunk_size: the fastest one of `trials`; None if the implementation chooses it itself.
    trials: chunk size -> the device time of a few replays; None if the case did not pass with this
        chunk size, or if there was no other one to compare it with.
    first_call: the first call with `chunk_size`, with all kernels compiled for any chunk size.
    probes: the laws that were tested with this call; empty if they were tested with another one.
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
        if self.samples or self.summary:
            if self.status != "ran":
                raise ValueError("times belong only to a case that ran")
            if self.later_fault or self.nonfinite:
                raise ValueError("a case with a later fault or with NaN or infinity has no times")
        if self.samples and self.summary:
            raise ValueError("times are either samples or a summary")
        decoded = self.implementation == DECODER and isinstance(self.task, DecodedStates | Answers)
        if self.precision not in PRECISIONS and not decoded:
            raise ValueError(f"only states that {DECODER!r} decodes have other formats")
        check_unique("samples", [(samples.process, samples.clock) for samples in self.samples])
        check_unique("a tensor", [tensor.tensor for tensor in self.accuracy])
        return self

    # --- the task

    @property
    def inputs_of(self) -> LayerCall | Generated | None:
        """The captured call or the generated inputs, also of decoded states; None for the whole
        model.
        """
        task = self.task.of if isinstance(self.task, DecodedStates) else self.task
        return task if isinstance(task, LayerCall | Generated) else None

    @property
    def is_call(self) -> bool:
        """Whether the case is a call of the operator alone, with errors and times."""
        return isinstance(self.task, LayerCall | Generated)

    @property
    def layer(self) -> LayerRef | None:
        """The layer of a captured call, also of decoded states; None for generated inputs and for
        the whole model.
        """
        return self.inputs_of.layer if isinstance(self.inputs_of, LayerCall) else None

    @property
    def call(self) -> CallRef | None:
        """Which of its layer's calls the case is; None if the call is a whole prompt, and if the
        task is no captured call.
        """
        return self.task.call if isinstance(self.task, LayerCall) else None

    @property
    def state_break(self) -> str:
        """`LayerCall.state_break` of the captured call; empty without one."""
        return self.inputs_of.state_break if isinstance(self.inputs_of, LayerCall) else ""

    @property
    def dims(self) -> Dims | None:
        """The sizes of a captured call or of generated inputs; None for the whole model."""
        return self.inputs_of.dims if self.inputs_of else None

    @property
    def clock(self) -> Clock:
        """The clock that verdicts on speed use."""
        return "call" if isinstance(self.task, Prefill) else "device"

    # --- names

    @property
    def where(self) -> str:
        """The place of the task: "layer 3", "mamba2-2.7b, bf16", "answers", "prefill, bundled
        convolution and norm".
        """
        return self.task.where

    @property
    def size(self) -> str:
        """The size of the call, which differs from that of every other call of its layer:
        "131,072 tokens", "8 tokens, chunk 2 of 5 of 40 tokens".
        """
        if isinstance(self.inputs_of, Generated):
            return self.inputs_of.tokens
        return call_size(self.seqlen, self.batch, self.call)

    @property
    def case_key(self) -> str:
        """The task in words: "layer 3, 131,072 tokens"."""
        return f"{self.where}, {self.size}"

    @property
    def name(self) -> str:
        """The name of the case: "layer 3, 131,072 tokens, fused, exact, fp32 states".

        The same case has the same name in every report.
        """
        return f"{self.case_key}, {self.label}"

    @property
    def id(self) -> str:
        """Six characters that identify the case for `ssdprof case`.

        The same case has the same id in every report.
        """
        return sha256(self.name.encode()).hexdigest()[:6]

    @property
    def label(self) -> str:
        """The implementation and the precision: "fused, exact, fp32 states"."""
        return f"{self.implementation}, {self.precision}"

    @property
    def kernel(self) -> str:
        """The implementation, and its variant if that has another name: "fused hopper"."""
        return " ".join(filter(None, dict.fromkeys((self.implementation, self.variant))))

    @property
    def variant_and_version(self) -> str:
        """The variant and the version, once if they are equal, as those of a user's kernel are."""
        return " ".join(filter(None, dict.fromkeys((self.variant, self.version))))

    @property
    def prompt(self) -> str:
        """The size of the prompt that the call belongs to, in words.

        Packed sequences count as one prompt.
        """
        if self.call is None or self.call.kind == "packed":
            return tokens(self.seqlen, self.batch)
        return tokens(self.call.prompt_seqlen, self.call.sequences)

    @property
    def calls(self) -> str:
        """The calls that this case is summed with, in words: "decode steps after 512 tokens",
        "chunks of 8 tokens of 40 tokens", or the size that other calls have in common with it.
        """
        kind = self.call.kind if self.call else ""
        if kind == "decode":
            return f"decode steps after {self.prompt}"
        if kind == "chunk":
            return f"chunks of {tokens(self.seqlen, self.batch)} of {self.prompt}"
        if self.call and kind == "packed":
            any_pass = self.call.changed(number=1, count=1, rank=None)  # of any rank, too
            return call_size(self.seqlen, self.batch, any_pass)
        return self.size

    @property
    def kernel_count(self) -> int | None:
        """The number of Triton kernels whose launch was recorded; None if there are none.

        Where no Triton kernel could be inspected, `launches` has the planned one, without
        registers.
        """
        return sum(launch.registers is not None for launch in self.launches) or None

    # --- accuracy

    def tensor(self, name: TensorName) -> Accuracy | None:
        return next((tensor for tensor in self.accuracy if tensor.tensor == name), None)

    @property
    def error(self) -> Deviation | None:
        """The deviation of the output from the fp64 oracle; None if it was not compared."""
        out = self.tensor("out")
        return out.vs_oracle if out else None

    def match_pct(self, tolerance: float) -> float | None:
        """The percentage of the output's elements that match the baseline's; None if they were not
        compared.
        """
        out = self.tensor("out")
        return out.vs_baseline.match_pct(tolerance) if out and out.vs_baseline else None

    @property
    def band(self) -> AnswerBand | None:
        """The comparison of the answers at all positions; None if there is none."""
        bands = self.task.bands if isinstance(self.task, Answers) else ()
        return bands[0] if bands else None

    @property
    def _nonfinite_answer(self) -> int | None:
        return self.task.nonfinite if isinstance(self.task, Answers) else None

    @cached_property
    def result(self) -> CaseResult:
        """The result, from the status, a later fault, the errors and the laws."""
        if self.status != "ran":
            return self.status
        if self.nonfinite or any(tensor.vs_oracle.nonfinite for tensor in self.accuracy):
            return "nonfinite"
        if self._nonfinite_answer is not None:
            return "nonfinite"
        if self.later_fault or self.broken_laws or (self.accuracy_faults and not self.tolerated):
            return "inaccurate"
        return "passed"

    @property
    def failed(self) -> bool:
        return self.result not in ("passed", "refused")

    @property
    def broken_laws(self) -> tuple[Probe, ...]:
        """The broken laws that make the case fail.

        Laws of a library that the user did not name, and `REPEATS`, which no kernel promises to
        obey, are reported and fail no case.
        """
        if self.kind == "library" and not self.named:
            return ()
        return tuple(law for law in self.probes if law.holds == "no" and law.name != REPEATS)

    @property
    def accuracy_faults(self) -> str:
        """The reasons why errors are outside their budgets, and the broken laws; empty if there are
        none.
        """
        reasons = [tensor.reason for tensor in self.accuracy if tensor.reason]
        laws = [f"law '{law.name}': {law.detail}" for law in self.broken_laws]
        return "; ".join([*reasons, *laws])

    @property
    def is_only_inaccurate(self) -> bool:
        """Whether nothing but `accuracy_faults` makes the case fail."""
        return self.result == "inaccurate" and not self.later_fault

    @property
    def tolerated(self) -> bool:
        """Whether the case may be outside its budget.

        It may if it is of another library, or of a server, and close enough to the oracle to have
        computed the same operator.
        """
        ratios = [tensor.vs_oracle.rms_ratio for tensor in self.accuracy]
        is_close = all(ratio is not None and ratio <= CLOSE for ratio in ratios)
        return is_close and self.kind in ("library", "served")

    @property
    def why(self) -> str:
        """The reason why the case did not pass, or a remark, or both; empty if there is neither."""
        if self.later_fault:
            return self.later_fault
        if self._nonfinite_answer is not None:
            return f"the distribution at position {self._nonfinite_answer:,} is not finite"
        if self.is_only_inaccurate:
            return "; ".join(filter(None, (self.accuracy_faults, self.reason)))
        nonfinite = "some element is not finite" if self.nonfinite else ""
        return self.reason or nonfinite or self.accuracy_faults

    @property
    def is_gated(self) -> bool:
        """Whether gates apply to the case.

        They do not apply to the baseline, to other libraries, to what a server computed, and to
        answers that show noise or are of a single layer.
        """
        if isinstance(self.task, Answers):
            return not self.task.change and self.task.alone is None
        if isinstance(self.task, DecodedStates):
            return True
        return self.rated_against is not None and self.kind not in ("library", "served")

    @property
    def rated_against(self) -> tuple[str, str] | None:
        """The case key and the implementation of the baseline; None if the case is of the baseline
        itself, or has none.
        """
        if self.baseline in ("", self.implementation):
            return None
        return self.case_key, self.baseline

    # --- times

    def _recordings(self, clock: Clock) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Process -> the microseconds of each round of each of its recordings."""
        return {samples.process: samples.us for samples in self.samples if samples.clock == clock}

    def by_clock(self, clock: Clock) -> Estimate | None:
        """The time in microseconds; None if the case was not timed."""
        if processes := self._recordings(clock):
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
        """The device time; for a prefill, which has none, the call time."""
        return self.device_us or self.call_us

    def over(self, other: Case | None, clock: Clock = "device") -> Estimate | None:
        """The speedup of this case over another one; None if one of them was not timed, or if the
        other one is None or this case itself.

        It is computed from the rounds in which both were timed.  Without such rounds it is the
        stored speedup over the baseline, or else the quotient of the two times.
        """
        time = self.by_clock(clock)
        other_time = other.by_clock(clock) if other else None
        if other is None or other is self or not time or not other_time:
            return None
        other_recordings = other._recordings(clock)
        ratios = [
            statistics.ratio(other_recordings[process], recordings)
            for process, recordings in self._recordings(clock).items()
            if len(recordings) == len(other_recordings.get(process, ()))
        ]
        if ratios:
            return statistics.of_processes(ratios, statistics.SPREAD[clock])
        if self.summary and clock in self.summary.over and other.implementation == self.baseline:
            return self.summary.over[clock]
        return statistics.quotient(other_time, time)

    def floor_us(self, ceilings: Ceilings | None) -> float | None:
        """The least time, in microseconds, in which the GPU can move the bytes and do the
        arithmetic; None if it is not known.

        ceilings: of the GPU.
        """
        if ceilings is None or self.bytes_moved is None or self.flops is None:
            return None
        memory_us = self.bytes_moved / ceilings.copy_gb_per_s / 1e3
        return max(memory_us, self.flops / ceilings.matmul_tflops / 1e6)

    def floor_pct(self, ceilings: Ceilings | None) -> float | None:
        """`floor_us` as a percentage of the device time; None if one of them is not known."""
        floor = self.floor_us(ceilings)
        return 100 * floor / self.device_us.value if floor and self.device_us else None

    def joined(self, later: Case) -> Case:
        """The later of two lines of the report's file on one case, with the errors of this one if
        it has none.

        A later line adds samples, laws or a fault.  Raises ValueError if it is of another case.
        """
        if self.name != later.name:
            raise ValueError(f"{later.name} is not {self.name}")
        return later if later.accuracy else later.changed(accuracy=self.accuracy)

    def sampled(self, again: Case) -> Case:
        """This case with the samples of another process.  If it did not pass there, the case has no
        samples, and the fault of that process.
        """
        if again.result == "passed":
            return self.changed(samples=(*self.samples, *again.samples))
        fields = ("status", "reason", "later_fault", "nonfinite")
        return self.changed(samples=(), **{name: getattr(again, name) for name in fields})
