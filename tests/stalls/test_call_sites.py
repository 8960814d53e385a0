"""The line table of a kernel's PTX, with callers instead of helpers."""

import pytest
import triton

from ssdprof.stalls import call_sites
from ssdprof.stalls.sources import Sources

KERNEL = """STAGES = {"helper": "caller", "scan": "chunk_scan", "_kernel": "setup"}
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
FILES = """.file 1 "/a/kernel.py"
.file 2 "/x/triton/language/standard.py"
"""
SOURCES = Sources({"/a/kernel.py": KERNEL, "/x/triton/language/standard.py": ""})


@pytest.mark.parametrize(
    ("loc", "named"),
    [
        (".loc 1 4 9 // kernel.py:4:9 @[ kernel.py:7:12 @[ kernel.py:10:5 ] ]", "1 7 12"),
        (".loc 2 50 3 // standard.py:50:3 @[ kernel.py:4:9 @[ kernel.py:7:12 ] ]", "1 7 12"),
        (".loc\t2 50 3        // standard.py:50:3 @[ kernel.py:10:5 ]", "1 10 5"),
        (".loc 1 7 12 // kernel.py:7:12 @[ kernel.py:10:5 ]", "1 7 12"),  # the helper has its own stage
        (".loc 1 4 9 // kernel.py:4:9", "1 4 9"),  # no caller
        (".loc 1 4 9", "1 4 9"),
        (".loc 1 4 9 // kernel.py:4:9 @[ kernel.py:0 ]", "1 4 9"),  # instructions of two lines were merged
        (".loc 2 50 3 // standard.py:50:3 @[ other.py:10:5 ]", "2 50 3"),  # a file that is not in the table
        (".loc 2 50 3 // standard.py:50:3 @[ kernel.py:1:1 ]", "2 50 3"),  # no function at that line
    ],
)
def test_the_innermost_line_that_has_a_stage_is_named(loc: str, named: str) -> None:
    before, after = FILES + "  " + loc, call_sites.name_call_sites(FILES + f"  {loc}", SOURCES)
    file, line, column = named.split()
    found = after.splitlines()[2].split("//")[0].split()
    assert found == [".loc", file, line, column]
    assert after.partition("//")[2] == before.partition("//")[2]  # the remark stays


def test_nothing_else_is_touched() -> None:
    text = FILES + "\tadd.s32 %r1, %r2, 1; // kernel.py:4:9 @[ kernel.py:7:12 ]\n.loc_of: bra .loc_of;\n"
    assert call_sites.name_call_sites(text, SOURCES) == text


def test_of_two_files_of_one_name_the_one_with_such_a_line_is_meant() -> None:
    files = '.file 1 "/b/kernel.py"\n.file 2 "/a/kernel.py"\n.file 3 "/x/triton/language/standard.py"\n'
    sources = Sources({"/a/kernel.py": KERNEL, "/b/kernel.py": "x = 1\n"})
    loc = ".loc 3 50 3 // standard.py:50:3 @[ kernel.py:7:12 ]"
    assert ".loc 2 7 12 //" in call_sites.name_call_sites(files + loc, sources)


def test_files_are_read_where_they_are(tmp_path: object) -> None:
    file = tmp_path / "kernel.py"  # type: ignore[operator]
    file.write_text(KERNEL)
    ptx = f'.file 1 "{file}"\n.file 2 "/gone/helpers.py"\n.loc 1 4 9 // kernel.py:4:9 @[ kernel.py:7:12 ]\n'
    assert ".loc 1 7 12 //" in call_sites.name_call_sites(ptx)


def test_triton_asks_the_hook_for_a_key_and_shows_it_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", None)
    call_sites.install()
    hook = triton.knobs.runtime.add_stages_inspection_hook
    key, digest = hook()
    assert key
    assert digest
    loc = FILES + ".loc 1 4 9"
    stages = {"ptx": lambda module, metadata: f"{module}{metadata}", "cubin": None}
    assert hook("compiler", stages, "options", "language", 90) is None
    assert stages["ptx"](loc, " // no chain") == loc + " // no chain"  # type: ignore[misc]
    assert hook("compiler", {"amdgcn": None}, "options", "language", None) is None
