"""The contents and order of a report on prefill times."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.core import words as fmt
from ssdprof.report.caveats import throttled
from ssdprof.report.document import Document, Section, prefill_sections
from ssdprof.report.origin import weights, when
from ssdprof.report.statements import Statement
from ssdprof.report.tables import Table, prefill
from ssdprof.report.tables.run import clocks, gpu, versions
from ssdprof.report.tables.table import columns
from ssdprof.schema.gating import gate_names
from ssdprof.schema.prefill import Prefill, PrefillCase, PrefillLength, PrefillReport
from ssdprof.schema.prefill_rows import broken_gates
from ssdprof.schema.rows import JUDGED

GOOD = ("PASSED", "Prefill times")


def compose(report: PrefillReport) -> Document:
    """The whole report: the statements first, then the tables."""
    found = report.prefill
    card = report.environment.gpu
    parts = ("ssdprof prefill", report.checkpoint.repo_id, card.name if card else "no GPU")
    return Document(
        title=", ".join(parts),
        origin=(
            ("weights", weights(report.checkpoint)),
            ("GPU", card.name if card else "none"),
            ("when", when(report.created)),
        ),
        verdict=tuple(_verdict(report)),
        failed=report.state == "partial" or bool(found.failed or broken_gates(report)),
        summary=tuple(statements(found)),
        caveats=(*throttled(report.clocks), *report.notes),
        sections=tuple(section for section in (*prefill_sections(found), _what_ran(report)) if section.blocks),
        run_id="",
    )


def statements(found: Prefill) -> Iterator[Statement]:
    """ "fused: 1.12x [1.11, 1.13] faster than unfused at 131,072 tokens." """
    for length in reversed(found.lengths):
        for case in length.cases:
            if case.speedup is not None:
                yield Statement(f"{prefill.name(case)}, {case.surroundings} surroundings:", _said(found, length, case))


def _said(found: Prefill, length: PrefillLength, case: PrefillCase) -> str:
    assert case.speedup is not None
    speedup = case.speedup
    percent = f"{100 * (speedup.ratio - 1):+.1f}%"
    predicted = "" if speedup.predicted is None else f"; Amdahl's law predicts {fmt.ratio(speedup.predicted)}"
    return (
        f"{fmt.speedup(speedup.ratio, speedup.interval)} ({percent}) over {found.baseline} at "
        f"{fmt.tokens(length.seqlen, length.batch)}, {speedup.verdict}{predicted}."
    )


def _verdict(report: PrefillReport) -> Iterator[str]:
    broken = broken_gates(report)
    for one in broken:
        yield f"FAILED: {one}."
    if report.gates and not broken:
        yield f"PASSED: every prefill of {JUDGED} holds {fmt.words(gate_names(report.gates))}."
    if report.state == "partial":
        yield "Partial: the command did not end."
    else:
        yield f"Prefill times of {fmt.plural(len(report.prefill.lengths), 'length')}."
    if report.prefill.left_out or any(
        c.status == "passed" and not c.call for n in report.prefill.lengths for c in n.cases
    ):
        yield "Some requested prefills were not timed."
    if report.prefill.failed:
        yield f"{fmt.plural(len(report.prefill.failed), 'case')} failed."


def _what_ran(report: PrefillReport) -> Section:
    found, ref = report.prefill, report.checkpoint
    rows = [
        ("model", f"{ref.repo_id} ({ref.model_type}){', random weights' if ref.random_weights else ''}"),
        (
            "layers",
            f"{found.layers} of {found.layer_count} were loaded and timed; {found.operator_layers} have the operator",
        ),
        (
            "precisions",
            "; ".join(dict.fromkeys(f"{c.implementation} {c.precision}" for n in found.lengths for c in n.cases)),
        ),
        ("segments", "; ".join(f"{fmt.tokens(n.seqlen)} by {n.segment_length:,}" for n in found.lengths)),
        ("convolution", f"the model's own: {found.convolution}"),
        ("attention", found.attention),
        *gpu(report.environment),
        ("clocks", clocks(report.clocks) if report.clocks else ""),
        versions(report.environment, ssdprof=report.ssdprof_version),
        ("started", report.created),
        ("command", " ".join(report.command)),
    ]
    table = Table(
        title="What ran",
        headers=("prefill", ""),
        rows=tuple(row for row in rows if row[1]),
        align=columns(2, 0),
        wraps=1,
    )
    return Section(title="What ran", blocks=(table,), depth="main")
