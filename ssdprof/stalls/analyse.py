"""Turns the raw kernels of the readers into stored records."""

from __future__ import annotations

from collections.abc import Sequence

from ssdprof import __version__, operators
from ssdprof.operators.outline import Stages
from ssdprof.schema.stalls import KernelStalls, Profiled, Recorded, StallReport  # TODO
from ssdprof.stalls import checks, facts
from ssdprof.stalls.attribute import attribute
from ssdprof.stalls.hints import hints
from ssdprof.stalls.raw import RawKernel, RawReport
from ssdprof.stalls.sources import Sources


def analyse(
    reports: Sequence[RawReport],
    subject: Profiled | None = None,
    *,
    recorded: Recorded | None = None,
    missing: str = "",
) -> StallReport:
    """The stall report.  Depends only on the arguments, not on the machine.

    subject: what was profiled; its `launched` correspond to the reports.
    recorded: when and where.  missing: the reason if there are no reports.
    """
    launched = subject.launched if subject and not missing else None
    names = [one.implementation for one in launched] if launched else [""] * len(reports)
    return StallReport(
        ssdprof_version=__version__,
        sources={report.name: report.sha256 for report in reports},
        gpu=next((gpu for report in reports for kernel in report.kernels if (gpu := _gpu(kernel))), ""),
        kernels=tuple(
            stalls_of(kernel, implementation)
            for report, implementation in zip(reports, names, strict=True)
            for kernel in report.kernels
        ),
        words=_words([_stages(kernel) for report in reports for kernel in report.kernels]),
        checks=checks.of_reports(reports, launched),
        subject=subject,
        recorded=recorded,
        missing=missing,
    )


def stalls_of(kernel: RawKernel, implementation: str = "") -> KernelStalls:
    """One launch.  implementation: "": inferred from the kernel's name."""
    sources = Sources.of(kernel)
    known = _stages(kernel)
    found = attribute(kernel, sources, known)
    resources, throughput = facts.resources(kernel), facts.throughput(kernel)
    missing = facts.not_collected(resources, throughput)
    average = {} if kernel.totals else facts.average(kernel)
    if not kernel.totals and not average:
        missing = (*missing, "stall reasons")
    if not kernel.points:
        missing = (*missing, "source lines")
    count = kernel.number(checks.SAMPLE_COUNT)
    stalls = KernelStalls(
        kernel=kernel.function,
        implementation=implementation
        or known.kernels.get(kernel.function, "")
        or sources.implementation(kernel.function),
        resources=resources,
        throughput=throughput,
        sample_count=round(count) if count is not None else sum(kernel.totals.values()) or None,
        samples=dict(sorted(((r, n) for r, n in kernel.totals.items() if n), key=lambda item: (-item[1], item[0]))),
        average=average,
        stages=found.stages,
        lines=found.lines,
        from_neighbours=found.from_neighbours,
        unlabelled=tuple(sorted(sources.unlabelled)),
        not_collected=missing,
        checks=checks.of_kernel(kernel, found, sources),
    )
    return stalls.model_copy(update={"hints": hints(stalls, sources.fillers())})


def _stages(kernel: RawKernel) -> Stages:
    """The stages of the operator with a kernel of this name; for an unknown kernel those of all operators."""
    known = [outline.stages for outline in operators.outlines()]
    return next((stages for stages in known if kernel.function in _kernels(stages)), Stages.together(known))


def _kernels(stages: Stages) -> set[str]:
    """Names of bundled kernels and of other libraries' kernels."""
    return {*stages.kernels, *(name for source in stages.sources.values() for name in source.stages)}


def _words(known: Sequence[Stages]) -> dict[str, str]:
    return {part: words for stages in known for part, words in stages.words.items()}


def _gpu(kernel: RawKernel) -> str:
    name = kernel.metrics.get("device__attribute_display_name", "")
    return name if isinstance(name, str) else ""
