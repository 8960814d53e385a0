"""What `ssdprof record` asks of the processes of a program, in an environment variable, and what
they tell the user, on their stderr.  Imports nothing that takes time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ssdprof.record.hook import VARIABLE

When = Literal["always", "nonfinite", "wrong"]
GIGABYTE = 1 << 30
SEEN = ".seen"  # a file in the folder of calls, once a process has seen one
_SHOWN: set[str] = set()  # notes of this process


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The options of `ssdprof record` that its processes need.

    folder: of the calls.  operators: names of those that are recorded.
    keep: calls of a layer that are written before the one that went wrong.
    max_bytes, max_calls: of each process: in its files.
    max_delay_s: how long a call may wait for room in the queue.
    modules: those that have places.
    """

    folder: str
    operators: tuple[str, ...]
    when: When
    keep: int
    max_bytes: int
    max_calls: int
    max_delay_s: float
    modules: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the program: this process's own, the settings, and the folder whose
        `sitecustomize.py` is run by each Python process.
        """
        site = Path(__file__).parent / "site"
        paths = filter(None, (str(site), os.environ.get("PYTHONPATH")))
        return {**os.environ, VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": ":".join(paths)}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RecordSettings:
        values = json.loads(environment[VARIABLE])
        return cls(**{**values, "operators": tuple(values["operators"])})


def note(text: str, *, once: bool = False) -> None:
    """Print a sentence; once: unless another process of the program has.

    A process that finds no room for the mark, an empty file, prints it.
    """
    if text in _SHOWN:
        return
    _SHOWN.add(text)
    if once:
        folder = Path(RecordSettings.of(os.environ).folder)
        mark = folder / f".{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return
        except OSError:
            once = False
    with suppress(OSError, ValueError):  # the program may have closed it
        print(f"ssdprof: {text}", file=sys.stderr, flush=True)
