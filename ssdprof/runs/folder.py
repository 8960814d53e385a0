"""Run folders: `runs/<time>-<model>/report.json`, with one writer at a time and atomic writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ssdprof.errors import BadInputError, unreadable
from ssdprof.files import locked, safe_name, write_text
from ssdprof.runs import document
from ssdprof.schema import RunReport

RUNS = Path("runs")
REPORT = "report.json"
CAPTURES = "captures"


@dataclass(frozen=True)
class RunFolder:
    """A folder that this process alone may write to.  See `opened`."""

    path: Path

    @property
    def captures(self) -> Path:
        """Where `--save-captures` stores the operators' inputs."""
        return self.path / CAPTURES

    def write(self, report: RunReport) -> None:
        """Replace report.json atomically: after an error the previous report is intact."""
        write_text(self.path / REPORT, document.dump(report) + "\n")


@contextmanager
def opened(out: Path | None, model: str, *, now: datetime | None = None) -> Iterator[RunFolder]:
    """A new run folder, locked while the context is open; removed if nothing was written into it.

    out: the folder to use; None: `runs/<time>-<model>/`.
    Raises BadInputError if `out` has a report or another run is writing into it.
    """
    path = out or _unused(RUNS / f"{(now or datetime.now(UTC)):%Y%m%d-%H%M%S}-{safe_name(model)}")
    with locked(path, "Another run is writing into", "Wait for it to end, or name another folder with --out.") as lock:
        try:
            if (path / REPORT).exists():
                raise BadInputError(f"{path} holds a run already.", "Name another folder with --out.")
            yield RunFolder(path)
        finally:
            if [entry.name for entry in path.iterdir()] == [lock.name]:
                lock.unlink()
                path.rmdir()


def read(where: str | Path | None) -> tuple[Path, RunReport]:
    """The folder and the report of a run.

    where: a run folder, its report.json, a name under `runs/`, or None for the latest run under `runs/`.
    Raises BadInputError if there is no run, or if its report cannot be read.
    """
    file = _report_file(where)
    try:
        return file.parent, document.load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(str(file), error, "Name a run's folder.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{file} is not JSON: it is not UTF-8.", "The file may be cut off or damaged.") from error
    except BadInputError as error:
        raise BadInputError(f"{file}: {error.message}", error.hint) from error


def latest() -> Path | None:
    """The run under `runs/` whose report was written last."""
    if not RUNS.is_dir():
        return None
    reports = [entry / REPORT for entry in RUNS.iterdir() if (entry / REPORT).is_file()]
    newest = max(reports, key=lambda file: (file.stat().st_mtime_ns, file.parent.name), default=None)
    return newest.parent if newest else None


def _unused(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ... if it exists: two runs may start within one second."""
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _report_file(where: str | Path | None) -> Path:
    if where is None:
        newest = latest()
        if newest is None:
            raise BadInputError(
                f"There is no run under {RUNS.resolve()}.", "Make one with 'ssdprof run MODEL', or name a run's folder."
            )
        return newest / REPORT
    if not str(where).strip():
        raise BadInputError("The run's name is empty.", "Name a run's folder, or leave it out for the latest run.")
    for path in (Path(where), RUNS / where):
        if path.is_file():
            return path
        if (path / REPORT).is_file():
            return path / REPORT
    raise BadInputError(
        f"{where} is not a run: it contains no {REPORT}.", f"Name a run's folder; they are kept under {RUNS}/."
    )
