"""The settings of a project for all commands: `[tool.ssdprof]` in pyproject.toml, or ssdprof.toml.

An example is in docs/ci.md.  Gates of the command line come before those of the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, create_model

from ssdprof.core.conditions import Condition, of_options
from ssdprof.errors import BadInputError, first_fault, library_message, nearest, unreadable
from ssdprof.files import regular

_PROJECT = "pyproject.toml"
_CONFIG = ConfigDict(
    extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
)
_Limit = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_Share = Annotated[float, Field(ge=0, le=100, strict=True)]


def _table(name: str, **keys: Any) -> Any:
    """A table whose keys may be left out.  keys: the type and the default of each."""
    return create_model(name, __config__=_CONFIG, **keys)


# Named as the options of commands, which come before them.  Gates are of run, bench and accuracy
_GATES = _table(
    "GateSettings",
    min_speedup=(_Limit | None, None),
    min_match=(dict[Literal["0", "1e-3", "1e-2"], _Share], {}),
    max_rms_ratio=(_Limit | None, None),
)
_PREFILL = _table("PrefillSettings", min_speedup=(_Limit | None, None))
_COMPARE = _table(
    "CompareSettings", fail_if=(tuple[str, ...], ()), smallest_difference=(str | None, None)
)
ProjectSettings = _table(
    "ProjectSettings",
    gates=(_GATES, _GATES()),
    prefill=(_PREFILL, _PREFILL()),
    compare=(_COMPARE, _COMPARE()),
)


def load(file: Path | None = None) -> Any:
    """The settings of `file`, or of the nearest file that has any, from the current folder upwards.

    In a folder ssdprof.toml comes before pyproject.toml.  Without a file, all settings are empty.
    Raises BadInputError if the file cannot be read, is not TOML, or has an unknown key or a value
    that does not fit.
    """
    folders = (Path.cwd(), *Path.cwd().parents)
    near = (
        path
        for folder in folders
        for path in (folder / "ssdprof.toml", folder / _PROJECT)
        if os.path.lexists(path)
    )
    for candidate in [file] if file else near:
        values = _values(candidate)
        if values is not None:
            return _parse(
                values,
                f"{candidate}: [tool.ssdprof]" if candidate.name == _PROJECT else str(candidate),
            )
    if file is not None:
        raise BadInputError(
            f"{file} has no [tool.ssdprof].", "Add it, or name another file with --config."
        )
    return ProjectSettings()


def gates(
    config: Path | None, given: Sequence[Condition], *, prefill: bool = False
) -> tuple[Condition, ...]:
    """The conditions of the command line, then those of the settings file on other values.  Raises
    BadInputError.
    """
    settings = load(config)
    if prefill:
        stored = of_options(min_speedup=settings.prefill.min_speedup)
    else:
        found = settings.gates
        matches = [f"{tolerance}:{least}" for tolerance, least in found.min_match.items()]
        stored = of_options(
            min_speedup=found.min_speedup, min_match=matches, max_rms_ratio=found.max_rms_ratio
        )
    return (*given, *besides(stored, given))


def besides(conditions: Iterable[Condition], given: Iterable[Condition]) -> tuple[Condition, ...]:
    """Those of other options than the given ones, and on other values or at other places."""
    options = {one.spelling.split()[0] for one in given if " " in one.spelling}
    places = {(one.metric, one.at) for one in given}
    others = (one for one in conditions if (one.metric, one.at) not in places)
    return tuple(one for one in others if one.spelling.partition(" ")[0] not in options)


def _values(file: Path) -> dict[str, Any] | None:
    """The table of ssdprof; None if a pyproject.toml has none."""
    try:
        document = tomllib.loads(regular(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(str(file), error, "Name a TOML file.") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{file} is not TOML: {library_message(error)}.",
            "Correct it, or name another file with --config.",
        ) from error
    if file.name != _PROJECT:
        return document
    found = document
    for name in ("tool", "ssdprof"):
        if name not in found:
            return None
        found = found[name]
        if not isinstance(found, dict):
            raise BadInputError(
                f"{file}: [tool.ssdprof] is not a table.",
                "Write [tool.ssdprof.gates] and its keys.",
            )
    return found


def _parse(values: dict[str, Any], source: str) -> Any:
    try:
        return ProjectSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            model = ProjectSettings
            for part in path[:-1]:
                model = model.model_fields[part].annotation
            known = [field.alias or name for name, field in model.model_fields.items()]
            raise BadInputError(
                f"{source} has the unknown key {'.'.join(path)}.", nearest(path[-1], known)
            ) from error
        raise BadInputError(
            f"{source}: {first_fault(error)}.",
            "'ssdprof schemas settings-v1' prints the allowed keys and values.",
        ) from error
