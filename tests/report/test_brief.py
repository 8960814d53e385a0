"""The report on one screen."""

import pytest
from report.make import (
    ALL_PRECISIONS,
    RELAXED_FP16,
    failed,
    make_clocks,
    make_prompt,
    make_report,
    served,
    with_scale,
    with_steps,
)
from report.test_terminal_report import printed

from ssdprof.report import brief
from ssdprof.report.groups import groups
from ssdprof.report.origin import MEANINGS
from ssdprof.report.tables.brief import accuracy, speed
from ssdprof.runs import read
from ssdprof.schema import EXACT_FP32, Serving

LINES = 40
TWO = (EXACT_FP32, RELAXED_FP16)


def wrong(case):
    reason = f"out, head 5 of layer {case.layer.index}: over its budget"
    return failed(case, "inaccurate", reason) if case.implementation == "fused" else case


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize(
    "report",
    [
        make_report(precisions=ALL_PRECISIONS),
        make_report(precisions=ALL_PRECISIONS, seqlens=(1024, 8192, 131_072), layers=range(0, 36, 2)),
        make_report(gpu=False, precisions=TWO),
        make_report(
            precisions=ALL_PRECISIONS,
            change=wrong,
            state="partial",
            clocks=make_clocks(throttle_reasons=("SwPowerCap",)),
            notes=("A note. " * 9, "Another note. " * 9, "A third note. " * 9, "A fourth note. " * 9),
        ),
    ],
    ids=["six precisions", "three lengths", "cpu", "failures"],
)
def test_it_fits_the_screen(report, width):
    lines = printed(brief.render(report), width).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= width


def test_the_verdict_is_last_and_the_rest_is_there():
    report = make_report(precisions=TWO, seqlens=(1024, 131_072), notes=("The prompt is random tokens.",))
    text = printed(brief.render(report))
    lines = text.splitlines()
    assert lines[-1] == "PASSED: all 40 cases are within the error budget against the fp64 oracle."
    assert lines[0] == "ssdprof: ibm-granite/granite-4.0-h-small, 131,072 and 1,024 tokens, NVIDIA H200"
    for words in (
        "weights: from the hub, revision 0123456789ab",
        "GPU: NVIDIA H200",
        "when: 2026-01-02 03:04 UTC",
        "The prompt is random tokens.",
        "export --format html",
        *(f"{word}: {meaning}" for word, meaning in MEANINGS),
    ):
        assert words in text
    assert sum("relaxed, fp16" in line for line in lines) == 4  # two lengths, in each of two tables


def test_numbers_are_those_of_the_report():
    report = make_report(precisions=(EXACT_FP32,), layers=(9,), change=with_scale)
    case = next(case for case in report.cases if case.implementation == "fused")
    text = printed(brief.render(report))
    for value in (
        f"{case.speedup.device_ratio:.2f}x [",
        f"{case.speedup.call_ratio:.2f}x",
        f"{case.accuracy[0].vs_oracle.max_abs:.3g}",
        "41.5",  # the scale of `with_scale`
        "99.696%",
    ):
        assert value in text


def test_rows_that_do_not_fit_are_counted():
    text = printed(brief.render(make_report(precisions=ALL_PRECISIONS, seqlens=(1024, 131_072))))
    assert "6 more rows: --full" in text


def test_why_cases_failed_is_said_before_the_verdict():
    lines = printed(brief.render(make_report(change=wrong, precisions=(EXACT_FP32,)))).splitlines()
    (reason,) = [number for number, line in enumerate(lines) if "head 5 of layer 0: over its budget" in line]
    assert reason < len(lines) - 1
    assert "FAILED: 4 of 8 cases" in " ".join(lines[reason:])
    assert sum("over its budget" in line for line in lines) == 2  # the first two of four
    assert "  2 more reasons with --full." in lines


def test_a_long_caveat_is_cut_after_a_word():
    note = "abc " * 42 + "defgh ijkl"
    lines = printed(brief.render(make_report(precisions=TWO, notes=(note,))), 200).splitlines()
    (caveat,) = [line for line in lines if "abc abc" in line]
    assert caveat.rstrip().endswith("abc abc ...")


def test_a_run_without_a_case():
    text = printed(brief.render(make_report(state="partial", cases=(), captured_layers=())))
    assert text.splitlines()[-1] == "Nothing was compared."


def test_a_recorded_run_fits(request):
    folder = request.config.rootpath / "benchmarks" / "results" / "h200-granite-4.0-h-1b-128k"
    _, report = read(folder)
    text = printed(brief.render(report), 80)
    assert len(text.splitlines()) <= LINES
    assert "weights: random" in text
    assert "3.54x [3.53, 3.54]" in text


def test_what_a_server_sees_is_in_the_titles():
    """Times of a chunked prefill are sums over its chunks, not times of a prompt of a chunk's length."""
    chunks = make_report(seqlens=(1024,), precisions=TWO, change=lambda case: served(case, "chunk", 2048))
    text = printed(brief.render(chunks), 160)
    assert text.startswith("ssdprof: ibm-granite/granite-4.0-h-small, 2,048 tokens,")
    for table in ("Speed", "Accuracy of the output"):
        assert f"{table}, chunks of 1,024 tokens of 2,048 tokens, fused" in text
    both = make_report(seqlens=(1024, 512), precisions=TWO, change=lambda case: served(case, "chunk", 1536))
    text = printed(brief.render(both))
    assert text.startswith("ssdprof: ibm-granite/granite-4.0-h-small, 1,536 tokens,")
    for tokens in ("1,024", "512"):
        assert f"\nchunks of {tokens} " in text
    of_another = [served(case, "chunk", 3072) for case in chunks.cases]
    text = printed(brief.render(chunks.model_copy(update={"cases": (*chunks.cases, *of_another)})))
    for row in ("1,024 of 3,072 ", "1,024 of 2,048 "):
        assert text.count(f"\n{row}") == 2 * len(TWO), "chunks of one length of two prompts"
    prompts = (make_prompt(1024, serving=Serving(packed=(512, 256, 128, 128))),)
    packed = make_report(
        seqlens=(1024,), precisions=TWO, prompts=prompts, change=lambda case: served(case, "packed", 1024, 4)
    )
    assert "Accuracy of the output, 1,024 tokens in 4 packed sequences, fused" in printed(brief.render(packed), 160)


def test_the_baseline_of_decode_steps_is_not_called_that_of_prompts():
    headers = {name for table in (speed, accuracy) for name in table(groups(with_steps(make_report()))).headers}
    assert {"baseline,\ndevice", "equal to\nbaseline"} < headers
    report = with_steps(make_report())
    without = report.model_copy(
        update={"cases": tuple(case for case in report.cases if case.implementation != "fused")}
    )
    steps = accuracy(groups(without))  # without comparisons in the prompt
    assert ", decode steps after 131,072 tokens, recurrent" in steps.title
    assert "equal to\nunfused_step" in steps.headers
    of_prompts = accuracy(groups(make_report())).headers
    assert "equal to\nunfused" in of_prompts
