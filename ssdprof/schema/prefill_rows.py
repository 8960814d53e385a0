"""The prefills of a model as rows (see `schema.rows`), and those that break a gate."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.schema.checkpoint import CheckpointRef
from ssdprof.schema.gating import Broken, broken, gate_names
from ssdprof.schema.machine import Environment
from ssdprof.schema.prefill import LeftOutLength, Prefill, PrefillCase, PrefillLength, PrefillReport
from ssdprof.schema.rows import JUDGED, PrefillFigures, Row
from ssdprof.schema.serving import tokens


def of_prefill(found: Prefill, checkpoint: CheckpointRef, environment: Environment) -> tuple[Row, ...]:
    """A row for each length, surroundings and implementation."""
    shape = f"{checkpoint.repo_id} ({checkpoint.model_type}), {found.layers} of {found.layer_count} layers"
    packages = {"PyTorch": "torch", "transformers": "transformers"}
    versions = {name: environment.packages.get(package, "unknown") for name, package in packages.items()}
    return tuple(
        _row(case, length, shape, found.baseline, needs=versions | _needs(found, length, case))
        for length in found.lengths
        for case in length.cases
    )


def of_report(report: PrefillReport) -> tuple[Row, ...]:
    return of_prefill(report.prefill, report.checkpoint, report.environment)


def broken_gates(report: PrefillReport) -> tuple[Broken, ...]:
    """The rows that break a gate.  A requested prefill without a time breaks a minimum speedup too."""
    rows = of_report(report)
    return (
        *broken(rows, report.gates),
        *(
            Broken(gate=gate, row=name, found=why)
            for gate in gate_names(report.gates)
            for name, why in (*_unfit(rows), *map(_left_out, filter(_is_judged, report.prefill.left_out)))
        ),
    )


def _row(case: PrefillCase, length: PrefillLength, shape: str, baseline: str, *, needs: dict[str, str]) -> Row:
    return Row(
        where=_where(case.surroundings),
        tokens=tokens(length.seqlen, length.batch),
        shape=shape,
        implementation=case.implementation,
        variant=" ".join(dict.fromkeys(word for word in (case.variant, case.version) if word)),
        precision=case.precision,
        status=case.status,
        reason=case.reason,
        gated=case.implementation == JUDGED != baseline,
        prefill=PrefillFigures(
            baseline=baseline,
            call=case.call,
            speedup=case.speedup,
            needs=needs,
            gpu_us={part.name: part.gpu_us for part in case.parts},
            alone_us=case.alone_us,
            peak_bytes=case.peak_bytes,
            logits_rms=case.logits_rms,
        ),
    )


def _needs(found: Prefill, length: PrefillLength, case: PrefillCase) -> dict[str, str]:
    """The versions and settings on which times depend; the model's own convolution only if it ran."""
    needs = {"attention": found.attention or "none", "segment length": f"{length.segment_length:,}"}
    if case.surroundings == "model" or case.left_to_model:
        needs["convolution"] = found.convolution
    return needs


def _where(surroundings: str | None) -> str:
    return f"prefill, {surroundings} surroundings" if surroundings else "prefill"


def _unfit(rows: tuple[Row, ...]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if row.gated and row.status != "passed":
            yield row.name, f"{row.status}: {row.reason}"


def _is_judged(one: LeftOutLength) -> bool:
    return not one.implementations or JUDGED in one.implementations


def _left_out(one: LeftOutLength) -> tuple[str, str]:
    return f"{_where(one.surroundings)}, {tokens(one.seqlen)}, {JUDGED}", f"left out: {one.reason}"
