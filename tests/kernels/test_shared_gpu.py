"""Processes that share a GPU: the GPU switches contexts in the middle of launches, at any instruction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TARGET = Path(__file__).with_name("shared_gpu_target.py")
PROCESSES = 8
PATIENCE_S = 300

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="not a Hopper GPU"
    ),
]


def test_every_process_has_the_bits_of_its_first_calls() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(TARGET)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(PROCESSES)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [words.strip().splitlines()[-1:] for words in said] == PROCESSES * [["right"]], "\n\n".join(said)
