"""Tables of accuracy: one column per precision, as in the article on the fused SSD kernel, and fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.report.groups import Group, Series, baselines
from ssdprof.report.pooled import Pooled, TensorName, pool
from ssdprof.report.tables.table import Note, Table, columns
from ssdprof.schema import TOLERANCES, Deviation, PrecisionRecord, TensorAccuracy

TENSORS: tuple[TensorName, ...] = ("out", "final_states")
READING = Note(
    "Match: share of elements with |a - b| <= atol + rtol |b|, rounded down.  Rms error: rms(a - b) / rms(b).  Floor: "
    "how the fp64 answer itself scores once it is rounded; no implementation can do better."
)
_SHOWN = {"out": "output", "final_states": "final states"}


def vs_baseline(accuracy: TensorAccuracy) -> Deviation | None:
    return accuracy.vs_baseline


def vs_oracle(accuracy: TensorAccuracy) -> Deviation | None:
    return accuracy.vs_oracle


def floor(accuracy: TensorAccuracy) -> Deviation | None:
    return accuracy.floor


def match(group: Group, implementation: str, tensor: TensorName) -> Table | None:
    """Match percentages and errors of one tensor, all layers of the group pooled; None if nothing was compared.

    For the baseline itself, the columns are its other precisions, compared with its exact one.
    """
    against = vs_baseline if implementation == group.baseline else vs_oracle
    series = tuple(s for s in group.series(implementation) if pool(s.cases, tensor, against))
    if not series:
        return None
    several = group.calls > 1
    worst = ", worst layer" if group.calls == len(group.layers) else ", worst call"
    rows: list[tuple[str, ...]] = [
        ("within the error budget", *(_budget(s, tensor) for s in series), ""),
        ("kernel", *(s.variant for s in series), ""),
    ]
    headings = set()
    for title, pooled, beside in _comparisons(group, series, tensor):
        if any(pooled):
            headings.add(len(rows))
            rows.append((title, *[""] * (len(series) + 1)))
            rows += _block(pooled, beside, worst * several)
    layers = f"{group.extent}{' pooled' * several}"
    return Table(
        title=f"Accuracy of {implementation}'s {_SHOWN[tensor]} {group.where}, {layers}",
        headers=("", *(_header(s.precision) for s in series), "floor"),
        rows=tuple(rows),
        align=columns(1, len(series) + 1),
        note=_note(series, group, tensor),
        headings=frozenset(headings),
    )


def by_layer(group: Group, implementation: str) -> Table | None:
    """RMS error of the output against fp64, one row per layer: which layer is the worst?"""
    series = tuple(s for s in group.series(implementation) if pool(s.cases, "out", vs_oracle))
    if not series:
        return None
    rows = []
    for layer in group.layers:
        own = [[case for case in s.cases if case.layer.index == layer.index] for s in series]
        cells = [pool(cases, "out", vs_oracle) for cases in own]
        limit = pool((case for cases in own for case in cases), "out", floor)
        rows.append((str(layer.index), *(fmt.small(p.rms_ratio if p else None) for p in (*cells, limit))))
    return Table(
        title=f"Rms error of {implementation}'s {_SHOWN['out']} against fp64 in each layer {group.where}",
        note="" if group.calls == len(group.layers) else f"The largest of each layer's {_calls(group)}s.",
        headers=("layer", *(_header(s.precision) for s in series), "floor"),
        rows=tuple(rows),
        align=columns(0, len(series) + 2),
    )


def largest(group: Group, implementation: str) -> Table | None:
    """The largest differences and their positions, over all layers of the group and their chunks or steps."""
    several = group.calls > len(group.layers)
    rows = []
    for tensor in TENSORS:
        for series in group.series(implementation):
            for against, which in (("fp64", vs_oracle), (group.baseline, vs_baseline)):
                pooled = pool(series.cases, tensor, which)
                if pooled is not None:
                    rows.append(_largest_row(_SHOWN[tensor], series, against, pooled, called=several))
    if not rows:
        return None
    return Table(
        title=f"Largest differences of {implementation} {group.where}",
        headers=(
            "tensor", "precision", "against", "largest\nerror", "largest\nvalue", "layer",
            *([_calls(group)] if several else []), "position", "worst head",
        ),
        rows=tuple(rows),
        align=(*columns(3, 3 + several), "left", "right"),
        note="Positions are (row, token, head, channel) in the output and (sequence, head, row, column) in the "
        "final states, counted from 0.",
        keys=3,
    )  # fmt: skip


def _calls(group: Group) -> str:
    """What each of a layer's calls is."""
    return "step" if group.steps else "chunk"


