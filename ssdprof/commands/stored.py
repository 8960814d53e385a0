"""The commands that show what is stored or known: `ssdprof runs`, `accuracy`, `export`, `case`,
`compare`, `models`, `doctor` and `schemas`.  They import no torch, but for `export --format
flashinfer-bench`.

Here are also the end of `ssdprof record`, which reads the calls that a program has stored, and the
end of a command that ran users' kernels in a child process.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import typer
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from ssdprof import files, operators, settings
from ssdprof.checkpoint.names import FAMILIES, KnownCheckpoint
from ssdprof.commands import output, terminal
from ssdprof.core import pairs
from ssdprof.core.base import precisions_for
from ssdprof.core.case import Case
from ssdprof.core.conditions import parse_change, parse_gate, parse_percent
from ssdprof.core.outcome import ListedRun
from ssdprof.core.report import Report
from ssdprof.core.words import count
from ssdprof.environment.child import Ended
from ssdprof.errors import BadInputError, ExitCode, SsdprofError, nearest
from ssdprof.jobs import documents
from ssdprof.jobs.options import (
    AccuracyOptions,
    CaptureOptions,
    CaseOptions,
    CompareOptions,
    ExportOptions,
    RecordOptions,
)
from ssdprof.jobs.reading import both, parse_implementations, parse_states
from ssdprof.jobs.target import captures_of
from ssdprof.operators.late import lazy
from ssdprof.record.settings import CALLS
from ssdprof.report import brief, comparison, exports, html, markdown, stalls
from ssdprof.report.table import Document, TableRow, table
from ssdprof.report.terminal import SplitTable, render
from ssdprof.store import reports
from ssdprof.store.ranks import FIRST_RANK

if TYPE_CHECKING:
    from ssdprof.environment.toolchain import Check
    from ssdprof.jobs import run as run_job
else:
    run_job = lazy("ssdprof.jobs.run")


# Metrics of the gates in the settings file that `ssdprof accuracy` judges.  It judges gates of its
# options, and of the run, whatever their metric is.
_ACCURACY_METRICS = ("match", "rms")
_COMPARISON_FORMATS = ("markdown", "html", "json")
# environment variables of GitHub Actions, which name files
SUMMARY = "GITHUB_STEP_SUMMARY"
OUTPUT = "GITHUB_OUTPUT"
_SIGNAL_EXIT_CODE = 128  # shells add the number of a signal that ended a program


# --- runs


def runs(folder: Path | None, *, as_json: bool, history: bool = False) -> None:
    """List the runs in a folder.

    folder: None for the folder `runs` of the working directory.
    history: whether to show a table for each set of runs that compared the same cases, in place of
        one table of all runs, unless no run can be read.  JSON is the same with and without it.

    Raises BadInputError for a folder that does not exist, and for a file.
    """
    if folder is not None and not folder.is_dir():
        raise BadInputError(
            f"{folder} is not a folder.",
            "Name a folder that holds runs, or leave it out for runs/.",
        )
    where = folder or reports.RUNS
    stored = reports.listed(where)
    listed = [ListedRun.of(path.name, report) for path, report in stored]
    if as_json:
        terminal.print_json([run.model_dump(mode="json") for run in listed])
        return
    tables = list(brief.history(stored)) if history else []
    tables = tables or [brief.runs(listed)]
    if any(tables):
        for runs_table in tables:
            terminal.out().print(SplitTable(runs_table))
    else:
        hint = "Make one with 'ssdprof run MODEL'."
        if reports.header_of(where).is_file():
            hint = "It is a run itself: name the folder that holds it."
        terminal.say(f"There are no runs in {where}.  {hint}")


# --- after the child process that runs users' kernels


def after_child(names: tuple[str, ...], ended: Ended, *, as_json: bool) -> None:
    """End the command as its child process ended, which ran the user's own functions.

    If the child process gave an exit code, it has printed everything.  Without one it died: then
    the report that it was writing is closed, and the first rank prints it.

    names: of the functions.  ended: what the child process said, and how it ended.

    Raises typer.Exit with the exit code of the child process, or of the report.  If the child
    process died, raises KeyboardInterrupt if a signal had asked the command to stop, else
    BadInputError if nothing had been compared.
    """
    code = ended.last("exit")
    if code is not None:
        raise typer.Exit(int(code))
    reason = f"The process that ran {' and '.join(names)} {ended.ending}"
    rank, _, folder = (ended.last("report") or "").partition(" ")
    report = None
    if folder:
        report = reports.close(Path(folder), int(rank), ended.last("case") or "", reason)
    if ended.stop_signals:
        raise KeyboardInterrupt(f"{reason}.")
    if report is None:
        raise BadInputError(
            f"{reason}.", "Nothing had been compared yet.  Correct your function, or leave it out."
        )
    terminal.say(f"{reason}.")
    if rank != str(FIRST_RANK):
        raise typer.Exit(ExitCode.GATE_FAILED)
    output.finish(Path(folder), report, as_json=as_json)


# --- accuracy


def accuracy(options: AccuracyOptions) -> None:
    """Show the accuracy of a stored run, and judge the run again.

    A gate of the options replaces a gate of the run on the same value, which replaces a gate of the
    settings.  `--impl`, `--dtypes` and `--states` select the cases that are shown and judged.

    Raises BadInputError for an implementation that the run did not compare, and
    MissingCapabilityError for a gate of the options on speed if the run's machine had no GPU.
    """
    of_options = tuple(map(parse_gate, options.gate or ()))
    of_settings = [
        gate for gate in settings.gates(options.config, ()) if gate.metric in _ACCURACY_METRICS
    ]
    folder, report = reports.load(options.run, "run")
    if report.environment.gpu is None:
        texts = options.gate or ()
        of_options = settings.without_speed(
            of_options, texts, "--gate", "the run's machine", terminal.say
        )
    if options.impl is not None:
        names = parse_implementations(options.impl)
        known = dict.fromkeys(case.implementation for case in report.of_calls)
        for name in names:
            if name not in known:
                raise BadInputError(
                    f"Run {report.id} has no implementation {name!r}.", nearest(name, known)
                )
        report = report.restricted(implementations=names)
    gates = (*of_options, *settings.besides(report.conditions, of_options))
    gates = (*gates, *settings.besides(of_settings, gates))
    report = report.changed(conditions=gates)
    # the dtype of the inputs has no effect, because states are named
    wanted = precisions_for("fp32", options.intermediates, parse_states(options.states))
    named_states = options.states != "all"
    accuracy_table = brief.accuracy_table(report, wanted, every_state=named_states)
    shown = report.restricted(precisions=wanted)
    output.show(shown, accuracy_table, as_json=options.json, note=f"From {folder}.")
    output.end(shown)


# --- export


def export(options: ExportOptions) -> None:
    """Write a report in a format.  The default is that of the file's suffix; for stdout, and for a
    file without a suffix, it is Markdown.

    Exit code 1 says that the report did not pass.  The reasons are printed on stderr.
    """
    format_name = _asked_format(options) or documents.format_of(options.output or Path())
    if format_name == "flashinfer-bench":
        _to_workloads(options)
        return
    if format_name == "github":
        if options.output is not None:
            raise BadInputError(
                f"--format github writes to the files that {SUMMARY} and {OUTPUT} name.",
                "Leave -o out.",
            )
        if not (os.environ.get(SUMMARY) and os.environ.get(OUTPUT)):
            raise BadInputError(
                f"--format github is for a step of GitHub Actions, which sets {SUMMARY} and "
                f"{OUTPUT}.",
                "Elsewhere take --format markdown, or name files with these variables.",
            )
    folder, report = reports.load(options.run, *reports.KINDS)
    if format_name == "github":
        _to_github(report)
    else:
        target = _target(options.output, force=options.force)
        text = documents.exported(format_name, folder, report, target)
        _write(text, target, force=options.force, source=f" from {folder}")
    output.end(report, on_screen=False)


def _asked_format(options: ExportOptions | CompareOptions) -> str:
    """The format that the options name; empty if they name none.

    Raises BadInputError if they name two.
    """
    if options.json and options.format not in (None, "json"):
        raise both("--json", f"--format {options.format}")
    return "json" if options.json else options.format or ""


def _to_workloads(options: ExportOptions) -> None:
    """Write captures as workloads for flashinfer-bench, into a folder.

    They are in the folder that the options name, or in the run that they name; without a name, in
    the latest run.
    """
    if options.output is None:
        raise BadInputError(f"--format {options.format} writes a folder.", "Name it: -o DIR.")
    if options.output.is_dir() and any(options.output.iterdir()) and not options.force:
        raise BadInputError(
            f"{options.output} is not empty.", "Name another folder, or give --force to add to it."
        )
    where = options.run or str(reports.load(None, "run")[0])
    captures = captures_of(where)
    if captures is None:
        raise BadInputError(
            f"{where} holds no captures.", "Name a capture's folder, or run with --save-captures."
        )
    from ssdprof.capture.workloads import write_folder  # late, because it imports torch

    try:
        for sentence in write_folder(captures, options.output):
            terminal.say(sentence)
    except OSError as error:
        raise files.unwritable(options.output, error) from error
    terminal.say(f"Wrote {options.output} from {captures}.")


def _to_github(report: Report) -> None:
    """Append the summary and the outputs to the files that GitHub names, and print the annotations
    on stdout.
    """
    summary = Path(os.environ[SUMMARY])
    files.append_text(summary, exports.step_summary(report))
    lines = (f"{name}={value}\n" for name, value in exports.outputs(report).items())
    files.append_text(Path(os.environ[OUTPUT]), "".join(lines))
    for line in exports.workflow_commands(report):
        print(line)


def _target(file: Path | None, *, force: bool) -> Path | None:
    """The file of `-o`; None for stdout, which "-" stands for, too.

    Raises the errors of `files.check_target` if it cannot be written.
    """
    if file is None or str(file) == "-":
        return None
    files.check_target(file, replace=force)
    return file


def _write(text: str, target: Path | None, *, force: bool, source: str = "") -> None:
    """Write a text into a file and say so on stderr, or print it on stdout if there is no file.

    source: the end of what is said, such as " from FOLDER".
    """
    if target is None:
        print(text)
    else:
        files.write_text(target, text.rstrip("\n") + "\n", replace=force)
        terminal.say(f"Wrote {target}{source}.")


# --- case

# Python code that loads the tensors of a failed call and computes the call again.  It prints what
# is known before it calls the kernel, which may end the process.
_SCRIPT = """{title}

