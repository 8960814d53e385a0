"""The two tables of the screen: one row for each length, compared implementation and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.report.groups import Group, Series
from ssdprof.report.pooled import Pooled, pool
from ssdprof.report.tables.accuracy import floor, vs_baseline, vs_oracle
from ssdprof.report.tables.table import Table, columns
from ssdprof.report.total_speed import total_speed

_MOST_ROWS = 6

Cells = tuple[str, ...]


def speed(found: Sequence[Group]) -> Table | None:
    """Speeds; None if nothing was timed."""
    found = [group for group in found if any(_rows([group], _speed))]
    rows = list(_rows(found, _speed))
    if not rows:
        return None
    headers = (
        "speedup,\ndevice",
        "verdict",
        "speedup,\ncall",
        "device\ntime",
        f"{_baseline(found)},\ndevice",
        "% of\nroof",
    )
    return _table("Speed", found, headers, rows)


def accuracy(found: Sequence[Group]) -> Table | None:
    """Accuracy of the outputs; None if nothing was compared."""
    found = [group for group in found if any(_rows([group], _accuracy))]
    rows = list(_rows(found, _accuracy))
    if not rows:
        return None
    headers = (
        "within\nbudget", f"equal to\n{_baseline(found)}", "within\n1e-3", "rms error\nvs fp64", "floor",
        "largest\nerror", "largest\nvalue",
    )  # fmt: skip
    return _table("Accuracy of the output", found, headers, rows)


def _table(title: str, found: Sequence[Group], headers: Cells, rows: list[tuple[Cells, Cells]]) -> Table:
    """A table whose title has the values equal in all rows.  A second column of names replaces the last number."""
    names = ("tokens", "implementation", "precision")
    layers = {len(group.layers) for group in found}
    where = [fmt.plural(layers.pop(), "layer")] if len(layers) == 1 else []
    kept = [i for i, _ in enumerate(names) if len({keys[i] for keys, _ in rows}) > 1 or i == len(names) - 1]
    same = [rows[0][0][i] for i in range(len(names)) if i not in kept]
    if 0 not in kept:
        same[0] = found[0].size
    headers = headers if len(kept) == 1 else headers[:-1]
    hidden = len(rows) - _MOST_ROWS
    return Table(
        title=", ".join([title, *same, *where]),
        headers=(*(names[i] for i in kept), *headers),
        rows=tuple((*(keys[i] for i in kept), *cells[: len(headers)]) for keys, cells in rows[:_MOST_ROWS]),
        align=columns(len(kept), len(headers)),
        note=f"{fmt.plural(hidden, 'more row')}: --full, or the exported report." if hidden > 0 else "",
        keys=len(kept),
    )


def _rows(found: Sequence[Group], cells: Callable[[Group, Series], Cells | None]) -> Iterator[tuple[Cells, Cells]]:
    whole = len({group.tokens for group in found}) > 1
    for group in found:
        for name in group.compared:
            for series in group.series(name):
                if shown := cells(group, series):
                    yield (_where(group, whole=whole), series.name, series.precision.short), shown


def _baseline(found: Sequence[Group]) -> str:
    """The one of decode steps is another."""
    names = {group.baseline for group in found}
    return names.pop() if len(names) == 1 else "baseline"


def _where(group: Group, *, whole: bool) -> str:
    """ "16,384", "chunks of 8,192", "steps after 16,384".  whole: name the prompt of chunks, too: "8,192 of 16,384"."""
    if group.call is not None and group.call.kind == "chunk":
        size = fmt.tokens(group.seqlen, group.batch).removesuffix(" tokens")
        return f"{size} of {group.tokens}".removesuffix(" tokens") if whole else f"chunks of {size}"
    tokens = group.tokens.removesuffix(" tokens")
    return f"steps after {tokens}" if group.steps else tokens


def _speed(group: Group, series: Series) -> Cells | None:
    found = total_speed(series)
    if found is None:
        return None
    original = group.baseline_of(series)
    theirs = total_speed(original) if original else None
    return (
        fmt.speedup(found.device.ratio, found.device.interval),
        found.device.verdict or fmt.MISSING,
        fmt.ratio(found.call.ratio),
        fmt.duration(found.device.us),
        fmt.duration(theirs.device.us if theirs and theirs.layers == found.layers else None),
        fmt.percent(found.floor_pct, 1),
    )


def _accuracy(_group: Group, series: Series) -> Cells | None:
    ours = pool(series.cases, "out", vs_oracle)
    if ours is None:
        return None
    against, limit = pool(series.cases, "out", vs_baseline), pool(series.cases, "out", floor)
    return (
        "yes" if all(accuracy.passed for case in series.cases for accuracy in case.accuracy) else "NO",
        *(fmt.percent(_match(against, tolerance)) for tolerance in (0.0, 1e-3)),
        fmt.small(ours.rms_ratio),
        fmt.small(limit.rms_ratio if limit else None),
        fmt.small(ours.max_abs),
        fmt.small(ours.scale_max_abs),
    )


def _match(pooled: Pooled | None, tolerance: float) -> float | None:
    return pooled.match_pct(tolerance) if pooled else None
