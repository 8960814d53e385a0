"""A row per case, for a spreadsheet or a data frame.  Columns are named as in the report's tables, with units."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from typing import get_args

from ssdprof.core import words as fmt
from ssdprof.report.exports.exported import Exported
from ssdprof.schema import TOLERANCES, Interval, Match, Spread, WarmSpeedup, WarmTiming
from ssdprof.schema.prefill import PartName
from ssdprof.schema.rows import Errors, PrefillFigures, Row

Column = Callable[[Row], object]


def render(exported: Exported) -> str:
    """Missing values are empty; floats have their stored precision."""
    columns = dict(_of_prefill() if exported.kind == "prefill" else _columns())
    if exported.kind == "run":
        columns |= _answers()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*exported.place, *columns])
    for place, row in zip(exported.places, exported.rows, strict=True):
        writer.writerow([*place, *(column(row) for column in columns.values())])
    return text.getvalue()


def _columns() -> Iterator[tuple[str, Column]]:
    yield from _names()
    yield from _speed()
    yield "extra memory [bytes]", lambda row: row.memory and row.memory.workspace_bytes
    yield "kernels launched", lambda row: row.kernels
    yield from _accuracy("output", lambda row: row.out)
    yield from _accuracy("final states", lambda row: row.final_states)


def _answers() -> Iterator[tuple[str, Column]]:
    """The cells of rows of the whole model."""
    yield "KL, mean [nats]", lambda row: row.answers and row.answers.kl_mean
    yield "KL, p99 [nats]", lambda row: row.answers and row.answers.kl_p99
    yield "KL, max [nats]", lambda row: row.answers and row.answers.kl_max
    yield "same top token [%]", lambda row: row.answers and row.answers.top1_pct
    yield "perplexity", lambda row: row.answers and row.answers.perplexity
    yield "change of perplexity [%]", lambda row: row.answers and row.answers.perplexity_increase_pct
    yield from _bounds(
        "change of perplexity", "%", lambda row: a.perplexity_interval_pct if (a := row.answers) else None
    )


def _of_prefill() -> Iterator[tuple[str, Column]]:
    yield from _names()
    yield "baseline", lambda row: row.baseline
    yield "speedup, call [x]", lambda row: found[0] if (found := row.over_baseline) else None
    yield from _bounds("speedup, call", "x", lambda row: found[1] if (found := row.over_baseline) else None)
    yield "verdict, call", _figure(lambda figures: figures.speedup and figures.speedup.verdict)
    yield "speedup predicted [x]", _figure(lambda figures: figures.speedup and figures.speedup.predicted)
    yield "call time [µs]", lambda row: row.call[0] if row.call else None
    yield from _bounds("call time", "µs", lambda row: row.call[1] if row.call else None)
    yield "operator of one layer, device time [µs]", _figure(lambda figures: figures.alone_us)
    for name in get_args(PartName):
        yield f"{name}, GPU time [µs]", _figure(lambda figures, part=name: figures.gpu_us.get(part))  # type: ignore[misc]
    yield "peak memory [bytes]", _figure(lambda figures: figures.peak_bytes)
    yield "logits, rms of difference [relative]", _figure(lambda figures: figures.logits_rms)


def _figure(of: Callable[[PrefillFigures], object]) -> Column:
    return lambda row: of(row.prefill) if row.prefill else None


def _names() -> Iterator[tuple[str, Column]]:
    yield "implementation", lambda row: row.implementation
    yield "kernel", lambda row: row.variant
    yield "intermediates", lambda row: row.precision.intermediates
    yield "states", lambda row: row.precision.state_dtype
    yield "status", lambda row: row.status
    yield "reason", lambda row: row.reason


def _speed() -> Iterator[tuple[str, Column]]:
    yield "baseline", lambda row: row.speedup and row.speedup.baseline
    yield "speedup, device [x]", lambda row: row.speedup and row.speedup.device_ratio
    yield from _bounds("speedup, device", "x", lambda row: row.speedup.device_interval if row.speedup else None)
    yield "verdict, device", lambda row: row.speedup and row.speedup.verdict
    yield "speedup, call [x]", lambda row: row.speedup and row.speedup.call_ratio
    yield from _bounds("speedup, call", "x", lambda row: row.speedup.call_interval if row.speedup else None)
    yield "verdict, call", lambda row: row.speedup and row.speedup.call_verdict
    yield "device time [µs]", lambda row: row.timing and row.timing.device_median_us
    yield from _bounds("device time", "µs", lambda row: row.timing.device_interval_us if row.timing else None)
    yield from _spread("device time", lambda row: row.timing.device_spread if row.timing else None)
    yield "call time [µs]", lambda row: row.timing and row.timing.call_median_us
    yield from _bounds("call time", "µs", lambda row: row.timing.call_interval_us if row.timing else None)
    yield from _spread("call time", lambda row: row.timing.call_spread if row.timing else None)
    yield from _by_warm_clock()
    yield "of roofline [%]", lambda row: row.roofline and row.roofline.floor_pct


def _by_warm_clock() -> Iterator[tuple[str, Column]]:
    """Times by the warm clock; empty without `--clock warm`."""

    def time(row: Row) -> WarmTiming | None:
        return row.timing.warm if row.timing else None

    def speedup(row: Row) -> WarmSpeedup | None:
        return row.speedup.warm if row.speedup else None

    yield "speedup, warm [x]", lambda row: found.ratio if (found := speedup(row)) else None
    yield from _bounds("speedup, warm", "x", lambda row: found.interval if (found := speedup(row)) else None)
    yield "verdict, warm", lambda row: found.verdict if (found := speedup(row)) else None
    yield "warm time [µs]", lambda row: found.median_us if (found := time(row)) else None
    yield from _bounds("warm time", "µs", lambda row: found.interval_us if (found := time(row)) else None)
    yield "warm calls, back to back", lambda row: found.calls if (found := time(row)) else None


def _spread(name: str, of: Callable[[Row], Spread | None]) -> Iterator[tuple[str, Column]]:
    """Spread of single samples; empty in older reports without it."""
    yield f"{name}, min [µs]", lambda row: found.min_us if (found := of(row)) else None
    yield f"{name}, P95 [µs]", lambda row: found.p95_us if (found := of(row)) else None
    yield f"{name}, max [µs]", lambda row: found.max_us if (found := of(row)) else None
    yield f"{name}, samples", lambda row: found.samples if (found := of(row)) else None


def _bounds(name: str, unit: str, of: Callable[[Row], Interval | None]) -> Iterator[tuple[str, Column]]:
    """The ends of a 95 % interval."""
    yield f"{name}, low [{unit}]", lambda row: found.low if (found := of(row)) else None
    yield f"{name}, high [{unit}]", lambda row: found.high if (found := of(row)) else None


def _accuracy(tensor: str, of: Callable[[Row], Errors | None]) -> Iterator[tuple[str, Column]]:
    yield from _matches(f"{tensor}, match against baseline", lambda row: e.against_baseline if (e := of(row)) else ())
    yield from _matches(f"{tensor}, match against fp64", lambda row: e.against_oracle if (e := of(row)) else ())
    yield f"{tensor}, rms error [relative]", lambda row: e.rms_ratio if (e := of(row)) else None
    yield f"{tensor}, rms error of floor [relative]", lambda row: e.floor_rms_ratio if (e := of(row)) else None
    yield f"{tensor}, largest error", lambda row: e.max_abs if (e := of(row)) else None


def _matches(name: str, of: Callable[[Row], tuple[Match, ...]]) -> Iterator[tuple[str, Column]]:
    for tolerance in TOLERANCES:

        def cell(row: Row, tolerance: float = tolerance) -> float | None:
            return next((one.match_pct for one in of(row) if one.tolerance == tolerance), None)

        yield f"{name} @ {fmt.tolerance(tolerance)} [%]", cell