import faulthandler, pathlib, sys, torch, ssdprof

print(__doc__)
call = ssdprof.load_call(pathlib.Path(__file__).with_name("{file}"))


def show(title, output):
    for name, actual, expected in zip(("out", "final_states"), output, call.expected):
        error = (actual.double() - expected.double()).abs().nan_to_num(torch.inf)
        error[expected.isnan()] = 0  # padded rows
        place = tuple(map(int, torch.unravel_index(error.argmax(), error.shape)))
        values = f"{{actual[place]:.6g}}, expected {{expected[place]:.6g}}"
        print(f"{{title}}: {{name}}, largest error {{error.max():.3g}} at {{place}}: {{values}}")


if call.actual is None:
    print("kept: no output, because the call did not return one")
else:
    show("kept", call.actual)
tensors = call.inputs.tensors.items()
inputs = ", ".join(f"{{name}} {{tuple(tensor.shape)}} {{tensor.dtype}}" for name, tensor in tensors)
print(f"now: {{call.implementation}} ({{call.precision}}) is called with {{inputs}}")
print("now: if this is the last line, the call ended this process", flush=True)
faulthandler.enable(sys.__stderr__)  # prints the line of Python that a signal such as SIGSEGV ended
show("now", call.run())
"""


def case(options: CaseOptions) -> None:
    """Print the result of a case and the command that runs it again; with `--json`, print the case;
    with `--save`, write the calls that failed.

    Raises BadInputError for a case that the report does not have, for `--save` if no call of it is
    stored, and for the command of a report that `ssdprof.compare` made.
    """
    kinds = () if options.run else reports.KINDS
    folder, report = reports.load(options.run, *kinds)
    by_id = {case.id: case for case in report.cases}
    by_name = {case.name: case for case in report.cases}
    case = by_id.get(options.case) or by_name.get(options.case)
    if case is None:
        raise BadInputError(
            f"Report {report.id} has no case {options.case!r}.", nearest(options.case, by_id)
        )
    command = report.again(case)
    if options.save is not None:
        _save_failure(folder / reports.FAILURES, case, options.save)
    elif options.json:
        print(case.model_dump_json(exclude_defaults=True, indent=1))
    elif not command:
        raise BadInputError(f"No command made report {report.id}.", "Call ssdprof.compare again.")
    else:
        result = ": ".join(filter(None, (case.result, case.why)))
        print(f"{case.id}  {case.name}\n{result}\n{shlex.join(command)}")


def _save_failure(folder: Path, case: Case, target: Path) -> None:
    """Copy the stored tensors of a case's failed calls, and write a script for each call.

    folder: where the report stores such tensors.  target: the folder to write to, which is made.

    Raises BadInputError if the report stores none of this case, and the errors of
    `files.unwritable`.
    """
    stored = sorted(folder.glob(f"{case.id}*.safetensors"))
    if not stored:
        # the files are ID.safetensors, and ID-LAW.safetensors for a broken law
        ids = {file.stem.partition("-")[0] for file in folder.glob("*")}
        raise BadInputError(
            f"The run kept no tensors of {case.name}.",
            "It keeps those of the first call of each implementation that fails, or breaks a law; "
            f"here: {', '.join(sorted(ids)) or 'none'}.",
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in stored:
            shutil.copy(file, target)
    except OSError as error:
        raise files.unwritable(target, error) from error
    for file in stored:
        script = target / f"{file.stem}.py"
        title = repr(f"{case.name}: {case.why or file.stem}")
        files.write_text(script, _SCRIPT.format(title=title, file=file.name), replace=True)
        terminal.say(f"Wrote {target / file.name} and {script}.")


# --- compare


def compare(options: CompareOptions) -> None:
    """Compare two stored reports, and end with exit code 1 if a change is not allowed or nothing
    could be compared.
    """
    asked_format = _asked_format(options)
    stored = settings.load(options.config).compare
    texts = stored.fail_if if options.fail_if is None else options.fail_if
    allowed = tuple(map(parse_change, texts))
    smallest_text = options.smallest_difference
    if smallest_text is None:
        smallest_text = stored.smallest_difference
    smallest = parse_percent("--smallest-difference", smallest_text)
    target = _target(options.output, force=options.force)
    format_name = asked_format or "screen"
    if target and not asked_format:
        format_name = documents.format_of(target, _COMPARISON_FORMATS)
    base_folder, base = reports.load(options.base)
    new_folder, new = reports.load(options.new)
    if new.environment.gpu is None:
        allowed = settings.without_speed(
            allowed, options.fail_if or (), "--fail-if", "NEW's machine", terminal.say
        )
    compared = pairs.compare(
        (options.base, base), (options.new, new), smallest_difference=smallest, allowed=allowed
    )
    before = documents.stalls_of_run(base_folder)
    after = documents.stalls_of_run(new_folder)
    changes = tuple(stalls.changes(before, after))
    document = comparison.compose(compared, changes, all_cases=bool(options.format or target))
    if format_name == "screen":
        terminal.out().print(render(document))
    else:
        _write(_comparison_text(compared, document, format_name), target, force=options.force)
    if compared.passed:
        return
    offences = chain.from_iterable(compared.verdicts.values())
    lines = [f"FAILED: {offence}" for offence in offences]
    if compared.nothing_compared:
        lines.append(f"FAILED: nothing was compared: {compared.nothing_compared}")
    output.fail(lines)


def _comparison_text(compared: pairs.Comparison, document: Document, format_name: str) -> str:
    """A comparison in one of `_COMPARISON_FORMATS`."""
    if format_name == "json":
        return pairs.COMPARISON_DOCUMENT.dump_json(compared, indent=1).decode()
    return html.of_document(document) if format_name == "html" else markdown.render(document)


# --- models


def models(*, as_json: bool) -> None:
    """Print a table of checkpoints for each family."""
    if as_json:
        terminal.print_json([asdict(row) for row in FAMILIES])
        return
    for family in FAMILIES:
        outline = operators.get(family.operator)
        rows = [_checkpoint(checkpoint, outline.words) for checkpoint in family.checkpoints]
        title = f"{family.title}: {outline.title}, model type {family.model_type}"
        note = f"{' or '.join(family.typed)} takes {family.flagship}." if family.typed else ""
        shown = table(title, rows, ("checkpoint", "operator's sizes"), note=note)
        terminal.out().print(SplitTable(shown), "")


def _checkpoint(checkpoint: KnownCheckpoint, template: str) -> TableRow:
    """The row of a checkpoint.

    template: a format string for the operator's sizes, whose fields are keys of `dims`.
    """
    layers = "not known"
    if checkpoint.operator_layers:
        layers = f"{checkpoint.operator_layers} of {checkpoint.layers}"
    return {
        "checkpoint": checkpoint.repo,
        "parameters": f"{checkpoint.parameters / 1e9:g} B",
        "layers": layers,
        "trained on": count(checkpoint.trained_context),
        "operator's sizes": template.format(**checkpoint.dims) if checkpoint.dims else "not known",
    }


# --- doctor


def doctor(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print a row for each requirement, with its hint."""
    if as_json:
        terminal.print_json([check.model_dump() for check in checks])
        return
    rows = [
        {
            "result": check.status,
            "requirement": check.name,
            "detail": "  ".join(filter(None, (check.detail, check.hint))),
        }
        for check in checks
    ]
    shown = table("", rows, ("result", "requirement", "detail"), keys=2, wraps="detail")
    terminal.out().print(SplitTable(shown))


