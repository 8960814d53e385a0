"""The raw contents of ncu's files, as the readers return them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

Value = int | float | str
SAMPLED = "smsp__pcsamp_warps_issue_stalled_"  # + a reason; with "_not_issued" after it, a part of the same samples


@dataclass(frozen=True)
class Point:
    """An instruction (or, from a CSV by lines, a line) with the warps that were sampled there.

    file: as the report names it; "" and line 0 if it has no line information
    """

    address: int
    file: str
    line: int
    sass: str
    samples: Mapping[str, int]  # stall reason -> samples


@dataclass(frozen=True, kw_only=True)
class RawKernel:
    """One profiled launch.

    metrics: by ncu's name, in base units (nanoseconds, bytes, cycles, percent)
    totals: samples by stall reason over the whole kernel, as the report itself adds them up; empty if not collected
    points: in order of address; empty if source counters were not collected
    sources: file name -> text, as recorded
    excerpts: file name -> its known lines, if the whole file was not recorded
    """

    function: str
    metrics: Mapping[str, Value]
    totals: Mapping[str, int] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    excerpts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def number(self, *names: str) -> float | None:
        """The value of the first of these metrics that was collected."""
        for name in names:
            value = self.metrics.get(name)
            if isinstance(value, int | float):
                return value
        return None

    @property
    def point_totals(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for point in self.points:
            found.update(point.samples)
        return found


@dataclass(frozen=True, kw_only=True)
class RawReport:
    """A file.  whole: whether its length agrees with its headers; None if unknown."""

    name: str  # without folders
    sha256: str
    kernels: tuple[RawKernel, ...]
    whole: bool | None = None


def base_name(path: str) -> str:
    """The last part of a path of any operating system."""
    return PurePosixPath(path.replace("\\", "/")).name
