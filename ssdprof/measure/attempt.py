"""One case run for the first time: its output, or what kept it from having one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ssdprof import kernels
from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Plan
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.accuracy import check_output
from ssdprof.measure.cases import Case
from ssdprof.measure.dtypes import dtype_named
from ssdprof.measure.faults import first_line, refuse_if_lost
from ssdprof.measure.launches import recorded_launches
from ssdprof.measure.memory import run_and_measure
from ssdprof.measure.timing import Run
from ssdprof.schema import Launch, Memory, Status


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """output: None unless the status is "passed", which here says only that it ran.  plan: None if there was none."""

    status: Status
    reason: str = ""
    plan: Plan | None = None
    output: SSDOutput | None = None
    memory: Memory | None = None
    launches: tuple[Launch, ...] = ()

    @property
    def variant(self) -> str:
        """Which kernel it was to be; empty if it was not planned."""
        return self.plan.variant if self.plan else ""


def kernel_precision(case: Case) -> Precision:
    return Precision(intermediates=case.precision.intermediates, state_dtype=dtype_named(case.precision.state_dtype))


def run_of(case: Case, inputs: SSDInputs) -> Run:
    """The call that the case stands for."""
    return partial(kernels.get("ssd", case.implementation).run, inputs, kernel_precision(case))


def attempt(case: Case, inputs: SSDInputs) -> Attempt:
    """Plan and run the case.  Whatever an implementation raises becomes a status and a reason.

    Raises MissingCapabilityError if a fault in it has taken the GPU from this process.
    """

    def plan() -> Plan:
        return kernels.get("ssd", case.implementation).plan(inputs, kernel_precision(case))

    return attempt_call(case.implementation, plan, run_of(case, inputs), inputs)


def attempt_call(name: str, make_plan: Callable[[], Plan], run: Run, inputs: SSDInputs) -> Attempt:
    """`attempt` for a call that is no registered implementation's; `name` is shown."""
    plan = None
    try:
        plan = make_plan()
        with recorded_launches() as launches:
            output, memory = run_and_measure(run, inputs.x.device)
        check_output(output, inputs)
    except UnsupportedError as error:
        return Attempt(status="refused", reason=str(error), plan=plan)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Attempt(status="out of memory", reason=first_line(error), plan=plan)
    except Exception as error:
        refuse_if_lost(inputs.x.device, name, error)
        return Attempt(status="failed", reason=f"{type(error).__name__}: {first_line(error)}", plan=plan)
    # without a Triton kernel that could be asked, the plan says how it ran
    planned = Launch(kernel=name, config=dict(plan.config))
    return Attempt(status="passed", plan=plan, output=output, memory=memory, launches=tuple(launches) or (planned,))
