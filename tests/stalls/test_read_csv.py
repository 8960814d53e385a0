"""CSV pages of ncu, and how they differ between versions."""
# ruff: noqa: E501  (rows of ncu are long)

from pathlib import Path

import pytest

from ssdprof.errors import BadInputError
from ssdprof.stalls.analyse import analyse, stalls_of
from ssdprof.stalls.raw import RawKernel
from ssdprof.stalls.read_csv import read

PCSAMP = "smsp__pcsamp_warps_issue_stalled"
RAW = f"""==PROF== Connected to process 12 (/usr/bin/python3)
==WARNING== Something, with a comma
"ID","Process Name","Kernel Name","Block Size","gpu__time_duration.sum","dram__bytes_read.sum","{PCSAMP}_wait","{PCSAMP}_no_instruction","{PCSAMP}_gmma","{PCSAMP}_wait_not_issued","smsp__pcsamp_sample_count","gpu__time_duration.sum","lts__t_sector_hit_rate.pct"
"","","","block","us","Mbyte","warp","warp","warp","warp","","us","%"
"0","python","_chunk_state_kernel(int, float)","(128, 1, 1)","1,215.50","2.5","1,000 (1; 2; 997)","20","3","900","1,023","9","n/a"
"1","python","_bmm_chunk_kernel","(128, 1, 1)","7","0","5","-",""
"""
SOURCE = """==PROF== Connected
"Kernel Name","_kernel"
"File Path","/home/u/kernel.py"
"Line No","Source","Address","Source","Warp Stall Sampling (All Samples)","# Samples","Instructions Executed","Instructions Executed","stall_long_sb","stall_wait","stall_sleep","stall_wait (Not Issued)"
"1","@jit","","","0","0","0","0","0","0","0","0"
"2","def _kernel(x):","","","0","0","0","0","0","0","0","0"
"3","    y = load(x)","-","-","12","12","2","2","10","2","0","1"
"","","0x7f00","LDG R1","9","9","1","1","8","1","0","1"
"","","...","...","-","-","-","-","-","-","-","-"
"","","0x7f10","MOV R2, R1","3","3","1","1","2","1","0","0"
"4","    store(y)","","","1,004","4","1","1","1,000","n/a","4",""
"","","0x7f20","STG R2","1,004","4","1","1","1,000","n/a","4",""
"""


def kernels(tmp_path: Path, text: str) -> tuple[RawKernel, ...]:
    file = tmp_path / "page.csv"
    file.write_text(text, encoding="utf-8")
    return read(file).kernels


# --- raw page


def test_a_raw_page_has_a_kernel_per_row_in_base_units(tmp_path: Path) -> None:
    first, second = kernels(tmp_path, RAW)
    assert first.function == "_chunk_state_kernel"
    assert first.metrics["gpu__time_duration.sum"] == 1_215_500.0  # ns; the first of two columns of a name
    assert first.metrics["dram__bytes_read.sum"] == 2_500_000.0
    assert first.totals == {"wait": 1000, "no_instructions": 20, "warpgroup_arrive": 3}
    assert second.metrics["dram__bytes_read.sum"] == 0


def test_cells_that_say_nothing_are_not_collected(tmp_path: Path) -> None:
    first, second = kernels(tmp_path, RAW)
    assert "lts__t_sector_hit_rate.pct" not in first.metrics
    assert second.totals == {"wait": 5}  # "-", "" and a row that is too short
    found = stalls_of(second)
    assert found.throughput.l2_hit_pct is None
    assert "l2_hit_pct" in found.not_collected


def test_a_raw_page_without_units_or_with_its_header_twice(tmp_path: Path) -> None:
    names, units, *rows = RAW.splitlines()[2:]
    plain = "\n".join([names, rows[0], names, rows[1]])
    assert [kernel.function for kernel in kernels(tmp_path, plain)] == ["_chunk_state_kernel", "_bmm_chunk_kernel"]
    assert kernels(tmp_path, plain)[0].metrics["gpu__time_duration.sum"] == 1215.5
    assert len(kernels(tmp_path, "\n".join([names, units, rows[0], names, units, rows[1]]))) == 2


