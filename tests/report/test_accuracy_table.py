"""The output of `ssdprof accuracy`."""

import io

import pytest
from report.make import ALL_PRECISIONS, EXACT_FP16, RELAXED_FP16, failed, make_report
from report.make_answers import answers
from rich.console import Console

from ssdprof.errors import BadInputError
from ssdprof.report import accuracy_table
from ssdprof.report.accuracy_table import advice
from ssdprof.report.groups import groups
from ssdprof.schema.answers import AnswerGate


def printed(*arguments, width=100):
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(accuracy_table(*arguments))
    return file.getvalue()


def row(text, label):
    """Cells of the first row with this label."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return line.strip().removeprefix(label).split()


def test_the_table_of_the_chosen_precisions():
    text = printed(make_report(), "relaxed", ("fp32", "fp16"))
    header = next(i for i, line in enumerate(text.splitlines()) if line.split() == ["relaxed,", "relaxed,"])
    assert text.splitlines()[header + 1].split() == ["fp32", "fp16"]
    assert row(text, "match @ atol,rtol=0") == ["66.823%", "66.823%"]
    assert row(text, "match @ atol,rtol=1e-3") == ["99.743%", "99.743%"]
    after = text[text.index("fused against fp64") :]
    assert row(after, "match @ atol,rtol=1e-3") == ["41.500%", "41.500%", "43.250%"]  # the last one is the floor
    original = text[text.index("unfused against fp64") :]
    assert row(original, "rms error, worst layer") == ["2.16e-3", "2.22e-3", "1.66e-3"]


def test_all_precisions_are_the_default():
    text = printed(make_report(precisions=ALL_PRECISIONS), width=120)
    assert row(text, "match @ atol,rtol=0") == ["99.696%", *["99.337%"] * 2, *["66.823%"] * 3]


def test_states_narrow_the_columns():
    text = printed(make_report(precisions=ALL_PRECISIONS), "all", ("bf16",))
    assert row(text, "match @ atol,rtol=0") == ["99.337%", "66.823%"]


def test_the_verdict_is_the_second_line():
    first, *rest = printed(make_report(), "relaxed", ("fp32",)).splitlines()
    assert first.startswith("ibm-granite/granite-4.0-h-small, run 2026")
    assert " ".join(" ".join(rest).split()).startswith(
        "At 131,072 tokens, fused may be used at relaxed, fp32 states: within the error budget in every layer replayed."
    )


def test_a_failure_turns_the_verdict():
    report = make_report(
        seqlens=(2048, 1024),
        change=lambda case: (
            failed(case, "nonfinite")
            if case.precision == RELAXED_FP16 and case.implementation == "fused" and case.layer.index == 9
            else case
        ),
    )
    text = " ".join(printed(report, "relaxed", ("fp16",)).split())
    assert "At 2,048 and 1,024 tokens, fused may not be used at relaxed, fp16 states: not finite in layer 9." in text
    assert row(printed(report, "relaxed", ("fp16",)), "within the error budget") == ["NO:", "1/4"]


def test_caveats_and_a_partial_state_stand_above_the_numbers():
    text = printed(make_report(state="partial", notes=("The weights are random.",)))
    assert text.index("PARTIAL") < text.index("- The weights are random.") < text.index("match @")


def test_every_prompt_has_its_table():
    text = printed(make_report(seqlens=(1024, 131_072)))
    assert text.index("Accuracy of fused's output at 131,072 tokens") < text.index(
        "Accuracy of fused's output at 1,024"
    )


def test_what_was_not_compared_is_an_error_that_names_what_was():
    with pytest.raises(BadInputError, match="compared nothing at relaxed with bf16 states") as caught:
        accuracy_table(make_report(), "relaxed", ("bf16",))
    assert caught.value.hint == (
        "It compared: exact, fp32 states; exact, fp16 states; relaxed, fp32 states; relaxed, fp16 states."
    )
    with pytest.raises(BadInputError) as caught:
        accuracy_table(make_report(state="partial", cases=()))
    assert "before its first comparison" in caught.value.hint
    with pytest.raises(BadInputError) as caught:
        accuracy_table(make_report(cases=(), answers=(answers(AnswerGate()),)))
    assert caught.value.hint == "It holds a model's answers: 'ssdprof export' shows them."
    alone = [case for case in make_report().cases if case.implementation == "unfused"]
    with pytest.raises(BadInputError) as caught:
        accuracy_table(make_report(cases=tuple(alone)))
    assert caught.value.hint == "It holds unfused alone."


def test_advice_names_what_may_be_used_and_what_not():
    report = make_report(
        change=lambda case: (
            failed(case, "inaccurate")
            if (case.implementation, case.precision, case.layer.index) == ("fused", RELAXED_FP16, 18)
            else case
        )
    )
    group = groups(report)[0]
    assert advice(group.series("fused")) == (
        "fused may be used at exact, fp32 states; exact, fp16 states; relaxed, fp32 states: within the error budget in "
        "every layer replayed.  It may not be used at relaxed, fp16 states: inaccurate in layer 18."
    )
    assert advice(group.series("fused")[-1:]) == (
        "fused may not be used at relaxed, fp16 states: inaccurate in layer 18."
    )
    one = groups(make_report(layers=(3,), precisions=(EXACT_FP16,)))[0]
    assert advice(one.series("fused")).endswith("within the error budget in the layer replayed.")
