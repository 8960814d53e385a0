"""JSON schemas of the commands' output, generated from their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

FOLDER = Path(__file__).parents[1] / "schemas"  # of the published schemas


def json_schema(kind: Any, title: str) -> dict[str, Any]:
    """The JSON schema of a document.  kind: a record, or a type made of records."""
    generated = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=_Generator)
    return {"$schema": GenerateJsonSchema.schema_dialect, **generated, "title": title}


def as_text(schema: dict[str, Any]) -> str:
    """The contents of a file in `FOLDER`."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


class _Generator(GenerateJsonSchema):
    """Numbers that JSON does not have are stored as strings: see `schema.Record`."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}
