"""Replaces a model's operators, and their surroundings, while a prefill runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ssdprof.capture.conv_and_norm import ConvAndNorm
from ssdprof.capture.forward import prefill
from ssdprof.capture.intercept import CallCount, OperatorCall, Result
from ssdprof.checkpoint.meta import Mixer
from ssdprof.errors import BadInputError
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.measure.rehearsal import Rehearsals
from ssdprof.operators.dtypes import precision_of
from ssdprof.operators.named import Named
from ssdprof.pipeline.parts import marking, parts_marked
from ssdprof.pipeline.substitute import Compute, substituted
from ssdprof.schema import LayerRef, PrecisionRecord
from ssdprof.schema.prefill import Surroundings
from ssdprof.schema.serving import split_prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One implementation of the operators, with the convolution and gated norm around it.

    named: by operator.  version: of another library.  rehearsals: first calls of users' kernels.
    """

    name: str
    named: Mapping[str, Named]
    precision: PrecisionRecord
    surroundings: Surroundings
    version: str = ""
    rehearsals: Rehearsals = field(default_factory=Rehearsals)

    @property
    def label(self) -> str:
        """ "fused, bundled surroundings"."""
        return f"{self.name}, {self.surroundings} surroundings"

    @property
    def _precision(self) -> Precision:
        return precision_of(self.precision)

    def compute(self, call: OperatorCall) -> Result:
        result: Result = self.implementation(call).run(call.inputs, self._precision)
        return result

    def plan(self, call: OperatorCall) -> Plan:
        return self.implementation(call).plan(call.inputs, self._precision)

    def rehearse(self, call: OperatorCall) -> None:
        """Raises UnfitError for a user's kernel that fails at its first call."""
        named = self.named[call.mixer.operator]
        if named.kind == "own":
            self.rehearsals.require(named, call.inputs, self.precision)

    def implementation(self, call: OperatorCall) -> Implementation:
        return self.named[call.mixer.operator].present


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """A model and a prompt.

    model: a causal language model in eval mode.  ids: (b, l) int64 on its device.
    sites: all of its mixers.  layer: the site whose operator is timed alone.
    bundled: the bundled surroundings of the model; unused if no contender has them.
    """

    model: Any
    ids: torch.Tensor
    segment_length: int
    sites: tuple[Mixer, ...]
    layer: LayerRef
    bundled: ConvAndNorm

    @property
    def segments(self) -> int:
        return len(split_prompt(self.ids.shape[1], self.segment_length))

    @property
    def operator_calls(self) -> int:
        return len(self.sites) * self.segments

    def first_token_logits(self) -> torch.Tensor:
        """(b, vocabulary)"""
        return prefill(self.model, self.ids, self.segment_length, keeps_cache=True)[:, -1]

    def first_token(self) -> torch.Tensor:
        """The timed work: the first token of each row, (b)."""
        return self.first_token_logits().argmax(-1)

    @contextmanager
    def running(
        self, contender: Contender, compute: Compute | None = None, *, marks: bool = False
    ) -> Iterator[CallCount]:
        """While the context is open the model runs with the contender, or with `compute` instead.

        marks: its parts are marked for a profile.
        """
        compute = compute or contender.compute
        with ExitStack() as stack:
            if contender.surroundings == "bundled":
                stack.enter_context(self.bundled.installed())
            if marks:
                stack.enter_context(parts_marked(self.model, self.sites))
            yield stack.enter_context(substituted(self.sites, marking(compute) if marks else compute))

    def check(self, count: CallCount) -> None:
        """Raises BadInputError if one whole prefill bypassed its operator."""
        if count.steps or count.calls != self.operator_calls:
            raise BadInputError(
                f"This model made {count.calls} operator calls where {self.operator_calls} were expected: "
                "part of it bypasses its operator.",
                "Choose a --segment that leaves no single token, and load the model without use_kernels.",
            )
