"""A run's report, for people and for machines: tables, terminal, Markdown.  Reads only `ssdprof.schema`."""

from ssdprof.report import brief, markdown, tables, terminal
from ssdprof.report.accuracy_table import accuracy_table

__all__ = ["accuracy_table", "brief", "markdown", "tables", "terminal"]
