"""`ssdprof tune` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import call
from test_schemas import keeps_to
from tuning_fakes import GPU, Fake, environment, inputs_of, outcome
from typer.testing import CliRunner

from ssdprof.cli import app
from ssdprof.kernels._triton import INTERPRETED
from ssdprof.kernels.ssd import fused, tuned
from ssdprof.tuning import run, search, store, use
from ssdprof.tuning.records import Finds, TuneReport


def tune(*words: str) -> tuple[int, str, str]:
    return call("tune", *words)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "cache" / "ssdprof" / "tuned"
    tuned.none()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["ssd", "--shape", "mamba3"], "'mamba3' is not a known shape"),
        (["ssd", "--seq", "many"], "'many' is not a number of tokens"),
        (["ssd", "--dtype", "int8"], "does not know 'int8'"),
        (["ssd", "--out", "nowhere/found.json"], "There is no folder nowhere"),
        (["ssd", "captures", "--shape", "mamba2-2.7b"], "Leave out --shape"),
    ],
)
def test_wrong_words_are_answered_before_a_gpu_is_missed(words: list[str], complaint: str) -> None:
    code, out, err = tune(*words)
    assert (code, out) == (2, "")
    assert complaint in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_without_a_gpu_it_ends_with_3(words: tuple[str, ...]) -> None:
    code, out, err = tune("ssd", *words)
    assert (code, out) == (3, "")
    assert "Tuning needs an NVIDIA GPU" in err


def test_clear_needs_no_gpu() -> None:
    kept = store.keep(environment(), [outcome()])
    code, _, err = tune("--clear")
    assert code == 0
    assert not kept.exists()
    assert "Removed" in err
    assert "There is nothing in" in tune("--clear")[2]


needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="only the interpreter's kernels run on a CPU")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated GPU: with its stopwatch 8 warps are twice as fast.  The outputs of the interpreter are right."""
    fake = Fake(lambda config, tokens: tokens * (0.5 if config.num_warps == 8 else 1.0))
    monkeypatch.setattr(run, "gpu_to_tune", lambda: torch.device("cpu"))
    monkeypatch.setattr(run, "CudaBench", lambda _: fake)
    gpu = GPU.model_copy(update={"name": "cpu"})  # the kernels' name for the device of their tensors
    monkeypatch.setattr(run.machine, "collect", lambda: environment(gpu))
    monkeypatch.setattr(search.Problem, "run", lambda _, inputs, config: fake.run(inputs, config))
    monkeypatch.setattr(use, "current_gpu", lambda: gpu)


@needs_interpreter
@pytest.mark.usefixtures("pretended_gpu")
def test_from_words_to_a_file() -> None:
    """The file is real: the next command reads it and says so, and its kernels use the configuration."""
    code, out, err = tune("ssd", "--shape", "2x16x16x1", "--seq", "40,100", "--out", "found.json", "--json")
    assert code == 0, err
    report = TuneReport.model_validate_json(out)
    assert report == TuneReport.model_validate_json(Path("found.json").read_text())
    (found,) = report.outcomes
    assert found.tokens == "1 x 40, bf16; 1 x 100, bf16"
    assert found.find is not None
    assert found.find.settings.values["num_warps"] == 8
    assert "1 of 1 searches found a faster configuration" in err

    said: list[str] = []
    use.use_saved(said.append)
    assert "1 configuration tuned on this GPU" in said[0]
    inputs = inputs_of(100)
    assert "tuned on this GPU" in fused.plan(inputs).reason
    assert fused.plan(inputs).config["num_warps"] == 8


@needs_interpreter
@pytest.mark.usefixtures("pretended_gpu")
def test_a_person_sees_what_was_tried_and_found() -> None:
    code, out, _ = tune("ssd", "--shape", "2x16x16x1", "--seq", "40")
    assert code == 0
    words = " ".join(out.split())
    assert "2x16x16x1, 1 x 40, bf16, exact: portable kernel" in words
    assert "num_warps 8" in words
    assert "2.00x [" in words
    assert "committed" in words


@needs_interpreter
@pytest.mark.usefixtures("pretended_gpu")
def test_a_dry_run_lists_candidates_and_keeps_nothing(cache: Path) -> None:
    code, out, _ = tune("ssd", "--shape", "2x16x16x1", "--seq", "40", "--dry-run", "--json")
    assert code == 0
    rows = json.loads(out)
    assert any("num_warps 8" in row["candidates"] for row in rows)
    keeps_to("tune-dry-run", out)
    assert not cache.exists()


@needs_interpreter
@pytest.mark.usefixtures("pretended_gpu")
def test_a_spent_budget_leaves_searches_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 10_000, 100))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(seconds))
    words = ("ssd", "--shape", "2x16x16x1,4x16x16x1", "--seq", "40", "--budget", "150", "--json")
    text = tune(*words)[1]
    keeps_to("tune-v2", text)
    report = TuneReport.model_validate_json(text)
    assert [one.shape for one in report.outcomes] == ["2x16x16x1"]
    assert report.left_out == ("4x16x16x1, 1 x 40, bf16, exact: the budget of 150 s was spent",)


@needs_interpreter
@pytest.mark.usefixtures("pretended_gpu")
def test_an_interrupted_tuning_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    find = run.search

    def interrupted(problem: search.Problem, bench: Any) -> Any:
        if problem.shape == "4x16x16x1":
            raise KeyboardInterrupt
        return find(problem, bench)

    monkeypatch.setattr(run, "search", interrupted)
    code, _, _ = tune("ssd", "--shape", "2x16x16x1,4x16x16x1", "--seq", "40")
    assert code == 130
    (file,) = cache.glob("*.json")
    assert len(Finds.model_validate_json(file.read_text()).finds) == 1


@pytest.mark.gpu
def test_on_a_gpu_from_words_to_a_run_that_says_so() -> None:
    """Two tunings, one for each kernel.  Every find has a right output and is used."""
    code, out, err = tune("ssd", "--shape", "16x64x128x1,3x64x64x1", "--seq", "1k,4k", "--json")
    assert code == 0, err
    report = TuneReport.model_validate_json(out)
    assert {one.committed.kernel for one in report.outcomes} >= {"portable"}
    for one in report.outcomes:
        assert [trial for trial in one.trials if trial.verdict == "committed"]
        assert not [trial for trial in one.trials if trial.verdict == "wrong"]
    found = [one for one in report.outcomes if one.find is not None]
    words = ["bench", "ssd", "--shape", "16x64x128x1,3x64x64x1", "--seq", "1k,4k", "--chunk-size", "128", "--json"]
    result = CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False)
    assert result.exit_code == 0
    assert ("tuned on this GPU" in result.stderr) == bool(found)
    assert ("tuned on this GPU, " in result.stdout) == bool(found)
    tuned.none()  # as in a new process
    plain = CliRunner().invoke(app, [*words, "--no-tuned"], prog_name="ssdprof", catch_exceptions=False)
    assert "tuned on this GPU" not in plain.stdout + plain.stderr