@pytest.mark.parametrize(
    ("unit", "factor"), [("ns", 1), ("nsecond", 1), ("us", 1e3), ("msecond", 1e6), ("second", 1e9)]
)
def test_units_of_time(tmp_path: Path, unit: str, factor: float) -> None:
    text = f'"ID","Kernel Name","gpu__time_duration.sum"\n"","","{unit}"\n"0","_k","2"\n'
    assert kernels(tmp_path, text)[0].metrics["gpu__time_duration.sum"] == 2 * factor


@pytest.mark.parametrize(("unit", "factor"), [("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6), ("Gbyte", 1e9), ("%", 1)])
def test_units_of_size(tmp_path: Path, unit: str, factor: float) -> None:
    text = f'"ID","Kernel Name","dram__bytes_read.sum"\n"","","{unit}"\n"0","_k","2"\n'
    assert kernels(tmp_path, text)[0].metrics["dram__bytes_read.sum"] == 2 * factor


# --- source page


def test_lines_and_instructions_are_counted_once(tmp_path: Path) -> None:
    (kernel,) = kernels(tmp_path, SOURCE)
    assert kernel.function == "_kernel"
    assert kernel.totals == {"long_scoreboard": 1010, "wait": 2, "sleeping": 4}
    assert [(point.line, sum(point.samples.values())) for point in kernel.points] == [(3, 9), (3, 3), (4, 1004)]
    found = stalls_of(kernel)
    assert [(line.line, line.text, line.total) for line in found.lines] == [
        (4, "store(y)", 1004),
        (3, "y = load(x)", 12),
    ]
    assert [stage.name for stage in found.stages] == ["kernel.py"]
    assert found.sample_count == 1016
    assert found.throughput.duration_us is None


def test_without_instructions_lines_are_counted(tmp_path: Path) -> None:
    lines = "\n".join(line for line in SOURCE.splitlines() if "0x7f" not in line)
    (kernel,) = kernels(tmp_path, lines)
    assert kernel.totals == {"long_scoreboard": 1010, "wait": 2, "sleeping": 4}


def test_a_sass_page_has_no_lines(tmp_path: Path) -> None:
    text = """"Kernel Name","_a"
"Address","Source","# Samples","stall_math","stall_mio (Not Issued)"
"7f00","LDG R1","3","3","1"
"Kernel Name","_b"
"Address","Source","# Samples","stall_dispatch","stall_short_sb"
"7f00","MOV R1","3","1","2"
"""
    a, b = kernels(tmp_path, text)
    assert (a.function, a.totals) == ("_a", {"math_pipe_throttle": 3})
    assert (b.function, b.totals) == ("_b", {"dispatch_stall": 1, "short_scoreboard": 2})
    assert [line.text for line in stalls_of(b).lines] == ["MOV R1"]


def test_sums_of_a_csv_are_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    (kernel,) = kernels(tmp_path, SOURCE)
    checks = {check.name: check.status for check in stalls_of(kernel).checks}
    assert checks["lines add up to the kernel"] == "ok"
    assert checks["reasons add up to the samples"] == "not checked"


# --- files that are not such pages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"ID","Kernel Name","Section Name","Metric Name","Metric Value"\n"0","k","s","m","1"\n', "details page"),
        ("a,b\n1,2\n", "not a page of stalls"),
        ("", "not a page of stalls"),
        ("==PROF== Disconnected\n", "not a page of stalls"),
        ('"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n', "holds no launch"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        kernels(tmp_path, text)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        read(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(BadInputError, match="not UTF-8"):
        read(tmp_path / "binary.csv")


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "page.csv"
    file.write_text(RAW)
    import hashlib

    assert analyse([read(file)]).sources == {"page.csv": hashlib.sha256(file.read_bytes()).hexdigest()}
