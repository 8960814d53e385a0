"""A report, and its stalls if there are any, as one self-contained HTML file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport
from ssdprof.report import plots
from ssdprof.report import stalls as of_stalls
from ssdprof.report.document import ACCURACY, SPEED, compose
from ssdprof.report.facts import when
from ssdprof.report.groups import Group, groups
from ssdprof.report.table import Document, Section, Table, section, tone

_LAYERED = 3  # lengths with a plot of positions; the tables have all
_UNITS = {
    "µs": 1.0, "ms": 1e3, "s": 1e6,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_NUMBER = re.compile(r"<?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?:\s*([A-Za-zµ%]+))?(?:\s*\[.*\])?$")
_INSIDE = re.compile(r"(?<=\d) (?=(?:[µm]?s|[KMGT]?i?B|[KMGT])\b)|(?<=,) (?=[\d.e-]+\])")
_EXPONENT = re.compile(r"(?<=\de)-(?=\d)")
_KINDS = {Table: "table", str: "note", tuple: "list"}

PageBlock = tuple[str, object]  # kind, by which the template draws it, and content
# title, SVG, its numbers, and whether the picture includes its title
Picture = tuple[str, Markup, Table, bool]
PagePart = dict[str, object]  # title, anchor, blocks, folded (collapsed under its title), level


def of_document(document: Document, stalls: StallReport | None = None) -> str:
    """A document as an HTML file.  stalls: the stall report that it is of, for its pictures."""
    pictures = [_part(section("Pictures"), _stall_pictures(stalls, count(1)))] if stalls else []
    return _page(document, [*map(_part, document.sections), *pictures])


def render(report: Report, stalls: StallReport | None = None) -> str:
    """One HTML file.  stalls: the stall report in the run's folder."""
    document, numbers = compose(report), count(1)
    prompts = () if report.kind == "bench" else groups(report)
    pictures: dict[str, dict[str, plots.Drawing | None]] = {
        SPEED: {
            "Speedup": plots.speedups(prompts),
            "Roofline of the operator": plots.roofline(report, prompts),
        },
        ACCURACY: {
            _title_of_errors(group): plots.along_positions(group) for group in prompts[:_LAYERED]
        },
    }
    parts = [
        _part(section, _pictures(numbers, pictures.get(section.title, {}).items()))
        for section in document.sections
    ]
    if stalls:
        parts += _stalls(stalls, numbers)
    return _page(document, parts)


def _title_of_errors(group: Group) -> str:
    along: dict[str | None, str] = {None: "the prompt", "packed": "the sequences"}
    kind = group.call.kind if group.call else None
    return f"Error along {along.get(kind, 'a chunk')}, worst layer, {group.size}"


def _page(document: Document, parts: Sequence[PagePart]) -> str:
    """Draws the template.  parts: in the order of the page."""
    seen: Counter[object] = Counter()
    # the stall report may have a section with the same title as the run's report
    for part in parts:
        seen[anchor := part["anchor"]] += 1
        part["anchor"] = anchor if seen[anchor] == 1 else f"{anchor}-{seen[anchor]}"
    environment = Environment(
        loader=PackageLoader("ssdprof.report", "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"key": sort_key, "tone": tone, "unbroken": unbroken}
    environment.tests["sortable"] = sortable
    return environment.get_template("page.html.j2").render(document=document, parts=parts)


def unbroken(cell: str) -> str:
    """The text of a cell that wraps between values, not inside of one: "13.2 ms [13.1, 13.3]" has
    two parts.
    """
    return _EXPONENT.sub("\N{NON-BREAKING HYPHEN}", _INSIDE.sub("\N{NO-BREAK SPACE}", cell))


def _part(
    section: Section, extra: Iterable[PageBlock] = (), *, level: int = 2, folded: bool = False
) -> PagePart:
    return {
        "title": section.title,
        "anchor": re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-"),
        "blocks": [*extra, *((_KINDS[type(block)], block) for block in section.blocks)],
        "folded": folded or section.folded,
        "level": level,
    }


# --- pictures


def _pictures(
    numbers: Iterator[int],
    drawings: Iterable[tuple[str, plots.Drawing | None]],
    *,
    titled: bool = False,
) -> Iterator[PageBlock]:
    """One block of those that there are.  numbers: make their ids unique."""
    shown: list[Picture] = [
        (title, Markup(inline(drawing[0], f"p{next(numbers)}-", title)), drawing[1], titled)
        for title, drawing in drawings
        if drawing is not None
    ]
    if shown:
        yield "pictures", shown


def _stalls(stalls: StallReport, numbers: Iterator[int]) -> Iterator[PagePart]:
    document = of_stalls.compose(stalls)
    lines = [line.text for line in document.verdict] + list(document.caveats)
    if stalls.created:
        lines.append(f"Profiled {when(stalls.created)}: {document.title}.")
    yield _part(section("Warp stalls"), [("list", tuple(lines)), *_stall_pictures(stalls, numbers)])
    for part in document.sections:
        yield _part(part, level=3, folded=part.title != "Hints")


def _stall_pictures(stalls: StallReport, numbers: Iterator[int]) -> Iterator[PageBlock]:
    return _pictures(numbers, plots.of_stalls(stalls).values(), titled=True)


def inline(svg: str, prefix: str, title: str) -> str:
    """An <svg> element for the body of a page, with the page's text colour for black.

    prefix: of every id, so that pictures on one page share none.  title: for screen readers.
    """
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        for child in list(element):
            if _local(child.tag) in ("metadata", "title"):
                element.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(name): _value(_local(name), text, prefix)
            for name, text in element.attrib.items()
        }
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    # larger than a telephone's 4/3 pixels per point
    width = float(root.attrib["viewBox"].split()[2]) * 1.7
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
    return re.sub(r"#[0-9a-f]{6}", lambda color: colors.get(color[0], color[0]), text)


# --- tables


def sortable(table: Table) -> bool:
    """Whether the page may sort its rows: a cell has a number."""
    return len(table.rows) > 1 and any(map(sort_key, chain.from_iterable(table.rows)))


def sort_key(text: str) -> str:
    """The number at the start of a cell, in its smallest unit, if there is one: "12.4 ms" ->
    "12400.0".
    """
    parts = _NUMBER.fullmatch(text.strip())
    if parts is None:
        return ""
    number, unit = float(parts[1].replace(",", "")), parts[2] or ""
    return repr(number * _UNITS.get(unit, 1.0))
