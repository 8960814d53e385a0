"""Pictures of a stall report, as SVG: the same bytes for the same report.

Every number in them is in the tables too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssdprof.schema.stalls import KernelStalls, StallReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# dark enough on white, light enough on black, and apart from each other without colour vision as far as nine can be
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999933", "#bbbbbb")
_MOST_REASONS = len(_COLORS) - 1
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "ssdprof",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}


def stages(bars: Mapping[str, Mapping[str, float]], title: str, reasons: Sequence[str]) -> str:
    """Stacked bars.  bars: stage -> stall reason -> percent, top to bottom.

    reasons: every one, in the order in which they get a colour, so that pictures of one report agree; the last ones
    share one.
    """
    shown, rest = reasons[:_MOST_REASONS], reasons[_MOST_REASONS:]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        names = list(bars)[::-1]
        left = [0.0] * len(names)
        for reason, color in zip([*shown, *(["other"] if rest else [])], _COLORS, strict=False):
            among = rest if reason == "other" and rest else [reason]
            widths = [sum(bars[name].get(one, 0.0) for one in among) for name in names]
            axes.barh(names, widths, left=left, color=color, label=reason, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for position, total in enumerate(left):
            axes.text(total + 0.4, position, f"{total:.1f} %", va="center", fontsize=8)
        axes.set_xlim(0, max(left) * 1.12)
        axes.set_xlabel("percent of the busy warp time")
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)

    return _svg(draw, (10.0, 1.2 + 0.32 * len(bars)))


def roofline(report: StallReport) -> str | None:
    """Arithmetic, on tensor cores and in fp32, per byte of DRAM, and per second.  None if no kernel's are known.

    The roofs are those of the chip at the clock that it ran at, as ncu says: DRAM's bandwidth, and the tensor cores'
    rate for the operand type of the kernel that computes most.
    """
    points = [(kernel, point) for kernel in report.kernels if (point := _point(kernel))]
    if not points:
        return None
    busiest = max((kernel for kernel, _ in points), key=lambda kernel: kernel.throughput.tensor_flops or 0)
    bandwidth = busiest.throughput.dram_peak_gb_per_s
    peak = busiest.throughput.tensor_peak_tflops

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        axes.set_yscale("log")
        low = min(point[0] for _, point in points) / 4
        high = max(point[0] for _, point in points) * 4
        if bandwidth and peak:
            ridge = peak * 1e3 / bandwidth
            low, high = min(low, ridge / 4), max(high, ridge * 4)
            roof = [low, ridge, high]
            axes.plot(roof, [min(peak, at * bandwidth / 1e3) for at in roof], color="#777777", linewidth=1.5)
            axes.text(ridge, peak * 1.1, f"tensor cores {peak:,.0f} TFLOP/s", fontsize=8, color="#777777")
            middle = (low * ridge) ** 0.5
            axes.text(  # below the rising line, which leaves its right to it
                middle * 1.2, middle * bandwidth / 1e3, f"DRAM {bandwidth:,.0f} GB/s",
                fontsize=8, color="#777777", va="top",
            )  # fmt: skip
        for (kernel, (intensity, tflops)), color in zip(points, _COLORS * len(points), strict=False):
            axes.plot([intensity], [tflops], "o", color=color, label=_label(kernel, tflops))
        axes.set_xlim(low, high)
        axes.set_xlabel("floating-point operations per byte of DRAM")
        axes.set_ylabel("TFLOP/s")
        axes.set_title("Roofline", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", fontsize=8, frameon=False)

    return _svg(draw, (9.0, 4.5))


def _label(kernel: KernelStalls, tflops: float) -> str:
    """matplotlib leaves out of a legend what begins with an underscore."""
    return f"{kernel.kernel.lstrip('_')}: {tflops:,.3g} TFLOP/s"


def _point(kernel: KernelStalls) -> tuple[float, float] | None:
    """(operations per byte, TFLOP/s) of a kernel that has both."""
    speed = kernel.throughput
    if speed.dram_read_bytes is None or speed.dram_write_bytes is None or not speed.duration_us:
        return None
    moved = speed.dram_read_bytes + speed.dram_write_bytes
    flops = (speed.tensor_flops or 0) + (speed.fp32_flops or 0)
    if not flops or not moved:
        return None
    return flops / moved, flops / speed.duration_us / 1e6


def _svg(draw: Any, size: tuple[float, float]) -> str:
    """A figure without a window, a date or a random identifier."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(out, metadata={"Date": None, "Creator": "ssdprof"})
    return out.getvalue()
