"""A report, and its stalls if there are any, as one self-contained HTML file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ssdprof.core import words as fmt
from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport
from ssdprof.report import calls, model, plots, states
from ssdprof.report import stalls as of_stalls
from ssdprof.report.document import ACCURACY, ANSWERS, SPEED, compose
from ssdprof.report.facts import when
from ssdprof.report.groups import groups
from ssdprof.report.table import Document, Section, Table, section, tone

_LAYERED = 3  # lengths with a plot of positions; the tables have all
_UNITS = {
    "µs": 1.0, "ms": 1e3, "s": 1e6,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_NUMBER = re.compile(r"<?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?:\s*([A-Za-zµ%]+))?(?:\s*\[.*\])?$")
_INSIDE = re.compile(r"(?<=\d) (?=(?:[µm]?s|[KMGT]?i?B|[KMGT])\b)|(?<=,) (?=[\d.e-]+\])")
_EXPONENT = re.compile(r"(?<=\de)-(?=\d)")

Picture = tuple[str, Markup, Table]  # title, SVG, its numbers
Pictures = dict[str, dict[str, plots.Drawing | None]]
# title, anchor, pictures, blocks, folded (collapsed under its title), level
PagePart = dict[str, object]


def of_document(document: Document, stalls: StallReport | None = None) -> str:
    """A document as an HTML file.  stalls: the stall report that it is of, for its pictures."""
    pictures = _of_stalls(stalls) if stalls else {}
    return _page(document, list(_parts(document, pictures, count(1))))


def render(report: Report, stalls: StallReport | None = None) -> str:
    """One HTML file.  stalls: the stall report in the run's folder."""
    document = compose(report)
    numbers = count(1)
    pictures = _of_bench(report) if report.kind == "bench" else _of_prompts(report)
    pictures[states.TITLE] = _of_states(report)
    parts = list(_parts(document, pictures, numbers))
    if stalls:
        profiled = of_stalls.compose(stalls)
        lines = (profiled.title, *(line.text for line in profiled.verdict), *profiled.caveats)
        parts.append(_part(section("Warp stalls", (f"Profiled {when(stalls.created)}.", *lines))))
        for part in _parts(profiled, _of_stalls(stalls), numbers):
            parts.append(part | {"level": 3, "folded": part["title"] != "Hints"})
    return _page(document, parts)


def _parts(document: Document, pictures: Pictures, numbers: Iterator[int]) -> Iterator[PagePart]:
    """Each section, with its pictures before its tables.  numbers: make their ids unique."""
    for part in document.sections:
        drawings = pictures.get(part.title, {}).items()
        shown: list[Picture] = [
            (title, Markup(inline(drawing[0], f"p{next(numbers)}-", title)), drawing[1])
            for title, drawing in drawings
            if drawing
        ]
        yield _part(part, shown)


def _part(section: Section, pictures: Sequence[Picture] = ()) -> PagePart:
    return {
        "title": section.title,
        "anchor": re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-"),
        "pictures": pictures,
        "blocks": section.blocks,
        "folded": section.folded,
        "level": 2,
    }


def _of_stalls(report: StallReport) -> Pictures:
    return {of_stalls.STAGES: dict(plots.of_stalls(report).values())}


def _of_states(report: Report) -> dict[str, plots.Drawing | None]:
    """Pictures of the layers that lose the most."""
    layers = sorted(states.by_layer(report).items(), key=lambda layer: -states.losses(layer[1]))
    return {
        f"Error of the {which} by step, {layer}": plots.of_steps(cases, which)
        for layer, cases in layers[:_LAYERED]
        for which in ("state", "output")
    }


def _of_bench(report: Report) -> Pictures:
    """Section -> the pictures in it."""
    shapes = calls.by_shape(report)
    return {SPEED: {title: plots.speedups(same) for title, same in shapes.items()}}


def _of_prompts(report: Report) -> Pictures:
    """Section -> the pictures in it; none where nothing was measured."""
    prompts = groups(report)
    prefills = model.by_length(model.prefills(report))
    return {
        SPEED: {
            "Speedup": plots.speedups(prompts),
            "Roofline of the operator": plots.roofline(report, prompts),
        },
        ACCURACY: {
            f"Error by position, worst layer, {group.size}": plots.along_positions(group)
            for group in prompts[:_LAYERED]
        },
        ANSWERS: {
            f"Divergence at {fmt.tokens(cases[0].seqlen)}": plots.divergences(cases)
            for cases in model.prompts(report)
        },
        model.PARTS: {
            f"The parts of a prefill of {size}": plots.prefill_parts(model.parts_of_prefills(same))
            for size, same in prefills.items()
        },
    }


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


def unbroken(cell: str) -> Markup:
    """The text of a cell that wraps between values, not inside of one: "13.2 ms [13.1, 13.3]" has
    two parts.  A name may be broken after its underscores; what is between backticks is code.
    """
    text = _EXPONENT.sub("\N{NON-BREAKING HYPHEN}", _INSIDE.sub("\N{NO-BREAK SPACE}", cell))
    breakable = re.sub(r"(?<=\w_)(?=\w)", "<wbr>", str(escape(text)))
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", breakable))


# --- pictures


def inline(svg: str, prefix: str, title: str) -> str:
    """An <svg> element for the body of a page, with the page's text colour for black.

    prefix: of every id, so that pictures on one page share none.  title: for screen readers.
    """
    _, tag, rest = svg.partition("<svg")
    head, _, body = rest.partition(">")
    head = re.sub(r' (?:width|height|xmlns\S*)="[^"]*"', "", head)
    width = float(re.findall(r'viewBox="\S+ \S+ (\S+)', head)[0]) * 1.7  # a telephone: 4/3 a point
    body = re.sub(r"<metadata>.*?</metadata>|<title>.*?</title>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", body)
    body = body.replace("#000000", "currentColor").replace("#ffffff", "none")
    style = f'role="img" style="max-width: {width:.0f}px"'
    return f"{tag}{head} {style}><title>{escape(title)}</title>{body.rstrip()}"


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
    number = float(parts[1].replace(",", ""))
    unit = parts[2] or ""
    return repr(number * _UNITS.get(unit, 1.0))
