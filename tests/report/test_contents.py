"""The contents of a report, for all renderers: verdict, statements, caveats, facts and tables of calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import cases
import pytest
from cases import RELAXED_FP16, RELAXED_FP32, bench, cell, checkpoint, clocks, failed, in_calls, prompt, report, timed
from report.shown import below, row, there

from ssdprof.core import words as fmt
from ssdprof.core.base import EXACT_FP32, REPEATS, PrecisionRecord, Probe
from ssdprof.core.case import Case
from ssdprof.core.conditions import of_options
from ssdprof.core.report import LeftOut, Report
from ssdprof.core.subject import CallRef, Serving
from ssdprof.report import calls
from ssdprof.report.document import compose
from ssdprof.report.facts import meanings, what_ran
from ssdprof.report.groups import groups
from ssdprof.report.statements import caveats, statements, verdict_lines
from ssdprof.report.table import Table

TWO = (EXACT_FP32, RELAXED_FP16)
Change = Callable[[Case], Case]


def changed(
    how: Change, implementation: str = "fused", precision: PrecisionRecord | None = None, layers: Collection[int] = ()
) -> Change:
    """`how` for the selected cases; the others stay."""

    def change(case: Case) -> Case:
        mine = case.implementation == implementation and precision in (None, case.precision)
        return how(case) if mine and (not layers or (case.layer and case.layer.index in layers)) else case

    return change


def result(word: str, *where: Any, **more: Any) -> Change:
    return changed(lambda case: failed(case, word), *where, **more)


def verdict(found: Report) -> list[str]:
    return [line.text for line in verdict_lines(found)]


def said(found: Report) -> dict[str, str]:
    return dict(statements(found))


def steps(found: Report) -> Report:
    """With a decode step after each prompt, in `recurrent` and its baseline `unfused_step`."""
    names = {"fused": "recurrent", "unfused": "unfused_step"}
    made = []
    for one in found.cases:
        call = CallRef(kind="decode", number=1, count=1, prompt_seqlen=one.seqlen, sequences=1)
        baseline = "unfused_step" if one.baseline else ""
        name = names[one.implementation]
        made.append(one.changed(implementation=name, baseline=baseline, variant=name, call=call, seqlen=1))
    return found.changed(cases=(*found.cases, *made))


# --- the verdict


def test_a_failure_is_named_first_and_has_no_speed() -> None:
    found = report(precisions=TWO, change=result("nonfinite", precision=RELAXED_FP16))
    assert verdict(found) == ["FAILED: 4 of 16 cases: fused (relaxed, fp16 states) not finite in layers 0, 9, 18, 27."]
    text = said(found)["fused, relaxed with fp16 states:"]
    assert text.startswith("FAILED: not finite in layers 0, 9, 18, 27.")
    assert "x [" not in text


def test_an_incomplete_run_never_passes() -> None:
    first, second = verdict_lines(report(complete=False))
    assert first.text.startswith("PARTIAL: this run did not reach its end.")
    assert (first.good, second.text[:20], second.good) == (False, "So far all 32 cases ", True)
    assert verdict(report(complete=False, cases=()))[1:] == ["Nothing was compared."]
    assert verdict(report(capture_complete=False))[0].startswith("PARTIAL: the replayed capture was interrupted")
    whole = report(layers=(0, 9), precisions=(EXACT_FP32,))
    assert verdict(whole.changed(cases=whole.cases[:3])) == [
        "MISSING: 1 requested case.",
        "The other 3 cases are within the error budget against the fp64 oracle.",
    ]


def test_a_refusal_is_named_with_its_reason_and_is_no_pass() -> None:
    found = report(change=result("refused", precision=RELAXED_FP32))
    assert verdict(found) == [
        "REFUSED: fused (relaxed, fp32 states) in layers 0, 9, 18, 27: headdim 80 is not supported.",
        "The other 28 cases are within the error budget against the fp64 oracle.",
    ]
    assert "fused, relaxed with fp32 states:" not in said(found)
    everything = report(change=lambda case: failed(case, "refused"), layers=(0,), precisions=(EXACT_FP32,))
    assert verdict(everything)[1:] == ["Nothing was compared."]


def without_exact_answer(case: Case) -> Case:
    """The case for NaN weights: the oracle's answer is not finite."""
    bad = failed(case, "nonfinite").accuracy[0]
    return failed(case, "nonfinite").changed(accuracy=(bad.changed(floor=bad.vs_oracle),))


