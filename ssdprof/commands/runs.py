"""`ssdprof runs`: the stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssdprof.commands import options, terminal


def runs(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", parser=options.path, help="A folder of runs.", show_default="runs")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the runs, newest first: time, model, tokens, GPU and verdict."""
    from ssdprof.errors import BadInputError
    from ssdprof.report.tables import listing as tables
    from ssdprof.report.terminal import SplitTable
    from ssdprof.runs import RUNS
    from ssdprof.runs.listing import listed

    if folder is not None and not folder.is_dir():
        raise BadInputError(f"{folder} is not a folder.", "Name a folder that holds runs, or leave it out for runs/.")
    found = listed(folder or RUNS)
    if as_json:
        terminal.print_json([run.model_dump(mode="json") for run in found])
    elif found:
        terminal.out().print(SplitTable(tables.runs(found), rest="--json"))
    else:
        terminal.err().print(f"There are no runs in {folder or RUNS}.  Make one with 'ssdprof run MODEL'.")
