"""Lines to stages, from the source; samples to lines and stages; and the line table that names
callers.
"""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from stalls import synthetic

import ssdprof
from ssdprof.operators import records
from ssdprof.operators.operator import Stages
from ssdprof.operators.ssd import STAGES as SSD_STAGES
from ssdprof.report.stalls import compose
from ssdprof.stalls import profiled
from ssdprof.stalls.attribute import (
    CALLER,
    IDLE_WARPS,
    UNKNOWN,
    LineStage,
    SourceFiles,
    attribute,
    parse,
)
from ssdprof.stalls.facts import analyse, stalls_of
from ssdprof.stalls.read import Point, RawKernel

KERNELS = Path(ssdprof.__file__).parent / "kernels"
STAGES = Stages.together([one.stages for one in records()])
PROFILED = sorted(
    file
    for file in KERNELS.rglob("*.py")
    if file.stem != "mixer" and re.search(r"^@\w+\.jit", file.read_text(), re.M)
)  # mixers have no stages

SOURCE = '''"""A kernel."""
STAGES = {"helper": "caller", "load": "loads", "_kernel": "setup"}
WAITS = {"full": "waiting.chunk"}


@triton.jit
def helper(x):
    return x + 1


@triton.jit
def load(ptr):
    """Words."""
    mbarrier.wait(shared.full.index(0), 1)
    mbarrier.wait(
        shared.empty.index(0),
        1,
    )
    return helper(ptr)


@triton.jit(launch_metadata=words)
def _kernel(
    x_ptr,
    N: tl.constexpr,
):
    # stage ticket: first
    ticket = 0
    for i in range(3):
        # stage chunk_scan.previous
        a = load(x_ptr)
    # stage chunk_state: after the loop
    b = 1
'''


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SOURCE.splitlines(), 1) if text in line)


# --- samples to lines and stages, on a kernel whose samples are added up by hand

KERNEL = synthetic.kernel()


def attributed(kernel: RawKernel) -> dict[str, int]:
    stages, _, _ = attribute(kernel, SourceFiles(kernel.sources), SSD_STAGES)
    return {stage: sum(samples.values()) for stage, samples in stages.items()}


def test_every_sample_goes_to_one_stage():
    assert attributed(KERNEL) == {
        "loads": 38 + 10,  # with the helper after it
        "chunk_scan.current": 68 + 12,  # with the library after it
        "ahead": 2 + 20,  # the header's S2R has no instruction before it
        IDLE_WARPS: 50,
    }
    assert attribute(KERNEL, SourceFiles(KERNEL.sources))[2] == 2 + 10 + 12
    plain = {synthetic.FILE: synthetic.SOURCE.replace("gl.warp_specialize", "gl.static_print")}
    assert attributed(replace(KERNEL, sources=plain))["ahead"] == 2 + 50 + 20, (
        "without roles all have one"
    )


def test_stages_come_in_the_order_of_the_algorithm_and_what_is_idle_last():
    assert list(attributed(KERNEL)) == ["loads", "chunk_scan.current", "ahead", IDLE_WARPS]
    known = Stages(order=("ahead", "chunk_scan.current", "loads"))
    stages, _, _ = attribute(KERNEL, SourceFiles(KERNEL.sources), known)
    assert list(stages) == ["chunk_scan.current", "loads", "ahead", IDLE_WARPS]
    assert stalls_of(KERNEL).idle == ("ahead", IDLE_WARPS)


def test_a_line_is_shown_with_its_text_and_the_hottest_first():
    _, lines, _ = attribute(KERNEL, SourceFiles(KERNEL.sources))
    assert sum(line.total for line in lines) == 200
    hottest = lines[0]
    assert (hottest.file, hottest.line, hottest.text) == ("kernel.py", 9, "return exp2(x)")
    assert hottest.samples == {"short_scoreboard": 60, "selected": 8}
    assert [line.total for line in lines] == sorted((line.total for line in lines), reverse=True)
    # no folders of the machine that ran it
    assert {line.file for line in lines} == {"kernel.py", "standard.py"}


