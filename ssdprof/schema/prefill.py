"""Records of a model's prefill time with each implementation of its operators, and of the parts of this time."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from ssdprof.schema.base import PrecisionRecord, Record, Status
from ssdprof.schema.checkpoint import CheckpointRef, LayerRef
from ssdprof.schema.gates import NO_GATES, Gates
from ssdprof.schema.machine import Clocks, Environment
from ssdprof.schema.speed import Interval, Verdict

PartName = Literal["operator", "convolution", "gated norm", "mixer", "attention", "MLP", "rest"]
Surroundings = Literal["model", "bundled"]  # the origin of the convolution and the gated norm


class KernelTime(Record):
    """All launches of one GPU kernel within a part."""

    name: str
    gpu_us: float
    launches: int


class PartTime(Record):
    """The GPU's work for one part of the model, in one prefill.

    mixer: a mixer without its operator, convolution and gated norm: its projections.
    rest: embedding, norms, residual sums, language-model head, and everything else.
    kernels: those with the longest times.
    """

    name: PartName
    gpu_us: float
    launches: int
    kernels: tuple[KernelTime, ...] = ()


class CallTime(Record):
    """A prefill from an idle GPU to the first token, through Python."""

    median_us: float
    interval_us: Interval
    recordings: int
    samples: int


class PrefillSpeedup(Record):
    """Over the baseline with the same surroundings.

    predicted: by Amdahl's law from the share of the operator in the baseline's time and its own speedup, both from
        device times of one layer alone; None if that layer was not timed.
    """

    ratio: float
    interval: Interval
    verdict: Verdict
    predicted: float | None = None


class PrefillCase(Record):
    """The prefill with one implementation of the operators.

    reason: why it did not pass, or why a passed one has no call time.
    alone_us: device time of one layer's operator alone, on its inputs in this model.
    peak_bytes: GPU memory allocated during the profiled prefill, weights included.
    logits_rms: RMS of the difference of the first token's logits to the baseline's with the same surroundings, over RMS
        of the baseline's.
    left_to_model: parts that the model computed itself although the bundled kernels were requested, in words.
    """

    implementation: str
    version: str = ""  # of another library
    variant: str = ""  # which of the implementation's kernels ran
    plan: str = ""  # the reason
    surroundings: Surroundings
    precision: PrecisionRecord
    status: Status
    reason: str = ""
    call: CallTime | None = None
    speedup: PrefillSpeedup | None = None
    alone_us: float | None = None
    parts: tuple[PartTime, ...] = ()
    peak_bytes: int | None = None
    logits_rms: float | None = None
    same_token: bool | None = None
    left_to_model: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _no_number_without_an_answer(self) -> PrefillCase:
        if self.status != "passed" and (self.call or self.speedup):
            raise ValueError("a time belongs only to a case that passed")
        return self

    @property
    def busy_us(self) -> float:
        """The GPU's work of all parts."""
        return sum(part.gpu_us for part in self.parts)

    @property
    def idle_us(self) -> float | None:
        """The GPU's idle time in the call; below 0 if the profiled prefill was slower than the timed ones."""
        return self.call.median_us - self.busy_us if self.call and self.parts else None

    def part_us(self, name: str) -> float:
        return sum(part.gpu_us for part in self.parts if part.name == name)


class PrefillLength(Record):
    """The prefills of one prompt.

    operator_calls: in one prefill: layers times segments.  layer: the one whose operator was timed alone.
    """

    seqlen: int
    batch: int
    segment_length: int
    operator_calls: int
    layer: LayerRef
    cases: tuple[PrefillCase, ...]

    def baseline_of(self, case: PrefillCase, baseline: str) -> PrefillCase | None:
        """The baseline's case with the same surroundings."""
        return next(
            (one for one in self.cases if (one.implementation, one.surroundings) == (baseline, case.surroundings)), None
        )


class LeftOutLength(Record):
    """Requested prefills that were not begun.

    surroundings, implementations: those left out; None and empty: all.
    """

    seqlen: int
    surroundings: Surroundings | None = None
    implementations: tuple[str, ...] = ()
    reason: str


class StepTime(Record):
    """Wall clock of one step of the command, compilation included."""

    what: str
    seconds: float


class Prefill(Record):
    """layers: decoder layers that were loaded, of layer_count.  attention: the name of the model's implementation.

    steps: in the order in which they ended.
    """

    layers: int
    layer_count: int
    operator_layers: int
    attention: str
    convolution: str  # of the model itself
    baseline: str = "unfused"
    smallest_difference: float
    lengths: tuple[PrefillLength, ...] = ()
    left_out: tuple[LeftOutLength, ...] = ()
    steps: tuple[StepTime, ...] = ()

    @property
    def failed(self) -> tuple[PrefillCase, ...]:
        """Cases whose output was wrong, and cases without enough memory."""
        return tuple(
            case for length in self.lengths for case in length.cases if case.status not in ("passed", "refused")
        )


class PrefillReport(Record):
    """The result of `ssdprof prefill`.  gates: the minimum speedup, by call time."""

    prefill_version: Literal[1] = 1
    kind: Literal["prefill"] = "prefill"
    ssdprof_version: str
    created: str  # ISO 8601, UTC
    command: tuple[str, ...]
    state: Literal["complete", "partial"] = "partial"
    checkpoint: CheckpointRef
    environment: Environment
    clocks: Clocks | None = None
    prefill: Prefill
    gates: Gates = NO_GATES
    notes: tuple[str, ...] = ()
