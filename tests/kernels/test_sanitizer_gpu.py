"""compute-sanitizer finds no bad access and no race in small calls; and blocking launches are no trouble."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TARGET = Path(__file__).with_name("sanitizer_target.py")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="not a Hopper GPU")
KERNELS = [
    "portable",
    "unfused",
    pytest.param("hopper", marks=ON_HOPPER),
    pytest.param("hopper, shared", marks=ON_HOPPER),
]

pytestmark = pytest.mark.gpu


def run(*command: str, **environment: str) -> str:
    """What a command prints.  A tensor's memory ends where the tensor ends, without torch's cache of memory."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    result = subprocess.run(
        command,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = result.stdout + result.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not take this GPU or machine")
    assert "right" in said, said
    return said


def sanitized(tool: str, kernel: str, *arguments: str, cases: tuple[str, ...] = ()) -> str:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    options = ("--target-processes", "application-only", "--show-backtrace", "no", "--print-limit", "100000")
    return run(sanitizer, "--tool", tool, *options, *arguments, sys.executable, str(TARGET), kernel, *cases)


@pytest.mark.parametrize("kernel", KERNELS)
def test_memory(kernel: str) -> None:
    said = sanitized("memcheck", kernel)
    assert "ERROR SUMMARY: 0 errors" in said, said


@pytest.mark.parametrize("kernel", ["portable", "unfused"])
def test_races(kernel: str) -> None:
    said = sanitized("racecheck", kernel, "--racecheck-report", "all")
    assert "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" in said, said


ROLE_ENDS = (256, 384, 448, 512)  # threads of both units' states, of scores, of gates, of loads and stores


def role(thread: int) -> int:
    return next(i for i, end in enumerate(ROLE_ENDS) if thread < end)


@ON_HOPPER
@pytest.mark.parametrize(("kernel", "case"), [("hopper", "ragged"), ("hopper, shared", "batch")])
def test_races_within_a_role(kernel: str, case: str) -> None:
    """Between roles the tool sees races that are none: a role meets at a barrier of its own, one of its threads then
    arrives at an mbarrier, and racecheck does not follow that chain for the role's other threads."""
    said = sanitized("racecheck", kernel, "--racecheck-report", "hazard", cases=(case,))
    pairs = re.findall(r"(?:Read|Write) Thread \((\d+),.*\n.*(?:Read|Write) Thread \((\d+),.*", said)
    assert "RACECHECK SUMMARY" in said, said
    assert len(pairs) == len(re.findall("hazard detected", said))
    within = [pair for pair in pairs if role(int(pair[0])) == role(int(pair[1]))]
    assert not within, said


@pytest.mark.parametrize("kernel", KERNELS)
def test_launches_that_block(kernel: str) -> None:
    run(sys.executable, str(TARGET), kernel, CUDA_LAUNCH_BLOCKING="1")
