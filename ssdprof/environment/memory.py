"""Free memory of a GPU and of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ssdprof.store.ranks import started
from ssdprof.errors import MissingCapabilityError

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# The files with a limit, the usage, and the part of the usage that is page cache: the kernel frees it when memory is
# needed.  A checkpoint that was just downloaded or read is in the page cache.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on `device`.

    On a GPU, others may hold memory, and `torch.cuda.set_per_process_memory_fraction` may have set a limit.
    """
    if device.type == "cuda":
        free, total = gpu_memory(device)
        allocated = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - allocated
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + cached, allowed - allocated)
    return host_memory()


def gpu_memory(device: torch.device | None = None) -> tuple[int, int]:
    """Free and total bytes of a GPU, the current one by default.  MissingCapabilityError if CUDA cannot start it."""
    try:
        return torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise MissingCapabilityError(
            f"CUDA cannot start the GPU: {str(error).splitlines()[0].rstrip('.')}.",
            "Another process may have exclusive use of it, or fill its memory.  To see the processes, run: nvidia-smi",
        ) from error


def host_memory() -> int:
    """Bytes of main memory available to this process: its share, if torchrun started several."""
    return _available() // started()


def _available() -> int:
    """Linux's estimate, or less if a control group limits it."""
    return min((_numbers(_MEMINFO)["MemAvailable:"] * 1024, *_left_in_groups()))


def _left_in_groups() -> Iterator[int]:
    """The memory that each limit of this process's control groups leaves, for versions 2 and 1."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        top = _GROUPS / controllers
        limit, used, cached = _V1 if controllers else _V2
        own = top / path.lstrip("/")  # missing in a container that sees its own group as the root
        for group in (own, *own.parents[: len(own.parts) - len(top.parts)]):
            try:
                allowed, taken = (int((group / name).read_text()) for name in (limit, used))
                found = _numbers(group / "memory.stat")
                yield allowed - taken + sum(found.get(name, 0) for name in cached)
            except (OSError, ValueError):  # no such group, or its limit is "max"
                continue


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}
