"""Tables of a model's answers: every case, its bands of positions, and its gate."""

from report.make import make_report
from report.make_answers import answers

from ssdprof.report import markdown
from ssdprof.schema import AnswerGate
from ssdprof.schema.outcome import outcome


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
