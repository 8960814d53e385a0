"""`ssdprof export`: a kept run as a file for people or for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ssdprof.commands import options, terminal


def export(
    run: options.Run = None,
    format: Annotated[Literal["markdown", "json"], typer.Option(help="What to write.")] = "markdown",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", parser=options.path, help="Where to.", show_default="stdout"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: options.Json = False,
) -> None:
    """Write a run's report as Markdown or JSON."""
    from ssdprof import files, runs
    from ssdprof.pipeline import stall_files
    from ssdprof.report import markdown
    from ssdprof.runs import document

    folder, report = runs.read(run)
    to_stdout = output is None or str(output) == "-"
    as_data = format == "json" or (as_json and to_stdout)
    if output is not None and not to_stdout:
        files.check_target(output, replace=force)
    if as_data:
        text = document.dump(report)
    else:
        text = markdown.render(report)
        stalls = stall_files.of_run(folder)
        if stalls is not None:
            figures = {} if output is None or to_stdout else stall_files.write_pictures(output, stalls)
            text += "\n" + stall_files.as_markdown(stalls, figures)
    if output is None or to_stdout:
        print(text)
        return
    files.write_text(output, text.rstrip("\n") + "\n", replace=force)
    if as_json:
        terminal.print_json({"run": str(folder), "format": format, "file": str(output)})
    else:
        terminal.err().print(f"Wrote {output} from {folder}.")
