"""Turns records into tables.  Renderers draw them."""

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