def test_without_line_information_instructions_stand_for_lines():
    kernel = synthetic.kernel(
        points=(Point(1, "", 0, "LDG R1", {"wait": 3}), Point(2, "", 0, "STG R2", {"wait": 4}))
    )
    stages, lines, _ = attribute(kernel, SourceFiles({}))
    assert [(line.text, line.total) for line in lines] == [("STG R2", 4), ("LDG R1", 3)]
    assert list(stages) == [UNKNOWN]


# --- lines to stages


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("return x + 1", LineStage("helper", None)),
        ("shared.full", LineStage("load", "waiting.chunk")),
        ("shared.empty", LineStage("load", "loads")),
        ("return helper", LineStage("load", "loads")),
        ("N: tl.constexpr", LineStage("_kernel", None, header=True)),
        ("ticket = 0", LineStage("_kernel", "ticket")),
        ("for i in", LineStage("_kernel", "ticket")),
        ("a = load", LineStage("_kernel", "chunk_scan.previous")),
        ("b = 1", LineStage("_kernel", "chunk_state")),
        ("STAGES =", LineStage("", UNKNOWN)),
    ],
)
def test_a_line_has_the_stage_that_the_source_says(text, place: LineStage):
    assert parse(SOURCE).stage_of(line_of(text)) == place
    moved = parse("# a line more\n" * 7 + SOURCE)
    assert moved.stage_of(line_of(text) + 7) == place


@pytest.mark.parametrize(
    ("source", "line", "place"),
    [
        # without a table, functions are the stages
        (
            SOURCE.replace("STAGES", "X").replace("WAITS", "Y"),
            line_of("shared.full"),
            LineStage("load", "load"),
        ),
        (SOURCE.replace("STAGES", "X"), line_of("return x + 1"), LineStage("helper", "helper")),
        # a function that the table lacks is part of its caller
        (
            SOURCE.replace('"load": "loads", ', ""),
            line_of("return helper"),
            LineStage("load", None),
        ),
        ("__global__ void k() {}", 1, LineStage("", UNKNOWN)),  # not Python
        # a name of the user that stands for something else is no table
        *(
            (
                f"STAGES = {it}\nWAITS = {it}\n@jit\ndef scan(x):\n    return x\n",
                5,
                LineStage("scan", "scan"),
            )
            for it in ("3", "tl.constexpr(3)", "(1, 2)")
        ),
    ],
)
def test_lines_that_no_table_knows(source, line, place: LineStage):
    assert parse(source).stage_of(line) == place
    assert not parse(source.replace("STAGES", "X")).labelled or "jit" not in source
    assert not parse("-" * 10**5 + "1").lines


def test_lines_of_libraries_and_line_0_belong_to_their_caller():
    sources = SourceFiles(
        {"/x/site-packages/triton/language/standard.py": "import this\n", "/a/k.py": SOURCE}
    )
    assert sources.stage_of("/x/site-packages/triton/language/standard.py", 1) == LineStage()
    assert sources.stage_of("/a/k.py", 0) == LineStage()
    assert not sources.not_recorded


def test_a_file_that_was_not_recorded_is_taken_from_the_package_and_named():
    sources = SourceFiles({})
    stage = KERNELS / "ssd" / "portable.py"
    number = next(
        i
        for i, line in enumerate(stage.read_text().splitlines(), 1)
        if "while tl.atomic_add" in line
    )
    place = sources.stage_of("/elsewhere/site-packages/ssdprof/kernels/ssd/portable.py", number)
    assert place == LineStage("wait_for_state", "state_passing.wait")
    assert sources.not_recorded == {"portable.py"}
    assert sources.stage_of("/home/someone/kernel.py", 3) == LineStage("", "kernel.py")


# --- our own kernels


