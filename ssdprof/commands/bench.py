"""`ssdprof bench`: the kernels alone, on random inputs of a model's shape, compared with other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdprof.commands import options, progress_bars, terminal
from ssdprof.commands.gate_options import GateOptions
from ssdprof.commands.grouped import grouped

if TYPE_CHECKING:
    from ssdprof.bench.run import BenchRequest
    from ssdprof.bench.schema import BenchReport
    from ssdprof.environment.ranks import Ranks
    from ssdprof.operators.drawing import Cell, InputDType, Tokens
    from ssdprof.progress import Watcher
    from ssdprof.schema import PrecisionRecord

FIRST_CALL = 180.0  # a library that tunes itself compiles for minutes


@dataclass(frozen=True, kw_only=True)
class DrawnOptions:
    """The operator, and its random inputs."""

    operator: options.Operator
    shape: options.Shape = None
    seq: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Sequence lengths: 1k,16k.  1k,...,256k doubles at each step.")
    ] = "1k,4k,16k,64k"
    batch: Annotated[str, typer.Option(metavar="B[,B...]", help="Batch sizes, each combined with every length.")] = "1"
    cells: Annotated[str, typer.Option(metavar="BxN[,...]", help="Additional pairs of batch x length: 8x4k,32x1k.")] = (
        ""
    )
    packed: Annotated[
        str, typer.Option(metavar="BxN-M[,...]", help="Packed sequences of random lengths: 64x1k-4k.")
    ] = ""
    max_tokens: Annotated[
        str, typer.Option(metavar="N", help="Leave out pairs of --batch and --seq with more tokens.")
    ] = "256k"
    dtype: Annotated[str, typer.Option(metavar="D[,D...]", help="Dtypes of the inputs: bf16, fp16, fp32.")] = "bf16"
    layout: Annotated[
        Literal["contiguous", "views"],
        typer.Option(help="Memory layout of the inputs.  views: slices of wide tensors, as in a model."),
    ] = "contiguous"
    draw: Annotated[
        str, typer.Option(metavar="W[,W...]", help="Draw the inputs in another way: normalised, quarter-ungated (GDN).")
    ] = ""

    def grid(self) -> tuple[tuple[Cell, ...], tuple[Tokens, ...]]:
        """The cells without --draw, which needs torch, and the cells that --max-tokens leaves out.

        Raises BadInputError.
        """
        from ssdprof import operators
        from ssdprof.bench.grid import expand, parse_dtypes, parse_tokens
        from ssdprof.bench.shapes import parse_shapes
        from ssdprof.capture.prompt import parse_seq

        most = parse_seq(self.max_tokens)
        tokens, too_large = parse_tokens(self.seq, self.batch, self.cells, self.packed, max_tokens=most)
        shapes = parse_shapes(operators.shapes(self.operator), self.shape)
        return expand(shapes, parse_dtypes(self.dtype), tokens, self.layout), too_large


@dataclass(frozen=True, kw_only=True)
class ContenderOptions:
    """The implementations, and what they are compared with."""

    dtypes: options.Dtypes = "exact"
    states: options.UsualStates = None
    impl: options.Implementations = "unfused,fused"
    against: Annotated[
        str, typer.Option(metavar="P[,P...]", help="Additional names for --impl; the baseline first.")
    ] = ""
    published: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The same as --against published=DIR.", exists=True, file_okay=False),
    ] = None
    also: Annotated[
        str,
        typer.Option(
            metavar="I[,I...]",
            help="Kernels that are not run by default: fused_portable (GDN), recurrent_in_place (SSD).",
        ),
    ] = ""
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The implementation that speedups are relative to.",
            show_default="the first of --against, else unfused",
        ),
    ] = None
    match_with: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The implementation that outputs are compared with, element by element.",
            show_default="unfused",
        ),
    ] = None
    chunk_size: Annotated[
        str,
        typer.Option(
            metavar="Q[,Q...]",
            help="Chunk sizes from which implementations that do not choose their own take the fastest.",
            show_default="128,256 for SSD",
        ),
    ] = "best"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of --against; --published gives one of them its checkout."""
        names = [word.strip() for word in self.against.split(",") if word.strip()]
        checkout = [] if self.published is None else [f"published={self.published}"]
        return tuple(dict.fromkeys([*(name for name in names if not checkout or name != "published"), *checkout]))

    def names(self) -> tuple[str, ...]:
        """All implementations, other libraries first.  Raises BadInputError."""
        from ssdprof.pipeline.request import parse_implementations

        further = parse_implementations("--also", self.also) if self.also else ()
        return (*self.libraries, *parse_implementations("--impl", self.impl), *further)

    def precisions(self) -> Callable[[InputDType], tuple[PrecisionRecord, ...]]:
        """The precisions of our implementations for inputs of a dtype.  Raises BadInputError."""
        from ssdprof.pipeline.request import parse_states
        from ssdprof.schema import precisions_for

        states = None if self.states is None else parse_states(self.states)
        return lambda dtype: precisions_for(dtype, self.dtypes, states)


