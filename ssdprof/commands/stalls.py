"""`ssdprof stalls`: where the warps of each implementation wait, and the reasons."""

from __future__ import annotations

from pathlib import Path

import typer

from ssdprof.commands import output, terminal
from ssdprof.commands.options import StallsOptions
from ssdprof.core.base import PrecisionRecord
from ssdprof.errors import ExitCode
from ssdprof.jobs import stall_files
from ssdprof.jobs.stalls import StallRequest, from_files, profile
from ssdprof.operators.implementations import refuse_two_checkouts, refuse_unknown
from ssdprof.report.stalls import compose
from ssdprof.report.terminal import render
from ssdprof.store.tuned import use_saved


def stalls(options: StallsOptions, asked: tuple[tuple[str, ...], int | None]) -> None:
    implementations, seqlen = asked
    refuse_two_checkouts(implementations)
    refuse_unknown("--impl", implementations, besides=("reference",))
    folder: Path | None = None
    if options.files:
        report = from_files(options.files)
    else:
        watcher = output.TerminalWatcher()
        request = StallRequest(
            where=options.where,
            layer=options.layer,
            seqlen=seqlen,
            implementations=implementations,
            precision=PrecisionRecord(intermediates=options.dtypes, state_dtype=options.states),
            timeout_s=options.timeout,
            out=options.out,
            overwrite=options.force,
            tuned=None if options.no_tuned else use_saved(watcher.say),
            command=terminal.command_line(),
        )
        folder, report = profile(request, watcher)
    if options.markdown is not None:
        stall_files.write_markdown(options.markdown, report, replace=options.force)
    if options.json:
        print(stall_files.dump(report))
    else:
        terminal.out().print(render(compose(report), rest="--markdown FILE"))
    for written in (folder, options.markdown):
        if written is not None:
            terminal.err().print(output.kept(written))
    if report.missing:
        raise typer.Exit(ExitCode.MISSING_CAPABILITY)
