"""A document in GitHub's Markdown, for a file, a comment or a job summary."""

import html
import re
from collections.abc import Mapping
from urllib.parse import quote

from tabulate import tabulate

from ssdprof.report.table import Align, Content, Document, Section, Table


def render(document: Document, figures: Mapping[str, str] | None = None) -> str:
    """The whole document.

    figures: title -> path of a picture, relative to the document's folder.
    """
    parts = [_head(document), *map(_section, document.sections)]
    if figures:
        shown = []
        for title, file in figures.items():
            text = escape(title)
            shown.append(f"**{text}**\n\n![{text}]({quote(file)})")
        parts += ["\n### Figures\n\n", "\n\n".join(shown), "\n"]
    return "".join(parts)


def _head(document: Document) -> str:
    """The title, the verdict, the facts about the origin, and the caveats."""
    lines = [f"## {escape(document.title)}", ""]
    for line in document.verdict:
        lines += [f"**{escape(line.text)}**", ""]
    if document.origin:
        lines += [", ".join(f"{label}: {escape(value)}" for label, value in document.origin), ""]
    if document.caveats:
        lines += ["Caveats:", "", *(f"- {escape(line)}" for line in document.caveats)]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> str:
    body = "\n\n".join(_block(block, section.title) for block in section.blocks)
    if not section.folded:
        return f"\n### {escape(section.title)}\n\n{body}\n"
    title = html.escape(section.title, quote=False)
    return f"\n<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>\n"


def _block(block: Content, section: str) -> str:
    """A block of a section: a table, small text, or a list.  section: the section's title."""
    match block:
        case Table():
            return draw(block, section)
        case str():
            return f"<sub>{escape(block)}</sub>"
        case _:
            return "\n".join(f"- {escape(line)}" for line in block)


def draw(table: Table, section: str = "") -> str:
    """A table, without its title if that is also the title of the section.

    section: the title of the section; empty if there is none.
    """
    rendered = tabulate(
        [list(map(_cell, row, table.align)) for row in table.rows],
        headers=[escape(header) for header in table.headers],
        tablefmt="pipe",
        colalign=table.align if table.rows else None,
        disable_numparse=True,
    )
    parts = [rendered]
    if table.title != section:
        parts.insert(0, f"**{escape(table.title)}**")
    if table.note:
        parts.append(f"<sub>{escape(table.note)}</sub>")
    return "\n\n".join(parts)


def _cell(text: str, align: Align) -> str:
    """The text of a cell.  The words of a cell that is aligned to the right, such as a number and
    its unit, stay on one line; an interval may be below its value.
    """
    cell = escape(text)
    return re.sub(r" (?!\[)", "\u00a0", cell) if align == "right" else cell


def escape(text: str) -> str:
    """Text on one line, escaped for Markdown, HTML and GitHub's mathematics.

    What Markdown interprets at the start of a line only, such as "#", is not escaped.
    """
    text = html.escape(" ".join(text.split()), quote=False)
    text = re.sub(r"[\\`*|~$]|\](?=[(\[:])", r"\\\g<0>", text)
    # an underscore inside a word needs no escape, because GitHub does not interpret it there
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
