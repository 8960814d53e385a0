"""Plots as SVG, with the same bytes for the same report, each with a table of its numbers."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ssdprof.core import words as fmt
from ssdprof.core.base import short_precision
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport
from ssdprof.core.statistics import Estimate
from ssdprof.report.groups import Against, Group, deviation
from ssdprof.report.stalls import KernelGroup, kernel_groups, most, summed
from ssdprof.report.table import Cells, Table, aligned

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
# of positions
_PLACES = {"packed": "packed sequences", "chunk": "chunk", "verify": "drafted tokens"}
_WIDE = 300  # ends of a logarithmic axis, from which on its powers of ten are enough
_STROKE = 0.01  # of the height of a plot
_MARKERS = ("o", "s", "^", "D", "v", "P")

Paint = Callable[["Axes"], None]
Drawing = tuple[str, Table]  # the SVG, and its numbers
_Points = dict[str, list[tuple[float, float, str]]]  # of each label, in the legend


def draw(paint: Paint, size: tuple[float, float] = _NARROW, legend: int = 2) -> str:
    """A figure without a window, a date or a random identifier.

    size: width and height in inches.  legend: columns of the legend below the axes; 0: none.
    """
    # late: it takes most of a second, and few commands draw
    os.environ["MPLBACKEND"] = "svg"  # the user's may be unknown here, and no figure has a window
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        if legend:
            figure.legend(loc="outside lower center", ncols=legend, fontsize=9, frameon=False)
        out = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(out, metadata={"Date": None, "Creator": "ssdprof"})
    return out.getvalue()


def _data(headers: Cells, rows: Iterable[Cells]) -> Table:
    """For a plot: the first column has names or positions."""
    return Table(
        title="", headers=headers, rows=(*rows,), align=aligned("l".ljust(len(headers), "r"))
    )


# --- speed


def speedups(groups: Sequence[Group]) -> Drawing | None:
    """Bars of the speedups by device time, with their intervals.  None if nothing was timed."""
    names, ratios, baselines = list[str](), list[Estimate](), set[str]()
    for group in groups:
        for series in group.others():
            if ratio := series.speedup():
                names.append(series.label if len(groups) == 1 else f"{series.label},\n{group.size}")
                ratios.append(ratio)
                baselines.add(group.baseline)
    if not ratios:
        return None
    baseline = baselines.pop() if len(baselines) == 1 else "the baseline"
    size = f", {groups[0].size}" if len(groups) == 1 else ""

    def paint(axes: Axes) -> None:
        """From the lowest bar to the highest."""
        bars = ratios[::-1]
        values = [bar.value for bar in bars]
        spread = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
        axes.barh(names[::-1], values, xerr=spread, color=COLORS[0], height=0.6, ecolor=GREY)
        for position, value in enumerate(values):
            axes.text(
                value * 0.97,
                position,
                fmt.ratio(value),
                va="center",
                ha="right",
                color="#fffffe",
                fontsize=9,
            )
        axes.axvline(1.0, color=GREY, linewidth=1, linestyle=":")
        axes.set_xlabel(f"times as fast as {baseline},\nby device time{size}")

    picture = draw(paint, (_NARROW[0], 1.2 + 0.35 * len(ratios)), legend=0)
    named = zip(names, ratios, strict=True)
    cells = [(" ".join(name.split()), fmt.speedup(ratio)) for name, ratio in named]
    return picture, _data(("implementation", "speedup"), cells)


# --- rooflines: operations per byte and per second


def roofline(report: Report, groups: Sequence[Group]) -> Drawing | None:
    """Under the ceilings measured in the run, a point for each series and length, coloured by its
    implementation.  None if untimed.
    """
    points: _Points = {}
    for group in groups:
        for series in group.series():
            timed = [case for case in series.cases if case.bytes_moved and case.device_us]
            moved = sum(case.bytes_moved or 0 for case in timed)
            flops = sum(case.flops or 0 for case in timed)
            us = sum(case.device_us.value for case in timed if case.device_us)
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
        moved = (kernel.dram_read_bytes or 0) + (kernel.dram_write_bytes or 0)
        flops = (kernel.tensor_flops or 0) + (kernel.fp32_flops or 0)
        if (
            None not in (kernel.dram_read_bytes, kernel.dram_write_bytes)
            and kernel.duration_us
            and moved
            and flops
        ):
            tflops = flops / kernel.duration_us / 1e6
            # matplotlib would leave a label with a leading underscore out of the legend
            label = f"{kernel.kernel.lstrip('_')}: {tflops:,.3g} TFLOP/s"
            points.setdefault(label, []).append((flops / moved, tflops, ""))
            busiest = max(busiest or kernel, kernel, key=lambda each: each.tensor_flops or 0)
    roof = None
    if busiest and busiest.dram_peak_gb_per_s and busiest.tensor_peak_tflops:
        roof = busiest.dram_peak_gb_per_s, busiest.tensor_peak_tflops
    return _roofline(points, roof, "byte of DRAM", "Roofline")


def _roofline(
    points: _Points, roof: tuple[float, float] | None, per: str, title: str = ""
) -> Drawing | None:
    """points: of each label, (operations per byte, TFLOP/s, which).  roof: GB/s and TFLOP/s, if
    known.  title: it is wide.
    """
    cells, intensities, rates = list[Cells](), list[float](), list[float]()
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
    low, high = min(intensities) / 3, max(intensities) * 3

    def paint(axes: Axes) -> None:
        """The roof, then the points of each label."""
        from matplotlib.ticker import LogLocator

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
        if high < _WIDE * low:  # the powers of ten alone may be one tick
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.set_ylim(min(rates) / 3, ceiling * 2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.set_xlabel(f"floating-point operations\nper {per}")
        axes.set_ylabel("TFLOP/s by device time")
        axes.set_title(title, loc="left", fontsize=10)

    numbers = _data(("what", f"operations per {per}", "TFLOP/s"), cells)
    return draw(paint, (_NARROW[0], 2.9 + 0.2 * len(points)), legend=1), numbers


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
    distinct: list[tuple[list[float], list[str]]] = []  # a line, and the names of all that coincide
    for label, line in lines.items():
        names = next((names for other, names in distinct if _coincide(line, other)), None)
        if names is None:
            distinct.append((line, [label]))
        else:
            names.append(label)
    slices = len(next(iter(lines.values())))
    middles = [(number + 0.5) * group.seqlen / slices for number in range(slices)]

    def paint(axes: Axes) -> None:
        """The lines, then the floor."""
        for number, (line, names) in enumerate(distinct):
            label = names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} equal"
            axes.plot(middles, line, drawstyle="steps-mid", color=_color(number), label=label)
        if floor:
            axes.plot(
                middles, floor, drawstyle="steps-mid", color=GREY, linestyle="--", label="floor"
            )
        axes.set_ylim(bottom=0)
        axes.set_ylabel("rms error against fp64")
        axes.yaxis.set_major_formatter(lambda value, _position: fmt.small(value))
        axes.set_xlim(0, group.seqlen)
        what = "prompt" if group.call is None else _PLACES[group.call.kind]
        axes.set_xlabel(f"position in the {what}, tokens")
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")

    picture = draw(paint, legend=2 if len(distinct) == len(lines) else 1)
    if floor:
        lines["floor"] = floor
    errors = zip(*lines.values(), strict=True)
    cells = [
        (f"{middle:,.0f}", *map(fmt.small, at_middle))
        for middle, at_middle in zip(middles, errors, strict=True)
    ]
    return picture, _data(("position", *lines), cells)


def _coincide(line: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a reader sees one line: they differ by less than the width of a stroke."""
    differences = (abs(left - right) for left, right in zip(line, other, strict=True))
    return max(differences) <= _STROKE * max(other)


