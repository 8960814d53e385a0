"""`ssdprof tune`: a search for faster configurations of the fused kernel on this GPU."""

from __future__ import annotations

from ssdprof import files, operators
from ssdprof.commands import output, terminal
from ssdprof.commands.options import TuneOptions
from ssdprof.core.tuned import TuneReport
from ssdprof.jobs import tune as job
from ssdprof.operators.generate import Cell
from ssdprof.report import terminal as tables
from ssdprof.report import tuning
from ssdprof.store import tuned as store


def tune(options: TuneOptions, asked: tuple[tuple[Cell, ...], tuple[int, ...] | None]) -> None:
    if options.clear:
        gone = store.clear()
        for file in gone:
            terminal.err().print(f"Removed {file}.", soft_wrap=True)
        if not gone:
            terminal.err().print(f"There is nothing in {store.folder()}.", soft_wrap=True)
        return
    cells, seqlens = asked
    device = job.gpu_to_tune()
    operator = operators.get(options.operator)
    request = job.TuneRequest(
        operator=operator,
        sources=job.drawn(operator, cells, device)
        if options.where is None
        else job.captured(operator, options.where, seqlens, device),
        intermediates=("exact", "relaxed") if options.dtypes == "all" else (options.dtypes,),
        budget=options.budget,
        command=terminal.command_line(),
    )
    if options.dry_run:
        searches = tuple(job.planned(job.listed(request)))
        if options.json:
            terminal.print_json([search.model_dump(mode="json") for search in searches])
        else:
            terminal.out().print(tables.SplitTable(tuning.candidates(searches), rest="--json"))
        return
    watcher = output.TerminalWatcher()

    def write(report: TuneReport) -> None:
        if options.out is not None:
            files.write_text(options.out, report.model_dump_json(indent=1) + "\n")

    def keep(report: TuneReport) -> None:
        """After each search, so that an interruption loses nothing."""
        store.keep(report.environment, report.outcomes[-1:])
        write(report)

    report = job.tune(request, device, watcher, keep)
    write(report)
    found = sum(outcome.find is not None for outcome in report.outcomes)
    if report.environment.gpu is not None and found:
        watcher.say(
            f"{found} of {len(report.outcomes)} searches found a faster configuration: "
            f"{store.file_of(report.environment.gpu)}"
        )
    if options.json:
        print(report.model_dump_json(indent=1))
    else:
        terminal.out().print(tables.render(tuning.compose(report), rest="--json"))
