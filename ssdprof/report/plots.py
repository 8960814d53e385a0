"""Plots as SVG, with the same bytes for the same report, each with a table of its numbers."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssdprof.core import words as fmt
from ssdprof.core.base import short_precision
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport
from ssdprof.report.groups import Against, Group, deviation
from ssdprof.report.stalls import kernel_groups, most, summed
from ssdprof.report.table import Row, Table, aligned

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
_Points = dict[str, list[tuple[float, float, str]]]


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


def _data(headers: Row, rows: Iterable[Row]) -> Table:
    """For a plot: the first column has names or positions."""
    return Table(
        title="", headers=headers, rows=(*rows,), align=aligned("l".ljust(len(headers), "r"))
    )


# --- speed


def speedups(found: Sequence[Group]) -> Drawing | None:
    """Bars of the speedups by device time, with their intervals.  None if nothing was timed."""
    rows = [(one, ratio) for group in found for one in group.others() if (ratio := one.speedup())][
        ::-1
    ]
    if not rows:
        return None
    names = [one.label if len(found) == 1 else f"{one.label},\n{one.group.size}" for one, _ in rows]

    def paint(axes: Axes) -> None:
        ratios = [ratio.value for _, ratio in rows]
        spread = [
            [one.value - one.low for _, one in rows],
            [one.high - one.value for _, one in rows],
        ]
        axes.barh(names, ratios, xerr=spread, color=COLORS[0], height=0.6, ecolor=GREY)
        for position, ratio in enumerate(ratios):
            axes.text(
                ratio * 0.97,
                position,
                fmt.ratio(ratio),
                va="center",
                ha="right",
                color="#fffffe",
                fontsize=9,
            )
        axes.axvline(1.0, color=GREY, linewidth=1, linestyle=":")
        baseline, *others = {one.group.baseline for one, _ in rows}
        size = f", {found[0].size}" if len(found) == 1 else ""
        axes.set_xlabel(
            f"times as fast as {'the baseline' if others else baseline},\nby device time{size}"
        )

    cells = [
        (" ".join(name.split()), fmt.speedup(ratio))
        for name, (_, ratio) in zip(names, rows, strict=True)
    ][::-1]
    return draw(paint, (_NARROW[0], 1.2 + 0.35 * len(rows)), legend=0), _data(
        ("implementation", "speedup"), cells
    )


# --- rooflines: operations per byte and per second


def roofline(report: Report, found: Sequence[Group]) -> Drawing | None:
    """Under the ceilings measured in the run, a point for each series and length, coloured by its
    implementation.  None if untimed.
    """
    points: _Points = {}
    for series in (one for group in found for one in group.series()):
        timed = [case for case in series.cases if case.bytes_moved and case.device_us]
        moved = sum(case.bytes_moved or 0 for case in timed)
        flops = sum(case.flops or 0 for case in timed)
        if moved and flops:
            point = (
                flops / moved,
                flops / sum(case.device_us.value for case in timed if case.device_us) / 1e6,
            )
            points.setdefault(series.implementation, []).append(
                (*point, short_precision(series.precision))
            )
    roof = report.ceilings and (report.ceilings.copy_gb_per_s, report.ceilings.matmul_tflops)
    return _roofline(points, roof, "byte that must move") if roof else None


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
            busiest = max(busiest or kernel, kernel, key=lambda one: one.tensor_flops or 0)
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
    every = [point for own in points.values() for point in own]
    if not every:
        return None
    intensities = [at for at, _, _ in every]
    if roof:
        bandwidth, peak = roof
        intensities.append(ridge := peak * 1e3 / bandwidth)
    low, high = min(intensities) / 3, max(intensities) * 3

    def paint(axes: Axes) -> None:
        from matplotlib.ticker import LogLocator

        axes.loglog()
        if roof:
            corners = [low, ridge, high]
            tflops = [min(peak, at * bandwidth / 1e3) for at in corners]
            axes.plot(
                corners, tflops, color=GREY, label=f"{bandwidth:,.0f} GB/s, {peak:,.0f} TFLOP/s"
            )
        for number, (label, own) in enumerate(points.items()):
            xs = [at for at, _, _ in own]
            ys = [rate for _, rate, _ in own]
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(xs, ys, marker, color=_color(number), fillstyle="none", label=label)
        axes.set_xlim(low, high)
        if high < _WIDE * low:  # the powers of ten alone may be one tick
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        rates = [rate for _, rate, _ in every]
        axes.set_ylim(min(rates) / 3, (peak if roof else max(rates)) * 2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.set_xlabel(f"floating-point operations\nper {per}")
        axes.set_ylabel("TFLOP/s by device time")
        axes.set_title(title, loc="left", fontsize=10)

    named = (
        (", ".join(filter(None, (label, one[2]))), *one[:2])
        for label, own in points.items()
        for one in own
    )
    cells = [(name, f"{at:,.4g}", f"{rate:,.4g}") for name, at, rate in named]
    if roof:
        cells.append((f"ridge of {bandwidth:,.0f} GB/s", f"{ridge:,.4g}", f"{peak:,.4g}"))
    numbers = _data(("what", f"operations per {per}", "TFLOP/s"), cells)
    return draw(paint, (_NARROW[0], 2.9 + 0.2 * len(points)), legend=1), numbers


# --- errors


def along_positions(group: Group) -> Drawing | None:
    """RMS error of the output against fp64 in slices of the positions, the worst layer's in each,
    with the floor.

    None if no case recorded it, and for decode steps, which have one position.
    """
    found = {
        series.label: line
        for series in group.others()
        if (line := _worst(series.cases, "vs_oracle"))
    }
    if group.steps or not found:
        return None
    limit = _worst(group.cases, "floor")
    drawn: list[tuple[list[float], list[str]]] = []  # a line, and the names of all that coincide
    for label, line in found.items():
        names = next((names for other, names in drawn if _coincide(line, other)), None)
        if names is None:
            drawn.append((line, [label]))
        else:
            names.append(label)

    def middles(line: Sequence[float]) -> list[float]:
        return [(number + 0.5) * group.seqlen / len(line) for number in range(len(line))]

    def paint(axes: Axes) -> None:
        for number, (line, names) in enumerate(drawn):
            label = names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} equal"
            axes.plot(middles(line), line, drawstyle="steps-mid", color=_color(number), label=label)
        if limit:
            axes.plot(
                middles(limit),
                limit,
                drawstyle="steps-mid",
                color=GREY,
                linestyle="--",
                label="floor",
            )
        axes.set_ylim(bottom=0)
        axes.set_ylabel("rms error against fp64")
        axes.yaxis.set_major_formatter(lambda value, _position: fmt.small(value))
        axes.set_xlim(0, group.seqlen)
        axes.set_xlabel(
            f"position in the {'prompt' if group.call is None else _PLACES[group.call.kind]}, "
            "tokens"
        )
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _position: f"{value:,.0f}")

    lines = found | ({"floor": limit} if limit else {})
    slices = zip(middles(next(iter(found.values()))), *lines.values(), strict=True)
    cells = ((f"{at:,.0f}", *map(fmt.small, errors)) for at, *errors in slices)
    legend = 2 if len(drawn) == len(found) else 1  # columns
    return draw(paint, legend=legend), _data(("position", *lines), cells)


def _coincide(line: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a reader sees one line: they differ by less than the width of a stroke."""
    return all(abs(one - two) <= _STROKE * max(other) for one, two in zip(line, other, strict=True))