@dataclass(frozen=True, kw_only=True)
class BenchTimingOptions(options.TimingOptions):
    """Timing options, how much is checked, and the time limits."""

    check: Annotated[
        Literal["full", "short"],
        typer.Option(help="Compare outputs on all tokens, or on one sequence of 4,096 tokens."),
    ] = "full"
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1, help="Limit of the wall-clock time.", show_default="no limit"),
    ] = None
    first_call: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, help="Longest first call of an implementation, compilation included."),
    ] = FIRST_CALL


@grouped
def bench(
    drawn: DrawnOptions,
    contenders: ContenderOptions,
    timing: BenchTimingOptions,
    gates: GateOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=options.path, help="Write JSON to FILE after every cell.")
    ] = None,
    force: options.Force = False,
    no_tuned: options.NoTuned = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown on stdout.")] = False,
    as_json: options.Json = False,
) -> None:
    """Time the fused and the unfused kernels on random inputs, and compare them with other libraries.

    Outputs are compared with the fp64 oracle first.  Exit code 1 says that one of ssdprof's kernels was wrong or
    refused a case, that nothing was compared, or that a gate does not hold: gates judge the fused kernel.
    """
    from ssdprof import files, operators
    from ssdprof.bench.grid import parse_chunk_sizes
    from ssdprof.errors import BadInputError

    cells, too_large = drawn.grid()
    sizes = parse_chunk_sizes(contenders.chunk_size)
    precisions = contenders.precisions()
    smallest = timing.smallest()
    names = contenders.names()
    limits = gates.chosen()
    if out is not None:
        files.check_target(out, replace=force)

    # these import torch, so after all checks that do not need it
    import torch

    from ssdprof.bench import gate, render
    from ssdprof.bench.contenders import ways
    from ssdprof.bench.run import NEEDS_GPU, BenchRequest
    from ssdprof.bench.schema import dump
    from ssdprof.environment.toolchain import require_gpu
    from ssdprof.operators.named import Roster
    from ssdprof.progress import Unwatched

    record = operators.get(drawn.operator)
    if sizes and not record.drawing.chunk_sizes:
        raise BadInputError(
            f"--chunk-size does not apply to {record.name}: its kernels choose their own.", "Leave it out."
        )
    roster = Roster(torch.device("cuda"))
    named = [roster.get(record, name) for name in names]
    over = roster.get(record, contenders.baseline or next(iter(contenders.libraries), record.baseline))
    matched = roster.get(record, contenders.match_with) if contenders.match_with else None
    if matched and matched.name != record.baseline and limits.min_match:
        raise BadInputError(
            f"--min-match compares with {record.baseline}, but --match-with names {matched.name}.",
            "Leave one of them out.",
        )
    way = ways(record, drawn.draw)
    require_gpu(*NEEDS_GPU)
    _ = over.present, matched and matched.present
    ranks = options.join_ranks({})
    options.use_tuned(no_tuned)
    request = BenchRequest(
        operator=record,
        cells=tuple(replace(cell, drawn=way) for cell in cells),
        precisions=precisions,
        named=tuple({one.name: one for one in (*named, over, matched) if one}.values()),
        baseline=over.name,
        match_with=matched.name if matched else record.baseline,
        chunk_sizes=sizes or record.drawing.chunk_sizes,
        check=timing.check,
        budget=timing.budget,
        first_call=timing.first_call,
        smallest_difference=smallest,
        warm=timing.warm,
        gates=limits,
        command=terminal.command_line(),
    )
    reports = ranks is None or ranks.first  # the first rank reports for all
    watcher: Watcher = progress_bars.TerminalWatcher() if reports else Unwatched()
    for one in too_large:
        watcher.say(f"{one} is left out: it has more than {drawn.max_tokens} tokens.")
    report = _measured(request, watcher, ranks, out)
    if not reports:
        return
    if as_json:
        print(dump(report))
    elif markdown:
        print(render.as_markdown(report), end="")
    else:
        terminal.out().print(render.terminal(report))
    if broken := gate.wrong(report) + gate.failed(report):
        terminal.gate_failed(broken)


def _measured(request: BenchRequest, watcher: Watcher, ranks: Ranks | None, out: Path | None) -> BenchReport:
    """The report, written to `out` after every cell.  If the bench ends early, the error names the cells in `out`."""
    from ssdprof import files
    from ssdprof.bench.run import bench as measure
    from ssdprof.bench.schema import dump
    from ssdprof.errors import MissingCapabilityError

    cells_kept = 0

    def keep(report: BenchReport) -> None:
        nonlocal cells_kept
        if out is not None:
            files.write_text(out, dump(report) + "\n")
            cells_kept = len(report.cells)

    try:
        with terminal.only_data_on_stdout():
            return measure(request, watcher, keep, ranks)
    except (KeyboardInterrupt, MissingCapabilityError) as end:
        if not cells_kept:
            raise
        kept = f"Kept in {out}, marked as partial: {cells_kept} of {len(request.cells)} cells."
        if isinstance(end, KeyboardInterrupt):
            raise KeyboardInterrupt(kept) from None
        raise MissingCapabilityError(end.message, f"{end.hint}  {kept}") from None
