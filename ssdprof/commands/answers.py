"""`ssdprof answers`: how implementations change a model's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ssdprof.commands import options, progress_bars, terminal
from ssdprof.commands.grouped import grouped
from ssdprof.commands.model_options import PlacedModelOptions

if TYPE_CHECKING:
    from ssdprof.jobs.answers_request import AnswersRequest


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """The implementations to compare, the reference, and the limits."""

    dtypes: options.Dtypes = "all"
    states: Annotated[
        str | None,
        typer.Option(
            metavar="D[,D...]",
            help="Dtypes of inter-chunk states: fp32, fp16, bf16, all.",
            show_default="fp32 with exact, 16 bit with relaxed",
        ),
    ] = None
    impl: options.Implementations = "unfused,fused"
    reference: Annotated[
        Literal["auto", "oracle", "unfused"],
        typer.Option(
            help="What answers are compared with: the operator in fp64, or unfused exact.",
            show_default="oracle, unless it takes too long",
        ),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "own", "fp32"],
        typer.Option(
            help="Dtype of the model outside its operators: the checkpoint's own, or fp32, which leaves only the "
            "operators' error.",
            show_default="own on a GPU, fp32 without",
        ),
    ] = "auto"
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer", help="Also replace one layer at a time, to find the layer that causes a difference."
        ),
    ] = False
    generate: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Also compare N greedy tokens after the prompt.", show_default="none"),
    ] = 0
    max_kl: Annotated[
        float | None,
        typer.Option(metavar="X", help="Fail if the mean KL divergence exceeds X nats.", show_default=False),
    ] = None
    min_top1: Annotated[
        str | None,
        typer.Option(
            metavar="P%", help="Fail unless P % of the positions keep their most likely token.", show_default=False
        ),
    ] = None
    max_perplexity_increase: Annotated[
        str | None,
        typer.Option(metavar="P%", help="Fail if the prompt's perplexity rises by more than P %.", show_default=False),
    ] = None

    def request(self) -> AnswersRequest:
        """Raises BadInputError."""
        from ssdprof.jobs.answers_request import AnswersRequest, parse_gate
        from ssdprof.jobs.request import parse_implementations, parse_states
        from ssdprof.core.base import DType, PrecisionRecord, precisions_for

        states = None if self.states is None else parse_states(self.states)

        def precisions(dtype: DType) -> tuple[PrecisionRecord, ...]:
            return precisions_for("bf16" if dtype == "fp32" else dtype, self.dtypes, states)

        return AnswersRequest(
            precisions=precisions,
            implementations=parse_implementations("--impl", self.impl),
            reference=self.reference,
            weights=self.weights,
            per_layer=self.per_layer,
            generate=self.generate,
            gate=parse_gate(self.max_kl, self.min_top1, self.max_perplexity_increase),
        )


@grouped
def answers(
    model: PlacedModelOptions,
    comparison: ComparisonOptions,
    out: options.RunFolder = None,
    no_tuned: options.NoTuned = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Compare a model's next-token predictions between implementations of its operators.

    A prompt of your own (--prompt-file) is the best test.

    Exit code 0 says that every case was compared and within the limits of --max-kl, --min-top1 and
    --max-perplexity-increase, if given.  Exit code 1 says that one was not.
    """
    from ssdprof.jobs.request import Keep
    from ssdprof.jobs.subject import find, refuse_large
    from ssdprof.report import terminal as tables
    from ssdprof.runs import document

    options.refuse_ranks("ssdprof answers")
    request = model.request()
    wanted = comparison.request()
    subject = find(request, whole=True)
    refuse_large(subject)
    from ssdprof.jobs.answers import answers as compare  # imports torch, so after all checks that do not need it
    from ssdprof.jobs.answers import check, loaded_as

    subject = loaded_as(subject, wanted)
    if dry_run:
        from ssdprof.commands.shown_plan import show_plan
        from ssdprof.jobs.dry_run import check_start, plan

        planned = plan(subject, request)
        show_plan(planned, as_json)
        check(subject, wanted)
        check_start(planned, subject, request)
        return
    options.use_tuned(no_tuned)
    keep = Keep(out=out, command=terminal.command_line())
    with terminal.only_data_on_stdout():
        folder, report = compare(request, wanted, keep, progress_bars.TerminalWatcher(), subject)
    if as_json:
        print(document.dump(report))
    else:
        terminal.out().print(tables.render(report))
        terminal.err().print(f"Kept in {folder}.")
    terminal.exit_by(report)
