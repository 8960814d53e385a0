"""`ssdprof record`, after the program has ended."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from contextlib import suppress

import typer

from ssdprof.commands import terminal
from ssdprof.commands.output import TerminalWatcher
from ssdprof.core.words import plural
from ssdprof.errors import SsdprofError
from ssdprof.jobs.options import CaptureOptions, RecordOptions
from ssdprof.jobs.record import CALLS
from ssdprof.jobs.run import capture_recording
from ssdprof.record.settings import SEEN

_OF_SIGNAL = 128  # what shells add to the number of a signal


def record(options: RecordOptions, code: int) -> None:
    """Make a capture of the calls that the program's processes stored.  code: how it ended."""
    try:
        _finish(options)
    except SsdprofError as error:
        terminal.say(f"{error.message}  {error.hint}  The calls stay in {options.out / CALLS}.")
    if code < 0:
        _end_by_signal(-code)
    raise typer.Exit(code)


def _finish(options: RecordOptions) -> None:
    calls = options.out / CALLS
    count = len(list(calls.glob("*_*.safetensors")))
    if count:
        os.umask(0o077)  # the folder may have been there, for others to read
        asked = CaptureOptions(
            model=str(calls), recorded="safetensors", out=options.out, force=options.force
        )
        capture_recording(asked, TerminalWatcher(), name=options.out.resolve().name)
        terminal.say(f"{plural(count, 'call')} in {options.out}.  Next: ssdprof run {options.out}")
    elif (calls / SEEN).exists():
        terminal.say("No call was stored: none of those that were recorded went wrong.")
    else:
        terminal.say(
            "No call was recorded: the program called no function that ssdprof knows, or a line "
            "above says why."
        )
    shutil.rmtree(calls)


def _end_by_signal(number: int) -> None:
    """End this process as the signal ended the program, without a core of its own."""
    sys.stdout.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # nothing can be set for SIGKILL
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise typer.Exit(_OF_SIGNAL + number)  # of a signal that ends nothing
