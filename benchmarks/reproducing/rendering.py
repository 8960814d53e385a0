"""Renders a result as Markdown and as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from textwrap import fill
from typing import TYPE_CHECKING

from tabulate import tabulate

from reproducing import judging
from reproducing.judging import Verdict
from reproducing.published import Figure, Published
from reproducing.result import Result
from ssdprof.report.plots import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

LONGEST_LABEL = 64  # characters on a line of a figure's label
TOKENS = re.compile(r"([\d,]+) x ([\d,]+)")
VALUE = re.compile(r"(\w+)(?:\[(.+)\])?")
Series = list[tuple[str, float]]  # keys and numbers of a value


def as_markdown(document: Published, result: Result, sections: Mapping[str, str] | None = None) -> str:
    """Claims first, then numbers, then choices, then missing measurements.

    sections: sections of a runner: title -> Markdown, empty for a section without content.
    """
    shown = document.runner or (document.figure and _drawn(document.figure, result))
    parts = [
        f"# {document.title}",
        f"{document.source}  Quoted from {document.gpu}; measured on {result.gpu}.",
        " ".join(result.origin),
        *([f"![{document.title}]({result.name}.svg)"] if shown else []),
        *(["## Wrong outputs", _list(result.wrong)] if result.wrong else []),
        "## Claims",
        claims_table(document, result),
        *_notes(judging.claims(document, result.values, result.gpu)),
        *_numbers(document, result),
        *_rest_of_values(document, result),
        "## What the source leaves open, and what was chosen",
        _list(document.choices),
        *(part for title, text in (sections or {}).items() if text for part in (f"## {title}", text)),
        *(["## Not measured", _list(_missing(result))] if result.missing else []),
        _how(result),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _how(result: Result) -> str:
    """The machine, the time, and the command."""
    stored = result.stored
    holders = (stored, *stored.get("reports", {}).values())
    machine = next((one["environment"] for one in holders if "environment" in one), {"gpu": None, "packages": {}})
    gpu, packages = machine["gpu"] or {}, machine["packages"]
    versions = {"driver": gpu.get("driver"), "CUDA": gpu.get("cuda"), "Python": machine.get("python")}
    versions |= {name: packages.get(name.lower()) for name in ("torch", "Triton")}
    words = [result.gpu, *(f"{name} {version}" for name, version in versions.items() if version)]
    made = f"{stored.get('created', '')}; {stored.get('seconds', '')} s; `{stored.get('command', '')}`"
    return f"{', '.join(words)}; {made}."


def claims_table(document: Published, result: Result) -> str:
    found = judging.claims(document, result.values, result.gpu)
    return _table(
        ("claim", "measured", "quoted", "verdict"),
        [(one.claim, one.measured, one.quoted, one.verdict) for one in found],
    )


def as_picture(document: Published, result: Result) -> str | None:
    """SVG; None if the document has no figure, or if none of its values was measured."""
    figure = document.figure
    if figure is None:
        return None
    drawn = _drawn(figure, result)
    if not drawn:
        return None
    return canvas.draw(partial(_paint, figure=figure, drawn=drawn, quoted=_quoted(document)), _size(drawn))


def _drawn(figure: Figure, result: Result) -> dict[str, Series]:
    return {name: series for name in figure.values if (series := _series(name, result))}


def _numbers(document: Published, result: Result) -> Iterator[str]:
    groups = judging.numbers(document, result.values, result.gpu)
    if groups:
        yield "## Numbers"
    for group, found in groups:
        yield f"### {group.words}"
        further = {name: dict(series) for name in group.beside if (series := _series(name, result))}
        rows = [
            (
                one.claim,
                one.measured,
                one.quoted,
                one.verdict,
                *(_shown(own.get(one.claim)) for own in further.values()),
            )
            for one in found
        ]
        yield _table(("", "measured", "quoted", "verdict", *further), rows)
        inside = f"Inside: within {group.within_pct:g} % of the quoted number." if group.value else ""
        yield " ".join(filter(None, (inside, group.note)))


def _rest_of_values(document: Published, result: Result) -> Iterator[str]:
    """Values by cell without a quoted number: a column for each value, or a row if there are more values than cells."""
    names = {one.name: one.unit for one in document.value}
    compared = {name for group in document.numbers for name in (group.value, *group.beside)}
    found = {name: dict(series) for name in names if name not in compared and (series := _series(name, result))}
    columns = {name: series for name, series in found.items() if "" not in series}
    for keys in dict.fromkeys(tuple(series) for series in columns.values()):
        alike = {name: series for name, series in columns.items() if tuple(series) == keys}
        yield "## Measured"
        if len(alike) > len(keys):
            own = [(f"{name} [{names[name]}]", *map(judging.number, series.values())) for name, series in alike.items()]
            yield _table(("", *keys), own)
            continue
        rows = [(key, *(judging.number(series[key]) for series in alike.values())) for key in keys]
        yield _table(("", *(f"{name} [{names[name]}]" for name in alike)), rows)


def _shown(number: float | None) -> str:
    return "" if number is None else judging.number(number)


def _series(name: str, result: Result) -> Series:
    """Numbers of a value by key, "" if it has none."""
    parsed = ((VALUE.fullmatch(full), number) for full, number in result.values.items())
    return [(match[2] or "", number) for match, number in parsed if match and match[1] == name]


def _quoted(document: Published) -> dict[str, dict[str, float]]:
    return {group.value: group.quoted for group in document.numbers}


def _keys(drawn: Mapping[str, Series]) -> list[str]:
    return list(dict.fromkeys(key for series in drawn.values() for key, _ in series))


def _size(drawn: Mapping[str, Series]) -> tuple[float, float]:
    """Width and height in inches."""
    keys = _keys(drawn)
    return 10, 5 if _are_lengths(keys) else 1.5 + 0.22 * max(len(keys), len(drawn))


def _are_lengths(keys: Sequence[str]) -> bool:
    return len(keys) > 1 and all(map(TOKENS.fullmatch, keys))


def _paint(picture: Picture, figure: Figure, drawn: dict[str, Series], quoted: dict[str, dict[str, float]]) -> None:
    axes = canvas.plain(picture)
    if _are_lengths(_keys(drawn)):
        if figure.band:
            axes.axhspan(*figure.band, color=canvas.GREY, alpha=0.2, label="quoted range")
        _lines(axes, drawn)
        axes.set_ylabel(figure.axis)
    else:
        _points(axes, drawn, quoted)
        axes.set_xlabel(figure.axis)
    canvas.legend_below(picture, columns=4)


def _lines(axes: Axes, drawn: Mapping[str, Series]) -> None:
    """Plots over the length: a colour for each value, a marker for each batch."""
    batches = {name: _by_batch(series) for name, series in drawn.items()}
    markers = dict(zip(sorted({batch for found in batches.values() for batch in found}), cycle("os^Dv*P")))
    for color, (name, found) in zip(canvas.COLORS, batches.items(), strict=False):
        axes.plot([], [], color=color, label=name)
        for batch, points in found.items():
            axes.plot(*zip(*points, strict=True), color=color, marker=markers[batch], markersize=4, linewidth=1)
    for batch, marker in markers.items():
        axes.plot([], [], marker, color=canvas.GREY, markersize=4, label=f"batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a sequence")


def _points(axes: Axes, drawn: dict[str, Series], quoted: Mapping[str, Mapping[str, float]]) -> None:
    """Plots a line for each key, from the top; crosses are quoted numbers."""
    keys = _keys(drawn)
    if keys == [""]:  # every value is one number
        keys, drawn = list(drawn), {"measured": [(name, series[0][1]) for name, series in drawn.items()]}
    for color, (name, series) in zip(canvas.COLORS, drawn.items(), strict=False):
        places = [keys.index(key) for key, _ in series]
        axes.plot([number for _, number in series], places, "o", color=color, label=name, markersize=4)
        crosses = [(number, keys.index(key)) for key, number in quoted.get(name, {}).items() if key in keys]
        if crosses:
            axes.plot(*zip(*crosses, strict=True), "x", color=color, label=f"{name}, quoted", markersize=5)
    axes.set_yticks(range(len(keys)), [fill(key, LONGEST_LABEL) for key in keys], fontsize=8)
    axes.grid(axis="y", color=canvas.GREY, alpha=0.2, linewidth=0.5)
    axes.invert_yaxis()


def _by_batch(series: Series) -> dict[int, list[tuple[int, float]]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for key, number in series:
        match = TOKENS.fullmatch(key)
        assert match is not None
        batch, length = (int(word.replace(",", "")) for word in match.groups())
        found.setdefault(batch, []).append((length, number))
    return {batch: sorted(points) for batch, points in sorted(found.items())}


def _notes(found: Iterable[Verdict]) -> Iterator[str]:
    notes = [f"{one.claim}: {words}" for one in found for words in (one.note, one.reason) if words]
    if notes:
        yield _list(notes)


def _missing(result: Result) -> list[str]:
    return [f"{what}: {why}" if why else what for what, why in result.missing.items()]


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("_", "\\_") for cell in row] for row in rows]
    return tabulate(cells, [word.replace("_", "\\_") for word in head], "pipe", disable_numparse=True)
