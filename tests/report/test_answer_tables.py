"""Tables of a model's answers: every case, its bands of positions, and what a gate makes of it."""

import torch
from make import EXACT_FP32, make_report

from ssdprof.measure.answers import bands, compare_logits
from ssdprof.report import markdown
from ssdprof.schema import AnswerCase, AnswerGate, Answers
from ssdprof.schema.outcome import outcome

COUNT = 1100


def answers(gate: AnswerGate) -> Answers:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(COUNT, 5, generator=generator)
    found = compare_logits(
        reference, reference + 0.1 * torch.randn(COUNT, 5, generator=generator), torch.zeros(COUNT - 1).long()
    )
    case = AnswerCase(implementation="fused", precision=EXACT_FP32, status="compared", bands=bands(found))
    return Answers(
        seqlen=COUNT,
        reference="fp64 oracle",
        weights="bf16",
        layers=(0,),
        segment_length=COUNT,
        gate=gate,
        cases=(case,),
    )


def test_the_heading_of_answers_alone_has_their_length() -> None:
    alone = make_report(cases=(), answers=(answers(AnswerGate()),))
    assert markdown.render(alone).startswith("## ssdprof: ibm-granite/granite-4.0-h-small, 1,100 tokens, NVIDIA H200")


def test_a_long_prompt_is_shown_by_position() -> None:
    text = markdown.render(make_report(answers=(answers(AnswerGate()),)))
    assert "Answers at 1,100 tokens" in text
    assert "0 to 1,023" in text.replace("\u00a0", " ")
    assert "1,024 to 1,099" in text.replace("\u00a0", " ")
    assert "Answers of 1 case were compared: no limit was given." in text


def test_a_limit_that_is_broken_fails_the_run() -> None:
    good = make_report(answers=(answers(AnswerGate(max_kl=1.0, min_top1_pct=10)),))
    bad = make_report(answers=(answers(AnswerGate(min_top1_pct=100)),))
    assert outcome(good).passed
    assert not outcome(bad).passed
    assert "below 100%" in markdown.render(bad)
