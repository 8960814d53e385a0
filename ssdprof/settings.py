"""The settings of a project for all commands: `[tool.ssdprof]` in pyproject.toml, or ssdprof.toml.

An example is in docs/ci.md.  Gates of the command line come before those of the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from ssdprof.core.conditions import Condition, parse_gate
from ssdprof.errors import BadInputError, first_fault, library_message, nearest, unreadable
from ssdprof.files import regular

_PROJECT = "pyproject.toml"
_CONFIG = ConfigDict(
    extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
)


def _table(name: str, **keys: Any) -> Any:
    """A table whose keys may be left out.  keys: the type and the default of each."""
    return create_model(name, __config__=_CONFIG, **keys)


_LIST = (tuple[str, ...], ())
_PREFILL = _table("PrefillSettings", gates=_LIST)
_COMPARE = _table("CompareSettings", fail_if=_LIST, smallest_difference=(str | None, None))
ProjectSettings = _table(
    "ProjectSettings",
    gates=_LIST,  # of run, bench and accuracy
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
    """The gates of the command line, then those of the settings file on other values.  Raises
    BadInputError.
    """
    settings = load(config)
    texts = settings.prefill.gates if prefill else settings.gates
    return (*given, *besides(map(parse_gate, texts), given))


def besides(conditions: Iterable[Condition], given: Iterable[Condition]) -> tuple[Condition, ...]:
    """Those on other values than the given ones, or at other places."""
    places = {(gate.metric, gate.at) for gate in given}
    return tuple(gate for gate in conditions if (gate.metric, gate.at) not in places)


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
                "Write [tool.ssdprof], and its keys below it.",
            )
    return found


def _parse(values: dict[str, Any], source: str) -> Any:
    try:
        return ProjectSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        if first["type"] == "tuple_type" and path[-1] == "gates":
            raise BadInputError(
                f"{source}: {'.'.join(path)} is not a list of gates.",
                'Write gates = ["speedup:1.5", "match@1e-3:90%"].',
            ) from error
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
