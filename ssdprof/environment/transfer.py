"""Measures the speed at which weights are read from the disk or copied to a GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

READ_BYTES = 256 << 20  # of a file; 0.1 s from a fast disk
COPY_BYTES = 256 << 20


def read_bytes_per_s(file: Path) -> float | None:
    """Speed of the disk: reads the beginning of `file`, after dropping it from the system's cache if possible.

    None for an empty file.
    """
    with file.open("rb", buffering=0) as opened:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(opened.fileno(), 0, READ_BYTES, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        size = 0
        while size < READ_BYTES and (piece := opened.read(min(16 << 20, READ_BYTES - size))):
            size += len(piece)
        return size / (time.perf_counter() - began) if size else None


def copy_bytes_per_s(device: torch.device, most: int) -> float:
    """Speed of a copy from main memory, not pinned, to a GPU.  The first copy is a warm-up.

    most: bytes for which the GPU has room.
    """
    size = min(COPY_BYTES, most)
    source = torch.zeros(size, dtype=torch.uint8)
    seconds = 0.0
    for _ in range(2):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        source.to(device)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return size / seconds
