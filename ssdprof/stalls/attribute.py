"""Attributes samples to source lines, and lines to stages, which the source itself declares.

    STAGES = {"take_ticket": "ticket"}    @jit functions; one without a stage has its "caller"'s
    WAITS = {"full": "waiting.chunk"}    what `mbarrier.wait(shared.full...)` waits for
    # stage chunk_scan.previous: what entered the chunk       from here on, inside the function

So reports of older versions keep their meaning.  For files of other libraries a table has the same
information, by the hash of the file (`operators/stages/`).  In any other file every function
is a stage of its own name.

An instruction has one source line.  In reports that ssdprof records it is the innermost of those
that led there that has a stage (`profiled.py`); in others it is that of the innermost function that
was inlined.  Lines of "caller", of libraries and of a function's header (the compiler's own) have
no stage: such an instruction gets the stage of the one before it in the program that has one, else
of the one after it, because compilers keep instructions of a line together.  The number of such
samples is reported.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssdprof import operators
from ssdprof.core.stalls import Line, StallSamples, most_first
from ssdprof.operators.operator import AHEAD, Stages
from ssdprof.stalls.read import RawKernel, base_name

CALLER = "caller"
IDLE_WARPS = "idle warps"  # warps without a role in this program, or before or after their role
UNKNOWN = "unknown"
_BLOCK_BARRIER = "barrier"
_MARK = re.compile(r"\s*# stage ([a-z_]+(?:\.[a-z_]+)?)\b")
_LIBRARY = re.compile(r"[/\\]triton[/\\](language|experimental|tools)[/\\]")
_PACKAGE = Path(__file__).parent.parent


def attribute(
    kernel: RawKernel,
    sources: SourceFiles,
    known: Stages = Stages(),  # noqa: B008
) -> tuple[dict[str, StallSamples], tuple[Line, ...], int]:
    """Every sample of the kernel's points: by stage in the algorithm's order, and by line and
    stage, hottest first.

    The number is that of the samples with the stage of a neighbour.  known: the stages of the
    kernel's operator.
    """
    line_stages = [sources.stage_of(point.file, point.line) for point in kernel.points]
    specialized = sources.specialized(kernel.function)
    by_stage: dict[str, Counter[str]] = defaultdict(Counter)
    by_line: dict[tuple[str, int, str, str, str], Counter[str]] = defaultdict(Counter)
    from_neighbours = 0
    for point, line_stage, stage in zip(
        kernel.points, line_stages, _stages(line_stages), strict=True
    ):
        # In the header of a kernel with warp roles, the only block-wide barriers are those at which
        # warps wait for a role, and for the end of the other roles.
        idles = specialized and line_stage.header
        for reason, count in point.samples.items():
            name = IDLE_WARPS if idles and reason == _BLOCK_BARRIER else stage
            by_stage[name][reason] += count
            by_line[
                point.file, point.line, "" if point.line else point.sass, line_stage.function, name
            ][reason] += count
            from_neighbours += count if line_stage.stage is None and name == stage else 0
    lines = [
        Line(
            file=base_name(file),
            line=line,
            function=function,
            stage=stage,
            text=sources.text(file, line) or sass,
            samples=most_first(samples),
        )
        for (file, line, sass, function, stage), samples in by_line.items()
    ]
    lines.sort(key=lambda line: (-line.total, line.file, line.line, line.stage, line.text))
    stages = sorted(by_stage, key=lambda name: _stage_order(name, by_stage[name].total(), known))
    return {name: most_first(by_stage[name]) for name in stages}, tuple(lines), from_neighbours


def is_idle(stage: str) -> bool:
    return stage in (IDLE_WARPS, AHEAD)


def _stages(line_stages: Sequence[LineStage]) -> list[str]:
    """The stage of each line: its own, or its neighbour's if it has none."""
    stages = []
    before = ""
    for line_stage in line_stages:
        before = line_stage.stage or before
        stages.append(before)
    after = next(filter(None, stages), UNKNOWN)
    return [stage or after for stage in stages]


