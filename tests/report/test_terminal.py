"""Reports on a terminal: their order, tables that fit, the one screen of `run`, `accuracy` and
`runs`.
"""

import re
from pathlib import Path

import cases
import pytest
from cases import (
    EXACT_FP32,
    PRECISIONS,
    RELAXED_FP16,
    answers,
    checkpoint,
    clocks,
    in_calls,
    of_answers,
    report,
)
from report.shown import printed, row
from report.test_contents import EXACT, TWO, packed, result, steps

from ssdprof.core.base import Probe
from ssdprof.core.conditions import parse_gate
from ssdprof.core.outcome import ListedRun
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError
from ssdprof.report import brief, terminal
from ssdprof.report.brief import accuracy_table
from ssdprof.report.document import compose
from ssdprof.report.table import Table

HOT = {"clocks": clocks(throttle_reasons=("SwPowerCap",))}
NOTES = tuple(f"{number} note. " * 9 for number in ("A first", "Another", "A third", "A fourth"))
WRONG = result("inaccurate")


# --- the whole report


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width):
    found = report(seqlens=(131_072, 1024), change=result("inaccurate", layers=(9,)), **HOT)
    text = printed(terminal.render(compose(found)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in (
        "2.00 MiB",
        "100.000%",
        "relaxed, fp16",
        "_output_kernel",
        "(0, 5, 7, 3)",
        "layers",
    ):
        assert word in text


def test_colour_only_where_it_is_wanted(monkeypatch):
    rendered = terminal.render(compose(report()))
    assert "\x1b[" in printed(rendered, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", printed(rendered, force_terminal=True))
    assert "\x1b[" not in printed(rendered)


# --- wide tables


def rendered(rows: tuple[tuple[str, ...], ...], width: int, keys: int = 1) -> list[list[str]]:
    """The words of the lines of a table whose headers are numbers."""
    headers = tuple(f"h{number}" for number in range(len(rows[0])))
    table = Table(title="t", headers=headers, rows=rows, align=("left",) * len(headers), keys=keys)
    lines = printed(terminal.SplitTable(table), width).splitlines()
    assert max(map(len, lines)) <= width
    return [line.split() for line in lines[1:] if line.strip("─ ")]


@pytest.mark.parametrize(
    ("widths", "width", "parts"),
    [
        ((4, 10, 10), 28, [(0, 1, 2)]),
        ((4, 10, 10, 10, 10), 40, [(0, 1, 2, 3), (0, 4)]),
        ((4, 10, 10), 27, [(0, 1), (0, 2)]),
        ((4, 5, 5, 5, 24), 30, [(0, 1, 2, 3), (0, 4)]),
    ],
)
def test_a_table_that_does_not_fit_is_split_behind_its_keys(
    widths, width, parts: list[tuple[int, ...]]
):
    rows = (tuple(str(number) * width for number, width in enumerate(widths)),)
    lines = [line for line in rendered(rows, width) if line[0] == "0" * widths[0]]
    assert lines == [[str(column) * widths[column] for column in part] for part in parts]


def test_a_part_has_no_empty_rows_and_no_empty_columns():
    lines = rendered((("one", "-", "y" * 20), ("two", "x" * 20, "-")), 30)
    assert [line for line in lines if line[0] in ("one", "two")] == [
        ["two", "x" * 20],
        ["one", "y" * 20],
    ]
    lines = rendered((("one", "-", "-", "x" * 20), ("two", "-", "-", "y" * 20)), 30)
    assert lines == [["h0", "h3"], ["one", "x" * 20], ["two", "y" * 20]]
    assert ["one", "-"] in rendered((("one", "-"), ("two", "x")), 30), (
        "a whole table keeps such rows"
    )
    lines = rendered((("layer 0, 64 tokens", "relaxed, bf16", "1.38e-3"),), 30, keys=2)
    words = {"layer", "0,", "64", "tokens", "relaxed,", "bf16", "1.38e-3"}
    assert words <= {word for line in lines for word in line}, (
        "where not even a key and one column fit"
    )


# --- one screen


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "found",
    [
        report(),
        report(seqlens=(1024, 8192, 131_072), layers=range(0, 36, 6)),
        report(gpu=False, precisions=TWO),
        report(change=WRONG, complete=False, notes=NOTES, **HOT),
    ],
)
def test_it_fits_the_screen(found: Report, width):
    lines = printed(brief.render(found), width).splitlines()
    assert len(lines) <= 44
    assert max(map(len, lines)) <= width


def test_numbers_of_the_screen_are_those_of_the_report_and_the_verdict_is_last():
    found = report(precisions=EXACT, layers=(0,))
    text = printed(brief.render(found), 120)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    speed = "exact, fp32 2.00x [1.98, 2.02] faster 1.96x 500 µs 262 M 1.00 ms 46.3%"
    accuracy = "exact, fp32 yes 90.000% 99.900% - 2.00e-3 1.50e-3 0.02 4"
    assert {speed, accuracy} <= set(lines)
    assert "Speed, 131,072 tokens, fused hopper, 1 layer" in text
    assert "exact: decays and their products are kept in fp32" in text
    assert " ".join(" ".join(text.splitlines()[-2:]).split()).endswith(
        "not compared; use exact, fp32 states."
    )


def test_what_does_not_fit_is_counted_and_why_cases_failed_is_said():
    many = report(seqlens=(1024, 2048, 4096, 131_072))
    assert "2 more rows: --full" in printed(brief.render(many))
    lines = printed(brief.render(report(change=WRONG, precisions=EXACT)), 200).splitlines()
    (reason,) = [line for line in lines if "max|ours - oracle| is 1.5" in line]
    assert "layer 0, fused (exact, fp32 states): out, head 7" in reason, (
        "all four have the same reason"
    )
    text = printed(brief.render(report(notes=NOTES)), 200)
    assert "  1 more caveat in the exported report." in text
    assert NOTES[0].strip() in text


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            in_calls(report(seqlens=(2048,), precisions=TWO), 2),
            "Speed, chunks of 1,024 tokens of 2,048 tokens, fused",
        ),
        (packed(200, 200, 200), "output, 600 tokens in 3 packed sequences, fused"),
        (steps(report(precisions=EXACT)), "decode steps after 131,072  recurrent"),
    ],
)
def test_what_a_server_sees_is_named(found: Report, words):
    """Times of a chunked prefill are sums over its chunks, not times of a prompt of a chunk's
    length.
    """
    assert words in printed(brief.render(found), 160)


