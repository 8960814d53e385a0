"""A page of HTML, read by a parser: the addresses that it loads, its links, its words."""

import re
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}
_ASKING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "formaction"}


class Page(HTMLParser):
    """ids, anchors: "#..." links.  asked: other addresses.  unclosed: tags not closed, or closed in
    another order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.unclosed: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.unclosed += self._open
        self.asked += [
            address
            for address in re.findall(r"url\(([^)]*)\)", text)
            if not address.startswith("#")
        ]
        self.asked += re.findall(r"@import[^;]*", text)
        self.anchors += re.findall(r"url\(#([^)]*)\)", text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(tag, attrs)
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text.append(data)

    def _attributes(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in _ASKING:
                (self.anchors if (value or "").startswith("#") else self.asked).append(
                    (value or "").removeprefix("#")
                )

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())