def _stage_order(name: str, total: int, known: Stages) -> tuple[int, int, str]:
    """Stages in the order of the algorithm, then others by size, then idle ones."""
    order = (*known.order, IDLE_WARPS)
    if name in order:
        return (order.index(name) + (len(order) if is_idle(name) else 0), 0, name)
    return (len(order), -total, name)


# --- the files of a report


class SourceFiles:
    """The source files of a report, by name: the stage and the text of any line in them.

    A file of ssdprof that was not recorded is read from the installed package.
    unlabelled: requested files with kernels of unknown stages, by name.
    """

    def __init__(self, recorded: Mapping[str, str]) -> None:
        self._recorded = recorded
        self._known = Stages.together([operator.stages for operator in operators.records()]).sources
        self._files: dict[str, SourceFile | None] = {}
        self.not_recorded: set[str] = set()
        self.unlabelled: set[str] = set()

    def stage_of(self, file: str, line: int) -> LineStage:
        if not file or not line or _LIBRARY.search(file):
            return LineStage()
        parsed = self._file(file)
        if parsed and not parsed.labelled:
            self.unlabelled.add(base_name(file))
        return parsed.stage_of(line) if parsed else LineStage("", base_name(file))

    def text(self, file: str, line: int) -> str:
        if file not in self._recorded and (not file or _LIBRARY.search(file)):
            return ""
        parsed = self._file(file)
        return parsed.text[line - 1].strip() if parsed and 0 < line <= len(parsed.text) else ""

    def specialized(self, kernel: str) -> bool:
        """Whether some warps of the launched function have no role.  It may be in any of the
        files.
        """
        files = (self._file(file) for file in self._recorded if not _LIBRARY.search(file))
        return any(parsed and kernel in parsed.specialized for parsed in files)

    def implementation(self, kernel: str) -> str:
        """The implementation of the kernel, if its file is a known one of another library; else
        "".
        """
        for file, text in self._recorded.items():
            entry = None if _LIBRARY.search(file) else self._known.get(_sha256(text))
            if entry and kernel in entry["stages"]:
                return str(entry["implementation"])
        return ""

    def _file(self, file: str) -> SourceFile | None:
        """The parsed file, from ncu's report or from this machine; None if neither has it."""
        if file not in self._files:
            text = self._recorded.get(file)
            if text is None:
                self.not_recorded.add(base_name(file))
                text = _installed(file)
            self._files[file] = parse(text, self._known.get(_sha256(text))) if text else None
        return self._files[file]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _installed(file: str) -> str | None:
    """The text of a file of this package, by its path inside it."""
    inside = re.search(r"(?:^|[/\\])ssdprof[/\\](kernels[/\\].+\.py)$", file)
    path = _PACKAGE / inside[1].replace("\\", "/") if inside else None
    return path.read_text(encoding="utf-8") if path and path.is_file() else None


# --- the stages of a file


@dataclass(frozen=True)
class LineStage:
    """The function of a line, and its stage there.

    stage: None for a line of the calling function.  header: between a function's name and its body.
    """

    function: str = ""
    stage: str | None = None
    header: bool = False


@dataclass(frozen=True)
class SourceFile:
    """A source file, with the stages of its lines.

    lines: of every line of a @jit function.  specialized: functions in which some warps have no
    role.
    labelled: its stages are known, from itself or a table.
    """

    text: tuple[str, ...]
    lines: Mapping[int, LineStage] = field(default_factory=dict)
    specialized: frozenset[str] = frozenset()
    labelled: bool = True

    def stage_of(self, line: int) -> LineStage:
        """Unknown for a line without code: the compiler named the wrong line or file."""
        return self.lines.get(line, LineStage("", UNKNOWN))


