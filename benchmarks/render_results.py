"""Render benchmarks/results/<run>/report.html again for every recorded run, after a change of the report.

Run from the repository's root.  Stalls of a run, recorded in <run>-stalls, are part of its page.
"""

from __future__ import annotations

from pathlib import Path

from ssdprof import runs
from ssdprof.files import write_text
from ssdprof.jobs import stall_files
from ssdprof.report import html

RESULTS = Path(__file__).parent / "results"


def pages() -> dict[Path, str]:
    """File -> its contents."""
    found = {}
    for record in sorted(RESULTS.glob(f"*/{runs.REPORT}")):
        stalls = record.parent.with_name(f"{record.parent.name}-stalls") / stall_files.RECORD
        _, report = runs.read(record)
        page = html.render(report, stall_files.load(stalls) if stalls.is_file() else None)
        found[record.with_name("report.html")] = page + "\n"
    return found


if __name__ == "__main__":
    for file, text in pages().items():
        write_text(file, text)
        print(file)
