"""Environment variables, and streams whose reader has gone, of a command in its own process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = (
    *("run", "demo", "--seq", "8", "--layers", "first:1", "--dtypes", "exact"),
    *("--states", "fp32", "--impl", "unfused", "--out", "run"),
)
pytestmark = pytest.mark.usefixtures("in_empty_folder")


def command(**variables: str) -> subprocess.Popen[str]:
    pipes: Any = {name: subprocess.PIPE for name in ("stdout", "stderr")}
    return subprocess.Popen(
        [sys.executable, "-m", "ssdprof", *RUN],
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        **pipes,
    )


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TORCH_LOGS", "nonsense", "error: torch cannot be imported: Invalid log settings"),
        pytest.param(
            "PYTORCH_JIT",
            "nonsense",
            "error: torch cannot be imported: Unknown setting",
            marks=pytest.mark.slow,
        ),
        ("PYTHONOPTIMIZE", "2", "error: Python runs without docstrings"),
        ("TORCH_COMPILE_DEBUG", "nonsense", "error: transformers cannot be imported: invalid lit"),
        pytest.param(
            "TORCHINDUCTOR_CACHE_DIR",
            "/proc/x",
            "error: transformers cannot be imported: [Errno",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_variable_that_no_library_understands_is_named(variable: str, value: str, words: str):
    with command(**{variable: value}) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 3
    assert words in err
    assert variable in err.partition("hint: ")[2]
    assert len(err) < 700


def test_warnings_of_libraries_end_no_command():
    with command(PYTHONWARNINGS="error") as process:
        out, err = process.communicate(timeout=100)
    assert (process.returncode, "PASSED" in out) == (0, True), err


def test_a_reader_of_progress_that_goes_away_costs_nothing():
    """Progress is no data.  The reader goes before the first line, so that every line fails."""
    with command() as process:
        assert process.stderr
        process.stderr.close()
        assert process.stdout
        out = process.stdout.read()
        assert process.wait(timeout=100) == 0
    assert "PASSED" in out
    assert any(Path("run").iterdir())
