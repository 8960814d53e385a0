"""From the rows of a run to values, verdicts and files."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import inter_chunk.report
import inter_chunk.values
import pytest
import scan_002
import scan_003
import selective_scan.report
import selective_scan.values
import study_result
from inter_chunk.cells import cells as inter_chunk_cells
from inter_chunk.contenders import BASELINE, NOT_AHEAD, PROPOSED, baseline_of, diagonal, of_rank
from inter_chunk.counters import L2_READS, Watched, count, records
from reproducing import published
from selective_scan.cells import cells as scan_cells
from selective_scan.contenders import SEQUENTIAL, both, forward, tile, tiles
from selective_scan.peer import NAME as PEER
from selective_scan.quoted import quoted

from ssdprof.environment.toolchain import find_ncu
from ssdprof.errors import MissingCapabilityError
from ssdprof.report.plots.canvas import draw
from ssdprof.stalls.read import RawKernel

STUDIES = ("scan-002", "scan-003")


def inter_chunk_rows() -> list[dict[str, Any]]:
    """Each contender takes 10 us per chunk, the proposed one half of that, and 8 us without loads ahead."""
    us = {PROPOSED: 5.0, NOT_AHEAD: 8.0}
    found = []
    for cell in inter_chunk_cells():
        for name in (of_rank if cell["rank"] else diagonal)(cell["dim"]):
            kind = PROPOSED if name.startswith(PROPOSED) and cell["rank"] else name
            time = us.get(kind, 10.0) * cell["chunks"]
            facts = {"launches": 1, "registers": 40, "spills": 0, "shared_bytes": 4096, "rms_error": 1e-3}
            found.append({
                **cell, "contender": name, "device_us": time, "call_us": time + 9, "floor_us": 2.0 * cell["chunks"],
                "same_bits": name != "registers, fp32", **facts,
            })  # fmt: skip
    return found


def scan_rows() -> list[dict[str, Any]]:
    found = []
    for of_pass, seqlen in scan_cells():
        names = {"forward": forward, "tiles": tiles, "forward and backward": both}[of_pass]()
        for name in (*names, PEER):
            us = seqlen * (3.0 if of_pass == "forward and backward" else 1.0) * (2.0 if name == PEER else 1.0)
            found.append({
                "pass": of_pass, "seqlen": seqlen, "contender": name, "device_us": us, "call_us": us, "warm_us": us,
                "kernel_us": us, "launches": 5, "spills": 0, "kept_bytes": 1 if name == SEQUENTIAL else 32,
            })  # fmt: skip
    return found


def counters() -> list[dict[str, Any]]:
    common = {"dim": 64, "chunks": 64, "occupancy_pct": 50.0, "dram_write_bytes": 100, "l2_bytes": 100}
    return [
        {"contender": BASELINE, "l2_read_sectors": 200, "dram_read_bytes": 100, **common},
        {"contender": PROPOSED, "l2_read_sectors": 90, "dram_read_bytes": 60, **common},
    ]


def test_values_of_the_inter_chunk_pass() -> None:
    values = inter_chunk.values.values_of(inter_chunk_rows(), counters())
    assert values["speedup_d64_g64"] == 2
    assert values["time_saved_pct_d128_g8"] == 50
    assert values["speedup_by_residency_d64_g64"] == 1.25
    assert values["hidden_pct_d64_g64"] == 50  # 3 of the 6 us beyond the floor
    assert values["shared_bytes_per_head_d64_g64"] == 8 * 4096
    assert values["l2_reads_saved_pct_d64_g64"] == pytest.approx(55)
    assert values["dram_ratio_d64_g64"] == pytest.approx(0.8)
    assert values["gain_over_diagonal_d64_r4"] == 1
    assert values["least_chunks_faster_d64"] == 8
    assert (values["rounded_same_bits"], values["fp32_same_bits"]) == (1, 0)


def test_what_was_not_measured_has_no_value() -> None:
    rows = [r for r in inter_chunk_rows() if r["chunks"] != 8 and not r["rank"]]
    values = inter_chunk.values.values_of(rows, [])
    assert not [name for name in values if re.search(r"_g8$|_d\d+_r\d+$|dram", name)]
    assert "speedup_d64_g16" in values
    assert "least_chunks_faster_d64" not in values
    assert selective_scan.values.values_of([], 4000.0) == {}


def test_values_of_the_selective_scan() -> None:
    values = selective_scan.values.values_of(scan_rows(), 4000.0)
    assert values["warm_speedup_l512"] == 2
    assert values["device_both_8192_by_2048"] == 4
    assert values["warm_parallel_backward_by_forward_l32768"] == 2
    assert values["device_backward_speedup_l32768"] == 2
    assert values["kept_by_sequential_of_parallel"] == 1 / 32
    # the bytes per position with which the source's milliseconds and GB/s agree: 2.021 ms and 813 GB/s
    rows = [{"pass": "forward", "seqlen": 32768, "contender": tile(64), "warm_us": 2021.0}]
    assert selective_scan.values.values_of(rows, 4000.0)["warm_gb_per_s_l32768"] == pytest.approx(813, rel=2e-3)


@pytest.mark.parametrize("name", STUDIES)
def test_every_claim_is_about_values_that_a_full_run_has(name: str) -> None:
    full = {
        "scan-002": lambda: inter_chunk.values.values_of(
            inter_chunk_rows(), [{**r, "chunks": g} for r in counters() for g in (32, 64, 128)]
        ),
        "scan-003": lambda: selective_scan.values.values_of(scan_rows(), 4000.0),
    }[name]()
    for claim in published.load(name).claim:
        named = set(published.names_in(claim))
        assert named <= full.keys(), named - full.keys()


def test_quoted_times() -> None:
    rows = [
        {"pass": "forward", "seqlen": 32768, "contender": tile(64), "warm_us": 2200.0},
        {"pass": "forward", "seqlen": 512, "contender": SEQUENTIAL, "warm_us": 100.0},
    ]

    def verdicts_of(gpu: str) -> dict[tuple[str, str, str], str]:
        cells = [[cell.strip() for cell in line.split("|")] for line in quoted(document, rows, gpu).splitlines()[2:]]
        return {(line[2], line[3], line[4]): line[8] for line in cells if line[1] == "forward"}

    document = published.load("scan-003")
    found = verdicts_of("NVIDIA H200")
    assert found[tile(64), "32,768", "calls back to back"] == "inside"  # 2,021 us
    assert found[SEQUENTIAL, "512", "calls back to back"] == "outside"  # 178 us
    assert found[PEER, "512", "calls back to back"] == "not measured"
    assert verdicts_of("NVIDIA H100")[tile(64), "32,768", "calls back to back"] == "other GPU"


@pytest.mark.parametrize("name", STUDIES)
def test_the_files_of_a_result(name: str, tmp_path: Path) -> None:
    result = study_result.Result(study=name, missing={"the cell X": "no time"})
    if name == "scan-002":
        result.rows = inter_chunk_rows()
        result.values = inter_chunk.values.values_of(result.rows, counters())
        sections = inter_chunk.report.tables(result.rows, counters())
        plot = draw(partial(inter_chunk.report.paint, result.rows))
    else:
        result.rows = scan_rows()
        result.values = selective_scan.values.values_of(result.rows, 4000.0)
        sections = selective_scan.report.tables(result.rows)
        plot = draw(partial(selective_scan.report.paint, result.rows))
    study_result.write_pages(study_result.save(result, tmp_path), tmp_path, sections, plot)
    text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    stored = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert stored["values"] == result.values
    assert {"created", "command", "environment", "seconds"} <= stored.keys()
    assert len(stored["claims"]) == len(published.load(name).claim)
    assert "the cell X: no time" in text
    for title in (title for title, section in sections.items() if section):
        assert f"## {title}\n" in text
    assert plot.startswith("<?xml")
    assert "registers" in plot or tile(128) in plot


def test_a_logarithmic_axis_within_one_decade_has_numbers() -> None:
    from matplotlib.figure import Figure

    panel = Figure().add_subplot()
    panel.plot([1, 16], [110, 480])
    panel.set(xscale="log", yscale="log")
    study_result.ticks(panel, (1, 16))
    panel.figure.draw_without_rendering()
    low, high = panel.get_ylim()
    assert [label.get_text() for label in panel.get_yticklabels() if low <= label.get_position()[1] <= high] == [
        "200",
        "500",
    ]


def test_a_baseline_has_the_same_products() -> None:
    assert {baseline_of(name) for name in diagonal(64)} == {BASELINE}
    assert {name: baseline_of(name) for name in of_rank(64)} == {
        "read back, columns": "read back, columns",
        "registers, columns": "read back, columns",
        "read back, tensor cores": "read back, tensor cores",
        "registers, tensor cores": "read back, tensor cores",
    }


def test_counters_are_added_up_over_the_launches_of_a_call() -> None:
    def launch(sectors: int) -> RawKernel:
        metrics = {L2_READS: sectors, "dram__bytes_read.sum": 10, "launch__registers_per_thread": 32}
        return RawKernel(function="_one_chunk_kernel", metrics=metrics)

    watched = [
        Watched(contender="one launch a chunk", chunks=2, dim=64, kernels=("_one_chunk_kernel",) * 2),
        Watched(contender=PROPOSED, chunks=2, dim=64, kernels=("_one_chunk_kernel",)),
    ]
    first, second = records(watched, [launch(5), launch(6), launch(7)])
    assert (first["l2_read_sectors"], first["dram_read_bytes"], second["l2_read_sectors"]) == (11, 20, 7)
    assert first["registers"] == 32
    assert "dram_write_bytes" not in first  # not collected


@pytest.mark.parametrize("runner", [scan_002, scan_003])
def test_without_a_gpu_a_runner_says_so(runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["runner", "--out", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MissingCapabilityError, match="needs an NVIDIA GPU"):
        runner.main()


@pytest.mark.gpu
@pytest.mark.parametrize("runner", [scan_002, scan_003])
def test_a_runner_in_a_short_time(runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["runner", "--out", str(tmp_path), "--budget", "10"])
    monkeypatch.setattr(scan_002, "NCU_SECONDS", 5)
    assert runner.main() == 0
    (stored,) = (json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.glob("*.json"))
    assert stored["rows"]
    assert all(r["device_us"] > 0 for r in stored["rows"] if "device_us" in r)


@pytest.mark.gpu
@pytest.mark.ncu
@pytest.mark.skipif(find_ncu() is None, reason="needs Nsight Compute")
def test_what_ncu_counts_is_what_a_kernel_must_read() -> None:
    names = {BASELINE: ("_loop_kernel",), PROPOSED: ("_loop_kernel",), "one launch a chunk": ("_one_chunk_kernel",) * 8}
    watched = [Watched(contender=name, chunks=8, dim=64, kernels=kernels) for name, kernels in names.items()]
    back, kept, launches = count(watched, timeout_s=120)
    states = 4 * 8 * 16 * 64 * 64 * 2 / 32  # sectors
    assert kept["l2_read_sectors"] == pytest.approx(states, rel=0.1)
    for record in (back, launches):  # except for the first chunk, the state before is read too
        assert record["l2_read_sectors"] == pytest.approx(states * (2 - 1 / 8), rel=0.1)
    assert 0 < kept["occupancy_pct"] <= 100
