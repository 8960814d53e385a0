"""The report in files and on the terminal, and its gate."""

from __future__ import annotations

import pytest
from fakes import contender, gated, measured, report
from pydantic import ValidationError
from rich.console import Console
from ssdprof.bench import gate, render, tables
from ssdprof.bench.schema import BenchCase, BenchReport, Compiled, FirstCall, Kernel, LeftOut, dump, load
from ssdprof.schema import Launch, PrecisionRecord

from ssdprof.errors import BadInputError
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.report import format as fmt


def test_json_comes_back_as_it_was(done: BenchReport) -> None:
    assert load(dump(done)) == done


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "bench ssd", "schema_version": 2}'])
def test_json_of_something_else(text: str) -> None:
    with pytest.raises(BadInputError, match="not a result of ssdprof bench"):
        load(text)


def test_a_time_without_a_comparison_is_no_record(done: BenchReport) -> None:
    timed = done.cells[0].cases[2]
    for missing in ({"error": None}, {"status": "inaccurate"}):
        with pytest.raises(ValidationError, match="compared with the oracle"):
            BenchCase.model_validate(dict(timed) | missing)


def test_the_answer_is_the_first_table(done: BenchReport) -> None:
    first, *_ = tables.tables(done)
    assert first.title.startswith("Fused over mamba_ssm: tiny (2x16, N 16, G 1), bf16")
    (row,) = first.rows
    cells = dict(zip(first.headers, row, strict=True))
    assert cells["speedup,\ndevice"] == "3.00x [3.00, 3.00]"
    assert cells["speedup,\ncall"] == "2.82x [2.82, 2.82]"
    assert (cells["device"], cells["call"], cells["mamba_ssm,\ndevice"]) == ("100 µs", "110 µs", "300 µs")


def test_where_the_baseline_does_not_run_unfused_takes_its_place(done: BenchReport) -> None:
    (cell,) = done.cells
    without = cell.model_copy(update={"tokens": "2 packed x 1-2", "cases": cell.cases[1:]})
    first, second, *_ = tables.tables(done.model_copy(update={"cells": (cell, without)}))
    assert first.title.startswith("Fused over mamba_ssm")
    assert [row[0] for row in first.rows] == ["1 x 40"]
    assert second.title.startswith("Fused over unfused")
    assert [row[0] for row in second.rows] == ["2 packed x 1-2"]
    assert second.headers[8] == "unfused,\ndevice"
    assert second.rows[0][2] == "3.10x [3.10, 3.10]"


def test_first_calls_and_what_they_compiled_are_in_the_tables(done: BenchReport) -> None:
    (cell,) = done.cells
    launch = Launch(kernel="scan", config={"num_warps": 4}, registers=128, spills=0, shared_bytes=1024)
    first = FirstCall(seconds=2.25, compiled=(Compiled(kernel="scan", seconds=1.5),))
    case = cell.cases[2].model_copy(update={"first_call": first, "kernels": (Kernel(launch=launch, occupancy=None),)})
    shown = tables.tables(done.model_copy(update={"cells": (cell.model_copy(update={"cases": (case,)}),)}))
    details = next(table for table in shown if table.title.startswith("Every implementation"))
    assert details.rows[0][details.headers.index("first\ncall")] == "2.2 s"
    kernels = next(table for table in shown if table.title == "Kernels of fused, exact, fp32 states")
    assert dict(zip(kernels.headers, kernels.rows[0], strict=True)) == {
        "kernel": "scan", "warps": "4", "registers": "128", "spills": "0", "shared": "1.00 KiB", "blocks\nper SM": "-",
        "occupancy": "-", "compiled\nin": "1.5 s", "shapes": "tiny bf16",
    }  # fmt: skip


def test_every_implementation_is_in_the_details(done: BenchReport) -> None:
    details = next(table for table in tables.tables(done) if table.title.startswith("Every implementation"))
    assert [row[1:4] for row in details.rows] == [
        ("mamba_ssm", "exact, fp32", "256"),
        ("unfused", "exact, fp32", "-"),
        ("fused", "exact, fp32", "-"),
    ]


