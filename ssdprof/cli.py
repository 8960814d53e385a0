"""The command line: which commands there are, and how every one of them ends."""

from __future__ import annotations

import errno
import sys
import tempfile
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ssdprof import __version__
from ssdprof.commands import accuracy, bench, capture, doctor, export, models, run, stalls, terminal, tune
from ssdprof.errors import ExitCode, SsdprofError

INTERNAL_ERROR = 70  # a mistake of ssdprof, never to be taken for a failed gate
INTERRUPTED = 130  # Ctrl-C, as shells count it

HELP = "What a fused kernel would do to your Mamba-2 or Gated-DeltaNet model on your GPU."
EPILOG = (
    "Exit codes: 0 everything asked for was done and passed; 1 a gate failed; 2 wrong usage or bad input; 3 this machine lacks something; "
    "4 the model cannot be had."
)


class Commands(TyperGroup):
    """Turns what a user can cause into lines on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except SsdprofError as error:
            _complain(error.message, error.hint)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as interrupt:
            _line("interrupted", str(interrupt) or "Nothing was kept.", "yellow")
            _forget_interrupt()
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            terminal.reader_is_gone()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _complain(f"The disk is full: {error}.", "Free some space.  Reports that were written before are whole.")
            ctx.exit(ExitCode.MISSING_CAPABILITY)


app = typer.Typer(
    cls=Commands,
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command()(capture.capture)
app.command()(accuracy.accuracy)
app.command()(export.export)
app.command()(stalls.stalls)
app.command()(bench.bench)
app.command()(tune.tune)
app.command()(models.models)
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ssdprof {__version__}")
        raise typer.Exit


@app.callback()
def ssdprof(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Shown as the program's help through `HELP`."""


def main() -> None:
    """The console script.  What no user can cause is short on the screen and whole in a file."""
    try:
        app(prog_name="ssdprof")
    except Exception as error:
        with tempfile.NamedTemporaryFile("w", prefix="ssdprof-", suffix=".log", delete=False) as log:
            traceback.print_exc(file=log)
        _complain(
            f"A mistake of ssdprof, not yours: {type(error).__name__}: {error}",
            f"The traceback is in {log.name}; please report it.",
        )
        sys.exit(INTERNAL_ERROR)


def _forget_interrupt() -> None:
    """CPython notes a KeyboardInterrupt that leaves source run by `exec`, as the interpreter of Triton and templates of
    classes do, and ends the process by the signal even if it was handled.  The next `exec` drops the note."""
    exec("")


def _complain(message: str, hint: str) -> None:
    _line("error", message, "red")
    if hint:
        _line("hint", hint, "cyan")


def _line(label: str, text: str, color: str) -> None:
    from rich.text import Text

    terminal.err().print(Text.assemble((f"{label}: ", f"bold {color}"), " ".join(text.split())))
