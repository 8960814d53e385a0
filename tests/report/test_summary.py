"""The first lines: every number in them comes from the cases."""

import pytest
from report.make import RELAXED_FP16, RELAXED_FP32, around, failed, layer, make_report

from ssdprof.report import format as fmt
from ssdprof.report.caveats import caveats
from ssdprof.report.groups import groups, tokens
from ssdprof.report.statements import statements
from ssdprof.report.total_speed import total_speed
from ssdprof.report.verdict import verdict_lines
from ssdprof.schema import EXACT_FP32, Asked


def said(report):
    return {statement.subject: statement.text for statement in statements(report)}


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
    assert "99.696% of output elements are equal to those of unfused, 100.000% within 1e-3" in text
    rms = fmt.small(case.accuracy[0].vs_oracle.rms_ratio)
    assert f"rms error against fp64 {rms} (unfused {rms}, floor 1.66e-3)" in text


def test_several_layers_and_prompts_are_named():
    report = make_report(seqlens=(1024, 131_072), precisions=(EXACT_FP32, RELAXED_FP16))
    text = said(report)["fused, exact with fp32 states:"]
    assert "at 131,072 tokens, summed over 4 layers; " in text
    assert text.index("131,072 tokens") < text.index("1,024 tokens")
    assert ". At 131,072 tokens, 99." in text, "of which prompt the errors are"


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
    assert verdict_lines(make_report()) == (
        "PASSED: all 32 cases are within the error budget against the fp64 oracle.",
    )


def test_a_failure_is_named_first_and_has_no_speed():
    report = make_report(
        precisions=(EXACT_FP32, RELAXED_FP16),
        change=lambda case: (
            failed(case, "nonfinite") if case.implementation == "fused" and case.precision == RELAXED_FP16 else case
        ),
    )
    assert verdict_lines(report) == (
        "FAILED: 4 of 20 cases: fused (relaxed, fp16 states) not finite in layers 0, 9, 18, 27.",
    )
    text = said(report)["fused, relaxed with fp16 states:"]
    assert text.startswith("FAILED: not finite in layers 0, 9, 18, 27.")
    assert "x [" not in text


def test_a_partial_run_never_passes():
    lines = verdict_lines(make_report(state="partial"))
    assert lines[0].startswith("PARTIAL")
    assert not any("PASSED" in line for line in lines)
    assert verdict_lines(make_report(state="partial", cases=()))[1] == "Nothing was compared."


def test_a_refusal_is_named_with_its_reason_and_is_no_pass():
    def change(case):
        wanted = case.precision == RELAXED_FP32 and case.implementation == "fused"
        return failed(case, "refused", "fused: no such states") if wanted else case

    report = make_report(change=change)
    assert verdict_lines(report) == (
        "REFUSED: fused (relaxed, fp32 states) in layers 0, 9, 18, 27: fused: no such states.",
        "The other 28 cases are within the error budget against the fp64 oracle.",
    )
    assert "fused, relaxed with fp32 states:" not in said(report)


def test_a_run_in_which_everything_was_refused_compared_nothing():
    report = make_report(change=lambda case: failed(case, "refused", "no GPU"), layers=(0,), precisions=(EXACT_FP32,))
    assert verdict_lines(report) == (
        "REFUSED: unfused (exact, fp32 states) in layer 0; fused (exact, fp32 states) in layer 0: no GPU.",
        "Nothing was compared.",
    )


def test_a_capture_that_was_broken_off_is_partial():
    lines = verdict_lines(make_report(capture_complete=False))
    assert lines[0].startswith("PARTIAL: the replayed capture was interrupted")
    assert lines[1].startswith("So far all 32 cases are")


def test_what_was_asked_for_and_is_not_there_is_missing():
    report = make_report(layers=(0,), precisions=(EXACT_FP32,), seqlens=(1024,))
    asked = Asked(implementations=("fused",), precisions=(EXACT_FP32,), layers=(layer(0), layer(9)))
    assert verdict_lines(report.model_copy(update={"asked": asked}))[0] == ("MISSING: 1 requested case.")


