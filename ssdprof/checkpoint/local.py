"""A checkpoint in a local folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from ssdprof.checkpoint.integrity import read_header
from ssdprof.checkpoint.source import StoredTensor
from ssdprof.errors import BadInputError, ModelUnavailableError


class LocalFolder:
    """The files in one folder (`checkpoint.source.Source`).  `sizes` lists those that lie directly in it."""

    revision: str | None = None
    complete = True

    def __init__(self, folder: Path, label: str | None = None) -> None:
        self.folder = folder
        self.label = label or folder.resolve().name
        if folder.is_file():
            raise BadInputError(
                f"{folder} is a file; a checkpoint is a folder.", "Name the folder that holds config.json."
            )
        if not folder.is_dir():
            raise ModelUnavailableError(
                f"There is no folder {folder}.", "Check the path, or name a hub repo: org/name."
            )

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size in bytes of every file, by name; broken symlinks are left out."""
        try:
            return {path.name: path.stat().st_size for path in self.folder.iterdir() if path.is_file()}
        except OSError as error:
            raise ModelUnavailableError(
                f"{self.folder} cannot be read: {error.strerror}.", "Check the folder's permissions."
            ) from None

    def cached(self, name: str) -> bool:
        return name in self.sizes or ("/" in name and os.path.isfile(self.folder / name))

    def path(self, name: str) -> Path:
        if not self.cached(name):
            raise ModelUnavailableError(f"{self.label} has no {name}.", "The folder is an incomplete copy.")
        return self.folder / name

    def header(self, name: str) -> Mapping[str, StoredTensor]:
        return read_header(self.path(name), name)