def test_a_broken_law_is_no_error_of_the_output():
    law = Probe(name="causality", holds="no")
    assert " NO " not in printed(brief.render(report(change=lambda c: c.changed(probes=(law,)))))


# --- ssdprof accuracy


def cells(text: str, *label: str) -> list[str]:
    """Of the first row that begins so."""
    line = next(
        line for line in text.splitlines() if re.split("  +", line)[: len(label)] == [*label]
    )
    return re.split("  +", line.strip())[len(label) :]


def test_the_tables_of_the_chosen_precisions_are_below_the_advice():
    text = printed(accuracy_table(report(), ("relaxed, fp32 states", "relaxed, fp16 states")), 200)
    assert cells(text, "fused hopper", "all 2 precisions", "unfused")[0] == "53.284%"
    assert "fused hopper      exact" not in text
    assert "unfused portable  exact" in text, "every case of the baseline"
    assert text.splitlines()[1].startswith(
        "At 131,072 tokens, fused may be used at relaxed, fp32 states and at relaxed, fp16 states: "
    )
    wrong = report(
        seqlens=(2048, 1024), change=result("nonfinite", precision=RELAXED_FP16, layers=(9,))
    )
    text = printed(accuracy_table(wrong, ("relaxed, fp16 states",)), 300)
    assert (
        "At 2,048 and 1,024 tokens, fused may not be used at relaxed, fp16 states: not finite in "
        "layer 9."
    ) in text
    assert cells(text, "fused hopper", "relaxed, fp16", "fp64")[0] == "NO: 1/4"
    assert text.index("output at 2,048 tokens") < text.index("output at 1,024")
    text = printed(accuracy_table(report(complete=False, notes=("The weights are random.",))), 200)
    assert (
        text.index("PARTIAL")
        < text.index("- The weights are random.")
        < text.index("Accuracy of the output")
    )
    assert "FAILED" not in printed(accuracy_table(wrong, PRECISIONS[:3])), (
        "as if only these had been requested"
    )


