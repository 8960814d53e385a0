"""Tables and plot of a run of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from study_result import table, ticks

from selective_scan.cells import BOTH_LENGTHS, FORWARD_LENGTHS, cells
from selective_scan.contenders import both, forward
from selective_scan.peer import NAME as PEER
from ssdprof.report.plots.canvas import COLORS, legend_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
COLUMNS = ("warm_us", "kernel_us", "call_us", "device_us", "wall_us")
HEAD = ("contender", "warm us", "kernels us", "call us", "device us", "one call us", "launches", "registers", "spills",
        "excess", "error, RMS")  # fmt: skip


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Title -> Markdown; empty for a cell that was not measured."""
    found = {}
    for of_pass, seqlen in sorted(cells()):
        own = [r for r in rows if r["pass"] == of_pass and r["seqlen"] == seqlen]
        lines = [
            (
                r["contender"],
                *(r.get(name) for name in (*COLUMNS, "launches", "registers", "spills", "excess", "rms_error")),
            )
            for r in own
        ]  # fmt: skip
        found[f"{of_pass.capitalize()}, {seqlen:,} positions"] = table(HEAD, lines) if lines else ""
    return found


def paint(rows: Sequence[Row], figure: Figure) -> None:
    """Plots time against length, by the source's clock (dashed) and by device time."""
    panels = figure.subplots(1, 2)
    for panel, of_pass, names in zip(
        panels, ("forward", "forward and backward"), ((*forward(), PEER), (*both(), PEER)), strict=True
    ):
        for name in names:
            color = COLORS[(*forward(), PEER).index(name)]
            for clock, style in (("warm_us", "--"), ("device_us", "-")):
                points = sorted(
                    (r["seqlen"], r[clock])
                    for r in rows
                    if r["pass"] == of_pass and r["contender"] == name and clock in r
                )
                if points:
                    label = name if style == "-" and of_pass == "forward" else "_"
                    panel.plot(*zip(*points, strict=True), color=color, ls=style, marker=".", label=label)
        panel.set(xscale="log", yscale="log", xlabel="positions", title=of_pass)
        ticks(panel, FORWARD_LENGTHS if of_pass == "forward" else BOTH_LENGTHS)
    panels[0].set_ylabel("us (dashed: the source's clock)")
    if any(panel.lines for panel in panels):
        legend_below(figure, 3)
