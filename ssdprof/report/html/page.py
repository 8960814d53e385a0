"""A run's report, and its stalls if there are any, as a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ssdprof.report import stall_document
from ssdprof.report.document import ACCURACY, SPEED, Document, Section, compose
from ssdprof.report.groups import Group, groups
from ssdprof.report.html.cells import View, view
from ssdprof.report.html.heat import heat_map
from ssdprof.report.html.svg import inline
from ssdprof.report.origin import when
from ssdprof.report.plots import run as run_plots
from ssdprof.report.plots import stalls as stall_plots
from ssdprof.report.tables import Figure, Note, Table
from ssdprof.report.verdict import GOOD
from ssdprof.schema import RunReport
from ssdprof.schema.stalls import StallReport

_POWER = re.compile(r"\d[\d.]*e-\d+")
_LAYERED = 3  # lengths with a heat map and a plot of positions; the tables have all


@dataclass(frozen=True)
class Picture:
    """titled: the picture is wide and includes its title."""

    title: str
    svg: Markup
    titled: bool = False


@dataclass(frozen=True)
class Block:
    """An element of the page; the template draws it by its kind."""

    kind: str  # "table", "note", "text", "pictures", "heat", "list"
    content: object


@dataclass(frozen=True)
class Part:
    """A section of the page.  folded: collapsed under its title."""

    title: str
    anchor: str
    blocks: tuple[Block, ...]
    folded: bool = False
    level: int = 2


class Pictures:
    """Numbers pictures, so that their ids are unique."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, title: str, svg: str | None, *, titled: bool = False) -> Iterator[Picture]:
        """A block with the picture; none if there is no picture."""
        if svg is not None:
            self._count += 1
            yield Picture(title, Markup(inline(svg, f"p{self._count}-", title)), titled)


def render(report: RunReport, stalls: StallReport | None = None) -> str:
    """One HTML file.  stalls: the stall report in the run's folder."""
    document, pictures = compose(report), Pictures()
    parts = [*_run_parts(report, document, pictures)]
    if stalls is not None:
        parts += _stall_parts(stalls, pictures)
    return _page(document, parts, GOOD, report.ssdprof_version)


def render_document(document: Document, *, good: tuple[str, ...], version: str) -> str:
    """A document without pictures as one HTML file.  good: prefixes of verdict lines without a failure."""
    return _page(document, [_part(section, ()) for section in document.sections], good, version)


def _page(document: Document, parts: Iterable[Part], good: tuple[str, ...], version: str) -> str:
    environment = Environment(
        loader=PackageLoader("ssdprof.report.html", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    return environment.get_template("page.html.j2").render(
        title=document.title,
        origin=document.origin,
        verdict=[(line, line.startswith(good)) for line in document.verdict],
        summary=document.summary,
        caveats=document.caveats,
        parts=_unique(parts),
        version=version,
    )


def _unbroken(text: str) -> Markup:
    """Prevent line breaks within numbers such as "1e-3"."""
    return Markup(_POWER.sub(r'<span class="unbroken">\g<0></span>', str(escape(text))))


def _run_parts(report: RunReport, document: Document, pictures: Pictures) -> Iterator[Part]:
    extra = {SPEED: _speed(report, pictures), ACCURACY: _accuracy(report, pictures)}
    for section in document.sections:
        yield _part(section, extra.get(section.title, ()))


def _speed(report: RunReport, pictures: Pictures) -> Iterator[Block]:
    found = groups(report)
    shown = (
        *pictures("Speedup", run_plots.speedups(found)),
        *pictures("Device time", run_plots.device_times(found)),
        *pictures("Roofline of the operator", run_plots.roofline(found, report.ceilings)),
    )
    if shown:
        yield Block("pictures", shown)


def _accuracy(report: RunReport, pictures: Pictures) -> Iterator[Block]:
    found = groups(report)[:_LAYERED]
    maps = [heat for group in found for name in group.compared if (heat := heat_map(group, name))]
    yield from (Block("heat", heat) for heat in maps)
    shown: list[Picture] = []
    for group in found:
        shown += pictures(f"Error along {_along(group)}, worst layer, {group.size}", run_plots.along_positions(group))
        shown += pictures(f"Largest error of each layer, {group.size}", run_plots.largest_errors(group))
    if shown:
        yield Block("pictures", tuple(shown))


def _along(group: Group) -> str:
    return "the prompt" if group.call is None else "the sequences" if group.call.kind == "packed" else "a chunk"


def _stall_parts(stalls: StallReport, pictures: Pictures) -> Iterator[Part]:
    document = stall_document.compose(stalls)
    recorded = (f"Profiled {when(stalls.created)}: {document.title}.",) if stalls.created else ()
    said = (*document.verdict, *document.caveats, *recorded)
    shown = tuple(
        picture for title, svg in stall_plots.pictures(stalls).values() for picture in pictures(title, svg, titled=True)
    )
    blocks = [Block("text", line) for line in said]
    if shown:
        blocks.append(Block("pictures", shown))
    yield Part("Warp stalls", "warp-stalls", tuple(blocks))
    if document.summary:
        yield Part("Stalls in words", "stalls-in-words", (Block("list", document.summary),), folded=True, level=3)
    for section in document.sections:
        yield _part(section, (), level=3, folded=section.title != "Hints")


def _part(section: Section, extra: Iterable[Block], *, level: int = 2, folded: bool = False) -> Part:
    return Part(
        title=section.title,
        anchor=re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-"),
        blocks=(*extra, *(_block(block, section.title) for block in section.blocks)),
        folded=folded or section.depth != "main",
        level=level,
    )


def _block(block: Table | Figure | Note | str, section: str) -> Block:
    match block:
        case Table():
            shown: View = view(block, section)
            return Block("table", shown)
        case Note(text):
            return Block("note", text)
        case Figure(title):
            return Block("text", title)
        case _:
            return Block("text", block)


def _unique(parts: Iterable[Part]) -> list[Part]:
    """Sections with unique anchors: the stall report may have a section with the same title as the run's report."""
    seen: dict[str, int] = {}
    found = []
    for part in parts:
        seen[part.anchor] = seen.get(part.anchor, 0) + 1
        number = seen[part.anchor]
        anchor = part.anchor if number == 1 else f"{part.anchor}-{number}"
        found.append(Part(part.title, anchor, part.blocks, part.folded, part.level))
    return found
