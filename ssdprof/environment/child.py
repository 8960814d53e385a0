"""Python processes of this installation: child processes, and the processes that torchrun started.
Imports no torch.
"""

import atexit
import ctypes
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ssdprof.errors import BadInputError, how_ended

# Time for the exit handlers of a process that has finished.  Threads of a user's kernel may block
# them; then SIGALRM ends the process.
_LINGER_S = 10
# A user's kernel that runs for so long without a sign of life is stopped.  A first call may compile
# for minutes.
_SILENT_S = 600.0
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
# Matches names of environment variables that may hold secrets.  `measure/isolate.py` and
# `stalls/ncu.py` withhold these variables from the processes that they start.  KEY must not touch
# another letter: MONKEY and KEYBOARD do not match.
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])KEY(?![A-Z])")


def python(module: str) -> tuple[str, ...]:
    """The start of a command that runs a module with the same interpreter; the module's arguments
    follow.  With -P, files in the current directory do not hide modules.
    """
    return (sys.executable, "-P", "-m", module)


def search_path() -> dict[str, str]:
    """The environment variable that gives a child process the module search path of this one."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str],
    signs: Path | None = None,
) -> tuple[int | None, str]:
    """Run a command in a process group of its own.  Afterwards no process of the group is left.

    timeout_s: the seconds after which the command is stopped.
    environ: all environment variables of the command.
    signs: a file to which the command appends.  Each time that the file has grown, the command may
        take `timeout_s` from then on.

    Returns the exit code, negative for a signal, and the text of stdout and stderr together.  The
    exit code is None if the command was stopped.  Raises OSError if it cannot be started.
    """
    code: int | None = None
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + timeout_s
            size = 0  # bytes of `signs`
            while code is None and time.monotonic() < deadline:
                alive()
                if signs and signs.is_file() and signs.stat().st_size > size:
                    size = signs.stat().st_size
                    deadline = time.monotonic() + timeout_s
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(1.0, timeout_s))
        finally:  # the command may have started other processes, and any of them may hang
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def rank_count(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks, which are the processes that torchrun started, this one included; 1
    without torchrun.

    Raises BadInputError for a WORLD_SIZE that is no number of processes, and, if there are several,
    for a RANK, LOCAL_RANK or MASTER_PORT that torchrun would not set.  If a variable is empty or
    not set, WORLD_SIZE counts as 1, and the others as 0.
    """
    count = environment.get("WORLD_SIZE") or "1"
    if not re.fullmatch(r"[1-9][0-9]{0,8}", count):
        raise BadInputError(
            f"WORLD_SIZE={count!r} is not a number of processes.", "Run: unset WORLD_SIZE"
        )
    if count == "1":
        return 1
    last = int(count) - 1
    for name, largest in (("RANK", last), ("LOCAL_RANK", last), ("MASTER_PORT", 65535)):
        value = environment.get(name) or "0"
        if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) > largest:
            raise BadInputError(
                f"{name}={value!r} is not a number up to {largest}.",
                f"Run: unset WORLD_SIZE {name}",
            )
    return int(count)


def run_sampler(folder: Path, number: int) -> None:
    """Run `jobs.sample` in a new process, which adds its samples to the report in `folder` as
    process `number`.

    A sampler that fails is no error here, and its exit status is not read: the file of its samples
    stays incomplete, and the report is partial.  Its stdout is dropped; its errors go to stderr.
    """
    command = (*python("ssdprof.jobs.sample"), str(folder), str(number))
    subprocess.run(command, env=os.environ | search_path(), stdout=subprocess.DEVNULL)


# --- a command in a child process, which may end in any way


