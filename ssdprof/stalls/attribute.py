"""Attributes samples to source lines, and source lines to stages.

A source file of ssdprof declares its stages itself, so that reports of older versions keep their
meaning:

    STAGES = {"take_ticket": "ticket"}    the stages of @jit functions.  A function that is not
                                          listed, or is listed as "caller", has its caller's stage.
    WAITS = {"full": "waiting.chunk"}     the stage of lines with `mbarrier.wait(shared.full...)`
    # stage chunk_scan.previous: ...      the stage of the lines that follow in the function

For files of other libraries, tables in `operators/stages/` have the stages of functions and of
lines, by the hash of the file.  In any other file, every @jit function is a stage of its own name.

A report has one source line for each instruction.  If ssdprof recorded the report, it is the
innermost line of the chain of inlined calls that has a stage (`profiled.py`).  In other reports it
is a line of the innermost inlined function.  Lines of "caller", of Triton's own libraries, and of
the header of a function (where the compiler's own instructions are) have no stage.  Instructions on
them get the stage of the last instruction before them that has one, or of the first one after them,
because compilers keep the instructions of a line together.  The number of such samples is reported.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssdprof import operators
from ssdprof.core.stalls import Line, StallSamples, most_first
from ssdprof.operators.operator import AHEAD, Stages
from ssdprof.stalls.read import RawKernel, base_name

CALLER = "caller"  # in STAGES: the function has the stage of its caller
IDLE_WARPS = "idle warps"  # warps without a role in this program, or before or after their role
UNKNOWN = "unknown"  # the stage of lines to which no function, table or comment gives one
_BLOCK_BARRIER = "barrier"  # a stall reason
# a comment with the stage of the lines that follow
_MARK = re.compile(r"\s*# stage ([a-z_]+(?:\.[a-z_]+)?)\b")
# the path of a file of Triton's own libraries
_LIBRARY = re.compile(r"[/\\]triton[/\\](language|experimental|tools)[/\\]")
_PACKAGE = Path(__file__).parent.parent


def attribute(
    kernel: RawKernel,
    sources: SourceFiles,
    operator_stages: Stages = Stages(),  # noqa: B008
) -> tuple[dict[str, StallSamples], tuple[Line, ...], int]:
    """Attribute the samples of a kernel's instructions.

    operator_stages: the stages of the kernel's operator, which give the order.

    Returns (stage -> its samples, in the order of the algorithm; the lines with their samples, the
    hottest first, with an entry for each stage of a line; the number of samples on lines without a
    stage, which got that of a neighbouring instruction, or `UNKNOWN` if no line has one).  Samples
    of `IDLE_WARPS` are not in this number.
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
        may_idle = specialized and line_stage.header
        sass = "" if point.line else point.sass
        for reason, count in point.samples.items():
            is_idle_warp = may_idle and reason == _BLOCK_BARRIER
            name = IDLE_WARPS if is_idle_warp else stage
            by_stage[name][reason] += count
            by_line[point.file, point.line, sass, line_stage.function, name][reason] += count
            if line_stage.stage is None and not is_idle_warp:
                from_neighbours += count
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
    stages = sorted(
        by_stage, key=lambda name: _stage_order(name, by_stage[name].total(), operator_stages)
    )
    return {name: most_first(by_stage[name]) for name in stages}, tuple(lines), from_neighbours


def is_idle(stage: str) -> bool:
    """Whether the warps in a stage have nothing to do, or are ahead of others: this costs no
    time.
    """
    return stage in (IDLE_WARPS, AHEAD)


def _stages(line_stages: Sequence[LineStage]) -> list[str]:
    """The stage of each instruction: that of its line, or a neighbour's if the line has none;
    `UNKNOWN` if no line has one.
    """
    stages = []
    last_known = ""
    for line_stage in line_stages:
        last_known = line_stage.stage or last_known
        stages.append(last_known)
    first_known = next(filter(None, stages), UNKNOWN)  # for the instructions before it
    return [stage or first_known for stage in stages]


def _stage_order(name: str, total: int, operator_stages: Stages) -> tuple[int, int, str]:
    """A key that sorts stages: in the order of the algorithm, then the other stages by the total of
    their samples, the largest first, then idle ones.
    """
    order = operator_stages.order
    if is_idle(name):
        return len(order) + 1, 0, name
    if name in order:
        return order.index(name), 0, name
    return len(order), -total, name


