"""The report as one self-contained HTML file."""

from ssdprof.report.html.page import render, render_document

__all__ = ["render", "render_document"]
