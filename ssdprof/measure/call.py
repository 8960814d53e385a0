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
    """A call that must not be made here; the message says why, `status` what becomes of its case."""

    def __init__(self, status: schema.Fault, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A run of an operator on its inputs, equal to itself alone.

    implementation, label: shown, and no keys; the label says the precision too.
    precision: the one that the run claims.
    widens: final states come in another dtype than the operator's, as other libraries give them; they are judged in
        fp32.
    rehearse: comes before the first call.  Raises UnfitError for a call that must not be made in this process.
    damage: what was written to the inputs or next to them, in words; empty if nothing was.
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
        """The output as it is compared with the oracle."""
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
