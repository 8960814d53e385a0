"""A timer and a profiler without a GPU: the operators and the rest of a model have given times."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fakes
import numpy as np
from fakes import RAN
from torch.profiler import ProfilerActivity, profile

from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.trace import Trace

# of an operator
ONCE = SamplingPlan(warmup_rounds=0, min_recordings=2, max_recordings=2, min_rounds=1, max_rounds=1)
REST_US = 1000.0  # of a prefill, without its operators


@dataclass
class FakeTimer(fakes.FakeTimer):
    """A replay takes the cost of its implementation; a call takes `REST_US` plus the costs of its
    operators.
    """

    events: list[str] = field(default_factory=list)

    def reallocate(self, _generator: np.random.Generator):
        self.events.append("reallocate")

    def call_us(self, run: Callable[[], Any]) -> float:
        RAN.clear()
        run()
        self.events.append(f"call {RAN[0][0]}")
        return REST_US + sum(cost for _, cost in RAN)


def cpu_trace(run: Callable[[], object]) -> Trace:
    """A trace in which every matrix product and power on the CPU is a kernel of 10 microseconds,
    launched when the operation began.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: Trace = json.loads(file.read_bytes())["traceEvents"]
    trace = list(events)
    for number, event in enumerate(events):
        if event.get("cat") == "cpu_op" and event["name"] in (
            "aten::mm",
            "aten::bmm",
            "aten::addmm",
            "aten::pow",
        ):
            launch = event | {"cat": "cuda_runtime", "name": "launch", "dur": 1}
            kernel = event | {"cat": "kernel", "ts": 0, "tid": 7, "dur": 10}
            trace += [work | {"args": {"correlation": number}} for work in (launch, kernel)]
    return trace
