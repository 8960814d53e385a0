"""Run folders and what is kept in them."""

from ssdprof.runs.folder import CAPTURES, REPORT, RUNS, RunFolder, latest, opened, read

__all__ = ["CAPTURES", "REPORT", "RUNS", "RunFolder", "latest", "opened", "read"]
