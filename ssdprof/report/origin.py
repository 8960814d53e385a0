"""The head of every report: weights, GPU and time; and the meanings of its words."""

from __future__ import annotations

from datetime import datetime

from ssdprof.schema import CheckpointRef, RunReport

MEANINGS = (
    ("unfused", "ssdprof's own kernels with one launch per stage; the baseline, with exact intermediates"),
    ("fused", "the stages merged into as few kernel launches as is fastest"),
    ("exact", "decays and their products are kept in fp32"),
    ("relaxed", "decays and their products in 16 bit: the inputs' dtype, or bf16 for fp32 inputs"),
)
IF_THERE = (
    ("recurrent", "one launch that goes token by token, with the state in registers"),
    ("unfused_step", "a decode step with one launch for each of its parts; the baseline of decode steps"),
)


def meanings(report: RunReport) -> tuple[tuple[str, str], ...]:
    """(word, meaning) for the words of the report."""
    ran = {case.implementation for case in report.cases}
    there = tuple((word, meaning) for word, meaning in IF_THERE if word in ran)
    unfused, fused, *precisions = MEANINGS
    others = (fused, *there, *precisions)
    if report.baseline == "unfused":
        return (unfused, *others)
    own = ("baseline", f"{report.baseline}, which the others are compared with")
    return (own, (unfused[0], unfused[1].partition(";")[0]), *others)


def origin(report: RunReport) -> tuple[tuple[str, str], ...]:
    """(label, value) pairs shown before all numbers."""
    gpu = report.environment.gpu
    return (
        ("weights", weights(report.checkpoint)),
        *([("inputs", str(report.cast))] if report.cast else []),
        ("GPU", gpu.name if gpu else "none"),
        ("when", when(report.created)),
        ("run", report.run_id),
    )


def weights(ref: CheckpointRef) -> str:
    """ "random", "from the hub, revision 0123456789ab", "from a local folder, quantised (fp8)"."""
    if ref.random_weights:
        return "random"
    revision = f", revision {ref.revision[:12]}" if ref.revision else ""
    quantised = f", quantised ({ref.quantization})" if ref.quantization else ""
    where = {"hub": "from the hub", "local": "from a local folder", "demo": "trained, built in"}[ref.source]
    return f"{where}{revision}{quantised}"


def when(created: str) -> str:
    """ISO 8601 -> "2026-01-02 03:04 UTC"; any other text is unchanged."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()
