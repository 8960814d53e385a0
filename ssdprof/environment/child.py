"""Python processes of this installation: children, and those that torchrun started.  Imports no torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ssdprof.errors import BadInputError

_POLL_S = 0.1
_LINGER_S = 10.0  # for a process that has done its work; threads of a user's kernel may keep it
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def python(module: str) -> tuple[str, ...]:
    """The command that runs a module of the same installation.

    -P: files in the current directory do not hide modules.
    """
    return (sys.executable, "-P", "-m", module)


def search_path() -> dict[str, str]:
    """The environment variable that gives the child process the search path of this process."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def started(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that torchrun started, this one included; 1 without torchrun.

    BadInputError for a WORLD_SIZE, RANK, LOCAL_RANK or MASTER_PORT that torchrun does not set.
    """
    count = environment.get("WORLD_SIZE") or "1"
    if not re.fullmatch(r"[1-9][0-9]{0,8}", count):
        raise BadInputError(f"WORLD_SIZE={count!r} is not a number of processes.", "Run: unset WORLD_SIZE")
    most = {"RANK": int(count) - 1, "LOCAL_RANK": int(count) - 1, "MASTER_PORT": 65535} if count != "1" else {}
    for name, largest in most.items():
        value = environment.get(name) or "0"
        if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) > largest:
            raise BadInputError(f"{name}={value!r} is not a number up to {largest}.", f"Run: unset WORLD_SIZE {name}")
    return int(count)


# --- a command in a child process, which may end in any way


class Stopped(KeyboardInterrupt):
    """The user stopped the command: SIGTERM, which a child also gets for Ctrl-C.  A kernel's own interrupt is none."""


class Ended(NamedTuple):
    """told: lines of the child.  code: as in `subprocess`.  stopped: signals that asked this process to stop."""

    told: list[str]
    code: int
    stopped: int

    def last(self, word: str) -> str | None:
        """What follows a word in the last line that begins with it."""
        return next((line.partition(" ")[2] for line in reversed(self.told) if line.split(" ")[0] == word), None)


_parent: int | None = None  # where this process tells its parent, if it was forked by `fork`


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tell(line: str) -> None:
    """Tell the parent a line, the first word of which says what it is."""
    if _parent is not None:
        with suppress(OSError):  # what runs here may have closed it
            os.write(_parent, f"{line}\n".encode())


def finish(code: int) -> None:
    """End a supervised process with all of its threads, if its output could be written; else the parent reports."""
    if _parent is None:
        return
    try:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.fstat(number)
    except (OSError, ValueError, AttributeError):
        os._exit(code)
    tell(f"exit {code}")
    atexit._run_exitfuncs()
    os._exit(code)


def fork() -> Ended | None:
    """Go on in a child process, which leads a session of its own: None.  In this one, how the child ended.

    Must be called before there are threads, and before a GPU is used.  No process of the child's session is left.
    """
    global _parent
    read, write = os.pipe()
    parent, child, stopped, told = os.getpid(), os.fork(), 0, b""
    if not child:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes as SIGTERM, from the parent
        end_with(parent)
        os.close(read)
        _parent = write
        return None

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped += 1
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM if stopped == 1 else signal.SIGKILL)

    os.close(write)
    os.set_blocking(read, False)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    ends, status = 0.0, 0
    while not (gone := os.waitpid(child, os.WNOHANG))[0]:
        if not (select.select([read], [], [], _POLL_S)[0] and (more := _rest(read))):
            time.sleep(_POLL_S)
            more = b""
        told += more
        ends = ends or (time.monotonic() + _LINGER_S if b"\nexit " in b"\n" + told else 0.0)
        if ends and time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
    status = gone[1]
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    told += _rest(read)
    os.close(read)
    for number, handler in before.items():
        signal.signal(number, handler)
    return Ended(told.decode(errors="replace").splitlines(), os.waitstatus_to_exitcode(status), stopped)


def _rest(pipe: int) -> bytes:
    """What can be read now; nothing if its other end is closed."""
    found = b""
    with suppress(BlockingIOError):
        while more := os.read(pipe, 1 << 16):
            found += more
    return found
