"""What crosses a stage border: plain records that are stored as JSON.  Imports no torch.

checkpoint -> capture -> replay -> measure -> report.  Shapes use the letters of `docs/glossary.md`; units are in the
names.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

SCHEMA_VERSION = 1

Operator = Literal["ssd", "gdn"]
DType = Literal["fp64", "fp32", "fp16", "bf16"]
Intermediates = Literal["exact", "relaxed"]
TOLERANCES: tuple[float, ...] = (0.0, 1e-3, 1e-2)


class Record(BaseModel):
    """Base of every stored record: immutable, and an unknown field is an error.

    JSON has no NaN: non-finite numbers are stored as "NaN", "Infinity" and "-Infinity", and read back as numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


# --- where it ran


class Gpu(Record):
    name: str
    compute_capability: str  # "9.0"
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    cuda: str


class Environment(Record):
    """The machine and the versions behind a number.  Holds no host name, user name, path or token."""

    gpu: Gpu | None
    cpu: str
    platform: str
    python: str
    packages: dict[str, str]  # distribution name -> version, for those installed


class Clocks(Record):
    """What NVML said before and after the timed region."""

    sm_mhz: tuple[int, int]
    memory_mhz: tuple[int, int]
    temperature_c: tuple[int, int]
    throttle_reasons: tuple[str, ...]  # empty: not throttled


# --- what ran


class LayerRef(Record):
    index: int  # position among the model's decoder layers
    name: str  # module path in the full model, "model.layers.3.mamba"
    operator: Operator


class CheckpointRef(Record):
    requested: str  # what the user typed
    source: Literal["hub", "local", "demo"]
    repo_id: str  # hub id, folder name, "demo" or "demo-gdn"
    revision: str | None  # commit hash on the hub
    model_type: str
    layers: tuple[LayerRef, ...]  # every SSD or GDN layer of the model
    layer_count: int  # all decoder layers
    siblings: tuple[str, ...] = ()  # other members when `requested` was a family name
    quantization: str | None = None  # quant_method; its error is then part of the captured values
    trained_context: int | None = None
    random_weights: bool = False  # the config says that nothing was trained


class Prompt(Record):
    kind: Literal["default", "file", "random"]
    source: str  # which text, in words: never a path
    tokenizer: str
    seqlen: int
    batch: int = 1
    token_sha256: str  # of the little-endian int64 ids


class SSDDims(Record):
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    chunk_size: int
    dtype: DType  # of x, B, C, dt


class Precision(Record):
    intermediates: Intermediates
    state_dtype: DType

    def __str__(self) -> str:
        return f"{self.intermediates}, {self.state_dtype} states"


# --- capture


class TensorRecord(Record):
    shape: tuple[int, ...]
    dtype: DType
    model_strides: tuple[int, ...]  # as the model passed it; the stored values are token-major
    sha256: str  # of the stored bytes


class LayerCapture(Record):
    layer: LayerRef
    seqlen: int
    file: str  # safetensors file beside the manifest
    tensors: dict[str, TensorRecord]
    scalars: dict[str, int | float | bool | str | None]  # chunk_size, dt_softplus, dt_limit_low, dt_limit_high, ...


class CaptureManifest(Record):
    schema_version: int = SCHEMA_VERSION
    checkpoint: CheckpointRef
    prompts: tuple[Prompt, ...]
    segment_length: int  # tokens per forward call of the model
    layers: tuple[LayerCapture, ...]
    complete: bool


# --- accuracy


class Match(Record):
    tolerance: float  # atol = rtol
    match_pct: float


class Deviation(Record):
    """How one tensor differs from another.  Positions index the tensor's own shape."""

    against: str  # "fp64 oracle", "unfused exact, fp16 states", ...
    elements: int
    matches: tuple[Match, ...]
    rms_ratio: float  # rms(out - other) / rms(other)
    max_abs: float
    worst_head: int
    worst_position: tuple[int, ...]
    nonfinite: int
    first_nonfinite: tuple[int, ...] | None = None


class TensorAccuracy(Record):
    tensor: Literal["out", "final_states"]
    vs_oracle: Deviation
    vs_baseline: Deviation | None  # None for the baseline itself
    floor: Deviation  # the oracle rounded to the output dtype, against the oracle
    passed: bool
    reason: str = ""  # why not


# --- speed


class Interval(Record):
    """A bootstrap confidence interval of 95 %."""

    low: float
    high: float


class Timing(Record):
    call_median_us: float  # what a Python caller waits for
    device_median_us: float  # CUDA graph replay
    call_interval_us: Interval
    device_interval_us: Interval
    samples: int


class Speedup(Record):
    baseline: str
    call_ratio: float
    call_interval: Interval
    device_ratio: float
    device_interval: Interval
    verdict: Literal["faster", "slower", "no difference"]  # by device time


class Roofline(Record):
    bytes_moved: int  # every input read once, every output written once
    flops: int
    floor_us: float
    bound: Literal["memory", "compute"]
    floor_pct: float  # floor_us / device_median_us * 100


class Ceilings(Record):
    """Measured on the same GPU in the same run."""

    copy_gb_per_s: float  # bytes read + written
    matmul_tflops: float


class Launch(Record):
    """One kernel as it ran."""

    kernel: str
    config: dict[str, int | str | bool]
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None


class Memory(Record):
    peak_bytes: int  # allocated by the call, outputs included
    workspace_bytes: int  # beyond the outputs


Status = Literal["passed", "inaccurate", "nonfinite", "refused", "out of memory", "failed"]


class CaseResult(Record):
    """One layer's capture, replayed through one implementation at one precision."""

    layer: LayerRef
    dims: SSDDims
    implementation: str
    variant: str  # which of the implementation's kernels ran: "portable", "hopper", "interpreter", ...
    precision: Precision
    status: Status
    reason: str = ""
    plan: str = ""  # why this kernel and this configuration
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


# --- the run


class RunReport(Record):
    schema_version: int = SCHEMA_VERSION
    ssdprof_version: str
    run_id: str  # name of the run's folder
    created: str  # ISO 8601, UTC
    command: tuple[str, ...]  # as typed, without tokens
    state: Literal["complete", "partial"]
    checkpoint: CheckpointRef
    environment: Environment
    prompts: tuple[Prompt, ...]
    captured_layers: tuple[LayerRef, ...]
    segment_length: int
    model_peak_bytes: int | None = None  # GPU memory while the model ran and layers were replayed
    clocks: Clocks | None = None
    ceilings: Ceilings | None = None
    cases: tuple[CaseResult, ...]
    baseline: str = "unfused"
    notes: tuple[str, ...] = ()  # what a reader must know to trust the numbers

    @property
    def passed(self) -> bool:
        return self.state == "complete" and all(case.status in ("passed", "refused") for case in self.cases)
