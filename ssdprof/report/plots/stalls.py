"""Plots of stalls: stages as bars, kernels under their roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ssdprof.report.plots.canvas import COLORS, GREY, draw, plain
from ssdprof.report.stall_groups import KernelGroup, StageShare, groups
from ssdprof.schema.stalls import KernelStalls, StallReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_REASONS = len(COLORS) - 1


def pictures(report: StallReport) -> dict[str, tuple[str, str]]:
    """Name -> (title, SVG): a picture of each group that was sampled, and the roofline."""
    found: dict[str, tuple[str, str]] = {}
    sampled = [group for group in groups(report) if group.is_sampled]
    every = StageShare()
    for group in sampled:
        every.add(group.all())
    for group in sampled:
        title = f"{group.name}: stages and stall reasons"
        bars = {_stage(group, name): share.reasons for name, share in group.stages.items()}
        found[group.name.lstrip("_")] = (title, stages(bars, title, [reason for reason, _ in every.most]))
    roof = roofline(report)
    return found if roof is None else found | {"roofline": ("Roofline", roof)}


def _stage(group: KernelGroup, name: str) -> str:
    return f"{name.split('.')[0]}: {group.part(name)}" if "." in name else name


def stages(bars: Mapping[str, Mapping[str, float]], title: str, reasons: Sequence[str]) -> str:
    """Stacked bars.  bars: stage -> stall reason -> percent, top to bottom.

    reasons: all reasons in the order of their colours, which is the same in all plots of a report; the last ones
    share a colour.
    """
    shown, rest = reasons[:_MOST_REASONS], reasons[_MOST_REASONS:]

    def paint(figure: Figure) -> None:
        axes = plain(figure)
        names = list(bars)[::-1]
        left = [0.0] * len(names)
        for reason, color in zip([*shown, *(["other"] if rest else [])], COLORS, strict=False):
            among = rest if reason == "other" and rest else [reason]
            widths = [sum(bars[name].get(one, 0.0) for one in among) for name in names]
            axes.barh(names, widths, left=left, color=color, label=reason, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for position, total in enumerate(left):
            axes.text(total + 0.4, position, f"{total:.1f} %", va="center", fontsize=8)
        axes.set_xlim(0, max(left) * 1.12)
        axes.set_xlabel("percent of the busy warp time")
        axes.set_title(title, loc="left", fontsize=10)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)

    return draw(paint, (10.0, 1.2 + 0.32 * len(bars)))


def roofline(report: StallReport) -> str | None:
    """Arithmetic, on tensor cores and in fp32, per byte of DRAM, and per second.  None if no kernel's are known.

    The roofs are those of the GPU at its clock, from ncu: DRAM's bandwidth, and the tensor cores' rate for the operand
    type of the kernel with the most operations.
    """
    points = [(kernel, point) for kernel in report.kernels if (point := _point(kernel))]
    if not points:
        return None
    busiest = max((kernel for kernel, _ in points), key=lambda kernel: kernel.tensor_flops or 0)
    bandwidth = busiest.dram_peak_gb_per_s
    peak = busiest.tensor_peak_tflops

    def paint(figure: Figure) -> None:
        axes = plain(figure)
        axes.set_xscale("log")
        axes.set_yscale("log")
        low = min(point[0] for _, point in points) / 4
        high = max(point[0] for _, point in points) * 4
        if bandwidth and peak:
            ridge = peak * 1e3 / bandwidth
            low, high = min(low, ridge / 4), max(high, ridge * 4)
            roof = [low, ridge, high]
            axes.plot(roof, [min(peak, at * bandwidth / 1e3) for at in roof], color=GREY, linewidth=1.5)
            axes.text(ridge, peak * 1.1, f"tensor cores {peak:,.0f} TFLOP/s", fontsize=8, color=GREY)
            middle = (low * ridge) ** 0.5
            axes.text(  # below the rising line, where there is free space
                middle * 1.2, middle * bandwidth / 1e3, f"DRAM {bandwidth:,.0f} GB/s",
                fontsize=8, color=GREY, va="top",
            )  # fmt: skip
        for (kernel, (intensity, tflops)), color in zip(points, COLORS * len(points), strict=False):
            axes.plot([intensity], [tflops], "o", color=color, label=_label(kernel, tflops))
        axes.set_xlim(low, high)
        axes.set_xlabel("floating-point operations per byte of DRAM")
        axes.set_ylabel("TFLOP/s")
        axes.set_title("Roofline", loc="left", fontsize=10)
        axes.legend(loc="lower right", fontsize=8, frameon=False)

    return draw(paint, (9.0, 4.5))


def _label(kernel: KernelStalls, tflops: float) -> str:
    """A label without a leading underscore, which matplotlib would leave out of the legend."""
    return f"{kernel.kernel.lstrip('_')}: {tflops:,.3g} TFLOP/s"


def _point(speed: KernelStalls) -> tuple[float, float] | None:
    """(operations per byte, TFLOP/s) of a kernel that has both."""
    if speed.dram_read_bytes is None or speed.dram_write_bytes is None or not speed.duration_us:
        return None
    moved = speed.dram_read_bytes + speed.dram_write_bytes
    flops = (speed.tensor_flops or 0) + (speed.fp32_flops or 0)
    if not flops or not moved:
        return None
    return flops / moved, flops / speed.duration_us / 1e6