def test_an_exact_answer_that_is_not_finite_is_the_inputs_fault() -> None:
    def change(case: Case) -> Case:
        if case.layer and case.layer.index == 9:
            return without_exact_answer(case)
        return result("nonfinite", layers=(18,))(case)

    found = report(change=change, precisions=(EXACT_FP32,))
    inputs, kernels = verdict(found)
    assert inputs.startswith("FAILED: the model's inputs, not the kernels.  In layer 9 the exact answer itself is not")
    assert kernels == "FAILED: 1 of 8 cases: fused (exact, fp32 states) not finite in layer 18."
    assert "without a finite exact answer in layer 9" in said(found)["fused, exact with fp32 states:"]


def test_gates_are_named_with_the_first_cases_that_break_them() -> None:
    gates = of_options(min_speedup=2.2, max_rms_ratio=9)
    (line, _) = verdict_lines(report(layers=range(8), precisions=(EXACT_FP32,), conditions=gates))
    assert line.text.startswith(
        "GATE FAILED: min-speedup 2.2: layer 0, 131,072 tokens, fused, exact, fp32 states: 2x over unfused; layer 1, "
    )
    assert line.text.endswith("; and 2 cases more.")
    assert not line.good


# --- statements


def test_one_statement_per_precision_with_speed_and_accuracy() -> None:
    found = report(layers=(9,), precisions=TWO)
    case = next(case for case in found.cases if case.implementation == "fused")
    call = found.speedup(case, "call")
    assert call is not None
    assert said(found)["fused, exact with fp32 states:"] == (
        f"{fmt.speedup(found.speedup(case))} faster than unfused by device time (call {fmt.ratio(call.value)}) at "
        "131,072 tokens, in layer 9. 82.568% of output elements are equal to those of unfused, 91.651% within 1e-3; "
        "rms error against fp64 2.18e-3 (unfused 2.18e-3, floor 1.50e-3)."
    )
    assert list(said(found)) == ["fused, exact with fp32 states:", "fused, relaxed with fp16 states:"]


def test_several_layers_and_prompts_are_named() -> None:
    text = said(report(seqlens=(1024, 131_072), precisions=TWO))["fused, exact with fp32 states:"]
    assert "at 131,072 tokens, summed over 4 layers; " in text
    assert text.index("131,072 tokens") < text.index(" 1,024 tokens")
    assert " At 131,072 tokens, " in text, "of which prompt the errors are"
    text = said(report(seqlens=(1,), layers=(9,), precisions=(EXACT_FP32,)))["fused, exact with fp32 states:"]
    assert "at 1 token, in layer 9." in text


@pytest.mark.parametrize(
    ("us", "words"),
    [
        (1250.0, "slower than unfused, 0.80x [0."),
        (1000.0, "as fast as unfused, 1.00x [0."),
        (500.0, "faster than unfused by device time (call 1.00x: no difference) at"),
    ],
)
def test_what_is_not_faster_is_not_called_so(us: float, words: str) -> None:
    change = changed(lambda case: case.changed(samples=timed(us, 1020.0)))
    text = said(report(layers=(0,), precisions=(EXACT_FP32,), change=change))["fused, exact with fp32 states:"]
    assert words in text
    assert ("faster" in text) is (us == 500.0)


