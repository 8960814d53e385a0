"""Runs a program, with `ssdprof.record` in each of its Python processes.

Imports no torch, so that the program starts at once.  Signals to this process are passed on to the
program, except those that the terminal sends to both, such as Ctrl-C.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial

from ssdprof import operators
from ssdprof.capture.manifest import is_capture, read_manifest
from ssdprof.errors import BadInputError
from ssdprof.files import check_writable, unwritable
from ssdprof.jobs.options import RecordOptions
from ssdprof.record.places import PLACES
from ssdprof.record.settings import GIGABYTE, RecordSettings

CALLS = "calls"  # the folder in which the processes store calls, until a capture is made of them
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# si_code of a signal that the terminal sent to all of its foreground processes
_SENT_BY_KERNEL = 0x80
_POLL_S = 0.05  # how often to look whether the program has ended


def record(options: RecordOptions) -> tuple[RecordOptions, int]:
    """Run the program, whose processes store calls in the folder `CALLS` in `options.out`.

    Returns the options, and the program's exit code; if a signal ended it, minus the signal's
    number.

    Raises BadInputError for a program that cannot be started, and MissingCapabilityError for a
    folder that cannot be written.
    """
    settings = _prepared(options)
    return options, _ended(options.program, settings.environment)


def _prepared(options: RecordOptions) -> RecordSettings:
    """The settings of the program's processes.  Creates the folder of their calls, which only this
    user can read.

    Raises BadInputError for an unknown operator, and for a folder that holds a complete capture
    unless --force is given.
    """
    wanted = tuple(word.strip() for word in options.operators.split(","))
    for name in wanted:
        operators.get(name)
    if is_capture(options.out) and not options.force and read_manifest(options.out).complete:
        raise BadInputError(
            f"{options.out} holds a capture already.", "Name another folder, or give --force."
        )
    check_writable(options.out)
    folder = options.out.absolute() / CALLS
    try:
        os.makedirs(options.out, mode=0o700, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise unwritable(folder, error) from error
    return RecordSettings(
        folder=str(folder),
        operators=wanted,
        when=options.when,
        keep=options.keep,
        max_bytes=int(options.max_gb * GIGABYTE),
        max_calls=options.max_calls,
        max_delay_s=options.max_delay / 1000,
        modules=tuple({place.module for place in PLACES if place.operator in wanted}),
    )


def _ended(program: list[str], environment: dict[str, str]) -> int:
    """Run the program to its end, and pass signals on to it.  Returns its exit code.

    Signals are blocked before the program starts, so that none is lost: each stays pending until it
    is passed on.  The program itself starts with the signal mask that this process had.
    """
    original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, original_mask)
    try:
        process = _started(program, environment, unblock)
        while process.poll() is None:
            received = signal.sigtimedwait(_PASSED_ON, _POLL_S)
            if received and received.si_code != _SENT_BY_KERNEL:
                process.send_signal(received.si_signo)
    finally:
        unblock()
    return process.returncode


def _started(
    program: list[str], environment: dict[str, str], unblock: Callable[[], object]
) -> subprocess.Popen[bytes]:
    """Start the program; its process calls `unblock` before it executes the program.

    Raises BadInputError if it cannot be started.
    """
    try:
        return subprocess.Popen(program, env=environment, preexec_fn=unblock)
    except OSError as error:
        raise BadInputError(
            f"{program[0]} cannot be started: {error.strerror}.", "Give the command after --."
        ) from error
