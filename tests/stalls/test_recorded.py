"""Reports of our own kernels, recorded on an H200 with ncu 2025.3.1.

unfused, fused            a layer of granite-4.0-h-1b, 131,072 tokens, with an earlier version of
                          the Hopper kernel
demo/                     output of `ssdprof run demo --seq 4k --stalls`: two reports, and its JSON
fused_portable            a layer of the same sizes with a gate, 16,384 tokens: see
                          benchmarks/record_stalls.py
fused_portable_before     the kernel before two hints of this report were followed
no_source                 fused_portable without the data of the section SourceCounters, cut out of
                          the file
no_counters               the Hopper kernel on those sizes, recorded with three sections without
                          counters of warps
small/                    4,096 tokens and 8 heads, without the sections about bytes, and before
                          callers' lines were named
"""

import lzma
import random
from functools import cache
from pathlib import Path

import pytest

from ssdprof.core.stalls import KernelStalls, StallReport
from ssdprof.errors import BadInputError
from ssdprof.jobs import documents
from ssdprof.report import stalls as words
from ssdprof.report.stalls import compose
from ssdprof.report.stalls import kernel_groups as groups
from ssdprof.stalls.facts import analyse
from ssdprof.stalls.read import read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
DATA = Path(__file__).parent / "data"
RESULT = ROOT / "benchmarks" / "results" / "h200-granite-4.0-h-1b-128k-stalls" / "stalls.json"
ALGORITHM = {
    "ticket",
    "chunk_cumsum",
    "bmm_chunk",
    "chunk_state",
    "state_passing.wait",
    "state_passing.load",
    "state_passing.store",
    "chunk_scan.previous",
    "chunk_scan.current",
    "chunk_scan.residual",
}
UNFUSED = (
    "_chunk_cumsum_kernel",
    "_chunk_state_kernel",
    "_state_passing_kernel",
    "_bmm_chunk_kernel",
    "_chunk_scan_kernel",
)
SAMPLED = ("unfused", "fused", "fused_portable", "fused_portable_before", "small/unfused")


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    for file in DATA.rglob("*.xz"):
        target = folder / file.relative_to(DATA).with_suffix("")
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(lzma.decompress(file.read_bytes()))
    return folder


@cache
def analysed(folder: Path, name: str) -> StallReport:
    return analyse([read(folder / f"{name}.ncu-rep")])


def kernels(folder: Path, name: str) -> tuple[KernelStalls, ...]:
    return analysed(folder, name).kernels


@pytest.mark.parametrize("name", SAMPLED)
def test_every_self_check_holds(unpacked: Path, name):
    report = analysed(unpacked, name)
    checks = [
        pair
        for one in (report.checks, *(kernel.checks for kernel in report.kernels))
        for pair in one.items()
    ]
    assert [name for name, (status, _) in checks if status != "ok"] == [
        "only the wanted launches were profiled"
    ]


@pytest.mark.parametrize(
    ("name", "idle"), [("fused", {"idle warps", "ahead"}), ("fused_portable", set())]
)
def test_one_launch_has_every_stage_and_idle_warps_are_no_cost(unpacked: Path, name, idle):
    (kernel,) = kernels(unpacked, name)
    assert kernel.implementation == "fused"
    assert set(kernel.stages) >= ALGORITHM
    assert "unknown" not in kernel.stages
    total = sum(kernel.samples.values())
    assert (
        sum(sum(samples.values()) for samples in kernel.stages.values())
        == kernel.sample_count
        == total
    )
    assert sum(line.total for line in kernel.lines) == total
    assert set(kernel.idle) == idle
    # one of the Hopper kernel's 16 warps has no role
    assert kernel.busy_samples < total * 15 / 16 if idle else kernel.busy_samples == total
    (group,) = groups(analysed(unpacked, name))
    assert sum(group.all.values()) == pytest.approx(100)
    assert not idle & set(group.stages)


@pytest.mark.parametrize("name", ["unfused", "small/unfused"])
def test_the_unfused_pipeline_is_five_kernels_of_one_design(unpacked: Path, name):
    found = kernels(unpacked, name)
    assert tuple(kernel.kernel for kernel in found) == UNFUSED
    (group,) = groups(analysed(unpacked, name))
    assert set(group.whole) >= {
        "chunk_cumsum",
        "chunk_state",
        "state_passing",
        "bmm_chunk",
        "chunk_scan",
    }
    assert group.duration_us == pytest.approx(sum(kernel.duration_us or 0 for kernel in found))
    for kernel in found:
        stage = kernel.kernel.removeprefix("_").removesuffix("_kernel")
        assert {name.split(".")[0] for name in kernel.stages} == {stage}


def test_callers_lines_leave_next_to_nothing_to_neighbours(unpacked: Path):
    named = [
        kernel
        for name in ("unfused", "fused", "fused_portable")
        for kernel in kernels(unpacked, name)
    ]
    for kernel in named:
        assert kernel.from_neighbours < 0.015 * sum(kernel.samples.values()), kernel.kernel
        assert not {"standard.py", "_triton.py"} & {
            line.file for line in kernel.lines if line.total > 20
        }
    before = kernels(unpacked, "small/unfused")
    assert max(kernel.from_neighbours / sum(kernel.samples.values()) for kernel in before) > 0.1


