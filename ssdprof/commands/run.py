"""`ssdprof run`: capture a model's operators, or open stored captures, and replay them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdprof.commands import options, progress_bars, terminal
from ssdprof.commands.gate_options import GateOptions
from ssdprof.commands.grouped import grouped
from ssdprof.commands.model_options import MODEL_HELP, ServedModelOptions

if TYPE_CHECKING:
    from ssdprof.pipeline.request import CaptureRequest, Keep, ReplayRequest
    from ssdprof.schema import Gates, RunReport


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(ServedModelOptions):
    """A model on a prompt, or stored captures."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a folder of stored captures.", show_default=False)
    ]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The implementations to compare, their precisions, and the share of heads."""

    tensor_parallel: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Replay the share of one GPU when N GPUs divide each layer's heads.",
            show_default=True,
        ),
    ] = 1
    dtypes: options.Dtypes = "all"
    states: options.UsualStates = None
    cast: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        typer.Option(help="Replay the captured inputs in this dtype.", show_default="the model's"),
    ] = None
    impl: options.Implementations = "unfused,fused"
    baseline: options.Baseline = "unfused"
    first_call: options.FirstCall = 180

    def request(self, timing: options.TimingOptions, gates: Gates) -> ReplayRequest:
        """Raises BadInputError."""
        from ssdprof.pipeline.request import ReplayRequest, parse_implementations, parse_states

        return ReplayRequest(
            intermediates=self.dtypes,
            states=None if self.states is None else parse_states(self.states),
            implementations=parse_implementations("--impl", self.impl),
            baseline=self.baseline,
            first_call_s=self.first_call,
            smallest_difference=timing.smallest(),
            warm=timing.warm,
            cast=self.cast,
            tensor_parallel=self.tensor_parallel,
            gates=gates,
        )


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The stored results, and the results of other commands to add."""

    out: options.RunFolder = None
    save_captures: Annotated[
        bool, typer.Option("--save-captures", help="Also store the inputs of the layers, which can take gigabytes.")
    ] = False
    answers: Annotated[
        bool, typer.Option("--answers", help="Also compare the model's answers: see 'ssdprof answers'.")
    ] = False
    stalls: Annotated[bool, typer.Option("--stalls", help="Also profile one layer with ncu: see 'ssdprof stalls'.")] = (
        False
    )
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Also time the whole model's prefill: see 'ssdprof prefill'.")
    ] = False

    def keep(self) -> Keep:
        from ssdprof.pipeline.request import Keep

        return Keep(out=self.out, save_captures=self.save_captures, command=terminal.command_line())

    def check(self, request: CaptureRequest, replay: ReplayRequest) -> None:
        """Raises BadInputError if the added results cannot be combined with the replay."""
        from ssdprof.errors import BadInputError
        from ssdprof.pipeline.request import ServingRequest
        from ssdprof.pipeline.subject import captures_of

        added = {"--answers": self.answers, "--prefill": self.prefill, "--stalls": self.stalls}
        given = [option for option, wanted in added.items() if wanted]
        if replay.cast is not None and given:
            raise BadInputError(
                f"--cast and {given[0]} cannot be combined: --cast changes the inputs of the replay alone.",
                "Leave out one of them.",
            )
        if self.stalls and replay.tensor_parallel > 1:
            raise BadInputError(
                "--stalls and --tensor-parallel cannot be combined: --stalls profiles all heads.",
                "Leave out one of them.",
            )
        served = request.prompt.serving != ServingRequest() or replay.tensor_parallel > 1
        if served and (self.answers or self.prefill):
            raise BadInputError(
                f"{given[0]} runs one whole sequence through all heads of the model.",
                "Leave out --batch, --packed, --chunked-prefill, --decode and --tensor-parallel.",
            )
        if self.prefill and (folder := captures_of(request)) is not None:
            raise BadInputError(f"{folder} holds stored captures, and --prefill runs the model.", "Name the model.")