def _worst(cases: Sequence[Case], which: Against) -> list[float]:
    """In each slice the largest of the layers' RMS errors; empty if none was recorded."""
    errors = (deviation(case.tensor("out"), which) for case in cases)
    recorded = [error.along for error in errors if error and error.along]
    return [max(rms or 0.0 for rms in slices) for slices in zip(*recorded, strict=True)]


# --- stalls


def of_stalls(report: StallReport) -> dict[str, tuple[str, Drawing]]:
    """Name -> (title, drawing): a picture of each group that was sampled, and the roofline."""
    pictures: dict[str, tuple[str, Drawing]] = {}
    sampled = [group for group in kernel_groups(report) if group.is_sampled]
    reasons = [reason for reason, _ in most(summed(group.all for group in sampled))]
    shares = chain.from_iterable(group.stages.values() for group in sampled)
    longest = max((sum(share.values()) for share in shares), default=0.0)
    for group in sampled:
        title = f"{group.name}: stages and stall reasons"
        bars = {_stage_name(group, stage): share for stage, share in group.stages.items()}
        pictures[group.name.lstrip("_")] = (title, stages(bars, title, reasons, longest))
    if roof := stall_roofline(report):
        pictures["roofline"] = ("Roofline", roof)
    return pictures


def _stage_name(group: KernelGroup, stage: str) -> str:
    """ "state passing", "state passing: its part"."""
    name, _, part = stage.partition(".")
    return f"{name}: {group.part(stage)}" if part else name


def stages(
    bars: Mapping[str, Mapping[str, float]],
    title: str,
    reasons: Sequence[str],
    longest: float = 0.0,
) -> Drawing:
    """Stacked bars.  bars: stage -> stall reason -> percent, top to bottom.

    longest: of the bars of all plots of a report, which have one axis.
    reasons: all reasons in the order of their colours, which is the same in all plots of a report;
    the last ones share a colour.
    """
    last = len(COLORS) - 1
    parts = {reason: [reason] for reason in reasons[:last]}
    if rest := reasons[last:]:
        parts["other"] = [*rest]

    def paint(axes: Axes) -> None:
        """From the left to the right of each bar, the reasons in their order."""
        names = list(bars)[::-1]
        labels = [textwrap.fill(name, 26) for name in names]
        left = [0.0] * len(names)
        for (reason, among), color in zip(parts.items(), COLORS, strict=False):
            widths = [sum(bars[name].get(each, 0.0) for each in among) for name in names]
            axes.barh(labels, widths, left=left, color=color, label=reason, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for position, total in enumerate(left):
            axes.text(total, position, f" {fmt.share(total, 1)}", va="center", fontsize=9)
        axes.set_xlim(0, max(*left, longest) * 1.3)
        axes.set_xlabel("percent of the busy warp time")
        axes.figure.suptitle("\n".join(textwrap.wrap(title, 40)), x=0.02, ha="left", fontsize=10)

    cells = (
        (name, *(f"{share.get(reason, 0.0):.1f}" for reason in reasons))
        for name, share in bars.items()
    )
    size = _NARROW[0], 1.9 + 0.27 * len(bars) + 0.1 * len(reasons)
    return draw(paint, size, legend=2), _data(("stage, percent", *reasons), cells)


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