def test_without_times_it_is_said_why() -> None:
    assert said(report(gpu=False))["No speed:"] == ("nothing was timed, because this machine has no GPU.")
    untimed = report(change=lambda case: case.changed(samples=()))
    assert said(untimed)["No speed:"] == "nothing was timed in this run."
    assert "No speed:" not in said(report())


def test_more_than_two_precisions_have_one_statement_from_the_least_to_the_greatest() -> None:
    found = report(seqlens=(131_072, 1024))
    ((subject, text),) = said(found).items()
    assert subject == "fused, 4 precisions:"
    assert text.startswith("2.00x to 2.50x faster than unfused by device time (call ")
    assert "at 131,072 tokens, summed over 4 layers; 2.00x to 2.50x (call " in text
    assert " at 1,024 tokens. At 131,072 tokens, 53.284% to 79.926% of output elements are equal to those of" in text
    assert "rms error against fp64 2.54e-3 to 3.81e-3 (unfused 2.54e-3, floor 1.50e-3)." in text
    slower = changed(lambda case: case.changed(samples=timed(2000.0, 2000.0)), precision=RELAXED_FP16)
    (text,) = said(report(layers=(0,), change=slower)).values()
    assert "0.50x to 2.50x as fast as unfused (faster at 3 and slower at 1 of 4 precisions) by device time" in text
    (text,) = said(report(change=result("nonfinite", precision=RELAXED_FP16, layers=(18,)))).values()
    assert text.startswith("FAILED: relaxed with fp16 states: not finite in layer 18. ")
    assert "to inf (unfused" in text


# --- caveats and words


def test_caveats_are_throttling_and_the_notes_of_the_run() -> None:
    found = report(clocks=clocks(throttle_reasons=("SwPowerCap",)), notes=("The weights are random.",))
    throttled, note = caveats(found)
    assert "SwPowerCap" in throttled
    assert note == "The weights are random."
    assert caveats(report()) == ()
    demo = checkpoint(source="demo")
    assert "demo model is too small to fill a GPU" in caveats(report(model=demo))[0]
    assert caveats(report(model=demo, gpu=False)) == ()


def packed(lengths: tuple[int, ...]) -> Report:
    call = CallRef(kind="packed", number=1, count=1, prompt_seqlen=sum(lengths), sequences=len(lengths))
    prompts = (prompt(sum(lengths), serving=Serving(packed=lengths)),)
    return report(seqlens=(sum(lengths),), prompts=prompts, change=lambda case: case.changed(call=call))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (report(seqlens=(256, 257)), "256 tokens are"),
        (report(seqlens=(1,)), "1 token is"),
        (in_calls(report(seqlens=(256,)), count=1), "A sequence of at most 256 tokens is"),
        (in_calls(report(seqlens=(256,)), count=2), ""),
        (packed((200, 256, 144)), "A sequence of at most 256 tokens is"),
        (packed((200, 257, 144)), ""),
    ],
)
def test_sequences_of_one_chunk_do_not_test_the_states(found: Report, words: str) -> None:
    expected = (
        f"{words} no more than one chunk of 256: no state is passed on, so the dtype of the states is not tested."
    )
    assert caveats(found) == ((expected,) if words else ())


def test_a_baseline_outside_its_budget_has_a_caveat_with_both_errors() -> None:
    def outside(case: Case) -> Case:
        return case.changed(accuracy=failed(case).accuracy) if case.implementation == "unfused" else case

    found = report(layers=(3,), precisions=(EXACT_FP32,), change=outside)
    (caveat,) = caveats(found)
    assert caveat == (
        "The baseline is outside its error budget, but timed: unfused, exact, fp32 states in layer 3, 131,072 tokens "
        "(rms error 2.00e-3, of fused 2.06e-3)."
    )
    assert verdict(found) == ["PASSED: the one case is within the error budget against the fp64 oracle."]
    assert "but timed" not in caveats(report(gpu=False, precisions=(EXACT_FP32,), change=outside))[0]


