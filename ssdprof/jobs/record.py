"""Runs a program, with `ssdprof.record` in each of its Python processes.

Imports no torch, so that the program starts at once.  The signals `_PASSED_ON` to this process are
passed on to the program, except if the terminal sends them to both, as with Ctrl-C.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ssdprof import operators
from ssdprof.capture.manifest import is_capture, read_manifest
from ssdprof.core.words import plural
from ssdprof.errors import BadInputError
from ssdprof.files import check_writable, unwritable
from ssdprof.jobs.options import RecordOptions
from ssdprof.record.places import PLACES
from ssdprof.record.settings import CALLS, GIGABYTE, PASSED, RecordSettings, When

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


def record(options: RecordOptions) -> tuple[RecordOptions, int, str]:
    """Run the program, whose processes store calls in the folder `CALLS` in `options.out`.

    If they stored none, no folder stays that was not there before, unless the program wrote other
    files into it.

    Returns the options; the program's exit code, or if a signal ended it, minus the signal's
    number; and why nothing was stored, in a sentence that is empty if calls were.

    Raises BadInputError for a program that cannot be started and for what `_prepared` refuses, and
    MissingCapabilityError for a folder that cannot be written.
    """
    out = options.out.absolute()
    new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
    settings = _prepared(options)
    calls = out / CALLS
    nothing_stored = ""
    try:
        code = _run_program(options.program, settings.environment)
    finally:
        if not any(calls.glob("*_*.safetensors")):
            nothing_stored = _why_nothing_stored(calls / PASSED, options.when)
            shutil.rmtree(calls, ignore_errors=True)
            for folder in new_folders:
                with suppress(OSError):  # a folder in which the program wrote other files stays
                    folder.rmdir()
    return options, code, nothing_stored


def _why_nothing_stored(passed: Path, when: When) -> str:
    """Why no call was stored, in sentences.

    passed: the file `PASSED`, which has a byte for each call that was seen and found right.  With
        --when always it has none.  The program may have removed it.
    """
    try:
        count = passed.stat().st_size
    except OSError:
        return f"No call was stored: {passed.parent} was removed."
    if not count:
        return (
            "No call was recorded: the program called no function that ssdprof knows, or a line "
            "above says why."
        )
    result = "whose outputs are finite" if when == "nonfinite" else "and found nothing wrong"
    return (
        f"No call was stored: ssdprof saw {plural(count, 'call')}, {result}.  The last calls of a "
        "process that is killed, or that ends by os._exit, may be missing."
    )


def _prepared(options: RecordOptions) -> RecordSettings:
    """The settings of the program's processes.  Creates the folder of their calls, which only this
    user can read.

    Raises BadInputError for an unknown operator, and for a folder that holds a complete capture or
    an unfinished recording unless --force is given.
    """
    wanted = tuple(word.strip() for word in options.operators.split(","))
    for name in wanted:
        operators.get(name)
    if is_capture(options.out) and not options.force and read_manifest(options.out).complete:
        raise BadInputError(
            f"{options.out} holds a capture already.", "Name another folder, or give --force."
        )
    folder = options.out.absolute() / CALLS
    passed = folder / PASSED
    if passed.exists() and not options.force:
        raise BadInputError(
            f"{options.out} holds an unfinished recording.", "Name another folder, or give --force."
        )
    check_writable(options.out)
    try:
        os.makedirs(options.out, mode=0o700, exist_ok=True)
        if passed.exists():  # no folder of another program is removed
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        passed.touch(mode=0o600)
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


def _run_program(program: list[str], environment: dict[str, str]) -> int:
    """Run the program to its end, and pass signals on to it.  Returns its exit code, or minus the
    number of the signal that ended it.

    The signals are blocked before the program starts, so that none is lost: each stays pending
    until it is passed on.  The program itself starts with the signal mask that this process had.
    """
    original_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, original_mask)
    try:
        process = _start_program(program, environment, unblock)
        while process.poll() is None:
            received = signal.sigtimedwait(_PASSED_ON, _POLL_S)
            if received and received.si_code != _SENT_BY_KERNEL:
                process.send_signal(received.si_signo)
    finally:
        unblock()
    return process.returncode


def _start_program(
    program: list[str], environment: dict[str, str], unblock: Callable[[], object]
) -> subprocess.Popen[bytes]:
    """Start the program, and return its process, which calls `unblock` before it executes the
    program.

    Raises BadInputError if it cannot be started.
    """
    try:
        return subprocess.Popen(program, env=environment, preexec_fn=unblock)
    except OSError as error:
        raise BadInputError(
            f"{program[0]} cannot be started: {error.strerror}.", "Give the command after --."
        ) from error
