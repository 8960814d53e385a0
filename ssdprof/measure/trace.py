"""The GPU work of one call, by the part of the program that launched it.

The program marks its parts with `marked`; torch's profiler notes when each mark began and ended on
the host, when each kernel was launched, and how long it ran.  A kernel belongs to the innermost
mark that was open at its launch.
"""

import json
import math
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from triton.runtime.interpreter import GridExecutor

from ssdprof import files

PREFIX = "ssdprof:"  # of the names of marks
# categories of the profiler's events: work on the GPU, and calls on the host that launch it
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Trace = list[Mapping[str, Any]]  # events as in the Chrome trace format, times in microseconds
# A kernel, copy or fill on the GPU: the part of the program that launched it (None if no mark was
# open), its name, and its microseconds.
GpuWork = tuple[str | None, str, float]


def marked(part: str) -> AbstractContextManager[object]:
    """A context that marks the launches in it as those of `part`."""
    return torch.autograd.profiler.record_function(PREFIX + part)


def traced(run: Callable[[], object], device: torch.device) -> Trace:
    """The events of torch's profiler for `run`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Without acc_events torch warns that only the last cycle of the profiler is kept; there is one.
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        _wait(device)
    with tempfile.TemporaryDirectory(prefix="ssdprof-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: Trace = json.loads(file.read_bytes())["traceEvents"]
    return events


def write(file: Path, calls: Mapping[str, Callable[[], object]], device: torch.device) -> None:
    """Make the calls one after the other, each in a mark of its name, and write a trace of them
    that Perfetto and Chrome can show.

    Raises what `files.write_text` raises.
    """

    def one_by_one() -> None:
        for name, call in calls.items():
            with marked(name):
                call()
                _wait(device)

    with _interpreted():
        events = traced(one_by_one, device)
    files.write_text(file, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


@contextmanager
def _interpreted() -> Iterator[None]:
    """Mark every kernel that Triton's interpreter runs in the block."""
    run = GridExecutor.__call__

    def marked_run(self: GridExecutor, *args: object, **options: object) -> None:
        with marked(self.fn.__name__):
            run(self, *args, **options)

    GridExecutor.__call__ = marked_run
    try:
        yield
    finally:
        GridExecutor.__call__ = run


def _wait(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_us(trace: Trace) -> float:
    """The time in which at least one kernel, copy or fill ran on the GPU, in microseconds."""
    spans = [
        (float(event["ts"]), float(event["dur"]))
        for event in trace
        if event.get("cat") in _GPU_CATEGORIES
    ]
    busy = 0.0
    busy_until = -math.inf
    for begin, us in sorted(spans):
        busy += max(0.0, begin + us - max(begin, busy_until))  # the part after all earlier spans
        busy_until = max(busy_until, begin + us)
    return busy


def work(trace: Trace) -> list[GpuWork]:
    """All work on the GPU, in the trace's order."""
    # thread -> its marks: begin, -end, part.  The end is negative so that sorted marks that begin
    # at the same time have the outer one first.
    marks: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches = {}  # correlation id, which the GPU's work shares -> the event of the launch
    for event in trace:
        category = event.get("cat")
        arguments = event.get("args", {})
        if category == "user_annotation" and event["name"].startswith(PREFIX):
            begin = float(event["ts"])
            end = begin + float(event["dur"])
            marks[event["tid"]].append((begin, -end, event["name"].removeprefix(PREFIX)))
        elif category in _LAUNCHES and "correlation" in arguments:
            launches[arguments["correlation"]] = event
    for thread_marks in marks.values():
        thread_marks.sort()
    gpu_work = []
    for event in trace:
        if event.get("cat") in _GPU_CATEGORIES:
            launch = launches.get(event.get("args", {}).get("correlation"))
            part = _open_at(launch["ts"], marks[launch["tid"]]) if launch else None
            gpu_work.append((part, event["name"], float(event["dur"])))
    return gpu_work


def _open_at(time: float, marks: list[tuple[float, float, str]]) -> str | None:
    """The part of the innermost mark that is open at a time; None if none is.

    marks: those of one thread, which are nested, sorted.
    """
    begun = marks[: bisect_right(marks, (time, math.inf))]
    for _, negative_end, part in reversed(begun):
        if -negative_end > time:
            return part
    return None