def test_a_case_without_a_time_is_named_last() -> None:
    def untimed(case: Case) -> Case:
        return case.changed(samples=()) if case.implementation == "fused" else case

    for kind in (report(layers=(3,), precisions=(EXACT_FP32,), change=untimed), bench(*map(untimed, cell()))):
        *_, last = verdict(kind)
        assert last.startswith("NO TIME: 1 case passed and could not be timed: ")
    assert verdict(report(layers=(3,), precisions=(EXACT_FP32,), change=untimed, conditions=of_options(min_speedup=1)))[
        0
    ].startswith("GATE FAILED: min-speedup 1: layer 3, 131,072 tokens, fused, exact, fp32 states: not timed")


def test_a_run_without_a_gpu_says_which_kernel_it_judged() -> None:
    (line,) = verdict(report(gpu=False))
    assert line.endswith("oracle; Triton's interpreter ran the portable kernel, and no GPU's kernel was run.")


def test_libraries_have_caveats_instead_of_failures() -> None:
    outside = failed(report().cases[0]).accuracy

    def library(case: Case) -> Case:
        if case.implementation != "fused":
            return case
        own = case.changed(implementation="fla", kind="library")
        refused = own.changed(status="refused", reason="no such size.", accuracy=(), samples=())
        return refused if case.layer and case.layer.index == 9 else own.changed(accuracy=outside)

    found = report(precisions=(EXACT_FP32,), change=library, requested=())
    assert caveats(found) == (
        "Without a time: fla (exact, fp32 states) in layer 9: no such size.",
        "Outside the error budget, but timed because it is another library's: fla (exact, fp32 states) passed in "
        "layers 0, 18, 27.",
    )
    assert verdict(found)[0].startswith("PASSED: all 4 cases")


def test_precisions_that_are_another_one_are_named() -> None:
    def of_gdn(case: Case) -> Case:
        reason = "" if case.precision == EXACT_FP32 else "; the same as exact with fp32 states"
        return case.changed(plan=f"two launches{reason}")

    (caveat,) = caveats(report(change=changed(of_gdn)))
    assert caveat.startswith("fused computes every precision as exact with fp32 states")
    assert "and so is the time" in caveat
    (caveat,) = caveats(report(gpu=False, change=changed(of_gdn)))
    assert caveat == "fused computes every precision as exact with fp32 states: results are bitwise the same."
    (caveat,) = caveats(report(change=changed(of_gdn, precision=cases.EXACT_FP16)))
    assert caveat.startswith("fused computes exact with fp16 states as exact with fp32 states")


def test_words_are_explained_where_they_appear() -> None:
    assert [word for word, _ in meanings(report())] == ["unfused", "fused", "exact", "relaxed"]
    words = [word for word, _ in meanings(steps(report()))]
    assert words == ["unfused", "fused", "recurrent", "unfused_step", "exact", "relaxed"]
    other = dict(meanings(report().changed(baseline="fla")))
    assert other["baseline"] == "fla, which the others are compared with"
    assert other["unfused"] == "ssdprof's own kernels with one launch per stage"


# --- what ran


def of_run(found: Report) -> dict[str, str]:
    return {name: value for name, value in what_ran(found).rows}


def test_facts_name_everything_behind_the_numbers() -> None:
    """The goldens hold the facts of stored runs; none of them is of a family."""
    facts = of_run(report())
    assert facts["requested model"] == "ibm-granite/granite-4.0"
    assert "granite-4.0-h-tiny" in facts["siblings"]
    assert facts["layers"] == "4 of 36 SSD layers replayed (0, 9, 18, 27); the model has 40 layers"
    assert facts["clocks"].startswith("SM 1,980 MHz before, 1,965 after, memory ")
    assert facts["clocks"].endswith("not throttled")
    assert facts["precisions"].count("states") == 4


