"""Judges results by the bars of bars-ssd.toml and bars-gdn.toml, cell by cell.

If several results have a cell, the least ratio of those with the newest kernels counts, so that no bar holds because
another library was slow once.  A case that ran and was not timed (wrong or refused) has missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from recorded import Cell, RecordedCase
from rivals import Rivals

BEST_RIVAL, FLOOR = "best rival", "floor"
KINDS = ("device", "call", "error")
Key = tuple[str, str, str, str]  # shape, tokens, dtype, draw
Cells = Mapping[Key, Sequence[Cell]]
NO_RIVALS = Rivals()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A speedup; None if it was not measured, 0 if the case that must be fast failed.

    rival: the fastest rival, if the speedup is over the fastest.
    """

    cell: str
    ratio: float | None
    rival: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A bar and its measurements.  must, goal: least ratios.  left_out: cells of the bar that were not measured."""

    name: str
    what: str
    must: float
    goal: float | None
    readings: tuple[Reading, ...]
    left_out: int = 0

    @property
    def unmeasured(self) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.ratio is None)

    @property
    def missed(self) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.ratio is not None and reading.ratio < self.must)

    @property
    def holds(self) -> bool:
        return not self.missed and not self.unmeasured

    @property
    def least(self) -> Reading | None:
        return min(
            (one for one in self.readings if one.ratio is not None), key=lambda one: one.ratio or 0, default=None
        )

    @property
    def at_goal(self) -> int:
        return sum(reading.ratio is not None and reading.ratio >= (self.goal or 0) for reading in self.readings)


def check(
    bars: Mapping[str, Any], cells: Sequence[Cell], rivals: Rivals = NO_RIVALS, *, partial: bool = False
) -> tuple[Finding, ...]:
    """partial: judge a bar by its measured cells, if there is one."""
    found = [*findings(bars, by_inputs(cells), rivals)]
    if "first_call" in bars:
        found.append(first_calls(bars["first_call"], cells))
    return tuple(map(_of_measured, found) if partial else found)


def by_inputs(cells: Iterable[Cell]) -> dict[Key, list[Cell]]:
    """Every measurement of the same inputs, the newest last."""
    found: dict[Key, list[Cell]] = {}
    for cell in sorted(cells, key=lambda one: one.bench.created):
        one = cell.one
        found.setdefault((one.shape, one.tokens, one.dtype, " ".join(one.drawn)), []).append(cell)
    return found


def findings(bars: Mapping[str, Any], cells: Cells, rivals: Rivals) -> Iterator[Finding]:
    """One finding for each kind of amount in a bar."""
    for bar in bars["bar"]:
        for kind in KINDS:
            if kind in bar:
                yield Finding(
                    name=bar["name"],
                    what=f"as {_named(bar['over'])}, {kind}",
                    must=bar[kind].get("must", 0.0),
                    goal=bar[kind].get("goal"),
                    readings=tuple(_readings(bar, kind, cells, rivals)),
                )


def _named(over: str | float) -> str:
    return over if isinstance(over, str) else f"{over:,.0f} us"


def _readings(bar: Mapping[str, Any], kind: str, cells: Cells, rivals: Rivals) -> Iterator[Reading]:
    for shape, tokens, drawn in product(bar["shapes"], bar["tokens"], bar.get("drawn", [""])):
        name = f"{shape}, {tokens}{', ' if drawn else ''}{drawn}"
        measured = cells.get((shape, tokens, bar.get("dtype", "bf16"), drawn), ())
        readings = [
            (cell.bench.kernels, Reading(cell=name, ratio=ratio, rival=rival))
            for cell in measured
            if cell.one.checked is None or not bar.get("checked_in_full")
            for ratio, rival in _ratio(cell, bar, kind, rivals)
        ]
        counted = [reading for kernels, reading in readings if kernels == readings[-1][0]]
        yield min(counted, key=lambda one: one.ratio or 0, default=Reading(cell=name, ratio=None))


def _ratio(cell: Cell, bar: Mapping[str, Any], kind: str, rivals: Rivals) -> Iterator[tuple[float, str]]:
    """The cell's ratio and its rival; nothing if it was not measured."""
    own = _amounts(cell, bar["of"], kind)
    if math.inf in own:
        yield 0.0, ""
        return
    other, rival = _yardstick(cell, bar, kind, rivals)
    if own and other < math.inf:
        yield other / min(own), rival


def _yardstick(cell: Cell, bar: Mapping[str, Any], kind: str, rivals: Rivals) -> tuple[float, str]:
    """The amount with which the cell's own is compared; infinite if it was not measured."""
    over = bar["over"]
    if not isinstance(over, str):
        return float(over), ""
    if over == FLOOR:
        floors = [case.floor_us for case in cell.cases if case.fits(bar["of"]) and case.floor_us]
        return min(floors, default=math.inf), ""
    if over == BEST_RIVAL:
        return rivals.best(cell)
    return min(_amounts(cell, over, kind), default=math.inf), ""


def _amounts(cell: Cell, words: str, kind: str) -> list[float]:
    """Microseconds, or the output's error, of each case that the words describe; infinite for one without a time."""
    return [_amount(case, kind) for case in cell.cases if case.fits(words)]


def _amount(case: RecordedCase, kind: str) -> float:
    if case.device_us is None or case.call_us is None or "out" not in case.errors:
        return math.inf
    return {"device": case.device_us[0], "call": case.call_us[0], "error": case.errors["out"].rms_ratio}[kind]


def first_calls(rule: Mapping[str, Any], cells: Iterable[Cell]) -> Finding:
    """Every kernel of ours that a first call had to compile; the ratio is allowed over measured seconds."""
    readings = [
        Reading(cell=f"{kernel} for {case.shape}, {case.tokens}", ratio=rule["seconds"] / seconds)
        for cell in cells
        for case in cell.cases
        if case.implementation in rule["of"]
        for kernel, seconds in case.compiled.items()
    ]
    return Finding(
        name=rule["name"],
        what=f"as {rule['seconds']:g} s, compiling",
        must=1.0,
        goal=None,
        readings=tuple(readings) or (Reading(cell="no kernel had to be compiled", ratio=None),),
    )


def _of_measured(found: Finding) -> Finding:
    measured = tuple(reading for reading in found.readings if reading.ratio is not None)
    left_out = len(found.readings) - len(measured)
    return replace(found, readings=measured, left_out=left_out) if measured else found
