"""Which stage of the algorithm a source line belongs to, found in the source itself.

A kernel's file declares it, so that editing a kernel moves nothing and a report of an older version keeps its meaning:

    STAGES = {"take_ticket": "ticket", "scalar": "caller"}   every @jit function of the file
    WAITS = {"full": "waiting.chunk"}                          what `mbarrier.wait(shared.full...)` waits for
    # stage chunk_scan.previous: what entered the chunk       from here on, inside the function

Lines of "caller", of libraries and of a function's header (the compiler's own) have no stage: `attribute` gives them
that of their neighbours.  For files of other libraries a table says the same, by the hash of the file
(`operators/known_sources.py`).  In any other file every function is a stage of its own name.
"""

from __future__ import annotations

import ast
import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ssdprof import operators
from ssdprof.operators.known_sources import KnownSource
from ssdprof.operators.outline import Stages
from ssdprof.stalls.raw import RawKernel, base_name

CALLER = "caller"
IDLE_WARPS = "idle warps"  # without a role in this program, before it or after it
UNKNOWN = "unknown"
_MARK = re.compile(r"\s*# stage ([a-z_]+(?:\.[a-z_]+)?)\b")
_LIBRARY = re.compile(r"[/\\]triton[/\\](language|experimental|tools)[/\\]")
_ENDS_A_WAIT = ("mbarrier.arrive", "mbarrier.expect", "arrive")
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Place:
    """stage: None for a line that belongs to whoever called it.  header: between a function's name and its body."""

    function: str = ""
    stage: str | None = None
    header: bool = False


@dataclass(frozen=True)
class Function:
    """A @jit function: lines first .. last, its body from `body` on; `starts` of its stages, by line."""

    name: str
    first: int
    body: int
    last: int
    stage: str | None
    specialized: bool  # calls warp_specialize: some of its warps have no role
    starts: tuple[tuple[int, str], ...] = ()

    def stage_at(self, line: int) -> str | None:
        index = bisect_right(self.starts, (line, "\uffff"))
        return self.starts[index - 1][1] if index else self.stage


@dataclass(frozen=True)
class SourceFile:
    """functions: of the file, innermost last.  waits: lines that wait, and the stage that this is.
    fillers: that stage -> functions that end the wait.  labelled: its stages are known, from itself or a table.
    """

    text: tuple[str, ...]
    functions: tuple[Function, ...]
    waits: Mapping[int, str] = field(default_factory=dict)
    fillers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labelled: bool = True

    def place(self, line: int) -> Place:
        found = [function for function in self.functions if function.first <= line <= function.last]
        if not found:  # no code is here: the compiler named the wrong line or file
            return Place("", UNKNOWN)
        function = found[-1]
        if line < function.body:
            return Place(function.name, None, header=True)
        if function.stage is None:
            return Place(function.name)
        return Place(function.name, self.waits.get(line) or function.stage_at(line))


class Sources:
    """The files of a report.

    One that was not recorded with it is taken from the installed package, if it is of this package and the lines that
    are known of it are the same there.

    known: other libraries' files, by their hash.
    unlabelled: files with kernels of unknown stages that were asked for, by name.
    """

    def __init__(
        self,
        recorded: Mapping[str, str],
        excerpts: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
        known: Mapping[str, KnownSource] | None = None,
    ):
        self._recorded = recorded
        self._excerpts = excerpts
        self._known = _all_known() if known is None else known
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
        """The function that was launched, wherever it is."""
        for file in (*self._recorded, *self._excerpts):
            parsed = None if _LIBRARY.search(file) else self._file(file)
            for function in parsed.functions if parsed else ():
                if function.name == name:
                    return function
        return None

    def implementation(self, kernel: str) -> str:
        """Whose kernel it is, if its file is a known one of another library; else ""."""
        texts = (self._recorded[file] for file in self._recorded if not _LIBRARY.search(file))
        found = (self._known.get(_sha256(text)) for text in texts)
        return next((one.implementation for one in found if one and kernel in one.stages), "")

    def fillers(self) -> dict[str, tuple[str, ...]]:
        """Stage of waiting -> functions that end the wait, by every file that has any."""
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