def test_facts_leave_out_what_there_is_not() -> None:
    facts = of_run(report(gpu=False, model=checkpoint(siblings=(), revision=None)))
    assert facts["GPU"] == "none"
    absent = {"driver", "clocks", "ceilings", "siblings", "revision", "quantisation", "peak memory", "tuned", "ranks"}
    assert not absent & facts.keys()


def test_facts_of_special_runs() -> None:
    assert of_run(steps(report()))["baseline"] == "unfused and unfused_step in decode steps"
    assert of_run(report(ranks=2))["ranks"] == "2 processes, each on a GPU of its own, shared the layers"
    assert of_run(report(gpu=False, ranks=2))["ranks"] == "2 processes shared the layers"
    tuned = changed(lambda case: case.changed(plan="one launch; tuned on this GPU, 2026-11-20"))
    assert of_run(report(change=tuned))["tuned"] == "fused: tuned on this GPU, 2026-11-20 (16 of 32 cases)"
    hot = report(clocks=clocks(throttle_reasons=("SwPowerCap", "HwThermal")))
    assert of_run(hot)["clocks"].endswith("throttled: SwPowerCap, HwThermal")
    own = changed(lambda case: case.changed(kind="own", version="mine:run"))
    assert of_run(report(change=own, precisions=TWO))["your kernel"] == (
        "fused, mine:run, at exact, fp32 states; relaxed, fp16 states"
    )


# --- launches, failures, remarks


def test_equal_launches_share_a_row() -> None:
    *_, last = rows = there(calls.launches(report())).rows
    assert last == ("fused", "hopper", "_fused_kernel", "168", "0", "96.0 KiB", "chunk=64, num_warps=4", "all")
    assert len(rows) == 3

    def wide(case: Case) -> Case:
        return case.changed(launches=(case.launches[0].changed(registers=255),))

    table = there(calls.launches(report(change=changed(wide, precision=RELAXED_FP16))))
    used = {cells[3]: cells[-1] for cells in table.rows if cells[0] == "fused"}
    assert used == {
        "168": "exact, fp32 states; exact, fp16 states; relaxed, fp32 states",
        "255": "relaxed, fp16 states",
    }
    lengths = report(seqlens=(1024, 2048), layers=(0,), precisions=(EXACT_FP32,))
    short = lengths.changed(cases=tuple(case for case in lengths.cases if case.baseline or case.seqlen == 1024))
    assert row(calls.launches(short), "unfused", "portable", "_state_kernel")["used for"] == "1,024 tokens"


def test_the_interpreter_has_no_registers() -> None:
    table = there(calls.launches(report(gpu=False)))
    assert table.headers == ("implementation", "variant", "kernel", "configuration", "used for")
    assert table.note == ""


def test_failures_say_where_the_first_nan_is_and_share_rows() -> None:
    found = report(layers=(0, 1, 2, 5), seqlens=(1024, 2048), precisions=(EXACT_FP32,), change=result("nonfinite"))
    (cells,) = there(calls.failures(found)).rows
    assert cells[:6] == ("1", "0-2, 5", "2,048; 1,024", "fused", "exact, fp32", "nonfinite")
    assert cells[7] == "out[0, 1, 2, 3]"

    def some(case: Case) -> Case:
        mine = case.layer and (case.layer.index, case.seqlen) in ((0, 1024), (1, 2048))
        return result("refused")(case) if mine else case

    table = there(calls.failures(report(layers=(0, 1), seqlens=(1024, 2048), precisions=(EXACT_FP32,), change=some)))
    assert [cells[1:3] for cells in table.rows] == [("1", "2,048"), ("0", "1,024")]


def test_endless_failures_are_cut_and_counted() -> None:
    def change(case: Case) -> Case:
        return failed(case, "failed").changed(reason=f"{case.where} " + "x\n" * 1000)

    table = there(calls.failures(report(layers=range(50), precisions=(EXACT_FP32,), change=change)))
    assert len(table.rows) == 40
    assert table.note.startswith("60 more rows")
    assert {len(cells[6]) for cells in table.rows} == {300}


