"""The report as one HTML file that opens from a disk and needs no network."""

from ssdprof.report.html.page import render, render_document

__all__ = ["render", "render_document"]
