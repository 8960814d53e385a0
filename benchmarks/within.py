"""Runs commands with a time limit, each in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

TO_STOP_S = 30  # from a command's limit to its interrupt, and from that to the kill
TO_NOTICE_S = 5  # time for a command to end after the user interrupts both processes


def run_within(words: Sequence[str], seconds: float, *, to_stop_s: float = TO_STOP_S) -> int:
    """The command's exit code.  Its stdout goes to stderr.

    It is interrupted `to_stop_s` after its limit, and killed after the same time again.
    Raises KeyboardInterrupt if the user interrupts this process, after the command has ended.
    """
    process = subprocess.Popen(words, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=sys.stderr)
    try:
        return _end(process, seconds + to_stop_s, to_stop_s)
    except KeyboardInterrupt:
        _end(process, TO_NOTICE_S, to_stop_s)  # Ctrl-C reaches both; a signal to only this process does not
        raise


def _end(process: subprocess.Popen[bytes], seconds: float, to_stop_s: float) -> int:
    """Waits, then interrupts, then kills."""
    for wait_s, then in ((seconds, signal.SIGINT), (to_stop_s, signal.SIGKILL)):
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.send_signal(then)
    return process.wait()