def test_a_case_that_did_not_pass_has_its_id_and_the_command_that_runs_it_again():
    wrong = report(change=WRONG, command=("ssdprof", "run", "model"))
    case = next(case for case in wrong.cases if case.result == "inaccurate")
    text = " ".join(printed(brief.render(wrong)).split())
    assert f"Case {case.id}, again: ssdprof run model" in text


def test_a_format_of_states_in_answers_is_run_again_after_the_baseline():
    decoded = of_answers("recurrent", "exact, mine:half states")
    command = ("ssdprof", "answers", "model", "--decode-states", "int8,mine:half", "--seq", "32")
    made = answers(of_answers(), decoded, baseline="unfused", command=command)
    commands = [" ".join(made.again(case)) for case in made.cases]
    fused = "--impl fused --dtypes exact --states fp32"
    assert commands == [
        f"ssdprof answers model --seq 32 {fused}",
        "ssdprof answers model --seq 32 --decode-states mine:half "
        "--impl unfused --dtypes exact --states fp32",
    ]


def test_what_was_not_compared_is_an_error_that_names_what_was():
    with pytest.raises(
        BadInputError, match="compared nothing at relaxed with bf16 states"
    ) as caught:
        accuracy_table(report(), ("relaxed, bf16 states",))
    assert caught.value.hint == "It compared: " + "; ".join(map(str, PRECISIONS)) + "."
    with pytest.raises(BadInputError):
        accuracy_table(report(), (EXACT_FP32, "exact, bf16 states"), every_state=True)
    alone = report(precisions=EXACT)
    for found, hint in (
        (report(complete=False, cases=()), "It ended before its first comparison.  Run again."),
        (answers(of_answers()), "It holds a model's answers: 'ssdprof export' shows them."),
        (alone.changed(cases=alone.cases[:1]), "It holds unfused alone."),
    ):
        with pytest.raises(BadInputError) as caught:
            accuracy_table(found)
        assert caught.value.hint == hint


# --- ssdprof runs


def test_each_run_has_its_verdict():
    def runs(*found: Report | BadInputError) -> Table:
        return brief.runs([ListedRun.of(str(number), one) for number, one in enumerate(found)])

    random = report(complete=False, model=checkpoint(random_weights=True))
    table = runs(
        report(seqlens=(1024, 131_072)),
        report(change=WRONG, gpu=False),
        report(change=result("refused")),
        random,
        report(conditions=(parse_gate("speedup:100"),)),
        BadInputError("It is damaged."),
    )
    assert "; ".join(table.rows[0]) == (
        "0; run; 2026-01-02 03:04 UTC; ibm-granite/granite-4.0-h-small; 1,024, 131,072; "
        "NVIDIA H200; passed"
    )
    verdicts = "; ".join(cells[-1] for cells in table.rows)
    assert verdicts == "passed; failed; refused; incomplete, partial; failed; unreadable"
    assert (row(table, "1")["GPU"], row(table, "5")["model"]) == ("none", "-")
    assert row(table, "3")["model"].endswith(", random weights")
    assert table.note == "5: It is damaged."
    assert not runs()
    without, limited = (
        runs(answers(conditions=conditions)) for conditions in ((), cases.gates("kl:1"))
    )
    assert (row(without, "0")["kind"], row(without, "0")["verdict"]) == ("answers", "compared")
    assert row(limited, "0")["verdict"] == "passed"


def test_the_history_has_a_line_for_each_commit():
    def run(number: int, commit: str, factor: float, **fields) -> tuple[Path, Report]:
        change = cases.slowed(factor, lambda case: case.implementation == "fused")
        found = report(change=change, **fields).changed(id=str(number), commit=commit)
        return Path(str(number)), found

    every = (
        run(0, "a", 1),
        run(1, "b", 2),
        run(2, "b", 1.1),
        run(3, "c", 0.9),
        run(4, "c", 1, seqlens=(1024,)),
    )
    tables = list(brief.history(every[::-1]))
    assert [[(row[0], row[1], row[5]) for row in one.rows] for one in tables] == [
        [("a", "0", "-"), ("b", "2", "+10.0%"), ("c", "3", "-18.2%")],
        [("c", "4", "-")],
    ]
    untimed = list(brief.history([run(0, "a", 1, gpu=False)]))
    assert untimed[0].rows[0][4] == "-"
