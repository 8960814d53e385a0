"""`run` and `capture` with a server's calls of the model, through the command line and without a
GPU.
"""

from collections import Counter
from pathlib import Path

import pytest
from cases import accuracies
from command_line import DEMOS, Answer, ending, passing
from targets import slow

from ssdprof.capture.layers import CapturedLayer
from ssdprof.capture.manifest import read_manifest
from ssdprof.capture.store import CaptureWriter
from ssdprof.core.base import intermediates_of
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.core.target import LayerCapture, Serving
from ssdprof.jobs import limits, replay
from ssdprof.store import reports

pytestmark = pytest.mark.usefixtures("in_empty_folder")

ONE_PRECISION = "--dtypes exact --states fp32"
FAST = f"--layers first:1 {ONE_PRECISION}"
WHOLE = f"{FAST} --full"  # and the whole report


def kinds(report: Report) -> Counter[tuple[str, str, int]]:
    """(kind of call, implementation, tokens of the call) -> number of cases."""
    return Counter(
        (case.call.kind if case.call else "prompt", case.implementation, case.seqlen)
        for case in report.cases
    )


def test_an_interrupted_capture_says_what_it_keeps(monkeypatch):
    add = CaptureWriter.add

    def interrupted(self: CaptureWriter, captured: CapturedLayer) -> LayerCapture:
        if len(self.manifest.layers) == 2:
            raise KeyboardInterrupt
        return add(self, captured)

    monkeypatch.setattr(CaptureWriter, "add", interrupted)
    words = "--seq 24 --chunked-prefill 8 --layers first:1 --out a"
    answer = ending(130, "capture demo", words)
    assert "What was captured is kept in a, marked as incomplete: 2 of 3 calls." in answer.err
    assert len(read_manifest(Path("a")).layers) == 2


def test_what_a_cast_loses_is_noted_for_each_chunk(monkeypatch):
    lost = "1 of x became 0."
    monkeypatch.setattr(replay, "cast_inputs", lambda _operator, inputs, _: (inputs, lost))
    passing(f"run demo --seq 24 --chunked-prefill 12 --out a {FAST}")
    _, report = reports.load("a")
    name = report.captured[0].name
    assert [note for note in report.remarks if "became 0" in note] == [
        f"{name}, chunk {number} of 2 of 24 tokens: 1 of x became 0." for number in (1, 2)
    ]


@pytest.mark.parametrize("model", DEMOS)
def test_decode_steps_are_replayed_stored_and_told(model):
    answer = passing(f"run {model} --seq 24 --decode 2 --batch 2 --save-captures --out a {WHOLE}")
    _, report = reports.load("a")
    assert kinds(report) == {
        ("prompt", "unfused", 24): 1,
        ("prompt", "fused", 24): 1,
        ("decode", "unfused_step", 1): 2,
        ("decode", "recurrent", 1): 2,
    }
    assert {case.batch for case in report.cases} == {2}
    assert report.prompts[0].serving == Serving(decode=2)
    assert report.prompts[0].batch == 2
    assert "2 pieces of it one after the other" in report.prompts[0].source
    assert not report.of_answers  # not requested
    assert Outcome(report).passed
    for words in (
        "in decode steps after 2 x 24 tokens",
        "2 prompts side by side; 2 decode steps",
        "recurrent",
    ):
        assert words in answer.shown

    again = passing(f"run a/captures --out b {ONE_PRECISION}")
    assert "steps after 2 x 24  recurrent interpreter" in again.out
    _, replayed = reports.load("b")
    assert kinds(replayed) == kinds(report)
    assert accuracies(replayed) == accuracies(report)
    shown = passing("accuracy b")
    assert "In decode steps after 2 x 24 tokens, recurrent may be used" in shown.out
    assert "in decode steps after 2 x 24 tokens" in Answer("export b").out

    lost = report.changed(cases=tuple(case for case in report.cases if case.call is None))
    assert Outcome(lost).missing == 4
    assert not Outcome(lost).passed


def test_steps_are_compared_at_one_precision_whatever_the_prompts_are():
    passing("run demo --seq 16 --layers first:1 --dtypes relaxed --states bf16 --decode 1")
    _, report = reports.load(None)
    steps = [case for case in report.cases if case.call]
    assert {str(case.precision) for case in steps} == {"exact, fp32 states"}
    relaxed = report.restricted(
        precisions={
            case.precision for case in report.cases if intermediates_of(case.precision) != "exact"
        }
    )
    assert Outcome(relaxed).passed
    assert not any(case.call for case in relaxed.cases)


@pytest.mark.slow
def test_packed_sequences_are_one_call():
    answer = passing(f"run demo-gdn --packed 3x4-12 --save-captures --out a {WHOLE}")
    _, report = reports.load("a")
    lengths = report.prompts[0].serving.packed
    assert len(lengths) == 3
    assert all(4 <= length <= 12 for length in lengths)
    assert kinds(report) == {
        ("packed", "unfused", sum(lengths)): 1,
        ("packed", "fused", sum(lengths)): 1,
    }
    assert any("went through the model one by one" in note for note in report.remarks)
    assert f"at {sum(lengths)} tokens in 3 packed sequences" in answer.shown
    passing(f"run a/captures --out b {ONE_PRECISION}")
    assert accuracies(reports.load("b")[1]) == accuracies(report)


@pytest.mark.parametrize(
    ("model", "words", "fitting"),
    [
        ("demo", "2 heads x 64", "2 or 4"),
        *slow(("demo-gdn", "1/2 heads", "2"), ("demo-kda", "1/1 heads", "2")),
    ],
)
def test_a_rank_is_told_and_takes_stored_captures(model, words, fitting):
    answer = passing(f"run {model} --seq 24 --tensor-parallel 2 --save-captures --out a {FAST}")
    _, report = reports.load("a")
    assert report.tensor_parallel == 2
    assert {case.dims.words[: len(words)] for case in report.cases if case.dims} == {words}
    assert any("first of 2 tensor-parallel ranks" in note for note in report.remarks)
    assert "the first of 2 tensor-parallel ranks" in answer.out
    passing("run a/captures --tensor-parallel 2 --out b --dtypes exact --states fp32")
    assert accuracies(reports.load("b")[1]) == accuracies(report)
    for place in (model, "a/captures"):
        length = "--seq 24" if place == model else ""
        refused = ending(2, f"run {place} {length} --tensor-parallel 3")
        assert f"--tensor-parallel 3 does not fit {model}" in refused.err
        assert "cannot be divided by 3" in refused.err
        assert refused.err.endswith(f"hint: Give {fitting}.")


def test_stored_captures_are_what_they_are():
    passing("capture demo --seq 16 --layers first:1 --out captures")
    for words in (
        "--batch 2",
        "--packed 4x8-16",
        "--chunked-prefill 8",
        "--decode 1",
        "--placement disk-offload",
        "--seq 16",
        "--save-captures",
    ):
        error = ending(2, f"run captures {words}").err
        assert (
            "their model, prompt and segments cannot be changed, and they are not stored" in error
        ), words
    assert "--layers is the only model option" in error
    assert "answers need the model" in ending(2, "run captures --answers").err


def test_a_model_that_is_too_large_to_generate(monkeypatch):
    """One layer would fit, but generation needs all layers."""
    monkeypatch.setattr(limits, "free_bytes", lambda: 2_000_000)
    passing("run demo --layers first:1 --seq 16 --dry-run")
    answer = ending(3, "run demo --layers first:1 --seq 16 --decode 1 --dry-run")
    assert "Without --decode and --answers" in answer.err
