"""Reads and writes the report as JSON, and its JSON schema."""

from __future__ import annotations

import json

from pydantic import ValidationError

from ssdprof.errors import BadInputError
from ssdprof.schema import SCHEMA_VERSION, RunReport
from ssdprof.schema.base import first_fault

_OTHERS = {"cells": "bench", "prefill_version": "prefill"}  # a key that identifies each other kind of result
_AGAIN = "Use the ssdprof that wrote it, or run again."


def dump(report: RunReport) -> str:
    """One indented JSON document, which `load` reads; `ssdprof schemas report-v2` prints its schema."""
    return report.model_dump_json(indent=1)


def load(text: str) -> RunReport:
    """Reads the output of `dump`.

    Raises BadInputError if the text is not JSON, has another version, or does not fit the schema.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"The report is not JSON: {error}.", "The file may be cut off or damaged.") from error
    if not isinstance(document, dict):
        document = {}
    for key, command in _OTHERS.items():
        if key in document:
            raise BadInputError(
                f"The file is a result of ssdprof {command} and not a run.",
                "'ssdprof export' and 'ssdprof compare' read it.",
            )
    version = document.get("schema_version")
    if version is None:
        raise BadInputError("The JSON is not a report of ssdprof: it has no schema_version.", _AGAIN)
    if version != SCHEMA_VERSION:
        raise BadInputError(
            f"The report has schema version {version}; this ssdprof reads version {SCHEMA_VERSION}.", _AGAIN
        )
    try:
        return RunReport.model_validate_json(text)
    except ValidationError as error:
        raise BadInputError(f"The report is damaged at {first_fault(error)}.", _AGAIN) from error
