"""The contents of the tables, for all renderers."""

import pytest
from report.make import (
    ALL_PRECISIONS,
    RELAXED_FP16,
    RELAXED_FP32,
    failed,
    in_calls,
    make_checkpoint,
    make_clocks,
    make_report,
    with_scale,
    with_steps,
)

from ssdprof.report import format as fmt
from ssdprof.report.document import compose
from ssdprof.report.groups import groups
from ssdprof.report.markdown import render_document
from ssdprof.report.tables import Table, accuracy, run, speed, warm
from ssdprof.schema import EXACT_FP32, Interval, WarmSpeedup, WarmTiming


def rows(table):
    """First column -> cells, for a table with a unique first column."""
    return {row[0]: row[1:] for row in table.rows}


def below(table, heading):
    """The rows under a heading, as a dict."""
    start = next(i for i in table.headings if table.rows[i][0] == heading)
    stop = min((i for i in table.headings if i > start), default=len(table.rows))
    return {row[0]: row[1:] for row in table.rows[start + 1 : stop]}


def with_warm(case):
    """A case with a warm time of a tenth of its device time, 3 times as fast as the baseline."""
    if case.timing is None:
        return case
    us = case.timing.device_median_us / 10
    warm_timing = WarmTiming(calls=10, median_us=us, interval_us=Interval(low=us, high=us))
    timing = case.timing.model_copy(update={"warm": warm_timing})
    over = WarmSpeedup(ratio=3.0, interval=Interval(low=2.9, high=3.1), verdict="faster")
    speedup = case.speedup and case.speedup.model_copy(update={"warm": over})
    return case.model_copy(update={"timing": timing, "speedup": speedup})


def test_the_warm_clock_has_a_table_of_its_own_with_the_cold_times_beside_it():
    (group,) = groups(make_report(change=with_warm))
    table, plain = warm.total(group), speed.total(group)
    assert table.title.startswith("Speed by the warm clock at 131,072 tokens, sum over 4 layers")
    assert [row[:2] for row in table.rows] == [row[:2] for row in plain.rows]
    for row, cold in zip(table.rows, plain.rows, strict=True):
        own, default = dict(zip(table.headers, row, strict=True)), dict(zip(plain.headers, cold, strict=True))
        assert own["call time,\ncold"] == default["call\ntime"]
        assert own["device time,\ncold"] == default["device\ntime"]
    for row, series in zip(table.rows, group.series(), strict=True):
        tenths = sum(case.timing.device_median_us for case in series.cases) / 10
        assert row[table.headers.index("warm\ntime")] == fmt.duration(tenths)
    assert table.rows[0][2] == "-", "the baseline"
    assert table.rows[-1][2:4] == ("3.00x [2.90, 3.10]", "faster")
    (without,) = groups(make_report())
    assert warm.total(without) is None
    (partly,) = groups(make_report(change=lambda case: with_warm(case) if case.layer.index else case))
    assert warm.total(partly) is None
    assert "Speed by the warm clock" in render_document(compose(make_report(change=with_warm)))


def test_a_table_refuses_rows_of_another_length():
    with pytest.raises(ValueError, match="2 cells"):
        Table(title="t", headers=("a", "b"), rows=(("1",),), align=("left", "left"))


def test_facts_name_everything_behind_the_numbers():
    facts = {name: value for name, (value,) in rows(run.facts(make_report())).items()}
    assert facts["model"].startswith("ibm-granite/granite-4.0-h-small (granitemoehybrid")
    assert facts["revision"] == "0123456789abcdef0123456789abcdef01234567"
    assert facts["requested model"] == "ibm-granite/granite-4.0"
    assert "granite-4.0-h-tiny" in facts["siblings"]
    assert facts["layers"] == "4 of 36 SSD layers replayed (0, 9, 18, 27); the model has 40 layers"
    assert facts["dimensions"] == "128 heads x 64, state 128, 1 group, chunk 256, bf16"
    assert "131,072 tokens of built-in text" in facts["prompt"]
    assert "9f9f9f9f9f9f9f9f" in facts["prompt"]
    assert facts["baseline"] == "unfused"
    assert "NVIDIA H200" in facts["GPU"]
    assert facts["driver"] == "580.65.06, CUDA 13.0"
    assert "SM 1,980 MHz before, 1,965 after" in facts["clocks"]
    assert "not throttled" in facts["clocks"]
    assert "4,312 GB/s" in facts["ceilings"]
    assert "torch 2.11.0" in facts["versions"]
    assert "ssdprof 0.1.0" in facts["versions"]
    assert facts["precisions"].count("states") == 4
    assert facts["command"] == "ssdprof run ibm-granite/granite-4.0 --seq 131072"


