"""Renders a run's report: tables, terminal, Markdown, HTML and exports.  Reads only `ssdprof.schema`."""

from ssdprof.report import brief, markdown, tables, terminal
from ssdprof.report.accuracy_table import accuracy_table

__all__ = ["accuracy_table", "brief", "markdown", "tables", "terminal"]
