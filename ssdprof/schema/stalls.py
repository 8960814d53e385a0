"""The records of stalls, stored as JSON in a run's folder.  Imports no torch.

Numbers that ncu did not collect are None and their names are in `not_collected`: never 0.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from ssdprof.schema.base import PrecisionRecord, Record
from ssdprof.schema.checkpoint import LayerRef
from ssdprof.schema.dims import Dims
from ssdprof.schema.machine import Environment
from ssdprof.schema.speed import Launch

STALLS_VERSION: Final = 2

Samples = dict[str, int]  # stall reason -> warp samples


class Launched(Record):
    """The launches of one call of an implementation.

    precision: at which it ran; None in recorded reports that do not hold it.
    """

    implementation: str
    variant: str
    precision: PrecisionRecord | None = None
    launch_count: int  # of Triton kernels
    launches: tuple[Launch, ...]  # each kernel once, with the resources that Triton reports
    occupancy_pct: tuple[float | None, ...] = ()  # of each launch: warps that its resources let an SM hold


class Refusal(Record):
    """The reason why a call cannot be made."""

    message: str
    hint: str
    exit_code: int


class Stage(Record):
    """A stage of the algorithm in one kernel.  A name with a dot is a part of a stage."""

    name: str
    samples: Samples
    idle: bool = False  # its warps are idle, which costs no time

    @property
    def total(self) -> int:
        return sum(self.samples.values())


class Line(Record):
    """A source line of a kernel with its samples."""

    file: str  # without folders
    line: int
    function: str  # "" if unknown
    stage: str
    text: str  # as recorded with the report; "" if it was not
    samples: Samples

    @property
    def total(self) -> int:
        return sum(self.samples.values())


class Resources(Record):
    """The resources of a launch."""

    grid: tuple[int, int, int] | None = None
    block: int | None = None  # threads
    registers: int | None = None  # per thread, at launch
    spill_requests: int | None = None  # loads and stores of spilled registers, per warp
    shared_bytes: int | None = None  # per block
    waves: float | None = None  # of blocks per SM
    occupancy_pct: float | None = None  # achieved: active warps of those that an SM can hold
    occupancy_limit_pct: float | None = None  # theoretical
    limited_by: tuple[str, ...] = ()  # the resources with the fewest blocks per SM


class Throughput(Record):
    """The speed of a launch, alone on the GPU with cold caches.  Not comparable with the times of a run."""

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


class SelfCheck(Record):
    """A condition for valid tables."""

    name: str
    status: Literal["ok", "failed", "not checked"]
    detail: str


class Hint(Record):
    """Evidence of a bottleneck, and advice."""

    stage: str  # "" if it is about the whole kernel
    share_pct: float | None = None  # share of the kernel's busy samples concerned
    evidence: str
    advice: str


class KernelStalls(Record):
    """One launch of one kernel."""

    kernel: str
    implementation: str  # "" for other kernels
    resources: Resources
    throughput: Throughput
    sample_count: int | None  # None: no warp was sampled
    samples: Samples
    # without samples: waiting warps per issuing one, by stall reason
    average: dict[str, float] = Field(default_factory=dict)
    stages: tuple[Stage, ...]
    lines: tuple[Line, ...]  # hottest first; idle warps included
    from_neighbours: int = 0  # samples on lines of no stage (libraries, helpers, the compiler's own): see stages.py
    unlabelled: tuple[str, ...] = ()  # files without known stages: their functions are the stages
    not_collected: tuple[str, ...] = ()
    checks: tuple[SelfCheck, ...] = ()
    hints: tuple[Hint, ...] = ()

    @property
    def busy_samples(self) -> int:
        """All samples except those of idle warps."""
        return sum(stage.total for stage in self.stages if not stage.idle)


class Profiled(Record):
    """What was profiled.  Unknown for a report made elsewhere."""

    model: str = ""  # repository or folder, and whether its weights are random
    layer: LayerRef
    dims: Dims
    precision: PrecisionRecord
    launched: tuple[Launched, ...]
    left_out: tuple[str, ...] = ()  # a sentence for each library that could not be profiled


class Recorded(Record):
    """When, where and how ssdprof profiled."""

    created: str  # ISO 8601, UTC
    command: tuple[str, ...]  # as typed, without tokens
    environment: Environment
    ncu: str  # version; "" if it could not run


class StallReport(Record):
    """The contents of one or more ncu reports.

    For reports made elsewhere it depends only on their contents.  `subject` and `recorded` are set if ssdprof
    profiled.
    """

    stalls_version: Literal[2] = STALLS_VERSION
    ssdprof_version: str
    sources: dict[str, str]  # ncu report's file name -> sha256
    gpu: str  # "" if unknown
    kernels: tuple[KernelStalls, ...]
    words: dict[str, str] = Field(default_factory=dict)  # of a part of a stage: "chunk_scan.current" -> plain words
    checks: tuple[SelfCheck, ...] = ()
    subject: Profiled | None = None
    recorded: Recorded | None = None
    missing: str = ""  # why there are no stalls; then `subject` has the resources that Triton reports
