"""Plots as SVG, with the same bytes for the same report, each with a table of its numbers."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ssdprof.core import words as fmt
from ssdprof.core.base import short_precision
from ssdprof.core.case import Answers, Case
from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport, most_first
from ssdprof.core.statistics import Estimate
from ssdprof.report import states
from ssdprof.report.groups import Against, Group, deviation
from ssdprof.report.stalls import KernelGroup, Share, kernel_groups, summed
from ssdprof.report.table import Cells, Table, strings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# readable on white and on black, and, as far as nine colours can be, distinct without colour vision
COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#ee8866",
    "#999933",
    "#bbbbbb",
)
GREY = "#777777"
# inches: the width of a page of 360 pixels, on which text has 11 pixels at least
_NARROW = (3.5, 2.9)
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "ssdprof",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}
_BUSY = "percent of the busy warp time"
_WIDE = 300  # ends of a logarithmic axis, from which on its powers of ten are enough
_STROKE = 0.01  # of the height of a plot
_MARKERS = ("o", "s", "^", "D", "v", "P")

Paint = Callable[["Axes"], None]
Drawing = tuple[str, Table]  # the SVG, and its numbers
_Points = dict[str, list[tuple[float, float, str]]]  # of each label, in the legend


def draw(paint: Paint, size: tuple[float, float] = _NARROW, legend_columns: int = 2) -> str:
    """A figure without a window, a date or a random identifier.

    size: width and height in inches.  legend_columns: of the legend below the axes.
    """
    # late: it takes most of a second, and few commands draw
    os.environ["MPLBACKEND"] = "svg"  # the user's may be unknown here, and no figure has a window
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        figure.legend(loc="outside lower center", ncols=legend_columns, fontsize=9, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "ssdprof"})
    return out.getvalue()


# --- speed


def speedups(groups: Sequence[Group]) -> Drawing | None:
    """Speedups by device time, with their intervals: a row for each size, with a point for each
    series; of one size, a row for each series.  None if nothing was timed.
    """
    rows: dict[str, dict[str, Estimate]] = {}
    for group in groups:
        for series in group.others():
            if speedup := series.speedup():
                if len(groups) > 1:
                    row, label = group.size, series.label
                else:
                    row, label = series.label, group.size
                rows.setdefault(row, {})[label] = speedup
    return _points(rows, "times as fast as the baseline,\nby device time", fmt.speedup, 1.0)


# --- rooflines: operations per byte and per second


def roofline(report: Report, groups: Sequence[Group]) -> Drawing | None:
    """Under the ceilings measured in the run, a point for each series and length, coloured by its
    implementation.  None if untimed.
    """
    points: _Points = {}
    for group in groups:
        for series in group.series():
            moved, flops, us = 0, 0, 0.0
            for case in series.cases:
                if case.bytes_moved and case.device_us:
                    moved += case.bytes_moved
                    flops += case.flops or 0
                    us += case.device_us.value
            if moved and flops:
                point = flops / moved, flops / us / 1e6, short_precision(series.precision)
                points.setdefault(series.implementation, []).append(point)
    if report.ceilings is None:
        return None
    roof = report.ceilings.copy_gb_per_s, report.ceilings.matmul_tflops
    return _roofline(points, roof, "byte that must move")


def stall_roofline(report: StallReport) -> Drawing | None:
    """Arithmetic, on tensor cores and in fp32, per byte of DRAM.  None if no kernel's are known.

    The roofs are those of the GPU at its clock, from ncu: DRAM's bandwidth, and the tensor cores'
    rate for the operand type of the kernel with the most operations.
    """
    points: _Points = {}
    busiest = None
    for kernel in report.kernels:
        read, written = kernel.dram_read_bytes, kernel.dram_write_bytes
        if read is None or written is None:
            continue
        moved = read + written
        flops = (kernel.tensor_flops or 0) + (kernel.fp32_flops or 0)
        if kernel.duration_us and moved and flops:
            tflops = flops / kernel.duration_us / 1e6
            # matplotlib would leave a label with a leading underscore out of the legend
            label = f"{kernel.kernel.lstrip('_')}: {tflops:,.3g} TFLOP/s"
            points.setdefault(label, []).append((flops / moved, tflops, ""))
            busiest = max(busiest or kernel, kernel, key=lambda each: each.tensor_flops or 0)
    roof = None
    if busiest and busiest.dram_peak_gb_per_s and busiest.tensor_peak_tflops:
        roof = busiest.dram_peak_gb_per_s, busiest.tensor_peak_tflops
    return _roofline(points, roof, "byte of DRAM")


def _roofline(points: _Points, roof: tuple[float, float] | None, per: str) -> Drawing | None:
    """The drawing of points under a roofline.

    points: of each label, (operations per byte, TFLOP/s, which).  roof: GB/s and TFLOP/s, if known.
    """
    cells = list[Cells]()
    intensities = list[float]()
    rates = list[float]()
    for label, labelled in points.items():
        for intensity, rate, which in labelled:
            name = f"{label}, {which}" if which else label
            cells.append((name, f"{intensity:,.4g}", f"{rate:,.4g}"))
            intensities.append(intensity)
            rates.append(rate)
    if not cells:
        return None
    ceiling = max(rates)
    if roof:
        bandwidth, ceiling = roof
        ridge = ceiling * 1e3 / bandwidth
        cells.append((f"ridge of {bandwidth:,.0f} GB/s", f"{ridge:,.4g}", f"{ceiling:,.4g}"))
        intensities.append(ridge)
    low = min(intensities) / 3
    high = max(intensities) * 3

    def paint(axes: Axes) -> None:
        """The roof, then the points of each label."""
        axes.loglog()
        if roof:
            corners = [low, ridge, high]
            tflops = [min(ceiling, corner * bandwidth / 1e3) for corner in corners]
            label = f"{bandwidth:,.0f} GB/s, {ceiling:,.0f} TFLOP/s"
            axes.plot(corners, tflops, color=GREY, label=label)
        for number, (label, labelled) in enumerate(points.items()):
            xs, ys, _ = zip(*labelled, strict=True)
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(xs, ys, marker, color=_color(number), fillstyle="none", label=label)
        axes.set_xlim(low, high)
        _log_ticks(axes)
        axes.set_ylim(min(rates) / 3, ceiling * 2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set(xlabel=f"floating-point operations\nper {per}", ylabel="TFLOP/s by device time")

    numbers = strings("", ("what", f"operations per {per}", "TFLOP/s"), cells)
    return draw(paint, (_NARROW[0], 2.9 + 0.2 * len(points)), legend_columns=1), numbers


# --- errors


def along_positions(group: Group) -> Drawing | None:
    """RMS error of the output against fp64 in slices of the positions, the worst layer's in each,
    with the floor.

    None if no case recorded it, and for decode steps, which have one position.
    """
    lines = {series.label: _worst(series.cases, "vs_oracle") for series in group.others()}
    lines = {label: line for label, line in lines.items() if line}
    if group.steps or not lines:
        return None
    floor = _worst(group.cases, "floor")
    distinct: dict[str, list[str]] = {}  # a label -> those whose lines coincide with its line
    for label, line in lines.items():
        equal = (first for first in distinct if _coincide(line, lines[first]))
        distinct.setdefault(next(equal, label), []).append(label)
    slices = len(next(iter(lines.values())))
    middles = [(number + 0.5) * group.seqlen / slices for number in range(slices)]

    def paint(axes: Axes) -> None:
        """The lines, then the floor."""
        draw_line = partial(axes.plot, middles, drawstyle="steps-mid")
        for number, (first, same) in enumerate(distinct.items()):
            label = first if len(same) == 1 else f"{first}, and {len(same) - 1} equal"
            draw_line(lines[first], color=_color(number), label=label)
        if floor:
            draw_line(floor, color=GREY, linestyle="--", label="floor")
        axes.set(xlabel="position, tokens", ylabel="rms error against fp64")
        axes.set_xlim(0, group.seqlen)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _position: fmt.small(value))
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")

    picture = draw(paint, legend_columns=2 if len(distinct) == len(lines) else 1)
    if floor:
        lines["floor"] = floor
    errors = zip(*lines.values(), strict=True)
    cells = [
        (f"{middle:,.0f}", *map(fmt.small, at_middle))
        for middle, at_middle in zip(middles, errors, strict=True)
    ]
    return picture, strings("", ("position", *lines), cells)


def _coincide(line: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a reader sees one line: they differ by less than the width of a stroke."""
    differences = (abs(left - right) for left, right in zip(line, other, strict=True))
    return max(differences) <= _STROKE * max(other)


