"""Records -> tables.  `speed`, `accuracy`, `run`, `stalls` and `stall_origin` say what is in them, not how."""

from ssdprof.report.tables import accuracy, brief, listing, prefill, run, speed, stall_origin, stalls
from ssdprof.report.tables.table import Figure, Note, Table

__all__ = [
    "Figure",
    "Note",
    "Table",
    "accuracy",
    "brief",
    "listing",
    "prefill",
    "run",
    "speed",
    "stall_origin",
    "stalls",
]
