"""A few damaged inputs of every kind, through the command line; `tests/fuzz.py` tries thousands."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import fuzz
import pytest
from hypothesis import given, settings, strategies

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory) -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "HF_HUB_OFFLINE", "NO_COLOR"):
            patch.setenv(name, "1")
        patch.chdir(tmp_path_factory.mktemp("fuzz"))
        fuzz.prepare()
        yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", sorted((*fuzz.KINDS, *fuzz.SEVERAL)))
@settings(derandomize=True, deadline=None, database=None, max_examples=4)
@given(draw=strategies.randoms(use_true_random=False))
def test_damaged_inputs_end_well(kind, draw: random.Random):
    assert fuzz.tried(kind, draw) == ""
    assert Path("good.json").is_file()
