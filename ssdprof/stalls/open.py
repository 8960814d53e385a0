"""A report file of any kind: ncu's own, or a CSV that ncu printed of it."""

from __future__ import annotations

from pathlib import Path

from ssdprof.stalls import read, read_csv
from ssdprof.stalls.raw import RawReport


def open_report(path: Path) -> RawReport:
    """Raises what the readers raise."""
    return read_csv.read(path) if path.suffix.lower() == ".csv" else read.read(path)
