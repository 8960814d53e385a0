"""The command line: the list of commands, and the handling of their errors.

A command's options are a class of `jobs.options`; modules with its functions are imported when it
runs.
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
    OF_MACHINE,
    BadInputError,
    MissingCapabilityError,
    SsdprofError,
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
    """Turns errors that a user can cause into lines on stderr and an exit code.

    of_main: whether this process is the command's own, which may fork.
    """

    of_main = False

    def invoke(self, ctx: Any) -> Any:
        """Run the command.  The first of several ranks with the same error reports it."""
        try:
            terminal.check_working_directory()
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except _USAGE_ERROR as error:
            if _ranks().first_tells():
                ctx.exit(error.exit_code)
            # of pydantic, in typer 0.29
            error.message = error.message.removeprefix("Value error, ")
            raise
        except SsdprofError as error:
            if not _ranks().first_tells():
                _complain(error.message, error.hint)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as interrupt:
            if not _ranks().follows():
                _line("interrupted", str(interrupt) or "Nothing was kept.", "yellow")
            _forget_interrupt()
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            terminal.reader_is_gone()
        except OSError as error:
            expected = _expected(error)
            if expected is None:
                raise
            terminal.drop_output()  # otherwise the last flush would fail again
            _complain(expected.message, expected.hint)
            ctx.exit(expected.exit_code)


def _ranks() -> ModuleType:
    """The module, imported only after an error, because the import is slow."""
    return import_module("ssdprof.store.ranks")


def _expected(error: OSError) -> SsdprofError | None:
    """The message for an error of the operating system that no stage expected; None for a defect in
    ssdprof.
    """
    names = error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Free some space.  Reports that were written earlier are complete."
        return MissingCapabilityError(f"The disk is full: {error}.", hint)
    if names or error.errno in OF_MACHINE:
        verb = "written" if error.errno == errno.EFBIG else "used"
        what = (
            f"{str(error.filename or 'A file or folder')[:80]} cannot be {verb}: {error.strerror}."
        )
        hint = (
            "Check its permissions, its owner and the limits of this shell, or name another place."
        )
        return BadInputError(what, hint) if names else MissingCapabilityError(what, hint)
    return None


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
    return import_module(f"ssdprof.{name}")


# A command, or its options -> functions: the first is called with the options, the next with what
# that one returned.
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
    """The command with these options: calls the functions, each with the result of the one before
    it.
    """

    def command(**values: Any) -> None:
        """Run the command; in a child process if it calls the user's own kernels, which may end
        it.
        """
        asked = kind(**values)
        if hasattr(asked, "command"):
            asked = replace(asked, command=terminal.command_line())
        if Commands.of_main and (names := options.own_kernels(values)) and (ended := child.fork()):
            _module("commands.stored").after_child(
                names, ended, as_json=getattr(asked, "json", False)
            )
            return
        for name in functions:
            module, _, function = name.partition(":")
            arguments = asked if isinstance(asked, tuple) else (asked,)
            asked = getattr(_module(module), function)(*arguments)

    return options.as_command(kind, command)


for _kind, _functions in _COMMANDS.items():
    # Typer keeps the line breaks of the source
    _help = "\n\n".join(
        " ".join(paragraph.split()) for paragraph in (inspect.getdoc(_kind) or "").split("\n\n")
    )
    _name = options.command_name(_kind)
    _first = _help.partition("\n\n")[0]  # a summary that is not cut
    app.command(_name, help=_help, short_help=_first)(
        _command(_kind, _functions) if _functions else _kind
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
    """The console script.  An internal error is one line on the screen; its traceback goes to a
    file.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    Commands.of_main = True
    code: int | str = INTERNAL_ERROR
    try:
        terminal.prepare()
        app(prog_name="ssdprof")
    except SystemExit as ended:
        code = ended.code or 0
    except SsdprofError as error:  # of the streams themselves
        _complain(error.message, error.hint)
        code = error.exit_code
    except Exception as error:
        if failed := failed_import(error):
            _complain(failed.message, failed.hint)
            code = failed.exit_code
        else:
            _line("internal error", f"{type(error).__name__}: {error}", "red")
            _line("hint", _kept_traceback(), "cyan")
    finally:
        Commands.of_main = False
    child.finish(code if isinstance(code, int) else 1)
    sys.exit(code)


def _interrupt(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    """SIGTERM, which a child also gets for Ctrl-C, ends a command as Ctrl-C does: its results are
    marked partial.  A second one ends it immediately.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _kept_traceback() -> str:
    """Write the traceback to a file.  Returns the hint that names the file."""
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
    """CPython notes a KeyboardInterrupt that leaves source run by `exec`, as the interpreter of
    Triton and templates of classes do, and ends the process by the signal even if it was handled.
    The next `exec` drops the note.
    """
    exec("")


def _complain(message: str, hint: str) -> None:
    _line("error", message, "red")
    if hint:
        _line("hint", hint, "cyan")


def _line(label: str, text: str, color: str) -> None:
    from rich.text import Text

    with suppress(OSError):  # if stderr cannot be written, only the exit code reports the error
        terminal.err().print(
            Text.assemble((f"{label}: ", f"bold {color}"), printable(masked(text)))
        )
