"""The report as one HTML file that opens from a disk and asks no network for anything."""

from ssdprof.report.html.page import render

__all__ = ["render"]
