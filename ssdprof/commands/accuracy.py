"""`ssdprof accuracy`: how exact the implementations were, from a run that is kept."""

from __future__ import annotations

from ssdprof.commands import options, terminal


def accuracy(
    run: options.Run = None,
    dtypes: options.Dtypes = "all",
    states: options.States = "all",
    min_match: options.MinMatch = None,
    max_rms_ratio: options.MaxRmsRatio = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Show how exact each implementation was in a run.

    Exit code 0 says that everything asked of the run, at the precisions shown, was compared and passed.  Exit code 1
    says that a case was inaccurate, not finite or refused, that a gate does not hold, or that the run is partial.
    """
    from ssdprof import runs
    from ssdprof.pipeline.request import parse_states
    from ssdprof.report import accuracy_table
    from ssdprof.runs import document
    from ssdprof.schema import precisions_for
    from ssdprof.schema.outcome import at_precisions
    from ssdprof.settings import gates

    limits = gates.chosen(config, min_match=min_match, max_rms_ratio=max_rms_ratio)
    folder, report = runs.read(run)
    report = report.model_copy(update={"gates": gates.of_accuracy(limits, report.gates)})
    wanted = parse_states(states)
    table = accuracy_table(report, dtypes, wanted, every_state=states != "all")
    shown = at_precisions(report, precisions_for("fp32", dtypes, wanted))
    if as_json:
        print(document.dump(shown))
    else:
        terminal.out().print(table)
        terminal.err().print(f"From {folder}.")
    terminal.exit_by(shown)
