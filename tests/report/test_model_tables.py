"""Reports of the whole model, of benches and of comparisons: their tables and statements."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from cases import answers, band, bench, cell, clocks, drawn, failed, of_answers, of_prefill, prefill, report, timed
from report.shown import printed, row
from report.test_contents import verdict

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Case, ChunkTrial, FirstCall, Generated, KernelTime, PartTime
from ssdprof.core.conditions import of_options, parse
from ssdprof.core.pairs import compare
from ssdprof.core.report import LeftOut, Report, StepTime
from ssdprof.report import bench as of_bench
from ssdprof.report import comparison, markdown, terminal
from ssdprof.report.document import compose
from ssdprof.report.table import Document, Table


def table(document: Document, title: str) -> Table:
    """The table whose title begins so."""
    found = [b for one in document.sections for b in one.blocks if isinstance(b, Table) and b.title.startswith(title)]
    assert found, title
    return found[0]


def words(document: Document, title: str) -> list[str]:
    """The sentences of a section."""
    return [b for one in document.sections if one.title == title for b in one.blocks if isinstance(b, str)]


# --- answers


def test_answers_are_shown_over_all_positions_in_bands_and_by_layer() -> None:
    alone = [of_answers(alone=index, bands=(band(kl_mean=kl),)) for index, kl in ((3, 1e-4), (9, 1e-2))]
    noise = of_answers("unfused", change="last bit of its inputs moved")
    found = answers(noise, of_answers(generated=Generated(tokens=8, first_difference=2)), *alone)
    document = compose(found)
    assert document.title == "ssdprof: ibm-granite/granite-4.0-h-small, 1,100 tokens, NVIDIA H200"
    total = table(document, "Answers at 1,100 tokens")
    assert total.rows[1] == (
        "fused", "exact, fp32", "2.00e-3", "0.01", "0.1", "500", "99.50%", "5", "0.01", "0.05", "8.01",
        "+0.125% [-0.1%, +0.3%]", "3",
    )  # fmt: skip
    assert [cells[0] for cells in total.rows] == ["noise: unfused, last bit of its inputs moved", "fused"]
    assert total.note == "Reference: fp64 oracle.  The model ran in bf16, its own dtype."
    by_position = table(document, "Answers by position")
    assert [cells[2] for cells in by_position.rows[:2]] == ["0 to 274", "275 to 1,099"]
    assert table(document, "Mean KL with one layer").rows == (("9", "0.01"), ("3", "1.00e-4"))
    assert verdict(found) == ["Answers of 1 case were compared: no limit was given."]


def test_limits_of_answers() -> None:
    held = answers(conditions=of_options(max_kl=1.0))
    assert verdict(held) == ["Answers of 1 case were compared: they are within the limits."]
    broken = answers(conditions=of_options(max_kl=1e-6, min_top1="100%"))
    assert verdict(broken) == [
        "FAILED: the answers of fused (exact, fp32 states) at 1,100 tokens: mean KL 0.002 is above 1e-06; the same top "
        "token at 99.5% of positions, below 100%."
    ]
    wrong = answers(of_answers(bands=(), nonfinite=7))
    assert verdict(wrong) == [
        "FAILED: the answers of fused (exact, fp32 states) at 1,100 tokens: nonfinite: the distribution at position 7 "
        "is not finite."
    ]
    (cells,) = table(compose(wrong), "Answers at").rows
    assert cells[2:5] == ("nonfinite", "-", "-")


# --- prefills


def parts(operator: float, mixer: float) -> tuple[PartTime, ...]:
    kernels = (KernelTime(name="k" * 80, gpu_us=operator, launches=3),)
    return (
        PartTime(name="operator", gpu_us=operator, launches=3, kernels=kernels),
        PartTime(name="mixer", gpu_us=mixer, launches=1),
    )


def test_prefill_times_and_where_they_go() -> None:
    base = of_prefill("unfused", 2000.0, parts=parts(600.0, 1000.0))
    found = prefill(base, of_prefill("fused", 1000.0, parts=parts(300.0, 600.0), peak_bytes=1 << 30, logits_rms=0.05))
    document = compose(found)
    assert document.title == "ssdprof prefill, ibm-granite/granite-4.0-h-small, NVIDIA H200"
    assert verdict(found) == ["Prefill times of 1 length."]
    assert document.summary[0][0] == "fused hopper, model convolution and norm:"
    assert document.summary[0][1].startswith("2.00x [1.98, 2.02] (+100.0%) over unfused at 1,024 tokens, faster; ")
    times = table(document, "Prefill time, all 40 layers")
    assert times.rows[1] == (
        "1,024", "model", "fused hopper", "1.00 ms", "995 µs to 1.01 ms", "2.00x [1.98, 2.02]", "faster",
        "1.18x",  # 1 / (1 - 60 (10 - 5) / 2000)
        "30.0%", "5.00 µs", "1.00 GiB", "0.05",
    )  # fmt: skip
    shares = table(document, "Where the time goes at 1,024 tokens, all 40 layers")
    wanted = ["300 µs (30.0%)", "600 µs (60.0%)", "100 µs (10.0%)", "1.00 ms (100.0%)"]
    assert [cells[2] for cells in shares.rows] == wanted
    (said,) = words(document, "Prefills not timed, and predictions")
    assert said == (
        "fused hopper with model convolution and norm at 1,024 tokens: "
        "Amdahl's law predicts 1.18x, measured is 2.00x.  "
        "The difference: 400 µs less in the mixer and 300 µs less in the idle GPU."
    )
    (cells,) = table(document, "Kernels with unfused").rows
    assert cells == ("model", "operator", "k" * 57 + "...", "600 µs", "3")


@pytest.mark.parametrize(("us", "said"), [(1850.0, 0), (1000.0, 1)])
def test_ten_percent_are_an_agreement_and_a_profile_is_not_needed(us: float, said: int) -> None:
    found = prefill(of_prefill("unfused", 2000.0, parts=()), of_prefill("fused", us, parts=()))
    sentences = words(compose(found), "Prefills not timed, and predictions")
    assert len(sentences) == said
    assert all("no profile says why" in one for one in sentences)


def test_prefills_that_were_not_timed_are_named() -> None:
    out = LeftOut(
        place="prefill, model convolution and norm, 16,384 tokens", implementations=("fused",), reason="no time"
    )
    wrong = of_prefill("fused", None, status="out of memory", reason="too large", parts=())
    late = of_prefill("unfused", None, reason="no turns", left_to_model=("the norm",), parts=(), layers=3)
    found = prefill(late, wrong, left_out=(out,), complete=False)
    assert verdict(found) == [
        "Partial: the command did not end.", "Some requested prefills were not timed.", "1 case failed.",
    ]  # fmt: skip
    assert words(compose(found), "Prefills not timed, and predictions") == [
        "unfused with model convolution and norm at 1,024 tokens: not timed: no turns.",
        "unfused at 1,024 tokens: the model itself computed the norm.",
        "fused hopper with model convolution and norm at 1,024 tokens: out of memory: too large.",
        "fused with model convolution and norm at 16,384 tokens: left out: no time.",
    ]
    assert "Prefill time, only 3 of 40 layers" in markdown.render(compose(found))


def test_the_head_and_the_gate_of_a_prefill() -> None:
    throttled = {"clocks": clocks(throttle_reasons=("power cap",)), "notes": ("A note.",)}
    found = prefill(
        conditions=of_options(min_speedup=1.5), steps=(StepTime(what="Loading", seconds=3.25),), **throttled
    )
    assert verdict(found)[0] == "PASSED: every prefill of fused holds min-speedup 1.5."
    document = compose(found)
    assert document.caveats[0].startswith("The GPU throttled")
    assert document.caveats[1:] == ("A note.",)
    assert [label for label, _ in document.origin] == ["weights", "GPU", "when"]
    assert row(table(document, "What ran"), "segments")[""] == "1,024 tokens by 1,024"
    assert row(table(document, "Wall clock"), "Loading")["seconds"] == "3.2"
    (line, *_) = verdict(prefill(conditions=of_options(min_speedup=2.5)))
    place = "prefill, model convolution and norm, 1,024 tokens, fused, exact, fp32 states"
    assert line == f"FAILED: min-speedup 2.5: {place}: 2x over unfused."
    for text in (printed(terminal.render(document)), markdown.render(document).replace("\u00a0", " ")):
        assert "2.00x [1.98, 2.02]" in text


# --- benches


def of_title(found: Report, title: str) -> Table:
    return next(one for one in of_bench.tables(found) if one.title.startswith(title))


def test_the_speedups_of_a_bench_are_its_first_table() -> None:
    found = bench(*cell(), baseline="fla")
    found = found.changed(cases=tuple(c.changed(baseline="" if c.kind == "library" else "fla") for c in found.cases))
    first = next(iter(of_bench.tables(found)))
    assert first.title == "Fused over fla: mamba2-2.7b (80x64, N 128, G 1), bf16, contiguous inputs"
    assert first.rows[0] == (
        "1 x 1,024", "hopper exact, fp32", "1.60x [1.59, 1.61]", "faster", "1.43x", "faster", "50.0 µs", "70.0 µs",
        "80.0 µs", "4.6%",
    )  # fmt: skip
    assert first.note.startswith("Faster or slower")


def test_where_the_baseline_does_not_run_unfused_takes_its_place() -> None:
    made = [c.changed(baseline="" if c.kind == "library" else "fla") for c in (*cell(), *cell(2048))]
    made[3] = failed(made[3], "refused")
    first, second, *_ = of_bench.tables(bench(*made, baseline="fla"))
    assert [cells[0] for cells in first.rows] == ["1 x 1,024"]
    assert second.title.startswith("Fused over unfused")
    assert [cells[0] for cells in second.rows] == ["1 x 2,048"]


def test_the_details_of_a_bench() -> None:
    compiled = {"_fused_kernel": 2.5}
    last = cell()[-1].changed(
        first_call=FirstCall(seconds=0.25, compiled=compiled), launches=cases.launches("fused"),
        plan="tuned on this GPU", chunk_size=64,
        trials=tuple(ChunkTrial(chunk_size=n, result="passed", device_us=50.0) for n in (64, 128)),
    )  # fmt: skip
    relaxed = last.changed(precision=cases.RELAXED_FP32, samples=timed(40.0, 40.0 + cases.CALL_US), trials=(), plan="")
    found = bench(*cell()[:-1], last, relaxed, kernels="0123456789abcdef", seconds=7.0, ranks=1)
    details = row(of_title(found, "Every implementation"), "1 x 1,024", "fused hopper", "exact, fp32")
    assert (details["chunk"], details["device"], details["first call"]) == ("64", "50.0 µs", "0.2 s")
    assert (details["error of out"], details["its floor"]) == ("2.00e-3", "1.50e-3")
    matches = row(of_title(found, "Matches with unfused"), "1 x 1,024", "fla", "exact, fp32", "output")
    assert (matches["match @ 1e-3"], matches["fp64 @ 0"], matches["floor @ 1e-3"]) == ("99.900%", "70.000%", "99.500%")
    assert row(of_title(found, "Relaxed over exact"), "1 x 1,024")["verdict, device"] == "faster"
    chunks = row(of_title(found, "Device times by chunk size"), "1 x 1,024")
    assert (chunks["chunk 128"], chunks["fastest"]) == ("50.0 µs", "64")
    kernel = row(of_title(found, "Kernels of fused hopper, exact"), "_fused_kernel")
    assert (kernel["warps"], kernel["compiled in"], kernel["shapes"]) == ("4", "2.5 s", "mamba2-2.7b bf16")
    facts = dict(of_title(found, "What ran").rows)
    assert facts["tuned"] == "fused: tuned on this GPU (1 of 4 cases)"
    assert facts["kernels"].endswith("0123456789ab")
    assert facts["versions"].endswith("ssdprof 0.1.0, fla 0.4")
    assert facts["duration"] == "7 s, complete"


def test_tables_of_a_bench_are_cut_into_parts_that_are_drawn_whole() -> None:
    made = [c for number in range(40) for c in cell(drawn=drawn(f"{number} x 1"))]
    details = [one for one in of_bench.tables(bench(*made)) if one.title.startswith("Every implementation")]
    assert sum(len(one.rows) for one in details) == 120
    assert max(len(one.rows) for one in details) <= 50


def test_what_is_wrong_with_a_bench() -> None:
    fla, unfused, fused = cell()
    assert verdict(bench()) == ["PASSED: 3 cases compared with the fp64 oracle."]
    assert verdict(bench(failed(fla, "refused"), unfused, fused))[0].startswith("PASSED: 2 cases")
    wrong = bench(fla, unfused, failed(fused), left_out=(LeftOut(place="a cell", reason="out of memory"),))
    (line,) = verdict(wrong)
    assert line.startswith("mamba2-2.7b, bf16, 1 x 1,024: fused hopper, exact, fp32 states: inaccurate: out, head 7")
    assert row(of_title(wrong, "Left out"), "a cell")["why"] == "out of memory"
    assert "its budget" in row(of_title(wrong, "Remarks"), "mamba2-2.7b")["why"]
    assert verdict(bench(complete=False, cases=())) == [
        "PARTIAL: this bench did not reach its end.  The results here are valid; the rest is missing.",
        "Nothing was compared.",
    ]
    assert verdict(bench(conditions=of_options(min_speedup=3.0))) == [
        "GATE FAILED: min-speedup 3: mamba2-2.7b, bf16, 1 x 1,024, fused, exact, fp32 states: 2x over unfused"
    ]
    document = compose(wrong)
    for text in (printed(terminal.render(document), 120), markdown.render(document)):
        assert "Every implementation" in text
        assert document.title not in text, "tables alone"


# --- comparisons


def compared(base: Report, new: Report, *fail_if: str, stalls: Any = ()) -> Document:
    conditions = [parse("--fail-if", text) for text in fail_if]
    found = compare(("a", base), ("b", new), smallest_difference=0.01, conditions=conditions)
    return comparison.compose(found, stalls)


def slowed(case: Case) -> Case:
    if case.implementation != "fused":
        return case
    return case.changed(samples=timed(750.0, 770.0))


def test_a_slower_run_is_compared_case_by_case() -> None:
    base = report(layers=(0, 9), precisions=(EXACT_FP32,))
    new = report(layers=(0,), precisions=(EXACT_FP32,), change=slowed)
    document = compared(base, new, "slower:3%", "memory:0%", stalls=[("fused", "scores", 10.0, 12.5, 1.0, None)])
    failing, passing, last = document.verdict
    name = "layer 0, 131,072 tokens, fused, exact, fp32 states"
    assert failing.text.startswith(f"FAILED: slower:3%: {name}: 1.5 times BASE's time [1.")
    assert (passing.text, passing.good) == ("PASSED: no case violates memory:0%.", True)
    assert last.text == "Compared 4 cases: 2 only in BASE, 1 no difference within 1.0%, 1 slower."
    assert document.summary[1][0] == "fused, exact, fp32 states, 131,072 tokens:"
    assert document.summary[1][1].startswith("slower, 0.67x [0.66, 0.67] by device time, one layer.")
    speed = row(table(document, "Speed of NEW against BASE"), "layer 0, 131,072 tokens", "fused")
    assert (speed["verdict"], speed["device, BASE"], speed["device, NEW"]) == ("slower", "500 µs", "750 µs")
    assert (speed["speedup, BASE"], speed["speedup, NEW"]) == ("2.00x", "1.33x")
    assert row(table(document, "Kernels and memory"), "layer 0, 131,072 tokens", "fused")["configuration"] == "the same"
    assert row(table(document, "Busy warp samples"), "fused")["time, NEW"] == "-"
    assert [cells[3] for cells in table(document, "Cases without a verdict").rows] == ["only in BASE"] * 2


def test_other_machines_and_inputs_are_caveats() -> None:
    base = report(layers=(0,), precisions=(EXACT_FP32,))
    document = compared(
        base, base.changed(environment=cases.environment(driver="600.1"), model=cases.checkpoint(revision="f" * 40))
    )
    machine, inputs = document.caveats
    assert machine.startswith("The machines differ (other driver: 580.65.06, now 600.1), so absolute times are not")
    assert inputs.startswith("Errors cannot be compared: other inputs: ")
    partial = compared(base, cases.in_calls(base).changed(processes=()))
    assert partial.verdict[-1].text.startswith("FAILED: nothing was compared: no case is in both")
    assert "NEW is not complete: this run did not reach its end." in partial.caveats


def test_prefills_and_answers_are_compared() -> None:
    other = prefill(of_prefill("unfused", 2000.0), of_prefill("fused", 900.0, attention="flash"))
    document = compared(prefill(), other)
    cells = row(table(document, "Prefill time of NEW"), "prefill, model convolution and norm, 1,024 tokens", "fused")
    assert (cells["call time, BASE / NEW"], cells["kernel"], cells["verdict"]) == ("-", "hopper", "faster")
    assert "other attention: sdpa, now flash" in document.caveats[0]
    document = compared(answers(), answers(of_answers(bands=(band(kl_mean=0.5),))), "kl:0.1")
    assert row(table(document, "Answers of the model"), "answers, 1,100 tokens")["mean KL [nats], NEW"] == "0.5"
    assert document.verdict[0].text.endswith("0.002 nats in BASE, 0.5 nats in NEW.")