def _worst(cases: Sequence[Case], which: Against) -> list[float]:
    """The largest RMS error among the layers in each slice; empty if none was recorded."""
    errors = (deviation(case.tensor("out"), which) for case in cases)
    recorded = [error.along for error in errors if error and error.along]
    return [max(rms or 0.0 for rms in slices) for slices in zip(*recorded, strict=True)]


def of_steps(cases: Sequence[Case], which: str) -> Drawing | None:
    """The error of a layer's state or output in its worst head, step by step, a line for each
    format.  None if nothing ran.
    """
    numbers, lines = states.steps(cases, which), states.errors_by_step(cases, which)
    if not numbers:
        return None
    marks = states.marks(cases)

    def paint(axes: Axes) -> None:
        """Errors of 0 and infinite ones are no points."""
        axes.loglog()
        for number, (name, line) in enumerate(lines.items()):
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(marks, line, f"{marker}-", color=_color(number), fillstyle="none", label=name)
        axes.set(xlabel="tokens", ylabel=f"relative error of the {which},\nworst head")
        _log_ticks(axes)

    return draw(paint, (_NARROW[0], 2.9 + 0.1 * len(lines))), numbers


# --- stalls


def of_stalls(report: StallReport) -> dict[str, tuple[str, Drawing]]:
    """Name -> (title, drawing): a picture of each group that was sampled, and the roofline."""
    pictures: dict[str, tuple[str, Drawing]] = {}
    sampled = [group for group in kernel_groups(report) if group.is_sampled]
    reasons = list(most_first(summed(group.all for group in sampled)))
    shares = chain.from_iterable(group.stages.values() for group in sampled)
    longest = max((sum(share.values()) for share in shares), default=0.0)
    for group in sampled:
        title = f"{group.name}: stages and stall reasons"
        bars = {_stage_name(group, stage): share for stage, share in group.stages.items()}
        if picture := stacked(bars, reasons, _percent, _BUSY, longest):
            pictures[group.name.lstrip("_")] = (title, picture)
    if roof := stall_roofline(report):
        pictures["roofline"] = ("Roofline", roof)
    return pictures


