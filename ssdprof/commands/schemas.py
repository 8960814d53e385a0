"""`ssdprof schemas`: the JSON schema of every command's --json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ssdprof.errors import BadInputError, nearest


@dataclass(frozen=True)
class Published:
    """printed_by: the commands whose --json has this schema.  kind: the type that they print."""

    title: str
    printed_by: tuple[str, ...]
    kind: Any

    @property
    def schema(self) -> dict[str, Any]:
        from pydantic import TypeAdapter
        from pydantic.json_schema import GenerateJsonSchema

        class Generator(GenerateJsonSchema):
            """Numbers that JSON does not have are stored as strings: see `schema.Record`."""

            def float_schema(self, schema: Any) -> dict[str, Any]:
                return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}

        generated = TypeAdapter(self.kind).json_schema(mode="serialization", schema_generator=Generator)
        return {"$schema": GenerateJsonSchema.schema_dialect, **generated, "title": self.title}


def documents() -> dict[str, Published]:
    """Name -> schema.  A version in a name is also a field of the document."""
    from ssdprof.bench.schema import BenchReport
    from ssdprof.checkpoint.families import FamilyRow
    from ssdprof.environment.doctor import Check
    from ssdprof.schema import RunReport
    from ssdprof.schema.capture import StoredCapture
    from ssdprof.schema.comparison import Comparison
    from ssdprof.schema.listing import ListedRun
    from ssdprof.schema.plan import DryRun
    from ssdprof.schema.prefill import PrefillReport
    from ssdprof.schema.stalls import StallReport
    from ssdprof.settings import ProjectSettings
    from ssdprof.tuning.records import PlannedSearch, TuneReport

    dry = ("run --dry-run", "capture --dry-run", "answers --dry-run")
    return {
        "report-v2": Published("ssdprof report", ("run", "accuracy", "answers", "export"), RunReport),
        "dry-run": Published("ssdprof dry run", dry, DryRun),
        "capture": Published("ssdprof capture", ("capture",), StoredCapture),
        "comparison-v1": Published("ssdprof comparison", ("compare",), Comparison),
        "runs": Published("ssdprof runs", ("runs",), tuple[ListedRun, ...]),
        "prefill-v1": Published("ssdprof prefill", ("prefill", "export"), PrefillReport),
        "stalls-v3": Published("ssdprof stalls", ("stalls",), StallReport),
        "bench-v2": Published("ssdprof bench", ("bench", "export"), BenchReport),
        "tune-v2": Published("ssdprof tune", ("tune",), TuneReport),
        "tune-dry-run": Published("ssdprof tune dry run", ("tune --dry-run",), tuple[PlannedSearch, ...]),
        "models": Published("ssdprof models", ("models",), tuple[FamilyRow, ...]),
        "settings-v1": Published("ssdprof settings", (), ProjectSettings),
        "doctor": Published("ssdprof doctor", ("doctor",), tuple[Check, ...]),
    }


def schemas(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which schema; without it, list them.")] = None,
) -> None:
    """Print the JSON schema of what a command prints with --json."""
    found = documents()
    if name is None:
        for one, document in found.items():
            typer.echo(f"{one:15} {', '.join(document.printed_by)}")
        return
    if name not in found:
        raise BadInputError(f"There is no schema {name!r}.", nearest(name, found))
    typer.echo(json.dumps(found[name].schema, indent=1, sort_keys=True))
