"""The records of stalls, stored as JSON in a run's folder.  Imports no torch.

Numbers that ncu did not collect are None and their names are in `not_collected`: never 0.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from pydantic import Field

from ssdprof.core.base import PrecisionName, Record, Text
from ssdprof.core.case import Launch
from ssdprof.core.target import Dims, Environment, LayerRef

STALLS_VERSION: Final = 4
Number = TypeVar("Number", int, float)

StallSamples = dict[Text, int]  # stall reason -> warp samples, the most frequent first
CheckResult = tuple[Literal["ok", "failed", "not checked"], Text]  # and details
SelfChecks = dict[Text, CheckResult]  # a condition for valid tables -> whether it holds


def most_first(samples: Mapping[str, Number]) -> dict[str, Number]:
    """The samples of each stall reason, the most frequent one first, without those that have
    none.
    """
    by_count = sorted(samples.items(), key=lambda item: (-item[1], item[0]))
    return {reason: count for reason, count in by_count if count}


class Launched(Record):
    """The launches of one call of an implementation."""

    implementation: Text
    variant: Text
    precision: PrecisionName  # at which it ran
    launch_count: int  # of Triton kernels
    launches: tuple[Launch, ...]  # each kernel once, with the resources that Triton reports


class Line(Record):
    """A source line of a kernel with its samples."""

    file: Text  # without folders
    line: int
    function: Text  # "" if unknown
    stage: Text
    text: Text  # as recorded with the report; "" if it was not
    samples: StallSamples

    @property
    def total(self) -> int:
        return sum(self.samples.values())


class KernelStalls(Record):
    """One launch of one kernel, alone on the GPU with cold caches: not comparable with the times of
    a run.
    """

    kernel: Text
    implementation: Text  # "" for other kernels
    grid: tuple[int, int, int] | None = None
    block: int | None = None  # threads
    registers: int | None = None  # per thread, at launch
    spill_requests: int | None = None  # loads and stores of spilled registers, per warp
    shared_bytes: int | None = None  # per block
    waves: float | None = None  # of blocks per SM
    occupancy_pct: float | None = None  # achieved: active warps of those that an SM can hold
    occupancy_limit_pct: float | None = None  # theoretical
    limited_by: tuple[Text, ...] = ()  # the resources with the fewest blocks per SM
    duration_us: float | None = None
    compute_pct: float | None = None  # of the speed of light
    memory_pct: float | None = None
    dram_pct: float | None = None
    l2_pct: float | None = None
    issue_pct: float | None = None  # cycles in which a scheduler issued an instruction
    tensor_pct: float | None = None  # cycles in which the tensor cores worked
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    l2_bytes: int | None = None  # requested of L2
    l1_hit_pct: float | None = None
    l2_hit_pct: float | None = None
    tensor_flops: int | None = None
    fp32_flops: int | None = None
    dram_peak_gb_per_s: float | None = None
    tensor_peak_tflops: float | None = None
    sample_count: int | None = None  # None: no warp was sampled
    samples: StallSamples = Field(default_factory=dict)
    # without samples: reason -> waiting warps per issuing one
    average: dict[Text, float] = Field(default_factory=dict)
    # by the algorithm's order; "stage" or "stage.part"
    stages: dict[Text, StallSamples] = Field(default_factory=dict)
    idle: tuple[Text, ...] = ()  # stages whose warps are idle, which costs no time
    lines: tuple[Line, ...] = ()  # hottest first; idle warps included
    # samples on lines without a stage (libraries, helpers, the compiler's own)
    from_neighbours: int = 0
    unlabelled: tuple[Text, ...] = ()  # files without known stages: their functions are the stages
    not_collected: tuple[Text, ...] = ()
    checks: SelfChecks = Field(default_factory=dict)
    # evidence and advice -> percent of the busy samples that it is about; None: about the whole
    # kernel
    hints: dict[Text, float | None] = Field(default_factory=dict)

    @property
    def busy_samples(self) -> int:
        """All samples except those of idle warps."""
        return sum(
            sum(samples.values())
            for stage, samples in self.stages.items()
            if stage not in self.idle
        )


class StallReport(Record):
    """The contents of one or more ncu reports, on which alone its kernels depend.

    The fields below `checks` are set if ssdprof profiled.
    """

    stalls_version: Literal[4] = STALLS_VERSION
    ssdprof_version: Text
    sources: dict[Text, Text]  # ncu report's file name -> sha256
    gpu: Text  # "" if unknown
    kernels: tuple[KernelStalls, ...]
    # of a part of a stage: "chunk_scan.current" -> plain words
    words: dict[Text, Text] = Field(default_factory=dict)
    checks: SelfChecks = Field(default_factory=dict)
    model: Text = ""  # repository or folder, and whether its weights are random
    layer: LayerRef | None = None
    dims: Dims | None = None
    precision: PrecisionName | None = None  # as requested
    launched: tuple[Launched, ...] = ()
    left_out: tuple[Text, ...] = ()  # a sentence for each library that could not be profiled
    created: Text = ""  # ISO 8601, UTC
    command: tuple[Text, ...] = ()  # as typed, without tokens
    environment: Environment | None = None
    ncu: Text = ""  # version; "" if it could not run
    # why there are no stalls; then `launched` has the resources that Triton reports
    missing: Text = ""
