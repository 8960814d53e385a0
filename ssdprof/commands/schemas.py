"""The schema of every command's --json.  `python -m ssdprof.commands.schemas` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ssdprof.schema import published  # TODO


@dataclass(frozen=True)
class Published:
    """printed_by: the commands whose --json has this schema.  kind: the type that they print."""

    title: str
    printed_by: tuple[str, ...]
    kind: Any

    @property
    def schema(self) -> dict[str, Any]:
        return published.json_schema(self.kind, self.title)


def documents() -> dict[str, Published]:
    """File name -> schema.  A version in a name is also a field of the document."""
    from ssdprof.bench.schema import BenchReport
    from ssdprof.checkpoint.names import Family
    from ssdprof.environment.checks import Check
    from ssdprof.schema import RunReport  # TODO
    from ssdprof.schema.capture import StoredCapture  # TODO
    from ssdprof.schema.comparison import Comparison  # TODO
    from ssdprof.schema.listing import ListedRun  # TODO
    from ssdprof.schema.plan import DryRun  # TODO
    from ssdprof.schema.prefill import PrefillReport  # TODO
    from ssdprof.schema.stalls import StallReport  # TODO
    from ssdprof.tuning.records import PlannedSearch, TuneReport

    return {
        "report-v2.json": Published("ssdprof report", ("run", "accuracy", "answers", "export"), RunReport),
        "dry-run.json": Published(
            "ssdprof dry run", ("run --dry-run", "capture --dry-run", "answers --dry-run"), DryRun
        ),
        "capture.json": Published("ssdprof capture", ("capture",), StoredCapture),
        "comparison-v1.json": Published("ssdprof comparison", ("compare",), Comparison),
        "runs.json": Published("ssdprof runs", ("runs",), tuple[ListedRun, ...]),
        "prefill-v1.json": Published("ssdprof prefill", ("prefill", "export"), PrefillReport),
        "stalls-v2.json": Published("ssdprof stalls", ("stalls",), StallReport),
        "bench-v2.json": Published("ssdprof bench", ("bench", "export"), BenchReport),
        "tune-v2.json": Published("ssdprof tune", ("tune",), TuneReport),
        "tune-dry-run.json": Published("ssdprof tune dry run", ("tune --dry-run",), tuple[PlannedSearch, ...]),
        "models.json": Published("ssdprof models", ("models",), tuple[Family, ...]),
        "doctor.json": Published("ssdprof doctor", ("doctor",), tuple[Check, ...]),
    }


def publish() -> None:
    """Write every file."""
    for name, document in documents().items():
        (published.FOLDER / name).write_text(published.as_text(document.schema), encoding="utf-8")


if __name__ == "__main__":
    publish()
