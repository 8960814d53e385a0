"""`ssdprof bench`, `tune` and `stalls`: they run the kernels alone.  Their options were checked
before.
"""

from __future__ import annotations

import typer

from ssdprof import files
from ssdprof.commands import output, terminal
from ssdprof.core.report import Report
from ssdprof.core.tuned import TunedCalls, TunedConfig
from ssdprof.errors import ExitCode
from ssdprof.jobs import bench as bench_job
from ssdprof.jobs import stall_files
from ssdprof.jobs import stalls as stalls_job
from ssdprof.jobs import tune as tune_job
from ssdprof.jobs.options import BenchOptions, StallsOptions, TuneOptions
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.report import html
from ssdprof.report import stalls as stall_report
from ssdprof.report.document import of_tuning
from ssdprof.report.terminal import render
from ssdprof.stalls.facts import analyse
from ssdprof.stalls.read import read
from ssdprof.store import tuned
from ssdprof.store.ranks import Ranks
from ssdprof.store.reports import dump


def bench(
    options: BenchOptions,
    names: tuple[str, ...],
    too_large: tuple[Tokens, ...],
    ranks: Ranks | None,
) -> None:
    """names: implementations.  too_large: sizes that do not fit this GPU."""
    watcher = output.watcher_of(ranks)
    with terminal.only_data_on_stdout():
        folder, report = bench_job.find_and_bench(options, names, too_large, ranks, watcher)
    if output.reports(ranks):
        output.finish(folder, report, as_json=options.json)


def tune(options: TuneOptions, cells: tuple[Cell, ...]) -> None:
    """Search, and keep each tuned configuration as soon as it is found; or delete those that are
    kept.
    """
    if options.clear:
        gone = [f"Removed {file}." for file in tuned.clear()]
        terminal.say("\n".join(gone) or f"There is nothing in {tuned.folder()}.")
        return
    device = tune_job.gpu_to_tune()
    watcher = output.TerminalWatcher()
    improved: list[bool] = []

    def keep(report: Report, calls: TunedCalls, config: TunedConfig | None) -> None:
        """After each search, so that an interruption loses nothing."""
        tuned.keep(report.environment, calls, config)
        improved.append(config is not None)

    report = tune_job.tune(options, cells, device, watcher, keep)
    if any(improved) and report.environment.gpu:
        file = tuned.file_of(report.environment.gpu)
        watcher.say(f"What was found is kept in {file}.")
    if options.json:
        print(dump(report))
    else:
        terminal.out().print(render(of_tuning(report)))


def stalls(options: StallsOptions) -> None:
    """Profile, or read reports of ncu, then print and write what was found."""
    folder = None
    if options.files:
        report = analyse([read(path) for path in options.files])
    else:
        folder, report = stalls_job.profile(options, output.TerminalWatcher())
    if options.markdown is not None:
        stall_files.write_markdown(options.markdown, report, replace=options.force)
    if options.html is not None:
        files.write_text(
            options.html,
            html.of_document(stall_report.compose(report), report),
            replace=options.force,
        )
    if options.json:
        print(stall_files.dump(report))
    else:
        terminal.out().print(render(stall_report.compose(report)))
    for written in (folder, options.markdown, options.html):
        if written is not None:
            terminal.say(f"Kept in {written}.")
    if report.missing:
        raise typer.Exit(ExitCode.MISSING_CAPABILITY)
