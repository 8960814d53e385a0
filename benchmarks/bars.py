"""Judges results by the bars of bars-ssd.toml and bars-gdn.toml, cell by cell.

If several results have a cell, the least ratio of those with the newest kernels counts, so that no
bar holds because another library was slow once.  A case that ran and was not timed (wrong or
refused) has missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from recorded import Cell, RecordedCase

FLOOR = "floor"
KINDS = ("device", "call", "error")
Key = tuple[str, str, str, str]  # shape, tokens, dtype, draw
Cells = Mapping[Key, Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A speedup; None if it was not measured, 0 if the case that must be fast failed."""

    cell: str
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A bar and its measurements.  must, goal: least ratios."""

    name: str
    what: str
    must: float
    goal: float | None
    readings: tuple[Reading, ...]

    @property
    def unmeasured(self) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.ratio is None)

    @property
    def missed(self) -> tuple[Reading, ...]:
        return tuple(
            reading
            for reading in self.readings
            if reading.ratio is not None and reading.ratio < self.must
        )

    @property
    def holds(self) -> bool:
        return not self.missed and not self.unmeasured

    @property
    def least(self) -> Reading | None:
        return min(
            (one for one in self.readings if one.ratio is not None),
            key=lambda one: one.ratio or 0,
            default=None,
        )

    @property
    def at_goal(self) -> int:
        return sum(
            reading.ratio is not None and reading.ratio >= (self.goal or 0)
            for reading in self.readings
        )


def check(bars: Mapping[str, Any], cells: Sequence[Cell]) -> tuple[Finding, ...]:
    found = [*findings(bars, by_inputs(cells))]
    if "first_call" in bars:
        found.append(first_calls(bars["first_call"], cells))
    return tuple(found)


def by_inputs(cells: Iterable[Cell]) -> dict[Key, list[Cell]]:
    """Every measurement of the same inputs, the newest last."""
    found: dict[Key, list[Cell]] = {}
    for cell in sorted(cells, key=lambda one: one.bench.created):
        one = cell.one
        found.setdefault((one.shape, one.tokens, one.dtype, " ".join(one.ways)), []).append(cell)
    return found


def findings(bars: Mapping[str, Any], cells: Cells) -> Iterator[Finding]:
    """One finding for each kind of amount in a bar."""
    for bar in bars["bar"]:
        for kind in KINDS:
            if kind in bar:
                yield Finding(
                    name=bar["name"],
                    what=f"as {_named(bar['over'])}, {kind}",
                    must=bar[kind].get("must", 0.0),
                    goal=bar[kind].get("goal"),
                    readings=tuple(_readings(bar, kind, cells)),
                )


def _named(over: str | float) -> str:
    return over if isinstance(over, str) else f"{over:,.0f} us"


def _readings(bar: Mapping[str, Any], kind: str, cells: Cells) -> Iterator[Reading]:
    for shape, tokens, ways in product(bar["shapes"], bar["tokens"], bar.get("ways", [""])):
        name = f"{shape}, {tokens}{', ' if ways else ''}{ways}"
        measured = cells.get((shape, tokens, bar.get("dtype", "bf16"), ways), ())
        readings = [
            (cell.bench.kernels, Reading(cell=name, ratio=ratio))
            for cell in measured
            if cell.one.checked is None or not bar.get("checked_in_full")
            for ratio in _ratio(cell, bar, kind)
        ]
        counted = [reading for kernels, reading in readings if kernels == readings[-1][0]]
        yield min(counted, key=lambda one: one.ratio or 0, default=Reading(cell=name, ratio=None))


def _ratio(cell: Cell, bar: Mapping[str, Any], kind: str) -> Iterator[float]:
    """The cell's ratio; nothing if it was not measured."""
    own, over = _amounts(cell, bar["of"], kind), bar["over"]
    if math.inf in own:
        yield 0.0
        return
    if not isinstance(over, str):
        others = [float(over)]
    elif over == FLOOR:
        others = [case.floor_us for case in cell.cases if case.fits(bar["of"]) and case.floor_us]
    else:
        others = _amounts(cell, over, kind)
    if own and (other := min(others, default=math.inf)) < math.inf:
        yield other / min(own)


def _amounts(cell: Cell, words: str, kind: str) -> list[float]:
    """Microseconds, or the output's error, of each case that the words describe; infinite for one
    without a time.
    """
    return [_amount(case, kind) for case in cell.cases if case.fits(words)]


def _amount(case: RecordedCase, kind: str) -> float:
    if case.device_us is None or case.call_us is None or "out" not in case.errors:
        return math.inf
    return {
        "device": case.device_us[0],
        "call": case.call_us[0],
        "error": case.errors["out"].rms_ratio,
    }[kind]


def first_calls(rule: Mapping[str, Any], cells: Iterable[Cell]) -> Finding:
    """Every kernel of ours that a first call had to compile; the ratio is allowed over measured
    seconds.
    """
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
