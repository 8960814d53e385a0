"""The plots of reports as SVG, each with a table of its numbers.

The same report always gives the same bytes.
"""

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
from ssdprof.core.case import Answers, Case, worst
from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport, most_first
from ssdprof.core.statistics import Estimate
from ssdprof.report import states
from ssdprof.report.groups import Against, Group, deviation
from ssdprof.report.stalls import KernelGroup, kernel_groups, summed
from ssdprof.report.table import Cells, Table, strings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From Paul Tol's schemes "bright", "light" and "muted" (SRON/EPS/TN/09-002), in each of which the
# colours remain distinct without full colour vision.
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
# Width and height in inches.  On a page of 360 pixels the text then has at least 11 pixels.
_NARROW = (3.5, 2.9)
_SETTINGS: dict[Any, Any] = {  # of matplotlib
    "svg.hashsalt": "ssdprof",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}
_BUSY = "percent of the busy warp time"  # a label of an axis
_WIDE = 300  # ratio of a logarithmic axis' ends from which its powers of ten are enough ticks
_STROKE = 0.01  # the width of a line, as a share of the height of a plot
_MARKERS = ("o", "s", "^", "D", "v", "P")

Paint = Callable[["Axes"], None]
Drawing = tuple[str, Table]  # the SVG, and the plotted numbers
# label in the legend -> (operations per byte, TFLOP/s, the point's own name or "") of its points
_Points = dict[str, list[tuple[float, float, str]]]


def draw(paint: Paint, size: tuple[float, float] = _NARROW, legend_columns: int = 2) -> str:
    """A figure as SVG, without a window, a date or a random identifier.

    Sets MPLBACKEND, for this process and its children.

    paint: draws into the axes.  size: width and height in inches.
    legend_columns: the number of columns of the legend, which is below the axes.
    """
    # The user may have set a backend that is not installed here.  No figure has a window, so none
    # of them is needed.
    os.environ["MPLBACKEND"] = "svg"
    # imported late: it takes most of a second, and few commands draw
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
    """The speedups over the baseline by device time, with their intervals.

    Several groups have a row for each size, with a point for each series.  A single group has a row
    for each series.  None if no speedup is known.
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
    """The roofline of a run: a point for each series of each group, in the colour of its
    implementation, and the ceilings that the run measured.  None if these are not known, or if
    nothing was timed.
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
                name = short_precision(series.precision)
                if len(groups) > 1:
                    name = f"{name}, {group.size}"
                point = flops / moved, flops / us / 1e6, name
                points.setdefault(series.implementation, []).append(point)
    if report.ceilings is None:
        return None
    roof = report.ceilings.copy_gb_per_s, report.ceilings.matmul_tflops
    return _roofline(points, roof, "byte that must move")