def test_matches_are_in_a_table_of_their_own() -> None:
    half = contender("mamba_ssm", lambda _: 1.0, ours=False, spoil=lambda o: SSDOutput(o.out * 1.005, o.final_states))
    shown = report(*measured(half, contender("fused", lambda _: 1.0), match_with="mamba_ssm"), matched_with="mamba_ssm")
    table = next(table for table in tables.tables(shown) if table.title.startswith("Matches with mamba_ssm: tiny"))
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert [(row["implementation"], row["tensor"], row["matched with"]) for row in rows] == [
        ("mamba_ssm", "output", "-"),
        ("mamba_ssm", "final states", "-"),
        ("fused", "output", "mamba_ssm exact, fp32 states"),
        ("fused", "final states", "mamba_ssm exact, fp32 states"),
    ]
    fused = shown.cells[0].cases[1].accuracy[0]
    assert fused.vs_baseline is not None
    against = [fused.vs_baseline, fused.vs_oracle, fused.floor]
    shares = [found.matches[1].match_pct for found in against]
    assert 0 < shares[0] < shares[1] == shares[2] < 100
    assert list(table.rows[2][6::3]) == [fmt.percent(share) for share in shares]
    assert rows[3]["match\n@ 0"] == "100.000%"


def test_relaxed_over_exact_and_chunk_sizes_are_shown_where_they_were_timed(done: BenchReport) -> None:
    relaxed = PrecisionRecord(intermediates="relaxed", state_dtype="fp32")
    both = measured(contender("fused", lambda _: 150.0), contender("fused", lambda _: 100.0, precision=relaxed))
    (table,) = [one for one in tables.tables(report(*both)) if one.title.startswith("Relaxed over exact")]
    assert table.rows == (
        ("1 x 40", "fused", "fp32", "1.50x [1.50, 1.50]", "faster", "1.45x [1.45, 1.45]", "faster"),
    )  # fmt: skip
    assert not [one for one in tables.tables(report(*both)) if one.title.startswith("Device times by chunk")]
    (table,) = [one for one in tables.tables(done) if one.title.startswith("Device times by chunk")]
    assert table.headers[3:] == ("chunk\n128", "chunk\n256", "fastest")
    assert table.rows == (("1 x 40", "mamba_ssm", "exact, fp32", "330 µs", "300 µs", "256"),)


def test_the_warm_clock_has_a_table_beside_the_others() -> None:
    timed = report(
        *measured(contender("mamba_ssm", lambda _: 300.0, ours=False), contender("fused", lambda _: 100.0), warm=True)
    )
    (table,) = [one for one in tables.tables(timed) if "Warm clock" in one.title]
    assert table.title.startswith("Warm clock, over mamba_ssm: tiny")
    assert table.rows == (
        ("1 x 40", "mamba_ssm", "exact, fp32", "-", "-", "150 µs", "310 µs", "300 µs"),
        ("1 x 40", "fused", "exact, fp32", "3.00x [3.00, 3.00]", "faster", "50.0 µs", "110 µs", "100 µs"),
    )
    assert "10 Python calls back to back" in table.note
    assert tables.tables(timed)[0].rows[0][2] == "3.00x [3.00, 3.00]", "the default clock stays where it is"
    assert load(dump(timed)) == timed


def test_details_are_cut_into_tables_that_are_drawn_whole(done: BenchReport) -> None:
    many = report(cells=done.cells * 40)
    details = [table for table in tables.tables(many) if table.title.startswith("Every implementation")]
    assert sum(len(table.rows) for table in details) == 120
    assert max(len(table.rows) for table in details) <= 50


def test_what_went_wrong_is_said(done: BenchReport) -> None:
    wrong = measured(
        contender("fused", lambda _: 1.0, spoil=lambda output: SSDOutput(output.out * 2, output.final_states))
    )
    shown = report(*wrong, baseline="unfused", left_out=(LeftOut(cell="tiny, 1 x 9", reason="out of memory"),))
    text = render.as_markdown(shown)
    assert "inaccurate" in text
    assert "out of memory" in text
    assert "its budget" in text
    assert gate.wrong(shown)
    assert not gate.wrong(done)


def test_a_refused_kernel_of_ours_fails_the_bench_and_another_library_s_does_not(done: BenchReport) -> None:
    def refusing(name: str) -> BenchReport:
        cell = done.cells[0]
        changed = tuple(
            case.model_copy(update={"status": "refused", "reason": "too wide", "timing": None, "speedups": ()})
            if case.implementation == name
            else case
            for case in cell.cases
        )
        return done.model_copy(update={"cells": (cell.model_copy(update={"cases": changed}),)})

    (line,) = gate.wrong(refusing("fused"))
    assert "refused: too wide" in line
    assert gate.wrong(refusing("mamba_ssm")) == ()


def test_a_bench_that_compared_nothing_fails() -> None:
    nothing = report(left_out=(LeftOut(cell="tiny, 1 x 9", reason="out of memory"),))
    assert gate.wrong(nothing.model_copy(update={"cells": ()})) == ("Nothing was compared.",)


def test_both_renderers_draw_it(done: BenchReport) -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render.terminal(done))
    text = console.export_text()
    for words in ("Fused over mamba_ssm", "Kernels of fused", "What ran", "ssdprof bench ssd", "3.00x"):
        assert words in text
        assert words in render.as_markdown(done).replace("\u00a0", " ")


