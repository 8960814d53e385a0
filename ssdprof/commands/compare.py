"""`ssdprof compare`: the changes between two runs, benches or prefill results."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ssdprof.commands import options, terminal

_HELP = "A run's folder or name, its report as JSON, or a result of bench --out or prefill --out."


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help=_HELP, show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same, for the new result.", show_default=False)],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:LIMIT",
            help="Fail if a case is worse: slower:3%, slower-call:3%, match:-0.1, match@1e-2:-0.1, rms:5%, memory:5%, "
            "launches:0, kl:0.001, top1:-0.1, perplexity:1%.  Repeatable.",
        ),
    ] = None,
    smallest_difference: Annotated[
        str | None,
        typer.Option(
            metavar="P%",
            help="Report a case as faster or slower only if its 95 % interval lies beyond this difference.",
            show_default="1%",
        ),
    ] = None,
    config: options.Config = None,
    format: Annotated[
        Literal["markdown", "json"] | None, typer.Option(help="What to write.", show_default="a report")
    ] = None,
    output: options.Output = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Compare two runs, two benches or two prefill results, case by case.

    Absolute times are compared only between runs with the same GPU, driver and Triton; speedups over the baseline are
    compared in any case.  Exit code 1 says that a case violates --fail-if, that --fail-if applies to no case, or that
    nothing was compared.
    """
    from ssdprof import files, settings
    from ssdprof.compare import compare as comparing
    from ssdprof.compare import conditions
    from ssdprof.compare.read import read
    from ssdprof.errors import BadInputError
    from ssdprof.pipeline.request import parse_percent
    from ssdprof.report import comparison, markdown
    from ssdprof.report import terminal as tables

    if as_json and format == "markdown":
        raise BadInputError("--json and --format markdown cannot be combined.", "Give one of them.")
    stored = settings.load(config).compare
    asked = [conditions.parse(text) for text in (stored.fail_if if fail_if is None else fail_if)]
    smallest = parse_percent("--smallest-difference", smallest_difference or stored.smallest_difference or "1%")
    target = options.file_to_write(output, force=force)
    found = comparing.compare(read(base), read(new), smallest_difference=smallest, fail_if=asked)
    document = comparison.compose(found)
    text = comparing.dump(found) if as_json or format == "json" else markdown.render_document(document)
    if target is not None:
        files.write_text(target, text.rstrip("\n") + "\n", replace=force)
        terminal.err().print(f"Wrote {target}.")
    elif as_json or format:
        print(text)
    else:
        terminal.out().print(tables.render_document(document, good=comparison.GOOD, rest="--format markdown"))
    if not found.passed:
        offences = [str(offence) for condition in found.conditions for offence in condition.offenders]
        if found.nothing_compared:
            offences.append(f"nothing was compared: {found.nothing_compared}")
        terminal.gate_failed(f"FAILED: {offence}" for offence in offences)
