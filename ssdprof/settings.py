"""The settings of a project for all commands: `[tool.ssdprof]` in pyproject.toml, or ssdprof.toml.

An example is in docs/ci.md.  Gates of the command line come before those of the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssdprof.errors import BadInputError, nearest, unreadable

_PROJECT = "pyproject.toml"
_CONFIG = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-"))


_Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GateSettings(BaseModel):
    """The gates of run, bench and accuracy, unless the command line sets them.

    min_match: tolerance -> least share of the output's elements that match the baseline's, in percent.
    """

    model_config = _CONFIG
    min_speedup: _Limit | None = None
    min_match: dict[Literal["0", "1e-3", "1e-2"], Annotated[float, Field(ge=0, le=100)]] = Field(default_factory=dict)
    max_rms_ratio: _Limit | None = None


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


def gates(config: Path | None, *, min_match: Sequence[str] | None = None, **given: float | None) -> dict[str, Any]:
    """Arguments of `core.conditions.of_options`: of the command line, completed by those of the settings file.

    Raises BadInputError.
    """
    stored = load(config).gates
    words = [f"{tolerance}:{least:g}" for tolerance, least in stored.min_match.items()]
    found: dict[str, Any] = {"min_speedup": stored.min_speedup, "max_rms_ratio": stored.max_rms_ratio}
    found |= {name: value for name, value in given.items() if value is not None}
    return found | {"min_match": tuple(min_match or words)}


def prefill_speedup(config: Path | None, min_speedup: float | None) -> float | None:
    """The least speedup of a prefill: of the command line, else of the settings file.  Raises BadInputError."""
    return load(config).prefill.min_speedup if min_speedup is None else min_speedup
