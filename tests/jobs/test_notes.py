"""The notes that a reader needs before trusting a run's numbers."""

from __future__ import annotations

import pytest
from cases import checkpoint as make_checkpoint
from cases import environment
from cases import prompt as make_prompt

from ssdprof.core.subject import Serving
from ssdprof.store.reports import draft


@pytest.mark.parametrize(
    ("seqlen", "serving", "longest"),
    [
        (2048, Serving(), None),
        (2049, Serving(), "2,049"),
        (2048, Serving(decode=4), "2,052"),
        (3000, Serving(packed=(1000, 2000)), None),  # each runs separately
        (5000, Serving(packed=(2500, 2500)), "2,500"),
        (3000, Serving(chunk=1000), "3,000"),
    ],
)
def test_a_sequence_beyond_the_trained_context_is_noted(seqlen: int, serving: Serving, longest: str | None) -> None:
    checkpoint = make_checkpoint(trained_context=2048, siblings=())
    prompts = [make_prompt(seqlen, serving=serving)]
    told = {"model": checkpoint, "environment": environment(), "prompts": tuple(prompts), "baseline": "unfused"}
    said = draft(kind="run", subject="m", **told).notes
    if longest is None:
        assert said == ()
    else:
        (note,) = said
        assert note.startswith(f"The model was trained on 2,048 tokens and ran on {longest}: ")
