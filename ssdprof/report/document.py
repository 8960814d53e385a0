"""The contents of a report and their order, for every kind of report."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.core import words as fmt
from ssdprof.core.report import Report
from ssdprof.report import bench, calls, model
from ssdprof.report.facts import gpu_name, meanings, origin, what_ran
from ssdprof.report.groups import groups, tokens_of
from ssdprof.report.statements import caveats, statements, verdict_lines
from ssdprof.report.table import Document, Note, Section, facts, section

SPEED, ACCURACY = "Speed", "Accuracy"  # titles of the sections to which a page adds pictures


def compose(report: Report) -> Document:
    """The whole report: the statements first, then the tables, then every layer."""
    of_bench = report.kind == "bench"
    sections = [section("Bench", *bench.tables(report), Note(bench.READING))] if of_bench else _sections(report)
    return Document(
        title=heading(report),
        name=report.id,
        version=report.ssdprof_version,
        origin=origin(report),
        verdict=verdict_lines(report),
        summary=statements(report),
        caveats=caveats(report),
        sections=tuple(one for one in sections if one.blocks),
        tables_only=of_bench,
    )


def heading(report: Report) -> str:
    """ "ssdprof: mamba2-2.7b, 131,072 tokens, NVIDIA H200"."""
    gpu = gpu_name(report.environment, "no GPU")
    if report.kind in ("bench", "prefill"):
        return f"ssdprof {report.kind}, {subject(report)}, {gpu}"
    lengths = [f"{seqlen:,}" for seqlen in dict.fromkeys(case.seqlen for case in report.of_answers)]
    tokens = tokens_of(found) if (found := groups(report)) else f"{fmt.words(lengths)} tokens" if lengths else ""
    return f"ssdprof: {', '.join(filter(None, (report.subject, tokens, gpu)))}"


def subject(report: Report) -> str:
    """The model, or the operator of a bench."""
    return f"{report.subject} on drawn inputs" if report.kind == "bench" else report.subject


def _sections(report: Report) -> Iterator[Section]:
    found, answered = groups(report), model.prompts(report)
    yield section("Failures and refusals", calls.failures(report))
    yield section(SPEED, *map(calls.total_speed, found), reading=calls.SPEED_READING)
    matches = (table for group in found for table in calls.accuracies(group))
    yield section(ACCURACY, *matches, reading=calls.ACCURACY_READING)
    yield section("Laws", calls.laws(report))
    compared = (make(one) for one in answered for make in (model.answers, model.answers_by_layer))
    yield section("Answers", *compared, reading=model.ANSWERS_READING)
    if report.kind == "prefill":
        yield from model.prefill_sections(report)
    yield section("Remarks", calls.remarks(report))
    yield section("Words", facts("Words", ("word", "meaning"), meanings(report)) if found else None)
    yield section("What ran", what_ran(report))
    yield section("Kernels as they were launched", calls.launches(report), depth="detail")
    for one in answered:
        title = f"Answers by position at {fmt.tokens(one[0].seqlen)}"
        yield section(title, model.answers_by_position(one), depth="detail")
    for group in found:
        yield section(f"Speed of each layer {group.where}", calls.speed_by_layer(group), depth="detail")
    for group in found:
        by_layer = (
            make(group, name) for name in group.compared for make in (calls.errors_by_layer, calls.largest_errors)
        )
        yield section(f"Errors by layer and position {group.where}", *by_layer, depth="detail")
    for group in found:
        own = (calls.matches(group, group.baseline, tensor) for tensor in calls.TENSORS)
        yield section(f"Accuracy of {group.baseline} at other precisions, {group.where}", *own, depth="file")
    for group in found:
        for layer in group.layers if len(group.layers) > 1 else ():
            title = f"Accuracy of layer {layer.index} ({layer.name}) {group.where}"
            yield section(title, *calls.accuracies(group.at_layer(layer)), depth="file")
