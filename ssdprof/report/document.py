"""The contents of a report and their order, for every kind of report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped, intermediates_of
from ssdprof.core.case import Case
from ssdprof.core.report import Report
from ssdprof.report import calls, model
from ssdprof.report.facts import gpu_name, meanings, origin, what_ran
from ssdprof.report.groups import groups, tokens_of
from ssdprof.report.statements import caveats, in_short, verdict_lines
from ssdprof.report.table import Column, Document, Section, Table, facts, section, table, text

SPEED, ACCURACY = "Speed", "Accuracy"  # titles of the sections to which a page adds pictures
_MOST_CANDIDATES = 12  # of the candidates that were timed, the fastest
_TUNING_READING = (
    "Device: the time on the GPU alone, replayed from a CUDA graph.  Ratio: the committed "
    "configuration's time over "
    "the candidate's, sampled in turns, with its 95 % interval.  A configuration that is kept "
    "was compared with the "
    "fp64 oracle on the timed inputs, and is more than 1 % faster with 95 % confidence."
)


def compose(report: Report) -> Document:
    """The whole report: the verdict first, then the tables, then every layer."""
    return Document(
        title=heading(report),
        version=report.ssdprof_version,
        origin=origin(report),
        verdict=(*verdict_lines(report), *in_short(report)),
        caveats=tuple(caveats(report)),
        sections=tuple(_sections(report)),
    )


def heading(report: Report) -> str:
    """ "ssdprof: mamba2-2.7b, 131,072 tokens, NVIDIA H200"."""
    gpu = gpu_name(report.environment, "no GPU")
    if report.kind in ("bench", "prefill"):
        return f"ssdprof {report.kind}, {subject(report)}, {gpu}"
    lengths = [f"{seqlen:,}" for seqlen in dict.fromkeys(case.seqlen for case in report.of_answers)]
    tokens = (
        tokens_of(found)
        if (found := groups(report))
        else f"{fmt.words(lengths)} tokens"
        if lengths
        else ""
    )
    return f"ssdprof: {', '.join(filter(None, (report.subject, tokens, gpu)))}"


def subject(report: Report) -> str:
    """The model, or the operator of a bench."""
    return f"{report.subject} on random inputs" if report.kind == "bench" else report.subject


def _sections(report: Report) -> Iterator[Section]:
    of_bench = report.kind == "bench"
    found, answered = () if of_bench else groups(report), model.prompts(report)
    yield section("Failures, refusals, remarks", calls.reasons(report))
    speeds = calls.speed_of_bench(report) if of_bench else map(calls.total_speed, found)
    errors = (
        calls.accuracy_of_bench(report)
        if of_bench
        else (one for own in found for one in calls.accuracies(own))
    )
    yield section(SPEED, *speeds, reading=calls.SPEED_READING)
    yield section(ACCURACY, *errors, reading=calls.ACCURACY_READING)
    yield section("Laws", calls.laws(report), calls.between_calls(report))
    compared = (make(one) for one in answered for make in (model.answers, model.answers_by_layer))
    yield section("Answers", *compared, reading=model.ANSWERS_READING)
    yield from model.prefill_sections(report)
    yield section(
        "Words", facts("Words", ("word", "meaning"), meanings(report)) if report.of_calls else None
    )
    yield section("What ran", what_ran(report))
    yield section("Run one case again", calls.repeats(report), folded=True)
    yield section("Kernels as they were launched", calls.launches(report), folded=True)
    for one in answered:
        title = f"Answers by position at {fmt.tokens(one[0].seqlen)}"
        yield section(title, model.answers_by_position(one), folded=True)
    for group in (group for group in found if group.calls > 1):
        yield section(
            f"Speed of each layer {group.where}", calls.speed_by_layer(group), folded=True
        )
        yield section(
            f"Accuracy of each layer {group.where}", *calls.errors_by_layer(group), folded=True
        )


# --- of ssdprof tune


def of_tuning(report: Report) -> Document:
    """What each search of `ssdprof tune` found."""
    searches = grouped(report.cases, lambda case: (case.place, case.precision)).values()
    left = (f"{one.place}: left out: {one.reason}." for one in report.left_out)
    tables = (_search(report, own) for own in searches)
    found = section("Searches", *tables, (*report.remarks, *left), _TUNING_READING)
    return Document(
        title=f"ssdprof tune: {report.subject}", version=report.ssdprof_version, sections=(found,)
    )


def _search(report: Report, cases: Sequence[Case]) -> Table | None:
    committed = next(one for one in cases if one.implementation == report.baseline)
    timed = sorted((one for one in cases if one.device_us), key=lambda one: one.device_us or (0.0,))
    shown = [one for place, one in enumerate(timed) if place < _MOST_CANDIDATES or one is committed]

    def verdict(case: Case) -> str:
        said = "" if case is committed and case.device_us else report.faster(case) or case.result
        return f"{said}: {case.why}" if case.why else said

    return table(
        f"{committed.place}, {intermediates_of(committed.precision)}: {committed.variant} kernel",
        (
            text("candidate", lambda case: case.implementation),
            Column("device", lambda case: fmt.duration(case.device_us and case.device_us.value)),
            Column("ratio", lambda case: fmt.speedup(report.speedup(case))),
            text("verdict", verdict, wraps=True),
        ),
        (*shown, *(one for one in cases if not one.device_us)),
        note=f"Committed: {committed.plan}.  {len(cases)} tried.",
    )