class Ended(NamedTuple):
    """What a parent knows of a child process that has ended.

    lines: the lines that the child sent with `tell`.
    code: exit code, negative for a signal, as in `subprocess`.
    stop_signals: number of signals that asked the parent to stop.
    quiet_s: seconds from the child's last line, or from its start if it sent none, to its end.
    """

    lines: list[str]
    code: int
    stop_signals: int
    quiet_s: float

    @property
    def ending(self) -> str:
        """The predicate of a sentence on a child that ended without `finish`: "ended early, with
        SIGSEGV".
        """
        # faulthandler, which `tell` starts, ends the process with exit code 1, and only while a
        # user's kernel runs: then the last line "case ..." names the case
        if self.last("case") and self.code == 1 and self.quiet_s >= _SILENT_S:
            return f"was stopped: a call of its kernel did not end within {_SILENT_S:g} s"
        law = self.last("law")
        where = f", in the law '{law}'" if law else ""
        return f"ended early, with {how_ended(self.code)}{where}"

    def last(self, word: str) -> str | None:
        """What follows `word` in the last line that begins with this word, empty if nothing does;
        None if there is no such line.
        """
        for line in reversed(self.lines):
            first, _, text = line.partition(" ")
            if first == word:
                return text
        return None


# the file descriptor to which `tell` writes; None: this process is no child of `fork`
_channel_fd: int | None = None
_at_work = False  # whether a user's kernel runs
_alive_s = 0.0  # when `alive` last sent a line, in seconds of time.monotonic


def end_with(parent: int) -> None:
    """Have Linux kill this process when its parent process ends in any way.  If that has happened
    already, end this process with exit code 1.

    parent: the process ID of the parent process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tell(line: str) -> None:
    """Send the parent a line, whose first word says what kind it is.  Outside of a child of `fork`
    this has no effect.

    From the line "case CASE" to the line "case" a user's kernel runs.  If no line is sent for
    `_SILENT_S` meanwhile, Python prints where the kernel hangs, and ends this process with exit
    code 1.
    """
    global _at_work
    if _channel_fd is None:
        return
    with suppress(OSError):  # a user's kernel may have closed the file
        os.write(_channel_fd, f"{line}\n".encode())
    if line.startswith("case"):
        _at_work = line != "case"
    if _at_work:
        faulthandler.dump_traceback_later(_SILENT_S, exit=True, file=2)
    else:
        faulthandler.cancel_dump_traceback_later()


def alive() -> None:
    """Tell the parent that the user's kernel does not hang, at most once a second.  Outside of a
    child of `fork` this has no effect.
    """
    global _alive_s
    if _channel_fd is not None and time.monotonic() > _alive_s + 1.0:
        _alive_s = time.monotonic()
        tell("alive")


def finish(code: int) -> None:
    """End this process with all of its threads, if it is a child of `fork`.  Elsewhere this has no
    effect.

    The exit handlers of Python run, for at most `_LINGER_S`.  If stdout or stderr cannot be
    written, they do not run, and the parent gets no line "exit CODE": then it reports that the
    child ended early.
    """
    if _channel_fd is None:
        return
    try:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.fstat(number)
    except (OSError, ValueError, AttributeError):
        os._exit(code)
    tell(f"exit {code}")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LINGER_S)
    atexit._run_exitfuncs()
    os._exit(code)


def fork() -> Ended | None:
    """Go on in a child process, which leads a process group and a session of its own.

    Returns None in the child.  The parent waits until the child has ended, kills what is left of
    the child's process group, and returns how the child ended.  Must be called before there are
    threads, and before a GPU is used.
    """
    global _channel_fd
    stop_signals = 0

    def stop(*_: object) -> None:
        """The parent's signal handler: asks the child to stop; from the second signal on, kills
        it.
        """
        nonlocal stop_signals
        stop_signals += 1
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if stop_signals == 1 else signal.SIGKILL)

    with tempfile.TemporaryFile() as channel:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sends SIGTERM after Ctrl-C
            end_with(parent)
            _channel_fd = os.dup(channel.fileno())
            return None
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, stop) for number in signals}
        _, status = os.waitpid(pid, 0)
        quiet_s = time.time() - os.fstat(channel.fileno()).st_mtime
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
        channel.seek(0)
        lines = channel.read().decode(errors="replace").splitlines()
    return Ended(lines, os.waitstatus_to_exitcode(status), stop_signals, quiet_s)
