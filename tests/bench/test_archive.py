"""The recorded benches: a line per case, and what a newer bench replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import recorded
from fakes import contender, measured, report
from ssdprof.bench.schema import BenchReport, dump


def test_a_line_has_the_numbers_of_its_case(done: BenchReport) -> None:
    (cell,) = recorded.recorded("b", done)
    for line, case in zip(cell.cases, done.cells[0].cases, strict=True):
        assert case.timing is not None
        assert case.error is not None
        assert line.words == [case.implementation, case.precision.intermediates, case.precision.state_dtype]
        assert line.device_us is not None
        assert line.device_us[0] == pytest.approx(case.timing.device_median_us, rel=1e-5)
        assert line.device_us[1:] == pytest.approx(
            (case.timing.device_interval_us.low, case.timing.device_interval_us.high), rel=1e-5
        )
        for name in ("out", "final_states"):
            accuracy = next(one for one in case.accuracy if one.tensor == name)
            error = line.errors[name]
            assert error.rms_ratio == pytest.approx(accuracy.vs_oracle.rms_ratio, rel=1e-3)
            assert error.floor == pytest.approx(accuracy.floor.rms_ratio, rel=1e-3)
            assert error.matches_fp64 == pytest.approx([one.match_pct for one in accuracy.vs_oracle.matches], rel=1e-5)
        assert line.launches == tuple(one.launch for one in case.kernels)
        assert {name: over.device[0] for name, over in line.over.items()} == pytest.approx(
            {one.baseline: one.device_ratio for one in case.speedups}, rel=1e-5
        )


def test_a_file_is_read_as_it_was_written(done: BenchReport, tmp_path: Path) -> None:
    cells = recorded.recorded("b", done)
    text = recorded.text_of(cells)
    assert text.count("\n") == 1 + len(cells[0].cases)
    assert recorded.cells_of(text) == cells
    (tmp_path / "b.json").write_text(dump(done))
    assert recorded.read(tmp_path / "b.json") == cells


def test_a_cell_is_superseded_when_all_of_it_was_measured_with_newer_kernels() -> None:
    both = measured(contender("unfused", lambda _: 300.0), contender("fused", lambda _: 100.0))
    first, later = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"

    def kept(older: BenchReport, newer: BenchReport) -> list[str]:
        cells = [*recorded.recorded("older", older), *recorded.recorded("newer", newer)]
        return sorted(cell.bench.name for cell in recorded.current(cells))

    one = report(*both, created=first, kernels="1")
    assert kept(one, report(*both, created=later, kernels="2")) == ["newer"]
    assert kept(one, report(*both, created=later, kernels="1")) == ["newer", "older"]
    assert kept(one, report(*both[1:], created=later, kernels="2")) == ["newer", "older"]


def test_a_new_bench_is_added_to_the_file_of_its_gpu(
    done: BenchReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "file_of", lambda _: tmp_path / "gpu.jsonl")
    (tmp_path / "b.json").write_text(dump(done))
    for _ in range(2):
        recorded.main([str(tmp_path / "b.json")])
        assert recorded.read(tmp_path / "gpu.jsonl") == recorded.recorded("b", done)
    recorded.main([f"a={tmp_path / 'b.json'}"])
    assert [cell.bench.name for cell in recorded.read(tmp_path / "gpu.jsonl")] == ["a", "b"]


def test_the_committed_lines_are_whole_and_none_is_superseded() -> None:
    files = sorted(recorded.RESULTS.glob("*.jsonl"))
    assert [file.name for file in files] == ["h100.jsonl", "h200.jsonl"]
    for file in files:
        cells = recorded.read(file)
        assert recorded.text_of(cells) == file.read_text(encoding="utf-8")
        assert recorded.current(cells) == cells
        assert {recorded.file_of(cell.bench.gpu) for cell in cells} == {file}