# --- the files of a report


class SourceFiles:
    """The source files of a report, with the stage and the text of each line.

    A file of ssdprof's kernels that the report does not contain is read from the installed package.

    A file is named here only after a call has asked for a line of it:

    not_recorded: names of files that the report lacks.
    unlabelled: names of files in which the stages of kernels are not known.
    """

    def __init__(self, recorded: Mapping[str, str]) -> None:
        """recorded: name of a file, as ncu's report has it -> its text."""
        self._recorded = recorded
        # SHA-256 of a file -> its entry in a table: see `Stages.sources`
        self._entries = Stages.together(
            [operator.stages for operator in operators.records()]
        ).sources
        self._files: dict[str, SourceFile | None] = {}
        self.not_recorded: set[str] = set()
        self.unlabelled: set[str] = set()

    def stage_of(self, file: str, line: int) -> LineStage:
        """The stage of a line.  A line of a library of Triton, or no line, has none.  A file of
        which neither the report nor this machine has the text is one stage, with the file's name.
        """
        if not file or not line or _LIBRARY.search(file):
            return LineStage()
        parsed = self._file(file)
        if parsed and not parsed.labelled:
            self.unlabelled.add(base_name(file))
        return parsed.stage_of(line) if parsed else LineStage("", base_name(file))

    def text(self, file: str, line: int) -> str:
        """The text of a line, without white space around it; empty if it is not known."""
        if file not in self._recorded and (not file or _LIBRARY.search(file)):
            return ""
        parsed = self._file(file)
        return parsed.text[line - 1].strip() if parsed and 0 < line <= len(parsed.text) else ""

    def specialized(self, kernel: str) -> bool:
        """Whether a function of this name in any of the report's files gives roles to its warps."""
        files = (self._file(file) for file in self._recorded if not _LIBRARY.search(file))
        return any(parsed and kernel in parsed.specialized for parsed in files)

    def implementation(self, kernel: str) -> str:
        """The implementation that launches a kernel of another library, if a table has the file of
        the kernel; empty for any other kernel.
        """
        for text in self._recorded.values():
            entry = self._entries.get(_sha256(text))
            if entry and kernel in entry["stages"]:
                return str(entry["implementation"])
        return ""

    def _file(self, file: str) -> SourceFile | None:
        """The parsed file, from the report or from this machine; None if neither has it."""
        if file not in self._files:
            text = self._recorded.get(file)
            if text is None:
                self.not_recorded.add(base_name(file))
                text = _installed(file)
            self._files[file] = parse(text, self._entries.get(_sha256(text))) if text else None
        return self._files[file]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _installed(file: str) -> str | None:
    """The text of a kernel's file in the installed package; None if it has no such file, or if the
    path is not one of ssdprof's kernels.

    file: the path of the file on the machine where the report was made.
    """
    match = re.search(r"(?:^|[/\\])ssdprof[/\\](kernels[/\\].+\.py)$", file)
    if match is None:
        return None
    path = _PACKAGE / match[1].replace("\\", "/")
    return path.read_text(encoding="utf-8") if path.is_file() else None


# --- the stages of a file


@dataclass(frozen=True)
class LineStage:
    """The function and the stage of a source line.

    function: the innermost @jit function that has the line; empty if there is none.
    stage: None if the line has none of its own: it is in a function with the stage of its caller,
        in the header of a function, or in a library of Triton, or its number is not known.
    header: whether the line is in the header of the function, from the first decorator to the line
        before the body.
    """

    function: str = ""
    stage: str | None = None
    header: bool = False


@dataclass(frozen=True)
class SourceFile:
    """A source file with the stages of its lines.

    text: the lines of the file.
    lines: number of a line in a @jit function -> its function and stage.
    specialized: the names of @jit functions that give roles to their warps.
    labelled: whether the stages of @jit functions are known, from the file itself or from a table,
        or there are no such functions.
    """

    text: tuple[str, ...]
    lines: Mapping[int, LineStage] = field(default_factory=dict)
    specialized: frozenset[str] = frozenset()
    labelled: bool = True

    def stage_of(self, line: int) -> LineStage:
        """The stage of a line.  That of a line outside of @jit functions is `UNKNOWN`: the compiler
        should name no such line.
        """
        return self.lines.get(line, LineStage("", UNKNOWN))


