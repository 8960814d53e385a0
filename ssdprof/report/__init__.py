"""Renders reports: one document of column tables for every kind, on a terminal, as Markdown, HTML,
CSV and JUnit.
"""
