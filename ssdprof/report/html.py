"""A report, and its stalls if there are any, as one self-contained HTML file."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport
from ssdprof.report import plots
from ssdprof.report import stalls as of_stalls
from ssdprof.report.document import ACCURACY, SPEED, compose
from ssdprof.report.facts import when
from ssdprof.report.groups import Group, groups, pool
from ssdprof.report.table import Figure, Note, Section, Table, section

_POWER = re.compile(r"\d[\d.]*e-\d+")
_LAYERED = 3  # lengths with a heat map and a plot of positions; the tables have all
_UNITS = {
    "µs": 1.0, "ms": 1e3, "s": 1e6,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_NUMBER = re.compile(r"<?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?:\s*([A-Za-zµ%]+))?(?:\s*\[.*\])?$")
_TONES = {
    "faster": "good", "passed": "good", "yes": "good", "ok": "good",
    "slower": "bad", "inaccurate": "bad", "nonfinite": "bad", "failed": "bad", "out of memory": "bad",
}  # fmt: skip


_KINDS = {Table: "table", Note: "note", Figure: "figure", str: "text"}

Block = tuple[str, object]  # kind, by which the template draws it, and content
Picture = tuple[str, Markup, bool]  # title, SVG, and whether the picture is wide and includes its title
PagePart = dict[str, object]  # title, anchor, blocks, folded (collapsed under its title), level


def render(report: Report, stalls: StallReport | None = None) -> str:
    """One HTML file.  stalls: the stall report in the run's folder."""
    document, numbers, found = compose(report), count(1), groups(report)
    extra = {SPEED: _speed(report, found, numbers), ACCURACY: _accuracy(found[:_LAYERED], numbers)}
    parts = [_part(one, extra.get(one.title, ())) for one in document.sections]
    parts += _stalls(stalls, numbers) if stalls else ()
    seen: Counter[object] = Counter()
    for part in parts:  # the stall report may have a section with the same title as the run's report
        seen[anchor := part["anchor"]] += 1
        part["anchor"] = anchor if seen[anchor] == 1 else f"{anchor}-{seen[anchor]}"
    environment = Environment(
        loader=PackageLoader("ssdprof.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"unbroken": _unbroken, "key": sort_key, "tone": tone}
    environment.tests["sortable"] = sortable
    return environment.get_template("page.html.j2").render(document=document, parts=parts)


def _part(section: Section, extra: Iterable[Block] = (), *, level: int = 2, folded: bool = False) -> PagePart:
    blocks = [*extra, *((_KINDS[type(block)], block) for block in section.blocks)]
    anchor = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
    folded = folded or section.depth != "main"
    return {"title": section.title, "anchor": anchor, "blocks": blocks, "folded": folded, "level": level}


def _unbroken(text: str) -> Markup:
    """Prevent line breaks within numbers such as "1e-3"."""
    return Markup(_POWER.sub(r'<span class="unbroken">\g<0></span>', str(escape(text))))


# --- pictures


def _pictures(
    numbers: Iterator[int], found: Iterable[tuple[str, str | None]], *, titled: bool = False
) -> Iterator[Block]:
    """One block of those that there are.  numbers: make their ids unique."""
    shown: list[Picture] = [
        (title, Markup(inline(svg, f"p{next(numbers)}-", title)), titled) for title, svg in found if svg is not None
    ]
    if shown:
        yield "pictures", shown


def _speed(report: Report, found: Sequence[Group], numbers: Iterator[int]) -> Iterator[Block]:
    made = {
        "Speedup": plots.speedups(found),
        "Device time": plots.device_times(found),
        "Roofline of the operator": plots.roofline(report, found),
    }
    yield from _pictures(numbers, made.items())


def _accuracy(found: Sequence[Group], numbers: Iterator[int]) -> Iterator[Block]:
    yield from [("heat", heat) for group in found for name in group.compared if (heat := heat_map(group, name))]
    made: list[tuple[str, str | None]] = []
    along: dict[str | None, str] = {None: "the prompt", "packed": "the sequences"}
    for group in found:
        where = along.get(group.call.kind if group.call else None, "a chunk")
        made.append((f"Error along {where}, worst layer, {group.size}", plots.along_positions(group)))
        made.append((f"Largest error of each layer, {group.size}", plots.largest_errors(group)))
    yield from _pictures(numbers, made)


def _stalls(stalls: StallReport, numbers: Iterator[int]) -> Iterator[PagePart]:
    document = of_stalls.compose(stalls)
    recorded = (f"Profiled {when(stalls.created)}: {document.title}.",) if stalls.created else ()
    said = (*(line.text for line in document.verdict), *document.caveats, *recorded)
    pictures = _pictures(numbers, plots.of_stalls(stalls).values(), titled=True)
    yield _part(section("Warp stalls"), [*(("text", line) for line in said), *pictures])
    if document.summary:
        yield _part(section("Stalls in words"), [("list", document.summary)], folded=True, level=3)
    for one in document.sections:
        yield _part(one, level=3, folded=one.title != "Hints")


def inline(svg: str, prefix: str, title: str) -> str:
    """An <svg> element for the body of a page, with the page's text colour for black.

    prefix: of every id, so that pictures on one page share none.  title: for screen readers.
    """
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        for child in [child for child in element if _local(child.tag) in ("metadata", "title")]:
            element.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(name): _value(_local(name), text, prefix) for name, text in element.attrib.items()}
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    width = float(root.attrib["viewBox"].split()[2]) * 4 / 3  # from points of 1/72 inch to the page's pixels
    root.attrib |= {"role": "img", "style": f"max-width: {width:.0f}px"}
    name = ElementTree.Element("title")
    name.text = title
    root.insert(0, name)
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _value(name: str, text: str, prefix: str) -> str:
    if name == "id":
        return prefix + text
    if name == "href":
        return text.replace("#", f"#{prefix}", 1)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    colors = {"#000000": "currentColor", "#ffffff": "none"}
    return re.sub(r"#[0-9a-f]{6}", lambda found: colors.get(found[0], found[0]), text)


# --- tables


def sortable(table: Table) -> bool:
    """Whether the page may sort its rows: they are not under headings, and a cell has a number."""
    numbers = any(sort_key(cell) for row in table.rows for cell in row)
    return len(table.rows) > 1 and not table.headings and numbers


def sort_key(text: str) -> str:
    """The number at the start of a cell, in its smallest unit, if there is one: "12.4 ms" -> "12400.0"."""
    found = _NUMBER.fullmatch(text.strip())
    return repr(float(found[1].replace(",", "")) * _UNITS.get(found[2] or "", 1.0)) if found else ""


def tone(text: str) -> str:
    """ "good", "bad" or none."""
    return "bad" if text.startswith("NO") else _TONES.get(text, "")


# --- accuracy as a heat map: layers by precisions


def heat_map(group: Group, implementation: str) -> dict[str, Any] | None:
    """RMS error of the output against fp64, coloured on a logarithmic scale.  None if nothing was compared.

    rows: layer, cells, floor.  A cell is its text, heat from 0 to 1, the place of the largest error in words, and
    whether it failed.
    """
    series = group.series(implementation)
    errors = [error for one in series for case in one.cases if (error := _rms(case)) and error < math.inf]
    if not errors:
        return None
    low = min(errors)
    high = max(*errors, 2 * low)  # nearly equal errors have nearly equal colours
    rows = []
    for layer in group.layers:
        there = group.at_layer(layer)
        limit = pool(there.cases, "out", "floor")
        own = grouped(there.cases, lambda case: (case.implementation, case.precision))
        cells = [_cell(own.get((implementation, one.precision), ()), low, high) for one in series]
        rows.append((str(layer.index), cells, fmt.small(limit.rms_ratio if limit else None)))
    return {
        "title": f"Rms error of {implementation}'s output against fp64 {group.where}",
        "columns": [str(one.precision) for one in series],
        "rows": rows,
        "note": f"Colour: from {fmt.small(low)} (none) to {fmt.small(high)} (full), logarithmic.  A cell's tooltip "
        "names the worst head and the place of the largest error.",
    }


def _cell(cases: Sequence[Case], low: float, high: float) -> tuple[str, float, str, bool]:
    """The chunks or steps of a layer share a cell: one that failed, else the one with the largest error."""

    def badness(case: Case) -> tuple[bool, bool, float]:
        out = case.tensor("out")
        return out is None and case.failed, bool(out and out.reason), _rms(case) or 0.0

    case = max(cases, key=badness, default=None)
    if case is None:
        return fmt.MISSING, 0.0, "not compared", False
    error, out = _rms(case), case.tensor("out")
    if error is None or out is None:
        return case.result, 0.0, case.why, case.failed
    place = out.vs_oracle
    heat = 1.0 if error == math.inf else math.log(error / low) / math.log(high / low) if error > low else 0.0
    call = f"{case.call}, " if case.call else ""
    hover = (
        f"{case.where}, {call}{case.precision}: worst head {place.worst_head}; largest error "
        f"{fmt.small(place.max_abs)} of values up to {fmt.small(place.scale_max_abs)} at "
        f"{fmt.position(place.worst_position)}"
    )
    return fmt.small(error), heat, f"{hover}; {case.why}" if case.why else hover, bool(out.reason)


def _rms(case: Case) -> float | None:
    """None if it was not compared."""
    if case.error is None:
        return None
    return math.inf if case.error.rms_ratio is None else case.error.rms_ratio