def stall_roofline(report: StallReport) -> Drawing | None:
    """The roofline of a stall report, with a point for each kernel.

    Operations are those on tensor cores and those in fp32; bytes are those of DRAM.  None if no
    kernel has a duration, bytes and operations.

    The roofs are those that ncu reports at the GPU's clock, if it does: the bandwidth of DRAM, and
    the rate of the tensor cores for the operand type of the kernel with the most operations on
    them.
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
            if busiest is None or (kernel.tensor_flops or 0) > (busiest.tensor_flops or 0):
                busiest = kernel
    roof = None
    if busiest and busiest.dram_peak_gb_per_s and busiest.tensor_peak_tflops:
        roof = busiest.dram_peak_gb_per_s, busiest.tensor_peak_tflops
    return _roofline(points, roof, "byte of DRAM")


def _roofline(points: _Points, roof: tuple[float, float] | None, per: str) -> Drawing | None:
    """Points under a roofline; None without points.

    roof: the bandwidth in GB/s and the rate in TFLOP/s; None if they are not known, in which case
        the points alone are drawn.
    per: the end of the label "floating-point operations per ...".
    """
    cells: list[Cells] = []
    intensities: list[float] = []
    rates: list[float] = []
    for label, points_of_label in points.items():
        for intensity, rate, point_name in points_of_label:
            name = f"{label}, {point_name}" if point_name else label
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
        for number, (label, points_of_label) in enumerate(points.items()):
            xs, ys, _ = zip(*points_of_label, strict=True)
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
    """The relative RMS error of the output against fp64 along the positions, with the floor.

    The error of a slice of the positions is that of the call in which it is largest.

    None if no case of a compared implementation recorded it, and for decode steps, which have a
    single position.
    """
    lines: dict[str, list[float]] = {}
    for series in group.others():
        if errors := _worst(series.cases, "vs_oracle"):
            lines[series.label] = errors
    if group.are_steps or not lines:
        return None
    floor = _worst(group.cases, "floor")
    drawn = _distinct_lines(lines)
    slices = len(next(iter(lines.values())))
    middles = [(number + 0.5) * group.seqlen / slices for number in range(slices)]

    def paint(axes: Axes) -> None:
        """The lines, then the floor.  Matplotlib leaves out errors that are infinite."""
        draw_line = partial(axes.plot, middles, drawstyle="steps-mid")
        for number, (first, equal) in enumerate(drawn.items()):
            label = f"{first}, and {len(equal)} equal" if equal else first
            draw_line(lines[first], color=_color(number), label=label)
        if floor:
            draw_line(floor, color=GREY, linestyle="--", label="floor")
        axes.set(xlabel="position, tokens", ylabel="rms error against fp64")
        axes.set_xlim(0, group.seqlen)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _position: fmt.small(value))
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")

    picture = draw(paint, legend_columns=2 if len(drawn) == len(lines) else 1)
    if floor:
        lines["floor"] = floor
    errors_of_slices = zip(*lines.values(), strict=True)
    cells = [
        (f"{middle:,.0f}", *map(fmt.small, of_slice))
        for middle, of_slice in zip(middles, errors_of_slices, strict=True)
    ]
    return picture, strings("", ("position", *lines), cells)


def _distinct_lines(lines: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
    """Label of a line to draw -> the labels of the other lines that coincide with it."""
    drawn: dict[str, list[str]] = {}
    for label, line in lines.items():
        equal = [first for first in drawn if _coincide(line, lines[first])]
        if equal:
            drawn[equal[0]].append(label)
        else:
            drawn[label] = []
    return drawn


def _coincide(line: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a reader sees a single line, because the two differ by less than its width where both
    are finite, and are infinite in the same places.
    """
    highest = max(filter(math.isfinite, other), default=0.0)
    is_close = partial(math.isclose, abs_tol=_STROKE * highest)
    return all(map(is_close, line, other))


def _worst(cases: Sequence[Case], which: Against) -> list[float]:
    """The largest relative RMS error of a case in each slice of the positions, which may be
    infinite; empty if no case recorded them.
    """
    errors = (deviation(case.tensor("out"), which) for case in cases)
    recorded = [error.along for error in errors if error and error.along]
    return list(map(worst, zip(*recorded, strict=True)))


def of_steps(cases: Sequence[Case], which: str) -> Drawing | None:
    """The error of the worst head of a layer, step by step, with a line for each format.

    which: "state" or "output".  None if nothing ran.
    """
    numbers = states.steps(cases, which)
    if not numbers:
        return None
    lines = states.errors_by_step(cases, which)
    marks = states.marks(cases)

    def paint(axes: Axes) -> None:
        """The lines.  Matplotlib leaves out errors that are 0 or infinite."""
        axes.loglog(nonpositive="mask")
        for number, (name, line) in enumerate(lines.items()):
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(marks, line, f"{marker}-", color=_color(number), fillstyle="none", label=name)
        axes.set(xlabel="tokens", ylabel=f"relative error of the {which},\nworst head")
        _log_ticks(axes)

    return draw(paint, (_NARROW[0], 2.9 + 0.1 * len(lines))), numbers


# --- stalls