def parse(text: str, known: KnownSource | None = None) -> SourceFile:
    """The functions and stages of a file.  A text that is no Python has none.

    known: its entry in a table; None: the file itself names its stages, if it does.
    """
    lines = tuple(text.splitlines())
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return SourceFile(lines, ())
    stages, waits = known.stages if known else _table(tree, "STAGES"), _table(tree, "WAITS")
    marks = known.starts if known else _marks(lines)
    functions = [
        _function(node, stages, marks, lines)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_is_jit(decorator) for decorator in node.decorator_list)
    ]
    ordered = tuple(sorted(functions, key=lambda f: (f.first, -f.last)))
    labelled = stages is not None or not functions
    return SourceFile(lines, ordered, _waits(tree, waits), _fillers(tree, waits or {}), labelled)


def _marks(lines: Sequence[str]) -> dict[int, str]:
    """The stages that begin at a remark in the file, by line."""
    found = ((number, _MARK.match(line)) for number, line in enumerate(lines, start=1))
    return {number: mark[1] for number, mark in found if mark}


def _function(
    node: ast.FunctionDef, stages: Mapping[str, str] | None, marks: Mapping[int, str], lines: Sequence[str]
) -> Function:
    first, last = min(d.lineno for d in node.decorator_list), node.end_lineno or node.lineno
    body = node.body[0].lineno
    # a mark may stand between the header and the first statement
    while body > node.lineno + 1 and lines[body - 2].lstrip().startswith("#"):
        body -= 1
    stage = node.name if stages is None else stages.get(node.name, UNKNOWN)
    return Function(
        name=node.name,
        first=first,
        body=body,
        last=last,
        stage=None if stage == CALLER else stage,
        specialized=any(_called(call) == "warp_specialize" for call in ast.walk(node)),
        starts=tuple((number, begun) for number, begun in sorted(marks.items()) if body <= number <= last),
    )


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return "jit" in ast.unparse(called).rsplit(".", 1)[-1]


def _table(tree: ast.Module, name: str) -> dict[str, str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            value = ast.literal_eval(node.value)
            return {str(key): str(stage) for key, stage in value.items()}
    return None


def _waits(tree: ast.Module, waits: Mapping[str, str] | None) -> dict[int, str]:
    """Lines of `mbarrier.wait(shared.NAME...)`, and of `rings.NAME.wait_full(...)` and `rings.NAME.wait_empty(...)`."""
    found: dict[int, str] = {}
    for node in ast.walk(tree) if waits else ():
        if isinstance(node, ast.Call) and (waited := _waited_for(node)):
            name = _barrier(waited, waits or {})
            if waits and name:
                found |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), waits[name])
    return found


def _waited_for(call: ast.Call) -> ast.expr | None:
    if ast.unparse(call.func) == "mbarrier.wait" and call.args:
        return call.args[0]
    return call.func if _called(call) in ("wait_full", "wait_empty") else None


def _fillers(tree: ast.Module, waits: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Functions with `arrive(shared.NAME...)`, `mbarrier.arrive(...)`, `mbarrier.expect(...)`, or of a variable that is
    one."""
    found: dict[str, tuple[str, ...]] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        barriers = {
            target.id: name
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and (name := _barrier(node.value, waits))
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _ENDS_A_WAIT and node.args:
                given = node.args[0]
                name = barriers.get(given.id, "") if isinstance(given, ast.Name) else _barrier(given, waits)
                if name and function.name not in found.get(waits[name], ()):
                    found[waits[name]] = (*found.get(waits[name], ()), function.name)
    return found


def _barrier(node: ast.AST, waits: Mapping[str, str]) -> str:
    """The NAME in `shared.NAME.index(...)`."""
    names = [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    return next((name for name in names if name in waits), "")


def _called(node: ast.AST) -> str:
    return ast.unparse(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""


def _all_known() -> Mapping[str, KnownSource]:
    return Stages.together([outline.stages for outline in operators.outlines()]).sources


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _same(text: str, known: Mapping[int, str]) -> bool:
    """Whether a file has the lines that are known of it."""
    lines = text.splitlines()
    return all(number <= len(lines) and lines[number - 1].strip() == line.strip() for number, line in known.items())


def _installed(file: str) -> str | None:
    """The text of a file of this package, by its path inside it."""
    inside = re.search(r"(?:^|[/\\])ssdprof[/\\](kernels[/\\].+\.py)$", file)
    path = _PACKAGE / inside[1].replace("\\", "/") if inside else None
    return path.read_text(encoding="utf-8") if path and path.is_file() else None