# --- schemas

# Name of a document -> the commands that print it, and its type, with [] after it for a list.  In
# "report-v4", 4 is the version of the format, which a report also has in a field.  Users write
# settings: no command prints them.
SCHEMAS = {
    "report-v4": (
        "run, accuracy, answers, prefill, bench, tune, export",
        "ssdprof.core.report:Report",
    ),
    "case": ("case", "ssdprof.core.case:Case"),
    "dry-run": (
        "run --dry-run, capture --dry-run, answers --dry-run",
        "ssdprof.core.target:DryRun",
    ),
    "capture": ("capture", "ssdprof.commands.measuring:StoredCapture"),
    "comparison": ("compare", "ssdprof.core.pairs:Comparison"),
    "runs": ("runs", "ssdprof.core.outcome:ListedRun[]"),
    "stalls-v4": ("stalls", "ssdprof.core.stalls:StallReport"),
    "models": ("models", "ssdprof.checkpoint.names:Family[]"),
    "settings-v1": ("", "ssdprof.settings:ProjectSettings"),
    "doctor": ("doctor", "ssdprof.environment.toolchain:Check[]"),
}


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of a document.

    name: a key of `SCHEMAS`, with or without its version.  Raises BadInputError for any other.
    """
    versioned = {known.partition("-v")[0]: known for known in SCHEMAS}
    versioned_name = versioned.get(name, name)
    if versioned_name not in SCHEMAS:
        raise BadInputError(f"There is no schema {name!r}.", nearest(name, SCHEMAS))
    _, path = SCHEMAS[versioned_name]
    kind: Any = resolve_name(path.removesuffix("[]"))
    adapter: TypeAdapter[Any] = TypeAdapter(list[kind] if path.endswith("[]") else kind)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **adapter.json_schema(mode="serialization"),
        "title": f"ssdprof {name.partition('-v')[0].replace('-', ' ')}",
    }


def schemas(name: str | None) -> None:
    """Print a schema, or without a name the list of all schemas."""
    if name is not None:
        print(json.dumps(schema(name), indent=1, sort_keys=True))
        return
    for listed_name, (printed_by, _) in SCHEMAS.items():
        print(f"{listed_name:15} {printed_by}".rstrip())


# --- record


def record(options: RecordOptions, code: int, nothing_stored: str) -> None:
    """Make a capture of the calls that a program stored, or print why it stored none, and end as
    the program ended, even if no capture can be made of the calls.

    code: the program's exit code; for a signal that ended it, minus the signal's number.
    nothing_stored: why the program stored no calls; empty if it stored some.
    """
    if nothing_stored:
        terminal.say(nothing_stored)
    else:
        try:
            _capture_calls(options)
        except SsdprofError as error:
            terminal.say(f"{error.message}  {error.hint}  The calls stay in {options.out / CALLS}.")
    if code < 0:
        _end_by_signal(-code)
    raise typer.Exit(code)


def _capture_calls(options: RecordOptions) -> None:
    """Make a capture of the stored calls, and delete them."""
    calls = options.out / CALLS
    os.umask(0o077)  # other users may be allowed to read the folder, but not the captures
    capture_options = CaptureOptions(
        model=str(calls), recorded="safetensors", out=options.out, force=options.force
    )
    name = options.out.resolve().name
    run_job.capture_recording(capture_options, output.TerminalWatcher(), name=name)
    terminal.say(f"Next: ssdprof run {options.out}")
    shutil.rmtree(calls)


def _end_by_signal(number: int) -> None:
    """End this process by the signal that ended the program, without writing a core file."""
    sys.stdout.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # the handlers of SIGKILL and SIGSTOP cannot be set
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise typer.Exit(_SIGNAL_EXIT_CODE + number)  # if the signal does not end a process
