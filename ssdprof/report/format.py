"""Formats numbers for reports.  A missing value is "-"."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_DOWN, Decimal

from ssdprof.core.words import size_words, three_digits
from ssdprof.schema import Interval

MISSING = "-"


def duration(us: float | None) -> str:
    """Microseconds with three digits, in the unit that fits: "9.87 µs", "187 µs", "1.93 ms", "2.10 s"."""
    if us is None:
        return MISSING
    for unit, factor in (("µs", 1.0), ("ms", 1e3)):
        text = three_digits(us / factor)
        if abs(float(text)) < 1000:
            return f"{text} {unit}"
    return f"{three_digits(us / 1e6)} s"


def ratio(value: float | None) -> str:
    """ "1.52x"; small and large ratios keep three digits."""
    return MISSING if value is None else f"{_ratio(value)}x"


def speedup(value: float | None, interval: Interval | None) -> str:
    """A ratio and its interval: "1.52x [1.49, 1.55]"."""
    if value is None or interval is None:
        return ratio(value)
    return f"{ratio(value)} [{_ratio(interval.low)}, {_ratio(interval.high)}]"


def counts(smallest_difference: float) -> str:
    """A sentence that says which ratios are called faster or slower."""
    much = f"differs from 1 by more than {100 * smallest_difference:g}%" if smallest_difference else "excludes 1"
    return f"Faster or slower: the whole interval {much}."


def percent(value: float | None, decimals: int = 3) -> str:
    """Rounded towards zero, so that 100 % means all and 0 % means none: a share above zero is at least "<0.001%"."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return small(value)
    step = Decimal(1).scaleb(-decimals)
    rounded = Decimal(repr(value)).quantize(step, rounding=ROUND_DOWN)
    if value > 0 and rounded == 0:
        return f"<{step}%"
    return f"{rounded}%"


def share(value: float | None, decimals: int = 0) -> str:
    """Percent of a whole, rounded to the nearest, so that parts add up: "16.8%", "<0.1%"."""
    if value is None:
        return MISSING
    rounded = f"{value:.{decimals}f}"
    return f"<{10**-decimals:.{decimals}f}%" if value > 0 and float(rounded) == 0 else f"{rounded}%"


def small(value: float | None) -> str:
    """Three digits, with an exponent where that is shorter: "2.13e-3", "0.125", "0", "NaN"."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def tolerance(value: float) -> str:
    """ "0", "1e-3", "1e-2"."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def count(value: int | None) -> str:
    """ "131,072"."""
    return MISSING if value is None else f"{value:,}"


def size(value: int | None) -> str:
    """Bytes in binary units: "12.3 MiB"."""
    return MISSING if value is None else size_words(value)


def position(index: tuple[int, ...] | None) -> str:
    """An index into a tensor: "(0, 1234, 3, 5)"."""
    return MISSING if index is None else f"({', '.join(str(i) for i in index)})"


def indices(values: Iterable[int]) -> str:
    """Layer numbers, runs of them shortened: "0-3, 9"."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs) or MISSING


def words(items: Iterable[str], last: str = "and") -> str:
    """ "a, b and c"."""
    *first, end = list(items)
    return f"{', '.join(first)} {last} {end}" if first else end


def plural(number: int, noun: str) -> str:
    """ "1 layer", "4 layers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def tokens(seqlen: int, batch: int = 1) -> str:
    """ "1 token", "131,072 tokens", "32 x 1,024 tokens"."""
    return plural(seqlen, "token") if batch == 1 else f"{batch} x {plural(seqlen, 'token')}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= value < 100 else small(value) if value < 0.1 else f"{value:.0f}"
