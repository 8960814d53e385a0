"""A hub on localhost with a fresh cache, and tiny checkpoints to publish on it."""

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_models
from huggingface_hub import constants
from minihub import MiniHub
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ssdprof.checkpoint import meta

SaveTiny = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _patient_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused field is found however busy the machine is."""
    monkeypatch.setattr(meta, "SEARCH_S", math.inf)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache and no login.  The client reads its settings on import, so they are
    patched in the client.
    """
    folder = tmp_path / "hub-cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniHub]:
    # the cache goes with it
    with MiniHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SaveTiny:
    """Saves a tiny model of a family, sharded, with a tokenizer; one folder per family.  Copy it
    before changes.
    """
    root = tmp_path_factory.mktemp("checkpoints")

    def save(name: str) -> Path:
        folder = root / f"tiny-{name}"
        if not folder.exists():
            tiny_models.shared(name).save_pretrained(folder, max_shard_size="100KB")
            save_tokenizer(folder)
            (folder / "modeling_tiny.py").write_text("raise RuntimeError('remote code ran')")
        return folder

    return save


@pytest.fixture
def copied(saved: SaveTiny, tmp_path: Path) -> SaveTiny:
    """As `saved`, in a separate folder for the test."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved(name), tmp_path / f"tiny-{name}"))

    return copy


def save_tokenizer(folder: Path) -> None:
    vocabulary = {f"word{i}": i for i in range(tiny_models.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="word0").save_pretrained(folder)
