"""Finds the file with the settings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssdprof.errors import BadInputError, unreadable
from ssdprof.settings.document import Settings, parse

OWN = "ssdprof.toml"
PROJECT = "pyproject.toml"


def load(file: Path | None = None) -> Settings:
    """The settings of `file`, or of the nearest file that has any, from the current folder upwards.

    In a folder ssdprof.toml comes before pyproject.toml.  Without a file, all settings are empty.
    Raises BadInputError if the file cannot be read, is not TOML, or has invalid settings.
    """
    for candidate in [file] if file else _candidates():
        values = _values(candidate)
        if values is not None:
            table = "" if candidate.name != PROJECT else ": [tool.ssdprof]"
            return parse(values, f"{candidate}{table}")
    if file is not None:
        raise BadInputError(f"{file} has no [tool.ssdprof].", "Add it, or name another file with --config.")
    return Settings()


def _candidates() -> Iterator[Path]:
    for folder in (Path.cwd(), *Path.cwd().parents):
        for name in (OWN, PROJECT):
            if (folder / name).is_file():
                yield folder / name


def _values(file: Path) -> dict[str, Any] | None:
    """The table of ssdprof; None if a pyproject.toml has none."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(str(file), error, "Name a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"{file} is not TOML: {error}.", "Correct it, or name another file with --config."
        ) from error
    if file.name != PROJECT:
        return document
    tool = document.get("tool", {})
    found = tool.get("ssdprof") if isinstance(tool, dict) else None
    return found if isinstance(found, dict) else None
