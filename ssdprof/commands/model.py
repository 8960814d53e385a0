"""`ssdprof run`, `capture`, `answers` and `prefill`: they load a model.  Their options were checked
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import typer

from ssdprof.commands import output, terminal
from ssdprof.commands.output import TerminalWatcher
from ssdprof.core.base import Record, Text
from ssdprof.core.outcome import Outcome
from ssdprof.core.report import Report
from ssdprof.core.target import CaptureManifest
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import ExitCode, SsdprofError
from ssdprof.jobs import answers as answers_job
from ssdprof.jobs import prefill as prefill_job
from ssdprof.jobs import run as run_job
from ssdprof.jobs import stall_files
from ssdprof.jobs import stalls as stalls_job
from ssdprof.jobs.options import (
    AnswersOptions,
    CaptureOptions,
    ModelOptions,
    PrefillOptions,
    RunOptions,
    StallsOptions,
)
from ssdprof.jobs.plan import check_start, plan
from ssdprof.jobs.target import Stored, Target
from ssdprof.report import brief, stalls
from ssdprof.report import terminal as tables
from ssdprof.report.document import compose
from ssdprof.report.statements import verdict_lines
from ssdprof.store.ranks import Ranks


class StoredCapture(Record):
    """The result of `ssdprof capture`."""

    folder: Text
    manifest: CaptureManifest


def run(options: RunOptions, found: Target | Stored, ranks: Ranks | None) -> None:
    """Run, or plan with --dry-run, then time prefills and profile stalls as the options say."""

    def check() -> None:
        run_job.check(options, found, ranks)
        if options.prefill:
            require_gpu(*prefill_job.NEEDS_GPU)
        if options.stalls:
            require_gpu(*stalls_job.NEEDS_GPU)

    if options.dry_run:
        if output.reports(ranks):
            _plan(found, check, tensor_parallel=options.tensor_parallel, as_json=options.json)
        return
    watcher = output.watcher_of(ranks)
    with terminal.only_data_on_stdout():
        folder, report = run_job.run(options, found, ranks, watcher)
    if not output.reports(ranks):
        return
    shown = tables.render(compose(report)) if options.full else brief.render(report)
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
    """An error of what follows a run is printed, and adds its exit code: the run's report stays."""
    try:
        yield
    except SsdprofError as error:
        terminal.say(f"No {what}: {error.message}  {error.hint}")
        codes.append(error.exit_code)


def _plan(
    found: Target | Stored, check: Callable[[], object], *, tensor_parallel: int = 1, as_json: bool
) -> None:
    """Show the plan of a dry run, and raise what would keep the model from running."""
    planned = plan(found, tensor_parallel=tensor_parallel)
    output.show_plan(planned, as_json=as_json)
    check()
    check_start(planned, found)


def _prefill(options: RunOptions, folder: Path) -> ExitCode:
    """Time and show prefills in the run's folder.  Returns the exit code of `ssdprof prefill`."""
    wanted = PrefillOptions(
        **{field.name: getattr(options, field.name) for field in fields(ModelOptions)},
        smallest_difference=options.smallest_difference,
        no_tuned=True,  # the run has said which are in use
        out=folder / "prefill",
    )
    with terminal.only_data_on_stdout():
        folder, report = prefill_job.prefill(wanted, TerminalWatcher())
    if not options.json:
        terminal.out().print("", tables.render(compose(report)), sep="\n")
    terminal.say(f"Prefill times are in {folder}.")
    return ExitCode.OK if Outcome(report).passed else ExitCode.GATE_FAILED


def _stalls(options: RunOptions, folder: Path, report: Report) -> ExitCode:
    """Profile, show and store stalls.  Returns the exit code of `ssdprof stalls`."""
    wanted = StallsOptions(where=str(folder), no_tuned=options.no_tuned, command=options.command)
    _, profiled = stalls_job.profile(wanted, TerminalWatcher())
    if not options.json:
        lines = map(tables.verdict, verdict_lines(report))
        terminal.out().print(tables.render(stalls.compose(profiled)), *lines, sep="\n")
    terminal.say(f"Stalls are in {folder / stall_files.FOLDER}.")
    return ExitCode.MISSING_CAPABILITY if profiled.missing else ExitCode.OK


def capture(options: CaptureOptions, target: Target | None) -> None:
    """target: None for a recording of a server."""
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
        _plan(target, partial(answers_job.check, options, target), as_json=options.json)
        return
    with terminal.only_data_on_stdout():
        folder, report = answers_job.answers(options, target, TerminalWatcher())
    output.finish(folder, report, as_json=options.json)


def prefill(options: PrefillOptions) -> None:
    with terminal.only_data_on_stdout():
        folder, report = prefill_job.prefill(options, TerminalWatcher())
    output.finish(folder, report, as_json=options.json)
