"""Replays one layer's captured inputs through every implementation at every precision: verifies, then times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ssdprof import kernels, operators
from ssdprof.kernels.device import INTERPRETED
from ssdprof.measure.accuracy import Comparison
from ssdprof.measure.attempt import Attempt, attempt
from ssdprof.measure.bench import Bench, CudaBench
from ssdprof.measure.caller import Caller
from ssdprof.measure.cases import Case, Group, batches_of, groups_of
from ssdprof.measure.engine import Timed, Verified, objection, time_verified, verify
from ssdprof.measure.faults import first_line
from ssdprof.measure.memory import outputs_that_fit
from ssdprof.measure.rehearsal import Rehearsals
from ssdprof.measure.roofline import roofline
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.operators import tensors
from ssdprof.operators.named import Roster
from ssdprof.pipeline.request import COMPARED
from ssdprof.progress import Advance, Unwatched, Watcher
from ssdprof.schema import CallRef, CaseResult, Ceilings, LayerRef, PrecisionRecord


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """precisions: of implementations without their own.
    implementations: names, as `operators.named` resolves them; unavailable ones are left out.
    baseline: at exact intermediates and the same state dtype, or at its own precision; replayed even if it is not
        in `implementations`.
    roster, rehearsals: resolved names, and first calls of users' kernels, from other layers.
    timed: measure speed, if there is a GPU.
    ceilings: for the roofline; None: no roofline.
    on_case: called with each finished case, and after an interruption with the untimed ones.
    on_timed: called after each timed group, while the GPU is still warm from it.
    """

    precisions: tuple[PrecisionRecord, ...]
    implementations: tuple[str, ...] = COMPARED
    baseline: str = COMPARED[0]
    roster: Roster | None = None
    rehearsals: Rehearsals = field(default_factory=Rehearsals)
    timed: bool = True
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
    ceilings: Ceilings | None = None
    watcher: Watcher = field(default_factory=Unwatched)
    on_case: Callable[[CaseResult], object] = lambda _: None
    on_timed: Callable[[], object] = lambda: None


def unready(operator: str, implementations: Sequence[str] = COMPARED) -> str:
    """The reason why the operator cannot be replayed; empty if it can."""
    record = operators.get(operator)
    if record.judgement is None or record.cost is None:
        return "ssdprof cannot judge what its kernels compute"
    missing = [name for name in implementations if name not in kernels.names(operator)]
    return f"there is no {' or '.join(map(repr, missing))} implementation of {operator}" if missing else ""


def replay_layer(
    layer: LayerRef, inputs: Any, options: ReplayOptions, call: CallRef | None = None
) -> tuple[CaseResult, ...]:
    """The result of every case, grouped by state dtype, the baseline first.  Errors are in a case's status.

    call: which of the layer's calls the inputs are of; None: the one for a whole prompt.

    Raises BadInputError for an unknown implementation, MissingCapabilityError for an unavailable baseline.
    """
    device = tensors.device(inputs)
    bench = CudaBench(device) if options.timed and device.type == "cuda" and not INTERPRETED else None
    return LayerReplay(layer, inputs, options, bench, call).run()


class LayerReplay:
    """The replay of one layer, with the results so far.  Without a bench, nothing is timed."""

    def __init__(
        self, layer: LayerRef, inputs: Any, options: ReplayOptions, bench: Bench | None, call: CallRef | None = None
    ) -> None:
        self._layer = layer
        self._call_ref = call
        self._inputs = inputs
        self._dims = operators.of(inputs).costed.dims(inputs)
        self._options = options
        self._bench = bench
        operator, roster = operators.of(inputs), options.roster or Roster(tensors.device(inputs))
        compared = [roster.get(operator, word) for word in options.implementations]
        present = [named for named in compared if named.implementation is not None]
        baseline = roster.get(operator, options.baseline)
        everyone = {one.name: one for one in (*present, baseline)}
        callers = {name: Caller(one, inputs, options.rehearsals) for name, one in everyone.items()}
        self._libraries = {name for name, one in everyone.items() if one.kind == "library"}
        fixed = {name: one.precisions(self._dims.dtype, ()) for name, one in everyone.items() if one.fixed is not None}
        self._groups = groups_of(options.precisions, [one.name for one in present], baseline.name, fixed)
        self._calls = {
            case: callers[case.implementation].call(case.precision) for group in self._groups for case in group
        }
        self._results: dict[Case, CaseResult] = {}
        self._verified: dict[Case, Verified] = {}
        self._finished: set[Case] = set()

    def run(self) -> tuple[CaseResult, ...]:
        """Run all cases.  After an interruption, `on_case` still gets the cases that were verified."""
        try:
            for batch in batches_of(self._groups, outputs_that_fit(self._inputs)):
                self._judge(batch)
            if self._bench is not None:
                for group in self._groups:
                    self._time(group, self._bench)
        except BaseException:
            for case, result in self._results.items():
                if result.accuracy and case not in self._finished:
                    self._update(case, reason="interrupted before it was timed")
                    self._finish(case)
            raise
        return tuple(self._results[case] for group in self._groups for case in group)

    # --- accuracy

    def _judge(self, batch: Sequence[Case]) -> None:
        """Run the batch and compare it with the oracle; finish the cases that will not be timed."""
        attempts: dict[Case, Attempt] = {}
        with self._step("running", len(batch), "cases") as advance:
            for case in batch:
                attempts[case] = self._attempt(case)
                advance(1)
        ran = {case: tried for case, tried in attempts.items() if tried.output is not None}
        if ran:
            self._compare(ran)
        for case in batch:
            if case not in self._finished and (self._bench is None or self._results[case].status != "passed"):
                self._finish(case)

    def _attempt(self, case: Case) -> Attempt:
        tried = attempt(self._calls[case])
        if case not in self._results:  # a baseline runs for every batch that needs it
            self._results[case] = CaseResult(
                layer=self._layer,
                call=self._call_ref,
                dims=self._dims,
                implementation=case.implementation,
                precision=case.precision,
                variant=tried.variant,
                status=tried.status,
                reason=tried.reason,
                plan=tried.why_this_plan,
                memory=tried.memory,
                launches=tried.launches,
            )
        return tried

    def _compare(self, attempts: Mapping[Case, Attempt]) -> None:
        calls = self._calls
        try:
            with self._step(
                "comparing with the fp64 oracle", self._dims.batch * self._dims.seqlen, "tokens"
            ) as advance:
                verified = verify(
                    {calls[case]: tried for case, tried in attempts.items()},
                    self._inputs,
                    baselines={calls[case]: calls[group[0]] for group in self._groups for case in group[1:]},
                    on_progress=advance,
                )
        except torch.OutOfMemoryError as error:
            for case in attempts:
                self._update(
                    case, status="out of memory", reason=f"while compared with the oracle: {first_line(error)}"
                )
            return
        for case in attempts:
            one = self._verified[case] = verified[calls[case]]
            assert one.comparison is not None
            found = one.comparison
            status = "passed" if self._tolerated(case, found) else found.status
            self._update(case, status=status, reason=found.reason, accuracy=found.tensors)

    def _tolerated(self, case: Case, comparison: Comparison) -> bool:
        """Whether the case passes although its output is outside the budget: another library's, if it is close."""
        return comparison.sloppy and case.implementation in self._libraries

    def _objection(self, case: Case, comparison: Comparison) -> str:
        return "" if self._tolerated(case, comparison) else objection(comparison)

    # --- speed

    def _time(self, group: Group, bench: Bench) -> None:
        """Time the group's cases that passed, against its baseline, and finish them."""
        cases = [case for case in group if self._results[case].status == "passed"]
        if not cases:
            return
        with self._step(f"timing, {group[0].precision.state_dtype} states"):
            timed = time_verified(
                [self._verified[case] for case in cases],
                bench,
                self._options.sampling,
                objections={self._calls[case]: partial(self._objection, case) for case in cases},
            )
        self._options.on_timed()
        baseline = timed.get(self._calls[group[0]])
        for case in cases:
            self._record(case, timed[self._calls[case]], group[0], baseline)
            self._finish(case)

    def _record(self, case: Case, timed: Timed, first: Case, baseline: Timed | None) -> None:
        if timed.wavered:
            self._update(case, reason="repeated calls differ in their bits, within the budget")
        if timed.untimed:
            self._update(case, reason=timed.untimed)
        if timed.spoilt:
            self._update(case, status=timed.spoilt.status, reason=timed.spoilt.reason)
        if timed.sampled is None:
            return
        timing, ceilings = timed.sampled.timing(), self._options.ceilings
        over = baseline.sampled if baseline is not None and case != first else None
        smallest = self._options.sampling.smallest_difference
        self._update(
            case,
            timing=timing,
            speedup=timed.sampled.speedup(over, first.label, smallest) if over is not None else None,
            roofline=roofline(self._inputs, ceilings, timing.device_median_us) if ceilings else None,
        )

    # --- records

    def _update(self, case: Case, **fields: Any) -> None:
        self._results[case] = CaseResult(**(dict(self._results[case]) | fields))

    def _finish(self, case: Case) -> None:
        self._finished.add(case)
        self._options.on_case(self._results[case])

    def _step(self, text: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Advance]:
        return self._options.watcher.step(f"{self._layer.name}: {text}", total, unit=unit)
