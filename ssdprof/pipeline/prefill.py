"""How long the whole model's prefill takes, first token included, with each implementation in its operators' place.

locate -> fetch -> build prompts -> load with the head -> each surroundings and length (prefill_length.py) -> report
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from ssdprof import __version__, environment, kernels
from ssdprof.capture import choose_segment_length
from ssdprof.capture.sites import Site, find_sites
from ssdprof.capture.surroundings import BundledSurroundings
from ssdprof.environment import ClockWatch
from ssdprof.environment.machine import installed_version
from ssdprof.environment.present import require_gpu
from ssdprof.measure.gpu_trace import traced
from ssdprof.measure.timing import CudaBench
from ssdprof.operators.drawing import InputDType, Peer
from ssdprof.operators.dtypes import dtype_named
from ssdprof.pipeline import limits
from ssdprof.pipeline.model import load
from ssdprof.pipeline.prefill_contender import Contender, Prompted
from ssdprof.pipeline.prefill_length import LengthTimer
from ssdprof.pipeline.prefill_record import GrowingReport, Keep
from ssdprof.pipeline.replay import COMPARED, refuse_unknown
from ssdprof.pipeline.request import CaptureRequest
from ssdprof.pipeline.step_clock import StepClock
from ssdprof.pipeline.subject import Subject, refuse_large
from ssdprof.pipeline.subject import find as find_layers
from ssdprof.progress import Watcher
from ssdprof.runs import RunFolder
from ssdprof.runs.notes import notes
from ssdprof.schema import Gates, PrecisionRecord, RunReport
from ssdprof.schema.gates import NO_GATES
from ssdprof.schema.prefill import Prefill, PrefillReport, StepTime, Surroundings

NEEDS_GPU = (
    "Prefill times need",
    "Without one nothing is timed; 'ssdprof run' compares the kernels' outputs on any machine.",
)
BASELINE = "unfused"
SURROUNDINGS: tuple[Surroundings, ...] = ("bundled", "model")  # both, those first that say more of the operator


@dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """batch: rows of the prompt, all alike.  precision: of ssdprof's own implementations.

    surroundings: one set of prefills for each, at every length.
    peers: other libraries, each of an operator of the model; they run with the first surroundings.
    seconds: of sampling for each set.  budget: seconds of wall clock, loading included; what does not fit is left out.
    smallest_difference: that counts, relative.  gates: stored with the report, and judged by its readers.
    """

    model: CaptureRequest
    batch: int = 1
    precision: PrecisionRecord
    surroundings: tuple[Surroundings, ...]
    implementations: tuple[str, ...] = COMPARED
    peers: tuple[Peer, ...] = ()
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

    keep: called with the report, partial yet, after each step.
    Raises MissingCapabilityError without a GPU.
    """
    device = require_gpu(*NEEDS_GPU)
    loading: list[StepTime] = []
    told = loading.append

    def on_step(step: StepTime) -> None:
        watcher.say(f"{step.what}: {step.seconds:.1f} s")
        told(step)

    clock = StepClock(request.budget, on_step)
    with clock.step("Loading the model"):
        loaded = load(request.model, subject, watcher)
    sites = find_sites(loaded.whole)
    report = GrowingReport(_draft(request, subject, loaded.whole, sites, notes(subject.ref, loaded.prompts)), keep)
    told = report.step
    report.step(*loading)
    bench, profile = CudaBench(device), partial(traced, device=device)
    bundled = BundledSurroundings(sites if "bundled" in request.surroundings else ())
    dtype = _dtype(loaded.whole)
    with ClockWatch() as clocks, limits.memory_errors():
        for surroundings in request.surroundings:
            for seqlen, ids in sorted({ids.shape[1]: ids for ids in loaded.ids}.items()):
                if clock.left() == 0:
                    report.leave_out(seqlen, surroundings, f"the budget of {request.budget:g} s was spent")
                    continue
                prompted = Prompted(
                    model=loaded.whole,
                    ids=ids.to(device).expand(request.batch, -1),
                    segment_length=request.model.segment_length
                    or choose_segment_length(loaded.whole, seqlen, subject.layers, batch=request.batch),
                    sites=sites,
                    layer=subject.layers[len(subject.layers) // 2],
                    bundled=bundled,
                )
                what = f"{seqlen:,} tokens, {surroundings} surroundings"
                timer = LengthTimer(
                    prompted=prompted,
                    contenders=tuple(contenders(request, sites, dtype, surroundings)),
                    baseline=BASELINE,
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
    """The report of a run that has just ended, with prefill times of its model; on disk after each length.

    asked: what the run captured.  Raises what `time_prefills` raises.
    """
    require_gpu(*NEEDS_GPU)
    request = PrefillRequest(
        model=asked,
        precision=PrecisionRecord(intermediates="exact", state_dtype="fp32"),
        surroundings=SURROUNDINGS,
        smallest_difference=smallest_difference,
    )
    together = report

    def keep(found: PrefillReport) -> None:
        nonlocal together
        together = report.model_copy(update={"prefill": found.prefill})
        RunFolder(folder).write(together)

    try:
        time_prefills(request, find(asked), watcher, keep)
    except KeyboardInterrupt:
        lengths = len(together.prefill.lengths) if together.prefill else 0
        raise KeyboardInterrupt(f"The run is kept in {folder}, with prefill times of {lengths} lengths.") from None
    return together


def contenders(
    request: PrefillRequest, sites: Sequence[Site], dtype: InputDType, surroundings: Surroundings
) -> Iterator[Contender]:
    """The baseline first, then ours, then other libraries if these surroundings are the first.  dtype: of the model."""
    names = dict.fromkeys(site.operator for site in sites)
    for name in dict.fromkeys((BASELINE, *request.implementations)):
        for operator in names:
            refuse_unknown((name,), operator)
        yield Contender(
            name=name,
            implementations={operator: kernels.get(operator, name) for operator in names},
            precision=request.precision,
            surroundings=surroundings,
        )
    for peer in request.peers if surroundings == request.surroundings[0] else ():
        yield Contender(
            name=peer.implementation.name,
            implementations={peer.implementation.operator: peer.implementation},
            precision=peer.precisions(dtype)[0],
            surroundings=surroundings,
            version=peer.version,
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
        environment=environment.collect(),
        prefill=Prefill(
            layers=config.num_hidden_layers,
            layer_count=subject.ref.layer_count,
            operator_layers=len(sites),
            attention=getattr(config, "_attn_implementation", None) or "",
            convolution=_convolution_of_the_model(),
            baseline=BASELINE,
            smallest_difference=request.smallest_difference,
        ),
        gates=request.gates,
        notes=tuple(remarks),
    )


def _dtype(model: Any) -> InputDType:
    """The dtype of the model's weights, and so of the operators' inputs."""
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return next(name for name in get_args(InputDType) if dtype_named(name) == dtype)


def _convolution_of_the_model() -> str:
    """What transformers took when it was imported."""
    found = installed_version("causal-conv1d")
    return f"causal-conv1d {found}" if found else "torch's depthwise convolution, for want of the package causal-conv1d"
