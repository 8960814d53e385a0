"""`ssdprof bench` as a user calls it: what is refused before a GPU is missed; on a GPU, one small bench."""

from __future__ import annotations

import json

import pytest
import torch
from command_line import Answer

from ssdprof.core.report import Report
from ssdprof.store.reports import load

pytestmark = pytest.mark.usefixtures("in_empty_folder")
NOT_THERE = "--against mamba_ssm"  # a library that is not there does not matter without a GPU


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--shape mamba3", "'mamba3' is not a known shape"),
        ("--shape 80x64x300x1", "80x64x300x1 is not measured: N is at most 256"),
        ("--against vllm", "There is no implementation 'vllm' of ssd"),
        ("--impl fused,fussed", "Did you mean fused?"),
        ("--impl fused,", "--impl has an empty name"),
        ("--impl nowhere:kernel", "cannot be imported"),
        ("--also fused_portable", "There is no implementation 'fused_portable' of ssd: it is one of gdn."),
        ("--against published", "Give a checkout"),
        ("--baseline vllm", "There is no implementation 'vllm' of ssd"),
        ("--match-with vllm", "There is no implementation 'vllm' of ssd"),
        ("--match-with fused --min-match 1e-3:99", "--min-match compares with unfused, but --match-with names fused"),
        ("--chunk-size 100", "--chunk-size does not know '100'"),
        (NOT_THERE, "needs an NVIDIA GPU"),
    ],
)
def test_wrong_words_are_answered_before_a_gpu_is_missed(words: str, complaint: str) -> None:
    if words == NOT_THERE and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    answer = Answer("bench", "ssd", *words.split())
    assert (answer.code, answer.out) == (3 if words == NOT_THERE else 2, "")
    assert complaint in answer.err


@pytest.mark.gpu
def test_a_small_bench() -> None:
    options = "--shape 16x64x128x1 --seq 256 --cells 2x200 --packed 4x16-64 --dtypes all"
    words = ("bench", "ssd", *options.split())
    answer = Answer(*words, "--out", "cells", "--json")
    assert answer.code == 0, answer.err
    report = load("cells")[1]
    assert report == Report.model_validate(json.loads(answer.out))
    assert (report.complete, report.missing) == (True, ())
    assert list(dict.fromkeys(case.size for case in report.cases)) == ["1 x 256", "2 x 200", "4 packed x 16-64"]
    assert [case.implementation for case in report.cases] == (["unfused"] * 2 + ["fused"] * 2) * 3
    for case in report.cases:
        assert case.result == "passed", case.why
        assert case.samples
        assert case.flops
        assert case.workspace_bytes is not None
        assert all(launch.registers for launch in case.launches)
        assert bool(case.trials) is (case.implementation == "unfused")
        assert case.implementation == "unfused" or report.speedup(case)
    answer = Answer(*words, "--check", "short", "--min-speedup", "1000")
    assert answer.code == 1
    assert "GATE FAILED: min-speedup 1000" in answer.err
    assert "fused over unfused" in answer.out.lower()
