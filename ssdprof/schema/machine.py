"""Records of the machine, its versions and its clocks."""

from __future__ import annotations

from ssdprof.schema.base import Record


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
    """Readings of NVML before and after the timed region."""

    sm_mhz: tuple[int, int]
    memory_mhz: tuple[int, int]
    temperature_c: tuple[int, int]
    throttle_reasons: tuple[str, ...]  # empty: not throttled