def without_exact_answer(case):
    """The case for NaN weights: the oracle's answer is not finite."""
    nan = {"nonfinite": 5, "first_nonfinite": (0, 0, 0, 0)}
    accuracy = tuple(
        tensor.model_copy(
            update={
                "vs_oracle": tensor.vs_oracle.model_copy(update=nan),
                "floor": tensor.floor.model_copy(update=nan),
                "passed": False,
            }
        )
        for tensor in case.accuracy
    )
    return failed(case, "nonfinite").model_copy(update={"accuracy": accuracy})


def test_an_exact_answer_that_is_not_finite_is_the_inputs_fault():
    report = make_report(
        change=lambda case: without_exact_answer(case) if case.layer.index == 9 else case, precisions=(EXACT_FP32,)
    )
    (line,) = verdict_lines(report)
    assert line.startswith(
        "FAILED: the model's inputs, not the kernels.  In layer 9 the exact answer itself is not finite"
    )
    text = said(report)["fused, exact with fp32 states:"]
    assert text.startswith("FAILED: without a finite exact answer in layer 9.")


def test_a_kernel_that_failed_elsewhere_is_named_beside_it():
    def change(case):
        if case.layer.index == 9:
            return without_exact_answer(case)
        return failed(case, "nonfinite") if case.implementation == "fused" and case.layer.index == 18 else case

    inputs, kernels = verdict_lines(make_report(change=change, precisions=(EXACT_FP32,)))
    assert "the model's inputs" in inputs
    assert kernels == "FAILED: 1 of 8 cases: fused (exact, fp32 states) not finite in layer 18."


def test_one_token_is_singular():
    report = make_report(seqlens=(1,), layers=(9,), precisions=(EXACT_FP32,))
    assert "at 1 token, in layer 9." in said(report)["fused, exact with fp32 states:"]
    assert caveats(report)[0].startswith("1 token is no more than one chunk")
    assert tokens(groups(make_report(seqlens=(1, 1024)))) == "1,024 and 1 tokens"
    assert tokens(groups(report)) == "1 token"


def test_without_a_gpu_nothing_was_timed_and_the_interpreter_is_named():
    first = statements(make_report(gpu=False))[0]
    assert (first.subject, first.text) == (
        "No speed:",
        "nothing was timed, because this machine has no GPU; kernels ran in Triton's interpreter.",
    )
    untimed = {"timing": None, "speedup": None}
    report = make_report(change=lambda case: case.model_copy(update=untimed))
    assert said(report)["No speed:"] == "nothing was timed in this run."
    assert "No speed:" not in said(make_report())


def test_more_than_two_precisions_have_one_statement_from_the_least_to_the_greatest():
    report = make_report(seqlens=(131_072, 1024))
    (subject, text), *others = said(report).items()
    assert not others
    assert subject == "fused, 4 precisions:"
    least, *_, greatest = sorted(
        total_speed(series).device.ratio for group in groups(report)[:1] for series in group.series("fused")
    )
    assert text.startswith(f"{fmt.ratio(least)} to {fmt.ratio(greatest)} faster than unfused by device time (call ")
    assert "at 131,072 tokens, summed over 4 layers; " in text
    assert (
        "at 1,024 tokens. At 131,072 tokens, 66.823% to 99.696% of output elements are equal to those of unfused; rms "
        "error against fp64 " in text
    )


def test_precisions_with_other_verdicts_are_counted():
    def change(case):
        return with_speedup(case, 0.9, "slower") if case.precision == RELAXED_FP16 else case

    (text,) = said(make_report(change=change)).values()
    assert "0.90x to " in text
    assert "as fast as unfused (faster at 3 and slower at 1 of 4 precisions) by device time" in text


def test_a_failure_among_many_precisions_is_named():
    def change(case):
        wrong = (case.implementation, case.precision, case.layer.index) == ("fused", RELAXED_FP16, 18)
        return failed(case, "nonfinite") if wrong else case

    (text,) = said(make_report(change=change)).values()
    assert text.startswith("FAILED: relaxed with fp16 states: not finite in layer 18. ")
    assert "to NaN (unfused" in text
