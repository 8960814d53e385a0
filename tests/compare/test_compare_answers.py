"""Answers of the whole model, side by side: KL, top token and perplexity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compare.changed import run
from ssdprof.compare.compare import compare
from ssdprof.compare.conditions import parse
from ssdprof.compare.read import read
from ssdprof.runs import document
from ssdprof.schema import EXACT_FP32, RunReport
from ssdprof.schema.answers import AnswerBand, AnswerCase, AnswerGate, Answers
from ssdprof.schema.comparison import Comparison

from ssdprof.report import comparison

pytestmark = pytest.mark.usefixtures("in_empty_folder")

ROW = "answers, 131,072 tokens, fused, exact, fp32 states"


def answered(kl: float = 1e-3, top1: float = 99.5, perplexity: float | None = 8.0, **fields: Any) -> RunReport:
    band = AnswerBand(
        start=0,
        stop=131_072,
        kl_mean=kl,
        kl_p99=kl,
        kl_max=kl,
        kl_max_position=0,
        top1_pct=top1,
        flips=1,
        flip_margin_median=None,
        worst_flip=None,
        reference_perplexity=perplexity,
        perplexity=perplexity,
        perplexity_increase_pct=None,
        perplexity_interval_pct=None,
    )
    case = AnswerCase(implementation="fused", precision=EXACT_FP32, status="compared", bands=(band,))
    answers = Answers(
        seqlen=131_072,
        reference="oracle",
        weights="bf16",
        layers=(0, 9),
        segment_length=8192,
        gate=AnswerGate(),
        cases=(case.model_copy(update=fields), case.model_copy(update={"layer": 9})),
    )
    return run(answers=(answers,))


def compared(base: RunReport, new: RunReport, *fail_if: str) -> Comparison:
    for name, report in (("base.json", base), ("new.json", new)):
        Path(name).write_text(document.dump(report))
    return compare(
        read("base.json"), read("new.json"), smallest_difference=0.01, fail_if=[parse(one) for one in fail_if]
    )


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("kl:0.001", "0.001 nats in BASE, 0.003 nats in NEW"),
        ("kl:0.0021", ""),
        ("kl:1e-3", "0.001 nats in BASE, 0.003 nats in NEW"),
        ("top1:-0.1", "99.5% in BASE, 99.2% in NEW"),
        ("top1:-0.4", ""),
        ("perplexity:1%", "8 in BASE, 8.1 in NEW"),
        ("perplexity:2%", ""),
    ],
)
def test_conditions_on_answers(condition: str, found: str) -> None:
    (judged,) = compared(answered(), answered(kl=3e-3, top1=99.2, perplexity=8.1), condition).conditions
    assert [f"{one.row}: {one.found}" for one in judged.offenders] == ([f"{ROW}: {found}"] if found else [])


def test_answers_that_one_run_lacks() -> None:
    (judged,) = compared(run(), run(), "kl:1").conditions
    assert judged.offenders[0].found == "no case could be judged: BASE has no such value"
    broken = answered(status="nonfinite", bands=())
    (judged,) = compared(answered(), broken, "kl:1").conditions
    assert str(judged.offenders[0]) == f"kl:1: {ROW}: 0.001 nats in BASE; nonfinite in NEW"
    (judged,) = compared(answered(perplexity=None), answered(perplexity=None), "perplexity:1%").conditions
    assert judged.offenders


def test_the_report_shows_them_side_by_side() -> None:
    document = comparison.compose(compared(answered(), answered(kl=3e-3)))
    (section,) = (section for section in document.sections if section.title == "Answers of the model")
    (table,) = section.blocks
    assert table.rows == (  # type: ignore[union-attr]
        ("answers, 131,072 tokens", "fused", "exact, fp32", "1.00e-3", "3.00e-3", "99.500%", "99.500%", "8", "8"),
    )
