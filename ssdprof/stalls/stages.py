"""Finds the stage of a source line in the source itself.

A kernel's file declares its stages, so that reports of older versions keep their meaning:

    STAGES = {"take_ticket": "ticket", "scalar": "caller"}   every @jit function of the file
    WAITS = {"full": "waiting.chunk"}                          what `mbarrier.wait(shared.full...)` waits for
    # stage chunk_scan.previous: what entered the chunk       from here on, inside the function

Lines of "caller", of libraries and of a function's header (the compiler's own) have no stage: `attribute` gives them
that of their neighbours.  For files of other libraries a table has the same information, by the hash of the file
(`operators/known_sources.py`).  In any other file every function is a stage of its own name.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ssdprof.operators.known_sources import KnownSource

CALLER = "caller"
IDLE_WARPS = "idle warps"  # warps without a role in this program, or before or after their role
UNKNOWN = "unknown"
_MARK = re.compile(r"\s*# stage ([a-z_]+(?:\.[a-z_]+)?)\b")
_ENDS_A_WAIT = ("mbarrier.arrive", "mbarrier.expect", "arrive")


@dataclass(frozen=True)
class Place:
    """stage: None for a line that belongs to the calling function.  header: between a function's name and its body."""

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
    specialized: bool  # calls warp_specialize: some warps have no role
    starts: tuple[tuple[int, str], ...] = ()

    def stage_at(self, line: int) -> str | None:
        index = bisect_right(self.starts, (line, "\uffff"))
        return self.starts[index - 1][1] if index else self.stage


@dataclass(frozen=True)
class SourceFile:
    """functions: of the file, innermost last.  waits: lines that wait, with the stage.
    fillers: that stage -> functions that end the wait.  labelled: its stages are known, from itself or a table.
    """

    text: tuple[str, ...]
    functions: tuple[Function, ...]
    waits: Mapping[int, str] = field(default_factory=dict)
    fillers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labelled: bool = True

    def place(self, line: int) -> Place:
        found = [function for function in self.functions if function.first <= line <= function.last]
        if not found:  # no code on this line: the compiler named the wrong line or file
            return Place("", UNKNOWN)
        function = found[-1]
        if line < function.body:
            return Place(function.name, None, header=True)
        if function.stage is None:
            return Place(function.name)
        return Place(function.name, self.waits.get(line) or function.stage_at(line))


def parse(text: str, known: KnownSource | None = None) -> SourceFile:
    """The functions and stages of a file.  A text that is not Python has none.

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
    """The stages that begin at a comment in the file, by line."""
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
    """The dict of that name; None if there is none.  In a user's file it may be any object."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            try:
                value = ast.literal_eval(node.value)
            except ValueError:  # not a literal
                return None
            return {str(key): str(stage) for key, stage in value.items()} if isinstance(value, dict) else None
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
