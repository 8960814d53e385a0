"""The records of a run: its cases, and the conditions under which they were measured."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from ssdprof.schema.accuracy import TensorAccuracy
from ssdprof.schema.answers import Answers
from ssdprof.schema.base import SCHEMA_VERSION, DType, PrecisionRecord, Record, Status
from ssdprof.schema.checkpoint import CheckpointRef, LayerRef, Prompt
from ssdprof.schema.dims import Dims
from ssdprof.schema.gates import NO_GATES, Gates
from ssdprof.schema.machine import Clocks, Environment
from ssdprof.schema.placement import Placement
from ssdprof.schema.prefill import Prefill
from ssdprof.schema.serving import CallRef
from ssdprof.schema.speed import Ceilings, Launch, Memory, Roofline, Speedup, Timing


class CaseResult(Record):
    """One layer's capture, replayed through one implementation at one precision.

    call: which of the layer's calls; None: the whole of a prompt.
    """

    layer: LayerRef
    call: CallRef | None = None
    dims: Dims
    implementation: str
    variant: str  # which of the implementation's kernels ran: "portable", "hopper", "interpreter", ...
    precision: PrecisionRecord
    status: Status
    reason: str = ""
    plan: str = ""  # the reason for this kernel and configuration
    accuracy: tuple[TensorAccuracy, ...] = ()
    timing: Timing | None = None
    speedup: Speedup | None = None
    roofline: Roofline | None = None
    memory: Memory | None = None
    launches: tuple[Launch, ...] = ()

    @model_validator(mode="after")
    def _no_number_without_a_match(self) -> CaseResult:
        if self.status != "passed" and (self.timing or self.speedup):
            raise ValueError("a timing belongs only to a case that passed")
        return self


class StepsAsked(Record):
    """The requested comparison of decode steps.  baseline: the implementation that the others are compared with."""

    implementations: tuple[str, ...]
    precisions: tuple[PrecisionRecord, ...]
    baseline: str


class Participant(Record):
    """An implementation from outside of ssdprof.

    kind: a library's failures and refusals fail no run; those of the user's own kernel do.
    source: the version of a library; module:function of an own kernel.
    precisions: the requested ones.
    """

    name: str
    kind: Literal["library", "own"]
    source: str
    precisions: tuple[PrecisionRecord, ...]


class Cast(Record):
    """The captured inputs were replayed in another dtype than the model's.  source: the model's."""

    source: DType
    to: DType

    def __str__(self) -> str:
        return f"cast from {self.source} to {self.to}"


class Asked(Record):
    """The requested comparison: every implementation at every precision, in every layer, on every prompt.

    others: implementations from outside of ssdprof, each at its own precisions.
    steps: the same for decode steps; None: there are none.
    tensor_parallel: number of ranks; the first one's share of the heads was replayed.
    cast: of the inputs; None: they were replayed in the model's own dtype.
    """

    implementations: tuple[str, ...]
    precisions: tuple[PrecisionRecord, ...]
    layers: tuple[LayerRef, ...]
    others: tuple[Participant, ...] = ()
    steps: StepsAsked | None = None
    tensor_parallel: int = 1
    cast: Cast | None = None


class RunReport(Record):
    schema_version: Literal[2] = SCHEMA_VERSION
    ssdprof_version: str
    run_id: str  # name of the run's folder
    created: str  # ISO 8601, UTC
    command: tuple[str, ...]  # as typed, without tokens
    state: Literal["complete", "partial"]
    asked: Asked | None = None  # None in recorded runs that hold none
    capture_complete: bool = True  # False: the replayed capture was interrupted
    checkpoint: CheckpointRef
    environment: Environment
    prompts: tuple[Prompt, ...]
    captured_layers: tuple[LayerRef, ...]
    segment_length: int
    ranks: int = 1  # processes that shared the layers, each on a GPU of its own
    placement: Placement | None = None  # of the weights; None for stored captures
    model_peak_bytes: int | None = None  # GPU memory while the model ran and layers were replayed
    clocks: Clocks | None = None
    ceilings: Ceilings | None = None
    cases: tuple[CaseResult, ...]
    answers: tuple[Answers, ...] = ()  # one for each prompt, if requested
    prefill: Prefill | None = None  # of the whole model, if requested
    baseline: str = "unfused"
    gates: Gates = NO_GATES  # the user's limits
    notes: tuple[str, ...] = ()  # for the reader, in sentences

    @property
    def cast(self) -> Cast | None:
        """The cast of the inputs."""
        return self.asked.cast if self.asked else None

    def baseline_of(self, call: CallRef | None) -> str:
        """The implementation that the others are compared with in a call."""
        steps = self.asked.steps if self.asked else None
        return steps.baseline if steps and call is not None and call.kind == "decode" else self.baseline

    @property
    def libraries(self) -> frozenset[str]:
        """Names of other libraries except the baseline, which must pass."""
        others = self.asked.others if self.asked else ()
        return frozenset(one.name for one in others if one.kind == "library") - {self.baseline}
