"""One statement for several precisions of an implementation, with ranges of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.report.groups import Group, Series
from ssdprof.report.pooled import Pooled, nan_is_worst, pool
from ssdprof.report.tables.accuracy import floor, vs_baseline, vs_oracle
from ssdprof.report.total_speed import TotalSpeed, total_speed


def speed(found: Sequence[Group], name: str) -> str:
    """ "3.30x to 3.80x faster than unfused by device time (call 3.13x to 3.51x) at 131,072 tokens, ..."; or empty."""
    parts: list[str] = []
    for group in found:
        timed = [total for series in group.series(name) if (total := total_speed(series)) and total.device.ratio]
        if not timed:
            continue
        device = _range((one.device.ratio for one in timed), fmt.ratio)
        call = _range((one.call.ratio for one in timed), fmt.ratio)
        if parts:
            parts.append(f"{device} (call {call}) {group.where}")
            continue
        layers = {len(one.layers) for one in timed}
        where = f", summed over {layers.pop()} layers" if len(layers) == 1 and max(layers) > 1 else ""
        parts.append(f"{device} {_verdict(timed, group.baseline)} by device time (call {call}) {group.where}{where}")
    return f"{'; '.join(parts)}." if parts else ""


def exactness(group: Group, name: str) -> str:
    """ "78.098% to 93.707% of output elements are equal to those of unfused; rms error against fp64 1.81e-3 (...)"."""
    series = [one for one in group.series(name) if pool(one.cases, "out", vs_oracle)]
    if not series:
        return ""
    against = [pooled for one in series if (pooled := pool(one.cases, "out", vs_baseline))]
    equal = _range((pooled.match_pct(0.0) for pooled in against), fmt.percent)
    parts = [f"{equal} of output elements are equal to those of {group.baseline}"] if against else []
    originals = [original for one in series if (original := group.baseline_of(one))]
    beside = [f"{group.baseline} {_rms(originals)}"] if originals else []
    if limit := pool((case for one in series for case in one.cases), "out", floor):
        beside.append(f"floor {fmt.small(limit.rms_ratio)}")
    parts.append(f"rms error against fp64 {_rms(series)} ({', '.join(beside)})")
    return f"{'; '.join(parts)}."


def _rms(series: Sequence[Series]) -> str:
    return _range((pooled.rms_ratio for pooled in _pooled(series)), fmt.small)


def _pooled(series: Sequence[Series]) -> Iterator[Pooled]:
    for one in series:
        if pooled := pool(one.cases, "out", vs_oracle):
            yield pooled


def _range(values: Iterable[float | None], show: Callable[[float | None], str]) -> str:
    """ "1.81e-3 to 2.04e-3"; a single number if both ends have the same text."""
    found = sorted((value for value in values if value is not None), key=nan_is_worst)
    if not found:
        return fmt.MISSING
    return " to ".join(dict.fromkeys(show(value) for value in (found[0], found[-1])))


def _verdict(timed: Sequence[TotalSpeed], baseline: str) -> str:
    verdicts = Counter(one.device.verdict or "compared" for one in timed)
    if len(verdicts) == 1:
        (verdict,) = verdicts
        return {"faster": f"faster than {baseline}", "slower": f"as fast as {baseline}: slower"}.get(
            verdict, f"as fast as {baseline}"
        )
    counts = (f"{verdict} at {count}" for verdict, count in verdicts.items())
    return f"as fast as {baseline} ({fmt.words(counts)} of {len(timed)} precisions)"