def test_facts_name_the_baseline_of_decode_steps():
    facts = dict(run.facts(with_steps(make_report())).rows)
    assert facts["baseline"] == "unfused and unfused_step in decode steps"


def test_of_several_chunks_the_worst_call_is_named():
    (group,) = groups(in_calls(make_report(layers=(0, 9), seqlens=(8,)), count=3))
    (error, *_) = [name for name in below(accuracy.match(group, "fused", "out"), "fused against fp64") if "rms" in name]
    assert error == "rms error, worst call"
    assert accuracy.by_layer(group, "fused").note == "The largest of each layer's chunks."
    table = accuracy.largest(group, "fused")
    assert table.headers[5:8] == ("layer", "chunk", "position")
    assert {row[6] for row in table.rows} <= {"1", "2", "3"}
    (whole,) = groups(make_report(layers=(0, 9)))
    assert "chunk" not in accuracy.largest(whole, "fused").headers
    assert not accuracy.by_layer(whole, "fused").note


def test_facts_leave_out_what_there_is_not():
    facts = rows(run.facts(make_report(gpu=False, checkpoint=make_checkpoint(siblings=(), revision=None))))
    assert facts["GPU"] == ("none",)
    assert not {"driver", "clocks", "ceilings", "siblings", "revision", "quantisation", "peak memory"} & facts.keys()


def test_facts_say_how_many_processes_shared_the_layers():
    facts = dict(run.facts(make_report().model_copy(update={"ranks": 2})).rows)
    assert facts["ranks"] == "2 processes, each on a GPU of its own, shared the layers"
    without = dict(run.facts(make_report(gpu=False).model_copy(update={"ranks": 2})).rows)
    assert without["ranks"] == "2 processes shared the layers"
    assert "ranks" not in dict(run.facts(make_report()).rows)


def test_cases_that_took_a_tuned_configuration_are_counted():
    """Four layers at four precisions, unfused and fused.  A case's plan contains more than the remark on tuning."""

    def tuned(case):
        plan = "one launch; tuned on this GPU, 2026-11-20" if case.implementation == "fused" else "one launch each"
        return case.model_copy(update={"plan": plan})

    rows = dict(run.facts(make_report(change=tuned)).rows)
    report = make_report()
    fused = sum(case.implementation == "fused" for case in report.cases)
    assert rows["tuned"] == f"fused: tuned on this GPU, 2026-11-20 ({fused} of {len(report.cases)} cases)"
    assert "tuned" not in dict(run.facts(report).rows)


def test_throttling_is_a_fact():
    facts = rows(run.facts(make_report(clocks=make_clocks(throttle_reasons=("SwPowerCap", "HwThermal")))))
    assert "throttled: SwPowerCap, HwThermal" in facts["clocks"][0]


def test_equal_launches_share_a_row():
    table = run.launches(make_report())
    assert len(table.rows) == 6  # five of unfused, one of fused
    last = dict(zip(table.headers, table.rows[-1], strict=True))
    assert last == {
        "implementation": "fused",
        "variant": "hopper",
        "kernel": "segment_kernel",
        "registers": "168",
        "spills": "0",
        "shared": "200 KiB",
        "configuration": "segment_chunks=32, chunk=64, num_warps=12, stages=3",
        "used for": "all",
    }


def test_a_launch_of_some_precisions_says_of_which():
    def change(case):
        if case.precision != RELAXED_FP16 or case.implementation != "fused":
            return case
        return case.model_copy(update={"launches": (case.launches[0].model_copy(update={"registers": 255}),)})

    table = run.launches(make_report(change=change))
    used = {row[3]: row[-1] for row in table.rows if row[0] == "fused"}
    assert used == {
        "168": "exact, fp32 states; exact, fp16 states; relaxed, fp32 states",
        "255": "relaxed, fp16 states",
    }


def test_the_interpreter_has_no_registers():
    table = run.launches(make_report(gpu=False))
    assert table.headers == ("implementation", "variant", "kernel", "configuration", "used for")
    assert table.rows[0] == ("unfused", "interpreter", "unfused", "chunk=64", "all")


