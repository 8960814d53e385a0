"""The settings of `ssdprof record` for the processes of a program, in an environment variable, and
the notes of these processes to the user, on stderr.  Imports nothing that takes time.
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
CALLS = "calls"  # the folder in which the processes store calls, until a capture is made of them
# name of a file that each folder of calls has, with a byte for each call that was seen and not
# stored, because nothing was wrong with it
PASSED = ".passed"
_SHOWN: set[str] = set()  # notes that this process has printed


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The options of `ssdprof record` that its processes need.

    folder: the folder for the calls.
    operators: names of the operators that are recorded.
    when: which calls are stored; `keeper.py` explains the words.
    keep: number of calls of a layer that are stored before the one that went wrong.
    max_bytes, max_calls: limits of the files of each process.
    max_delay_s: longest time that a call waits for room in the queue.
    modules: names of the modules that have places.
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
        """The environment of the program: that of this process, the settings, and, first in
        PYTHONPATH, the folder of the `sitecustomize.py` that each Python process runs.
        """
        site = Path(__file__).parent / "site"
        paths = filter(None, (str(site), os.environ.get("PYTHONPATH")))
        return {**os.environ, VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": ":".join(paths)}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RecordSettings:
        values = json.loads(environment[VARIABLE])
        return cls(**{**values, "operators": tuple(values["operators"])})


def note(text: str, *, once: bool = False) -> None:
    """Print a sentence on stderr, unless this process has printed it.

    once: also unless another process of the program has printed it.  An empty file in the folder of
        calls marks the sentence as printed.  If it cannot be created, the sentence is printed.
    """
    if text in _SHOWN:
        return
    _SHOWN.add(text)
    if once:
        folder = Path(RecordSettings.of(os.environ).folder)
        mark = folder / f".{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            if isinstance(error, FileExistsError):
                return
    with suppress(OSError, ValueError):  # the program may have closed stderr
        print(f"ssdprof: {text}", file=sys.stderr, flush=True)
