"""A call made for the first time: its output, or what kept it from having one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssdprof.kernels import UnsupportedError
from ssdprof.kernels.registry import Plan
from ssdprof.measure.accuracy import check_output
from ssdprof.measure.call import Call, Run, UnfitError
from ssdprof.measure.faults import first_line, refuse_if_interrupted, refuse_if_lost
from ssdprof.measure.launches import recorded_launches
from ssdprof.measure.memory import run_and_measure
from ssdprof.operators.operator import Output
from ssdprof.schema import Launch, Memory, Status


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """output: None unless the status is "passed", which here says only that it ran.  plan: None if there was none."""

    status: Status
    reason: str = ""
    plan: Plan | None = None
    output: Output | None = None
    memory: Memory | None = None
    launches: tuple[Launch, ...] = ()

    @property
    def variant(self) -> str:
        """Which kernel it was to be; empty if it was not planned."""
        return self.plan.variant if self.plan else ""

    @property
    def why_this_plan(self) -> str:
        """Why it ran as it did; empty if it was not planned."""
        return self.plan.reason if self.plan else ""


def attempt(call: Call, run: Run | None = None) -> Attempt:
    """Plan and run the call.  Whatever an implementation raises becomes a status and a reason.

    run: in the place of `call.run`, to the same output.
    Raises MissingCapabilityError if a fault in it has taken the GPU from this process, and KeyboardInterrupt if it is
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
    except UnfitError as error:
        return Attempt(status=error.status, reason=str(error), plan=plan)
    except UnsupportedError as error:
        return Attempt(status="refused", reason=str(error), plan=plan)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Attempt(status="out of memory", reason=first_line(error), plan=plan)
    except Exception as error:
        refuse_if_interrupted(error)
        refuse_if_lost(call.device, call.implementation, error)
        return Attempt(status="failed", reason=f"{type(error).__name__}: {first_line(error)}", plan=plan)
    # without a Triton kernel that could be asked, the plan says how it ran
    planned = Launch(kernel=call.implementation, config=dict(plan.config))
    return Attempt(status="passed", plan=plan, output=output, memory=memory, launches=tuple(launches) or (planned,))
