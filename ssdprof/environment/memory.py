"""Memory that is still free, on a GPU and on the host."""

from __future__ import annotations

from pathlib import Path

import torch

from ssdprof.environment.ranks import started


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on `device`.

    On a GPU, others may hold memory, and `torch.cuda.set_per_process_memory_fraction` may have set a limit.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - allocated
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + cached, allowed - allocated)
    return host_memory()


def host_memory() -> int:
    """Bytes of main memory available to this process: its share, if torchrun started several."""
    return _available() // started()


def _available() -> int:
    """Linux's estimate, or less where a control group limits it."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or its limit is "max"
        return available
    return min(available, limit - used)
