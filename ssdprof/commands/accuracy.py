"""`ssdprof accuracy`: how exact the implementations were, from a run that is kept."""

from __future__ import annotations

import typer

from ssdprof.commands import options, terminal
from ssdprof.errors import ExitCode


def accuracy(
    run: options.Run = None,
    dtypes: options.Dtypes = "all",
    states: options.States = "all",
    as_json: options.Json = False,
) -> None:
    """Show how exact each implementation was in a run.

    Exit code 1 says that a case shown was inaccurate or not finite.
    """
    from ssdprof import runs
    from ssdprof.pipeline.request import parse_states, precisions
    from ssdprof.report import accuracy_table
    from ssdprof.runs import document

    folder, report = runs.read(run)
    table = accuracy_table(report, dtypes, parse_states(states))
    chosen = precisions(dtypes, states)
    shown = report.model_copy(update={"cases": tuple(case for case in report.cases if case.precision in chosen)})
    if as_json:
        print(document.dump(shown))
    else:
        terminal.out().print(table)
        terminal.err().print(f"From {folder}.")
    if any(case.status not in ("passed", "refused") for case in shown.cases):
        raise typer.Exit(ExitCode.GATE_FAILED)
