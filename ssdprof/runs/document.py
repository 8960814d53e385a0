"""The report as JSON, and the JSON schema that it keeps to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ssdprof.errors import BadInputError
from ssdprof.schema import SCHEMA_VERSION, RunReport, migrate

SCHEMA_FILE = Path(__file__).with_name(f"report-v{SCHEMA_VERSION}.json")  # published; equal to schema_text()
_AGAIN = "Use the ssdprof that wrote it, or run again."


def dump(report: RunReport) -> str:
    """One JSON document, indented, that `load` reads back and that keeps to `SCHEMA_FILE`."""
    return report.model_dump_json(indent=1)


def load(text: str) -> RunReport:
    """The report that `dump` wrote.

    A report of schema version 1 is read as one of version 2.  Raises BadInputError if the text is no JSON, has another
    version, or does not keep to the schema.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"The report is not JSON: {error}.", "The file may be cut off or damaged.") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version is None:
        raise BadInputError("The JSON is not a report of ssdprof: it has no schema_version.", _AGAIN)
    if version not in (migrate.OLDEST, SCHEMA_VERSION):
        raise BadInputError(
            f"The report has schema version {version}; this ssdprof reads versions {migrate.OLDEST} and "
            f"{SCHEMA_VERSION}.",
            _AGAIN,
        )
    try:
        if version == migrate.OLDEST:
            text = json.dumps(migrate.run_report(document))
        return RunReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BadInputError(f"The report is damaged at {where}: {first['msg']}.", _AGAIN) from error


def schema() -> dict[str, Any]:
    """The JSON schema of a report, generated from the records."""
    generated = RunReport.model_json_schema(schema_generator=JsonNumbers)
    generated["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    return {"$schema": GenerateJsonSchema.schema_dialect, **generated, "title": "ssdprof report"}


def schema_text() -> str:
    """What `SCHEMA_FILE` holds."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


class JsonNumbers(GenerateJsonSchema):
    """Numbers that JSON does not have are stored as strings: see `schema.Record`."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}
