"""RunReport -> tables.  `speed`, `accuracy` and `run` say what is in them; how they are drawn is not known here."""

from ssdprof.report.tables import accuracy, run, speed
from ssdprof.report.tables.table import Note, Table

__all__ = ["Note", "Table", "accuracy", "run", "speed"]
