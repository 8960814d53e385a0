"""Environment variables, and streams whose reader has gone, of a command in its own process."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ssdprof.commands.terminal import lossy_stream

RUN = "run demo --seq 8 --layers first:1 --dtypes exact --states fp32 --impl unfused --out run"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_empty_folder")]


def command(**variables: str) -> subprocess.Popen[str]:
    pipes: Any = {name: subprocess.PIPE for name in ("stdout", "stderr")}
    return subprocess.Popen(
        [sys.executable, "-m", "ssdprof", *RUN.split()],
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        **pipes,
    )


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TORCH_LOGS", "nonsense", "error: torch cannot be imported: Invalid log settings"),
        ("PYTORCH_JIT", "nonsense", "error: torch cannot be imported: Unknown setting"),
        ("TORCHINDUCTOR_CACHE_DIR", "/proc/x", "error: transformers cannot be imported: [Errno"),
        ("PYTHONOPTIMIZE", "2", "error: Python runs without docstrings"),
        ("TORCH_COMPILE_DEBUG", "nonsense", "error: transformers cannot be imported: invalid lit"),
    ],
)
def test_a_variable_that_no_library_understands_is_named(variable, value, words):
    with command(TORCH_API_KEY="a secret", **{variable: value}) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 3
    assert words in err
    assert err.partition("hint: ")[2].count(variable) == 1
    assert "secret" not in err
    assert len(err) < 700


def test_no_warning_of_a_library_and_no_reader_of_progress_that_goes_away_ends_a_command():
    """Progress is no data.  The reader goes before the first line, so that every line fails."""
    with command(PYTHONWARNINGS="error") as process:
        process.stderr.close()
        out = process.stdout.read()
        assert process.wait(timeout=100) == 0
    assert "PASSED" in out
    assert any(Path("run").iterdir())


def test_a_full_pipe_that_does_not_block_ends_no_command_and_stops_none():
    _, full = os.pipe()
    os.set_blocking(full, False)
    with suppress(BlockingIOError):
        while os.write(full, bytes(4096)):
            pass
    with lossy_stream(full, close=True) as stream:
        assert stream.write("progress\n") == 9
