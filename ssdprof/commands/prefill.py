"""`ssdprof prefill`: the time to the first token with each implementation of the operators."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdprof.commands import options, progress_bars, terminal
from ssdprof.commands.grouped import grouped
from ssdprof.commands.model_options import ModelOptions

if TYPE_CHECKING:
    from ssdprof.schema.prefill import PrefillReport


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(options.PrecisionOptions):
    """The implementations to time, and the time limits."""

    impl: options.Implementations = "unfused,fused"
    against: Annotated[str, typer.Option(metavar="P[,P...]", help="Additional names for --impl.")] = ""
    baseline: options.Baseline = "unfused"
    first_call: options.FirstCall = 180
    surroundings: Annotated[
        Literal["both", "model", "bundled"],
        typer.Option(help="Kernels of convolution and gated norm: the model's own, the bundled ones, or both in turn."),
    ] = "both"
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Sampling time for each length and each kind of surroundings.")
    ] = 20
    budget: Annotated[
        float | None,
        typer.Option(metavar="S", min=1, help="Leave out what does not fit into this time.", show_default="no limit"),
    ] = None

    def names(self) -> tuple[str, ...]:
        """All implementations to time.  Raises BadInputError."""
        from ssdprof.pipeline.request import parse_implementations

        return parse_implementations("--impl", f"{self.impl},{self.against}" if self.against else self.impl)


@grouped
def prefill(
    model: ModelOptions,
    *,
    batch: Annotated[int, typer.Option(metavar="B", min=1, help="Copies of the prompt in one batch.")] = 1,
    timed: PrefillOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=options.path, help="Write JSON to FILE after every step.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=options.path, help="Write Markdown to FILE.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files.")] = False,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Fail unless fused makes every prefill X times as fast as the baseline does."
        ),
    ] = None,
    config: options.Config = None,
    smallest_difference: options.SmallestDifference = "1%",
    no_tuned: options.NoTuned = False,
    as_json: options.Json = False,
) -> None:
    """Time a whole model up to its first token, with each implementation of its operators.

    Shows the share of each part of the model, and what Amdahl's law predicts from the operator's own times.  Needs an
    NVIDIA GPU.  Exit code 1 says that an implementation failed, or that --min-speedup does not hold.
    """
    from ssdprof import files
    from ssdprof.pipeline.request import parse_percent
    from ssdprof.settings import prefill_gates

    options.refuse_ranks("ssdprof prefill")
    request = model.request()
    names = timed.names()
    smallest = parse_percent("--smallest-difference", smallest_difference)
    limits = prefill_gates(config, min_speedup)
    for file in (out, markdown):
        if file is not None:
            files.check_target(file, replace=force)

    # these import torch, so after all checks that do not need it
    from ssdprof.environment.toolchain import require_gpu
    from ssdprof.operators import named
    from ssdprof.pipeline.lineup import line_up
    from ssdprof.pipeline.prefill import NEEDS_GPU, SURROUNDINGS, PrefillRequest, find, time_prefills
    from ssdprof.runs import prefill_file
    from ssdprof.schema.prefill_rows import broken_gates

    named.refuse_unknown("--impl", names)
    named.refuse_unknown("--baseline", (timed.baseline,))
    require_gpu(*NEEDS_GPU)
    subject = find(request)
    options.use_tuned(no_tuned)
    kept: list[PrefillReport] = []

    def keep(report: PrefillReport) -> None:
        kept[:] = [report]
        if out is not None:
            files.write_text(out, prefill_file.dump(report) + "\n")

    wanted = PrefillRequest(
        model=request,
        batch=batch,
        precision=timed.record(),
        surroundings=SURROUNDINGS if timed.surroundings == "both" else (timed.surroundings,),
        lineup=line_up(names, timed.baseline, subject.layers),
        first_call_s=timed.first_call,
        seconds=timed.seconds,
        budget=timed.budget,
        smallest_difference=smallest,
        gates=limits,
        command=terminal.command_line(),
    )
    try:
        with terminal.only_data_on_stdout():
            report = time_prefills(wanted, subject, progress_bars.TerminalWatcher(), keep)
    except KeyboardInterrupt:
        if not kept:
            raise KeyboardInterrupt("Nothing had been timed, and nothing is kept.") from None
        _show(kept[0], markdown, as_json)
        where = f", and in {out}" if out is not None else ""
        raise KeyboardInterrupt(f"What was timed is printed{where}, marked as partial.") from None
    _show(report, markdown, as_json)
    broken = broken_gates(report)
    if report.prefill.failed or broken:
        terminal.gate_failed(f"GATE FAILED: {one}" for one in broken)


def _show(report: PrefillReport, markdown: Path | None, as_json: bool) -> None:
    from ssdprof import files
    from ssdprof.report import markdown as as_markdown
    from ssdprof.report import prefill_document
    from ssdprof.report import terminal as tables
    from ssdprof.runs import prefill_file

    document = prefill_document.compose(report)
    if markdown is not None:
        files.write_text(markdown, as_markdown.render_document(document))
    if as_json:
        print(prefill_file.dump(report))
    else:
        terminal.out().print(tables.render_document(document, good=prefill_document.GOOD, rest="--markdown FILE"))
