"""`ssdprof export`: writes a stored run, bench or prefill result in another format."""

from __future__ import annotations

from typing import Annotated

import typer

from ssdprof.commands import options, terminal
from ssdprof.commands.export_formats import Format


def export(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run's folder, its name under runs/, or a file of [bold]bench[/bold] or [bold]prefill --out[/bold].",
            show_default="the latest run",
        ),
    ] = None,
    format: Annotated[Format | None, typer.Option(help="What to write.", show_default="markdown")] = None,
    output: options.Output = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Write the report of a run, a bench or prefill times in another format.

    github appends a summary and outputs to the files that GITHUB_STEP_SUMMARY and GITHUB_OUTPUT name, and prints
    annotations.  benchmark-action and benchmark-action-bigger are the formats customSmallerIsBetter and
    customBiggerIsBetter of github-action-benchmark.

    The report is written in any case.  Exit code 1 says that not all requested cases were compared and passed.
    """
    from ssdprof import files
    from ssdprof.commands import github_job, kept
    from ssdprof.commands.export_formats import FORMATS
    from ssdprof.errors import BadInputError

    if as_json and format not in (None, "json"):
        raise BadInputError(f"--json and --format {format} cannot be combined.", "Give one of them.")
    if format == "github":
        if output is not None:
            raise BadInputError(
                "--format github writes to the files that GITHUB_STEP_SUMMARY and GITHUB_OUTPUT name.", "Leave -o out."
            )
        github_job.check()
        found = kept.read(run)
        github_job.write(found.exported())
        found.exit()
        return
    found = kept.read(run)
    target = options.file_to_write(output, force=force)
    text = FORMATS["json" if as_json else format or "markdown"](found, target)
    if target is None:
        print(text)
    else:
        files.write_text(target, text.rstrip("\n") + "\n", replace=force)
        terminal.err().print(f"Wrote {target} from {found.source}.")
    found.exit()
