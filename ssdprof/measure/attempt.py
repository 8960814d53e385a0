"""Makes a call for the first time, and records its output or the reason why it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssdprof.kernels.registry import Plan
from ssdprof.measure.accuracy import check_output
from ssdprof.measure.call import Call, Run
from ssdprof.measure.faults import status_of
from ssdprof.measure.launches import recorded_launches
from ssdprof.measure.memory import run_and_measure
from ssdprof.operators.operator import Output
from ssdprof.schema import Fault, Launch, Memory


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """output: None unless the status is "passed", which here means only that it ran.  plan: None if planning failed."""

    status: Literal["passed"] | Fault
    reason: str = ""
    plan: Plan | None = None
    output: Output | None = None
    memory: Memory | None = None
    launches: tuple[Launch, ...] = ()

    @property
    def variant(self) -> str:
        """The planned kernel; empty if planning failed."""
        return self.plan.variant if self.plan else ""

    @property
    def why_this_plan(self) -> str:
        """The reason of the plan; empty if planning failed."""
        return self.plan.reason if self.plan else ""


def attempt(call: Call, run: Run | None = None) -> Attempt:
    """Plan and run the call.  An error of the implementation becomes a status and a reason.

    run: replaces `call.run`; it must return the same output.
    Raises MissingCapabilityError if a fault in it made the GPU unusable, and KeyboardInterrupt if it is
    interrupted.
    """
    plan = None
    try:
        plan = call.plan()
        call.rehearse()
        with recorded_launches() as launches:
            output, memory = run_and_measure(lambda: call.judged_output((run or call.run)()), call.device)
        check_output(output, call.inputs)
        if damage := call.damage():
            return Attempt(status="failed", reason=damage, plan=plan)
    except Exception as error:
        status, reason = status_of(error, call.device, call.implementation)
        return Attempt(status=status, reason=reason, plan=plan)
    # without a Triton kernel to inspect, the plan describes the launch
    planned = Launch(kernel=call.implementation, config=dict(plan.config))
    return Attempt(status="passed", plan=plan, output=output, memory=memory, launches=tuple(launches) or (planned,))
