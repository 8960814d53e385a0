"""The values for claims about the inter-chunk state pass, from the rows of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inter_chunk.cells import CHUNKS, DIMS, RANK_CHUNKS, RANKS
from inter_chunk.contenders import BASELINE, NOT_AHEAD, PRODUCTS, PROPOSED
from inter_chunk.loop import LoopConfig
from inter_chunk.peer import NAME as PEER

Row = Mapping[str, Any]
OTHERS = ("one launch a chunk", "chained", "associative", "look-back", "registers, a row a program",
          "registers, a head a program", "registers, fp32", PEER)  # fmt: skip
ROUNDED = (PROPOSED, NOT_AHEAD, "chained", "one launch a chunk")


def values_of(rows: Sequence[Row], counters: Sequence[Row]) -> dict[str, float]:
    """Values by name: quantity and cell (d: rows and columns of a state, g: chunks, r: rank).

    counters: ncu's counters, empty without them.  A value that was not measured is not included.
    """
    values: dict[str, float] = {}
    timed = [r for r in rows if "device_us" in r]
    for dim in DIMS:
        for chunks in CHUNKS:
            _speeds(values, _of(timed, dim=dim, chunks=chunks, rank=0), dim, f"d{dim}_g{chunks}")
        for rank in RANKS:
            _rank_speeds(values, _of(timed, dim=dim, chunks=RANK_CHUNKS, rank=rank), f"d{dim}_r{rank}")
            if {f"speedup_d{dim}_r{rank}", f"speedup_d{dim}_g{RANK_CHUNKS}"} <= values.keys():
                of_rank, diagonal = values[f"speedup_d{dim}_r{rank}"], values[f"speedup_d{dim}_g{RANK_CHUNKS}"]
                values[f"gain_over_diagonal_d{dim}_r{rank}"] = of_rank / diagonal
    speedups = {chunks: values.get(f"speedup_d64_g{chunks}") for chunks in CHUNKS}
    if None not in speedups.values():
        values["least_chunks_faster_d64"] = float(min((g for g, s in speedups.items() if s and s > 1), default=0))
    for name, contenders in (("rounded_same_bits", ROUNDED), ("fp32_same_bits", ("registers, fp32",))):
        same = [r["same_bits"] for r in rows if r["contender"] in contenders and "same_bits" in r]
        if same:
            values[name] = float(all(same))
    for dim in DIMS:
        for chunks in CHUNKS:
            _counted(values, _of(counters, dim=dim, chunks=chunks), f"d{dim}_g{chunks}")
    return values


def _of(rows: Sequence[Row], **cell: int) -> dict[str, Row]:
    """The rows of one cell, by contender."""
    return {r["contender"]: r for r in rows if all(r[key] == value for key, value in cell.items())}


def _word(contender: str) -> str:
    return contender.replace(", ", "_").replace(" ", "_").replace("-", "_").replace("'", "_")


def _speeds(values: dict[str, float], of: Mapping[str, Row], dim: int, place: str) -> None:
    """Values of one cell with a diagonal transition.  X_by_registers: time of X over that of the proposed kernel."""
    if not {BASELINE, PROPOSED, NOT_AHEAD} <= of.keys():
        return
    base, ours, bare = of[BASELINE], of[PROPOSED], of[NOT_AHEAD]
    values[f"speedup_{place}"] = base["device_us"] / ours["device_us"]
    values[f"time_saved_pct_{place}"] = 100 * (1 - ours["device_us"] / base["device_us"])
    values[f"time_ratio_{place}"] = ours["device_us"] / base["device_us"]
    values[f"speedup_by_residency_{place}"] = base["device_us"] / bare["device_us"]
    values[f"speedup_by_loads_ahead_{place}"] = bare["device_us"] / ours["device_us"]
    values[f"floor_pct_{place}"] = 100 * ours["floor_us"] / ours["device_us"]
    waiting = bare["device_us"] - bare["floor_us"]
    if waiting > 0:
        values[f"hidden_pct_{place}"] = 100 * (bare["device_us"] - ours["device_us"]) / waiting
    programs_per_head = -(-dim // LoopConfig().rows)
    values[f"shared_bytes_per_head_{place}"] = float(programs_per_head * ours["shared_bytes"])
    for name in OTHERS:
        if name in of:
            values[f"{_word(name)}_by_registers_{place}"] = of[name]["device_us"] / ours["device_us"]


def _rank_speeds(values: dict[str, float], of: Mapping[str, Row], place: str) -> None:
    """Compares the faster kind of products of each contender."""
    pairs = [(of.get(f"{BASELINE}, {kind}"), of.get(f"{PROPOSED}, {kind}")) for kind in PRODUCTS]
    found = [(base, ours) for base, ours in pairs if base and ours]
    if len(found) < len(PRODUCTS):
        return
    base, ours = (min((pair[i] for pair in found), key=lambda r: r["device_us"]) for i in (0, 1))
    values[f"speedup_{place}"] = base["device_us"] / ours["device_us"]
    values[f"registers_{place}"] = float(ours["registers"])
    values[f"spills_{place}"] = float(ours["spills"])
    columns, cores = (pair[1]["device_us"] for pair in found)
    values[f"tensor_core_speedup_{place}"] = columns / cores


def _counted(values: dict[str, float], of: Mapping[str, Row], place: str) -> None:
    """Values of one cell that ncu profiled."""
    if not {BASELINE, PROPOSED} <= of.keys():
        return
    base, ours = of[BASELINE], of[PROPOSED]
    for value, keys in (
        ("l2_reads", ("l2_read_sectors",)),
        ("l2_bytes", ("l2_bytes",)),
        ("dram", ("dram_read_bytes", "dram_write_bytes")),
    ):
        if all(key in record for key in keys for record in (base, ours)):
            ratio = sum(ours[key] for key in keys) / sum(base[key] for key in keys)
            values[f"{value}_ratio_{place}"] = ratio
            values[f"{value}_saved_pct_{place}"] = 100 * (1 - ratio)
    if ours["occupancy_pct"] is not None:
        values[f"occupancy_pct_{place}"] = ours["occupancy_pct"]
