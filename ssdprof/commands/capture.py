"""`ssdprof capture`: store the inputs of a model's operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssdprof.commands import options, progress_bars, terminal
from ssdprof.commands.grouped import grouped
from ssdprof.commands.model_options import ServedModelOptions


@grouped
def capture(
    model: ServedModelOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=options.path,
            help="Folder of the captures.",
            show_default="in the assets cache of huggingface_hub",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a complete capture in DIR.")] = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Store the inputs of a model's SSD and GDN layers, for 'ssdprof run DIR'.

    One layer of a large model takes gigabytes at 128k tokens.
    """
    from ssdprof.jobs.subject import find

    options.refuse_ranks("ssdprof capture")
    request = model.request()
    subject = find(request)
    if dry_run:
        from ssdprof.commands.shown_plan import show_plan
        from ssdprof.jobs import limits
        from ssdprof.jobs.dry_run import check_start, plan

        planned = plan(subject, request)
        show_plan(planned, as_json)
        limits.check_capture()
        check_start(planned, subject, request)
        return
    from ssdprof.jobs.capture import capture as store_captures  # imports torch

    folder, manifest = store_captures(
        request, out, overwrite=force, watcher=progress_bars.TerminalWatcher(), subject=subject
    )
    if as_json:
        from ssdprof.schema.capture import StoredCapture  # TODO

        terminal.print_json(StoredCapture(folder=str(folder), manifest=manifest).model_dump(mode="json"))
    else:
        print(folder)
