"""The origin of a report on stalls, and its self-checks."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.report import format as fmt
from ssdprof.report.tables import run
from ssdprof.report.tables.table import Table
from ssdprof.schema.stalls import KernelStalls, SelfCheck, StallReport

_MARKS = {"failed": "NO"}


def facts(report: StallReport) -> Table:
    """The profiled layer, the machine and the command; for a report made elsewhere, its files."""
    return Table(
        title="What was profiled",
        headers=("", "ssdprof stalls"),
        rows=tuple((name, value) for name, value in _facts(report) if value),
        align=("left", "left"),
        wraps=1,
    )


def _facts(report: StallReport) -> Iterator[tuple[str, str]]:
    layer, dims, environment = report.layer, report.dims, report.environment
    if layer is not None and dims is not None:
        yield "model", report.model
        yield "layer", f"{layer.name} (layer {layer.index})"
        yield "dimensions", f"{fmt.plural(dims.batch, 'sequence')} of {fmt.tokens(dims.seqlen)}, {dims}"
        yield "precision", str(report.precision)
        yield "variants", ", ".join(f"{one.implementation}: {one.variant}" for one in report.launched)
    if environment is None:
        yield "GPU", report.gpu
        yield "versions", f"ssdprof {report.ssdprof_version}, which read it"
    else:
        yield from run.gpu(environment)
        yield "CPU", f"{environment.cpu}, {environment.platform}"
        yield run.versions(environment, ssdprof=report.ssdprof_version, ncu=report.ncu)
        yield "started", report.created
        yield "command", " ".join(report.command)
    yield "reports", ", ".join(f"{name} (sha256 {digest[:12]}...)" for name, digest in report.sources.items())


def checks(report: StallReport) -> Table | None:
    """The self-checks of files, then of kernels.  The passed checks of a kernel share a row."""
    rows = [("report", check.name, *_mark(check)) for check in report.checks]
    for kernel in report.kernels:
        rows += _of_kernel(kernel)
    if not rows:
        return None
    return Table(
        title="Self-checks",
        headers=("what", "requirement", "result", "detail"),
        rows=tuple(rows),
        align=("left", "left", "left", "left"),
        keys=1,
        wraps=1,
    )


def _of_kernel(kernel: KernelStalls) -> Iterator[tuple[str, str, str, str]]:
    for status in ("failed", "ok", "not checked"):
        found = [check for check in kernel.checks if check.status == status]
        if status == "failed":
            yield from ((kernel.kernel, check.name, *_mark(check)) for check in found)
        elif found:
            yield kernel.kernel, "; ".join(check.name for check in found), status, _detail(kernel, status)


def _mark(check: SelfCheck) -> tuple[str, str]:
    return _MARKS.get(check.status, check.status), check.detail


def _detail(kernel: KernelStalls, status: str) -> str:
    """The number of samples, and the share of those on lines without a stage."""
    if status != "ok":
        return "not collected"
    total = sum(kernel.samples.values())
    if not kernel.lines or not total:
        return ""
    return (
        f"{total:,} samples, {fmt.share(100 * kernel.from_neighbours / total, 1)} of them on lines without a stage "
        "(libraries, helpers, the kernel's head), attributed by neighbourhood"
    )
