"""`ssdprof run`: capture a model's operators, or open stored captures, and replay them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssdprof.commands import options, terminal
from ssdprof.errors import ExitCode


def run(
    model: options.ModelOrCaptures,
    seq: options.Seq = None,
    layers: options.Layers = "all",
    prompt: options.PromptText = "default",
    prompt_file: options.PromptFile = None,
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    segment: options.Segment = None,
    dtypes: options.Dtypes = "all",
    states: options.States = "all",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run.", show_default="runs/<time>-<model>"),
    ] = None,
    save_captures: Annotated[bool, typer.Option("--save-captures", help="Keep the inputs too.  Gigabytes.")] = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Run a model on a prompt and compare the SSD implementations on what its layers compute.

    Exit code 1 says that a case was inaccurate or not finite.
    """
    from ssdprof import pipeline
    from ssdprof.report import json
    from ssdprof.report import terminal as tables
    from ssdprof.request import Recording, precisions

    request = options.capture_request(model, revision, tokenizer, prompt, prompt_file, seq, layers, segment)
    chosen = precisions(dtypes, states)
    if dry_run:
        terminal.show_plan(pipeline.plan(request), as_json)
        return
    recording = Recording(out=out, save_captures=save_captures, command=terminal.command_line())
    folder, report = pipeline.run(request, chosen, recording, terminal.TerminalWatcher())
    if as_json:
        print(json.dump(report))
    else:
        terminal.out().print(tables.render(report))
        terminal.err().print(f"Kept in {folder}.")
    if not report.passed:
        raise typer.Exit(ExitCode.GATE_FAILED)
