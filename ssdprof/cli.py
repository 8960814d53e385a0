"""The command line: the list of commands, and the handling of their errors.

The options of a command are a class of `jobs.options`.  The modules that it needs are imported when
it runs.
"""

import errno
import inspect
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ssdprof import __version__
from ssdprof.commands import terminal
from ssdprof.environment import child
from ssdprof.errors import (
    MACHINE_ERRNOS,
    BadInputError,
    MissingCapabilityError,
    SsdprofError,
    explain_option,
    failed_import,
    masked,
    printable,
)
from ssdprof.jobs import options

INTERNAL_ERROR = 70  # differs from the exit code of a failed gate
INTERRUPTED = 130  # Ctrl-C, as shells count it, and SIGTERM
_USAGE_ERROR: Any = typer.BadParameter.__base__  # the class of click, unknown options included

HELP = (
    "Measure what a fused kernel would do to your Mamba-2, Gated-DeltaNet or Kimi Delta "
    "Attention model on your GPU."
)
EPILOG = (
    "Exit codes: 0 done, and everything passed; 1 a case or a gate failed; 2 wrong usage or bad "
    "input; 3 this machine lacks something; 4 the model is not available; 130 interrupted."
)


class Commands(TyperGroup):
    """The group of all commands.  It turns errors that a user can cause into lines on stderr and an
    exit code.

    of_main: whether `main` runs in this process, which then may fork.
    """

    of_main = False

    def invoke(self, ctx: Any) -> Any:
        """Run a command.  Returns its result, or ends with an exit code if it fails.

        If all ranks have the same error, only the first one reports it.  Errors of usage, which
        click reports, and errors that are a defect in ssdprof are raised.
        """
        try:
            terminal.check_working_directory()
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except _USAGE_ERROR as error:
            if _ranks().first_tells():
                ctx.exit(error.exit_code)
            explain_option(error)
            raise
        except SsdprofError as error:
            if not _ranks().first_tells():
                _complain(error)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as interrupt:
            if not _ranks().follows():
                _line("interrupted", str(interrupt) or "Nothing more was kept.", "yellow")
            _forget_interrupt()
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            terminal.end_without_reader()
        except OSError as error:
            expected = _expected(error)
            if expected is None:
                raise
            terminal.drop_output()  # otherwise the last flush would fail again
            _complain(expected)
            ctx.exit(expected.exit_code)


def _ranks() -> ModuleType:
    """The module of ranks.  It is imported after an error only, because the import is slow."""
    return import_module("ssdprof.store.ranks")


def _expected(error: OSError) -> SsdprofError | None:
    """The error that is shown in place of an OSError that nothing has handled; None if the OSError
    is a defect in ssdprof.
    """
    is_of_path = error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free some space.  Reports that were written earlier are complete."
        return MissingCapabilityError(f"The disk is full: {error}.", hint)
    if not is_of_path and error.errno not in MACHINE_ERRNOS:
        return None
    verb = "written" if error.errno == errno.EFBIG else "used"
    subject = str(error.filename or "A file or folder")[:80]
    message = f"{subject} cannot be {verb}: {error.strerror}."
    hint = "Check its permissions, its owner and the limits of this shell, or name another place."
    return BadInputError(message, hint) if is_of_path else MissingCapabilityError(message, hint)


app = typer.Typer(
    cls=Commands,
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its columns break words
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="A folder of runs.", show_default="runs", parser=options.path
        ),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="A line for each commit, with its times.")
    ] = False,
    json: options.Json = False,
) -> None:
    """List the runs, newest first: time, model, tokens, GPU and verdict."""
    _module("commands.stored").runs(folder, as_json=json, history=history)


def models(json: options.Json = False) -> None:
    """List the supported model families and their published checkpoints.

    Other checkpoints of a listed model type work too.
    """
    _module("commands.stored").models(as_json=json)


def doctor(json: options.Json = False) -> None:
    """Check what this machine can do, and name what is missing.

    Without an NVIDIA GPU, run and answers compare outputs in Triton's interpreter, and nothing is
    timed.
    """
    checks = _module("jobs.doctor").doctor()
    _module("commands.stored").doctor(checks, as_json=json)


def schemas(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which schema; without it, list them.")
    ] = None,
) -> None:
    """Print the JSON schema of what a command prints with --json."""
    _module("commands.stored").schemas(name)


def _module(name: str) -> ModuleType:
    """A module of ssdprof, imported when it is needed."""
    return import_module(f"ssdprof.{name}")