def parse(text: str, entry: Mapping[str, Any] | None = None) -> SourceFile:
    """The functions and stages of a file.  A text that is not Python, or is too deeply nested for
    Python's parser, has none.

    entry: the file's entry in a table of `operators/stages/`, which counts instead of the file's
        own declarations; None if no table has the file.
    """
    lines = tuple(text.splitlines())
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return SourceFile(lines)
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
    ]
    stages, starts, waits = _labels(tree, lines, functions)
    if entry:
        stages = entry["stages"]
        starts = entry["starts"]
        waits = {}
    line_stages: dict[int, LineStage] = {}
    for node in functions:  # a nested function comes after the one that contains it, and counts
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
    """The declarations of a file: (stages of functions, from STAGES; stages that begin at a line,
    from comments; stages of lines that wait, from WAITS).

    The first is None if the file has no STAGES.  A function that STAGES lacks has the stage of its
    caller.
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
    """(line number, stage) of the lines of a function, from its first decorator on.

    stages: function -> stage, where a function that is missing is `UNKNOWN`; None if the file
        declares none, so that each function is a stage of its own name.
    starts: number of a line -> the stage that begins there, up to the next one or the end of the
        function.  In a function with the stage of its caller, `starts` and `waits` do not count.
    waits: number of a line that waits at a barrier -> its stage.
    """
    body = node.body[0].lineno
    # comments above the first statement belong to the body, because one may begin a stage
    while body > node.lineno + 1 and lines[body - 2].lstrip().startswith("#"):
        body -= 1
    stage = node.name
    if stages is not None:
        stage = stages.get(node.name, UNKNOWN)
    has_stage_of_caller = stage == CALLER
    first = min(decorator.lineno for decorator in node.decorator_list)
    for number in range(first, body):
        yield number, LineStage(node.name, header=True)
    for number in _lines(node, start=body):
        stage = starts.get(number, stage)
        line_stage = None if has_stage_of_caller else waits.get(number, stage)
        yield number, LineStage(node.name, line_stage)


def _lines(node: ast.FunctionDef | ast.Call, start: int) -> range:
    """The numbers of the lines from `start` to the end of a node."""
    return range(start, (node.end_lineno or node.lineno) + 1)


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return "jit" in ast.unparse(called).rsplit(".", 1)[-1]


def _specializes(function: ast.FunctionDef) -> bool:
    """Whether a function gives roles to its warps."""
    return any(_called(node) == "warp_specialize" for node in ast.walk(function))


def _table(tree: ast.Module, name: str) -> dict[str, str] | None:
    """The dictionary that a file assigns to a name, with keys and values as text; None if there is
    none, also if a user's file assigns something else to the name.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(item) for item in node.targets] == [name]:
            value: object = None
            with suppress(ValueError):  # it is not a literal
                value = ast.literal_eval(node.value)
            if isinstance(value, dict):
                return {str(key): str(stage) for key, stage in value.items()}
            return None
    return None


def _waits(tree: ast.Module, stages: Mapping[str, str]) -> dict[int, str]:
    """Number of a line that waits -> its stage.

    The lines are those of `mbarrier.wait(shared.NAME...)`, `rings.NAME.wait_full(...)` and
    `rings.NAME.wait_empty(...)`, for every NAME in `stages`.  Other calls of `mbarrier.wait` count,
    too, if their first argument has an attribute NAME.

    stages: NAME -> stage: `WAITS` of the file.
    """
    waits: dict[int, str] = {}
    for node in ast.walk(tree):
        if not (stages and isinstance(node, ast.Call)):
            continue
        if ast.unparse(node.func) == "mbarrier.wait":
            barrier: ast.AST = node.args[0] if node.args else node.func
        elif _called(node) in ("wait_full", "wait_empty"):
            barrier = node.func
        else:
            continue
        for part in ast.walk(barrier):
            if isinstance(part, ast.Attribute) and part.attr in stages:
                waits |= dict.fromkeys(_lines(node, node.lineno), stages[part.attr])
                break
    return waits


def _called(node: ast.AST) -> str:
    """The name of the function that a node calls, without the names before its last dot; empty if
    the node is no call.
    """
    return ast.unparse(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""