def _comparisons(
    group: Group, series: Sequence[Series], tensor: TensorName
) -> Iterator[tuple[str, list[Pooled | None], Pooled | None]]:
    """Heading, one entry per column, and the floor where there is one."""
    name = series[0].implementation
    limit = pool((case for s in series for case in s.cases), tensor, floor)
    yield f"{name} against {group.baseline}", [pool(s.cases, tensor, vs_baseline) for s in series], None
    yield f"{name} against fp64", [pool(s.cases, tensor, vs_oracle) for s in series], limit
    if name != group.baseline:
        originals = [group.baseline_of(s) for s in series]
        yield (
            f"{group.baseline} against fp64",
            [pool(s.cases, tensor, vs_oracle) if s else None for s in originals],
            limit,
        )


def _block(pooled: Sequence[Pooled | None], beside: Pooled | None, worst: str) -> list[tuple[str, ...]]:
    """worst: ", worst layer" or ", worst call"; empty if there is only one."""

    def row(label: str, cell: Callable[[Pooled], str]) -> tuple[str, ...]:
        return (label, *(cell(p) if p else fmt.MISSING for p in pooled), cell(beside) if beside else "")

    same = worst.replace("worst", "same")
    known = [p for p in (*pooled, beside) if p and p.scale_max_abs is not None]
    return [
        *(
            row(f"match @ atol,rtol={fmt.tolerance(t)}", lambda p, t=t: fmt.percent(p.match_pct(t)))  # type: ignore[misc]
            for t in TOLERANCES
        ),
        row(f"rms error{worst}", lambda p: fmt.small(p.rms_ratio)),
        row(f"largest error{worst}", lambda p: fmt.small(p.max_abs)),
        *([row(f"largest value{same}", lambda p: fmt.small(p.scale_max_abs))] if known else []),
    ]


def _budget(series: Series, tensor: TensorName) -> str:
    judged = [a.passed for case in series.cases for a in case.accuracy if a.tensor == tensor]
    if all(judged):
        return "yes"
    return "NO" if len(judged) == 1 else f"NO: {judged.count(False)}/{len(judged)}"


def _header(precision: PrecisionRecord) -> str:
    return f"{precision.intermediates},\n{precision.state_dtype}\nstates"


def _note(series: Sequence[Series], group: Group, tensor: TensorName) -> str:
    dtypes = dict.fromkeys(case.dims.dtype for s in series for case in s.cases)
    pairs = [
        (s.precision, a.vs_baseline.against)
        for s in series
        for case in s.cases
        for a in case.accuracy
        if a.tensor == tensor and a.vs_baseline
    ]
    rounded = fmt.words(dtypes) if tensor == "out" else "the dtype in which states are returned"
    return f"Baseline: {baselines(group.baseline, pairs)}.  Floor: fp64 itself, rounded to {rounded}."


def _largest_row(tensor: str, series: Series, against: str, pooled: Pooled, *, called: bool) -> tuple[str, ...]:
    return (
        tensor,
        str(series.precision),
        against,
        fmt.small(pooled.max_abs),
        fmt.small(pooled.scale_max_abs),
        str(pooled.layer.index),
        *([str(pooled.call.number)] if called and pooled.call else []),
        fmt.position(pooled.largest.worst_position),
        str(pooled.largest.worst_head),
    )
