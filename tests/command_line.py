"""Calls `ssdprof` in the test's process."""

from __future__ import annotations

import sys
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.cli import app

DEMOS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "demo")) for name in DEMO_FOLDERS]


class Answer:
    """The result of one call of the command line: exit code, stdout (`shown`: as one line), and
    stderr as one line.
    """

    def __init__(self, *words: str) -> None:
        # which a bench's further processes repeat
        with patch.object(sys, "argv", ["ssdprof", *words]):
            result = CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False)
        self.code, self.out, self.err = (
            result.exit_code,
            result.stdout,
            " ".join(result.stderr.split()),
        )
        self.shown = " ".join(self.out.split())


def ending(code: int, *words: str) -> Answer:
    """The answer of a call that must have this exit code."""
    answer = Answer(*words)
    assert answer.code == code, answer.err
    return answer


def passing(*words: str) -> Answer:
    return ending(0, *words)