def _percent(share: float) -> str:
    return fmt.share(share, 1)


def _stage_name(group: KernelGroup, stage: str) -> str:
    """ "state passing", "state passing: its part"."""
    name, _, part = stage.partition(".")
    return f"{name}: {group.part(stage)}" if part else name


def stacked(
    bars: Mapping[str, Share],
    parts: Sequence[str],
    words: Callable[[float], str],
    xlabel: str,
    longest: float = 0.0,
) -> Drawing | None:
    """Bars from top to bottom, of parts from left to right; the last parts share a colour if there
    are too many.

    words: a length as text.  longest: of the bars of all plots that have the same axis.
    """
    if not bars:
        return None
    last = len(COLORS) - 1
    shown = {part: [part] for part in parts[:last]}
    if rest := parts[last:]:
        shown["other"] = [*rest]

    def paint(axes: Axes) -> None:
        """From the lowest bar to the highest."""
        names = list(bars)[::-1]
        labels = [textwrap.fill(name, 26) for name in names]
        left = [0.0] * len(names)
        for (part, among), color in zip(shown.items(), COLORS, strict=False):
            widths = [sum(bars[name].get(each, 0.0) for each in among) for name in names]
            axes.barh(labels, widths, left=left, color=color, label=part, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for position, total in enumerate(left):
            axes.text(total, position, f" {words(total)}", va="center", fontsize=9)
        axes.set_xlim(0, max(*left, longest) * 1.3)
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel(xlabel)

    cells = [
        (name, *(words(lengths.get(part, 0.0)) for part in parts)) for name, lengths in bars.items()
    ]
    size = _NARROW[0], 1.9 + 0.27 * len(bars) + 0.1 * len(parts)
    return draw(paint, size), strings("", ("", *parts), cells)


def prefill_parts(bars: Mapping[str, Share]) -> Drawing | None:
    """The parts of prefills' times as stacked bars.  bars: prefill -> part -> us."""
    ms = {name: {part: us / 1e3 for part, us in parts.items()} for name, parts in bars.items()}
    parts = list(dict.fromkeys(chain.from_iterable(bars.values())))
    return stacked(ms, parts, "{:,.1f}".format, "ms of a prefill")


# --- points in rows


def divergences(cases: Sequence[Case]) -> Drawing | None:
    """A row for each case of answers, with the mean, the 99th percentile and the maximum of KL."""
    rows: dict[str, dict[str, Estimate]] = {}
    for case in cases:
        if case.band and isinstance(case.task, Answers) and case.task.alone is None:
            noise = f"noise: {case.task.change}" if case.task.change else ""
            name = noise or f"{case.implementation}, {short_precision(case.precision)}"
            band = case.band
            parts = {"mean": band.kl_mean, "p99": band.kl_p99, "max": band.kl_max}
            rows[name] = {part: Estimate(kl, kl, kl) for part, kl in parts.items()}
    return _points(rows, "KL of the next token, nats", lambda kl: fmt.small(kl.value))


def _points(
    rows: Mapping[str, Mapping[str, Estimate]],
    xlabel: str,
    words: Callable[[Estimate], str],
    reference: float | None = None,
) -> Drawing | None:
    """A row from top to bottom for each name, with a value and its interval for each label on a
    logarithmic axis.

    words: a value as text.  reference: a line at this value.
    """
    if not rows:
        return None
    labels = list(dict.fromkeys(chain.from_iterable(rows.values())))
    heights = range(len(rows))
    unknown = Estimate(math.nan, math.nan, math.nan)

    def paint(axes: Axes) -> None:
        axes.set_xscale("log")
        for number, label in enumerate(labels):
            points = [row.get(label, unknown) for row in rows.values()]
            below = [point.value - point.low for point in points]
            above = [point.high - point.value for point in points]
            axes.errorbar(
                [point.value for point in points],
                heights,
                xerr=(below, above),
                fmt=_MARKERS[number % len(_MARKERS)],
                color=_color(number),
                fillstyle="none",
                label=label,
            )
        if reference:
            axes.axvline(reference, color=GREY, linewidth=1, linestyle=":")
        axes.set_yticks(heights, [textwrap.fill(name, 24) for name in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        _log_ticks(axes)
        axes.set_xlabel(xlabel)

    cells = [
        (name, *(words(row[label]) if label in row else fmt.MISSING for label in labels))
        for name, row in rows.items()
    ]
    size = _NARROW[0], 1.4 + 0.35 * len(rows) + 0.1 * len(labels)
    return draw(paint, size), strings("", ("", *labels), cells)


def _log_ticks(axes: Axes) -> None:
    """Plain numbers along x, where the powers of ten alone may be one tick."""
    from matplotlib.ticker import LogLocator

    low, high = axes.get_xlim()
    if high < _WIDE * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
