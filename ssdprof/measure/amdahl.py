"""The speedup of the whole by a faster operator, by Amdahl's law."""

from __future__ import annotations


def predicted_speedup(whole_us: float, part_us: float, faster_us: float) -> float | None:
    """The whole's speedup if `part_us` of its `whole_us` microseconds become `faster_us` and the rest stays.

    With f = part / whole and s = part / faster this is 1 / (1 - f + f / s).  None if nothing would be left.
    """
    left = whole_us - part_us + faster_us
    return whole_us / left if left > 0 else None
