"""Records -> tables: what is in them, not how they are drawn."""

from ssdprof.report.tables import accuracy, answers, brief, listing, prefill, run, speed, stall_origin, stalls, warm
from ssdprof.report.tables.table import Figure, Note, Table

__all__ = [
    "Figure",
    "Note",
    "Table",
    "accuracy",
    "answers",
    "brief",
    "listing",
    "prefill",
    "run",
    "speed",
    "stall_origin",
    "stalls",
    "warm",
]
