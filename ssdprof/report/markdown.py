"""The report in GitHub's Markdown, for a file, a comment or a job summary."""

from __future__ import annotations

import re

from tabulate import tabulate

from ssdprof.core import words as fmt
from ssdprof.report.table import Block, Document, Figure, Section, Table

LIMIT_BYTES = 1_000_000  # GitHub drops a job summary above 1 MiB; leaves room for other steps of the job
_ROOM_FOR_THE_REST = 1_000  # the note on omitted sections


def render(document: Document, *, limit_bytes: int = LIMIT_BYTES) -> str:
    """The whole document.  Sections beyond the limit are left out, from the end, and the last line names them."""
    text = _head(document)
    used = len(text.encode())
    parts = [text]
    left_out: list[Section] = []
    for section in document.sections:
        drawn = _section(section)
        used += len(drawn.encode())
        if used > limit_bytes - _ROOM_FOR_THE_REST:
            left_out.append(section)
        else:
            parts.append(drawn)
    if left_out:
        parts.append(_rest(left_out, document.name, limit_bytes))
    return "".join(parts)


def _head(document: Document) -> str:
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
    return f"\n<details>\n<summary>{_html(section.title)}</summary>\n\n{body}\n\n</details>\n"


def _block(block: Block, section: str) -> str:
    match block:
        case Table():
            return draw(block, section)
        case Figure(title, file):
            return f"![{escape(title)}]({file})"
        case str():
            return f"<sub>{escape(block)}</sub>"
        case _:
            return "\n".join(f"- {escape(line)}" for line in block)


def draw(table: Table, section: str = "") -> str:
    """One table, without its title if the section has the same title."""

    def cell(text: str, align: str) -> str:
        return _unbroken(escape(text)) if align == "right" else escape(text)

    drawn = tabulate(
        [[cell(*one) for one in zip(row, table.align, strict=True)] for row in table.rows],
        headers=[escape(header) for header in table.headers],
        tablefmt="pipe",
        colalign=table.align if table.rows else None,
        disable_numparse=True,
    )
    title = [] if table.title == section else [f"**{escape(table.title)}**"]
    note = [f"<sub>{escape(table.note)}</sub>"] if table.note else []
    return "\n\n".join([*title, drawn, *note])


def _unbroken(cell: str) -> str:
    """Keep a number and its unit on one line; an interval may be on the line below its ratio."""
    return re.sub(r" (?!\[)", "\u00a0", cell)


def _rest(sections: list[Section], name: str, limit_bytes: int) -> str:
    titles = [f'"{section.title}"' for section in sections]
    which = titles[0] if len(titles) == 1 else f"from {titles[0]} to {titles[-1]}"
    return (
        f"\nLeft out to stay below {limit_bytes:,} bytes (GitHub drops a job summary beyond 1 MiB): "
        f"{fmt.plural(len(sections), 'section')}, {escape(which)}.  All of it is in the files of run "
        f"{escape(name)}; `ssdprof export --format json` prints it.\n"
    )


def escape(text: str) -> str:
    """Text on one line, escaped for Markdown, HTML and GitHub's mathematics."""
    text = _html(" ".join(text.split()))
    text = re.sub(r"[\\`*|~$]|\](?=[(\[:])", r"\\\g<0>", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # GitHub does not interpret it inside a word


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
