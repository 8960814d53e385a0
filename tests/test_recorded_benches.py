"""The recorded benches: a line per case, what a newer bench replaces, and the tables of speeds next
to them.
"""

from pathlib import Path

import cases
import pytest
import readme_table
import recorded
import small_gdn_cases
import torch

from ssdprof.core.base import intermediates_of, states_of
from ssdprof.core.report import Report
from ssdprof.store.reports import dump

DONE = cases.bench(*cases.cell(1024), *cases.cell(4096), baseline="fla", matched_with="unfused")


def test_a_line_has_the_numbers_of_its_case():
    first, second = recorded.recorded("b", DONE)
    assert (first.bench.libraries, first.bench.state, first.bench.baseline) == (
        {"fla": "0.4"},
        "complete",
        "fla",
    )
    assert [cell.one.tokens for cell in (first, second)] == ["1 x 1,024", "1 x 4,096"]
    for line, case in zip((*first.cases, *second.cases), DONE.cases, strict=True):
        assert line.words == [
            case.implementation,
            intermediates_of(case.precision),
            states_of(case.precision),
        ]
        assert case.device_us
        assert case.call_us
        assert line.device_us == pytest.approx(case.device_us, rel=1e-5)
        assert line.call_us == pytest.approx(case.call_us, rel=1e-5)
        assert line.floor_us == pytest.approx(case.floor_us(DONE.ceilings), rel=1e-5)
        for one in case.accuracy:
            error = line.errors[one.tensor]
            assert error.rms_ratio == pytest.approx(one.vs_oracle.rms_ratio, rel=1e-3)
            assert error.floor == pytest.approx(one.floor.rms_ratio, rel=1e-3)
            assert error.matches_fp64 == pytest.approx(one.vs_oracle.matches, rel=1e-5)
        assert line.launches == case.launches
    fused = first.fastest("fused")
    assert fused
    assert {name: over.device[0] for name, over in fused.over.items()} == pytest.approx(
        {"fla": 1.6, "unfused": 2.0}
    )
    assert not first.cases[0].over


def test_a_case_that_failed_says_why_and_has_no_time():
    bad = cases.failed(cases.cell(1024)[2])
    (cell,) = recorded.recorded("b", cases.bench(*cases.cell(1024)[:2], bad, baseline="fla"))
    assert (cell.cases[2].status, cell.cases[2].device_us, cell.cases[2].over) == (
        "inaccurate",
        None,
        {},
    )
    assert "its budget" in cell.cases[2].reason


def test_a_new_bench_is_added_to_the_file_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recorded, "file_of", lambda _: tmp_path / "gpu.jsonl")
    (tmp_path / "b.json").write_text(dump(DONE))
    assert recorded.read(tmp_path / "b.json") == recorded.recorded("b", DONE)
    for _ in range(2):
        recorded.main([str(tmp_path / "b.json")])
        assert recorded.read(tmp_path / "gpu.jsonl") == recorded.recorded("b", DONE)
    assert (tmp_path / "gpu.jsonl").read_text().count("\n") == 1 + len(DONE.cases)
    recorded.main([f"a={tmp_path / 'b.json'}"])
    assert [cell.bench.name for cell in recorded.read(tmp_path / "gpu.jsonl")] == [
        "a",
        "a",
        "b",
        "b",
    ]


def test_a_cell_is_superseded_when_all_of_it_was_measured_with_newer_kernels():
    both = cases.cell(1024)[1:]
    first = "2026-01-01T00:00:00+00:00"
    later = "2026-01-02T00:00:00+00:00"

    def kept(older: Report, newer: Report) -> list[str]:
        cells = [*recorded.recorded("older", older), *recorded.recorded("newer", newer)]
        return sorted(cell.bench.name for cell in recorded.current(cells))

    one = cases.bench(*both, created=first, kernels="1")
    assert kept(one, cases.bench(*both, created=later, kernels="2")) == ["newer"]
    assert kept(one, cases.bench(*both, created=later, kernels="1")) == ["newer", "older"]
    assert kept(one, cases.bench(both[1], created=later, kernels="2")) == ["newer", "older"]


def test_the_committed_lines_are_whole_and_none_is_superseded():
    files = sorted(recorded.RESULTS.glob("*.jsonl"))
    assert [file.name for file in files] == ["h100.jsonl", "h200.jsonl"]
    for file in files:
        cells = recorded.read(file)
        assert recorded.text_of(cells) == file.read_text()
        assert recorded.current(cells) == cells
        assert {recorded.file_of(cell.bench.gpu) for cell in cells} == {file}


# --- the tables of results/README.md


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path):
    readme = tmp_path / "README.md"
    of_ssd, of_gdn = (
        f"<!-- bench-{name}:start -->\nold\n<!-- bench-{name}:end -->\n" for name in ("ssd", "gdn")
    )
    readme.write_text(f"before\n{of_ssd}between\n{of_gdn}after\n")
    for _ in range(2):
        readme_table.write(readme, readme_table.GDN, "new\n")
        assert (
            readme.read_text() == f"before\n{of_ssd}between\n{of_gdn.replace('old', 'new')}after\n"
        )


@pytest.mark.parametrize("operator", [readme_table.SSD, readme_table.GDN], ids=lambda one: one.name)
def test_the_tables_say_what_the_recorded_results_say(operator: readme_table.Operator):
    cells = readme_table.committed(operator)
    assert cells
    assert readme_table.selection(cells, operator) == readme_table.current(
        readme_table.PAGE, operator
    )


# --- the small cases that are timed against flash-linear-attention


def test_there_are_15_batches_and_12_packs():
    found = list(small_gdn_cases.cells())
    assert [one.tokens.packed for one in found] == [False] * 15 + [True] * 12
    assert len({str(one) for one in found}) == 27
    for one in found:
        inputs = small_gdn_cases.draw(one, torch.device("cpu"))
        assert (inputs.q.dtype, inputs.sequences) == (torch.float16, one.tokens.sequences)
        if one.tokens.packed:
            assert inputs.cu_seqlens is not None
            assert inputs.cu_seqlens.diff().min() > 0
            assert inputs.cu_seqlens[-1] == inputs.length == one.shape.sizes["total"]
        else:
            assert inputs.length == one.tokens.seqlen
    half = small_gdn_cases.draw(found[2], torch.device("cpu")).g
    assert 0.4 < (half == 0).float().mean() < 0.6
