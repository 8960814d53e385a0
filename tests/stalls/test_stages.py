"""Lines to stages, from the source."""

import re
from pathlib import Path

import pytest

import ssdprof
from ssdprof.operators import outlines
from ssdprof.operators.outline import Stages
from ssdprof.stalls.sources import Sources
from ssdprof.stalls.stages import UNKNOWN, Place, parse

KERNELS = Path(ssdprof.__file__).parent / "kernels"
STAGES = Stages.together([one.stages for one in outlines()])
PROFILED = [file for file in KERNELS.rglob("*.py") if file.parent.name != "mixer"]  # those have no stages
FILES = sorted(file for file in PROFILED if re.search(r"^@\w+\.jit", file.read_text(), re.MULTILINE))
SSD = [file for file in FILES if "ssd" in file.relative_to(KERNELS).parts]
WITH_BARRIERS = {file.stem: text for file in SSD if "mbarrier.wait(" in (text := file.read_text())}

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
):  # fmt: skip
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


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("return x + 1", Place("helper", None)),
        ("shared.full", Place("load", "waiting.chunk")),
        ("shared.empty", Place("load", "loads")),
        ("return helper", Place("load", "loads")),
        ("N: tl.constexpr", Place("_kernel", None, header=True)),
        ("ticket = 0", Place("_kernel", "ticket")),
        ("for i in", Place("_kernel", "ticket")),
        ("a = load", Place("_kernel", "chunk_scan.previous")),
        ("b = 1", Place("_kernel", "chunk_state")),
        ("STAGES =", Place("", UNKNOWN)),
    ],
)
def test_a_line_has_the_stage_that_the_source_says(text: str, place: Place) -> None:
    assert parse(SOURCE).place(line_of(text)) == place
    moved = parse("# a line more\n" * 7 + SOURCE)
    assert moved.place(line_of(text) + 7) == place


def test_a_file_without_a_table_has_its_functions_as_stages() -> None:
    foreign = parse(SOURCE.replace("STAGES", "OTHER").replace("WAITS", "ANY"))
    assert foreign.place(line_of("shared.full")) == Place("load", "load")
    assert foreign.place(line_of("return x + 1")) == Place("helper", "helper")


@pytest.mark.parametrize("value", ["3", "tl.constexpr(3)", "(1, 2)"])
def test_a_name_of_the_user_that_stands_for_something_else_is_no_table(value: str) -> None:
    own = f"STAGES = {value}\nWAITS = {value}\n\n@triton.jit\ndef scan(x):\n    return x\n"
    parsed = parse(own)
    assert parsed.place(6) == Place("scan", "scan")
    assert not parsed.labelled


def test_a_function_that_the_table_forgot_is_unknown() -> None:
    assert parse(SOURCE.replace('"load": "loads", ', "")).place(line_of("return helper")) == Place("load", UNKNOWN)


def test_a_text_that_is_no_python_has_no_stages() -> None:
    assert parse("__global__ void k() {}").place(1) == Place("", UNKNOWN)


def test_library_lines_belong_to_their_caller() -> None:
    sources = Sources({"/x/site-packages/triton/language/standard.py": "import this\n"})
    assert sources.place("/x/site-packages/triton/language/standard.py", 1) == Place()
    assert not sources.not_recorded


def test_line_0_is_the_compilers_word_for_no_line() -> None:
    assert Sources({"/a/k.py": SOURCE}).place("/a/k.py", 0) == Place()


def test_a_file_that_was_not_recorded_is_taken_from_the_package_and_named() -> None:
    sources = Sources({})
    stage = KERNELS / "ssd" / "portable" / "stages.py"
    number = next(i for i, line in enumerate(stage.read_text().splitlines(), 1) if "while tl.atomic_add" in line)
    place = sources.place("/elsewhere/site-packages/ssdprof/kernels/ssd/portable/stages.py", number)
    assert place == Place("wait_for_state", "state_passing.wait")
    assert sources.not_recorded == {"stages.py"}
    assert sources.place("/home/someone/kernel.py", 3) == Place("", "kernel.py")


def test_an_excerpt_must_agree_with_the_installed_file() -> None:
    path = "/elsewhere/ssdprof/kernels/ssd/portable/stages.py"
    lines = (KERNELS / "ssd" / "portable" / "stages.py").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "while tl.atomic_add" in line)
    agreeing = Sources({}, {path: {number: lines[number - 1], number + 1: lines[number]}})
    assert agreeing.place(path, number).stage == "state_passing.wait"
    assert not agreeing.not_recorded
    other = Sources({}, {path: {number: lines[number - 1], number + 1: "return 7"}})
    assert other.place(path, number) == Place("", "stages.py")
    assert other.text(path, number + 1) == "return 7"
    assert other.not_recorded == {"stages.py"}


