"""The result of `ssdprof bench`: one record per cell, which holds one per implementation and precision."""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationError, model_validator

from ssdprof.errors import BadInputError
from ssdprof.measure.occupancy import Occupancy
from ssdprof.schema import (
    NO_GATES,
    Ceilings,
    Clocks,
    Dims,
    Environment,
    Gates,
    Launch,
    Memory,
    PrecisionRecord,
    Record,
    Roofline,
    Speedup,
    Status,
    TensorAccuracy,
    Timing,
)
from ssdprof.schema.base import first_fault, kernel_name

_AGAIN = "Use the ssdprof that wrote it."


class Kernel(Record):
    """A kernel as it ran.  occupancy: None if the limits of the GPU or the resources of the kernel are unknown."""

    launch: Launch
    occupancy: Occupancy | None


class Error(Record):
    """RMS of the difference from the fp64 oracle, over RMS of the oracle.  floor: the same for the rounded oracle."""

    out: float
    out_floor: float
    final_states: float
    final_states_floor: float


class Compiled(Record):
    """A kernel that was not in Triton's cache.  seconds: compile time."""

    kernel: str
    seconds: float


class FirstCall(Record):
    """From the call to the end of the GPU's work.  compiled: in this call, tuning trials included."""

    seconds: float
    compiled: tuple[Compiled, ...] = ()


class ChunkTrial(Record):
    """One chunk size of an implementation that takes its chunk size from the caller."""

    chunk_size: int
    status: Status
    reason: str = ""
    device_us: float | None = None  # of a few replays, which select the fastest size
    first_call: FirstCall | None = None


class BenchCase(Record):
    """One implementation at one precision, with its fastest chunk size.

    chunk_size: None if the implementation chooses its own.
    sloppy: why another library's output is outside the error budget, if it is close enough to be timed anyway.
    accuracy: of out and of final_states; their `vs_baseline` is against `BenchReport.matched_with`.
    speedups: over the fastest case of each other implementation in the cell.
    over_exact: of relaxed intermediates, over the exact ones of the same implementation and states.
    """

    implementation: str
    variant: str
    precision: PrecisionRecord
    chunk_size: int | None
    status: Status
    reason: str = ""
    sloppy: str = ""
    plan: str = ""  # why this kernel and configuration
    trials: tuple[ChunkTrial, ...] = ()
    error: Error | None = None
    accuracy: tuple[TensorAccuracy, ...] = ()
    timing: Timing | None = None
    speedups: tuple[Speedup, ...] = ()
    over_exact: Speedup | None = None
    roofline: Roofline | None = None
    memory: Memory | None = None
    kernels: tuple[Kernel, ...] = ()
    first_call: FirstCall | None = None  # in this cell; kernels of earlier cells are already compiled

    @property
    def name(self) -> str:
        """ "fused hopper, exact, fp32 states"."""
        return f"{self.kernel}, {self.precision}"

    @property
    def kernel(self) -> str:
        return kernel_name(self.implementation, self.variant)

    def over(self, baseline: str) -> Speedup | None:
        return next((speedup for speedup in self.speedups if speedup.baseline == baseline), None)

    @model_validator(mode="after")
    def _no_number_without_a_match(self) -> BenchCase:
        if (self.timing or self.speedups or self.over_exact) and (self.status != "passed" or self.error is None):
            raise ValueError("a timing belongs only to a case that was compared with the oracle and passed")
        return self


class BenchCell(Record):
    """sizes: of the shape, in words: "80x64, N 128, G 1".
    drawn: words of --draw; empty for the default inputs.
    checked: tokens of a sequence on which the outputs were compared; None: on all."""

    shape: str
    sizes: str
    dims: Dims
    sequences: int
    layout: Literal["contiguous", "views"]
    packed: bool
    drawn: tuple[str, ...] = ()
    tokens: str  # in words: "8 x 4,096"
    checked: int | None = None
    cases: tuple[BenchCase, ...]


class LeftOut(Record):
    cell: str
    reason: str


class BenchReport(Record):
    """kernels: hash of their sources.
    peers: other libraries and their versions.  baseline: speedups in tables are over this implementation.
    matched_with: the implementation that every output is matched with.
    absent: one sentence for each requested implementation that is unavailable.
    """

    schema_version: Literal[2] = 2
    kind: Literal["bench"] = "bench"
    operator: str
    ssdprof_version: str
    kernels: str
    created: str  # ISO 8601, UTC
    command: tuple[str, ...]
    state: Literal["complete", "partial"] = "partial"
    seconds: float = 0.0  # wall clock
    ranks: int = 1  # processes that shared the cells, each on a GPU of its own
    environment: Environment
    peers: dict[str, str]
    absent: tuple[str, ...] = ()
    baseline: str
    matched_with: str
    gates: Gates = NO_GATES
    ceilings: Ceilings | None = None
    clocks: Clocks | None = None
    cells: tuple[BenchCell, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def dump(report: BenchReport) -> str:
    """One JSON document, which `load` reads."""
    return report.model_dump_json(indent=1)


def load(text: str) -> BenchReport:
    """Reads the output of `dump`.  Raises BadInputError for anything else."""
    try:
        return BenchReport.model_validate_json(text)
    except ValidationError as error:
        raise BadInputError(f"The file is not a result of ssdprof bench: {first_fault(error)}.", _AGAIN) from error
