"""Embeds an SVG of matplotlib in a page: makes its ids unique, and uses the page's text colour for black."""

from __future__ import annotations

import re
from xml.etree import ElementTree

_COLORS = {"#000000": "currentColor", "#ffffff": "none"}
_DROPPED = ("metadata", "title")


def inline(svg: str, prefix: str, title: str) -> str:
    """An <svg> element for the body of a page.

    prefix: of every id, so that pictures on one page share none.  title: for screen readers.
    """
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        for child in [child for child in element if _local(child.tag) in _DROPPED]:
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
    """The name without its namespace, which HTML does not need for <svg> and href."""
    return name.rpartition("}")[2]


def _value(name: str, text: str, prefix: str) -> str:
    if name == "id":
        return prefix + text
    if name == "href":
        return text.replace("#", f"#{prefix}", 1)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    return re.sub(r"#[0-9a-f]{6}", lambda found: _COLORS.get(found[0], found[0]), text)
