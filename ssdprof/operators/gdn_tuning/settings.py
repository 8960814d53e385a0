"""The portable kernel's configurations as they are stored, checked when they are read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ssdprof.core.base import Record
from ssdprof.core.tuned import KernelSettings
from ssdprof.kernels.gdn.config import GDNPortableConfig

KERNEL = "portable"
NotNegative = Annotated[int, Field(ge=0)]


class PortableSettings(Record):
    """See `GDNPortableConfig`."""

    chunk: Literal[16, 32, 64, 128]
    segment: NotNegative
    block_k: Literal[16, 32, 64, 128, 256]
    block_v: Literal[16, 32, 64, 128, 256]
    v_rows: bool
    num_warps: Literal[1, 2, 4, 8, 16]
    scan_stages: Annotated[int, Field(gt=0)]
    factors_warps: Literal[1, 2, 4, 8, 16]
    factors_registers: NotNegative


def settings_of(config: GDNPortableConfig) -> KernelSettings:
    """The stored form of a configuration."""
    return KernelSettings(kernel=KERNEL, values={name: getattr(config, name) for name in PortableSettings.model_fields})


def config_of(settings: KernelSettings, reason: str) -> GDNPortableConfig:
    """The inverse of `settings_of`.  pydantic's ValidationError for invalid values, ValueError for another kernel."""
    if settings.kernel != KERNEL:
        raise ValueError(f"no settings of a {settings.kernel!r} kernel of gdn are known")
    return GDNPortableConfig(**PortableSettings.model_validate(settings.values).model_dump(), reason=reason)