def test_both_speedups_stand_side_by_side_with_their_intervals():
    group = groups(make_report(layers=(9,), precisions=(EXACT_FP32,)))[0]
    case = group.cases[-1]
    for table in (speed.total(group), speed.per_layer(group)):
        cells = dict(zip(table.headers, table.rows[-1], strict=True))
        assert cells["speedup,\ndevice"] == fmt.speedup(case.speedup.device_ratio, case.speedup.device_interval)
        assert cells["speedup,\ncall"] == fmt.speedup(case.speedup.call_ratio, case.speedup.call_interval)
        assert cells["device\ntime"] == fmt.duration(case.timing.device_median_us)
        assert cells["call\ntime"] == fmt.duration(case.timing.call_median_us)
        assert (cells["verdict,\ndevice"], cells["verdict,\ncall"]) == ("faster", "faster")
        assert table.note.endswith("Faster or slower: the whole interval differs from 1 by more than 1%.")
        assert cells["% of\nroofline"] == fmt.percent(case.roofline.floor_pct, 1)
        assert cells["extra\nmemory"] == "126 MiB"


def test_the_sum_names_its_layers_and_its_baseline():
    group = groups(make_report())[0]
    table = speed.total(group)
    assert table.title == "Speed at 131,072 tokens, sum over 4 layers"
    assert "unfused, exact, with the same state dtype" in table.note
    (row,) = [row for row in table.rows if row[:2] == ("fused hopper", "exact, fp32")]
    cells = dict(zip(table.headers, row, strict=True))
    own = [case for case in group.cases if case.implementation == "fused" and case.precision == EXACT_FP32]
    assert cells["device\ntime"] == fmt.duration(sum(case.timing.device_median_us for case in own))


def test_a_layer_that_failed_is_not_in_the_sum_and_the_row_says_so():
    report = make_report(
        change=lambda case: (
            failed(case, "inaccurate")
            if (case.layer.index, case.implementation, case.precision) == (9, "fused", EXACT_FP32)
            else case
        )
    )
    table = speed.total(groups(report)[0])
    cells = {(row[0], row[1]): row[2] for row in table.rows}
    assert cells["fused hopper", "exact, fp32"] == "3 of 4"
    assert cells["unfused portable", "exact, fp32"] == "4 of 4"
    assert "do not compare" in table.note
    layer = next(
        row for row in speed.per_layer(groups(report)[0]).rows if row[:3] == ("9", "fused hopper", "exact, fp32")
    )
    assert layer[3:] == ("-", "-", "inaccurate", "-", "-", "-", "-", "-")


def test_nothing_timed_is_no_table():
    group = groups(make_report(gpu=False))[0]
    assert speed.total(group) is None
    assert speed.per_layer(group) is None


def test_the_match_table_has_a_column_per_precision_and_fp64_and_the_floor_beside():
    group = groups(make_report(precisions=ALL_PRECISIONS))[0]
    table = accuracy.match(group, "fused", "out")
    assert [header.replace("\n", " ") for header in table.headers] == [
        "",
        *(f"{p.intermediates}, {p.state_dtype} states" for p in ALL_PRECISIONS),
        "floor",
    ]
    ours = below(table, "fused against unfused")
    assert ours["match @ atol,rtol=0"] == ("99.696%", "99.337%", "99.337%", "66.823%", "66.823%", "66.823%", "")
    assert ours["match @ atol,rtol=1e-3"] == (*["100.000%"] * 3, *["99.743%"] * 3, "")
    assert ours["match @ atol,rtol=1e-2"] == (*["100.000%"] * 6, "")
    exact = below(table, "fused against fp64")
    assert exact["match @ atol,rtol=1e-3"] == (*["41.500%"] * 6, "43.250%")
    assert exact["rms error, worst layer"][-1] == "1.66e-3"
    assert exact["largest error, worst layer"] == (*["0.058"] * 6, "0.0156")  # layer 27
    original = below(table, "unfused against fp64")
    assert original["rms error, worst layer"][0] == original["rms error, worst layer"][3] == "2.16e-3"
    assert original["rms error, worst layer"][1] == "2.22e-3"
    assert rows(table)["within the error budget"] == (*["yes"] * 6, "")


def test_final_states_have_a_table_too():
    table = accuracy.match(groups(make_report(layers=(0,)))[0], "fused", "final_states")
    assert below(table, "fused against unfused")["match @ atol,rtol=1e-3"][0] == "99.999%"
    assert "final states" in table.title


