"""Other libraries' kernels: stages by the hash of their file, and the message for an unknown file."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest
from stalls import synthetic

from ssdprof.operators import outlines
from ssdprof.operators.known_sources import KnownSource, known_sources
from ssdprof.report.stall_document import compose
from ssdprof.stalls import sources
from ssdprof.stalls.analyse import analyse, stalls_of
from ssdprof.stalls.raw import Point, RawKernel
from ssdprof.stalls.sources import Sources
from ssdprof.stalls.stages import CALLER, Place, parse

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
KNOWN = KnownSource(
    sha256=hashlib.sha256(TEXT.encode()).hexdigest(),
    version="them 1.0",
    file="them/kernel.py",
    implementation="them",
    stages={"twice": CALLER, "_their_kernel": "chunk_scan"},
    starts={8: "chunk_scan.previous", 10: "chunk_scan.residual"},
)
TABLES = {outline.name: outline.stages for outline in outlines() if outline.stages.sources}


def launched(text: str = TEXT) -> RawKernel:
    points = tuple(
        Point(0x100 + line, FILE, line, "FADD", {"wait": samples}) for line, samples in ((8, 5), (3, 2), (10, 1))
    )
    return synthetic.kernel(function="_their_kernel", points=points, sources={FILE: text})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_all_known", lambda: {KNOWN.sha256: KNOWN})


@pytest.mark.usefixtures("known")
def test_lines_of_a_known_file_have_the_stages_of_the_table() -> None:
    found = stalls_of(launched())
    assert {stage.name: stage.total for stage in found.stages} == {"chunk_scan.previous": 7, "chunk_scan.residual": 1}
    assert found.implementation == "them"
    assert found.unlabelled == ()
    assert Sources({FILE: TEXT}).place(FILE, 7) == Place("_their_kernel", None, header=True)


@pytest.mark.usefixtures("known")
def test_another_version_of_the_file_is_listed_by_function_and_line_and_says_so() -> None:
    changed = launched(TEXT.replace("x + x", "2 * x"))
    found = stalls_of(changed)
    assert {stage.name: stage.total for stage in found.stages} == {"_their_kernel": 6, "twice": 2}
    assert [(line.line, line.total) for line in found.lines] == [(8, 5), (3, 2), (10, 1)]
    assert (found.implementation, found.unlabelled) == ("", ("kernel.py",))
    caveats = compose(analyse([synthetic.report(changed)])).caveats
    assert any(text.startswith("The stages of kernel.py are not known (_their_kernel)") for text in caveats)
    assert not any("not known" in text for text in compose(analyse([synthetic.report(launched())])).caveats)


def test_our_own_kernels_are_labelled() -> None:
    assert stalls_of(synthetic.kernel()).unlabelled == ()


def test_a_table_is_read(tmp_path: Path) -> None:
    table = tmp_path / "known_sources.toml"
    table.write_text(
        '[[source]]\nversion = "v"\nfile = "f"\nsha256 = "ab"\nstages = { k = "setup" }\nstarts = { 7 = "loads" }\n'
    )
    (source,) = known_sources(table).values()
    assert (source.sha256, source.implementation, source.stages) == ("ab", "", {"k": "setup"})
    assert source.starts == {7: "loads"}


@pytest.mark.parametrize("operator", TABLES)
def test_tables_name_stages_that_exist(operator: str) -> None:
    known = TABLES[operator]
    for sha256, source in known.sources.items():
        assert len(sha256) == 64
        assert {*source.stages.values(), *source.starts.values()} <= {*known.order, CALLER}, source.file


@pytest.mark.parametrize(
    "source",
    [source for known in TABLES.values() for source in known.sources.values()],
    ids=lambda source: f"{source.version}: {source.file}",
)
def test_stages_of_an_installed_file_begin_inside_its_kernels(source: KnownSource) -> None:
    """Runs if the exact file of the table is installed."""
    package, *inside = source.file.split("/")
    spec = importlib.util.find_spec(package)
    place = Path(spec.origin).parent.joinpath(*inside) if spec and spec.origin else Path("nowhere")
    if not place.is_file() or hashlib.sha256(place.read_bytes()).hexdigest() != source.sha256:
        pytest.skip(f"{source.version} is not installed")
    parsed = parse(place.read_text(encoding="utf-8"), source)
    assert set(source.stages) <= {function.name for function in parsed.functions}
    for line, stage in source.starts.items():
        assert parsed.place(line).stage == stage