# The options of a command -> its functions, as "module:function".  The first one is called with the
# options, and each of the others with the result of the one before it, or with several arguments if
# that is a tuple.  A key without functions is no class of options: it is the command itself, a
# function.
_COMMANDS: dict[Any, tuple[str, ...]] = {
    options.RunOptions: ("jobs.target:run", "commands.measuring:run"),
    runs: (),
    options.CaptureOptions: ("jobs.target:capture", "commands.measuring:capture"),
    options.RecordOptions: ("jobs.record:record", "commands.stored:record"),
    options.AccuracyOptions: ("commands.stored:accuracy",),
    options.AnswersOptions: ("jobs.target:answers", "commands.measuring:answers"),
    options.ExportOptions: ("commands.stored:export",),
    options.CaseOptions: ("commands.stored:case",),
    options.CompareOptions: ("commands.stored:compare",),
    options.PrefillOptions: ("jobs.target:prefill", "commands.measuring:prefill"),
    options.StallsOptions: ("jobs.target:stalls", "commands.measuring:stalls"),
    options.BenchOptions: ("jobs.target:bench", "commands.measuring:bench"),
    options.TuneOptions: ("jobs.target:tune", "commands.measuring:tune"),
    models: (),
    doctor: (),
    schemas: (),
}


def _command(kind: type, functions: tuple[str, ...]) -> Callable[..., None]:
    """The command with these options, which calls the functions: see `_COMMANDS`."""

    def command(**values: Any) -> None:
        """Run the command.

        If it calls the user's own kernels, it runs in a child process, because they may end the
        process.  Only a process that was started by `main` forks.
        """
        command_options = kind(**values)
        if hasattr(command_options, "command"):
            command_options = replace(command_options, command=terminal.command_line())
        names = options.own_kernels(values)
        # `fork` returns None in the child, which goes on
        if Commands.of_main and names and (ended := child.fork()):
            _module("commands.stored").after_child(
                names, ended, as_json=getattr(command_options, "json", False)
            )
            return
        arguments = (command_options,)
        for name in functions:
            module, _, function = name.partition(":")
            result = getattr(_module(module), function)(*arguments)
            arguments = result if isinstance(result, tuple) else (result,)

    return options.as_command(kind, command)


for _declaration, _functions in _COMMANDS.items():
    # Typer would keep the line breaks of the source
    _paragraphs = (inspect.getdoc(_declaration) or "").split("\n\n")
    _help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)
    _name = options.command_name(_declaration)
    _summary = _help.partition("\n\n")[0]  # Typer would cut it
    app.command(_name, help=_help, short_help=_summary)(
        _command(_declaration, _functions) if _functions else _declaration
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ssdprof {__version__}")
        raise typer.Exit


@app.callback()
def ssdprof(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Shown as the program's help through `HELP`."""


def main() -> None:
    """The console script.

    An internal error is shown in one line, and its traceback is written into a file.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    Commands.of_main = True
    code: int | str = INTERNAL_ERROR
    try:
        terminal.prepare()
        app(prog_name="ssdprof")
    except SystemExit as ended:
        code = ended.code or 0
    except SsdprofError as error:  # raised by `terminal.prepare`
        _complain(error)
        code = error.exit_code
    except Exception as error:
        if failed := failed_import(error):
            _complain(failed)
            code = failed.exit_code
        else:
            _line("internal error", f"{type(error).__name__}: {error}", "red")
            _line("hint", _store_traceback(), "cyan")
    finally:
        Commands.of_main = False
    child.finish(code if isinstance(code, int) else 1)
    sys.exit(code)


def _interrupt(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    """A handler of SIGTERM, which ends a command as Ctrl-C does, with its results marked partial.

    A second SIGTERM ends the process immediately.  After Ctrl-C, too, the child process that runs a
    user's kernels gets SIGTERM: from its parent (`child.fork`).
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _store_traceback() -> str:
    """Write the traceback of the current exception into a file.  Returns a hint that names it."""
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="ssdprof-",
            suffix=".log",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as log:
            log.write(masked(traceback.format_exc()))
    except OSError as error:
        return f"The traceback could not be kept: {error}."
    return f"The traceback is in {log.name}; please report it."


def _forget_interrupt() -> None:
    """Let this process end normally after a KeyboardInterrupt that was handled.

    CPython remembers a KeyboardInterrupt that was raised in code run by `exec`, as in Triton's
    interpreter and in templates of classes, and ends the process by the signal even if the
    exception was handled.  The next `exec` resets this.
    """
    exec("")


def _complain(error: SsdprofError) -> None:
    """Print an error, and its hint if it has one, on stderr."""
    _line("error", error.message, "red")
    if error.hint:
        _line("hint", error.hint, "cyan")


def _line(label: str, text: str, color: str) -> None:
    """Print a line on stderr.  If stderr cannot be written, only the exit code reports an error."""
    from rich.text import Text  # late: few commands print an error

    with suppress(OSError):
        terminal.err().print(
            Text.assemble((f"{label}: ", f"bold {color}"), printable(masked(text)))
        )
