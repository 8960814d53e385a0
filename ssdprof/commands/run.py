"""`ssdprof run`: capture a model's operators, or open stored captures, and replay them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    placement: options.PlacementOption = None,
    batch: options.Batch = 1,
    packed: options.Packed = None,
    chunked_prefill: options.ChunkedPrefill = None,
    decode: options.Decode = 0,
    tensor_parallel: options.TensorParallel = 1,
    dtypes: options.Dtypes = "all",
    states: options.UsualStates = None,
    cast: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        typer.Option(help="Replay the captured inputs in this dtype.", show_default="the model's"),
    ] = None,
    impl: options.Implementations = "unfused,fused",
    baseline: options.Baseline = "unfused",
    first_call: options.FirstCall = 180,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=options.path, help="Folder of the run.", show_default="runs/<time>-<model>"),
    ] = None,
    save_captures: Annotated[
        bool, typer.Option("--save-captures", help="Store the inputs too, which takes gigabytes.")
    ] = False,
    answers: Annotated[
        bool, typer.Option("--answers", help="Also compare the model's answers: see 'ssdprof answers'.")
    ] = False,
    stalls: Annotated[
        bool, typer.Option("--stalls", help="Also profile one layer with ncu: see 'ssdprof stalls'.")
    ] = False,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Also time the whole model's prefill: see 'ssdprof prefill'.")
    ] = False,
    clock: options.Clock = "cold",
    smallest_difference: options.SmallestDifference = "1%",
    min_speedup: options.MinSpeedup = None,
    min_match: options.MinMatch = None,
    max_rms_ratio: options.MaxRmsRatio = None,
    config: options.Config = None,
    no_tuned: options.NoTuned = False,
    dry_run: options.DryRun = False,
    full: options.Full = False,
    as_json: options.Json = False,
) -> None:
    """Run a model on a prompt, and compare the fused with the unfused kernels on the inputs of its layers.

    Exit code 0 says that everything asked for was compared and passed.  Exit code 1 says that a case was inaccurate,
    not finite or refused, that a gate does not hold, that nothing was compared, or that the stored capture was
    interrupted.
    """
    from ssdprof.errors import BadInputError
    from ssdprof.pipeline.request import (
        Keep,
        ReplayRequest,
        ServingRequest,
        parse_implementations,
        parse_percent,
        parse_serving,
        parse_states,
    )
    from ssdprof.pipeline.subject import find_to_replay
    from ssdprof.report import brief
    from ssdprof.report import terminal as tables
    from ssdprof.runs import document
    from ssdprof.settings import gates

    others = {"--answers": answers, "--prefill": prefill, "--stalls": stalls}
    if cast is not None and (given := [option for option, wanted in others.items() if wanted]):
        raise BadInputError(
            f"--cast and {given[0]} exclude each other: --cast changes the inputs of the replay alone.",
            "Leave out one of them.",
        )
    if stalls and tensor_parallel > 1:
        raise BadInputError(
            "--stalls and --tensor-parallel exclude each other: stalls are those of all heads.",
            "Leave out one of them.",
        )
    limits = gates.chosen(config, min_speedup=min_speedup, min_match=min_match, max_rms_ratio=max_rms_ratio)
    serving = parse_serving(batch, packed, chunked_prefill, decode, seq=seq, segment=segment)
    if (answers or prefill) and (serving != ServingRequest() or tensor_parallel > 1):
        raise BadInputError(
            f"{'--answers' if answers else '--prefill'} takes one sequence, whole, through all heads of the model.",
            "Leave out --batch, --packed, --chunked-prefill, --decode and --tensor-parallel.",
        )
    request = options.capture_request(
        model, revision, tokenizer, prompt, prompt_file, seq, layers, segment, serving, placement
    )
    replay = ReplayRequest(
        intermediates=dtypes,
        states=None if states is None else parse_states(states),
        implementations=parse_implementations("--impl", impl),
        baseline=baseline,
        first_call_s=first_call,
        smallest_difference=parse_percent("--smallest-difference", smallest_difference),
        warm=clock == "warm",
        cast=cast,
        tensor_parallel=tensor_parallel,
        gates=limits,
    )
    if prefill:
        options.refuse_captures(request, "--prefill")
    ranks = options.join_ranks(
        {"--answers": answers, "--stalls": stalls, "--prefill": prefill, "--save-captures": save_captures}
    )
    found = find_to_replay(request, save_captures=save_captures, whole=answers)
    from ssdprof.pipeline.run import check  # torch comes with it: after all that can be wrong without
    from ssdprof.pipeline.run import run as run_model
    from ssdprof.progress import Unwatched

    if dry_run and (ranks is None or ranks.first):
        from ssdprof.pipeline.dry_run import check_placed, plan

        planned = plan(found, request, tensor_parallel=tensor_parallel)
        terminal.show_plan(planned, as_json)
        check(found, replay)
        check_placed(planned, found, request)
    if dry_run:
        return
    replay = replace(replay, gates=options.gates_here(limits, speedup_given=min_speedup is not None))
    tuned = options.use_tuned(no_tuned)
    keep = Keep(out=out, save_captures=save_captures, command=terminal.command_line())
    watcher = Unwatched() if ranks is not None and not ranks.first else terminal.TerminalWatcher()
    folder, report = run_model(request, replay, keep, watcher, found=found, ranks=ranks)
    if ranks is not None and not ranks.first:
        return  # the first rank tells
    if prefill:
        report = _prefill(request, replay.smallest_difference, folder, report)
    if as_json:
        print(document.dump(report))
    else:
        terminal.err().print(f"Kept in {folder}.")
        terminal.out().print(tables.render(report) if full else brief.render(report))
    if stalls:
        _stalls(request, folder, report, tuned, as_json)
    terminal.exit_by(report)


def _prefill(request: CaptureRequest, smallest_difference: float, folder: Path, report: RunReport) -> RunReport:
    """Time it, and keep it in the run's report.  A machine that cannot says so, and the run is what it was."""
    from ssdprof.errors import SsdprofError
    from ssdprof.pipeline.prefill import prefill_of_run

    try:
        return prefill_of_run(request, smallest_difference, folder, report, terminal.TerminalWatcher())
    except SsdprofError as error:
        terminal.err().print(f"No prefill times: {error.message}  {error.hint}")
        return report


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
        terminal.out().print(tables.render_document(stall_document.compose(found)), *tables.verdicts(report), sep="\n")
    terminal.err().print(f"Stalls are in {folder / stall_files.FOLDER}.")
