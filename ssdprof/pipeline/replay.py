"""One layer's captured inputs through every implementation at every precision: right first, then how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ssdprof import kernels
from ssdprof.errors import BadInputError
from ssdprof.kernels._triton import INTERPRETED
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.measure.accuracy import Candidate, compare
from ssdprof.measure.attempt import attempt, kernel_precision, run_of
from ssdprof.measure.cases import Case, Group, batches_of, groups_of
from ssdprof.measure.faults import first_line
from ssdprof.measure.fingerprint import fingerprint
from ssdprof.measure.memory import outputs_that_fit
from ssdprof.measure.roofline import dims_of, roofline
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import Bench, CudaBench, Session, time_in_turns
from ssdprof.progress import Advance, Watcher
from ssdprof.schema import CaseResult, Ceilings, DType, Intermediates, LayerRef, Precision

_INTERMEDIATES: tuple[Intermediates, ...] = ("exact", "relaxed")
_STATE_DTYPES: tuple[DType, ...] = ("fp32", "fp16", "bf16")
PRECISIONS = tuple(Precision(intermediates=i, state_dtype=s) for i in _INTERMEDIATES for s in _STATE_DTYPES)


class Unwatched:
    """A Watcher that nobody looks at."""

    def say(self, text: str) -> None:
        """Nobody hears it."""

    def step(self, text: str, total: int | None = None, *, unit: str = "") -> AbstractContextManager[Advance]:  # noqa: ARG002
        """Nobody sees it."""
        return nullcontext(lambda _: None)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """baseline: compared with at exact intermediates and the same state dtype; replayed whether it is in
        `implementations` or not.
    timed: measure speed, where there is a GPU to measure.
    ceilings: for the roofline; None leaves it out.
    on_case: called with each case when it is finished, also with those that an interruption leaves untimed.
    on_timed: called after each timed group, while the GPU is still warm from it.
    """

    precisions: tuple[Precision, ...] = PRECISIONS
    implementations: tuple[str, ...] = ("unfused", "fused")
    baseline: str = "unfused"
    timed: bool = True
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
    ceilings: Ceilings | None = None
    watcher: Watcher = field(default_factory=Unwatched)
    on_case: Callable[[CaseResult], object] = lambda _: None
    on_timed: Callable[[], object] = lambda: None


def replay_layer(layer: LayerRef, inputs: SSDInputs, options: ReplayOptions) -> tuple[CaseResult, ...]:
    """The result of every case, grouped by state dtype, the baseline first.  What went wrong is in a case's status.

    Raises BadInputError for an implementation that is not registered.
    """
    known = kernels.names("ssd")
    for name in (options.baseline, *options.implementations):
        if name not in known:
            raise BadInputError(f"There is no implementation {name!r} of ssd.", f"There are: {', '.join(known)}.")
    bench = CudaBench(inputs.x.device) if options.timed and inputs.x.is_cuda and not INTERPRETED else None
    return LayerReplay(layer, inputs, options, bench).run()


class LayerReplay:
    """The replay of one layer: what is known of each case so far.  Without a bench, nothing is timed."""

    def __init__(self, layer: LayerRef, inputs: SSDInputs, options: ReplayOptions, bench: Bench | None) -> None:
        self._layer = layer
        self._inputs = inputs
        self._options = options
        self._bench = bench
        self._groups = groups_of(options.precisions, options.implementations, options.baseline)
        self._results: dict[Case, CaseResult] = {}
        self._fingerprints: dict[str, tuple[int, ...]] = {}
        self._finished: set[Case] = set()

    def run(self) -> tuple[CaseResult, ...]:
        """Broken off, it still hands to `on_case` what was judged."""
        try:
            for batch in batches_of(self._groups, outputs_that_fit(self._inputs)):
                self._judge(batch)
            if self._bench is not None:
                for group in self._groups:
                    self._time(group, self._bench)
        except BaseException:
            for case, result in self._results.items():
                if result.accuracy and case not in self._finished:
                    self._update(case, reason="broken off before it was timed")
                    self._finish(case)
            raise
        return tuple(self._results[case] for group in self._groups for case in group)

    # --- right

    def _judge(self, batch: Sequence[Case]) -> None:
        """Run the batch and compare it with the oracle; finish the cases that will not be timed."""
        outputs: dict[Case, SSDOutput] = {}
        with self._step("running", len(batch), "cases") as advance:
            for case in batch:
                output = self._attempt(case)
                if output is not None:
                    outputs[case] = output
                advance(1)
        if outputs:
            self._compare(outputs)
        for case in batch:
            if case not in self._finished and (self._bench is None or self._results[case].status != "passed"):
                self._finish(case)

    def _attempt(self, case: Case) -> SSDOutput | None:
        tried = attempt(case, self._inputs)
        if case not in self._results:  # a baseline runs again for every batch that needs it
            self._results[case] = CaseResult(
                layer=self._layer,
                dims=dims_of(self._inputs),
                implementation=case.implementation,
                precision=case.precision,
                variant=tried.variant,
                status=tried.status,
                reason=tried.reason,
                plan=tried.plan.reason if tried.plan else "",
                memory=tried.memory,
                launches=tried.launches,
            )
        return tried.output

    def _compare(self, outputs: Mapping[Case, SSDOutput]) -> None:
        baselines = {case: group[0] for group in self._groups for case in group[1:] if group[0] in outputs}
        candidates = {
            case.label: Candidate(
                output=output,
                precision=kernel_precision(case),
                baseline=baselines[case].label if case in baselines else None,
            )
            for case, output in outputs.items()
        }
        batch, seqlen = self._inputs.x.shape[:2]
        try:
            with self._step("comparing with the fp64 oracle", batch * seqlen, "tokens") as advance:
                comparisons = compare(self._inputs, candidates, on_progress=advance)
        except torch.OutOfMemoryError as error:
            for case in outputs:
                self._update(
                    case, status="out of memory", reason=f"while compared with the oracle: {first_line(error)}"
                )
            return
        for case, output in outputs.items():
            comparison = comparisons[case.label]
            self._update(case, status=comparison.status, reason=comparison.reason, accuracy=comparison.tensors)
            if self._bench is not None:
                self._fingerprints[case.label] = fingerprint(*output)

    # --- fast

    def _time(self, group: Group, bench: Bench) -> None:
        """Time the group's cases that passed, against its baseline, and finish them."""
        cases = {case.label: case for case in group if self._results[case].status == "passed"}
        if not cases:
            return
        runs = {label: run_of(case, self._inputs) for label, case in cases.items()}
        with self._step(f"timing, {group[0].precision.state_dtype} states"):
            session = time_in_turns(runs, bench, self._options.sampling, check=self._still_right)
        self._options.on_timed()
        self._record(session, cases, group[0].label)
        for case in cases.values():
            self._finish(case)

    def _still_right(self, label: str, output: SSDOutput) -> str:
        """Empty if the output is what was judged, bit for bit; else the judgement of the new one."""
        if fingerprint(*output) == self._fingerprints[label]:
            return ""
        case = next(case for case in self._results if case.label == label)
        candidate = Candidate(output=output, precision=kernel_precision(case))
        comparison = compare(self._inputs, {label: candidate})[label]
        if comparison.status == "passed":
            self._update(case, reason="repeated calls differ in their bits, within the budget")
        return comparison.reason

    def _record(self, session: Session, cases: Mapping[str, Case], baseline: str) -> None:
        for label, reason in session.untimed.items():
            self._update(cases[label], reason=reason)
        for label, reason in session.changed.items():
            self._update(cases[label], status="inaccurate", reason=f"after it was timed: {reason}")
        of_baseline = session.sampled.get(baseline)
        for label, sampled in session.sampled.items():
            timing, ceilings = sampled.timing(), self._options.ceilings
            is_compared = of_baseline is not None and label != baseline
            self._update(
                cases[label],
                timing=timing,
                speedup=sampled.speedup(of_baseline, baseline) if of_baseline and is_compared else None,
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
