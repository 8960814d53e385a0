"""Finds are kept and used, but not used if they do not apply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tuning_fakes import GPU, environment, outcome

from ssdprof.errors import BadInputError
from ssdprof.kernels.ssd import tuned
from ssdprof.schema import EXACT_FP32
from ssdprof.stalls import ncu
from ssdprof.tuning import store, use
from ssdprof.tuning.records import Finds


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(use, "current_gpu", lambda: GPU)
    yield tmp_path / "ssdprof" / "tuned"
    tuned.none()


def used() -> list[str]:
    """The message of a command, and the configurations that the kernels then use, as "segment N"."""
    said: list[str] = []
    use.use_saved(said.append)
    return [*said, *(f"segment {config.segment}" for config in tuned._hopper.values())]


def test_what_is_kept_is_used_and_said(cache: Path) -> None:
    assert store.keep(environment(), [outcome()]) == cache / "NVIDIA-Test.json"
    said, segment = used()
    assert said == "1 configuration tuned on this GPU will be used where they fit; --no-tuned takes the committed ones."
    assert segment == "segment 4"
    ((key, config),) = tuned._hopper.items()
    assert key[0] == "NVIDIA Test"
    assert key[1].dtype == torch.bfloat16
    assert key[2:] == (1, 16)
    assert config.reason == "tuned on this GPU, 2026-11-20"


def test_nothing_found_is_nothing_said() -> None:
    assert used() == []


def test_without_a_gpu_nothing_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep(environment(), [outcome()])
    monkeypatch.setattr(use, "current_gpu", lambda: None)
    assert used() == []


def test_another_process_takes_the_same_file() -> None:
    use.use_file(store.keep(environment(), [outcome()]))
    assert [config.segment for config in tuned._hopper.values()] == [4]


def test_the_process_that_ncu_watches_is_told_the_file() -> None:
    job = ncu.Job(
        folder=Path("captures"), cache=Path("cache"), layer=1, seqlen=512, implementation="fused", precision=EXACT_FP32
    )
    told = ncu.target(job.model_copy(update={"tuned": Path("found.json")}), Path("launched.json"))
    assert ncu.Job.model_validate_json(told[-2]).tuned == Path("found.json")


def test_later_finds_are_added_and_replace_those_for_the_same_calls() -> None:
    store.keep(environment(), [outcome(nchunks=16, segment=4), outcome(nchunks=32, segment=8)])
    store.keep(environment(), [outcome(nchunks=16, segment=5)])
    assert used()[1:] == ["segment 8", "segment 5"]


def test_a_search_that_finds_nothing_forgets_what_was_found_before() -> None:
    store.keep(environment(), [outcome(nchunks=16), outcome(nchunks=32, segment=8)])
    store.keep(environment(), [outcome(nchunks=16, segment=None)])
    assert used()[1:] == ["segment 8"]


def test_a_find_holds_for_one_version_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep(environment(), [outcome()])
    monkeypatch.setattr(store, "kernels_hash", lambda _operator: "another")
    (said,) = used()
    assert "ignored: the kernels have changed since" in said
    assert "ssdprof tune" in said
    store.keep(environment(), [outcome(nchunks=99)])  # the next find removes it
    assert len(used()) == 2


def test_a_find_holds_for_one_version_of_triton() -> None:
    store.keep(environment(triton="3.5.0"), [outcome()])
    (said,) = used()
    assert "ignored: they were compiled by Triton 3.5.0, this is" in said


def test_a_find_holds_for_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store.keep(environment(), [outcome()])
    other = GPU.model_copy(update={"name": "NVIDIA Other"})
    monkeypatch.setattr(use, "current_gpu", lambda: other)
    assert used() == []
    kept.rename(kept.with_name("NVIDIA-Other.json"))
    (said,) = used()
    assert "ignored: they are of NVIDIA Test, this is NVIDIA Other" in said


@pytest.mark.parametrize("text", ["", "{", "{}", '{"schema_version": 3}'])
def test_what_cannot_be_read_is_said(cache: Path, text: str) -> None:
    cache.mkdir(parents=True)
    (cache / "NVIDIA-Test.json").write_text(text)
    (said,) = used()
    assert "NVIDIA-Test.json is not what 'ssdprof tune' writes" in said


@pytest.mark.parametrize("broken", [('"segment": 4', '"segment": 0'), ('"long_count": 0', '"long_count": 1')])
def test_settings_that_no_kernel_takes_are_not_read(broken: tuple[str, str]) -> None:
    file = store.keep(environment(), [outcome()])
    assert broken[0] in file.read_text()
    file.write_text(file.read_text().replace(*broken))
    (said,) = used()
    assert "is not what 'ssdprof tune' writes" in said


def test_clear_forgets() -> None:
    kept = store.keep(environment(), [outcome()])
    assert store.clear() == (kept,)
    assert used() == []
    assert store.clear() == ()


def test_a_relative_cache_folder_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert store.folder() == Path.home() / ".cache" / "ssdprof" / "tuned"


def test_a_cache_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.parent.write_text("a file where a folder should be")
    with pytest.raises(BadInputError, match="cannot be made: a file is in its place"):
        store.keep(environment(), [outcome()])


def test_the_file_names_what_it_holds_for() -> None:
    finds = Finds.model_validate_json(store.keep(environment(), [outcome()]).read_text())
    assert finds.kernels == {"ssd": store.kernels_hash("ssd")}
    assert finds.environment.gpu == GPU
    assert finds.environment.packages["triton"]
