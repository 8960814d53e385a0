"""The settings in a file, and their published JSON schema.

[tool.ssdprof.gates]            in ssdprof.toml: [gates]
min-speedup = 1.5
min-match = { "1e-3" = 99.0 }
max-rms-ratio = 1.5

[tool.ssdprof.prefill]          in ssdprof.toml: [prefill]
min-speedup = 1.05

[tool.ssdprof.compare]          in ssdprof.toml: [compare]
fail-if = ["slower:3%", "match:-0.1"]
smallest-difference = "1%"
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from ssdprof.errors import BadInputError, nearest
from ssdprof.schema import Gates

SCHEMA_FILE = Path(__file__).with_name("settings-v1.json")  # published; equal to schema_text()


def _kebab(name: str) -> str:
    return name.replace("_", "-")


_CONFIG = ConfigDict(extra="forbid", frozen=True, alias_generator=_kebab)


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


class Settings(BaseModel):
    """Settings of ssdprof."""

    model_config = _CONFIG

    gates: GateSettings = Field(default_factory=GateSettings)
    prefill: PrefillSettings = Field(default_factory=PrefillSettings)
    compare: CompareSettings = Field(default_factory=CompareSettings)


def parse(values: dict[str, Any], source: str) -> Settings:
    """The settings in a table of TOML.  source: names it in an error: "pyproject.toml: [tool.ssdprof]".

    Raises BadInputError for an unknown key, with the nearest one, and for a value that does not fit.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        where = ".".join(path)
        if first["type"] == "extra_forbidden":
            known = list(_keys(path[:-1]))
            raise BadInputError(f"{source} has the unknown key {where}.", nearest(path[-1], known)) from error
        raise BadInputError(
            f"{source}: {where}: {first['msg'].removeprefix('Value error, ')}.",
            f"The allowed keys and values are in ssdprof/settings/{SCHEMA_FILE.name}.",
        ) from error


def _keys(path: list[str]) -> Iterator[str]:
    """The keys that a table may have."""
    model: type[BaseModel] = Settings
    for part in path:
        annotation = next(field.annotation for field in model.model_fields.values() if field.alias == part)
        assert isinstance(annotation, type)
        model = annotation
    yield from (field.alias or name for name, field in model.model_fields.items())


def schema_text() -> str:
    """The contents of `SCHEMA_FILE`: the JSON schema of ssdprof.toml, and of [tool.ssdprof] in pyproject.toml."""
    generated = Settings.model_json_schema()
    document = {"$schema": GenerateJsonSchema.schema_dialect, **generated, "title": "ssdprof settings"}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"
