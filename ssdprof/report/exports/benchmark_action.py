"""The JSON that github-action-benchmark reads: https://github.com/benchmark-action/github-action-benchmark.

`smaller` is for its tool customSmallerIsBetter, `bigger` for customBiggerIsBetter.  Cases that did not pass are left
out, because they have no valid number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from ssdprof.report.exports.exported import Exported
from ssdprof.schema.rows import Row
from ssdprof.schema.speed import Interval

Entry = dict[str, str | float]


def smaller(exported: Exported) -> str:
    """Device and call times, extra memory or that of a prefill, RMS errors, divergences and perplexities."""
    return _render(exported, _smaller)


def bigger(exported: Exported) -> str:
    """Speedups over the baseline, how much of the output matches the baseline's, and equal top tokens."""
    return _render(exported, _bigger)


def _render(exported: Exported, entries: Callable[[Row], Iterator[Entry]]) -> str:
    where = exported.gpu if exported.environment.gpu else "no GPU"
    extra: Entry = {"extra": f"{exported.kind} {exported.identity}, {where}"}
    rows = (row for row in exported.rows if row.status == "passed")
    found = [entry | extra for row in rows for entry in entries(row)]
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)


def _smaller(row: Row) -> Iterator[Entry]:
    if row.timing:
        yield _entry(row, "device time", row.timing.device_median_us, "µs", row.timing.device_interval_us)
    if row.call:
        median_us, interval_us = row.call
        yield _entry(row, "call time", median_us, "µs", interval_us)
    if row.prefill and row.prefill.peak_bytes is not None:
        yield _entry(row, "peak memory", row.prefill.peak_bytes, "bytes")
    if row.memory:
        yield _entry(row, "extra memory", row.memory.workspace_bytes, "bytes")
    if row.out:
        yield _entry(row, "rms error", row.out.rms_ratio, "relative")
    if row.answers:
        yield _entry(row, "KL, mean", row.answers.kl_mean, "nats")
        if row.answers.perplexity is not None:
            yield _entry(row, "perplexity", row.answers.perplexity, "tokens")


def _bigger(row: Row) -> Iterator[Entry]:
    if row.speedup:
        speedup = row.speedup
        yield _entry(row, "speedup, device", speedup.device_ratio, "x", speedup.device_interval)
        yield _entry(row, "speedup, call", speedup.call_ratio, "x", speedup.call_interval)
    if row.prefill and row.prefill.speedup:
        yield _entry(row, "speedup, call", row.prefill.speedup.ratio, "x", row.prefill.speedup.interval)
    if row.out and (match := row.out.match_pct(1e-3)) is not None:
        yield _entry(row, "match @ 1e-3", match, "%")
    if row.answers:
        yield _entry(row, "same top token", row.answers.top1_pct, "%")


def _entry(row: Row, name: str, value: float, unit: str, interval: Interval | None = None) -> Entry:
    entry: Entry = {"name": f"{row.name}: {name}", "unit": unit, "value": value}
    if interval is not None:
        entry["range"] = f"± {(interval.high - interval.low) / 2:.3g}"
    return entry