def test_a_remark_on_a_case_that_passed() -> None:
    change = changed(lambda case: case.changed(reason="repeated calls differ"))
    found = report(precisions=(EXACT_FP32,), change=change)
    assert calls.failures(found) is None
    assert there(calls.remarks(found)).rows == (
        ("1", "0, 9, 18, 27", "131,072", "fused", "exact, fp32", "passed", "repeated calls differ", "-"),
    )
    assert calls.remarks(report()) is None


# --- speed


def test_both_speedups_stand_side_by_side_with_their_intervals() -> None:
    found = report(layers=(9,), precisions=(EXACT_FP32,))
    (group,) = groups(found)
    case = next(case for case in found.cases if case.implementation == "fused")
    assert case.device_us is not None
    speedups = fmt.speedup(found.speedup(case)), fmt.speedup(found.speedup(case, "call")), "faster", "faster"
    of_roof = fmt.percent(case.floor_pct(found.ceilings), 1)
    for table, keys in ((calls.total_speed(group), ()), (calls.speed_by_layer(group), ("9",))):
        cells = tuple(row(table, *keys, "fused hopper").values())
        assert cells == (*keys, "fused hopper", "exact, fp32", *speedups, "545 µs", "565 µs", of_roof, "1.00 MiB")
        assert there(table).note.endswith("Faster or slower: the whole interval differs from 1 by more than 1%.")
        assert row(table, *keys, "unfused portable")["speedup, device"] == "-"


def test_the_sum_names_its_layers_and_its_baseline() -> None:
    (untimed,) = groups(report(gpu=False))
    assert (calls.total_speed(untimed), calls.speed_by_layer(untimed)) == (None, None)
    table = there(calls.total_speed(groups(report())[0]))
    assert table.title == "Speed at 131,072 tokens, sum over 4 layers"
    assert "Baseline: unfused, exact, with the same state dtype." in table.note
    assert row(table, "fused hopper", "exact, fp32")["device time"] == "2.27 ms"
    assert row(table, "unfused portable", "relaxed, fp32")["speedup, device"].startswith("1.11x [")


def test_a_layer_that_failed_is_not_in_the_sum_and_the_row_says_so() -> None:
    (group,) = groups(report(change=result("inaccurate", precision=EXACT_FP32, layers=(9,))))
    table = there(calls.total_speed(group))
    assert row(table, "fused hopper", "exact, fp32")["layers"] == "3 of 4"
    assert row(table, "unfused portable", "exact, fp32")["layers"] == "4 of 4"
    assert "times over different numbers of layers do not compare" in table.note
    cells = row(calls.speed_by_layer(group), "9", "fused hopper", "exact, fp32")
    assert list(cells.values())[3:] == ["-", "-", "inaccurate", "-", "-", "-", "-", "-"]


# --- accuracy


def match(found: Report, implementation: str = "fused") -> Table | None:
    return calls.matches(groups(found)[0], implementation, "out")


def test_the_match_table_has_a_column_per_precision_and_fp64_and_the_floor_beside() -> None:
    table = there(match(report()))
    ours = below(table, "fused against unfused")
    assert ours["match @ atol,rtol=0"] == (*["79.926%"] * 2, *["53.284%"] * 2, "")
    assert ours["match @ atol,rtol=1e-2"] == (*["100.000%"] * 4, "")
    exact = below(table, "fused against fp64")
    assert exact["rms error, worst layer"] == ("2.54e-3", "2.54e-3", "3.81e-3", "3.81e-3", "1.50e-3")
    assert exact["largest error, worst layer"][0] == "0.0254", "layer 27"
    assert below(table, "unfused against fp64")["rms error, worst layer"][2] == "2.54e-3", "of the exact baseline"
    states = calls.matches(groups(report(layers=(0,)))[0], "fused", "final_states")
    assert there(states).title == "Accuracy of fused's final states at 131,072 tokens, layer 0"


