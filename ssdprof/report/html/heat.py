"""Accuracy as a heat map: layers by precisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ssdprof.core import words as fmt
from ssdprof.report.groups import Group
from ssdprof.report.pooled import nan_is_worst, pool
from ssdprof.report.tables.accuracy import floor
from ssdprof.schema import CaseResult, LayerRef, TensorAccuracy


@dataclass(frozen=True)
class HeatCell:
    """heat: 0 to 1.  hover: the place of the largest error, as text."""

    text: str
    heat: float
    hover: str
    failed: bool


@dataclass(frozen=True)
class HeatRow:
    layer: str
    floor: str
    cells: tuple[HeatCell, ...]


@dataclass(frozen=True)
class HeatMap:
    title: str
    columns: tuple[str, ...]
    rows: tuple[HeatRow, ...]
    note: str


def heat_map(group: Group, implementation: str) -> HeatMap | None:
    """RMS error of the output against fp64, coloured on a logarithmic scale.  None if nothing was compared."""
    series = group.series(implementation)
    errors = [
        error for one in series for case in one.cases if (error := _rms(case)) is not None and 0 < error < math.inf
    ]
    if not errors:
        return None
    low = min(errors)
    high = max(*errors, 2 * low)  # nearly equal errors have nearly equal colours
    return HeatMap(
        title=f"Rms error of {implementation}'s output against fp64 {group.where}",
        columns=tuple(str(one.precision) for one in series),
        rows=tuple(
            HeatRow(
                layer=str(layer.index),
                floor=fmt.small(_floor(group, layer)),
                cells=tuple(
                    _cell(_worst([case for case in one.cases if case.layer.index == layer.index]), low, high)
                    for one in series
                ),
            )
            for layer in group.layers
        ),
        note=f"Colour: from {fmt.small(low)} (none) to {fmt.small(high)} (full), logarithmic.  A cell's tooltip names "
        "the worst head and the place of the largest error.",
    )


def _worst(cases: Sequence[CaseResult]) -> CaseResult | None:
    """One that failed, else the one with the largest error: the chunks or steps of a layer share a cell."""

    def badness(case: CaseResult) -> tuple[bool, bool, float]:
        out, error = _out(case), _rms(case)
        failed = case.status not in ("passed", "refused")
        return out is None and failed, out is not None and not out.passed, nan_is_worst(error or 0.0)

    return max(cases, key=badness, default=None)


def _cell(case: CaseResult | None, low: float, high: float) -> HeatCell:
    if case is None:
        return HeatCell(fmt.MISSING, 0.0, "not compared", failed=False)
    error = _rms(case)
    out = _out(case)
    if error is None or out is None:
        return HeatCell(case.status, 0.0, case.reason, failed=case.status not in ("passed", "refused"))
    place = out.vs_oracle
    heat = 1.0 if not error < math.inf else _share(error, low, high)
    scale = f" of values up to {fmt.small(place.scale_max_abs)}" if place.scale_max_abs is not None else ""
    call = f"{case.call}, " if case.call else ""
    hover = (
        f"layer {case.layer.index}, {call}{case.precision}: worst head {place.worst_head}; largest error "
        f"{fmt.small(place.max_abs)}{scale} at {fmt.position(place.worst_position)}"
    )
    return HeatCell(fmt.small(error), heat, f"{hover}; {case.reason}" if case.reason else hover, failed=not out.passed)


def _share(error: float, low: float, high: float) -> float:
    return math.log(error / low) / math.log(high / low) if error > low else 0.0


def _floor(group: Group, layer: LayerRef) -> float | None:
    pooled = pool(group.at_layer(layer).cases, "out", floor)
    return pooled.rms_ratio if pooled else None


def _rms(case: CaseResult) -> float | None:
    out = _out(case)
    return out.vs_oracle.rms_ratio if out else None


def _out(case: CaseResult) -> TensorAccuracy | None:
    return next((accuracy for accuracy in case.accuracy if accuracy.tensor == "out"), None)
