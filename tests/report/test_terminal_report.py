"""The terminal report: its order, and tables that fit."""

import io
import re

import pytest
from report.make import ALL_PRECISIONS, RELAXED_FP16, failed, make_clocks, make_report
from rich.console import Console

from ssdprof.report import terminal
from ssdprof.report.tables import Table
from ssdprof.report.tables.table import columns
from ssdprof.schema import EXACT_FP32


def printed(renderable, width=100, **options):
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, **options).print(renderable)
    return file.getvalue()


def failing(case):
    reason = "out, head 5: max|ours - oracle| is 0.5, its budget 0.1; the largest difference is at (0, 777, 5, 9)"
    return failed(case, "inaccurate", reason) if case.layer.index == 9 else case


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width):
    report = make_report(
        seqlens=(131_072, 1024),
        precisions=ALL_PRECISIONS,
        clocks=make_clocks(throttle_reasons=("SwPowerCap",)),
        change=failing,
    )
    text = printed(terminal.render(report), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("2.00 GiB", "99.696%", "relaxed, bf16", "segment_kernel", "(0, 131044, 79, 63)", "layers"):
        assert word in text


def test_the_first_screen_answers():
    lines = printed(terminal.render(make_report(precisions=(EXACT_FP32, RELAXED_FP16)))).splitlines()
    assert lines[0] == "ssdprof: ibm-granite/granite-4.0-h-small, 131,072 tokens, NVIDIA H200"
    assert lines[1].startswith("PASSED")
    first = " ".join(lines[:24])
    assert "faster than unfused by device time (call" in first
    assert "rms error against fp64" in first
    assert first.index("faster") < first.index("Speed at 131,072 tokens")


def test_the_verdict_is_the_last_line_too():
    lines = printed(terminal.render(make_report())).splitlines()
    assert lines[-1] == lines[1] != ""


def test_a_partial_run_says_so_at_the_very_top():
    lines = printed(terminal.render(make_report(state="partial"))).splitlines()
    assert lines[1].startswith("PARTIAL")


def test_without_a_gpu():
    text = " ".join(printed(terminal.render(make_report(gpu=False))).split())
    assert "No speed: nothing was timed, because this machine has no GPU; kernels ran in Triton's interpreter." in text
    assert "Speed at" not in text
    assert "Accuracy of fused's output" in text


def test_a_run_without_cases_prints():
    text = printed(terminal.render(make_report(state="partial", cases=(), captured_layers=())))
    assert "Nothing was compared." in text
    assert "0 of 36 SSD layers" in text


def test_colour_only_where_it_is_wanted(monkeypatch):
    report = terminal.render(make_report())
    assert "\x1b[" in printed(report, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", printed(report, force_terminal=True))
    assert "\x1b[" not in printed(report)


def split(widths, keys, console_width):
    table = Table(
        title="t",
        headers=tuple(f"{i}" for i in range(len(widths))),
        rows=(tuple(str(i) * width for i, width in enumerate(widths)),),
        align=columns(len(widths), 0),
        keys=keys,
    )
    lines = printed(terminal.SplitTable(table), console_width).splitlines()
    return [line.split() for line in lines if line.startswith("0" * widths[0])]


def test_a_table_that_fits_is_one():
    assert split((4, 10, 10), 1, 28) == [["0000", "1" * 10, "2" * 10]]


def test_a_table_that_does_not_fit_is_split_evenly_behind_its_keys():
    assert split((4, 10, 10, 10, 10), 1, 40) == [["0000", "1" * 10, "2" * 10], ["0000", "3" * 10, "4" * 10]]
    assert split((4, 10, 10), 1, 27) == [["0000", "1" * 10], ["0000", "2" * 10]]


def test_a_column_that_is_too_wide_does_not_set_the_others_apart():
    assert split((4, 5, 5, 5, 40), 1, 30) == [["0000", "1" * 5, "2" * 5, "3" * 5], ["0000", "4" * 24]]


def test_rows_with_nothing_in_a_part_are_left_out_of_it():
    table = Table(
        title="t",
        headers=("name", "a", "b"),
        rows=(("one", "-", "y" * 20), ("two", "x" * 20, "-")),
        align=columns(3, 0),
    )
    lines = [line.split() for line in printed(terminal.SplitTable(table), 30).splitlines()]
    assert [line for line in lines if line and line[0] in ("one", "two")] == [["two", "x" * 20], ["one", "y" * 20]]


def test_a_column_that_says_nothing_makes_no_part_of_its_own():
    table = Table(
        title="t",
        headers=("name", "empty\nBASE", "empty\nNEW", "value"),
        rows=(("one", "-", "-", "x" * 20), ("two", "-", "-", "y" * 20)),
        align=columns(4, 0),
    )
    text = printed(terminal.SplitTable(table), 30)
    assert [line.split() for line in text.splitlines() if line[:3] in ("one", "two")] == [
        ["one", "x" * 20],
        ["two", "y" * 20],
    ]
    assert "empty" not in text
    assert "empty" in printed(terminal.SplitTable(table), 60)


def test_no_cell_is_cut_where_not_even_a_key_and_one_column_fit():
    table = Table(
        title="t",
        headers=("first name", "second name", "value"),
        rows=(("layer 0, 64 tokens", "relaxed, bf16", "1.38e-3"),),
        align=columns(2, 1),
        keys=2,
    )
    text = printed(terminal.SplitTable(table), 30)
    assert max(map(len, text.splitlines())) <= 30
    assert {"layer", "0,", "64", "tokens", "relaxed,", "bf16", "1.38e-3"} <= set(text.split())


def test_a_whole_table_keeps_such_rows():
    table = Table(title="t", headers=("name", "a"), rows=(("one", "-"), ("two", "x")), align=columns(2, 0))
    assert "one" in printed(terminal.SplitTable(table), 30)


def test_long_tables_are_cut_with_a_word_about_the_rest():
    table = Table(title="t", headers=("n",), rows=tuple((str(i),) for i in range(100)), align=columns(1, 0), keys=0)
    text = printed(terminal.SplitTable(table))
    assert "59" in text
    assert "\n60" not in text
    assert "40 more rows: ssdprof export --format markdown" in text
    assert "40 more rows: --json" in printed(terminal.SplitTable(table, rest="--json"))
