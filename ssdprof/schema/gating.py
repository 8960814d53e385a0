"""Finds the rows that break a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ssdprof.schema.base import Record
from ssdprof.schema.gates import TOLERANCE_NAMES, Gates
from ssdprof.schema.rows import Row


class Broken(Record):
    """gate: "min-speedup 1.5".  row: a row's name; "" if no row could be judged.  found: the actual value."""

    gate: str
    row: str
    found: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.gate, self.row, self.found) if part)


def broken(rows: Sequence[Row], gates: Gates) -> tuple[Broken, ...]:
    """Every row that breaks a gate.  A gate that judges no row is broken as well.

    Rows that did not pass are not judged: they fail a run or a bench anyway.
    """
    judged = [row for row in rows if row.gated and row.status == "passed"]
    return tuple(one for gate, check in _checks(gates) for one in _broken(gate, check, judged))


def gate_names(gates: Gates) -> tuple[str, ...]:
    """ "min-speedup 1.5", "min-match 1e-3:99", ..., as in `Broken.gate`."""
    return tuple(gate for gate, _ in _checks(gates))


Check = Callable[[Row], str]  # the value that breaks the gate; "" if it holds


def _checks(gates: Gates) -> Iterator[tuple[str, Check]]:
    if gates.min_speedup is not None:
        yield f"min-speedup {gates.min_speedup:g}", lambda row: _slower(row, gates.min_speedup or 0.0)
    for tolerance, least in gates.min_match.items():
        yield f"min-match {tolerance}:{least:g}", lambda row, t=tolerance, p=least: _off(row, t, p)  # type: ignore[misc]
    if gates.max_rms_ratio is not None:
        yield f"max-rms-ratio {gates.max_rms_ratio:g}", lambda row: _inexact(row, gates.max_rms_ratio or 0.0)


def _broken(gate: str, check: Check, judged: list[Row]) -> Iterator[Broken]:
    if not judged:
        yield Broken(gate=gate, row="", found="no case passed that it could judge")
    for row in judged:
        if found := check(row):
            yield Broken(gate=gate, row=row.name, found=found)


def _slower(row: Row, least: float) -> str:
    if row.time is None:
        return "not timed"
    if row.over_baseline is None:
        return "its baseline was not timed"
    ratio, _ = row.over_baseline
    return "" if ratio >= least else f"{ratio:.5g}x over {row.baseline}"


def _off(row: Row, tolerance: str, least: float) -> str:
    found = row.out.match_pct(TOLERANCE_NAMES[tolerance]) if row.out else None
    if found is None:
        return "not compared with a baseline"
    return "" if found >= least else f"{found:.6g}%"


def _inexact(row: Row, most: float) -> str:
    if row.out is None:
        return "not compared with the fp64 oracle"
    if row.out.over_floor is None:
        return "" if row.out.rms_ratio == 0 else "the floor is 0"
    return "" if row.out.over_floor <= most else f"{row.out.over_floor:.5g} times the floor"
