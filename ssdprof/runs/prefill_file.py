"""Reads and writes results of `ssdprof prefill --out`."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ssdprof import files
from ssdprof.errors import BadInputError, unreadable
from ssdprof.schema.base import first_fault
from ssdprof.schema.prefill import PrefillReport


def is_prefill(file: Path) -> bool:
    return files.has_key(file, "prefill_version")


def dump(report: PrefillReport) -> str:
    """One indented JSON document, which `read` reads."""
    return report.model_dump_json(indent=1)


def read(file: Path) -> PrefillReport:
    """Raises BadInputError, with the file's name, for any other content."""
    try:
        return PrefillReport.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(str(file), error, "Name a result of ssdprof prefill --out.") from error
    except ValidationError as error:
        raise BadInputError(
            f"{file}: The file is not a result of ssdprof prefill: {first_fault(error)}.",
            "Use the ssdprof that wrote it, or time the prefills again.",
        ) from error