def test_a_report_without_source_counters_says_so_and_shows_the_rest(unpacked: Path):
    (kernel,) = kernels(unpacked, "no_source")
    (full,) = kernels(unpacked, "fused_portable")
    facts = [
        name
        for name in KernelStalls.model_fields
        if name.endswith(("pct", "bytes", "flops", "us", "waves"))
    ]
    assert [getattr(kernel, name) for name in facts] == [getattr(full, name) for name in facts]
    assert (kernel.sample_count, kernel.samples, kernel.stages, kernel.lines) == (None, {}, {}, ())
    (bare,) = kernels(unpacked, "no_counters")
    assert {"source lines", "stall reasons", "issue_pct", "l2_hit_pct", "dram_read_bytes"} <= set(
        bare.not_collected
    )
    assert (bare.sample_count, bare.samples, bare.average, bare.stages, bare.lines) == (
        None,
        {},
        {},
        {},
        (),
    )
    assert (bare.registers, bare.limited_by) == (128, ("registers", "shared memory"))
    assert bare.duration_us == pytest.approx(162, abs=1)
    for name, found, there, absent in (
        ("no_source", kernel, {"Kernels", "Stall reasons"}, {"Stages and stall reasons"}),
        ("no_counters", bare, {"Kernels"}, {"Stages and stall reasons", "Stall reasons"}),
    ):
        assert {status for status, _ in found.checks.values()} == {"not checked"}
        titles = {section.title for section in compose(analysed(unpacked, name)).sections}
        assert there <= titles
        assert not titles & absent


def test_counted_averages_say_what_samples_say(unpacked: Path):
    """Averages have the names of the samples, and both agree within a few percent of the warps'
    time.
    """
    (kernel,) = kernels(unpacked, "no_source")
    (full,) = kernels(unpacked, "fused_portable")
    assert full.average == {}
    assert {"no_instructions", "warpgroup_arrive"} <= set(kernel.average)
    assert set(kernel.average) <= set(words.REASONS)
    total = sum(kernel.average.values())
    count = sum(full.samples.values())
    for reason, samples in full.samples.items():
        assert 100 * kernel.average.get(reason, 0) / total == pytest.approx(
            100 * samples / count, abs=3
        ), reason


# --- hints that were followed: docs/reading-stalls.md


def test_the_followed_hints_are_given_before_and_not_after(unpacked: Path):
    (before,) = kernels(unpacked, "fused_portable_before")
    (after,) = kernels(unpacked, "fused_portable")
    chain = "wait in chunk_scan.residual is 5 % of the kernel's busy samples, 84 % of them on"
    spills = "475,620 loads and stores of spilled registers"
    assert any(
        hint.startswith(chain) and "`out *= z * tl.sigmoid(z)`" in hint for hint in before.hints
    )
    assert any(hint.startswith(spills) for hint in before.hints)
    assert not any("chunk_scan.residual" in hint for hint in after.hints)
    assert (after.spill_requests or 0) < (before.spill_requests or 0) / 4


# --- files that are broken


def test_a_truncated_or_damaged_report_is_refused(unpacked: Path, tmp_path):
    """And one that is longer than its blocks.  Damage inside a block leaves a file its stated
    length.
    """
    content = (unpacked / "fused.ncu-rep").read_bytes()
    file = tmp_path / "cut.ncu-rep"
    for share in (0.01, 0.3, 0.6, 0.9, 0.999, 1.1):
        file.write_bytes((content + bytes(7))[: int(len(content) * share)])
        with pytest.raises(BadInputError, match=r"cut\.ncu-rep is truncated"):
            read(file)
    for seed in range(4):
        damaged = bytearray((unpacked / "fused_portable.ncu-rep").read_bytes())
        at = random.Random(seed)
        start = at.randrange(len(damaged) // 4, len(damaged) * 3 // 4)
        damaged[start : start + 4096] = at.randbytes(4096)
        file.write_bytes(damaged)
        with pytest.raises(BadInputError, match="damaged"):
            read(file)


# --- the same everywhere


def test_what_the_gpu_machine_wrote_is_found_here(unpacked: Path):
    """`ssdprof run demo --seq 4k --stalls` wrote its JSON on the H200's machine, from the same two
    files.
    """
    there = documents.load_stalls(DATA / "demo" / "stalls.json")
    here = analyse([read(unpacked / "demo" / f"{name}.ncu-rep") for name in ("unfused", "fused")])
    assert here.sources == there.sources
    words = {"hints": {}, "checks": {}}  # their wording may change
    assert [kernel.model_copy(update=words) for kernel in here.kernels] == [
        kernel.model_copy(update=words) for kernel in there.kernels
    ]


def test_the_committed_result_is_what_its_record_says():
    report = documents.load_stalls(RESULT)
    assert report.command[:2] == ("ssdprof", "stalls")
    assert documents.pictures(report).keys() == {"unfused", "fused", "roofline"}
    text = documents.stalls_as_markdown(report)
    for stage in (
        "previous state",
        "current chunk",
        "residual and store",
        "waiting for the segment before",
    ):
        assert stage in text
