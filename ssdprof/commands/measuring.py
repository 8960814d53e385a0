"""The commands that run a model or kernels: `ssdprof run`, `capture`, `answers`, `prefill`,
`bench`, `tune` and `stalls`.

`cli` has checked their options, and passes what they refer to, such as the model, as arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import typer

from ssdprof import files
from ssdprof.commands import output, terminal
from ssdprof.commands.output import TerminalWatcher
from ssdprof.core.base import Record, Text
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.core.target import CaptureManifest
from ssdprof.core.tuned import TunedCalls, TunedConfig
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import ExitCode, SsdprofError
from ssdprof.jobs import answers as answers_job
from ssdprof.jobs import bench as bench_job
from ssdprof.jobs import documents
from ssdprof.jobs import prefill as prefill_job
from ssdprof.jobs import run as run_job
from ssdprof.jobs import stalls as stalls_job
from ssdprof.jobs import tune as tune_job
from ssdprof.jobs.options import (
    AnswersOptions,
    BenchOptions,
    CaptureOptions,
    ModelOptions,
    PrefillOptions,
    RunOptions,
    StallsOptions,
    TuneOptions,
)
from ssdprof.jobs.plan import check_start, plan
from ssdprof.jobs.target import Stored, Target
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.report import brief, html
from ssdprof.report import stalls as stall_report
from ssdprof.report.document import compose, of_tuning
from ssdprof.report.statements import verdict_lines
from ssdprof.report.terminal import render, verdict
from ssdprof.stalls.facts import analyse
from ssdprof.stalls.read import read
from ssdprof.store import tuned
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import dump


class StoredCapture(Record):
    """What `ssdprof capture --json` prints."""

    folder: Text
    manifest: CaptureManifest


def run(options: RunOptions, target: Target | Stored, ranks: Ranks | None) -> None:
    """Run a model or stored captures, then time prefills and profile stalls as the options say.

    With `--dry-run`, only show the plan.  Ends with exit code 1 if the run did not pass, else with
    the largest exit code of the prefills and the stalls.

    ranks: this process as one of several; None if it is the only one.
    """

    def check() -> None:
        run_job.check(options, target, ranks)
        if options.prefill:
            require_gpu(*prefill_job.NEEDS_GPU)
        if options.stalls:
            require_gpu(*stalls_job.NEEDS_GPU)

    if options.dry_run:
        if output.prints_report(ranks):
            _plan(target, check, tensor_parallel=options.tensor_parallel, as_json=options.json)
        return
    watcher = output.watcher_of(ranks)
    with terminal.only_data_on_stdout():
        folder, report = run_job.run(options, target, ranks, watcher)
    if not output.prints_report(ranks):
        return
    shown = render(compose(report)) if options.full else brief.render(report)
    output.show(report, shown, as_json=options.json, note=f"Kept in {folder}.")
    codes = [ExitCode.OK]
    if options.prefill:
        with _reported("prefill times", codes):
            codes.append(_prefill(options, folder))
    if options.stalls:
        with _reported("stalls", codes):
            codes.append(_stalls(options, folder, report))
    output.end(report)
    if code := max(codes):
        raise typer.Exit(code)


@contextmanager
def _reported(what: str, codes: list[ExitCode]) -> Iterator[None]:
    """A context in which an SsdprofError is printed and its exit code appended to `codes`, so that
    a job after a run does not end the command before the run's report is judged.

    what: the results that are missing after an error, in words.
    """
    try:
        yield
    except SsdprofError as error:
        terminal.say(f"No {what}: {error.message}  {error.hint}")
        codes.append(error.exit_code)


def _plan(
    target: Target | Stored, check: Callable[[], object], *, tensor_parallel: int = 1, as_json: bool
) -> None:
    """Show the plan of a dry run, then raise the error that would keep the model from running, if
    there is one.

    check: raises what the job would raise before it loads the model.
    """
    planned = plan(target, tensor_parallel=tensor_parallel)
    output.show_plan(planned, as_json=as_json)
    check()
    check_start(planned, target)


def _prefill(options: RunOptions, folder: Path) -> ExitCode:
    """Time and show prefills of the run's model and prompt.  They are stored in the run's folder.

    The implementations, the precision and the baseline are the defaults of `ssdprof prefill`, and
    not those of the run.  Returns the exit code of `ssdprof prefill`.
    """
    prefill_options = PrefillOptions(
        **{field.name: getattr(options, field.name) for field in fields(ModelOptions)},
        smallest_difference=options.smallest_difference,
        no_tuned=True,  # the run has already loaded the tuned configurations
        out=folder / "prefill",
    )
    with terminal.only_data_on_stdout():
        prefill_folder, report = prefill_job.prefill(prefill_options, TerminalWatcher())
    if not options.json:
        terminal.out().print("", render(compose(report)), sep="\n")
    terminal.say(f"Prefill times are in {prefill_folder}.")
    return ExitCode.OK if Outcome(report).passed else ExitCode.GATE_FAILED


def _stalls(options: RunOptions, folder: Path, report: Report) -> ExitCode:
    """Profile, show and store the stalls of a run.  Returns the exit code of `ssdprof stalls`.

    The layer, the implementations and the precision are the defaults of `ssdprof stalls`.

    report: of the run, whose verdict is shown again at the end.
    """
    stalls_options = StallsOptions(
        where=str(folder), no_tuned=options.no_tuned, command=options.command
    )
    _, profiled = stalls_job.profile(stalls_options, TerminalWatcher())
    if not options.json:
        lines = map(verdict, verdict_lines(report))
        terminal.out().print(render(stall_report.compose(profiled)), *lines, sep="\n")
    terminal.say(f"Stalls are in {folder / documents.STALLS_FOLDER}.")
    return ExitCode.MISSING_CAPABILITY if profiled.missing else ExitCode.OK


def capture(options: CaptureOptions, target: Target | None) -> None:
    """Store the inputs of a model's layers, and print the folder.

    With `--dry-run`, nothing is stored: the plan is shown, or for a recording the folder that it
    would be stored in.

    target: None to convert a recording of a server.
    """
    if target is not None and options.dry_run:
        check = partial(run_job.check_capture, options.out, overwrite=options.force)
        _plan(target, check, as_json=options.json)
        return
    watcher = TerminalWatcher()
    if target is None:
        folder, manifest = run_job.capture_recording(options, watcher)
    else:
        folder, manifest = run_job.capture(
            target, options.out, overwrite=options.force, watcher=watcher
        )
    if options.json:
        print(StoredCapture(folder=str(folder), manifest=manifest).model_dump_json(indent=2))
    else:
        print(folder)


def answers(options: AnswersOptions, target: Target) -> None:
    if options.dry_run:
        check = partial(answers_job.checked_implementations, options, target)
        _plan(target, check, as_json=options.json)
        return
    with terminal.only_data_on_stdout():
        folder, report = answers_job.answers(options, target, TerminalWatcher())
    output.finish(folder, report, as_json=options.json)


def prefill(options: PrefillOptions) -> None:
    with terminal.only_data_on_stdout():
        folder, report = prefill_job.prefill(options, TerminalWatcher())
    output.finish(folder, report, as_json=options.json)


def bench(
    options: BenchOptions,
    names: tuple[str, ...],
    too_large: tuple[Tokens, ...],
    ranks: Ranks | None,
) -> None:
    """Time kernels on generated inputs.

    names: of the implementations.  too_large: the layouts of tokens that `--max-tokens` leaves out.
    """
    watcher = output.watcher_of(ranks)
    with terminal.only_data_on_stdout():
        folder, report = bench_job.run_bench(options, names, too_large, ranks, watcher)
    if output.prints_report(ranks):
        output.finish(folder, report, as_json=options.json)


def tune(options: TuneOptions, cells: tuple[Cell, ...]) -> None:
    """Search for configurations on the sizes `cells`; with `--clear`, delete the stored ones."""
    if options.clear:
        removed = [f"Removed {file}." for file in tuned.clear()]
        terminal.say("\n".join(removed) or f"There is nothing in {tuned.folder()}.")
        return
    device = tune_job.gpu_to_tune()
    watcher = TerminalWatcher()
    kept_in: Path | None = None  # the file with what was found; None if nothing was

    def keep(report: Report, calls: TunedCalls, config: TunedConfig | None) -> None:
        """Store the result of one search at once, so that an interruption loses nothing."""
        nonlocal kept_in
        file = tuned.keep(report.environment, calls, config)
        if config is not None:
            kept_in = file

    try:
        report = tune_job.tune(options, cells, device, watcher, keep)
    finally:  # also after Ctrl-C
        if kept_in is not None:
            watcher.say(f"What was found is kept in {kept_in}.")
    if options.json:
        print(dump(report))
    else:
        terminal.out().print(render(of_tuning(report)))


def stalls(options: StallsOptions) -> None:
    """Profile, or read reports of ncu, then print the stall report, and write it as the options
    say.  Ends with exit code 3 if the report has only a part, because this machine cannot profile.
    """
    folder = None
    if options.files:
        report = analyse([read(path) for path in options.files])
    else:
        folder, report = stalls_job.profile(options, TerminalWatcher())
    if options.markdown is not None:
        documents.write_stalls_markdown(options.markdown, report, replace=options.force)
    if options.html is not None:
        files.write_text(
            options.html,
            html.of_document(stall_report.compose(report), report),
            replace=options.force,
        )
    if options.json:
        print(documents.dump_stalls(report))
    else:
        terminal.out().print(render(stall_report.compose(report)))
    for written in (folder, options.markdown, options.html):
        if written is not None:
            terminal.say(f"Kept in {written}.")
    if report.missing:
        raise typer.Exit(ExitCode.MISSING_CAPABILITY)
