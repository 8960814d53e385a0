"""A few damaged inputs of every kind, through the command line; `tests/fuzz.py` tries thousands."""

import signal
from collections.abc import Iterator
from pathlib import Path

import fuzz
import pytest


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "HF_HUB_OFFLINE", "NO_COLOR"):
            patch.setenv(name, "1")
        patch.chdir(tmp_path_factory.mktemp("fuzz"))
        fuzz.prepare()
        yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_damaged_inputs_end_well(kind: str) -> None:
    wrong = {seed: fuzz.tried(kind, seed) for seed in range(40 if kind in ("report", "settings") else 10)}
    assert {seed: words for seed, words in wrong.items() if words} == {}
    assert Path("good.json").is_file()
