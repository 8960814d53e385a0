"""A run's report, for people and for machines: tables, terminal, Markdown, JSON.  Reads only `ssdprof.schema`."""

from ssdprof.report import json, markdown, tables, terminal
from ssdprof.report.accuracy_table import accuracy_table

__all__ = ["accuracy_table", "json", "markdown", "tables", "terminal"]
