"""Run folders and their files."""

from ssdprof.runs.folder import CAPTURES, REPORT, RUNS, RunFolder, latest, opened, read

__all__ = ["CAPTURES", "REPORT", "RUNS", "RunFolder", "latest", "opened", "read"]
