"""The settings of a project for all commands: `[tool.ssdprof]` in pyproject.toml, or ssdprof.toml.

An example is in docs/ci.md.  A gate of the command line replaces a gate of the file on the same
value.
"""

import os
import tomllib
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from ssdprof.core.base import Record, Text
from ssdprof.core.conditions import (
    SPEED_METRICS,
    Change,
    Condition,
    parse_change,
    parse_gate,
    parse_percent,
)
from ssdprof.errors import (
    BadInputError,
    MissingCapabilityError,
    first_fault,
    library_message,
    nearest,
    unreadable,
)
from ssdprof.files import regular

AnyCondition = TypeVar("AnyCondition", Condition, Change)
_PYPROJECT = "pyproject.toml"


class PrefillSettings(Record):
    """The table `prefill` of the settings."""

    gates: tuple[Text, ...] = ()


class CompareSettings(Record):
    """The table `compare` of the settings."""

    fail_if: tuple[Text, ...] = Field(default=(), alias="fail-if")
    smallest_difference: Text = Field(default="1%", alias="smallest-difference")


class ProjectSettings(Record):
    """The settings of a project."""

    gates: tuple[Text, ...] = ()  # of run, bench and accuracy
    prefill: PrefillSettings = PrefillSettings()
    compare: CompareSettings = CompareSettings()


def load(file: Path | None = None) -> ProjectSettings:
    """The settings of a project.

    file: None for the nearest file with settings, from the current folder upwards.  In a folder,
        ssdprof.toml comes before pyproject.toml.  Without such a file, all settings have their
        defaults.

    Raises BadInputError for a file that is missing, is not TOML, or has an unknown key or a wrong
    value, and if `file` is a pyproject.toml without settings; MissingCapabilityError if the user
    may not read it.
    """
    candidates = []
    if file is not None:
        candidates.append(file)
    else:
        for folder in (Path.cwd(), *Path.cwd().parents):
            paths = (folder / "ssdprof.toml", folder / _PYPROJECT)
            candidates += filter(os.path.lexists, paths)
    for candidate in candidates:
        values = _values(candidate)
        if values is not None:
            table = ": [tool.ssdprof]" if candidate.name == _PYPROJECT else ""
            return _parse(values, f"{candidate}{table}")
    if file is not None:
        raise BadInputError(
            f"{file} has no [tool.ssdprof].", "Add it, or name another file with --config."
        )
    return ProjectSettings()


def gates(
    config: Path | None, requested: Sequence[Condition], *, prefill: bool = False
) -> tuple[Condition, ...]:
    """The gates of the command line, then the gates of the settings file on other values.

    prefill: whether to take the file's gates for prefills.

    Raises the errors of `load`.
    """
    settings = load(config)
    texts = settings.prefill.gates if prefill else settings.gates
    return (*requested, *besides(map(parse_gate, texts), requested))


def besides(
    conditions: Iterable[Condition], requested: Iterable[Condition]
) -> tuple[Condition, ...]:
    """The conditions on values without a requested condition.  A value is a metric, and where it
    applies.
    """
    values = {(gate.metric, gate.at) for gate in requested}
    return tuple(gate for gate in conditions if (gate.metric, gate.at) not in values)


def without_speed(
    conditions: Iterable[AnyCondition],
    requested: Container[str],
    option: str,
    machine: str,
    say: Callable[[str], None],
) -> tuple[AnyCondition, ...]:
    """The conditions without those on speed, for a machine without a GPU.

    conditions: of the user's option and of the settings file.
    requested: the texts of the conditions that the user gave with an option; the other conditions
        are of the settings file.
    option, machine: named in messages.
    say: prints a sentence for each condition of the settings file that is left out.

    Raises MissingCapabilityError if a requested condition is on speed.
    """
    not_on_speed: list[AnyCondition] = []
    for condition in conditions:
        if condition.metric not in SPEED_METRICS:
            not_on_speed.append(condition)
        elif condition.text in requested:
            words = f"{option} {condition.text}"
            raise MissingCapabilityError(
                f"{words} needs an NVIDIA GPU, and {machine} has none that torch can use.",
                f"Run on a machine with an NVIDIA GPU, or leave {words} out.",
            )
        else:
            say(f"{condition.text} of the settings file is not judged: {machine} has no GPU.")
    return tuple(not_on_speed)


def _values(file: Path) -> dict[str, Any] | None:
    """The settings in a file, before they are checked; None if a pyproject.toml has none.

    Raises the errors of `load` for a file that is missing, cannot be read or is not TOML.
    """
    try:
        document = tomllib.loads(regular(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(str(file), error, "Name a TOML file.") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{file} is not TOML: {library_message(error)}.",
            "Correct it, or name another file with --config.",
        ) from error
    if file.name != _PYPROJECT:
        return document
    table = document
    for name in ("tool", "ssdprof"):
        if name not in table:
            return None
        table = table[name]
        if not isinstance(table, dict):
            raise BadInputError(
                f"{file}: [tool.ssdprof] is not a table.",
                "Write [tool.ssdprof], and its keys below it.",
            )
    return table


def _parse(values: dict[str, Any], source: str) -> ProjectSettings:
    """The settings with these values.  source: the file and the table, for messages.

    Raises BadInputError, which names the wrong key.
    """
    try:
        settings = ProjectSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            path = [str(part) for part in first["loc"]]
            table: Any = ProjectSettings
            for name in path[:-1]:
                table = table.model_fields[name].annotation  # the record of a nested table
            known = [field.alias or name for name, field in table.model_fields.items()]
            raise BadInputError(
                f"{source} has the unknown key {'.'.join(path)}.", nearest(path[-1], known)
            ) from error
        raise BadInputError(
            f"{source}: {first_fault(error)}.",
            "'ssdprof schemas settings-v1' prints the allowed keys and values.",
        ) from error
    _check_texts(settings, source)
    return settings


def _check_texts(settings: ProjectSettings, source: str) -> None:
    """Raise BadInputError, which names the key, for a text that cannot be parsed.

    source: the file and the table, for messages.
    """
    compare = settings.compare
    parsers: dict[str, tuple[Iterable[str], Callable[[str], object]]] = {
        "gates": (settings.gates, parse_gate),
        "prefill.gates": (settings.prefill.gates, parse_gate),
        "compare.fail-if": (compare.fail_if, parse_change),
        "compare.smallest-difference": (
            (compare.smallest_difference,),
            partial(parse_percent, "it"),
        ),
    }
    for key, (texts, parse) in parsers.items():
        for text in texts:
            try:
                parse(text)
            except BadInputError as error:
                raise BadInputError(f"{source}: {key}: {error.message}", error.hint) from error
