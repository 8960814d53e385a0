"""`ssdprof bench`, `tune` and `stalls`: they run the kernels alone.  Their options were checked before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import typer

from ssdprof import files, operators
from ssdprof.commands import output, terminal
from ssdprof.commands.options import BenchOptions, StallsOptions, TuneOptions
from ssdprof.commands.requests import BenchWords
from ssdprof.core.base import PrecisionRecord
from ssdprof.core.tuned import TuneReport
from ssdprof.environment.toolchain import require_gpu
from ssdprof.errors import BadInputError, ExitCode
from ssdprof.jobs import bench as bench_job
from ssdprof.jobs import stall_files
from ssdprof.jobs import stalls as stalls_job
from ssdprof.jobs import tune as tune_job
from ssdprof.operators.generate import Cell
from ssdprof.operators.implementations import ImplementationCache, refuse_two_checkouts, refuse_unknown, required
from ssdprof.operators.operator import Operator
from ssdprof.progress import Unwatched, Watcher
from ssdprof.report import stalls as stall_report
from ssdprof.report import tuning
from ssdprof.report.document import compose
from ssdprof.report.terminal import SplitTable, render
from ssdprof.store import tuned
from ssdprof.store.ranks import join


def bench(options: BenchOptions, asked: BenchWords) -> None:
    operator = operators.get(options.operator)
    if asked.chunk_sizes and not operator.generated.chunk_sizes:
        raise BadInputError(
            f"--chunk-size does not apply to {operator.name}: its kernels choose their own.", "Leave it out."
        )
    cache = ImplementationCache(torch.device("cuda"))
    found = [cache.get(operator, name) for name in asked.names]
    over = cache.get(operator, options.baseline or next(iter(asked.libraries), operator.baseline))
    matched = cache.get(operator, options.match_with or operator.baseline)
    if matched.name != operator.baseline and any(one.metric == "match" for one in asked.conditions):
        raise BadInputError(
            f"--min-match compares with {operator.baseline}, but --match-with names {matched.name}.",
            "Leave one of them out.",
        )
    drawn = ways(operator, options.draw)
    require_gpu(*bench_job.NEEDS_GPU)
    compared = {one.name: one for one in (*found, required(over), *([required(matched)] if options.match_with else []))}
    ranks = join()
    reports = ranks is None or ranks.first  # the first rank reports for all
    watcher: Watcher = output.TerminalWatcher() if reports else Unwatched()
    if not options.no_tuned:
        tuned.use_saved(watcher.say)
    request = bench_job.BenchRequest(
        operator=operator,
        cells=tuple(replace(cell, drawn=drawn) for cell in asked.cells),
        precisions=asked.precisions,
        implementations=tuple(compared.values()),
        baseline=over.name,
        match_with=matched.name,
        chunk_sizes=asked.chunk_sizes or operator.generated.chunk_sizes,
        check=options.check,
        budget=options.budget,
        first_call=options.first_call,
        smallest_difference=asked.smallest_difference,
        conditions=asked.conditions,
        out=options.out,
        command=terminal.command_line(),
    )
    for one in asked.too_large:
        watcher.say(f"{one} is left out: it has more than {options.max_tokens} tokens.")
    with terminal.only_data_on_stdout():
        folder, report = bench_job.bench(request, watcher, ranks)
    if reports:
        output.finish(report, render(compose(report)), as_json=options.json, note=output.kept(folder))


def ways(operator: Operator[Any], words: str) -> tuple[str, ...]:
    """ "normalised,quarter-ungated" -> the words, each once, in the operator's order.  Raises BadInputError."""
    known = operator.generated.ways
    wanted = {word.strip() for word in words.split(",") if word.strip()}
    for word in sorted(wanted - known.keys()):
        meanings = ", ".join(f"{name} ({meaning})" for name, meaning in known.items())
        raise BadInputError(f"--draw does not know {word!r}.", f"For {operator.name} there are: {meanings or 'none'}.")
    return tuple(word for word in known if word in wanted)


def tune(options: TuneOptions, asked: tuple[tuple[Cell, ...], tuple[int, ...] | None]) -> None:
    if options.clear:
        gone = [f"Removed {file}." for file in tuned.clear()] or [f"There is nothing in {tuned.folder()}."]
        terminal.say("\n".join(gone))
        return
    cells, seqlens = asked
    device = tune_job.gpu_to_tune()
    operator = operators.get(options.operator)
    request = tune_job.TuneRequest(
        operator=operator,
        sources=tune_job.drawn(operator, cells, device)
        if options.where is None
        else tune_job.captured(operator, options.where, seqlens, device),
        intermediates=("exact", "relaxed") if options.dtypes == "all" else (options.dtypes,),
        budget=options.budget,
        command=terminal.command_line(),
    )
    if options.dry_run:
        searches = tuple(tune_job.planned(tune_job.listed(request)))
        if options.json:
            terminal.print_json([search.model_dump(mode="json") for search in searches])
        elif table := tuning.candidates(searches):
            terminal.out().print(SplitTable(table, rest="--json"))
        return
    watcher = output.TerminalWatcher()

    def write(report: TuneReport) -> None:
        if options.out is not None:
            files.write_text(options.out, report.model_dump_json(indent=1) + "\n")

    def keep(report: TuneReport) -> None:
        """After each search, so that an interruption loses nothing."""
        tuned.keep(report.environment, report.outcomes[-1:])
        write(report)

    report = tune_job.tune(request, device, watcher, keep)
    write(report)
    found = sum(outcome.find is not None for outcome in report.outcomes)
    if report.environment.gpu is not None and found:
        file = tuned.file_of(report.environment.gpu)
        watcher.say(f"{found} of {len(report.outcomes)} searches found a faster configuration: {file}")
    if options.json:
        print(report.model_dump_json(indent=1))
    else:
        terminal.out().print(render(tuning.compose(report), rest="--json"))


def stalls(options: StallsOptions, asked: tuple[tuple[str, ...], int | None]) -> None:
    implementations, seqlen = asked
    refuse_two_checkouts(implementations)
    refuse_unknown("--impl", implementations, besides=("reference",))
    folder = None
    if options.files:
        report = stalls_job.from_files(options.files)
    else:
        watcher = output.TerminalWatcher()
        request = stalls_job.StallRequest(
            where=options.where,
            layer=options.layer,
            seqlen=seqlen,
            implementations=implementations,
            precision=PrecisionRecord(intermediates=options.dtypes, state_dtype=options.states),
            timeout_s=options.timeout,
            out=options.out,
            overwrite=options.force,
            tuned=None if options.no_tuned else tuned.use_saved(watcher.say),
            command=terminal.command_line(),
        )
        folder, report = stalls_job.profile(request, watcher)
    if options.markdown is not None:
        stall_files.write_markdown(options.markdown, report, replace=options.force)
    if options.json:
        print(stall_files.dump(report))
    else:
        terminal.out().print(render(stall_report.compose(report), rest="--markdown FILE"))
    for written in (folder, options.markdown):
        if written is not None:
            terminal.say(output.kept(written))
    if report.missing:
        raise typer.Exit(ExitCode.MISSING_CAPABILITY)
