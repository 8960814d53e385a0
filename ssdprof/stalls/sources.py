"""The source files of a report: the stage and the text of any line in them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ssdprof import operators
from ssdprof.operators.known_sources import KnownSource
from ssdprof.operators.outline import Stages
from ssdprof.stalls.raw import RawKernel, base_name
from ssdprof.stalls.stages import Function, Place, SourceFile, parse

_LIBRARY = re.compile(r"[/\\]triton[/\\](language|experimental|tools)[/\\]")
_PACKAGE = Path(__file__).parent.parent


class Sources:
    """The files of a report.

    A file of ssdprof that was not recorded is read from the installed package, if its known lines are the same
    there.

    unlabelled: requested files with kernels of unknown stages, by name.
    """

    def __init__(
        self, recorded: Mapping[str, str], excerpts: Mapping[str, Mapping[int, str]] = MappingProxyType({})
    ) -> None:
        self._recorded = recorded
        self._excerpts = excerpts
        self._known = _all_known()  # other libraries' files, by their hash
        self._files: dict[str, SourceFile | None] = {}
        self.not_recorded: set[str] = set()
        self.unlabelled: set[str] = set()

    @classmethod
    def of(cls, kernel: RawKernel) -> Sources:
        return cls(kernel.sources, kernel.excerpts)

    def place(self, file: str, line: int) -> Place:
        if not file or not line or _LIBRARY.search(file):
            return Place()
        parsed = self._file(file)
        if parsed and not parsed.labelled:
            self.unlabelled.add(base_name(file))
        return parsed.place(line) if parsed else Place("", base_name(file))

    def text(self, file: str, line: int) -> str:
        if line in self._excerpts.get(file, {}):
            return self._excerpts[file][line].strip()
        if file not in self._recorded and (not file or _LIBRARY.search(file)):
            return ""
        parsed = self._file(file)
        return parsed.text[line - 1].strip() if parsed and 0 < line <= len(parsed.text) else ""

    def kernel(self, name: str) -> Function | None:
        """The launched function, in any of the files."""
        for file in (*self._recorded, *self._excerpts):
            parsed = None if _LIBRARY.search(file) else self._file(file)
            for function in parsed.functions if parsed else ():
                if function.name == name:
                    return function
        return None

    def implementation(self, kernel: str) -> str:
        """The implementation of the kernel, if its file is a known one of another library; else ""."""
        texts = (self._recorded[file] for file in self._recorded if not _LIBRARY.search(file))
        found = (self._known.get(_sha256(text)) for text in texts)
        return next((one.implementation for one in found if one and kernel in one.stages), "")

    def fillers(self) -> dict[str, tuple[str, ...]]:
        """Stage of waiting -> functions that end the wait, from all files."""
        found: dict[str, tuple[str, ...]] = {}
        for file in (*self._recorded, *self._excerpts):
            parsed = None if _LIBRARY.search(file) else self._file(file)
            for stage, names in parsed.fillers.items() if parsed else ():
                found[stage] = tuple(dict.fromkeys((*found.get(stage, ()), *names)))
        return found

    def _file(self, file: str) -> SourceFile | None:
        if file not in self._files:
            text = self._recorded.get(file)
            if text is None:
                text = _installed(file)
                known = self._excerpts.get(file)
                if text is None or not known or not _same(text, known):
                    self.not_recorded.add(base_name(file))
                    text = None if known else text
            self._files[file] = parse(text, self._known.get(_sha256(text))) if text else None
        return self._files[file]


def _all_known() -> Mapping[str, KnownSource]:
    return Stages.together([outline.stages for outline in operators.outlines()]).sources


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _same(text: str, known: Mapping[int, str]) -> bool:
    """Whether a file has these known lines."""
    lines = text.splitlines()
    return all(number <= len(lines) and lines[number - 1].strip() == line.strip() for number, line in known.items())


def _installed(file: str) -> str | None:
    """The text of a file of this package, by its path inside it."""
    inside = re.search(r"(?:^|[/\\])ssdprof[/\\](kernels[/\\].+\.py)$", file)
    path = _PACKAGE / inside[1].replace("\\", "/") if inside else None
    return path.read_text(encoding="utf-8") if path and path.is_file() else None
