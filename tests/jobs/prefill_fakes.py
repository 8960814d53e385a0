"""A timer and a profiler without a GPU: the operators and the rest of a model have given times."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ssdprof.measure.timing import CudaTimer
from ssdprof.measure.trace import Trace

REST_US = 1000.0  # of a prefill, without its operators


class FakeTimer(CudaTimer):
    """A replay takes the time in `us` of its implementation; a call takes `REST_US` plus its operators' times.

    ran: the implementations that ran, one entry per operator call; the caller appends it.
    """

    device = torch.device("cpu")

    def __init__(self, us: Mapping[str, float]) -> None:
        self.us = us
        self.ran: list[str] = []
        self.events: list[str] = []

    def reallocate(self, _generator: np.random.Generator) -> None:
        self.events.append("reallocate")

    def record(self, run: Any) -> tuple[Any, Any]:
        name = run.args[0].implementation.name  # of the engine's `Call`
        return name, run()

    def device_us(self, graph: Any) -> float:
        return self.us[graph]

    def call_us(self, run: Callable[[], Any]) -> float:
        self.ran.clear()
        run()
        self.events.append(f"call {self.ran[0]}")
        return REST_US + sum(self.us[name] for name in self.ran)


def cpu_trace(run: Callable[[], object]) -> Trace:
    """A trace in which every matrix product and power on the CPU is a kernel of 10 microseconds, launched when the
    operation began."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: Trace = json.loads(file.read_bytes())["traceEvents"]
    trace = list(events)
    for number, event in enumerate(events):
        if event.get("cat") == "cpu_op" and event["name"] in ("aten::mm", "aten::bmm", "aten::addmm", "aten::pow"):
            arguments = {"correlation": number}
            launch = {"cat": "cuda_runtime", "name": "launch", "ts": event["ts"], "tid": event["tid"], "dur": 1}
            trace.append(launch | {"args": arguments})
            trace.append({"cat": "kernel", "name": event["name"], "ts": 0, "tid": 7, "dur": 10, "args": arguments})
    return trace
