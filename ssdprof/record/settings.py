"""The settings of `ssdprof record` for the processes of a program, in an environment variable, and
the notes of these processes to the user, on stderr.  Imports nothing that takes time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ssdprof.record.hook import VARIABLE

When = Literal["always", "nonfinite", "wrong"]
GIGABYTE = 1 << 30
CALLS = "calls"  # the folder in which the processes store calls, until a capture is made of them
# name of a file that each folder of calls has, with a byte for each call in which nothing wrong was
# found
PASSED = ".passed"
_SHOWN: set[str] = set()  # notes that this process has printed
_MOST_SHOWN = 100  # some notes name sizes, and then differ from call to call


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The options of `ssdprof record` that its processes need.

    folder: the folder for the calls.
    operators: names of the operators that are recorded.
    when: which calls are stored; `keeper.py` explains the words.
    keep: largest number of calls of a layer that are stored before the one that went wrong.
    max_bytes, max_calls: limits of the files of each process.
    max_delay_s: longest time that a call waits for room in the queue.
    modules: names of the modules that have places.
    """

    folder: str
    operators: Sequence[str]
    when: When
    keep: int
    max_bytes: int
    max_calls: int
    max_delay_s: float
    modules: Sequence[str]

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
        """The settings in an environment.  Raises KeyError if it has none."""
        return cls(**json.loads(environment[VARIABLE]))


def note(text: str, *, once: bool = False) -> None:
    """Print sentences on stderr, unless this process has printed them before.  Raises nothing: the
    program may have closed stderr.

    once: print them only if no other process of the program has, and if this process has printed
        fewer than `_MOST_SHOWN` notes.
    """
    if text in _SHOWN or (once and len(_SHOWN) >= _MOST_SHOWN):
        return
    _SHOWN.add(text)
    if once and _is_marked(text):
        return
    if sys.stderr is not None:  # `print` would take None for stdout
        with suppress(OSError, ValueError):
            print(f"ssdprof: {text}", file=sys.stderr, flush=True)


def _is_marked(text: str) -> bool:
    """Whether another process has printed a note.  If not, marks it as printed, by an empty file in
    the folder of calls.  False if the file cannot be created, or if the program has removed the
    settings from its environment.
    """
    mark = f".{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        folder = RecordSettings.of(os.environ).folder
        os.close(os.open(Path(folder, mark), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return True
    except (KeyError, OSError):
        return False
    return False
