"""A model's answers for tests of reports."""

import torch

from ssdprof.measure.answers import bands, compare_logits
from ssdprof.schema import EXACT_FP32, AnswerCase, AnswerGate, Answers

COUNT = 1100


def answers(gate: AnswerGate) -> Answers:
    """The answers of one case, at COUNT positions."""
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
