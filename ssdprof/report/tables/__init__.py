"""Records -> tables.  Each module says what is in its tables, not how they are drawn."""

from ssdprof.report.tables import accuracy, answers, run, speed, stall_origin, stalls
from ssdprof.report.tables.table import Figure, Note, Table

__all__ = ["Figure", "Note", "Table", "accuracy", "answers", "run", "speed", "stall_origin", "stalls"]