def test_the_baseline_at_other_precisions_is_compared_with_itself():
    table = accuracy.match(groups(make_report(precisions=ALL_PRECISIONS))[0], "unfused", "out")
    assert [header.split(",")[0] for header in table.headers] == ["", *["relaxed"] * 3, "floor"]
    assert below(table, "unfused against unfused")["match @ atol,rtol=0"] == (*["66.823%"] * 3, "")
    assert below(table, "unfused against fp64")["rms error, worst layer"][-1] == "1.66e-3"
    assert len(table.headings) == 2
    assert accuracy.match(groups(make_report(precisions=(EXACT_FP32,)))[0], "unfused", "out") is None


def test_a_case_over_its_budget_is_counted():
    report = make_report(change=lambda case: failed(case, "inaccurate") if case.layer.index == 9 else case)
    table = accuracy.match(groups(report)[0], "fused", "out")
    assert rows(table)["within the error budget"][0] == "NO: 1/4"
    assert below(table, "fused against fp64")["rms error, worst layer"][0] == "0.4"


def test_a_refused_precision_has_no_column():
    report = make_report(change=lambda case: failed(case, "refused") if case.precision == RELAXED_FP32 else case)
    assert not any("relaxed,\nfp32" in h for h in accuracy.match(groups(report)[0], "fused", "out").headers)


def test_errors_of_each_layer():
    table = accuracy.by_layer(groups(make_report())[0], "fused")
    assert [row[0] for row in table.rows] == ["0", "9", "18", "27"]
    assert table.rows[0][1] == "2.10e-3"
    assert table.rows[-1][-1] == "1.66e-3"


def test_the_largest_difference_is_placed():
    table = accuracy.largest(groups(make_report())[0], "fused")
    assert table.rows[0] == ("output", "exact, fp32 states", "fp64", "0.058", "-", "27", "(0, 131044, 79, 63)", "79")
    assert table.rows[1][2:6] == ("unfused", "0.0156", "-", "0")


def test_the_largest_value_stands_beside_the_largest_error():
    group = groups(make_report(change=with_scale, precisions=(EXACT_FP32,)))[0]
    assert accuracy.largest(group, "fused").rows[0][3:5] == ("0.058", "41.5")
    rows = {row[0]: row[1:] for row in accuracy.match(group, "fused", "out").rows}
    assert rows["largest value, same layer"] == ("41.5", "41.5")
    assert "largest value, same layer" not in {
        row[0] for row in accuracy.match(groups(make_report())[0], "fused", "out").rows
    }


def test_failures_say_where_the_first_nan_is_and_share_rows():
    def change(case):
        return failed(case, "nonfinite", "out: 7\nelements") if case.implementation == "fused" else case

    table = run.failures(
        make_report(layers=(0, 1, 2, 5), seqlens=(1024, 2048), precisions=(EXACT_FP32,), change=change)
    )
    assert table.rows == (
        ("1", "0-2, 5", "2,048; 1,024", "fused", "exact, fp32", "nonfinite", "out: 7 elements", "out[0, 777, 5, 9]"),
    )


def test_failures_of_other_layers_at_another_prompt_keep_their_rows():
    def change(case):
        wanted = (case.layer.index, case.dims.seqlen) in ((0, 1024), (1, 2048))
        return failed(case, "refused", "too long") if wanted and case.implementation == "fused" else case

    table = run.failures(make_report(layers=(0, 1), seqlens=(1024, 2048), precisions=(EXACT_FP32,), change=change))
    assert [row[1:3] for row in table.rows] == [("1", "2,048"), ("0", "1,024")]


def test_endless_failures_are_cut_and_counted():
    def change(case):
        return failed(case, "failed", f"{case.layer.index} " + "x" * 1000)

    table = run.failures(make_report(layers=range(50), precisions=(EXACT_FP32,), change=change))
    assert len(table.rows) == 40
    assert table.note.startswith("60 more rows")
    assert all(len(row[6]) == 300 for row in table.rows)


def test_no_failures_no_table():
    assert run.failures(make_report()) is None
    assert run.remarks(make_report()) is None


def test_a_remark_on_a_case_that_passed():
    def change(case):
        return case.model_copy(update={"reason": "repeated calls differ"}) if case.implementation == "fused" else case

    report = make_report(precisions=(EXACT_FP32,), change=change)
    assert run.failures(report) is None
    assert run.remarks(report).rows == (
        ("1", "0, 9, 18, 27", "131,072", "fused", "exact, fp32", "passed", "repeated calls differ", "-"),
    )
