"""Calls `ssdprof` in the test's process."""

import shlex
import sys
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from ssdprof.checkpoint.names import DEMO_FOLDERS
from ssdprof.cli import app

DEMOS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "demo")) for name in DEMO_FOLDERS]


class Answer:
    """The result of one call of the command line, typed as in a shell, whole or in parts: exit
    code, stdout (`shown`: as one line), and stderr as one line.
    """

    def __init__(self, *command: str) -> None:
        words = shlex.split(" ".join(command))
        # which a bench's further processes repeat
        with patch.object(sys, "argv", ["ssdprof", *words]):
            result = CliRunner().invoke(app, words, prog_name="ssdprof", catch_exceptions=False)
        self.code = result.exit_code
        self.out = result.stdout
        self.err = " ".join(result.stderr.split())
        self.shown = " ".join(self.out.split())


def ending(code: int, *command: str) -> Answer:
    """The answer of a call that must have this exit code."""
    answer = Answer(*command)
    assert answer.code == code, answer.err
    return answer


def passing(*command: str) -> Answer:
    return ending(0, *command)