@grouped
def run(
    subject: SubjectOptions,
    replay: ReplayOptions,
    result: ResultOptions,
    timing: options.TimingOptions,
    gates: GateOptions,
    no_tuned: options.NoTuned = False,
    dry_run: options.DryRun = False,
    full: Annotated[bool, typer.Option("--full", help="Print every table instead of one screen.")] = False,
    as_json: options.Json = False,
) -> None:
    """Run a model on a prompt, and compare the fused with the unfused kernels on the inputs of its layers.

    Exit code 0 says that all requested cases were compared and passed.  Exit code 1 says that a case was inaccurate,
    not finite or refused, that a gate does not hold, that nothing was compared, or that the stored capture was
    interrupted.
    """
    from ssdprof.pipeline.subject import find_to_replay
    from ssdprof.report import brief
    from ssdprof.report import terminal as tables
    from ssdprof.runs import document

    request = subject.request()
    wanted = replay.request(timing, gates.chosen())
    result.check(request, wanted)
    ranks = options.join_ranks(
        {
            "--answers": result.answers,
            "--stalls": result.stalls,
            "--prefill": result.prefill,
            "--save-captures": result.save_captures,
        }
    )
    found = find_to_replay(request, save_captures=result.save_captures, whole=result.answers)
    from ssdprof.pipeline.run import check  # imports torch, so after all checks that do not need it
    from ssdprof.pipeline.run import run as run_model
    from ssdprof.progress import Unwatched

    reports = ranks is None or ranks.first  # the first rank reports for all
    if dry_run and reports:
        from ssdprof.commands.shown_plan import show_plan
        from ssdprof.pipeline.dry_run import check_start, plan

        planned = plan(found, request, tensor_parallel=replay.tensor_parallel)
        show_plan(planned, as_json)
        check(found, wanted, ranks)
        check_start(planned, found, request)
    if dry_run:
        return
    wanted = replace(wanted, gates=gates.judged_here(wanted.gates))
    tuned = options.use_tuned(no_tuned)
    watcher = progress_bars.TerminalWatcher() if reports else Unwatched()
    with terminal.only_data_on_stdout():
        folder, report = run_model(request, wanted, result.keep(), watcher, found=found, ranks=ranks)
    if not reports:
        return
    if result.prefill:
        report = _prefill(request, wanted.smallest_difference, folder, report)
    if as_json:
        print(document.dump(report))
    else:
        terminal.err().print(f"Kept in {folder}.")
        terminal.out().print(tables.render(report) if full else brief.render(report))
    if result.stalls:
        _stalls(request, folder, report, tuned, as_json)
    terminal.exit_by(report)


def _prefill(request: CaptureRequest, smallest_difference: float, folder: Path, report: RunReport) -> RunReport:
    """Add prefill times to the run's report.  If this machine cannot time them, prints why and leaves the run."""
    from ssdprof.errors import SsdprofError
    from ssdprof.pipeline.prefill import prefill_of_run

    try:
        with terminal.only_data_on_stdout():
            return prefill_of_run(request, smallest_difference, folder, report, progress_bars.TerminalWatcher())
    except SsdprofError as error:
        terminal.err().print(f"No prefill times: {error.message}  {error.hint}")
        return report


def _stalls(request: CaptureRequest, folder: Path, report: RunReport, tuned: Path | None, as_json: bool) -> None:
    """Profile, show and store stalls.  If this machine cannot profile, prints why and leaves the run."""
    from ssdprof.errors import SsdprofError
    from ssdprof.jobs import stall_files
    from ssdprof.jobs.stalls import profile_run
    from ssdprof.report import stall_document
    from ssdprof.report import terminal as tables

    try:
        found = profile_run(request, folder, report, progress_bars.TerminalWatcher(), tuned=tuned)
    except SsdprofError as error:
        terminal.err().print(f"No stalls: {error.message}  {error.hint}")
        return
    if not as_json:
        terminal.out().print(tables.render_document(stall_document.compose(found)), *tables.verdicts(report), sep="\n")
    terminal.err().print(f"Stalls are in {folder / stall_files.FOLDER}.")
