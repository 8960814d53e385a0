"""The values for claims about the selective scan, from the rows of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selective_scan.cells import BATCH, BOTH_LENGTHS, FORWARD_LENGTHS, HEADS, TILES_LENGTH
from selective_scan.contenders import SEQUENTIAL, TILES, tile
from selective_scan.peer import NAME as PEER

Row = Mapping[str, Any]
CLOCKS = ("warm", "device", "call", "kernel")  # warm, kernel: the source's; device, call: ours
_BYTES_PER_POSITION = 392  # per head: from the source's GB/s and milliseconds


def values_of(rows: Sequence[Row], copy_gb_per_s: float | None) -> dict[str, float]:
    """Values by name: clock, quantity, length (l) or tile (t).  A value that was not measured is not included."""
    of = {(r["pass"], r["seqlen"], r["contender"]): r for r in rows}
    values: dict[str, float] = {}

    def ratio(name: str, above: tuple[str, int, str], below: tuple[str, int, str], clock: str) -> None:
        """Adds the time of `above` divided by that of the other one."""
        times = [of.get(place, {}).get(f"{clock}_us") for place in (above, below)]
        if times[0] and times[1]:
            values[name] = times[0] / times[1]

    for clock in CLOCKS:
        for length in FORWARD_LENGTHS:
            place = ("forward", length)
            ratio(f"{clock}_speedup_l{length}", (*place, PEER), (*place, tile(64)), clock)
            ratio(f"{clock}_speedup_t128_l{length}", (*place, PEER), (*place, tile(128)), clock)
            ratio(f"{clock}_sequential_by_parallel_l{length}", (*place, SEQUENTIAL), (*place, tile(64)), clock)
        for length in BOTH_LENGTHS:
            place = ("forward and backward", length)
            ratio(f"{clock}_both_speedup_l{length}", (*place, PEER), (*place, tile(128)), clock)
            ratio(f"{clock}_both_sequential_by_parallel_l{length}", (*place, SEQUENTIAL), (*place, tile(128)), clock)
            _backward(values, of, length, clock)
        for name, contender in (("peer", PEER), ("parallel", tile(64))):
            long, short = ("forward", 2048, contender), ("forward", 512, contender)
            ratio(f"{clock}_{name}_2048_by_512", long, short, clock)
        long, short = (("forward and backward", length, tile(128)) for length in (8192, 2048))
        ratio(f"{clock}_both_8192_by_2048", long, short, clock)
        for t in TILES:
            tiles = ("tiles", TILES_LENGTH)
            ratio(f"{clock}_t{t}_by_t128", (*tiles, tile(t)), (*tiles, tile(128)), clock)
        for length in FORWARD_LENGTHS:
            us = of.get(("forward", length, tile(64)), {}).get(f"{clock}_us")
            if us:
                rate = _BYTES_PER_POSITION * BATCH * HEADS * length / us / 1e3
                values[f"{clock}_gb_per_s_l{length}"] = rate
                if copy_gb_per_s:
                    values[f"{clock}_copy_share_pct_l{length}"] = 100 * rate / copy_gb_per_s
    for t in TILES:
        spills = of.get(("tiles", TILES_LENGTH, tile(t)), {}).get("spills")
        if spills is not None:
            values[f"spills_t{t}"] = float(spills)
    launches = of.get(("forward", 2048, PEER), {}).get("launches")
    if launches:
        values["peer_launches"] = float(launches)
    kept = [of.get(("forward", 2048, name), {}).get("kept_bytes") for name in (SEQUENTIAL, tile(128))]
    if kept[0] and kept[1]:
        values["kept_by_sequential_of_parallel"] = kept[0] / kept[1]
    return values


def _backward(values: dict[str, float], of: Mapping[tuple[str, int, str], Row], length: int, clock: str) -> None:
    """The backward pass only: the time of both passes minus that of the forward pass, as in the source."""
    alone = {}
    for name, contender in (("parallel", tile(128)), ("peer", PEER)):
        both = of.get(("forward and backward", length, contender), {}).get(f"{clock}_us")
        forward = of.get(("forward", length, contender), {}).get(f"{clock}_us")
        if both and forward and both > forward:
            alone[name] = both - forward
            values[f"{clock}_{name}_backward_by_forward_l{length}"] = alone[name] / forward
    if len(alone) == 2:
        values[f"{clock}_backward_speedup_l{length}"] = alone["peer"] / alone["parallel"]