def _worst(cases: Sequence[Case], which: Against) -> list[float]:
    """In each slice the largest of the layers' RMS errors; empty if none was recorded."""
    errors = (deviation(case.tensor("out"), which) for case in cases)
    found = [[one or 0.0 for one in error.along] for error in errors if error and error.along]
    return [max(slices) for slices in zip(*found, strict=True)]


# --- stalls


def of_stalls(report: StallReport) -> dict[str, tuple[str, Drawing]]:
    """Name -> (title, drawing): a picture of each group that was sampled, and the roofline."""
    found: dict[str, tuple[str, Drawing]] = {}
    sampled = [group for group in kernel_groups(report) if group.is_sampled]
    reasons = [reason for reason, _ in most(summed(group.all for group in sampled))]
    longest = max(
        (sum(share.values()) for group in sampled for share in group.stages.values()), default=0.0
    )
    for group in sampled:
        title = f"{group.name}: stages and stall reasons"
        names = (
            f"{name.split('.')[0]}: {group.part(name)}" if "." in name else name
            for name in group.stages
        )
        bars = dict(zip(names, group.stages.values(), strict=True))
        found[group.name.lstrip("_")] = (title, stages(bars, title, reasons, longest))
    roof = stall_roofline(report)
    return found if roof is None else found | {"roofline": ("Roofline", roof)}


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
    most = len(COLORS) - 1
    shown, rest = reasons[:most], reasons[most:]

    def paint(axes: Axes) -> None:
        names = list(bars)[::-1]
        labels = [textwrap.fill(name, 26) for name in names]
        left = [0.0] * len(names)
        for reason, color in zip([*shown, *(["other"] if rest else [])], COLORS, strict=False):
            among = rest if reason == "other" and rest else [reason]
            widths = [sum(bars[name].get(one, 0.0) for one in among) for name in names]
            axes.barh(labels, widths, left=left, color=color, label=reason, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for position, total in enumerate(left):
            axes.text(total, position, f" {fmt.share(total, 1)}", va="center", fontsize=9)
        axes.set_xlim(0, max(*left, longest) * 1.3)
        axes.set_xlabel("percent of the busy warp time")
        axes.figure.suptitle("\n".join(textwrap.wrap(title, 40)), x=0.02, ha="left", fontsize=10)

    cells = (
        (name, *(f"{share.get(one, 0.0):.1f}" for one in reasons)) for name, share in bars.items()
    )
    size = _NARROW[0], 1.9 + 0.27 * len(bars) + 0.1 * len(reasons)
    return draw(paint, size, legend=2), _data(("stage, percent", *reasons), cells)


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
