"""Plots of a report as SVG, with the same bytes for the same report.  The tables have all of their numbers too."""
