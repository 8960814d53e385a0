"""The source of a checkpoint's files: the interface of the hub and of a local folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# Each of these files is a vocabulary; other files only describe one.
VOCABULARIES = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"})


class FileInfo(NamedTuple):
    """One file that a run needs.  cached: it need not be downloaded."""

    name: str
    size_bytes: int
    cached: bool


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header says: dtype in safetensors' words ("BF16")."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class Source(Protocol):
    """A flat set of files.  Every method raises SsdprofError only."""

    @property
    def label(self) -> str:
        """Repo id or folder name, for messages."""

    @property
    def revision(self) -> str | None:
        """Commit hash on the hub; None for a folder."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Every file's name -> bytes."""

    @property
    def complete(self) -> bool:
        """Whether `sizes` has every file.  False if the hub is unreachable: then only cached files are known."""

    def cached(self, name: str) -> bool:
        """Whether `name` is on this machine."""

    def path(self, name: str) -> Path:
        """The path of `name` on this machine; downloads the file if necessary."""

    def header(self, name: str) -> Mapping[str, StoredTensor]:
        """The header of the safetensors file `name`, without downloading the file."""


def tokenizer_files(source: Source) -> tuple[str, ...]:
    """Names of the tokenizer's files in `source`; empty when it has no vocabulary."""
    there = tuple(name for name in TOKENIZER_FILES if name in source.sizes)
    return there if VOCABULARIES & set(there) else ()
