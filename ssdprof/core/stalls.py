"""The records of a stall report, which is stored as JSON in a run's folder.  Imports no torch.

A number that ncu did not collect is None, never 0, and its name is in `not_collected`.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from pydantic import Field

from ssdprof.core.base import PrecisionName, Record, Text
from ssdprof.core.case import Launch
from ssdprof.core.target import Dims, Environment, LayerRef

STALLS_VERSION: Final = 4
Number = TypeVar("Number", int, float)

StallSamples = dict[Text, int]  # stall reason -> samples of warps, the most frequent first
CheckResult = tuple[Literal["ok", "failed", "not checked"], Text]  # whether it holds, and details
SelfChecks = dict[Text, CheckResult]  # a condition for valid tables, in words -> its result


def most_first(samples: Mapping[str, Number]) -> dict[str, Number]:
    """Stall reason -> samples, the most frequent reason first, without reasons that have none."""
    by_count = sorted(samples.items(), key=lambda item: (-item[1], item[0]))
    return {reason: count for reason, count in by_count if count}


class Launched(Record):
    """The kernels that one call of an implementation launched."""

    implementation: Text
    variant: Text
    precision: PrecisionName  # at which it ran
    launch_count: int  # launches of Triton kernels, several of one kernel counted separately
    launches: tuple[Launch, ...]  # each kernel once, with the resources that Triton reports


class Line(Record):
    """A source line of a kernel with its samples."""

    file: Text  # without folders
    line: int  # 0 if the samples belong to no line
    function: Text  # "" if unknown
    stage: Text
    text: Text  # as recorded with the report; "" if it was not
    samples: StallSamples

    @property
    def total(self) -> int:
        return sum(self.samples.values())


class KernelStalls(Record):
    """One launch of one kernel, as ncu profiled it: alone on the GPU and with cold caches.

    Its duration cannot be compared with the times of a run.
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
    occupancy_limit_pct: float | None = None  # the most that the kernel's resources allow
    limited_by: tuple[Text, ...] = ()  # the resources that allow the fewest blocks per SM
    duration_us: float | None = None
    # percentages of the GPU's peak rates, which ncu calls the speed of light
    compute_pct: float | None = None
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
    # stall reason -> waiting warps per issuing warp; only if ncu took no samples
    average: dict[Text, float] = Field(default_factory=dict)
    # "stage" or "stage.part" -> its samples, in the order of the algorithm
    stages: dict[Text, StallSamples] = Field(default_factory=dict)
    idle: tuple[Text, ...] = ()  # stages whose warps wait for others, which costs no time
    lines: tuple[Line, ...] = ()  # the hottest first, those of idle stages included
    # samples on lines without a stage (in libraries, helpers, or the compiler's own code), which
    # were given to the stage of a neighbouring line
    from_neighbours: int = 0
    # source files whose stages are not known; the functions in them are taken as stages
    unlabelled: tuple[Text, ...] = ()
    not_collected: tuple[Text, ...] = ()
    checks: SelfChecks = Field(default_factory=dict)
    # evidence and advice in words -> the percentage of the busy samples that it is about; None: it
    # is about the whole kernel
    hints: dict[Text, float | None] = Field(default_factory=dict)

    @property
    def busy_samples(self) -> int:
        """The number of samples in stages that are not idle."""
        return sum(
            sum(samples.values())
            for stage, samples in self.stages.items()
            if stage not in self.idle
        )


class StallReport(Record):
    """The contents of one or more ncu reports.

    The fields up to `checks` depend on the ncu reports alone.  The fields below are set if ssdprof
    itself profiled.
    """

    stalls_version: Literal[4] = STALLS_VERSION
    ssdprof_version: Text
    sources: dict[Text, Text]  # ncu report's file name -> sha256
    gpu: Text  # "" if unknown
    kernels: tuple[KernelStalls, ...]
    # part of a stage, such as "chunk_scan.current" -> its name in words
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
    # why there are no stalls, in which case `launched` has the resources that Triton reports
    missing: Text = ""
