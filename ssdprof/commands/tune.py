"""`ssdprof tune`: a search for faster configurations of the fused kernel on this GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdprof.commands import options, progress_bars, terminal
from ssdprof.commands.grouped import grouped

if TYPE_CHECKING:
    import torch

    from ssdprof.operators.drawing import Cell
    from ssdprof.tuning.records import TuneReport
    from ssdprof.tuning.run import TuneRequest

DEFAULT_SEQ, DEFAULT_BATCH, DEFAULT_DTYPE = "1k,8k,64k", "1", "bf16"


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The inputs for tuning: captured or random ones."""

    operator: options.Operator = "ssd"
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|CAPTURES", help="Tune on captured inputs instead of random ones.", show_default=False
        ),
    ] = None
    shape: options.Shape = None
    seq: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Sequence lengths: 1k,16k.  1k,...,256k doubles at each step.",
            show_default=f"{DEFAULT_SEQ}; all lengths of captures",
        ),
    ] = None
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="B[,B...]", help="Batch sizes, each combined with every length.", show_default=DEFAULT_BATCH
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(metavar="D[,D...]", help="Dtypes of the inputs: bf16, fp16, fp32.", show_default=DEFAULT_DTYPE),
    ] = None
    dtypes: options.Dtypes = "exact"
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1, help="Start no new search after this time.", show_default="no limit"),
    ] = None

    def request(self) -> tuple[TuneRequest, torch.device]:
        """The request, and the GPU to tune.

        Raises BadInputError before torch is imported, and MissingCapabilityError without a GPU.
        """
        from ssdprof import operators
        from ssdprof.bench.grid import expand, lengths, parse_dtypes, parse_tokens
        from ssdprof.bench.shapes import parse_shapes
        from ssdprof.errors import BadInputError

        shapes = operators.shapes(self.operator)
        seqlens: tuple[int, ...] | None = None
        cells: tuple[Cell, ...] = ()
        if self.where is not None:
            if self.shape is not None or self.batch is not None or self.dtype is not None:
                raise BadInputError(
                    "Captured inputs have their own shape, batch and dtype.", "Leave out --shape, --batch and --dtype."
                )
            seqlens = None if self.seq is None else lengths(self.seq)
        else:
            tokens, _ = parse_tokens(self.seq or DEFAULT_SEQ, self.batch or DEFAULT_BATCH, "", "", max_tokens=2**31)
            dtypes = parse_dtypes(self.dtype or DEFAULT_DTYPE)
            cells = expand(parse_shapes(shapes, self.shape), dtypes, tokens, "contiguous")

        from ssdprof.tuning import problems
        from ssdprof.tuning.run import TuneRequest, gpu_to_tune

        device = gpu_to_tune()
        record = operators.get(self.operator)
        request = TuneRequest(
            operator=record,
            sources=problems.drawn(record, cells, device)
            if self.where is None
            else problems.captured(record, self.where, seqlens, device),
            intermediates=("exact", "relaxed") if self.dtypes == "all" else (self.dtypes,),
            budget=self.budget,
            command=terminal.command_line(),
        )
        return request, device


@grouped
def tune(
    wanted: SearchOptions,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=options.path, help="Write all candidates and their times to FILE as JSON."),
    ] = None,
    force: options.Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the candidates, and stop.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the stored results, and stop.")] = False,
    as_json: options.Json = False,
) -> None:
    """Search for faster configurations of the fused kernel on this GPU, and store them for later runs.

    A candidate is compared with the fp64 oracle before it is timed.  run, bench and stalls use the stored
    configurations, and say so, unless --no-tuned is given.
    """
    from ssdprof import files

    options.refuse_ranks("ssdprof tune")
    if clear:
        _clear()
        return
    if out is not None:
        files.check_target(out, replace=force)
    request, device = wanted.request()
    if dry_run:
        _list(request, as_json)
        return
    report = _tune(request, device, out)
    _show(report, as_json)


def _clear() -> None:
    from ssdprof.tuning import store

    gone = store.clear()
    for file in gone:
        terminal.err().print(f"Removed {file}.", soft_wrap=True)
    if not gone:
        terminal.err().print(f"There is nothing in {store.folder()}.", soft_wrap=True)


def _tune(request: TuneRequest, device: torch.device, out: Path | None) -> TuneReport:
    """Search, and store the finds after each search, so that an interruption loses nothing."""
    from ssdprof import files
    from ssdprof.tuning import store
    from ssdprof.tuning.run import tune as search

    watcher = progress_bars.TerminalWatcher()

    def keep(report: TuneReport) -> None:
        store.keep(report.environment, report.outcomes[-1:])
        if out is not None:
            files.write_text(out, report.model_dump_json(indent=1) + "\n")

    report = search(request, device, watcher, keep)
    if out is not None:
        files.write_text(out, report.model_dump_json(indent=1) + "\n")
    found = sum(outcome.find is not None for outcome in report.outcomes)
    if report.environment.gpu is not None and found:
        watcher.say(
            f"{found} of {len(report.outcomes)} searches found a faster configuration: "
            f"{store.file_of(report.environment.gpu)}"
        )
    return report


def _show(report: TuneReport, as_json: bool) -> None:
    from ssdprof.tuning import tables

    if as_json:
        print(report.model_dump_json(indent=1))
    else:
        terminal.out().print(tables.terminal(report))


def _list(request: TuneRequest, as_json: bool) -> None:
    from ssdprof.report.terminal import SplitTable
    from ssdprof.tuning import tables
    from ssdprof.tuning.run import listed

    searches = tuple(tables.planned(listed(request)))
    if as_json:
        terminal.print_json([search.model_dump(mode="json") for search in searches])
    else:
        terminal.out().print(SplitTable(tables.dry(searches), rest="--json"))
