"""The settings of a project for all commands: `[tool.ssdprof]` in pyproject.toml, or ssdprof.toml.

An example is in docs/ci.md.  Gates of the command line come before those of the file.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssdprof.errors import BadInputError, nearest, unreadable
from ssdprof.schema import Gates
from ssdprof.schema.gates import TOLERANCE_NAMES

_PROJECT = "pyproject.toml"
_CONFIG = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-"))


class GateSettings(Gates):
    """The gates of run, bench and accuracy, unless the command line sets them."""

    model_config = _CONFIG


class PrefillSettings(BaseModel):
    """The gate of prefill, unless the command line sets it.  A model gains less than its operators."""

    model_config = _CONFIG
    min_speedup: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class CompareSettings(BaseModel):
    """The options of compare, unless the command line gives them."""

    model_config = _CONFIG
    fail_if: tuple[str, ...] = ()
    smallest_difference: str | None = None


class ProjectSettings(BaseModel):
    """Settings of ssdprof."""

    model_config = _CONFIG
    gates: GateSettings = Field(default_factory=GateSettings)
    prefill: PrefillSettings = Field(default_factory=PrefillSettings)
    compare: CompareSettings = Field(default_factory=CompareSettings)


def load(file: Path | None = None) -> ProjectSettings:
    """The settings of `file`, or of the nearest file that has any, from the current folder upwards.

    In a folder ssdprof.toml comes before pyproject.toml.  Without a file, all settings are empty.  Raises BadInputError
    if the file cannot be read, is not TOML, or has an unknown key or a value that does not fit.
    """
    folders = (Path.cwd(), *Path.cwd().parents)
    near = (path for folder in folders for path in (folder / "ssdprof.toml", folder / _PROJECT) if path.is_file())
    for candidate in [file] if file else near:
        try:
            found = tomllib.loads(candidate.read_text(encoding="utf-8"))
        except OSError as error:
            raise unreadable(str(candidate), error, "Name a TOML file.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            hint = "Correct it, or name another file with --config."
            raise BadInputError(f"{candidate} is not TOML: {error}.", hint) from error
        if candidate.name != _PROJECT:
            return _parse(found, str(candidate))
        tool = found.get("tool")
        if isinstance(tool, dict) and isinstance(tool.get("ssdprof"), dict):
            return _parse(tool["ssdprof"], f"{candidate}: [tool.ssdprof]")
    if file is not None:
        raise BadInputError(f"{file} has no [tool.ssdprof].", "Add it, or name another file with --config.")
    return ProjectSettings()


def _parse(values: dict[str, Any], source: str) -> ProjectSettings:
    try:
        return ProjectSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        where = ".".join(path)
        if first["type"] == "extra_forbidden":
            model: Any = ProjectSettings
            for part in path[:-1]:
                model = model.model_fields[part].annotation
            known = [field.alias or name for name, field in model.model_fields.items()]
            raise BadInputError(f"{source} has the unknown key {where}.", nearest(path[-1], known)) from error
        raise BadInputError(
            f"{source}: {where}: {first['msg'].removeprefix('Value error, ')}.",
            "`ssdprof schemas settings-v1` prints the allowed keys and values.",
        ) from error


def chosen_gates(config: Path | None, *, min_match: Sequence[str] | None = None, **given: float | None) -> Gates:
    """The gates of the command line, completed by those of the settings file.  Raises BadInputError."""
    limits: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if min_match:
        limits["min_match"] = parse_matches(min_match)
    return Gates.model_validate(load(config).gates.model_dump() | limits)


def prefill_gates(config: Path | None, min_speedup: float | None) -> Gates:
    """The gate of prefill times: from the command line, else from the settings file.  Raises BadInputError."""
    stored = load(config).prefill.min_speedup
    return Gates(min_speedup=stored if min_speedup is None else min_speedup)


def parse_matches(words: Sequence[str]) -> dict[str, float]:
    """ "1e-3:99" -> {"1e-3": 99.0}.  Raises BadInputError."""
    found, example = {}, "Give TOLERANCE:PERCENT, such as 1e-3:99."
    for word in words:
        tolerance, colon, share = word.partition(":")
        if not colon or tolerance not in TOLERANCE_NAMES:
            hint = nearest(tolerance, TOLERANCE_NAMES) if colon else example
            raise BadInputError(f"--min-match does not know {word!r}.", hint)
        try:
            found[tolerance] = float(share.removesuffix("%"))
        except ValueError:
            found[tolerance] = math.nan
        if not 0 <= found[tolerance] <= 100:
            raise BadInputError(f"--min-match has no percentage in {word!r}.", example)
    return found
