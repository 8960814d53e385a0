"""`ssdprof stalls`: where the warps of each implementation wait, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ssdprof.commands import options, progress_bars, terminal
from ssdprof.commands.grouped import grouped


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The layer to profile, and the implementations."""

    where: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|MODEL", help="A run, a model, or a folder of stored captures.", show_default="the latest run"
        ),
    ] = None
    layer: Annotated[
        int | None, typer.Option(metavar="N", help="The layer to profile.", show_default="the middle one of the run")
    ] = None
    impl: options.Implementations = "unfused,fused"
    seq: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of the prompt.", show_default="the longest of the run")
    ] = None

    def seqlen(self) -> int | None:
        """Tokens of the prompt.  Raises BadInputError."""
        from ssdprof.capture.prompt import parse_seq

        return None if self.seq is None else parse_seq(self.seq)


@grouped
def stalls(
    profiled: ProfileOptions,
    precision: options.PrecisionOptions,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="FILE", parser=options.path, help="Read a report of ncu (.ncu-rep) instead.  Repeatable."
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            parser=options.path,
            help="Write Markdown to FILE, and its pictures next to it.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", min=1, help="Time limit of each process, in seconds.")] = 300,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=options.path, help="Folder for the results.", show_default="the run's"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing results.")] = False,
    no_tuned: options.NoTuned = False,
    as_json: options.Json = False,
) -> None:
    """Show where the warps of each implementation wait, stage by stage and line by line.

    Profiles one layer with NVIDIA Nsight Compute (ncu), or reads existing reports.  Exit code 3 says that this
    machine cannot profile; the command then shows what Triton reports about the kernels.
    """
    from ssdprof.errors import BadInputError, ExitCode
    from ssdprof.files import check_target
    from ssdprof.pipeline.request import parse_implementations

    options.refuse_ranks("ssdprof stalls")
    if profiled.where is not None and not profiled.where.strip():
        raise BadInputError(
            "The name is empty.", "Name a run, a model or captures, or leave it out for the latest run."
        )
    if markdown is not None:
        check_target(markdown, replace=force)
    implementations = parse_implementations("--impl", profiled.impl)
    seqlen = profiled.seqlen()
    if files and any(given is not None for given in (profiled.where, profiled.layer, seqlen, out)):
        raise BadInputError(
            "--from reads existing reports and profiles nothing.",
            "Leave out the run or model, --layer, --seq and --out.",
        )

    # these import torch, so after all checks that do not need it
    from ssdprof.jobs import stall_files
    from ssdprof.jobs.stalls import StallRequest, from_files, profile
    from ssdprof.operators import named
    from ssdprof.report import stall_document
    from ssdprof.report import terminal as tables

    named.refuse_two_checkouts(implementations)
    named.refuse_unknown("--impl", implementations, besides=("reference",))
    folder: Path | None = None
    if files:
        report = from_files(files)
    else:
        request = StallRequest(
            where=profiled.where,
            layer=profiled.layer,
            seqlen=seqlen,
            implementations=implementations,
            precision=precision.record(),
            timeout_s=timeout,
            out=out,
            overwrite=force,
            tuned=options.use_tuned(no_tuned),
            command=terminal.command_line(),
        )
        folder, report = profile(request, progress_bars.TerminalWatcher())
    if markdown is not None:
        stall_files.write_markdown(markdown, report, replace=force)
    if as_json:
        print(stall_files.dump(report))
    else:
        terminal.out().print(tables.render_document(stall_document.compose(report), rest="--markdown FILE"))
    for written in (folder, markdown):
        if written is not None:
            terminal.err().print(f"Kept in {written}.")
    if report.missing:
        raise typer.Exit(ExitCode.MISSING_CAPABILITY)
