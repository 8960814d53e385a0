"""`ssdprof accuracy`: the accuracy of the implementations in a stored run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ssdprof.commands import options, terminal

if TYPE_CHECKING:
    from ssdprof.schema import RunReport


def accuracy(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default="the latest run"),
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            "--impl", metavar="I[,I...]", help="Implementations that the run compared.", show_default="all of them"
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The implementation that the run compared them with.",
            show_default="the run's baseline",
        ),
    ] = None,
    dtypes: options.Dtypes = "all",
    states: options.States = "all",
    min_match: options.MinMatch = None,
    max_rms_ratio: options.MaxRmsRatio = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Show the accuracy of each implementation in a run.

    Exit code 0 says that all requested cases at the precisions shown were compared and passed.  Exit code 1 says that
    a case was inaccurate, not finite or refused, that a gate does not hold, or that the run is partial.
    """
    from ssdprof import runs
    from ssdprof.pipeline.request import parse_states
    from ssdprof.report import accuracy_table
    from ssdprof.runs import document
    from ssdprof.schema import precisions_for
    from ssdprof.schema.outcome import at_precisions
    from ssdprof.settings import chosen_gates

    limits = chosen_gates(config, min_match=min_match, max_rms_ratio=max_rms_ratio)
    folder, report = runs.read(run)
    report = _chosen(report, impl, baseline)
    given = {"min_match": limits.min_match or None, "max_rms_ratio": limits.max_rms_ratio}
    of_accuracy = {name: value for name, value in given.items() if value is not None}
    report = report.model_copy(update={"gates": report.gates.model_copy(update=of_accuracy)})
    wanted = parse_states(states)
    table = accuracy_table(report, dtypes, wanted, every_state=states != "all")
    shown = at_precisions(report, precisions_for("fp32", dtypes, wanted))
    if as_json:
        print(document.dump(shown))
    else:
        terminal.out().print(table)
        terminal.err().print(f"From {folder}.")
    terminal.exit_by(shown)


def _chosen(report: RunReport, impl: str | None, baseline: str | None) -> RunReport:
    """The report with the named implementations alone.  Raises BadInputError for names that the run did not compare."""
    from ssdprof.errors import BadInputError, nearest
    from ssdprof.pipeline.request import parse_implementations
    from ssdprof.schema.outcome import of_implementations

    if baseline not in (None, report.baseline):
        raise BadInputError(
            f"Run {report.run_id} compared with {report.baseline}, not with {baseline}.",
            f"Run the model again with --baseline {baseline}.",
        )
    if impl is None:
        return report
    names = parse_implementations("--impl", impl)
    known = dict.fromkeys(case.implementation for case in report.cases)
    for name in names:
        if name not in known:
            raise BadInputError(f"Run {report.run_id} has no implementation {name!r}.", nearest(name, known))
    return of_implementations(report, names)
