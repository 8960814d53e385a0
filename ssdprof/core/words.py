"""Numbers and records in words, as messages and reports show them.

A missing number is shown as `MISSING`.
"""

import math
from collections.abc import Iterable
from decimal import ROUND_DOWN, Decimal

from ssdprof.core.statistics import Estimate
from ssdprof.core.target import Placement, Serving
from ssdprof.core.target import tokens as tokens  # for importers of this module

MISSING = "-"


def duration(us: float | None) -> str:
    """Microseconds with three digits in a suitable unit: "9.87 µs", "187 µs", "1.93 ms"."""
    return _in_unit(us, 1e3, "µs", "ms", "s")


def rate(per_s: float | None) -> str:
    """A number per second with three digits: "37.7 M", "812 k"."""
    return _in_unit(per_s, 1e3, "", "k", "M", "G")


def size_words(size: int | None) -> str:
    """Bytes in binary units: "12.3 MiB", with three digits; below 1 KiB all digits: "1023 B"."""
    if size is not None and size < 1024:
        return f"{size} B"
    return _in_unit(size, 1024, "B", "KiB", "MiB", "GiB", "TiB")


def _in_unit(value: float | None, step: float, *units: str) -> str:
    """The value in the first unit in which it is below 1,000, or else in the last one.  Each unit
    is `step` times the one before it.
    """
    if value is None:
        return MISSING
    for unit in units[:-1]:
        text = three_digits(value)
        if abs(float(text)) < 1000:
            return f"{text} {unit}".rstrip()
        value /= step
    return f"{three_digits(value)} {units[-1]}"


def ratio(value: float | None) -> str:
    """A ratio: "1.52x".  Ratios below 0.1 have three digits, those from 100 on no decimals."""
    return MISSING if value is None else f"{_ratio(value)}x"


def speedup(estimate: Estimate | None, *, by_call: bool = False) -> str:
    """A ratio and its interval: "1.52x [1.49, 1.55]".

    by_call: whether the ratio is of call times of one process.  The interval is then left out,
        because the interval of another process might not overlap with it.
    """
    if estimate is None:
        return MISSING
    interval = "" if by_call else f" [{_ratio(estimate.low)}, {_ratio(estimate.high)}]"
    return ratio(estimate.value) + interval


def verdict_rule(smallest_difference: float) -> str:
    """A sentence that says which ratios are called faster or slower."""
    condition = "excludes 1"
    if smallest_difference:
        condition = f"differs from 1 by more than {100 * smallest_difference:g}%"
    return f"Faster or slower: the whole interval {condition}."


def percent(value: float | None, decimals: int = 3) -> str:
    """A percentage, rounded towards zero, so that 100 % means all and 0 % means none.

    A value above zero that would be rounded to zero is "<0.001%".
    """
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
    """A percentage, rounded to the nearest value, so that parts add up: "16.8%", "<0.1%"."""
    if value is None:
        return MISSING
    rounded = f"{value:.{decimals}f}"
    if value > 0 and float(rounded) == 0:
        return f"<{10**-decimals:.{decimals}f}%"
    return f"{rounded}%"


def small(value: float | None) -> str:
    """A number with three digits, with an exponent below 0.01 and from 1,000: "2.13e-3", "0.125",
    "0", "NaN".
    """
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 999.5:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def tolerance(value: float) -> str:
    """A value of `base.TOLERANCES`, without the exponent's zero: "1e-3"."""
    return {0.0: "0", 1e-3: "1e-3", 1e-2: "1e-2"}[value]


def count(value: int | None) -> str:
    """An integer with separators: "131,072"."""
    return MISSING if value is None else f"{value:,}"


def indices(values: Iterable[int]) -> str:
    """Indices of layers, with consecutive ones as a range: "0-3, 9"."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts) or MISSING


def words(items: Iterable[str], conjunction: str = "and") -> str:
    """At least one item as a list in a sentence: "a, b and c"."""
    *others, last = list(items)
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def plural(number: int, noun: str) -> str:
    """A number with its noun: "1 layer", "4 layers", "2 passes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def _ratio(value: float) -> str:
    if value < 0.1:
        return small(value)
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def three_digits(value: float) -> str:
    """A number rounded to three significant digits, without an exponent: "12.3", "0.00123",
    "12300".
    """
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)  # may carry into the next power of ten: 9.996 -> 10.0
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}"


# --- placements of weights, and how prompts were run


def placement_words(placement: Placement) -> str:
    """Where the weights are, and what that costs: "disk-offload: 3 layers (4.8 GiB) on cuda:0,
    7 layers (11.2 GiB) on the disk; ...".
    """
    names = {"cpu": "in main memory", "disk": "on the disk"}
    by_device = ", ".join(
        f"{plural(part.layers, 'layer')} ({size_words(part.bytes)}) "
        f"{names.get(device, f'on {device}')}"
        for device, part in placement.allocated.items()
    )
    is_without_gpu = placement.kind == "one-gpu" and placement.device == "cpu"
    clauses = [by_device if is_without_gpu else f"{placement.kind}: {by_device}"]
    if placement.kind == "all-gpus" and len(placement.allocated) == 1:
        clauses.append("all of it fits there, so that the other GPUs hold nothing")
    if placement.streamed_layer_bytes:
        times = "once"
        if placement.forward_calls > 1:
            times = f"for each of {placement.forward_calls} forward calls"
        cost = "at a speed that is measured after the download"
        if placement.bytes_per_s and placement.seconds_per_layer is not None:
            speed = f"{placement.bytes_per_s / 1e9:.1f} GB/s"
            cost = f"in {placement.seconds_per_layer:.2g} s at the measured {speed}"
        clauses.append(
            f"a layer of {size_words(placement.streamed_layer_bytes)} is read {times}, {cost}"
        )
    if placement.predicted_peak_bytes is not None:
        clauses.append(
            f"predicted peak on {placement.device}: {size_words(placement.predicted_peak_bytes)} "
            "before replaying"
        )
    return "; ".join(clauses)


def serving_words(serving: Serving, *, batch: int = 1, tensor_parallel: int = 1) -> str:
    """How prompts were run: "8 prompts side by side; 4 decode steps".

    Empty for a single prompt in one call on one GPU.
    """
    clauses = []
    if batch > 1:
        clauses.append(f"{batch} prompts side by side")
    if lengths := serving.packed:
        sizes = f"{min(lengths):,} to {max(lengths):,} tokens"
        clauses.append(
            f"{len(lengths)} packed sequences of {sizes}, run one by one and concatenated"
        )
    if serving.chunk is not None:
        clauses.append(f"chunked prefill, {serving.chunk:,} tokens a call")
    if serving.decode:
        clauses.append(f"{plural(serving.decode, 'decode step')}, computed by the whole model")
    if tensor_parallel > 1:
        clauses.append(f"the first of {tensor_parallel} tensor-parallel ranks")
    return "; ".join(clauses)
