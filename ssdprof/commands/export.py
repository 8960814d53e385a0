"""`ssdprof export`: a kept run as a file for people or for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ssdprof.commands import options, terminal


def export(
    run: options.Run = None,
    format: Annotated[
        Literal["markdown", "json", "html"] | None, typer.Option(help="What to write.", show_default="markdown")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", parser=options.path, help="Where to.", show_default="stdout"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Write a run's report as Markdown, HTML or JSON.

    The report is written in any case.  Exit code 1 says that not everything asked of the run was compared and passed.
    """
    from ssdprof import files, runs
    from ssdprof.errors import BadInputError
    from ssdprof.pipeline import stall_files
    from ssdprof.report import markdown
    from ssdprof.runs import document

    if as_json and format not in (None, "json"):
        raise BadInputError(f"--json and --format {format} exclude each other.", "Give one of them.")
    folder, report = runs.read(run)
    to_stdout = output is None or str(output) == "-"
    if output is not None and not to_stdout:
        files.check_target(output, replace=force)
    if as_json or format == "json":
        text = document.dump(report)
    elif format == "html":
        from ssdprof.report import html

        text = html.render(report, stall_files.of_run(folder))
    else:
        text = markdown.render(report)
        stalls = stall_files.of_run(folder)
        if stalls is not None:
            figures = {} if output is None or to_stdout else stall_files.write_pictures(output, stalls)
            text += "\n" + stall_files.as_markdown(stalls, figures)
    if output is None or to_stdout:
        print(text)
    else:
        files.write_text(output, text.rstrip("\n") + "\n", replace=force)
        terminal.err().print(f"Wrote {output} from {folder}.")
    terminal.exit_by(report)
