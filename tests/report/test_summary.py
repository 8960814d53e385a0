"""The first lines: every number in them comes from the cases."""

import pytest
from report.make import (
    EXACT_FP16,
    EXACT_FP32,
    RELAXED_FP16,
    RELAXED_FP32,
    around,
    failed,
    make_checkpoint,
    make_clocks,
    make_report,
)

from ssdprof.report import format as fmt
from ssdprof.report import summary
from ssdprof.report.groups import groups


def said(report):
    return {statement.subject: statement.text for statement in summary.statements(report)}


def only(report, implementation, precision):
    return next(c for c in report.cases if (c.implementation, c.precision) == (implementation, precision))


def with_speedup(case, ratio, verdict):
    if case.speedup is None:
        return case
    speedup = case.speedup.model_copy(
        update={"device_ratio": ratio, "device_interval": around(ratio, 0.01), "verdict": verdict}
    )
    return case.model_copy(update={"speedup": speedup})


def test_one_statement_per_precision_with_speed_and_accuracy():
    report = make_report(layers=(9,), precisions=(EXACT_FP32, RELAXED_FP16))
    case = only(report, "fused", EXACT_FP32)
    statements = said(report)
    assert list(statements) == ["fused, exact with fp32 states:", "fused, relaxed with fp16 states:"]
    text = statements["fused, exact with fp32 states:"]
    assert text.startswith(
        f"{fmt.speedup(case.speedup.device_ratio, case.speedup.device_interval)} faster than unfused by device time "
        f"(call {fmt.ratio(case.speedup.call_ratio)}) at 131,072 tokens, in layer 9."
    )
    assert "99.696% of output elements equal unfused's, 100.000% within 1e-3" in text
    rms = fmt.small(case.accuracy[0].vs_oracle.rms_ratio)
    assert f"rms error against fp64 {rms} (unfused {rms}, floor 1.66e-3)" in text


def test_several_layers_and_prompts_are_named():
    text = said(make_report(seqlens=(1024, 131_072)))["fused, exact with fp32 states:"]
    assert "at 131,072 tokens, summed over 4 layers; " in text
    assert text.index("131,072 tokens") < text.index("1,024 tokens")


@pytest.mark.parametrize(
    ("ratio", "verdict", "words"),
    [
        (0.8, "slower", "slower than unfused, 0.80x [0.79, 0.81] by device time"),
        (1.0, "no difference", "as fast as unfused, 1.00x [0.99, 1.01] by device time"),
    ],
)
def test_what_is_not_faster_is_not_called_so(ratio, verdict, words):
    report = make_report(precisions=(EXACT_FP32,), change=lambda case: with_speedup(case, ratio, verdict))
    text = said(report)["fused, exact with fp32 states:"]
    assert words in text
    assert "faster" not in text


def test_a_call_time_without_a_difference_is_said_beside_a_faster_device_time():
    def change(case):
        if case.speedup is None:
            return case
        speedup = case.speedup.model_copy(update={"call_ratio": 1.004, "call_verdict": "no difference"})
        return case.model_copy(update={"speedup": speedup})

    text = said(make_report(precisions=(EXACT_FP32,), change=change))["fused, exact with fp32 states:"]
    assert "faster than unfused by device time (call 1.00x: no difference) at" in text


def test_a_passed_run_says_so():
    assert summary.verdict(make_report()) == (
        "PASSED: all 32 cases are within the error budget against the fp64 oracle.",
    )


def test_a_failure_is_named_first_and_has_no_speed():
    report = make_report(
        precisions=(EXACT_FP32, RELAXED_FP16),
        change=lambda case: (
            failed(case, "nonfinite") if case.implementation == "fused" and case.precision == RELAXED_FP16 else case
        ),
    )
    assert summary.verdict(report) == (
        "FAILED: 4 of 20 cases: fused (relaxed, fp16 states) not finite in layers 0, 9, 18, 27.",
    )
    text = said(report)["fused, relaxed with fp16 states:"]
    assert text.startswith("FAILED: not finite in layers 0, 9, 18, 27.")
    assert "x [" not in text


def test_a_partial_run_never_passes():
    lines = summary.verdict(make_report(state="partial"))
    assert lines[0].startswith("PARTIAL")
    assert not any("PASSED" in line for line in lines)
    assert summary.verdict(make_report(state="partial", cases=()))[1] == "Nothing was compared."


def test_a_refusal_is_no_failure():
    def change(case):
        wanted = case.precision == RELAXED_FP32 and case.implementation == "fused"
        return failed(case, "refused", "no") if wanted else case

    report = make_report(change=change)
    lines = summary.verdict(report)
    assert lines[0].startswith("PASSED: all 28 cases")
    assert lines[1] == "Refused: fused (relaxed, fp32 states) in layers 0, 9, 18, 27."
    assert "fused, relaxed with fp32 states:" not in said(report)


def test_without_a_gpu_nothing_was_timed_and_the_interpreter_is_named():
    first = summary.statements(make_report(gpu=False))[0]
    assert (first.subject, first.text) == (
        "No speed:",
        "nothing was timed, because this machine has no GPU; kernels ran in Triton's interpreter.",
    )
    untimed = {"timing": None, "speedup": None}
    report = make_report(change=lambda case: case.model_copy(update=untimed))
    assert said(report)["No speed:"] == "nothing was timed in this run."
    assert "No speed:" not in said(make_report())


def test_caveats_are_throttling_and_the_notes_of_the_run():
    report = make_report(clocks=make_clocks(throttle_reasons=("SwPowerCap",)), notes=("The weights are random.",))
    throttled, note = summary.caveats(report)
    assert "SwPowerCap" in throttled
    assert note == "The weights are random."
    assert summary.caveats(make_report()) == ()


def test_a_prompt_of_one_chunk_does_not_test_the_states():
    (caveat,) = summary.caveats(make_report(gpu=False, seqlens=(256, 257)))
    assert caveat.startswith("256 tokens are no more than one chunk of 256: no state is passed on")


def test_the_demo_is_no_measure_of_speed():
    demo = make_checkpoint(source="demo")
    (caveat,) = summary.caveats(make_report(checkpoint=demo))
    assert "demo model is too small to fill a GPU" in caveat
    assert summary.caveats(make_report(checkpoint=demo, gpu=False)) == ()


def test_advice_names_what_may_be_used_and_what_not():
    report = make_report(
        change=lambda case: (
            failed(case, "inaccurate")
            if (case.implementation, case.precision, case.layer.index) == ("fused", RELAXED_FP16, 18)
            else case
        )
    )
    group = groups(report)[0]
    assert summary.advice(group.series("fused")) == (
        "fused may be used exact with fp32 states, exact with fp16 states or relaxed with fp32 states: within the "
        "error budget in every layer replayed.  Not so relaxed with fp16 states: inaccurate in layer 18."
    )
    assert summary.advice(group.series("fused")[-1:]) == (
        "fused may not be used: relaxed with fp16 states: inaccurate in layer 18."
    )
    one = groups(make_report(layers=(3,), precisions=(EXACT_FP16,)))[0]
    assert summary.advice(one.series("fused")).endswith("within the error budget in the layer replayed.")
