"""The tables of speeds next to the results."""

from __future__ import annotations

from pathlib import Path

import pytest
import readme_table
from fakes import report
from recorded import Cell, recorded
from ssdprof.bench.schema import BenchCell, BenchReport
from ssdprof.schema import Gpu, PrecisionRecord


def as_cell(done: BenchReport, shape: str, tokens: str, *, without: str = "") -> BenchCell:
    (cell,) = done.cells
    kept = tuple(
        case.model_copy(update={"speedups": tuple(over for over in case.speedups if over.baseline != without)})
        for case in cell.cases
        if case.implementation != without
    )
    packed = "packed" in tokens
    return cell.model_copy(update={"shape": shape, "tokens": tokens, "packed": packed, "cases": kept})


def cells_of(reports: dict[str, BenchReport]) -> list[Cell]:
    return [cell for name, one in reports.items() for cell in recorded(name, one)]


def selection(reports: dict[str, BenchReport]) -> str:
    return readme_table.selection(cells_of(reports)).replace("\u00a0", " ")


def rows_of(made: str) -> list[list[str]]:
    lines = made.replace("\u00a0", " ").splitlines()
    return [[word.strip() for word in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]


def test_models_have_a_table_and_other_shapes_another(done: BenchReport) -> None:
    relaxed = (
        done.cells[0]
        .cases[2]
        .model_copy(update={"precision": PrecisionRecord(intermediates="relaxed", state_dtype="bf16"), "speedups": ()})
    )
    cells = (
        as_cell(done, "mamba2-2.7b", "1 x 1,024"),
        as_cell(done, "nemotron-3-nano", "1 x 1,024", without="mamba_ssm"),
        as_cell(done, "mamba2-2.7b", "1 x 1,025"),
        as_cell(done, "zamba2-7b", "1 x 4,096"),
        as_cell(done, "zamba2-7b", "2 packed x 1k-4k", without="mamba_ssm"),
    )
    reports = {
        "a.json": report(cells=cells),
        "b.json": report(cells=(cells[0].model_copy(update={"cases": (*cells[0].cases[:2], relaxed)}),)),
    }
    models = [["sequences x tokens", "mamba2-2.7b", "nemotron-3-nano"], ["1 x 1,024", "3.00x / 2.82x", "-"]]
    assert rows_of(selection(reports)) == [
        *models,
        ["shape", "heads x P, N, groups", "1 x 4,096", "2 packed x 1k-4k, over unfused"],
        ["zamba2-7b", "2 x 16, 16, 1", "3.00x / 2.82x", "3.10x / 2.91x"],
    ]


def test_the_published_kernel_has_a_table_of_its_own(done: BenchReport) -> None:
    peer = done.cells[0].cases[2].speedups[0].model_copy(update={"baseline": "published"})
    fused = done.cells[0].cases[2].model_copy(update={"speedups": (peer,)})
    published = done.cells[0].cases[0].model_copy(update={"implementation": "published"})
    cell = as_cell(done, "mamba2-2.7b", "1 x 1,024")
    cell = cell.model_copy(update={"cases": (published, fused), "dims": cell.dims.model_copy(update={"dtype": "fp16"})})
    made = selection({"c.json": report(cells=(cell,), baseline="published")})
    assert made.count("**") == 2
    assert "over the published kernel" in made
    assert "| 3.00x / 2.82x |" in made
    assert "wrong results" not in made

    wrong = published.model_copy(update={"status": "inaccurate", "reason": "715 off", "timing": None})
    cell = cell.model_copy(update={"cases": (wrong, *cell.cases)})
    made = selection({"c.json": report(cells=(cell,), baseline="published")})
    assert "| 3.00x / 2.82x \u2020 |" in made
    assert "<sub>\u2020 Another setting of that kernel gave wrong results" in made


def on(name: str, created: str, *cells: BenchCell, kernels: str = "") -> BenchReport:
    gpu = Gpu(name=name, compute_capability="9.0", sm_count=132, memory_bytes=1, l2_bytes=1, driver="1", cuda="1")
    made = report(created=created, cells=cells, kernels=kernels)
    return made.model_copy(update={"environment": made.environment.model_copy(update={"gpu": gpu})})


def twice_as_fast(cell: BenchCell) -> BenchCell:
    """The cell of `done` with 6x instead of 3x."""
    *others, fused = cell.cases
    over = tuple(one.model_copy(update={"device_ratio": 6.0}) for one in fused.speedups)
    return cell.model_copy(update={"cases": (*others, fused.model_copy(update={"speedups": over}))})


def test_of_results_that_have_the_same_cell_the_newest_counts(done: BenchReport) -> None:
    """Only with inputs of the table's dtype and the default draw."""
    cells = [as_cell(done, "mamba2-2.7b", tokens) for tokens in ("1 x 1,024", "1 x 8,192", "1 x 16,384")]
    fast = twice_as_fast(cells[2])
    reports = {
        "a.json": on("A", "2026-01-01T00:00:00+00:00", *cells),
        "b.json": on("A", "2026-01-01T01:00:00+00:00", twice_as_fast(cells[0])),
        "c.json": on("A", "2026-01-01T02:00:00+00:00", fast.model_copy(update={"drawn": ("normalised",)})),
        "d.json": on(
            "A", "2026-01-01T03:00:00+00:00",
            fast.model_copy(update={"dims": fast.dims.model_copy(update={"dtype": "fp32"})}),
        ),
    }  # fmt: skip
    made = selection(reports)
    assert (made.count("6.00x"), made.count("3.00x")) == (1, 2)


def test_a_newer_result_over_another_library_makes_no_table_older(done: BenchReport) -> None:
    """For example a result of decoding."""
    cell = as_cell(done, "mamba2-2.7b", "1 x 1,024")
    decoding = on("A", "2026-01-02T00:00:00+00:00", cell, kernels="new")
    reports = {
        "a.json": on("A", "2026-01-01T00:00:00+00:00", cell, kernels="old"),
        "b.json": decoding.model_copy(update={"baseline": "selective_state_update"}),
    }
    assert "3.00x" in selection(reports)


def test_each_gpu_has_tables_of_its_own(done: BenchReport) -> None:
    """A newer result of one GPU does not replace another GPU's."""
    both = as_cell(done, "mamba2-2.7b", "1 x 1,024"), as_cell(done, "mamba2-2.7b", "1 x 4,096")
    reports = {
        "a.json": on(
            "A few", "2026-01-01T02:00:00+00:00", twice_as_fast(both[0]), as_cell(done, "nemotron-3-nano", "1 x 1,024")
        ),
        "b.json": on("B more", "2026-01-01T01:00:00+00:00", *both, as_cell(done, "mamba2-2.7b", "1 x 16,384")),
    }
    made = selection(reports)
    of_b, of_a = made.split("**B more: over mamba_ssm")[1].split("**A few: over mamba_ssm")
    assert of_b.count("3.00x") == 3
    assert "6.00x" not in of_b
    assert "nemotron-3-nano" not in of_b
    assert of_a.count("6.00x") == of_a.count("3.00x") == 1


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    of_ssd, of_gdn = (f"<!-- bench-{name}:start -->\nold\n<!-- bench-{name}:end -->\n" for name in ("ssd", "gdn"))
    readme.write_text(f"before\n{of_ssd}between\n{of_gdn}after\n")
    for _ in range(2):
        readme_table.write(readme, readme_table.GDN, "new\n")
        assert readme.read_text() == f"before\n{of_ssd}between\n{of_gdn.replace('old', 'new')}after\n"


@pytest.mark.parametrize("operator", [readme_table.SSD, readme_table.GDN], ids=lambda one: one.name)
def test_the_tables_say_what_the_recorded_results_say(operator: readme_table.Operator) -> None:
    cells = readme_table.committed(operator)
    assert cells
    assert readme_table.selection(cells, operator) == readme_table.current(readme_table.PAGE, operator)