@pytest.mark.parametrize("file", PROFILED, ids=lambda file: file.name)
def test_every_line_of_a_kernel_has_a_stage_that_exists_and_tables_and_marks_are_of_kernels(
    file: Path,
):
    text = file.read_text()
    parsed = parse(text)
    lines = text.splitlines()
    functions = set(re.findall(r"^ *@\w+\.jit.*\n *def (\w+)", text, re.M))
    assert {place.function for place in parsed.lines.values()} == functions
    table = re.search(r"^STAGES = (\{.*?\})(?:  # fmt: skip)?$", text, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"(\w+)":', table[1]) if table else ()) <= functions
    assert {name for name in functions if name.endswith("_kernel")} <= set(
        re.findall(r'"(\w+)":', text)
    )
    stages = {place.stage for place in parsed.lines.values()} - {None}
    assert stages <= set(STAGES.order), f"{file.name}: {stages - set(STAGES.order)}"
    assert {name for name in functions if name.endswith("_kernel")} <= set(STAGES.kernels)
    marks = {number for number, line in enumerate(lines, 1) if re.match(r"\s*# stage ", line)}
    assert not any(
        parsed.stage_of(number).header or parsed.stage_of(number).stage == UNKNOWN
        for number in marks
    )


def test_every_wait_of_the_hopper_kernels_has_a_stage():
    """In those of GDN at the call that names the ring, because `load_tile` is called for several
    rings.
    """
    stages = {}
    for operator, call in (
        ("ssd", r"mbarrier\.wait\("),
        ("gdn", r"rings\.\w+\.wait_(full|empty)\("),
    ):
        for file in (KERNELS / operator / "hopper").glob("role_*.py"):
            lines = file.read_text().splitlines()
            parsed = parse(file.read_text())
            waits = (number for number, line in enumerate(lines, 1) if re.search(call, line))
            stages.setdefault(operator, set()).update(
                str(parsed.stage_of(number).stage) for number in waits
            )
    assert stages == {
        "ssd": {"ahead", "chunk_scan.residual", "waiting.chunk", "waiting.gates", "waiting.scores"},
        "gdn": {
            "ahead",
            "chunk_output",
            "waiting.chunk",
            "waiting.inverse",
            "waiting.weights",
            "waiting.update",
        },
    }


# --- other libraries' kernels: stages by the hash of their file


FILE = "/site/them/kernel.py"
TEXT = """@triton.jit
def twice(x):
    return x + x
@triton.jit
def _their_kernel(
    x_ptr,
):
    a = tl.load(x_ptr)
    b = twice(a)
    tl.store(x_ptr, b)
"""
KNOWN = {
    "implementation": "them",
    "stages": {"twice": CALLER, "_their_kernel": "chunk_scan"},
    "starts": {8: "chunk_scan.previous", 10: "chunk_scan.residual"},
}
TABLES = {one.name: one.stages for one in records() if one.stages.sources}


def theirs(text: str = TEXT) -> RawKernel:
    points = tuple(
        Point(0x100 + line, FILE, line, "FADD", {"wait": samples})
        for line, samples in ((8, 5), (3, 2), (10, 1))
    )
    return synthetic.kernel(function="_their_kernel", points=points, sources={FILE: text})


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(
        Stages,
        "together",
        lambda _: Stages(sources={hashlib.sha256(TEXT.encode()).hexdigest(): KNOWN}),
    )


@pytest.mark.usefixtures("known")
def test_lines_of_a_known_file_have_the_stages_of_the_table():
    found = stalls_of(theirs())
    assert found.stages == {"chunk_scan.previous": {"wait": 7}, "chunk_scan.residual": {"wait": 1}}
    assert (found.implementation, found.unlabelled) == ("them", ())
    assert SourceFiles({FILE: TEXT}).stage_of(FILE, 7) == LineStage(
        "_their_kernel", None, header=True
    )


@pytest.mark.usefixtures("known")
def test_another_version_of_the_file_is_listed_by_function_and_line_and_says_so():
    changed = theirs(TEXT.replace("x + x", "2 * x"))
    found = stalls_of(changed)
    assert found.stages == {"_their_kernel": {"wait": 6}, "twice": {"wait": 2}}
    assert [(line.line, line.total) for line in found.lines] == [(8, 5), (3, 2), (10, 1)]
    assert (found.implementation, found.unlabelled) == ("", ("kernel.py",))
    caveats = compose(analyse([synthetic.report(changed)])).caveats
    assert any(
        text.startswith("The stages of kernel.py are not known (_their_kernel)") for text in caveats
    )
    for labelled in (theirs(), KERNEL):
        assert not any(
            "not known" in text for text in compose(analyse([synthetic.report(labelled)])).caveats
        )


@pytest.mark.parametrize("operator", TABLES)
def test_tables_name_stages_that_exist(operator):
    known = TABLES[operator]
    for sha256, source in known.sources.items():
        assert len(sha256) == 64
        assert {*source["stages"].values(), *source["starts"].values()} <= {*known.order, CALLER}, (
            source["file"]
        )


# --- the line table of a kernel's PTX, with callers instead of helpers


CALLS = """STAGES = {"helper": "caller", "scan": "chunk_scan", "_kernel": "setup"}
@jit
def helper(x):
    return x + 1
@jit
def scan(x):
    return helper(x)
@jit
def _kernel(p):
    return scan(p)
"""
PTX = """.file 1 "/a/kernel.py"
.file 2 "/x/triton/language/standard.py"
"""
SOURCES = SourceFiles({"/a/kernel.py": CALLS, "/x/triton/language/standard.py": ""})


@pytest.mark.parametrize(
    ("loc", "named"),
    [
        (".loc 1 4 9 // kernel.py:4:9 @[ kernel.py:7:12 @[ kernel.py:10:5 ] ]", "1 7 12"),
        (".loc 2 50 3 // standard.py:50:3 @[ kernel.py:4:9 @[ kernel.py:7:12 ] ]", "1 7 12"),
        (".loc\t2 50 3        // standard.py:50:3 @[ kernel.py:10:5 ]", "1 10 5"),
        # the helper has its own stage
        (".loc 1 7 12 // kernel.py:7:12 @[ kernel.py:10:5 ]", "1 7 12"),
        (".loc 1 4 9 // kernel.py:4:9", "1 4 9"),  # no caller
        (".loc 1 4 9", "1 4 9"),
        # instructions of two lines were merged
        (".loc 1 4 9 // kernel.py:4:9 @[ kernel.py:0 ]", "1 4 9"),
        # a file that is not in the table
        (".loc 2 50 3 // standard.py:50:3 @[ other.py:10:5 ]", "2 50 3"),
        # no function at that line
        (".loc 2 50 3 // standard.py:50:3 @[ kernel.py:1:1 ]", "2 50 3"),
    ],
)
def test_the_innermost_line_that_has_a_stage_is_named(loc, named):
    before = PTX + "  " + loc
    after = profiled.name_call_sites(PTX + f"  {loc}", SOURCES)
    assert after.splitlines()[2].split("//")[0].split() == [".loc", *named.split()]
    assert after.partition("//")[2] == before.partition("//")[2]  # the remark stays


def test_nothing_but_a_loc_is_touched():
    text = (
        PTX + "\tadd.s32 %r1, %r2, 1; // kernel.py:4:9 @[ kernel.py:7:12 ]\n.loc_of: bra .loc_of;\n"
    )
    assert profiled.name_call_sites(text, SOURCES) == text


def test_of_two_files_of_one_name_the_one_with_such_a_line_is_meant_and_files_are_read(tmp_path):
    files = (
        '.file 1 "/b/kernel.py"\n.file 2 "/a/kernel.py"\n.file 3 "/x/triton/language/standard.py"\n'
    )
    sources = SourceFiles({"/a/kernel.py": CALLS, "/b/kernel.py": "x = 1\n"})
    loc = ".loc 3 50 3 // standard.py:50:3 @[ kernel.py:7:12 ]"
    assert ".loc 2 7 12 //" in profiled.name_call_sites(files + loc, sources)
    (file := tmp_path / "kernel.py").write_text(CALLS)
    ptx = (
        f'.file 1 "{file}"\n.file 2 "/gone/helpers.py"\n.loc 1 4 9 // kernel.py:4:9 @[ '
        "kernel.py:7:12 ]\n"
    )
    assert ".loc 1 7 12 //" in profiled.name_call_sites(ptx)


def test_triton_asks_the_hook_for_a_key_and_shows_it_the_stages(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", None)
    profiled.install()
    hook = triton.knobs.runtime.add_stages_inspection_hook
    assert all(hook())  # a key and a digest
    loc = PTX + ".loc 1 4 9"
    stages = {"ptx": lambda module, metadata: f"{module}{metadata}", "cubin": None}
    assert hook("compiler", stages, "options", "language", 90) is None
    assert stages["ptx"](loc, " // no chain") == loc + " // no chain"  # type: ignore[misc]
    assert hook("compiler", others := {"amdgcn": None}, "options", "language", None) is None
    assert others == {"amdgcn": None}