def parse(text: str, known: Mapping[str, Any] | None = None) -> SourceFile:
    """The functions and stages of a file.  A text that is not Python has none.

    known: its entry in a table; None: the file itself names its stages, if it does.
    """
    lines = tuple(text.splitlines())
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return SourceFile(lines)
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
    ]
    stages, starts, waits = _labels(tree, lines, functions)
    if known:
        stages = known["stages"]
        starts = known["starts"]
        waits = {}
    line_stages: dict[int, LineStage] = {}
    for node in functions:  # those inside of others come later
        line_stages |= _line_stages(node, lines, stages, starts, waits)
    return SourceFile(
        text=lines,
        lines=line_stages,
        specialized=frozenset(node.name for node in functions if _specializes(node)),
        labelled=stages is not None or not functions,
    )


def _labels(
    tree: ast.Module, lines: Sequence[str], functions: Sequence[ast.FunctionDef]
) -> tuple[dict[str, str] | None, dict[int, str], dict[int, str]]:
    """What a file's STAGES, marks and WAITS say: see `_line_stages`.  A function that STAGES lacks
    belongs to its caller.
    """
    stages = _table(tree, "STAGES")
    if stages is not None:
        stages = dict.fromkeys((node.name for node in functions), CALLER) | stages
    marks = ((number, _MARK.match(line)) for number, line in enumerate(lines, start=1))
    starts = {number: mark[1] for number, mark in marks if mark}
    return stages, starts, _waits(tree, _table(tree, "WAITS") or {})


def _line_stages(
    node: ast.FunctionDef,
    lines: Sequence[str],
    stages: Mapping[str, str] | None,
    starts: Mapping[int, str],
    waits: Mapping[int, str],
) -> Iterator[tuple[int, LineStage]]:
    """The lines of a function with their stages, from its first decorator on.

    stages: of the functions; None: unknown, then each is a stage of its own name.  starts: lines
    from which on another stage begins, inside their function.  waits: lines that wait, with their
    stage.
    """
    body = node.body[0].lineno
    # a mark may stand between the header and the first statement
    while body > node.lineno + 1 and lines[body - 2].lstrip().startswith("#"):
        body -= 1
    stage = node.name
    if stages is not None:
        stage = stages.get(node.name, UNKNOWN)
    of_caller = stage == CALLER
    first = min(decorator.lineno for decorator in node.decorator_list)
    for number in range(first, body):
        yield number, LineStage(node.name, header=True)
    for number in _lines(node, start=body):
        stage = starts.get(number, stage)
        of_line = None if of_caller else waits.get(number, stage)
        yield number, LineStage(node.name, of_line)


def _lines(node: ast.FunctionDef | ast.Call, start: int) -> range:
    """Numbers of the lines from `start` to the end of the node."""
    return range(start, (node.end_lineno or node.lineno) + 1)


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return "jit" in ast.unparse(called).rsplit(".", 1)[-1]


def _specializes(function: ast.FunctionDef) -> bool:
    """Whether it gives its warps roles."""
    return any(_called(node) == "warp_specialize" for node in ast.walk(function))


def _table(tree: ast.Module, name: str) -> dict[str, str] | None:
    """The dict of that name; None if there is none.  In a user's file it may be any object."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or list(map(ast.unparse, node.targets)) != [name]:
            continue
        try:
            value = ast.literal_eval(node.value)
        except ValueError:  # not a literal
            return None
        if isinstance(value, dict):
            return {str(key): str(stage) for key, stage in value.items()}
        return None
    return None


def _waits(tree: ast.Module, stages: Mapping[str, str]) -> dict[int, str]:
    """Lines of `mbarrier.wait(shared.NAME...)`, and of `rings.NAME.wait_full(...)` and
    `rings.NAME.wait_empty(...)`, with the stages of their names.
    """
    waits: dict[int, str] = {}
    for node in ast.walk(tree) if stages else ():
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) == "mbarrier.wait":
            barrier: ast.AST = node.args[0] if node.args else node.func
        elif _called(node) in ("wait_full", "wait_empty"):
            barrier = node.func
        else:
            continue
        names = (part.attr for part in ast.walk(barrier) if isinstance(part, ast.Attribute))
        if name := next((name for name in names if name in stages), ""):
            waits |= dict.fromkeys(_lines(node, node.lineno), stages[name])
    return waits


def _called(node: ast.AST) -> str:
    return ast.unparse(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""
