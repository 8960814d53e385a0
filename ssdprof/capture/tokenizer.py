"""A checkpoint's tokenizer, through transformers.  An error names the file and quotes the library's message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssdprof.errors import BadInputError, library_message, unreadable

CONFIG = "tokenizer_config.json"
VOCABULARY = "tokenizer.json"
LONGEST_TEXT = 2**24  # tokens; no warning about the trained length


class Tokenizer:
    """A loaded tokenizer.  Its methods raise BadInputError when its files turn out to be unusable."""

    def __init__(self, loaded: Any, folder: Path) -> None:
        self._loaded = loaded
        self._file = folder / VOCABULARY
        with _refusals():
            loaded.model_max_length = LONGEST_TEXT
            self._size = len(loaded)

    @property
    def description(self) -> str:
        """Identifies the tokenizer by its content, because the folder's name is specific to this machine."""
        size = f"{self._size:,} tokens"
        if not self._file.is_file():
            return f"{type(self._loaded).__name__}, {size}"
        return f"{VOCABULARY} sha256 {hashlib.sha256(self._file.read_bytes()).hexdigest()[:12]}, {size}"

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds by default."""
        with _refusals():
            ids: list[int] = self._loaded(text)["input_ids"]
        return ids

    def ordinary_ids(self) -> list[int]:
        """The vocabulary in ascending order, special tokens left out."""
        with _refusals():
            return sorted({*self._loaded.get_vocab().values()} - {*self._loaded.all_special_ids})


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`, without remote code and without the network.

    Only tokenizer.json is used if the class that the checkpoint names is not available: it is unknown, remote
    code, or in a package that is missing.  Raises BadInputError for files that are damaged.
    """
    from transformers import AutoTokenizer

    _check_config(folder / CONFIG)
    with _refusals():
        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            loaded = _without_class(folder, error)
    return Tokenizer(loaded, folder)


def _check_config(file: Path) -> None:
    """BadInputError for a tokenizer_config.json that is not a JSON object, or whose class is not a name."""
    if not file.is_file():
        return
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise unreadable(f"{CONFIG} of the checkpoint", error, "Check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{CONFIG} is not valid JSON: {library_message(error)}.", _AGAIN) from error
    if not isinstance(content, dict):
        raise BadInputError(f"{CONFIG} holds no JSON object.", _AGAIN)
    name = content.get("tokenizer_class")
    if not isinstance(name, str | None):
        raise BadInputError(f"{CONFIG} has tokenizer_class = {str(name)[:80]}, which is not a name.", _AGAIN)


def _without_class(folder: Path, error: Exception) -> Any:
    """The tokenizer of tokenizer.json; `error` says why the checkpoint's own class failed."""
    from transformers import PreTrainedTokenizerFast

    file = folder / VOCABULARY
    if not file.is_file():
        raise BadInputError(
            f"The checkpoint has no tokenizer that can be loaded: {library_message(error)}.",
            "Name a repository that has the right one with --tokenizer.",
        ) from error
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


_AGAIN = "Fetch or copy the file again, or name another tokenizer with --tokenizer."


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn all errors of the libraries on a tokenizer's files into BadInputError with their message."""
    try:
        yield
    except BadInputError:
        raise
    except Exception as error:  # of every class: the tokenizers library raises Exception itself
        raise BadInputError(f"transformers cannot use the tokenizer: {library_message(error)}.", _AGAIN) from error
