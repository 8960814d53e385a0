"""The GPU work of one call, by the part of the program that launched it.

The program marks its parts with `marked`; torch's profiler notes when each mark began and ended on the host, when each
kernel was launched, and how long it ran.  A kernel belongs to the innermost mark that was open at its launch.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PREFIX = "ssdprof:"
_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Trace = list[Mapping[str, Any]]  # events as in the Chrome trace format, times in microseconds


@dataclass(frozen=True)
class GpuWork:
    """A kernel, copy or fill on the GPU.  part: None if no mark was open at its launch."""

    part: str | None
    name: str
    us: float


def marked(part: str) -> AbstractContextManager[Any]:
    """Marks the launches in the block as those of `part`."""
    return torch.autograd.profiler.record_function(PREFIX + part)


def traced(run: Callable[[], object], device: torch.device) -> Trace:
    """The events of torch's profiler for `run`."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: Trace = json.loads(file.read_bytes())["traceEvents"]
    return events


def work(trace: Trace) -> list[GpuWork]:
    """All work on the GPU, in the trace's order."""
    parts = {thread: _Timeline(marks) for thread, marks in _marks(trace).items()}
    launched = {
        event["args"]["correlation"]: event
        for event in trace
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in trace:
        if event.get("cat") in _ON_THE_GPU:
            launch = launched.get(event.get("args", {}).get("correlation"))
            timeline = parts.get(launch["tid"]) if launch else None
            part = timeline.at(launch["ts"]) if launch and timeline else None
            found.append(GpuWork(part=part, name=event["name"], us=float(event["dur"])))
    return found


def _marks(trace: Trace) -> dict[Any, list[tuple[float, float, str]]]:
    """(begin, end, part) of every mark, by thread."""
    found: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in trace:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
            begin = float(event["ts"])
            found[event["tid"]].append((begin, begin + float(event["dur"]), event["name"].removeprefix(PREFIX)))
    return found


class _Timeline:
    """The innermost mark at any time.  Marks of a thread are nested."""

    def __init__(self, marks: Iterable[tuple[float, float, str]]) -> None:
        self._times: list[float] = []
        self._parts: list[str | None] = []
        opened: list[tuple[float, str]] = []  # end, part
        for begin, end, part in sorted(marks, key=lambda mark: (mark[0], -mark[1])):
            self._close(opened, begin)
            opened.append((end, part))
            self._change(begin, part)
        self._close(opened, float("inf"))

    def at(self, time: float) -> str | None:
        place = bisect_right(self._times, time)
        return self._parts[place - 1] if place else None

    def _close(self, opened: list[tuple[float, str]], until: float) -> None:
        while opened and opened[-1][0] <= until:
            end, _ = opened.pop()
            self._change(end, opened[-1][1] if opened else None)

    def _change(self, time: float, part: str | None) -> None:
        self._times.append(time)
        self._parts.append(part)
