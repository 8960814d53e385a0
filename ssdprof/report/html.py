"""A report as one self-contained HTML file, with the stall report of its run if there is one."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ssdprof.core import words as fmt
from ssdprof.core.report import Report
from ssdprof.core.stalls import StallReport
from ssdprof.report import calls, model, plots, states
from ssdprof.report import stalls as stall_report
from ssdprof.report.document import ACCURACY, ANSWERS, SPEED, compose
from ssdprof.report.facts import when
from ssdprof.report.groups import groups
from ssdprof.report.table import Document, Picture, Section, Table, section, tone

_MOST_PICTURES = 3  # lengths, or layers, that have a picture; the tables have all of them
# the units of `words`, in microseconds, in bytes, and of numbers per second
_UNITS = {
    "µs": 1.0, "ms": 1e3, "s": 1e6,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
    "k": 1e3, "M": 1e6, "G": 1e9,
}  # fmt: skip
# CSS pixels for each point of a drawing on a wide page; a telephone has room for about 4/3
_PIXELS_PER_POINT = 1.7
# a cell such as "13.2 ms [13.1, 13.3]"; the groups are its first number and the unit of that
_NUMBER = re.compile(r"<?([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?:\s*([A-Za-zµ%]+))?(?:\s*\[.*\])?$")
# a space between a number and its unit, or between the ends of an interval
_SPACE_IN_VALUE = re.compile(r"(?<=\d) (?=(?:[µm]?s|[KMGT]?i?B|[kMG])\b)|(?<=,) (?=[\d.e%+-]+\])")
# the hyphen in a number such as "1e-3"
_EXPONENT = re.compile(r"(?<=\de)-(?=\d)")

# title of a section -> title of a picture -> the picture; None where nothing was measured
Pictures = dict[str, dict[str, plots.Drawing | None]]


def of_document(document: Document, stalls: StallReport | None = None) -> str:
    """A document as an HTML file.

    stalls: the stall report of which the document was composed, whose pictures are added; None for
        a document without pictures.
    """
    pictures = _of_stalls(stalls) if stalls else {}
    return _page(document, list(_parts(document, pictures, count(1))))


def render(report: Report, stalls: StallReport | None = None) -> str:
    """A report as an HTML file.

    stalls: the stall report in the run's folder, which becomes the last part of the page; None if
        there is none.
    """
    document = compose(report)
    numbers = count(1)
    pictures = _of_bench(report) if report.kind == "bench" else _of_prompts(report)
    pictures[states.TITLE] = _of_states(report)
    parts = list(_parts(document, pictures, numbers))
    if stalls:
        profiled = stall_report.compose(stalls)
        lines = (profiled.title, *(line.text for line in profiled.verdict), *profiled.caveats)
        summary = section("Warp stalls", (f"Profiled {when(stalls.created)}.", *lines))
        parts.append(summary)
        for part in _parts(profiled, _of_stalls(stalls), numbers):
            parts.append(replace(part, level=3, folded=part.title != "Hints"))
    return _page(document, parts)


def _parts(document: Document, pictures: Pictures, numbers: Iterator[int]) -> Iterator[Section]:
    """The sections of a document with their pictures, of which None is left out.

    numbers: one is taken for each picture, so that the ids in the pictures of a page differ.
    """
    for part in document.sections:
        drawings = pictures.get(part.title, {}).items()
        shown: list[Picture] = []
        for title, drawing in drawings:
            if drawing:
                svg, values = drawing
                shown.append((title, Markup(inline(svg, f"p{next(numbers)}-", title)), values))
        yield replace(part, pictures=tuple(shown))


def _of_stalls(report: StallReport) -> Pictures:
    return {stall_report.STAGES_TITLE: dict(plots.of_stalls(report).values())}


def _of_states(report: Report) -> dict[str, plots.Drawing | None]:
    """The pictures of decoded states, in the layers in which the formats lose the most heads."""
    layers = sorted(
        states.by_layer(report).items(), key=lambda layer: -states.lost_head_count(layer[1])
    )
    pictures = {}
    for layer, cases in layers[:_MOST_PICTURES]:
        for which in ("state", "output"):
            pictures[f"Error of the {which} by step, {layer}"] = plots.of_steps(cases, which)
    return pictures


def _of_bench(report: Report) -> Pictures:
    """The pictures of a bench, one for each shape."""
    shapes = calls.by_shape(report)
    return {SPEED: {title: plots.speedups(groups) for title, groups in shapes.items()}}


def _of_prompts(report: Report) -> Pictures:
    """The pictures of every kind of report except a bench, apart from those of `_of_states`."""
    prompts = groups(report)
    prefills = model.by_length(model.prefills(report))
    return {
        SPEED: {
            "Speedup": plots.speedups(prompts),
            "Roofline of the operator": plots.roofline(report, prompts),
        },
        ACCURACY: {
            f"Error by position, worst layer, {group.size}": plots.along_positions(group)
            for group in prompts[:_MOST_PICTURES]
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


def _page(document: Document, parts: Sequence[Section]) -> str:
    """The page, with the head of a document.

    parts: the sections in the order of the page.  Each has an anchor made of its title.  A
        repeated title, as of a section that both the run's and the stall report have, gets a
        number: `#speed-2`.
    """
    anchor_counts: Counter[str] = Counter()
    anchored: dict[str, Section] = {}
    for part in parts:
        anchor = re.sub(r"[^a-z0-9]+", "-", part.title.lower()).strip("-")
        anchor_counts[anchor] += 1
        number = anchor_counts[anchor]
        anchored[anchor if number == 1 else f"{anchor}-{number}"] = part
    environment = Environment(
        loader=PackageLoader("ssdprof.report", "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"key": sort_key, "tone": tone, "unbroken": unbroken}
    environment.tests["sortable"] = sortable
    return environment.get_template("page.html.j2").render(document=document, parts=anchored)


def unbroken(cell: str) -> Markup:
    """The text of a cell as HTML, which a browser wraps between values and not inside of one.

    "13.2 ms [13.1, 13.3]" can be wrapped before its bracket only.  A name can be wrapped after its
    underscores.  Text between backticks is shown as code.
    """
    text = _SPACE_IN_VALUE.sub("\N{NO-BREAK SPACE}", cell)
    text = _EXPONENT.sub("\N{NON-BREAKING HYPHEN}", text)
    breakable = re.sub(r"(?<=\w_)(?=\w)", "<wbr>", str(escape(text)))
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", breakable))


# --- pictures


def inline(svg: str, prefix: str, title: str) -> str:
    """A drawing as an <svg> element in the body of a page, with the page's text colour for black,
    and nothing for white.

    svg: the file that matplotlib wrote.  prefix: put before every id, so that no two pictures of a
    page share an id.  title: read by screen readers.
    """
    _, tag, after_tag = svg.partition("<svg")
    attributes, _, body = after_tag.partition(">")
    attributes = re.sub(r' (?:width|height|xmlns\S*)="[^"]*"', "", attributes)
    width_points = float(re.findall(r'viewBox="\S+ \S+ (\S+)', attributes)[0])
    width_pixels = width_points * _PIXELS_PER_POINT
    body = re.sub(r"<metadata>.*?</metadata>|<title>.*?</title>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", body)
    body = body.replace("#000000", "currentColor").replace("#ffffff", "none")
    style = f'role="img" style="max-width: {width_pixels:.0f}px"'
    return f"{tag}{attributes} {style}><title>{escape(title)}</title>{body.rstrip()}"


# --- tables


def sortable(table: Table) -> bool:
    """Whether a reader can sort the table: it has several rows, and a cell has a `sort_key`."""
    return len(table.rows) > 1 and any(map(sort_key, chain.from_iterable(table.rows)))


def sort_key(text: str) -> str:
    """The number that a cell is sorted by, in the smallest unit: "12.4 ms" -> "12400.0".

    Empty if the cell is not a number, with or without a sign, a unit and an interval.  Units that
    are not in `_UNITS` are ignored.
    """
    parts = _NUMBER.fullmatch(text.strip())
    if parts is None:
        return ""
    number = float(parts[1].replace(",", ""))
    unit = parts[2] or ""
    return repr(number * _UNITS.get(unit, 1.0))
