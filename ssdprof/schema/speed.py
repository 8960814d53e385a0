"""Records of the times of a call, its roofline, and the resources that it used."""

from __future__ import annotations

from typing import Literal

from ssdprof.schema.base import Record

Verdict = Literal["faster", "slower", "no difference"]


class Interval(Record):
    """A confidence interval of 95 %."""

    low: float
    high: float

    def verdict(self, smallest_difference: float) -> Verdict:
        """The verdict for the interval of a ratio.

        A difference counts if the whole interval lies beyond it.  If A is faster than B, then B is slower than A.
        """
        if self.low > 1 + smallest_difference:
            return "faster"
        return "slower" if self.high < 1 / (1 + smallest_difference) else "no difference"


class Spread(Record):
    """The spread of single samples, in microseconds.

    All recordings are pooled: each sample counts once, whichever recording it is from.  The medians and intervals of a
    `Timing` are over recordings instead.
    """

    samples: int
    min_us: float
    p95_us: float  # 95th percentile, linear between the two nearest samples
    max_us: float


class WarmTiming(Record):
    """Time by the warm clock: the mean of `calls` Python calls back to back, without waits or evictions."""

    calls: int
    median_us: float
    interval_us: Interval


class Timing(Record):
    call_median_us: float  # of a Python call on an idle GPU, launches included
    device_median_us: float  # CUDA graph replay
    call_interval_us: Interval
    device_interval_us: Interval
    recordings: int = 1  # number of recordings
    samples: int  # replays, of all recordings
    call_spread: Spread | None = None  # None in recorded runs that hold no samples
    device_spread: Spread | None = None
    warm: WarmTiming | None = None  # if requested


class WarmSpeedup(Record):
    """The ratio of two `WarmTiming`s."""

    ratio: float
    interval: Interval
    verdict: Verdict


class Speedup(Record):
    """A verdict other than "no difference" means that the whole interval differs from 1 by more than
    smallest_difference.
    """

    baseline: str
    call_ratio: float
    call_interval: Interval
    call_verdict: Verdict | None = None  # None in recorded runs that hold none
    device_ratio: float
    device_interval: Interval
    verdict: Verdict  # by device time
    warm: WarmSpeedup | None = None  # if both have such a time
    smallest_difference: float = 0.0


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