def of_stalls(report: StallReport) -> dict[str, tuple[str, Drawing]]:
    """Name of a picture -> its title and drawing: a picture of each sampled group of kernels, and
    the roofline.
    """
    pictures: dict[str, tuple[str, Drawing]] = {}
    sampled = [group for group in kernel_groups(report) if group.is_sampled]
    reasons = list(most_first(summed(group.all for group in sampled)))
    shares = chain.from_iterable(group.stages.values() for group in sampled)
    longest = max((sum(share.values()) for share in shares), default=0.0)
    for group in sampled:
        title = f"{group.name}: stages and stall reasons"
        bars = {_stage_name(group, stage): share for stage, share in group.stages.items()}
        if picture := stacked(bars, reasons, partial(fmt.share, decimals=1), _BUSY, longest):
            pictures[group.name.lstrip("_")] = (title, picture)
    if roof := stall_roofline(report):
        pictures["roofline"] = ("Roofline", roof)
    return pictures


def _stage_name(group: KernelGroup, stage: str) -> str:
    """A stage, with its part in words if it has one: "state_passing", "chunk_scan: residual and
    store".
    """
    name, _, part = stage.partition(".")
    return f"{name}: {group.part(stage)}" if part else name


def stacked(
    bars: Mapping[str, Mapping[str, float]],
    parts: Sequence[str],
    words: Callable[[float], str],
    xlabel: str,
    longest: float = 0.0,
) -> Drawing | None:
    """Bars from top to bottom, each of which is stacked of parts from left to right; None without
    bars.

    bars: name of a bar -> part -> length.
    parts: all parts in their order.  The first ones have a colour each; all others share the last
        colour, as "other".
    words: writes a length as text.
    longest: the length of the longest bar of all plots that shall have the same scale; 0 if this
        plot has a scale of its own.
    """
    if not bars:
        return None
    last = len(COLORS) - 1
    colored = {part: [part] for part in parts[:last]}
    if len(parts) > last:
        colored["other"] = list(parts[last:])

    def paint(axes: Axes) -> None:
        """The bars, from the lowest one to the highest one."""
        names = list(bars)[::-1]
        labels = [textwrap.fill(name, 26) for name in names]
        ends = [0.0] * len(names)
        for (label, parts_of_color), color in zip(colored.items(), COLORS, strict=False):
            widths = [sum(bars[name].get(part, 0.0) for part in parts_of_color) for name in names]
            axes.barh(labels, widths, left=ends, color=color, label=label, height=0.75)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for position, total in enumerate(ends):
            axes.text(total, position, f" {words(total)}", va="center", fontsize=9)
        axes.set_xlim(0, max(*ends, longest) * 1.3)  # with room for the text
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel(xlabel)

    cells = [
        (name, *(words(lengths.get(part, 0.0)) for part in parts)) for name, lengths in bars.items()
    ]
    size = _NARROW[0], 1.9 + 0.27 * len(bars) + 0.1 * len(parts)
    return draw(paint, size), strings("", ("", *parts), cells)


def prefill_parts(bars: Mapping[str, Mapping[str, float]]) -> Drawing | None:
    """The times of prefills as bars of their parts; None without prefills.

    bars: prefill -> part -> microseconds.
    """
    ms = {name: {part: us / 1e3 for part, us in parts.items()} for name, parts in bars.items()}
    parts = list(dict.fromkeys(chain.from_iterable(bars.values())))
    return stacked(ms, parts, "{:,.1f}".format, "ms of a prefill")


# --- points in rows


def divergences(cases: Sequence[Case]) -> Drawing | None:
    """A row for each case of answers, with the mean, the 99th percentile and the maximum of the KL
    divergence.  Cases of single layers are left out.  None without rows.
    """
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
    """Rows from top to bottom, with points and their intervals on a logarithmic axis; None without
    rows.

    rows: name of a row -> label in the legend -> value.
    words: writes a value as text.
    reference: where to draw a vertical line; None for no line.
    """
    if not rows:
        return None
    labels = list(dict.fromkeys(chain.from_iterable(rows.values())))
    heights = range(len(rows))
    unknown = Estimate(math.nan, math.nan, math.nan)

    def paint(axes: Axes) -> None:
        """The points of each label, then the vertical line."""
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
    """Plain numbers along a logarithmic x axis.

    A short axis also has ticks at 3 times each power of ten, because it may contain only one power.
    """
    from matplotlib.ticker import LogLocator  # late, as in `draw`

    low, high = axes.get_xlim()
    if high < _WIDE * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
