"""The fused kernels' configurations as they are stored, checked when they are read."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ssdprof.core.base import Record
from ssdprof.core.tuned import KernelSettings
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class HopperSettings(Record):
    """See `SSDHopperConfig` and `Segments`."""

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
    """See `SSDPortableConfig`."""

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


def settings_of(config: SSDHopperConfig | SSDPortableConfig) -> KernelSettings:
    """The stored form of a configuration."""
    kernel, kind = ("hopper", HopperSettings) if isinstance(config, SSDHopperConfig) else ("portable", PortableSettings)
    return KernelSettings(kernel=kernel, values={name: getattr(config, name) for name in kind.model_fields})


def config_of(settings: KernelSettings, reason: str) -> SSDHopperConfig | SSDPortableConfig:
    """The inverse of `settings_of`.  pydantic's ValidationError for invalid values."""
    if settings.kernel == "hopper":
        return SSDHopperConfig(**HopperSettings.model_validate(settings.values).model_dump(), reason=reason)
    return SSDPortableConfig(**PortableSettings.model_validate(settings.values).model_dump(), reason=reason)
