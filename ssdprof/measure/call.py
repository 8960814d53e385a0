"""One call that is verified and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ssdprof import schema
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import precision_of
from ssdprof.operators.operator import Output

Run = Callable[[], Output]


class UnfitError(Exception):
    """A call that must not be made here.  The message is the reason; `status` is the status of its case."""

    def __init__(self, status: schema.Fault, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A run of an operator on its inputs.  Compared by identity.

    implementation, label: for display; the label includes the precision.
    precision: the declared one.
    widens: final states have another dtype than the operator's, as in other libraries; they are compared in
        fp32.
    rehearse: called before the first call.  Raises UnfitError for a call that must not be made in this process.
    damage: a phrase on writes to the inputs or next to them; empty if there were none.
    """

    implementation: str
    label: str
    inputs: Any
    precision: Precision
    run: Run
    plan: Callable[[], Plan]
    widens: bool = False
    rehearse: Callable[[], None] = lambda: None
    damage: Callable[[], str] = lambda: ""

    @property
    def device(self) -> torch.device:
        return tensors.device(self.inputs)

    def judged_output(self, output: Output) -> Output:
        """The output in the form that is compared with the oracle."""
        out, final_states = output
        return (out, final_states.to(torch.float32)) if self.widens else output


def call_of(
    implementation: Implementation,
    inputs: Any,
    precision: schema.PrecisionRecord,
    *,
    label: str = "",
    widens: bool = False,
    rehearse: Callable[[], None] = lambda: None,
    damage: Callable[[], str] = lambda: "",
) -> Call:
    """The call of an implementation.  The other arguments: see `Call`."""
    wanted = precision_of(precision)
    return Call(
        implementation=implementation.name,
        label=label or f"{implementation.name} {precision}",
        inputs=inputs,
        precision=wanted,
        run=partial(implementation.run, inputs, wanted),
        plan=partial(implementation.plan, inputs, wanted),
        widens=widens,
        rehearse=rehearse,
        damage=damage,
    )
