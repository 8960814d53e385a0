"""Records -> tables.  `speed`, `accuracy`, `run` and `stalls` say what is in them, not how it is drawn."""

from ssdprof.report.tables import accuracy, run, speed, stalls
from ssdprof.report.tables.table import Figure, Note, Table

__all__ = ["Figure", "Note", "Table", "accuracy", "run", "speed", "stalls"]
