"""Python processes of this installation: children, and those that torchrun started.  Imports no
torch.
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

_LINGER_S = 10  # for a process that has done its work; threads of a user's kernel may keep it
_SILENT_S = 600.0  # a user's kernel that is at work for so long without a sign of life hangs
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# of environment variables that a process with code of others does not get
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])KEY(?![A-Z])")


def python(module: str) -> tuple[str, ...]:
    """The command that runs a module of the same installation.

    -P: files in the current directory do not hide modules.
    """
    return (sys.executable, "-P", "-m", module)


def search_path() -> dict[str, str]:
    """The environment variable that gives the child process the search path of this process."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run(
    command: Sequence[str], *, timeout_s: float, environ: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run a command in its own process group: its exit code, None if it takes too long, and its
    output, stdout and stderr together.  No process of the group is left.
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
            until = time.monotonic() + timeout_s
            while code is None and time.monotonic() < until:
                alive()
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(1.0, timeout_s))
        finally:  # the command may have started others, and any of them may hang
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def started(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that torchrun started, this one included; 1 without torchrun.

    BadInputError for a WORLD_SIZE, RANK, LOCAL_RANK or MASTER_PORT that torchrun does not set.
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


def sample_again(folder: Path, number: int) -> None:
    """Have a fresh process, of this number, add samples to a report: see `jobs.sample`."""
    words = (*python("ssdprof.jobs.sample"), str(folder), str(number))
    subprocess.run(words, env=os.environ | search_path(), stdout=subprocess.DEVNULL)


# --- a command in a child process, which may end in any way


class Ended(NamedTuple):
    """A child process that has ended, as its parent knows it.

    lines: what it told.  code: as in `subprocess`.  stop_signals: number of signals that asked this
    process to stop.  quiet_s: from its last line to its end.
    """

    lines: list[str]
    code: int
    stop_signals: int
    quiet_s: float

    @property
    def ending(self) -> str:
        """How it ended without saying so, as the end of a sentence about it: "ended early, with
        SIGSEGV".
        """
        if self.code == 1 and self.quiet_s >= _SILENT_S:  # faulthandler's exit code
            return f"was stopped: a call of its kernel did not end within {_SILENT_S:g} s"
        return f"ended early, with {how_ended(self.code)}"

    def last(self, word: str) -> str | None:
        """The rest of the last line that begins with this word; None if no line does."""
        for line in reversed(self.lines):
            first, _, rest = line.partition(" ")
            if first == word:
                return rest
        return None


_parent: int | None = None  # where this process tells its parent, if it was forked by `fork`
_at_work = False  # whether a user's kernel is
_alive_s = 0.0  # when it last told that it is alive


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tell(line: str) -> None:
    """Tell the parent a line, the first word of which says what it is.  From "case CASE" to "case"
    a kernel is at work: if it then says nothing for `_SILENT_S`, Python prints where it hangs, and
    ends this process.
    """
    global _at_work
    if _parent is None:
        return
    with suppress(OSError):  # what runs here may have closed it
        os.write(_parent, f"{line}\n".encode())
    if line.startswith("case"):
        _at_work = line != "case"
    if _at_work:
        faulthandler.dump_traceback_later(_SILENT_S, exit=True, file=2)
    else:
        faulthandler.cancel_dump_traceback_later()


def alive() -> None:
    """Tell the parent, at most once a second, that the kernel at work has not hung."""
    global _alive_s
    if _parent is not None and time.monotonic() > _alive_s + 1.0:
        _alive_s = time.monotonic()
        tell("alive")


def finish(code: int) -> None:
    """End a supervised process with all of its threads, if its output could be written; else the
    parent reports.
    """
    if _parent is None:
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
    """Go on in a child process, which leads a session of its own: None.  In this one, how the child
    ended.

    Must be called before there are threads, and before a GPU is used.  No process of the child's
    session is left.
    """
    global _parent
    stop_signals = 0

    def stop(*_: object) -> None:
        """A handler of signals."""
        nonlocal stop_signals
        stop_signals += 1
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if stop_signals == 1 else signal.SIGKILL)

    with tempfile.TemporaryFile() as channel:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes as SIGTERM, from the parent
            end_with(parent)
            _parent = os.dup(channel.fileno())
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
