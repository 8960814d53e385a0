"""What the stalls stage hands on: plain records, stored as JSON beside a run's report.  Imports no torch.

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
    """What one call of an implementation launches.

    precision: at which it ran; None in reports from before every implementation had its own.
    """

    implementation: str
    variant: str
    precision: PrecisionRecord | None = None
    launch_count: int  # of Triton kernels
    launches: tuple[Launch, ...]  # each kernel once, with what Triton knows of its resources
    occupancy_pct: tuple[float | None, ...] = ()  # of each launch: warps that its resources let an SM hold


class Refusal(Record):
    """Why a call cannot be made."""

    message: str
    hint: str
    exit_code: int


class Stage(Record):
    """A stage of the algorithm in one kernel.  Its name and what comes after a dot are a part of it."""

    name: str
    samples: Samples
    idle: bool = False  # warps that have nothing to do here: no cost

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
    """What a launch used of the GPU."""

    grid: tuple[int, int, int] | None = None
    block: int | None = None  # threads
    registers: int | None = None  # per thread, at launch
    spill_requests: int | None = None  # loads and stores of spilled registers, per warp
    shared_bytes: int | None = None  # per block
    waves: float | None = None  # of blocks per SM
    occupancy_pct: float | None = None  # achieved: active warps of those that an SM can hold
    occupancy_limit_pct: float | None = None  # theoretical
    limited_by: tuple[str, ...] = ()  # what allows the fewest blocks per SM


class Throughput(Record):
    """How fast a launch was, alone on the GPU, caches cold.  Times of ncu: not to be mixed with those of a run."""

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
    """A statement that must hold for the tables to be trusted."""

    name: str
    status: Literal["ok", "failed", "not checked"]
    detail: str


class Hint(Record):
    """What the evidence points to, and what may help."""

    stage: str  # "" if it is about the whole kernel
    share_pct: float | None = None  # of the kernel's busy samples that it is about
    evidence: str
    advice: str


class KernelStalls(Record):
    """One launch of one kernel."""

    kernel: str
    implementation: str  # "" if it is none of ours
    resources: Resources
    throughput: Throughput
    sample_count: int | None  # None: no warp was sampled
    samples: Samples
    # where none was: warps that wait while one issues, by stall reason
    average: dict[str, float] = Field(default_factory=dict)
    stages: tuple[Stage, ...]
    lines: tuple[Line, ...]  # hottest first; idle warps included
    from_neighbours: int = 0  # samples on lines of no stage (libraries, helpers, the compiler's own): see stages.py
    unlabelled: tuple[str, ...] = ()  # files of which no stages are known: their stages are their functions
    not_collected: tuple[str, ...] = ()
    checks: tuple[SelfCheck, ...] = ()
    hints: tuple[Hint, ...] = ()

    @property
    def busy_samples(self) -> int:
        """All but those of warps that have nothing to do."""
        return sum(stage.total for stage in self.stages if not stage.idle)


class Profiled(Record):
    """What was launched, where that is known: a report that came from elsewhere does not say."""

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
    ncu: str  # version; "" if it could not work


class StallReport(Record):
    """Everything that was read out of one or more ncu reports.

    For reports made elsewhere it depends only on their contents.  `subject` and `recorded` are known where ssdprof
    profiled.
    """

    stalls_version: Literal[2] = STALLS_VERSION
    ssdprof_version: str
    sources: dict[str, str]  # ncu report's file name -> sha256
    gpu: str  # "" if the report does not say
    kernels: tuple[KernelStalls, ...]
    words: dict[str, str] = Field(default_factory=dict)  # of a part of a stage: "chunk_scan.current" -> plain words
    checks: tuple[SelfCheck, ...] = ()
    subject: Profiled | None = None
    recorded: Recorded | None = None
    missing: str = ""  # why there are no stalls; then `subject` holds what Triton knows
