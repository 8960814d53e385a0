"""Tables of speed: one row per implementation and precision, for one layer or the sum of all."""

from __future__ import annotations

from collections.abc import Iterable

from ssdprof.core import words as fmt
from ssdprof.report.groups import Group, Series, baselines
from ssdprof.report.tables.table import Note, Table, columns
from ssdprof.report.total_speed import TotalSpeed, total_speed

_HEADERS = (
    "speedup,\ndevice",
    "speedup,\ncall",
    "verdict,\ndevice",
    "verdict,\ncall",
    "device\ntime",
    "call\ntime",
    "% of\nroofline",
    "extra\nmemory",
)
_PRECISION = "intermediates,\nstates"
READING = Note(
    "Device: the time on the GPU alone.  Call: a Python call on an idle GPU, launches included.  In brackets: 95 % "
    "intervals.  % of roofline: the least time in which this GPU can move the bytes "
    "and do the arithmetic, divided by the device time.  Extra memory: allocated by the call beyond its outputs."
)


def total(group: Group) -> Table | None:
    """Every series, summed over its layers; None if nothing was timed."""
    found = [(series, total_speed(series)) for series in group.series()]
    if not any(speed for _, speed in found):
        return None
    every = group.calls
    unit = "layers" if every == len(group.layers) else "calls"
    incomplete = any(speed is None or len(speed.layers) < every for _, speed in found)
    rows = []
    for series, speed in found:
        layers = f"{len(speed.layers) if speed else 0} of {every}"
        names = (series.name, series.precision.short, *((layers,) if incomplete else ()))
        rows.append((*names, *_cells(series, speed)))
    note = [_baselines(group, found)]
    if every > 1:
        note.append(
            "The interval of a sum assumes that all layers are at the same end of their intervals, so it is wider than "
            "a 95 % interval."
        )
    if incomplete:
        note.append(f"Each speedup compares the same {unit}; times over different numbers of {unit} do not compare.")
    return Table(
        title=f"Speed {group.where}, {'sum over ' * (every > 1)}{group.extent}",
        headers=("implementation", _PRECISION, *((unit,) if incomplete else ()), *_HEADERS),
        rows=tuple(rows),
        align=columns(2, len(_HEADERS) + incomplete),
        note="  ".join(note),
        keys=2,
    )


def per_layer(group: Group) -> Table | None:
    """Every case, layer by layer; None if nothing was timed."""
    if not any(case.timing for case in group.cases):
        return None
    rows = []
    found: list[tuple[Series, TotalSpeed | None]] = []
    for layer in group.layers:
        for series in group.at_layer(layer).series():
            speed = total_speed(series)
            found.append((series, speed))
            names = (str(layer.index), series.name, series.precision.short)
            rows.append((*names, *_cells(series, speed)))
    return Table(
        title=f"Speed of each layer {group.where}",
        headers=("layer", "implementation", _PRECISION, *_HEADERS),
        rows=tuple(rows),
        align=("right", *columns(2, len(_HEADERS))),
        note=_baselines(group, found),
        keys=3,
    )


def _cells(series: Series, speed: TotalSpeed | None) -> tuple[str, ...]:
    if speed is None:
        statuses = dict.fromkeys(case.status for case in series.cases)
        return (fmt.MISSING, fmt.MISSING, fmt.words(statuses), *(fmt.MISSING,) * 5)
    return (
        fmt.speedup(speed.device.ratio, speed.device.interval),
        fmt.speedup(speed.call.ratio, speed.call.interval),
        speed.device.verdict or fmt.MISSING,
        speed.call.verdict or fmt.MISSING,
        fmt.duration(speed.device.us),
        fmt.duration(speed.call.us),
        fmt.percent(speed.floor_pct, 1),
        fmt.size(speed.workspace_bytes),
    )


def _baselines(group: Group, found: Iterable[tuple[Series, TotalSpeed | None]]) -> str:
    timed = [(series, speed) for series, speed in found if speed]
    pairs = [(series.precision, name) for series, speed in timed for name in speed.baselines]
    smallest = max((speed.smallest_difference for _, speed in timed), default=0.0)
    return f"Baseline: {baselines(group.baseline, pairs)}.  {fmt.counts(smallest)}"
