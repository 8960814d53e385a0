"""`ssdprof run`, `capture`, `answers` and `prefill`: they load a model.  Their options were checked
before.
"""

from __future__ import annotations

from collections.abc import Callable
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
from ssdprof.jobs.options import (
    AnswersOptions,
    CaptureOptions,
    ModelOptions,
    PrefillOptions,
    RunOptions,
)
from ssdprof.jobs.plan import check_start, plan
from ssdprof.jobs.stalls import profile_run, require_gpu_for_stalls
from ssdprof.jobs.target import Stored, Target
from ssdprof.progress import Watcher
from ssdprof.report import brief, stalls
from ssdprof.report import terminal as tables
from ssdprof.report.document import compose
from ssdprof.report.statements import verdict_lines
from ssdprof.store.ranks import Ranks
from ssdprof.store.tuned import use_saved


class StoredCapture(Record):
    """The result of `ssdprof capture`."""

    folder: Text
    manifest: CaptureManifest


def run(options: RunOptions, found: Target | Stored, ranks: Ranks | None) -> None:
    """Run, or plan with --dry-run, then time prefills and profile stalls as the options say."""
    reports = ranks is None or ranks.first  # the first rank reports for all

    def check() -> None:
        run_job.check(found, options, ranks)
        if options.prefill:
            require_gpu(*prefill_job.NEEDS_GPU)
        if options.stalls:
            require_gpu_for_stalls()

    if options.dry_run:
        if reports:
            _plan(found, check, tensor_parallel=options.tensor_parallel, as_json=options.json)
        return
    watcher = TerminalWatcher() if reports else Watcher()
    tuned = None if options.no_tuned else use_saved(TerminalWatcher().say)
    with terminal.only_data_on_stdout():
        folder, report = run_job.run(found, options, watcher, ranks)
    if not reports:
        return
    shown = tables.render(compose(report)) if options.full else brief.render(report)
    output.show(report, shown, as_json=options.json, note=f"Kept in {folder}.")
    codes = []
    if options.prefill:
        codes.append(_prefill(options, folder))
    if options.stalls:
        codes.append(_stalls(options, folder, report, tuned))
    output.end(report)
    if code := max(codes, default=ExitCode.OK):
        raise typer.Exit(code)


def _plan(
    found: Target | Stored, check: Callable[[], object], *, tensor_parallel: int = 1, as_json: bool
) -> None:
    """Show the plan of a dry run, and raise what would keep the model from running."""
    planned = plan(found, tensor_parallel=tensor_parallel)
    output.show_plan(planned, as_json=as_json)
    check()
    check_start(planned, found)


def _prefill(options: RunOptions, folder: Path) -> ExitCode:
    """Time and show prefills in the run's folder, or print why not.  Returns the exit code of
    `ssdprof prefill`.
    """
    try:
        require_gpu(*prefill_job.NEEDS_GPU)
        wanted = PrefillOptions(
            **{
                field.name: getattr(options, field.name)
                for field in fields(ModelOptions)
                if field.name != "conditions"
            },
            smallest_difference=options.smallest_difference,
            out=folder / "prefill",
        )
        target = prefill_job.find(wanted)
        with terminal.only_data_on_stdout():
            folder, report = prefill_job.time_prefills(wanted, target, TerminalWatcher())
    except SsdprofError as error:
        terminal.say(f"No prefill times: {error.message}  {error.hint}")
        return error.exit_code
    if not options.json:
        terminal.out().print("", tables.render(compose(report)), sep="\n")
    terminal.say(f"Prefill times are in {folder}.")
    return ExitCode.OK if Outcome(report).passed else ExitCode.GATE_FAILED


def _stalls(options: RunOptions, folder: Path, report: Report, tuned: Path | None) -> ExitCode:
    """Profile, show and store stalls, or print why not.  Returns the exit code of `ssdprof
    stalls`.
    """
    try:
        profiled = profile_run(options, folder, report, TerminalWatcher(), tuned=tuned)
    except SsdprofError as error:
        terminal.say(f"No stalls: {error.message}  {error.hint}")
        return error.exit_code
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
    target = answers_job.loaded_as(target, options)
    if options.dry_run:
        _plan(target, partial(answers_job.check, target, options), as_json=options.json)
        return
    if not options.no_tuned:
        use_saved(TerminalWatcher().say)
    with terminal.only_data_on_stdout():
        folder, report = answers_job.answers(target, options, TerminalWatcher())
    output.finish(report, folder, as_json=options.json)


def prefill(options: PrefillOptions) -> None:
    require_gpu(*prefill_job.NEEDS_GPU)
    target = prefill_job.find(options)
    if not options.no_tuned:
        use_saved(TerminalWatcher().say)
    with terminal.only_data_on_stdout():
        folder, report = prefill_job.time_prefills(options, target, TerminalWatcher())
    output.finish(report, folder, as_json=options.json)