def test_who_ends_a_wait_is_found_in_the_source() -> None:
    source = """
WAITS = {"full": "waiting.chunk", "scored": "waiting.scores", "empty": "ahead"}
def load(shared):
    mbarrier.wait(shared.empty.index(0), 1)
    full = shared.full.index(0)
    mbarrier.expect(full, 128)
    mbarrier.expect(full, 128)
def gates(shared):
    other = shared.decay.index(0)
    mbarrier.arrive(shared.full.index(0), count=1)
    mbarrier.arrive(other)
def scores(shared):
    mbarrier.wait(shared.full.index(0), 1)
    arrive(shared.scored.index(0))
"""
    assert parse(source).fillers == {"waiting.chunk": ("load", "gates"), "waiting.scores": ("scores",)}
    assert Sources({"/a/k.py": source, "/a/other.py": "x = 1\n"}).fillers() == parse(source).fillers


# --- our own kernels


def test_there_are_kernels_to_look_at() -> None:
    assert len(FILES) > 8


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_jit_function_has_a_stage_that_exists(file: Path) -> None:
    parsed = parse(file.read_text())
    assert {f.name for f in parsed.functions} == set(re.findall(r"^ *@\w+\.jit.*\n *def (\w+)", file.read_text(), re.M))
    for function in parsed.functions:
        assert function.stage != UNKNOWN, f"{file.name}: STAGES lacks {function.name}"
        for stage in (function.stage, *(stage for _, stage in function.starts)):
            assert stage is None or stage in STAGES.order, f"{file.name}: {function.name}: {stage} is no stage"
    assert set(parsed.waits.values()) <= set(STAGES.order)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tables_name_nothing_that_is_gone(file: Path) -> None:
    text = file.read_text()
    functions = {function.name for function in parse(text).functions}
    table = re.search(r"^STAGES = (\{.*?\})(?:  # fmt: skip)?$", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert set(re.findall(r'"(\w+)":', table[1])) == functions


def test_every_mark_is_inside_a_kernel() -> None:
    for file in PROFILED:
        text = file.read_text()
        marks = {number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*# stage ", line)}
        starts = {number for function in parse(text).functions for number, _ in function.starts}
        assert marks == starts, file.name


def test_every_barrier_of_the_hopper_kernel_has_a_stage() -> None:
    assert "role_states" in WITH_BARRIERS
    for text in WITH_BARRIERS.values():
        waits = [number for number, line in enumerate(text.splitlines(), 1) if "mbarrier.wait(" in line]
        assert set(waits) <= set(parse(text).waits)


def test_every_wait_of_the_hopper_kernel_is_ended_by_somebody() -> None:
    fillers = Sources(WITH_BARRIERS).fillers()
    assert set(fillers) == {stage for text in WITH_BARRIERS.values() for stage in parse(text).waits.values()}
    assert set(fillers["waiting.scores"]) == {"decayed_scores"}
    assert set(fillers["waiting.chunk"]) == {"put_gates", "hand_over", "load_first", "load_chunk"}
    assert set(fillers["ahead"]) == {"decayed_scores", "add_turn", "scan_chunk", "hand_out"}
    assert set(fillers["chunk_scan.residual"]) == {"store_chunk"}


def test_waits_of_the_gdn_hopper_kernel_have_stages() -> None:
    """At the call that names the ring, because `load_tile` is called for several rings."""
    found: set[str] = set()
    for file in (KERNELS / "gdn" / "hopper").glob("role_*.py"):
        text = file.read_text()
        waits = {
            n
            for n, line in enumerate(text.splitlines(), 1)
            if re.search(r"(rings|inversion)\.\w+\.wait_(full|empty)\(", line)
        }
        parsed = parse(text)
        assert set(parsed.waits) == waits, file.name
        found |= set(parsed.waits.values())
    assert found == {
        "ahead", "chunk_output", "waiting.chunk", "waiting.inverse", "waiting.weights", "waiting.update",
    }  # fmt: skip


def test_the_fused_kernels_have_every_stage() -> None:
    for folder, *names in (
        ("portable", "portable_kernel", "stages"),
        ("hopper", "hopper_kernel", "assignment", *WITH_BARRIERS),
    ):
        found: set[str] = set()
        for name in names:
            for function in parse((KERNELS / "ssd" / folder / f"{name}.py").read_text()).functions:
                found |= {function.stage or ""} | {stage for _, stage in function.starts}
        assert {
            "ticket", "chunk_cumsum", "bmm_chunk", "chunk_state", "state_passing.wait", "state_passing.load",
            "state_passing.store", "chunk_scan.previous", "chunk_scan.current", "chunk_scan.residual",
        } <= found  # fmt: skip


def test_launched_kernels_are_known_by_name() -> None:
    launched = {
        function.name
        for file in FILES
        for function in parse(file.read_text()).functions
        if function.name.endswith("_kernel")
    }
    assert launched == set(STAGES.kernels)
