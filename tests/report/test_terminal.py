"""Reports on a terminal: their order, tables that fit, the one screen of `run`, `accuracy` and `runs`."""

from __future__ import annotations

import re
from pathlib import Path

import cases
import pytest
from cases import PRECISIONS, RELAXED_FP16, answers, band, checkpoint, clocks, in_calls, of_answers, of_size, report
from report.shown import printed, row
from report.test_contents import TWO, packed, result, steps

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Case
from ssdprof.core.conditions import of_options
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError
from ssdprof.report import brief, terminal
from ssdprof.report.brief import accuracy_table, advice
from ssdprof.report.document import compose
from ssdprof.report.groups import groups
from ssdprof.report.table import Table, aligned

HOT = {"clocks": clocks(throttle_reasons=("SwPowerCap",))}
NOTES = tuple(f"{number} note. " * 9 for number in ("A first", "Another", "A third", "A fourth"))
WRONG = result("inaccurate")


def whole(found: Report, width: int = 100) -> str:
    return printed(terminal.render(compose(found), verdict_last=True), width)


# --- the whole report


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int) -> None:
    text = whole(report(seqlens=(131_072, 1024), change=result("inaccurate", layers=(9,)), **HOT), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("2.00 MiB", "100.000%", "relaxed, fp16", "_output_kernel", "(0, 5, 7, 3)", "layers"):
        assert word in text


def test_the_first_screen_answers_and_the_verdict_is_the_last_line_too() -> None:
    lines = whole(report(precisions=TWO)).splitlines()
    assert lines[0] == "ssdprof: ibm-granite/granite-4.0-h-small, 131,072 tokens, NVIDIA H200"
    assert lines[1].startswith("PASSED")
    assert lines[-1] == lines[1]
    first = " ".join(lines[:24])
    assert first.index("faster than unfused by device time (call") < first.index("Speed at 131,072 tokens")
    assert "More accuracy tables, layer by layer: ssdprof export --format markdown" in lines
    partial = whole(report(complete=False, cases=(), captured=()))
    assert partial.splitlines()[1].startswith("PARTIAL")
    assert "Nothing was compared." in partial
    assert "0 of 36 SSD layers" in partial


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = terminal.render(compose(report()))
    assert "\x1b[" in printed(rendered, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", printed(rendered, force_terminal=True))
    assert "\x1b[" not in printed(rendered)


# --- wide tables


def drawn(rows: tuple[tuple[str, ...], ...], width: int, keys: int = 1) -> list[list[str]]:
    """The words of the lines of a table whose headers are numbers."""
    headers = tuple(f"h{number}" for number in range(len(rows[0])))
    table = Table(title="t", headers=headers, rows=rows, align=aligned("l" * len(headers)), keys=keys)
    lines = printed(terminal.SplitTable(table), width).splitlines()
    assert max(map(len, lines)) <= width
    return [line.split() for line in lines[1:] if line.strip("─ ")]


def of_widths(*widths: int) -> tuple[tuple[str, ...], ...]:
    return (tuple(str(number) * width for number, width in enumerate(widths)),)


@pytest.mark.parametrize(
    ("widths", "width", "parts"),
    [
        ((4, 10, 10), 28, [(0, 1, 2)]),
        ((4, 10, 10, 10, 10), 40, [(0, 1, 2), (0, 3, 4)]),
        ((4, 10, 10), 27, [(0, 1), (0, 2)]),
        ((4, 5, 5, 5, 24), 30, [(0, 1, 2, 3), (0, 4)]),
    ],
)
def test_a_table_that_does_not_fit_is_split_evenly_behind_its_keys(
    widths: tuple[int, ...], width: int, parts: list[tuple[int, ...]]
) -> None:
    lines = [line for line in drawn(of_widths(*widths), width) if line[0] == "0" * widths[0]]
    assert lines == [[str(column) * widths[column] for column in part] for part in parts]


def test_a_part_has_no_empty_rows_and_no_empty_columns() -> None:
    lines = drawn((("one", "-", "y" * 20), ("two", "x" * 20, "-")), 30)
    assert [line for line in lines if line[0] in ("one", "two")] == [["two", "x" * 20], ["one", "y" * 20]]
    lines = drawn((("one", "-", "-", "x" * 20), ("two", "-", "-", "y" * 20)), 30)
    assert lines == [["h0", "h3"], ["one", "x" * 20], ["two", "y" * 20]]
    assert ["one", "-"] in drawn((("one", "-"), ("two", "x")), 30), "a whole table keeps such rows"


def test_no_cell_is_cut_where_not_even_a_key_and_one_column_fit() -> None:
    lines = drawn((("layer 0, 64 tokens", "relaxed, bf16", "1.38e-3"),), 30, keys=2)
    assert {"layer", "0,", "64", "tokens", "relaxed,", "bf16", "1.38e-3"} <= {word for line in lines for word in line}


def test_long_tables_are_cut_with_a_word_about_the_rest() -> None:
    rows = tuple((str(i),) for i in range(100))
    table = Table(title="t", headers=("n",), rows=rows, align=("left",), keys=0)
    text = printed(terminal.SplitTable(table))
    assert "59" in text
    assert "\n60" not in text
    assert "40 more rows: ssdprof export --format markdown" in text
    assert "40 more rows: --json" in printed(terminal.SplitTable(table, rest="--json"))


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
    ids=["one length", "three lengths", "cpu", "failures"],
)
def test_it_fits_the_screen(found: Report, width: int) -> None:
    lines = printed(brief.render(found), width).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width


def test_the_verdict_is_last_and_the_rest_is_there() -> None:
    found = report(precisions=TWO, seqlens=(1024, 131_072), notes=("The prompt is random tokens.",))
    text = printed(brief.render(found))
    lines = text.splitlines()
    assert "PASSED: all 32 cases are within the error budget against the fp64 oracle." in lines
    assert " ".join(" ".join(lines[-2:]).split()) == (
        "At 131,072 and 1,024 tokens, fused may be used at exact, fp32 states; relaxed, fp16 states: within the error "
        "budget in every layer replayed."
    )
    assert lines[0] == "ssdprof: ibm-granite/granite-4.0-h-small, 131,072 and 1,024 tokens, NVIDIA H200"
    for words in ("The prompt is random tokens.", "exact: decays and their products are kept in fp32"):
        assert words in text
    assert sum("relaxed, fp16" in line for line in lines[:-2]) == 4  # two lengths, in each of two tables
    assert printed(brief.render(report(complete=False, cases=()))).splitlines()[-1] == "Nothing was compared."


def test_numbers_of_the_screen_are_those_of_the_report() -> None:
    found = report(precisions=(EXACT_FP32,), layers=(0,))
    text = printed(brief.render(found), 120)
    (speed,) = [line.split("  ") for line in text.splitlines() if "2.00x [" in line]
    assert [cell.strip() for cell in speed if cell.strip()] == [
        "exact, fp32", "2.00x [1.98, 2.02]", "faster", "1.96x", "500 µs", "1.00 ms", "46.3%",
    ]  # fmt: skip
    (accuracy,) = [line.split() for line in text.splitlines() if "90.000%" in line]
    assert accuracy == ["exact,", "fp32", "yes", "90.000%", "99.900%", "2.00e-3", "1.50e-3", "0.02", "4"]
    assert "Speed, 131,072 tokens, fused hopper, 1 layer" in text


def test_what_does_not_fit_is_counted_and_why_cases_failed_is_said() -> None:
    assert "2 more rows: --full" in printed(brief.render(report(seqlens=(1024, 131_072))))
    lines = printed(brief.render(report(change=WRONG, precisions=(EXACT_FP32,))), 200).splitlines()
    reasons = [number for number, line in enumerate(lines) if "max|ours - oracle| is 1.5" in line]
    assert len(reasons) == 1, "all four have the same reason"
    assert "layer 0, fused (exact, fp32 states): out, head 7" in lines[reasons[0]]
    assert lines[-1].startswith("FAILED: 4 of 8 cases")
    note = "abc " * 42 + "defgh ijkl"
    (caveat,) = [line for line in printed(brief.render(report(notes=(note,))), 200).splitlines() if "abc abc" in line]
    assert caveat.rstrip().endswith("abc abc ...")
    assert "  1 more caveat with --full." in printed(brief.render(report(notes=NOTES)))


def test_what_a_server_sees_is_in_the_titles() -> None:
    """Times of a chunked prefill are sums over its chunks, not times of a prompt of a chunk's length."""
    text = printed(brief.render(in_calls(report(seqlens=(2048,), precisions=TWO), 2)), 160)
    assert text.startswith("ssdprof: ibm-granite/granite-4.0-h-small, 2,048 tokens,")
    for table in ("Speed", "Accuracy of the output"):
        assert f"{table}, chunks of 1,024 tokens of 2,048 tokens, fused" in text
    both = in_calls(report(seqlens=(2048,), precisions=TWO), 2)
    other = in_calls(report(seqlens=(3072,), precisions=TWO), 3)
    text = printed(brief.render(both.changed(cases=(*both.cases, *other.cases))))
    for cells in ("1,024 of 3,072 ", "1,024 of 2,048 "):
        assert text.count(f"\n{cells}") == 2 * len(TWO), "chunks of one length of two prompts"
    assert "output, 600 tokens in 3 packed sequences, fused" in printed(brief.render(packed((200, 200, 200))), 160)


def test_the_baseline_of_decode_steps_is_not_called_that_of_prompts() -> None:
    found = steps(report(precisions=(EXACT_FP32,)))
    text = printed(brief.render(found), 160)
    assert "steps after 131,072  recurrent" in text
    assert re.search(r"equal to\n?.*within", text)
    assert "baseline" in text
    alone = found.changed(cases=tuple(case for case in found.cases if case.call))
    text = printed(brief.render(alone), 160)
    assert "Accuracy of the output, decode steps after 131,072 tokens, recurrent" in text
    assert "unfused_step" in text


# --- ssdprof accuracy


def cells(text: str, label: str) -> list[str]:
    """Of the first row with this label."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return line.strip().removeprefix(label).split()


def test_the_table_of_the_chosen_precisions() -> None:
    assert (
        cells(printed(accuracy_table(report(), "relaxed", ("fp32", "fp16"))), "match @ atol,rtol=0") == ["53.284%"] * 2
    )
    assert cells(printed(accuracy_table(report()), 120), "match @ atol,rtol=0") == ["79.926%"] * 2 + ["53.284%"] * 2
    assert cells(printed(accuracy_table(report(), "all", ("fp16",))), "match @ atol,rtol=0") == ["79.926%", "53.284%"]
    text = printed(accuracy_table(report(seqlens=(1024, 131_072))))
    assert text.index("fused's output at 131,072 tokens") < text.index("fused's output at 1,024")


def test_advice_is_above_the_numbers() -> None:
    first, *rest = printed(accuracy_table(report(), "relaxed", ("fp32",))).splitlines()
    assert first.startswith("ibm-granite/granite-4.0-h-small, run 2026")
    assert " ".join(" ".join(rest).split()).startswith(
        "At 131,072 tokens, fused may be used at relaxed, fp32 states: within the error budget in every layer replayed."
    )
    wrong = report(seqlens=(2048, 1024), change=result("nonfinite", precision=RELAXED_FP16, layers=(9,)))
    text = printed(accuracy_table(wrong, "relaxed", ("fp16",)))
    assert "At 2,048 and 1,024 tokens, fused may not be used at relaxed, fp16 states: not finite in layer 9." in (
        " ".join(text.split())
    )
    assert cells(text, "within the error budget") == ["NO:", "1/4"]
    text = printed(accuracy_table(report(complete=False, notes=("The weights are random.",))))
    assert text.index("PARTIAL") < text.index("- The weights are random.") < text.index("match @")
    assert "FAILED" not in printed(accuracy_table(wrong, "exact")), "as if only these had been requested"


def said(found: Report) -> str:
    ((line, _),) = advice([(group, "fused") for group in groups(found)])
    return line


def test_advice_names_what_may_be_used_and_what_not() -> None:
    wrong = report(change=result("inaccurate", precision=RELAXED_FP16, layers=(18,)))
    assert said(wrong) == (
        "At 131,072 tokens, fused may be used at exact, fp32 states; exact, fp16 states; relaxed, fp32 states: within "
        "the error budget in "
        "every layer replayed.  It may not be used at relaxed, fp16 states: inaccurate in layer 18."
    )
    assert said(wrong.restricted(precisions=[RELAXED_FP16])) == (
        "At 131,072 tokens, fused may not be used at relaxed, fp16 states: inaccurate in layer 18."
    )
    assert said(report(layers=(3,), precisions=(cases.EXACT_FP16,))).endswith("the error budget in the layer replayed.")


def test_a_precision_that_is_far_from_exact_is_not_advised_unless_the_models_noise_hides_it() -> None:
    def coarse(case: Case) -> Case:
        relaxed = case.implementation == "fused" and case.precision == RELAXED_FP16
        return case.changed(accuracy=of_size(3100, "unfused exact, fp16 states")) if relaxed else case

    def last(*answers: float) -> str:
        found = report(precisions=TWO, layers=(3,), change=coarse)
        made = [of_answers("fused", RELAXED_FP16, bands=(band(kl_mean=one),)) for one in answers]
        made += [of_answers("unfused", change="moved", bands=(band(kl_mean=1e-6),))] if answers else []
        return said(found.changed(cases=(*found.cases, *made)))

    coarser = "It may not be used at relaxed, fp16 states: its"
    assert last().endswith(f"{coarser} error is 3,010 times that of exact intermediates.")
    assert last(1.5e-6).endswith(
        "exact, fp32 states; relaxed, fp16 states: within the error budget in the layer replayed."
    )
    assert last(3e-5).endswith(f"{coarser} answers diverge 30 times as far as by the model's own noise.")


def test_what_was_not_compared_is_an_error_that_names_what_was() -> None:
    with pytest.raises(BadInputError, match="compared nothing at relaxed with bf16 states") as caught:
        accuracy_table(report(), "relaxed", ("bf16",))
    assert caught.value.hint == "It compared: " + "; ".join(map(str, PRECISIONS)) + "."
    with pytest.raises(BadInputError):
        accuracy_table(report(), state_dtypes=("fp32", "bf16"), every_state=True)
    alone = report(precisions=(EXACT_FP32,))
    for found, hint in (
        (report(complete=False, cases=()), "It ended before its first comparison.  Run again."),
        (answers(of_answers()), "It holds a model's answers: 'ssdprof export' shows them."),
        (alone.changed(cases=alone.cases[:1]), "It holds unfused alone."),
    ):
        with pytest.raises(BadInputError) as caught:
            accuracy_table(found)
        assert caught.value.hint == hint


# --- ssdprof runs


def test_each_run_has_its_verdict() -> None:
    def runs(*found: Report | BadInputError) -> Table | None:
        return brief.runs([(Path(f"runs/{number}"), one) for number, one in enumerate(found)])

    random = report(complete=False, model=checkpoint(random_weights=True))
    table = runs(
        report(seqlens=(1024, 131_072)), report(change=WRONG, gpu=False), report(change=result("refused")), random,
        report(conditions=of_options(min_speedup=100)), BadInputError("It is damaged."),
    )  # fmt: skip
    assert table is not None
    assert table.rows[0] == (
        "0", "2026-01-02 03:04 UTC", "ibm-granite/granite-4.0-h-small", "1,024, 131,072", "NVIDIA H200", "passed",
    )  # fmt: skip
    verdicts = ["passed", "failed", "refused", "incomplete, partial", "failed", "unreadable"]
    assert [cells[-1] for cells in table.rows] == verdicts
    assert row(table, "1")["GPU"] == "none"
    assert row(table, "3")["model"].endswith(", random weights")
    assert row(table, "5")["model"] == "-"
    assert table.note == "5: It is damaged."
    assert runs() is None