def test_cases_that_took_a_tuned_configuration_are_counted(done: BenchReport) -> None:
    (cell,) = done.cells
    cases = [
        case.model_copy(update={"plan": "one launch; tuned on this GPU, 2026-11-20"})
        if case.implementation == "fused"
        else case
        for case in cell.cases
    ]
    found = done.model_copy(update={"cells": (cell.model_copy(update={"cases": tuple(cases)}),)})
    (facts,) = [dict(table.rows) for table in tables.tables(found) if table.title == "What ran"]
    assert facts["tuned"] == f"fused: tuned on this GPU, 2026-11-20 (1 of {len(cases)} cases)"
    (before,) = [dict(table.rows) for table in tables.tables(done) if table.title == "What ran"]
    assert "tuned" not in before


def test_what_ran_says_how_many_processes_shared_the_cells(done: BenchReport) -> None:
    shared = done.model_copy(update={"ranks": 2})
    (facts,) = [dict(table.rows) for table in tables.tables(shared) if table.title == "What ran"]
    assert facts["ranks"] == "2 processes, each on a GPU of its own, shared the cells"
    (alone,) = [dict(table.rows) for table in tables.tables(done) if table.title == "What ran"]
    assert "ranks" not in alone


def test_what_ran_names_the_kernels_by_their_sources(done: BenchReport) -> None:
    named = done.model_copy(update={"kernels": "0123456789abcdef"})
    (facts,) = [dict(table.rows) for table in tables.tables(named) if table.title == "What ran"]
    assert facts["kernels"] == "sources of sha256 0123456789ab"


def test_the_gates(done: BenchReport) -> None:
    assert gate.failed(gated(done, min_speedup=3.0, max_rms_ratio=2.0)) == ()
    (line,) = gate.failed(gated(done, min_speedup=3.25))
    assert line.startswith("GATE FAILED: min-speedup 3.25: tiny, bf16, 1 x 40, fused, exact, fp32 states: 3x over")
    (line,) = gate.failed(gated(done, max_rms_ratio=0.5))
    assert "max-rms-ratio 0.5: tiny, bf16, 1 x 40, fused" in line
    assert line.endswith("times the floor")
    assert gate.failed(gated(done, min_match={"0": 100})) == ()


def off_by_one_percent(output: SSDOutput) -> SSDOutput:
    """Every fourth element is off by 1 %."""
    out = output.out.clone()
    out.view(-1)[::4] *= 1.01
    return SSDOutput(out, output.final_states)


def test_the_gate_on_match_is_about_the_unfused_kernels_whatever_the_baseline() -> None:
    made = report(
        *measured(
            contender("mamba_ssm", lambda _: 300.0, ours=False, spoil=off_by_one_percent),
            contender("unfused", lambda _: 310.0),
            contender("fused", lambda _: 100.0),
        )
    )
    peer, unfused, fused = (case.accuracy[0].vs_baseline for case in made.cells[0].cases)
    assert fused is not None
    assert peer is not None
    assert {one.match_pct for one in fused.matches} == {100.0}
    assert 70 < peer.matches[0].match_pct < 80, "a quarter of its elements differ"
    assert unfused is None, "it is the one that is matched with"
    assert gate.failed(gated(made, min_match={"1e-3": 100})) == ()
    document = made.model_dump()
    document["cells"][0]["cases"][2]["accuracy"][0]["vs_baseline"]["matches"][0]["match_pct"] = 99.0
    (line,) = gate.failed(gated(made.model_validate(document), min_match={"0": 99.5}))
    assert line == "GATE FAILED: min-match 0:99.5: tiny, bf16, 1 x 40, fused, exact, fp32 states: 99%"
    alone = report(*measured(contender("fused", lambda _: 1.0)))
    (line,) = gate.failed(gated(alone, min_match={"0": 1}))
    assert line.endswith("fused, exact, fp32 states: not compared with a baseline")


def test_the_gates_do_not_hold_for_what_was_not_measured(done: BenchReport) -> None:
    alone = report(*measured(contender("fused", lambda _: 1.0)))
    assert gate.failed(gated(alone, min_speedup=1.0))[0].endswith(
        "fused, exact, fp32 states: its baseline was not timed"
    )
    late = done.model_copy(update={"left_out": (LeftOut(cell="a cell", reason="the budget was spent"),)})
    assert gate.failed(gated(late, min_speedup=1.0)) == (
        "GATE FAILED: min-speedup 1: a cell: left out: the budget was spent",
    )
    assert gate.failed(late) == ()
    (line,) = gate.failed(gated(report(), min_speedup=1.0))
    assert line.endswith("no case passed that it could judge")
