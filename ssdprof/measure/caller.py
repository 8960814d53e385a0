"""Makes calls of a named implementation: bundled, of another library, or the user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

from ssdprof import schema
from ssdprof.measure.call import Call, call_of
from ssdprof.measure.guard import GuardedInputs
from ssdprof.measure.rehearsal import Rehearsals
from ssdprof.operators.named import Named


class Caller:
    """Makes the calls of one available implementation on the same inputs.

    A user's kernel gets a copy of the inputs between guards, which protects other calls, and is rehearsed first.
    """

    def __init__(self, named: Named, inputs: Any, rehearsals: Rehearsals) -> None:
        self._named, self._inputs, self._rehearsals = named, inputs, rehearsals
        self._guarded = GuardedInputs(inputs) if named.kind == "own" else None

    def call(self, precision: schema.PrecisionRecord, *, label: str = "") -> Call:
        """label: see `Call`."""
        named, implementation = self._named, self._named.present
        if self._guarded is None:
            return call_of(implementation, self._inputs, precision, label=label, widens=named.kind == "library")
        return call_of(
            implementation,
            self._guarded.inputs,
            precision,
            label=label,
            rehearse=partial(self._rehearsals.require, named, self._inputs, precision),
            damage=self._guarded.damage,
        )
