"""Tables and plot of a run of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from study_result import table, ticks

from inter_chunk.cells import CHUNKS, DIMS, RANK_CHUNKS, RANKS, Cell, cells
from inter_chunk.contenders import BASELINE, PRODUCTS, baseline_of, diagonal, of_rank
from inter_chunk.peer import NAME as PEER
from ssdprof.report.plots.canvas import COLORS, GREY, legend_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Row = Mapping[str, Any]
SAME = {True: "yes", False: "no", None: ""}


def tables(measured: Sequence[Row], counters: Sequence[Row]) -> dict[str, str]:
    """Title -> Markdown; empty for a cell that was not measured."""
    found = {title(cell): _times(_rows(measured, cell)) for cell in cells()}
    if counters:
        names = ("l2_read_sectors", "l2_bytes", "dram_read_bytes", "dram_write_bytes", "ncu_us", "occupancy_pct",
                 "occupancy_limit_pct", "registers", "shared_bytes")  # fmt: skip
        lines = [(r["contender"], title({**r, "rank": 0}), *(r.get(name) for name in names)) for r in counters]
        found["Counted by ncu"] = table(("contender", "cell", *(name.replace("_", " ") for name in names)), lines)
    return found


def title(cell: Mapping[str, Any]) -> str:
    rank = f", rank {cell['rank']}" if cell["rank"] else ""
    return f"{cell['chunks']} chunks, states of {cell['dim']} x {cell['dim']}{rank}"


def _rows(measured: Sequence[Row], cell: Cell) -> list[Row]:
    return [r for r in measured if all(r[key] == value for key, value in cell.items())]


def _times(rows: Sequence[Row]) -> str:
    """Times, and speedups over the contender that reads its state back."""
    us = {r["contender"]: r.get("device_us") for r in rows}
    lines = []
    for r in rows:
        own, base = us[r["contender"]], us.get(baseline_of(r["contender"]))
        lines.append((
            r["contender"], own or "not timed", r.get("call_us"), f"{base / own:.2f}x" if own and base else "",
            f"{100 * r['floor_us'] / own:.0f} %" if own else "", r["launches"], r["registers"], r["spills"],
            SAME[r.get("same_bits")], f"{r['rms_error']:.1e}",
        ))  # fmt: skip
    head = ("contender", "device us", "call us", "speedup", "of the floor", "launches", "registers", "spills",
            "same bits", "error, RMS")  # fmt: skip
    return table(head, lines) if lines else ""


def paint(measured: Sequence[Row], figure: Figure) -> None:
    """Plots device time against the number of chunks, and against the rank."""
    panels = figure.subplots(1, len(DIMS) + 1)
    for panel, dim in zip(panels, DIMS, strict=False):
        own = [r for r in measured if r["dim"] == dim and not r["rank"]]
        for color, name in zip((*COLORS, "#000000", GREY), (*diagonal(dim), PEER), strict=True):
            _line(panel, own, name, "chunks", color=color, label=name if dim == DIMS[0] else "_")
        floors = sorted({(r["chunks"], r["floor_us"]) for r in own})
        if floors:
            panel.plot(*zip(*floors, strict=True), color=GREY, ls=":")
        panel.set(xscale="log", yscale="log", xlabel="chunks", title=f"states {dim} x {dim}")
        ticks(panel, CHUNKS)
    own = [r for r in measured if r["dim"] == DIMS[0] and r["rank"]]
    for name in of_rank(DIMS[0]):
        color = COLORS[0] if name.endswith(PRODUCTS[0]) else COLORS[1]
        _line(panels[-1], own, name, "rank", color=color, label=name, ls="--" if name.startswith(BASELINE) else "-")
    panels[-1].set(xscale="log", yscale="log", xlabel="rank", title=f"low rank, {RANK_CHUNKS} chunks, 64 x 64")
    ticks(panels[-1], RANKS)
    panels[0].set_ylabel("device time, us (dotted: floor)")
    if any(panel.lines for panel in panels):
        legend_below(figure, 4)


def _line(panel: Any, rows: Sequence[Row], name: str, key: str, **style: Any) -> None:
    points = sorted((r[key], r["device_us"]) for r in rows if r["contender"] == name and "device_us" in r)
    if points:
        panel.plot(*zip(*points, strict=True), marker=".", **style)
