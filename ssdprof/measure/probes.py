"""Which laws are tested with which call: each implementation once for a kind of layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from ssdprof import operators
from ssdprof.core.base import Holds, Laws, Probe
from ssdprof.environment import child
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.inputs import Inputs
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure import pools
from ssdprof.measure.isolate import IsolatedFirstCall
from ssdprof.measure.laws import (
    AMPLIFIED_HISTORY,
    LONGEST,
    OF_THE_SAME_FORM,
    TURNING_KEYS,
    Broken,
    Law,
    NotApplicable,
    Trial,
    laws_of,
)
from ssdprof.measure.sequences import is_packed, joined, spans_of
from ssdprof.operators.operator import Output

MOST_WHOLE_BYTES = 2 << 30  # of inputs that are not cut
MOST_SEQUENCES = 3
QUICK = {"causality", "cut in two"}
# the name of a law, and the inputs and the output that broke it
Keep: TypeAlias = "Callable[[str, Inputs, Output], object]"
LONG_HEADS = (1, 4)  # of histories that are longer than the call


class Prober:
    """Probes implementations, each once for a kind of layer: operator, sizes and dtype.  In later
    layers of a kind it tests the amplified history alone, and not of bundled kernels: how slowly
    heads forget differs from layer to layer.  Turning keys it tests once for each shape of a call,
    since kernels cut long calls alone.

    laws: "quick": `QUICK` alone, where an implementation is new.  "all": in every call, and bundled
        kernels by every law.  By default these are probed by the laws that call what was compiled
        for the captured call, at its length, since compiling takes longer than the run; in Triton's
        interpreter not at all.
    kinds: of the implementations that are probed.
    only: the law that is tested; empty: all.
    """

    def __init__(
        self, isolated: IsolatedFirstCall, *, laws: Laws = "default", only: str = ""
    ) -> None:
        self._isolated, self._only = isolated, only
        self._thorough, self._quick = laws == "all", laws == "quick"
        self._done: set[Hashable] = set()
        self._latest: dict[str, weakref.ref[Inputs]] = {}  # inputs by implementation
        self.kinds: set[str] = (
            {"own", "library", "bundled"}
            if self._thorough or not INTERPRETED
            else {"own", "library"}
        )

    def probe(
        self,
        implementation: Implementation,
        inputs: Inputs,
        precision: Precision,
        interpreted: bool = False,
        keep: Keep | None = None,
    ) -> tuple[Probe, ...]:
        """Empty if nothing was to be done.

        inputs: of a call that the implementation computed correctly.  interpreted: slowly, by
        Triton's interpreter.  keep: gets the call that broke a law.  Raises MissingCapabilityError
        if a fault in the implementation made the GPU unusable.
        """
        kind, shape = self._keys(implementation, inputs)
        new_kind = self._thorough or kind not in self._done
        new_shape = self._thorough or shape not in self._done
        latest = self._latest.get(implementation.name)
        same_inputs = latest is not None and latest() is inputs
        self.probed(implementation, inputs)
        every = self._thorough or implementation.kind != "bundled"
        skipped = interpreted and not self._thorough
        names = set()
        if new_shape and not skipped:
            names.add(TURNING_KEYS)
        if every and not same_inputs and not skipped:
            names.add(AMPLIFIED_HISTORY)
        if self._only:
            names &= {self._only}
        if self._quick:
            names.clear()
        if not names and (self._only or not new_kind):
            return ()
        trial = self._trial(implementation, inputs, precision, every, interpreted)
        laws = laws_of(trial)
        test = partial(tested, trial, keep=keep)
        if self._only or not new_kind:
            return tuple(test(name, law) for name, law in laws.items() if name in names)
        if skipped:
            why = "Triton's interpreter runs it; --laws all tests it"
            probes = [Probe(name=name, holds="not applicable", detail=why) for name in laws]
        else:
            if implementation.isolated and not self._quick:
                self._isolated.prepare(implementation, list(trial.forms()), precision)
            wanted = set(laws) if every else set(OF_THE_SAME_FORM)
            if self._quick:
                wanted &= QUICK
            probes = [test(name, law) for name, law in laws.items() if name in wanted]
        if not self._quick and pools.applies(implementation, inputs):
            probes += pools.try_laws(implementation, inputs, precision, quick=skipped)
        return tuple(probes)

    def _trial(
        self,
        implementation: Implementation,
        inputs: Inputs,
        precision: Precision,
        every: bool,
        interpreted: bool,
    ) -> Trial:
        """every: all laws will be tested, with sequences of at most `LONGEST` positions."""
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
        """Take this call as probed."""
        self._done.update(self._keys(implementation, inputs))
        self._latest[implementation.name] = weakref.ref(inputs)

    def _keys(self, implementation: Implementation, inputs: Inputs) -> tuple[Hashable, Hashable]:
        """Keys of the kind of layer, and of the shape of the call."""
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


def tested(trial: Trial, name: str, law: Law, keep: Keep | None) -> Probe:
    """Whether the law holds.  Raises MissingCapabilityError if a fault made the GPU unusable."""
    child.alive()
    holds: Holds = "not applicable"
    try:
        detail = law(trial) or ""
        holds = "yes"
    except Broken as error:
        holds, detail = "no", str(error)
        if keep and trial.latest:
            keep(name, *trial.latest[0])
    except NotApplicable as error:
        detail = str(error)
    except torch.OutOfMemoryError:
        detail = "out of memory"
    return Probe(name=name, holds=holds, detail=detail)
