"""Separate processes: of Python, and of `ssdprof`, one or two ranks of torchrun."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Start = Callable[..., subprocess.Popen[str]]
MODULE = ("-m", "ssdprof")


def python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Another process of this Python, which finds the modules that this one finds."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | path | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@contextmanager
def starting(folder: Path, program: tuple[str, ...] = MODULE) -> Iterator[Start]:
    """start(command, ranks=True): two ranks of torchrun, or one process without it, in `folder`.

    program: arguments of Python and torchrun before the command.  Processes that still run at the
    end are terminated.
    """
    started = []

    def start(command: str, *, ranks: bool = True) -> subprocess.Popen[str]:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if ranks else ()
        process = subprocess.Popen(
            [sys.executable, *torchrun, *program, *shlex.split(command)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def wait_for(found: Callable[[], Any]) -> Any:
    """The first true result of `found`.  Raises TimeoutError after 120 s."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        time.sleep(0.05)
    raise TimeoutError


def ranks_of(parent: int) -> dict[int, int]:
    """Rank -> process, for torchrun's children."""
    found = {}
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        found |= {
            int(word.removeprefix("RANK=")): int(child)
            for word in words
            if word.startswith("RANK=")
        }
    return found
