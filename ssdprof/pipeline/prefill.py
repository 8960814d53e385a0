"""Times the whole model's prefill, first token included, with each implementation of its operators.

locate -> fetch -> build prompts -> load with the head -> each surroundings and length (prefill_length.py) -> report
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ssdprof import __version__, operators
from ssdprof.capture.memory import choose_segment_length
from ssdprof.capture.sites import Site, find_sites
from ssdprof.capture.surroundings import BundledSurroundings
from ssdprof.environment.machine import ClockWatch, collect, installed_version
from ssdprof.environment.toolchain import require_gpu
from ssdprof.measure.bench import CudaBench
from ssdprof.measure.gpu_trace import traced
from ssdprof.measure.rehearsal import FIRST_CALL_S, Rehearsals
from ssdprof.operators.dtypes import dtype_name
from ssdprof.pipeline import limits
from ssdprof.pipeline.lineup import Lineup, line_up
from ssdprof.pipeline.model import load
from ssdprof.pipeline.prefill_contender import Contender, Prompted
from ssdprof.pipeline.prefill_length import LengthTimer
from ssdprof.pipeline.prefill_record import GrowingReport, Keep
from ssdprof.pipeline.request import COMPARED, CaptureRequest
from ssdprof.pipeline.step_clock import StepClock
from ssdprof.pipeline.subject import Subject, refuse_large
from ssdprof.pipeline.subject import find as find_layers
from ssdprof.progress import Watcher
from ssdprof.runs import RunFolder
from ssdprof.runs.notes import notes, of_absent
from ssdprof.schema import EXACT_FP32, DType, Gates, PrecisionRecord, RunReport
from ssdprof.schema.gates import NO_GATES
from ssdprof.schema.prefill import Prefill, PrefillReport, StepTime, Surroundings

NEEDS_GPU = (
    "Prefill times need",
    "Without one nothing is timed; 'ssdprof run' compares the kernels' outputs on any machine.",
)
SURROUNDINGS: tuple[Surroundings, ...] = ("bundled", "model")  # both; the first one shows more of the operator


@dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """batch: equal rows of the prompt.  precision: of implementations without their own.

    surroundings: one set of prefills for each kind and length.
    lineup: the implementations; other libraries run only with the first surroundings.
    first_call_s: time limit of the first call of a user's kernel.
    seconds: of sampling for each set.  budget: seconds of wall clock, loading included; steps that do not fit are left
        out.
    smallest_difference: relative.  gates: stored with the report; readers of the report judge them.
    """

    model: CaptureRequest
    batch: int = 1
    precision: PrecisionRecord
    surroundings: tuple[Surroundings, ...]
    lineup: Lineup
    first_call_s: float = FIRST_CALL_S
    seconds: float = 20.0
    budget: float | None = None
    smallest_difference: float = 0.01
    gates: Gates = NO_GATES
    command: tuple[str, ...] = ()


def find(request: CaptureRequest) -> Subject:
    """The model, with its head and all of its layers, or those up to the last one that was chosen."""
    subject = find_layers(request, whole=request.layers == "all", head=True)
    refuse_large(subject)
    return subject


def time_prefills(request: PrefillRequest, subject: Subject, watcher: Watcher, keep: Keep) -> PrefillReport:
    """Time every length with the first surroundings, the shortest first, then with the next.

    keep: called with the partial report after each step.
    Raises MissingCapabilityError without a GPU.
    """
    device = require_gpu(*NEEDS_GPU)
    loading: list[StepTime] = []
    add_step = loading.append

    def on_step(step: StepTime) -> None:
        watcher.say(f"{step.what}: {step.seconds:.1f} s")
        add_step(step)

    clock = StepClock(request.budget, on_step)
    with clock.step("Loading the model"):
        # Otherwise moving weights or activations would be part of the time.
        loaded = load(replace(request.model, placement="one-gpu"), subject, watcher)
    sites = find_sites(loaded.whole)
    remarks = (*of_absent(request.lineup.absent), *notes(subject.ref, loaded.prompts))
    report = GrowingReport(_draft(request, subject, loaded.whole, sites, remarks), keep)
    add_step = report.step
    report.step(*loading)
    bench, profile = CudaBench(device), partial(traced, device=device)
    bundled = BundledSurroundings(sites if "bundled" in request.surroundings else ())
    dtype, rehearsals = _dtype(loaded.whole), Rehearsals(request.first_call_s)
    with ClockWatch() as clocks, limits.memory_errors():
        prompts = {ids.shape[1]: ids for ids in loaded.ids}
        for surroundings, seqlen in product(request.surroundings, sorted(prompts)):
            if clock.left() == 0:
                report.leave_out(seqlen, surroundings, f"the budget of {request.budget:g} s was spent")
                continue
            what = f"{seqlen:,} tokens, {surroundings} surroundings"
            timer = LengthTimer(
                prompted=Prompted(
                    model=loaded.whole,
                    ids=prompts[seqlen].to(device).expand(request.batch, -1),
                    segment_length=request.model.segment_length
                    or choose_segment_length(loaded.whole, seqlen, subject.layers, batch=request.batch),
                    sites=sites,
                    layer=subject.layers[len(subject.layers) // 2],
                    bundled=bundled,
                ),
                contenders=tuple(contenders(request, sites, dtype, surroundings, rehearsals)),
                baseline=request.lineup.baseline,
                bench=bench,
                profile=profile,
                seconds=request.seconds,
                smallest_difference=request.smallest_difference,
                clock=clock.within(what),
            )
            report.begin(timer)
            with watcher.step(f"Prefill of {what}"):
                timer.run()
            if timer.unseen:
                spent = f"the budget of {request.budget:g} s was spent"
                report.leave_out(seqlen, surroundings, spent, timer.unseen)
            clocks.poll()
            report.keep(clocks=clocks.clocks)
    return report.keep(state="complete")


def prefill_of_run(
    asked: CaptureRequest, smallest_difference: float, folder: Path, report: RunReport, watcher: Watcher
) -> RunReport:
    """The report of a run that has just ended, with prefill times of its model, written after each length.

    asked: the request of the run.  Raises what `time_prefills` raises.
    """
    require_gpu(*NEEDS_GPU)
    subject = find(asked)
    request = PrefillRequest(
        model=asked,
        lineup=line_up(COMPARED, COMPARED[0], subject.layers),
        precision=EXACT_FP32,
        surroundings=SURROUNDINGS,
        smallest_difference=smallest_difference,
    )
    together = report

    def keep(found: PrefillReport) -> None:
        nonlocal together
        together = report.model_copy(update={"prefill": found.prefill})
        RunFolder(folder).write(together)

    try:
        time_prefills(request, subject, watcher, keep)
    except KeyboardInterrupt:
        lengths = len(together.prefill.lengths) if together.prefill else 0
        raise KeyboardInterrupt(f"The run is kept in {folder}, with prefill times of {lengths} lengths.") from None
    return together


def contenders(
    request: PrefillRequest, sites: Sequence[Site], dtype: DType, surroundings: Surroundings, rehearsals: Rehearsals
) -> Iterator[Contender]:
    """The baseline first, then the others.  dtype: of the model.

    Other libraries, except a baseline, run only with the first surroundings.
    """
    lineup = request.lineup
    records = [operators.get(name) for name in dict.fromkeys(site.operator for site in sites)]
    for name in dict.fromkeys((lineup.baseline, *lineup.present)):
        named = {record.name: lineup.roster.get(record, name) for record in records}
        one = next(iter(named.values()))
        if one.kind == "library" and name != lineup.baseline and surroundings != request.surroundings[0]:
            continue
        yield Contender(
            name=name,
            named=named,
            precision=one.precisions(dtype, (request.precision,))[0],
            surroundings=surroundings,
            version=one.source if one.kind == "library" else "",
            rehearsals=rehearsals,
        )


def _draft(
    request: PrefillRequest, subject: Subject, model: Any, sites: Sequence[Site], remarks: Sequence[str]
) -> PrefillReport:
    config = model.config.get_text_config()
    return PrefillReport(
        ssdprof_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=request.command,
        checkpoint=subject.ref,
        environment=collect(),
        prefill=Prefill(
            layers=config.num_hidden_layers,
            layer_count=subject.ref.layer_count,
            operator_layers=len(sites),
            attention=getattr(config, "_attn_implementation", None) or "",
            convolution=_convolution_of_the_model(),
            baseline=request.lineup.baseline,
            smallest_difference=request.smallest_difference,
        ),
        gates=request.gates,
        notes=tuple(remarks),
    )


def _dtype(model: Any) -> DType:
    """The dtype of the model's weights, and so of the operators' inputs."""
    return dtype_name(model.get_input_embeddings().weight.dtype)


def _convolution_of_the_model() -> str:
    """The convolution that transformers chose on import."""
    found = installed_version("causal-conv1d")
    return (
        f"causal-conv1d {found}" if found else "torch's depthwise convolution, because causal-conv1d is not installed"
    )
