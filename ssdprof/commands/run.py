"""`ssdprof run`: capture a model's operators, or open stored captures, and replay them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdprof.commands import options, terminal

if TYPE_CHECKING:
    from ssdprof.pipeline.request import CaptureRequest
    from ssdprof.schema import RunReport


def run(
    model: options.ModelOrCaptures,
    seq: options.Seq = None,
    layers: options.Layers = "all",
    prompt: options.PromptText = "default",
    prompt_file: options.PromptFile = None,
    revision: options.Revision = None,
    tokenizer: options.Tokenizer = None,
    segment: options.Segment = None,
    batch: options.Batch = 1,
    packed: options.Packed = None,
    chunked_prefill: options.ChunkedPrefill = None,
    decode: options.Decode = 0,
    tensor_parallel: options.TensorParallel = 1,
    dtypes: options.Dtypes = "all",
    states: options.States = "all",
    implementations: Annotated[
        str, typer.Option(metavar="I[,I...]", help="Implementations to compare.")
    ] = "unfused,fused",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=options.path, help="Folder of the run.", show_default="runs/<time>-<model>"),
    ] = None,
    save_captures: Annotated[
        bool, typer.Option("--save-captures", help="Store the inputs too, which takes gigabytes.")
    ] = False,
    stalls: Annotated[
        bool, typer.Option("--stalls", help="Also profile one layer with ncu: see 'ssdprof stalls'.")
    ] = False,
    smallest_difference: options.SmallestDifference = "1%",
    no_tuned: options.NoTuned = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Run a model on a prompt, and compare the fused with the unfused kernels on the inputs of its layers.

    Exit code 0 says that everything asked for was compared and passed.  Exit code 1 says that a case was inaccurate,
    not finite or refused, that nothing was compared, or that the stored capture was broken off.
    """
    from ssdprof.errors import BadInputError
    from ssdprof.pipeline.request import (
        Keep,
        ReplayRequest,
        parse_implementations,
        parse_percent,
        parse_serving,
        precisions,
    )
    from ssdprof.pipeline.subject import find_to_replay
    from ssdprof.report import terminal as tables
    from ssdprof.runs import document

    if stalls and tensor_parallel > 1:
        raise BadInputError(
            "--stalls and --tensor-parallel exclude each other: stalls are those of all heads.",
            "Leave out one of them.",
        )
    serving = parse_serving(batch, packed, chunked_prefill, decode, seq=seq, segment=segment)
    request = options.capture_request(model, revision, tokenizer, prompt, prompt_file, seq, layers, segment, serving)
    replay = ReplayRequest(
        precisions=precisions(dtypes, states),
        implementations=parse_implementations(implementations),
        smallest_difference=parse_percent("--smallest-difference", smallest_difference),
        tensor_parallel=tensor_parallel,
    )
    found = find_to_replay(request, save_captures=save_captures)
    from ssdprof.pipeline.run import check  # torch comes with it: after all that can be wrong without
    from ssdprof.pipeline.run import run as run_model

    if dry_run:
        from ssdprof.pipeline.dry_run import plan

        terminal.show_plan(plan(found, tensor_parallel=tensor_parallel), as_json)
        check(found, replay)
        return
    tuned = options.use_tuned(no_tuned)
    keep = Keep(out=out, save_captures=save_captures, command=terminal.command_line())
    folder, report = run_model(request, replay, keep, terminal.TerminalWatcher(), found=found)
    if as_json:
        print(document.dump(report))
    else:
        terminal.out().print(tables.render(report))
        terminal.err().print(f"Kept in {folder}.")
    if stalls:
        _stalls(request, folder, report, tuned, as_json)
    terminal.exit_by(report)


def _stalls(request: CaptureRequest, folder: Path, report: RunReport, tuned: Path | None, as_json: bool) -> None:
    """Profile, show and keep.  A machine that cannot profile says so, and the run is what it was."""
    from ssdprof.errors import SsdprofError
    from ssdprof.pipeline import stall_files
    from ssdprof.pipeline.stalls import profile_run
    from ssdprof.report import stall_document
    from ssdprof.report import terminal as tables

    try:
        found = profile_run(request, folder, report, terminal.TerminalWatcher(), tuned=tuned)
    except SsdprofError as error:
        terminal.err().print(f"No stalls: {error.message}  {error.hint}")
        return
    if not as_json:
        terminal.out().print(tables.render_document(stall_document.compose(found)))
    terminal.err().print(f"Stalls are in {folder / stall_files.FOLDER}.")
