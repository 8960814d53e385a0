"""Decides which laws are tested with which call, and tests them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from ssdprof import operators
from ssdprof.core.base import Laws, Probe
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.oracle import spans_of
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure import pools
from ssdprof.measure.isolate import IsolatedFirstCall
from ssdprof.measure.laws import (
    AMPLIFIED_HISTORY,
    LAWS,
    LONGEST,
    SAME_FORM_LAWS,
    TURNING_KEYS,
    Trial,
    laws_of,
    tested,
    untested,
)
from ssdprof.measure.sequences import is_packed, joined
from ssdprof.operators.operator import Output

MOST_WHOLE_BYTES = 2 << 30  # larger inputs are cut to the beginnings of a few sequences
MOST_SEQUENCES = 3  # sequences of cut inputs
QUICK = {"causality", "cut in two"}
# arguments: the name of the broken law, and the inputs and the output that broke it
Keep: TypeAlias = "Callable[[str, Inputs, Output], object]"
LONG_HEADS = (1, 4)  # numbers of heads in histories that are longer than the call


class Prober:
    """Tests the laws of implementations, and decides which are due.

    Most laws are tested once for each implementation and kind of layer (operator, sizes, dtype).
    There are two exceptions.  The amplified history is also tested in later layers of a kind, but
    not with bundled kernels, because layers differ in how slowly their heads forget.  Turning keys
    are tested once for each shape of a call, because kernels cut only long calls.

    Bundled kernels are tested by the laws whose calls need no other compiled kernels than the
    captured call, since compiling would take longer than the run; in Triton's interpreter they are
    not tested.

    kinds: the kinds of implementations that are tested.
    """

    def __init__(
        self, isolated: IsolatedFirstCall, *, laws: Laws = "default", only: str = ""
    ) -> None:
        """isolated: makes the first calls of users' kernels and named libraries.
        laws: "quick": only the laws in `QUICK`.  "all": every law in every call, also of bundled
            kernels.
        only: the one law that is tested; empty: all that are due.
        """
        self._isolated = isolated
        self._only = only
        self._thorough = laws == "all"
        self._quick = laws == "quick"
        self._done: set[Hashable] = set()
        self._latest: dict[str, weakref.ref[Inputs]] = {}  # inputs by implementation
        self.kinds = {"own", "library"}
        if self._thorough or not INTERPRETED:
            self.kinds.add("bundled")

    def probe(
        self,
        implementation: Implementation,
        inputs: Inputs,
        precision: Precision,
        interpreted: bool = False,
        keep: Keep | None = None,
    ) -> tuple[Probe, ...]:
        """The results of the laws that are due for this call; empty if none is.

        inputs: the inputs of a call that the implementation computed correctly.
        interpreted: whether Triton's interpreter ran it.  Then the laws are listed as untested,
            unless all laws were requested.
        keep: called with each call that broke a law.

        Raises MissingCapabilityError if a fault in the implementation made the GPU unusable.
        """
        kind, shape = self._keys(implementation, inputs)
        latest = self._latest.get(implementation.name)
        same_inputs = latest is not None and latest() is inputs
        is_new_kind = self._thorough or kind not in self._done
        is_new_shape = self._thorough or shape not in self._done
        self.probed(implementation, inputs)

        by_every_law = self._thorough or implementation.kind != "bundled"
        too_slow = interpreted and not self._thorough
        tests_kind = is_new_kind and not self._only
        if tests_kind:
            names = set(LAWS if by_every_law or too_slow else SAME_FORM_LAWS)
            if self._quick:
                names &= QUICK
        else:
            names = set()
            if is_new_shape:
                names.add(TURNING_KEYS)
            if by_every_law and not same_inputs:
                names.add(AMPLIFIED_HISTORY)
            if self._only:
                names &= {self._only}
            if self._quick or too_slow:
                names.clear()
        if not names:
            return ()

        trial = self._trial(implementation, inputs, precision, by_every_law, interpreted)
        if tests_kind and implementation.isolated and not (self._quick or too_slow):
            # all first calls in one other process, which takes seconds to start
            self._isolated.prepare(implementation, list(trial.forms()), precision)
        probes: list[Probe] = []
        for name, law in laws_of(trial).items():
            if name not in names:
                continue
            probes.append(tested(name, partial(untested if too_slow else law, trial)))
            if probes[-1].holds == "no" and keep and trial.latest:
                keep(name, *trial.latest[0])
        if tests_kind and not self._quick and pools.applies(implementation, inputs):
            probes += pools.try_laws(implementation, inputs, precision, quick=too_slow)
        return tuple(probes)

    def _trial(
        self,
        implementation: Implementation,
        inputs: Inputs,
        precision: Precision,
        every: bool,
        interpreted: bool,
    ) -> Trial:
        """The trial of an implementation on these inputs, or on the beginnings of their sequences.

        every: all laws will be tested, in which case sequences are cut to `LONGEST` positions.
        """
        part = inputs
        if every or sum(tensor.nbytes for tensor in inputs.tensors.values()) > MOST_WHOLE_BYTES:
            longest = LONGEST[inputs.device.type]
            spans = [
                replace(span, stop=min(span.stop, span.start + longest))
                for span in spans_of(inputs)
                if span.length
            ]
            part = joined(inputs, spans[:MOST_SEQUENCES], packed=is_packed(inputs))
        long_heads: Sequence[int] = LONG_HEADS if every else ()
        return Trial(
            operator=operators.get(inputs.operator),
            implementation=implementation,
            inputs=part,
            precision=precision,
            isolated=self._isolated,
            whole=inputs,
            long_heads=long_heads[:1] if interpreted else long_heads,
        )

    def probed(self, implementation: Implementation, inputs: Inputs) -> None:
        """Note that the laws of this call have been tested, now or by an earlier process."""
        self._done.update(self._keys(implementation, inputs))
        self._latest[implementation.name] = weakref.ref(inputs)

    def _keys(self, implementation: Implementation, inputs: Inputs) -> tuple[Hashable, Hashable]:
        """A key of the implementation on this kind of layer, and one on this shape of a call."""
        dims = operators.get(inputs.operator).oracle.dims(inputs)
        kind = (
            implementation.name,
            dims.operator,
            *dims.sizes.items(),
            dims.dtype,
            dims.seqlen == 1,
            is_packed(inputs),
            inputs.state_every,
        )
        return kind, (kind, dims.batch, dims.seqlen, inputs.sequences)
