"""What `ssdprof tune` finds and keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ssdprof.kernels.precision import Precision as KernelPrecision
from ssdprof.kernels.ssd import tuned
from ssdprof.kernels.ssd.hopper.config import HopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs
from ssdprof.kernels.ssd.portable.config import PortableConfig
from ssdprof.measure.dtypes import dtype_name, dtype_named
from ssdprof.schema import DType, Environment, Intermediates, Interval, Record

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Kernel = Literal["hopper", "portable"]


class HopperSettings(Record):
    """See `HopperConfig` and `Segments`."""

    kernel: Literal["hopper"] = "hopper"
    segment: Positive
    long_count: NotNegative
    long_segment: NotNegative
    recompute: bool
    shares: NotNegative
    ring: Positive
    score_ring: Positive
    unit_registers: Positive
    other_registers: Positive

    @model_validator(mode="after")
    def _long_segments_have_chunks(self) -> HopperSettings:
        if self.long_count and not self.long_segment:
            raise ValueError("a long segment without chunks never ends a sequence")
        return self


class PortableSettings(Record):
    """See `PortableConfig`."""

    kernel: Literal["portable"] = "portable"
    chunk: Positive
    max_segments: Positive
    min_chunks: Positive
    max_chunks: Positive
    block_p: Positive
    block_n: Positive
    p_rows: bool
    num_warps: Positive
    state_stages: Positive
    scan_stages: Positive


Settings = Annotated[HopperSettings | PortableSettings, Field(discriminator="kernel")]


def settings_of(config: HopperConfig | PortableConfig) -> HopperSettings | PortableSettings:
    kind = HopperSettings if isinstance(config, HopperConfig) else PortableSettings
    return kind(**{name: getattr(config, name) for name in kind.model_fields if name != "kernel"})


def config_of(settings: HopperSettings | PortableSettings, reason: str) -> HopperConfig | PortableConfig:
    values = settings.model_dump(exclude={"kernel"})
    if isinstance(settings, HopperSettings):
        return HopperConfig(**values, reason=reason)
    return PortableConfig(**values, reason=reason)


class Calls(Record):
    """Which calls a find is for.  sequences, nchunks: of the Hopper kernel; None for every call of the layer."""

    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    dtype: DType
    intermediates: Intermediates
    gate: bool
    sequences: int | None = None
    nchunks: int | None = None

    @classmethod
    def of(cls, inputs: SSDInputs, intermediates: Intermediates, kernel: Kernel) -> Calls:
        layer = tuned.Layer.of(inputs, KernelPrecision(intermediates=intermediates))
        return cls(
            nheads=layer.nheads,
            headdim=layer.headdim,
            dstate=layer.dstate,
            ngroups=layer.ngroups,
            dtype=dtype_name(layer.dtype),
            intermediates=intermediates,
            gate=layer.gate,
            sequences=inputs.sequences if kernel == "hopper" else None,
            nchunks=tuned.nchunks(inputs) if kernel == "hopper" else None,
        )

    @property
    def layer(self) -> tuned.Layer:
        return tuned.Layer(
            nheads=self.nheads,
            headdim=self.headdim,
            dstate=self.dstate,
            ngroups=self.ngroups,
            dtype=dtype_named(self.dtype),
            exact=self.intermediates == "exact",
            gate=self.gate,
        )


class Find(Record):
    """A configuration that was right, and faster than the committed one on one GPU.

    device_ratio: the committed one's time over this one's, with its interval; over several lengths a geometric mean.
    created: ISO 8601, UTC.
    """

    calls: Calls
    settings: Settings
    device_ratio: float
    device_interval: Interval
    created: str

    @property
    def reason(self) -> str:
        """What a report shows where the find is used."""
        return f"tuned on this GPU, {self.created[:10]}"

    def for_kernels(self, gpu: str) -> tuned.Find:
        config = config_of(self.settings, self.reason)
        if isinstance(config, PortableConfig):
            return tuned.PortableFind(gpu=gpu, layer=self.calls.layer, config=config)
        assert self.calls.sequences is not None
        assert self.calls.nchunks is not None
        return tuned.HopperFind(
            gpu=gpu,
            layer=self.calls.layer,
            sequences=self.calls.sequences,
            nchunks=self.calls.nchunks,
            config=config,
        )


class Finds(Record):
    """What the cache holds for one GPU.  kernels: a hash of their sources; for others a find means nothing."""

    schema_version: Literal[1] = 1
    kind: Literal["ssdprof tuned"] = "ssdprof tuned"
    ssdprof_version: str
    kernels: str
    environment: Environment
    finds: tuple[Find, ...]


class Trial(Record):
    """One candidate.  change: from the committed configuration, in words; empty for that one itself.

    device_us: of the call, or the geometric mean over the lengths that share the configuration; None if it was not
        timed, and then `why` says why not.
    device_ratio: the committed one's time over this one's, sampled in turns with it.
    """

    change: str
    settings: Settings
    verdict: Literal["committed", "faster", "no difference", "slower", "wrong", "does not run"]
    why: str = ""
    device_us: float | None = None
    device_ratio: float | None = None
    device_interval: Interval | None = None


class Outcome(Record):
    """One search.  tokens: in words, "1 x 8,192".  find: None if the committed configuration stays, and `why`."""

    shape: str
    tokens: str
    calls: Calls
    committed: Settings
    trials: tuple[Trial, ...]
    find: Find | None
    why: str


class TuneReport(Record):
    """left_out: what was not searched, each with the reason."""

    schema_version: Literal[1] = 1
    kind: Literal["tune ssd"] = "tune ssd"
    ssdprof_version: str
    created: str  # ISO 8601, UTC
    command: tuple[str, ...]
    seconds: float = 0.0
    environment: Environment
    outcomes: tuple[Outcome, ...] = ()
    left_out: tuple[str, ...] = ()
