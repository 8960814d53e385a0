"""Numbers in words, as messages and reports show them."""

from __future__ import annotations

import math


def size_words(size: int) -> str:
    """Bytes in binary units, with three digits: "12.3 MiB"."""
    if size < 1024:
        return f"{size} B"
    scaled = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        scaled /= 1024
        if float(three_digits(scaled)) < 1000 or unit == "TiB":
            break
    return f"{three_digits(scaled)} {unit}"


def three_digits(value: float) -> str:
    """ "12.3", "0.00123"; larger numbers keep all digits before the point: "12345"."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)  # may carry into the next power of ten: 9.996 -> 10.0
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}"
