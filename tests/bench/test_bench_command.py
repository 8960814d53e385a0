"""`ssdprof bench` as a user calls it; on a GPU, one small bench from the command line to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import call
from ssdprof.bench.schema import load
from typer.testing import CliRunner

from ssdprof.cli import app


def bench(*words: str) -> tuple[int, str, str]:
    return call("bench", "ssd", *words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--shape", "mamba3"], "'mamba3' is not a known shape"),
        (["--shape", "80x64x300x1"], "80x64x300x1 is not measured: N is at most 256"),
        (["--shape", "80x64x512x1"], "N is at most 256"),
        (["--seq", "many"], "'many' is not a number of tokens"),
        (["--against", "vllm"], "There is no implementation 'vllm' of ssd"),
        (["--impl", "fused,fussed"], "Did you mean fused?"),
        (["--impl", "fused,"], "--impl has an empty name"),
        (["--against", "published"], "Give a checkout"),
        (["--baseline", "vllm"], "There is no implementation 'vllm' of ssd"),
        (["--impl", "nowhere:kernel"], "cannot be imported"),
        (["--match-with", "vllm"], "There is no implementation 'vllm' of ssd"),
        (["--chunk-size", "100"], "--chunk-size does not know '100'"),
        (["--states", "int8"], "does not know 'int8'"),
        (["--out", "nowhere/result.json"], "There is no folder nowhere"),
    ],
)
def test_wrong_words_are_answered_before_a_gpu_is_missed(words: list[str], complaint: str) -> None:
    code, out, err = bench(*words)
    assert (code, out) == (2, "")
    assert complaint in err


def test_a_chunk_size_is_refused_where_kernels_choose_their_own() -> None:
    result = CliRunner().invoke(app, ["bench", "gdn", "--chunk-size", "128"], prog_name="ssdprof")
    assert result.exit_code == 2
    assert "--chunk-size does not apply to gdn" in " ".join(result.stderr.split())


def test_a_result_is_not_overwritten(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text("kept")
    code, _, err = bench("--out", str(result))
    assert code == 2
    assert "exists" in err
    assert result.read_text() == "kept"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_3() -> None:
    code, out, err = bench("--against", "mamba_ssm")
    assert (code, out) == (3, "")
    assert "needs an NVIDIA GPU" in err


@pytest.mark.gpu
def test_a_small_bench(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--shape", "16x64x128x1", "--seq", "256", "--cells", "2x200", "--packed", "4x16-64", "--dtypes", "all"]
    code, out, err = bench(*words, "--out", str(result), "--json")
    assert code == 0, err
    report = load(out)
    assert report == load(result.read_text())
    assert report.state == "complete"
    assert [cell.tokens for cell in report.cells] == ["1 x 256", "2 x 200", "4 packed x 16-64"]
    for cell in report.cells:
        assert [case.implementation for case in cell.cases] == ["unfused"] * 2 + ["fused"] * 2
        for case in cell.cases:
            assert case.status == "passed", case.reason
            assert case.timing is not None
            assert case.roofline is not None
            assert case.memory is not None
            assert all(kernel.launch.registers for kernel in case.kernels)
        assert cell.cases[2].over("unfused") is not None
        assert cell.cases[0].trials
    code, out, err = bench(*words, "--check", "short", "--min-speedup", "1000")
    assert code == 1
    assert "GATE FAILED: min-speedup 1000" in err
    assert "Fused over unfused" in out
    assert json.loads(result.read_text())["kind"] == "bench"