def test_the_baseline_at_other_precisions_is_compared_with_itself() -> None:
    table = there(match(report(), "unfused"))
    assert [header.split(",")[0] for header in table.headers] == ["", *["relaxed"] * 2, "floor"]
    assert below(table, "unfused against unfused")["match @ atol,rtol=0"] == (*["53.284%"] * 2, "")
    assert len(table.headings) == 2
    assert match(report(precisions=(EXACT_FP32,)), "unfused") is None


def test_a_case_over_its_budget_is_counted_and_a_refused_one_has_no_column() -> None:
    table = there(match(report(change=result("inaccurate", layers=(9,)))))
    assert table.rows[0][1] == "NO: 1/4"
    table = there(match(report(change=result("refused", precision=RELAXED_FP32))))
    assert "relaxed,\nfp32\nstates" not in table.headers


def test_errors_of_each_layer_and_the_place_of_the_largest() -> None:
    (group,) = groups(report())
    table = there(calls.errors_by_layer(group, "fused"))
    assert [cells[0] for cells in table.rows] == ["0", "9", "18", "27"]
    assert (table.rows[0][1], table.rows[3][1], table.rows[3][-1]) == ("2.00e-3", "2.54e-3", "1.50e-3")
    table = there(calls.largest_errors(group, "fused"))
    assert table.rows[0] == ("output", "exact, fp32 states", "fp64", "0.0254", "4", "27", "(0, 5, 7, 3)", "7")
    assert table.rows[1][2:6] == ("unfused", "0.0127", "4", "27")


def test_of_several_chunks_the_worst_call_is_named() -> None:
    (group,) = groups(in_calls(report(layers=(0, 9), seqlens=(24,))))
    names = list(below(calls.matches(group, "fused", "out"), "fused against fp64"))
    assert "rms error, worst call" in names
    assert there(calls.errors_by_layer(group, "fused")).note == "The largest of each layer's chunks."
    table = there(calls.largest_errors(group, "fused"))
    assert table.headers[5:8] == ("layer", "chunk", "position")
    assert {cells[6] for cells in table.rows} <= {"1", "2", "3"}


@pytest.mark.parametrize(("kind", "passed"), [("own", False), ("library", True)])
def test_laws_are_a_table_and_a_broken_one_fails_what_is_no_library(kind: str, passed: bool) -> None:
    broken = Probe(name="causality", holds="no", detail="out at (0, 3) is 1 and 2")
    probes = (Probe(name="doubling", holds="yes"), broken, Probe(name=REPEATS, holds="no", detail="out at (0, 4)"))
    told = changed(lambda case: case.changed(kind=kind, probes=probes), layers=(9,))
    found = report(precisions=(EXACT_FP32,), change=told)
    table = there(calls.laws(found))
    assert [(*one,) for one in table.rows] == [("doubling", "yes"), ("causality", "no"), (REPEATS, "no")]
    assert table.headers == ("law", "fused,\nexact, fp32")
    assert verdict(found)[0].startswith("PASSED") == passed
    assert [case.why for case in found.cases if case.result == "inaccurate"] == [
        f"law 'causality': {broken.detail}"
    ] * (not passed)


def test_a_table_refuses_rows_of_another_length() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        Table(title="t", headers=("a", "b"), rows=(("1",),), align=("left", "left"))


def test_failures_come_first_if_there_are_any() -> None:
    assert compose(report(change=result("inaccurate", layers=(9,)))).sections[0].title == "Failures and refusals"
    assert compose(report(complete=False, cases=())).sections[0].title != "Failures and refusals"


def test_what_was_left_out_is_not_missing() -> None:
    whole = report(layers=(0, 9), precisions=(EXACT_FP32,))
    out = LeftOut(place="layer 9", reason="no time")
    found = report(
        layers=(0,), precisions=(EXACT_FP32,), requested=tuple(map(cases.requested, whole.cases)), left_out=(out,)
    )
    assert verdict(found)[0].startswith("PASSED")
