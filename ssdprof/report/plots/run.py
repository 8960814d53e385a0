"""Plots of a run: speed over length, error along positions, roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ssdprof.core import words as fmt
from ssdprof.report.groups import Group, Series
from ssdprof.report.plots.canvas import COLORS, GREY, NARROW, draw, legend_below, plain
from ssdprof.report.tables.accuracy import floor, vs_oracle
from ssdprof.report.total_speed import TotalSpeed, total_speed
from ssdprof.schema import CaseResult, Ceilings, Deviation, TensorAccuracy

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PLACES = {"packed": "packed sequences", "chunk": "chunk"}  # of positions
_MARKERS = ("o", "s", "^", "D", "v", "P")


def speedups(found: Sequence[Group]) -> str | None:
    """Speedup by device time, with its interval: over the length of several prompts, else as bars.  None if untimed."""
    points = {
        label: [(group, speed) for group, speed in own if speed.device.ratio is not None]
        for label, own in _timed(found, baseline=False).items()
    }
    points = {label: own for label, own in points.items() if own}
    if not points:
        return None

    def lines(figure: Figure) -> None:
        axes = plain(figure)
        for number, (label, own) in enumerate(points.items()):
            axes.errorbar(
                [group.seqlen for group, _ in own],
                [speed.device.ratio or 0.0 for _, speed in own],
                yerr=_errors([speed for _, speed in own]),
                **_style(number, label),
            )
        axes.axhline(1.0, color=GREY, linewidth=1, linestyle=":")
        _lengths(axes, found)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"times as fast as {found[0].baseline}")
        legend_below(figure)

    def bars(figure: Figure) -> None:
        axes = plain(figure)
        every = [(label, *one) for label, own in points.items() for one in own][::-1]
        names = [label if len(found) == 1 else f"{label}, {group.size}" for label, group, _ in every]
        speeds = [speed for _, _, speed in every]
        ratios = [speed.device.ratio or 0.0 for speed in speeds]
        axes.barh(names, ratios, xerr=_errors(speeds), color=COLORS[0], height=0.6, ecolor=GREY)
        for position, ratio in enumerate(ratios):
            axes.text(ratio * 0.97, position, fmt.ratio(ratio), va="center", ha="right", color="#fffffe", fontsize=8)
        axes.axvline(1.0, color=GREY, linewidth=1, linestyle=":")
        baselines = {group.baseline for _, group, _ in every}
        baseline = baselines.pop() if len(baselines) == 1 else "the baseline"
        size = f", {found[0].size}" if len(found) == 1 else ""
        axes.set_xlabel(f"times as fast as {baseline}, by device time{size}")

    if len(found) > 1 and all(group.call is None for group in found):
        return draw(lines)
    return draw(bars, (NARROW[0], 1.2 + 0.35 * sum(map(len, points.values()))))


def device_times(found: Sequence[Group]) -> str | None:
    """Device time of every series over the length of whole prompts; None for a single length, for
    which the table is enough."""
    whole = [group for group in found if group.call is None]
    points = _timed(whole, baseline=True)
    if len(whole) < 2 or not points:
        return None

    def paint(figure: Figure) -> None:
        axes = plain(figure)
        for number, (label, own) in enumerate(points.items()):
            lengths, times = [group.seqlen for group, _ in own], [speed.device.us / 1e3 for _, speed in own]
            axes.errorbar(lengths, times, **_style(number, label))
        _lengths(axes, whole)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("device time, ms")
        legend_below(figure)

    return draw(paint)


def along_positions(group: Group) -> str | None:
    """RMS error of the output against fp64 in slices of the positions, the worst layer's in each, with the floor.

    None if no case recorded it, as in older reports, and for decode steps, which have one position.
    """
    if group.steps:
        return None
    found = {_label(series): line for series in _compared(group) if (line := _worst(series.cases, vs_oracle))}
    if not found:
        return None
    limit = _worst(group.cases, floor)

    def paint(figure: Figure) -> None:
        axes = plain(figure)
        for number, (label, line) in enumerate(found.items()):
            axes.plot(_middles(group, line), line, drawstyle="steps-mid", color=_color(number), label=label)
        if limit:
            axes.plot(_middles(group, limit), limit, drawstyle="steps-mid", color=GREY, linestyle="--", label="floor")
        axes.set_xlim(0, group.seqlen)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(_positions(group))
        axes.set_ylabel("rms error against fp64")
        axes.xaxis.set_major_formatter(_thousands)
        axes.yaxis.set_major_formatter(_small)
        legend_below(figure)

    return draw(paint)


def largest_errors(group: Group) -> str | None:
    """Position and layer of the largest error of the output against fp64.  None if nothing was compared, and for decode
    steps, which have one position."""
    if group.steps:
        return None
    found = {}
    for series in _compared(group):
        places = [
            (accuracy.vs_oracle.worst_position[1], case.layer.index)
            for case in series.cases
            for accuracy in case.accuracy
            if accuracy.tensor == "out"
        ]
        if places:
            found[_label(series)] = places
    if not found:
        return None

    def paint(figure: Figure) -> None:
        axes = plain(figure)
        for number, (label, places) in enumerate(found.items()):
            axes.plot(
                [position for position, _ in places],
                [layer for _, layer in places],
                _MARKERS[number % len(_MARKERS)],
                color=_color(number),
                markersize=9 - number,
                fillstyle="none",
                label=label,
            )
        axes.set_xlim(0, group.seqlen)
        axes.set_yticks([layer.index for layer in group.layers] if len(group.layers) <= 16 else [])
        axes.set_xlabel(_positions(group))
        axes.set_ylabel("layer")
        axes.xaxis.set_major_formatter(_thousands)
        legend_below(figure)

    return draw(paint)


def roofline(found: Sequence[Group], ceilings: Ceilings | None) -> str | None:
    """Operations per byte and per second, under the ceilings measured in the run.  None if untimed.

    A point for each series and length, coloured by its implementation.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for group in found:
        for series in group.series():
            if point := _roofline_point(series):
                points.setdefault(series.implementation, []).append(point)
    if ceilings is None or not points:
        return None
    ridge = ceilings.matmul_tflops * 1e3 / ceilings.copy_gb_per_s
    every = [point for own in points.values() for point in own]
    low, high = min(*(at for at, _ in every), ridge) / 3, max(*(at for at, _ in every), ridge) * 3

    def paint(figure: Figure) -> None:
        axes = plain(figure)
        roof = [low, ridge, high]
        axes.loglog(
            roof,
            [min(ceilings.matmul_tflops, at * ceilings.copy_gb_per_s / 1e3) for at in roof],
            color=GREY,
            label=f"{ceilings.copy_gb_per_s:,.0f} GB/s, {ceilings.matmul_tflops:,.0f} TFLOP/s",
        )
        for number, (label, own) in enumerate(points.items()):
            axes.plot(
                [at for at, _ in own],
                [tflops for _, tflops in own],
                _MARKERS[number % len(_MARKERS)],
                color=_color(number),
                fillstyle="none",
                label=label,
            )
        axes.set_xlim(low, high)
        axes.set_ylim(min(tflops for _, tflops in every) / 3, ceilings.matmul_tflops * 2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.set_xlabel("floating-point operations per byte that must move")
        axes.set_ylabel("TFLOP/s by device time")
        legend_below(figure, columns=3)

    return draw(paint)


# --- numbers


def _compared(group: Group) -> list[Series]:
    return [series for name in group.compared for series in group.series(name)]


def _timed(found: Sequence[Group], *, baseline: bool) -> dict[str, list[tuple[Group, TotalSpeed]]]:
    """Label of a series -> its times at each length, the shortest first.  baseline: include the baseline."""
    points: dict[str, list[tuple[Group, TotalSpeed]]] = {}
    for group in sorted(found, key=lambda group: group.seqlen):
        for series in group.series():
            if (baseline or series.implementation != group.baseline) and (speed := total_speed(series)):
                points.setdefault(_label(series), []).append((group, speed))
    return points


def _label(series: Series) -> str:
    return f"{series.implementation}, {series.precision.short}"


def _worst(cases: Sequence[CaseResult], which: Callable[[TensorAccuracy], Deviation | None]) -> list[float]:
    """In each slice the largest of the layers' RMS errors; empty if none was recorded."""
    found = [
        deviation.along
        for case in cases
        for accuracy in case.accuracy
        if accuracy.tensor == "out" and (deviation := which(accuracy)) is not None and deviation.along
    ]
    return [max(slices) for slices in zip(*found, strict=True)]


def _middles(group: Group, line: Sequence[float]) -> list[float]:
    return [(number + 0.5) * group.seqlen / len(line) for number in range(len(line))]


def _roofline_point(series: Series) -> tuple[float, float] | None:
    timed = [(case.roofline, case.timing) for case in series.cases if case.roofline and case.timing]
    moved = sum(roofline.bytes_moved for roofline, _ in timed)
    flops = sum(roofline.flops for roofline, _ in timed)
    if not moved or not flops:
        return None
    return flops / moved, flops / sum(timing.device_median_us for _, timing in timed) / 1e6


def _errors(speeds: Sequence[TotalSpeed]) -> list[list[float]]:
    """Lengths of the intervals below and above the ratios."""
    pairs = [(speed.device.ratio, speed.device.interval) for speed in speeds]
    return [
        [ratio - interval.low if ratio and interval else 0.0 for ratio, interval in pairs],
        [interval.high - ratio if ratio and interval else 0.0 for ratio, interval in pairs],
    ]


def _positions(group: Group) -> str:
    return f"position in the {'prompt' if group.call is None else _PLACES[group.call.kind]}, tokens"


# --- style


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _style(number: int, label: str) -> dict[str, Any]:
    marker = _MARKERS[number % len(_MARKERS)]
    return {"label": label, "color": _color(number), "marker": marker, "markersize": 4, "capsize": 2, "linewidth": 1.5}


def _lengths(axes: Axes, found: Sequence[Group]) -> None:
    lengths = sorted({group.seqlen for group in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens")


def _short(length: int) -> str:
    """ "16k" for 16,384."""
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def _small(value: float, _position: float) -> str:
    return fmt.small(value)


def _thousands(value: float, _position: float) -> str:
    return f"{value:,.0f}"
