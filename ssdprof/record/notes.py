"""What the processes of a recorded program tell its user, on their stderr.  Imports no torch."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from ssdprof.record.settings import RecordSettings

_SHOWN: set[str] = set()  # notes of this process


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
