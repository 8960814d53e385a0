"""Reports of our own kernels, recorded on an H200 by benchmarks/record_stalls.py with ncu 2025.3.1.

When the Hopper kernel's was recorded, Triton filed the lines of its first role under another file, and sections with
bytes were not asked for: so it also is what a report with lines of no stage, and with facts that are missing, looks
like.
"""

import lzma
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ssdprof.errors import BadInputError
from ssdprof.report.stall_document import compose
from ssdprof.report.stall_groups import designs
from ssdprof.stall_records import KernelStalls
from ssdprof.stalls import read_csv
from ssdprof.stalls.analyse import analyse, stalls_of
from ssdprof.stalls.raw import RawReport
from ssdprof.stalls.read import read

DATA = Path(__file__).parent / "data"
NOT_ASKED_FOR = {"dram_read_bytes", "dram_write_bytes", "l2_bytes"}
ALGORITHM = {
    "ticket", "chunk_cumsum", "bmm_chunk", "chunk_state", "state_passing.wait", "state_passing.load",
    "state_passing.store", "chunk_scan.previous", "chunk_scan.current", "chunk_scan.residual",
}  # fmt: skip
UNFUSED = (
    "_chunk_cumsum_kernel", "_chunk_state_kernel", "_state_passing_kernel", "_bmm_chunk_kernel", "_chunk_scan_kernel",
)  # fmt: skip


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    for file in DATA.glob("*.xz"):
        (folder / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
    return folder


@cache
def raw(file: Path) -> RawReport:
    return read(file)


def kernels(file: Path) -> tuple[KernelStalls, ...]:
    return analyse([raw(file)]).kernels


@pytest.mark.parametrize("name", ["fused_portable", "unfused"])
def test_every_self_check_holds(unpacked: Path, name: str) -> None:
    report = analyse([raw(unpacked / f"{name}.ncu-rep")])
    checks = [*report.checks, *(check for kernel in report.kernels for check in kernel.checks)]
    assert [check for check in checks if check.status == "failed"] == []
    assert {check.name for check in checks if check.status == "not checked"} == {
        "only the wanted launches were profiled"
    }


def test_lines_of_no_stage_fail_a_check(unpacked: Path) -> None:
    (kernel,) = kernels(unpacked / "fused_hopper.ncu-rep")
    stages = {stage.name: stage.total for stage in kernel.stages}
    (failed,) = [check for check in kernel.checks if check.status == "failed"]
    assert failed.name == "every line has a stage"
    assert f"{stages['unknown']:,}" in failed.detail
    assert sum(stages.values()) == kernel.sample_count == sum(kernel.samples.values())


def test_one_launch_has_every_stage(unpacked: Path) -> None:
    (kernel,) = kernels(unpacked / "fused_portable.ncu-rep")
    assert kernel.implementation == "fused"
    stages = {stage.name: stage.total for stage in kernel.stages}
    assert set(stages) >= ALGORITHM
    assert "unknown" not in stages
    assert sum(stages.values()) == kernel.sample_count == sum(kernel.samples.values())


def test_the_hopper_kernels_idle_warps_are_no_cost(unpacked: Path) -> None:
    (kernel,) = kernels(unpacked / "fused_hopper.ncu-rep")
    idle = {stage.name for stage in kernel.stages if stage.idle}
    assert "idle warps" in idle
    # one of 16 warps has no role at all
    assert kernel.idle_samples > sum(kernel.samples.values()) / 16
    (design,) = designs(analyse([raw(unpacked / "fused_hopper.ncu-rep")]))
    assert design.all().pct == pytest.approx(100)
    assert not idle & set(design.stages)


def test_the_portable_kernel_has_no_idle_warps(unpacked: Path) -> None:
    (kernel,) = kernels(unpacked / "fused_portable.ncu-rep")
    assert kernel.idle_samples == 0


def test_the_unfused_pipeline_is_five_kernels_of_one_design(unpacked: Path) -> None:
    found = kernels(unpacked / "unfused.ncu-rep")
    assert tuple(kernel.kernel for kernel in found) == UNFUSED
    (design,) = designs(analyse([raw(unpacked / "unfused.ncu-rep")]))
    assert set(design.whole()) >= {"chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk", "chunk_scan"}
    assert design.duration_us == pytest.approx(sum(kernel.throughput.duration_us or 0 for kernel in found))
    for kernel in found:
        stage = kernel.kernel.removeprefix("_").removesuffix("_kernel")
        assert {name.name.split(".")[0] for name in kernel.stages} == {stage}


@pytest.mark.parametrize("name", ["fused_portable", "unfused"])
def test_lines_are_shown_with_the_source_that_was_recorded(unpacked: Path, name: str) -> None:
    for kernel in kernels(unpacked / f"{name}.ncu-rep"):
        assert all(line.text for line in kernel.lines)
        assert not any("/" in line.file for line in kernel.lines)


@pytest.mark.parametrize("name", ["fused_hopper", "fused_portable", "unfused"])
def test_facts_are_collected_on_hopper(unpacked: Path, name: str) -> None:
    for kernel in kernels(unpacked / f"{name}.ncu-rep"):
        assert set(kernel.not_collected) == NOT_ASKED_FOR
        assert kernel.throughput.duration_us is not None
        assert kernel.resources.registers is not None
        assert 0 < (kernel.resources.occupancy_pct or 0) <= 100
        assert kernel.resources.limited_by


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_report_is_refused(unpacked: Path, tmp_path: Path, share: float) -> None:
    content = (unpacked / "fused_hopper.ncu-rep").read_bytes()
    file = tmp_path / "cut.ncu-rep"
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(BadInputError, match=r"cut\.ncu-rep is truncated"):
        read(file)


def test_what_is_behind_the_end_fails_a_check(unpacked: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.ncu-rep"
    file.write_bytes((unpacked / "fused_hopper.ncu-rep").read_bytes() + b"\0" * 7)
    try:
        checks = analyse([read(file)]).checks
    except BadInputError:
        return
    assert checks[0].status == "failed"


def test_json_is_the_same_everywhere(unpacked: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ssdprof", "stalls", "--json"]
    command += [word for name in ("unfused", "fused_hopper") for word in ("--from", str(unpacked / f"{name}.ncu-rep"))]
    root = str(Path(__file__).parent.parent.parent)
    outputs = set()
    for seed, zone, folder in (("1", "UTC", tmp_path), ("2", "Asia/Tokyo", Path(root))):
        environ = os.environ | {"PYTHONHASHSEED": seed, "TZ": zone, "PYTHONPATH": root, "LC_ALL": "C.UTF-8"}
        result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=True)
        outputs.add(result.stdout)
    assert len(outputs) == 1


# --- the same, as ncu prints it


def test_the_raw_page_says_what_the_report_says(unpacked: Path) -> None:
    (found,) = [read_csv.read(unpacked / "unfused_raw.csv")]
    for page, report in zip(found.kernels, raw(unpacked / "unfused.ncu-rep").kernels, strict=True):
        a, b = stalls_of(page), stalls_of(report)
        assert (a.kernel, a.samples, a.sample_count) == (b.kernel, b.samples, b.sample_count)
        for name, value in b.throughput:
            assert getattr(a.throughput, name) == (None if value is None else pytest.approx(value, rel=1e-2, abs=1e-2))


def test_a_sentence_of_the_summary_ends_where_there_is_no_more_to_say(unpacked: Path) -> None:
    """The ticket of the Hopper kernel waits for many things, each below what is worth a word."""
    document = compose(analyse([raw(unpacked / "fused_hopper.ncu-rep")]))
    said = {statement.subject: statement.text for statement in document.summary}
    assert said["ticket:"] == "1%."
    assert not any(": ." in text or " ." in text for text in said.values())
