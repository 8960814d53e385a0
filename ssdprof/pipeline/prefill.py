"""How long the whole model's prefill takes, first token included, with each implementation in its operators' place.

locate -> fetch -> build prompts -> load with the head -> each length (prefill_length.py) -> report
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ssdprof import __version__, environment, operators
from ssdprof.capture import choose_segment_length
from ssdprof.capture.sites import Site, find_sites
from ssdprof.environment import ClockWatch
from ssdprof.environment.machine import installed_version
from ssdprof.environment.present import require_gpu
from ssdprof.measure.gpu_trace import traced
from ssdprof.measure.rehearsal import FIRST_CALL_S, Rehearsals
from ssdprof.measure.timing import Bench, CudaBench
from ssdprof.operators.dtypes import dtype_name
from ssdprof.pipeline import limits
from ssdprof.pipeline.lineup import Lineup, line_up
from ssdprof.pipeline.model import load
from ssdprof.pipeline.prefill_length import Contender, LengthTimer, Profile, Prompted
from ssdprof.pipeline.replay import COMPARED
from ssdprof.pipeline.request import CaptureRequest
from ssdprof.pipeline.subject import Subject, refuse_large
from ssdprof.pipeline.subject import find as find_layers
from ssdprof.progress import Watcher
from ssdprof.runs import RunFolder
from ssdprof.runs.notes import notes, of_absent
from ssdprof.schema import DType, PrecisionRecord, RunReport
from ssdprof.schema.prefill import LeftOutLength, Prefill, PrefillLength, PrefillReport, Surroundings

NEEDS_GPU = (
    "Prefill times need",
    "Without one nothing is timed; 'ssdprof run' compares the kernels' outputs on any machine.",
)
SURROUNDINGS: tuple[Surroundings, ...] = ("model", "bundled")  # of a run
Keep = Callable[[PrefillReport], object]


@dataclass(frozen=True, kw_only=True)
class PrefillRequest:
    """batch: rows of the prompt, all alike.  precision: of implementations that have none of their own.

    lineup: who takes part.  first_call_s: seconds that the first call of an own kernel may take.
    seconds: of sampling for each length.  budget: seconds of wall clock after which no further length is begun.
    smallest_difference: that counts, relative.
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
    command: tuple[str, ...] = ()


def find(request: CaptureRequest) -> Subject:
    """The model, with its head and all of its layers, or those up to the last one that was chosen."""
    subject = find_layers(request, whole=request.layers == "all", head=True)
    refuse_large(subject)
    return subject


def time_prefills(request: PrefillRequest, subject: Subject, watcher: Watcher, keep: Keep) -> PrefillReport:
    """Time every length, shortest first.  keep: called with the report, partial yet, after each.

    Raises MissingCapabilityError without a GPU.
    """
    device = require_gpu(*NEEDS_GPU)
    began = time.monotonic()
    loaded = load(request.model, subject, watcher)
    sites = find_sites(loaded.whole)
    remarks = (*of_absent(request.lineup.absent), *notes(subject.ref, loaded.prompts))
    report = _draft(request, subject, loaded.whole, sites, remarks)
    bench, profile = CudaBench(device), partial(traced, device=device)
    with ClockWatch() as clocks, limits.memory_errors():
        for seqlen, ids in sorted({ids.shape[1]: ids for ids in loaded.ids}.items()):
            if request.budget is not None and time.monotonic() - began > request.budget:
                left = LeftOutLength(seqlen=seqlen, reason=f"the budget of {request.budget:g} s was spent")
                report = _with(report, left_out=(*report.prefill.left_out, left))
            else:
                prompted = Prompted(
                    model=loaded.whole,
                    ids=ids.to(device).expand(request.batch, -1),
                    segment_length=request.model.segment_length
                    or choose_segment_length(loaded.whole, seqlen, subject.layers, batch=request.batch),
                    sites=sites,
                    layer=subject.layers[len(subject.layers) // 2],
                )
                found = _timed(request, prompted, bench, profile, watcher)
                report = _with(report, lengths=(*report.prefill.lengths, found))
            clocks.poll()
            report = report.model_copy(update={"clocks": clocks.clocks})
            keep(report)
    report = report.model_copy(update={"state": "complete"})
    keep(report)
    return report


def prefill_of_run(
    asked: CaptureRequest, smallest_difference: float, folder: Path, report: RunReport, watcher: Watcher
) -> RunReport:
    """The report of a run that has just ended, with prefill times of its model; on disk after each length.

    asked: what the run captured.  Raises what `time_prefills` raises.
    """
    require_gpu(*NEEDS_GPU)
    subject = find(asked)
    request = PrefillRequest(
        model=asked,
        lineup=line_up(COMPARED, COMPARED[0], subject.layers),
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
        time_prefills(request, subject, watcher, keep)
    except KeyboardInterrupt:
        lengths = len(together.prefill.lengths) if together.prefill else 0
        raise KeyboardInterrupt(f"The run is kept in {folder}, with prefill times of {lengths} lengths.") from None
    return together


def contenders(request: PrefillRequest, sites: Sequence[Site], dtype: DType) -> Iterator[Contender]:
    """The baseline first, then the others; all with each surroundings.  dtype: of the model."""
    lineup, rehearsals = request.lineup, Rehearsals(request.first_call_s)
    records = [operators.get(name) for name in dict.fromkeys(site.operator for site in sites)]
    for surroundings in request.surroundings:
        for name in dict.fromkeys((lineup.baseline, *lineup.present)):
            named = {record.name: lineup.roster.get(record, name) for record in records}
            one = next(iter(named.values()))
            yield Contender(
                name=name,
                named=named,
                precision=one.precisions(dtype, (request.precision,))[0],
                surroundings=surroundings,
                version=one.source if one.kind == "library" else "",
                rehearsals=rehearsals,
            )


def _timed(
    request: PrefillRequest, prompted: Prompted, bench: Bench, profile: Profile, watcher: Watcher
) -> PrefillLength:
    timer = LengthTimer(
        prompted=prompted,
        contenders=tuple(contenders(request, prompted.sites, _dtype(prompted.model))),
        baseline=request.lineup.baseline,
        bench=bench,
        profile=profile,
        seconds=request.seconds,
        smallest_difference=request.smallest_difference,
    )
    tokens = prompted.ids.shape[1]
    with watcher.step(f"Prefill of {tokens:,} tokens", timer.steps, unit="steps") as advance:
        return timer.run(advance)


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
            baseline=request.lineup.baseline,
            smallest_difference=request.smallest_difference,
        ),
        notes=tuple(remarks),
    )


def _with(report: PrefillReport, **fields: Any) -> PrefillReport:
    return report.model_copy(update={"prefill": report.prefill.model_copy(update=fields)})


def _dtype(model: Any) -> DType:
    """The dtype of the model's weights, and so of the operators' inputs."""
    return dtype_name(model.get_input_embeddings().weight.dtype)


def _convolution_of_the_model() -> str:
    """What transformers took when it was imported."""
    found = installed_version("causal-conv1d")
    return f"causal-conv1d {found}" if found else "torch's depthwise convolution, for want of the package causal-conv1d"
