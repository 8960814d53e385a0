"""The contents of a report and their order: `compose` for every kind of report but that of `tune`,
`of_tuning` for that.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped, intermediates_of
from ssdprof.core.case import Case
from ssdprof.core.report import Report, device_time
from ssdprof.report import calls, model, states
from ssdprof.report.facts import gpu_name, meanings, origin, what_ran
from ssdprof.report.groups import groups, joined_sizes, tokens_of
from ssdprof.report.statements import caveats, in_short, verdict_lines
from ssdprof.report.table import Document, Section, Table, facts, section, table

# titles of sections to which an HTML page adds pictures; others are `model.PARTS`, `states.TITLE`
SPEED = "Speed"
ACCURACY = "Accuracy"
ANSWERS = "Answers"
_MOST_CANDIDATES = 12  # of a search's timed configurations, the fastest ones that are shown
_TUNING_READING = (
    "Device: the time on the GPU alone, replayed from a CUDA graph.  Ratio: the committed "
    "configuration's time over the candidate's, sampled in turns, with its 95 % interval.  A "
    "configuration that is kept was compared with the fp64 oracle on the timed inputs, and is more "
    "than 1 % faster with 95 % confidence."
)


def compose(report: Report) -> Document:
    """The document of a report of any command but `tune`: the verdict first, then the tables, then
    every layer.
    """
    return Document(
        title=heading(report),
        version=report.ssdprof_version,
        origin=origin(report),
        verdict=(*verdict_lines(report), *in_short(report)),
        caveats=tuple(caveats(report)),
        sections=tuple(_sections(report)),
    )


def heading(report: Report) -> str:
    """The title of a report: "ssdprof: mamba2-2.7b, 131,072 tokens, NVIDIA H200", "ssdprof bench,
    ssd on random inputs, NVIDIA H200".
    """
    gpu = gpu_name(report.environment, "no GPU")
    if report.kind in ("bench", "prefill"):
        return f"ssdprof {report.kind}, {target_words(report)}, {gpu}"
    return f"ssdprof: {', '.join(filter(None, (report.target, _tokens(report), gpu)))}"


def _tokens(report: Report) -> str:
    """The lengths of the report's prompts: "131,072 and 1,024 tokens"; empty without cases."""
    if all_groups := groups(report):
        return tokens_of(all_groups)
    sizes = [fmt.tokens(case.seqlen) for case in report.cases]
    return joined_sizes(sizes) if sizes else ""


def target_words(report: Report) -> str:
    """The model, or the operator of a bench: "ssd on random inputs"."""
    return f"{report.target} on random inputs" if report.kind == "bench" else report.target


def _sections(report: Report) -> Iterator[Section]:
    """The sections in their order: what is bad, then the numbers, then the details that a page
    folds.  Those without contents are dropped by `Document`.
    """
    groups_of_run = () if report.kind == "bench" else groups(report)
    answers_of_prompts = model.prompts(report)
    yield section("Failures, refusals, remarks", calls.reasons(report))
    yield from states.sections(report)
    speeds: Iterable[Table]
    accuracies: Iterable[Table]
    if report.kind == "bench":
        speeds = calls.speed_of_bench(report)
        accuracies = calls.accuracy_of_bench(report)
    else:
        speeds = map(calls.total_speed, groups_of_run)
        accuracies = chain.from_iterable(map(calls.accuracies, groups_of_run))
    yield section(SPEED, *speeds, reading=calls.SPEED_READING)
    yield section(ACCURACY, *accuracies, reading=calls.ACCURACY_READING)
    yield section("Laws", *calls.laws(report))
    answers = []
    for cases in answers_of_prompts:
        answers += [model.answers(cases), model.answers_by_layer(cases)]
    yield section(ANSWERS, *answers, reading=model.answers_reading(answers))
    yield from model.prefill_sections(report)
    if report.of_calls:
        yield section("Words", facts("Words", ("word", "meaning"), meanings(report)))
    yield section("What ran", what_ran(report))
    yield section("Run one case again", calls.repeats(report), folded=True)
    yield section("Kernels as they were launched", calls.launches(report), folded=True)
    for cases in answers_of_prompts:
        title = f"Answers by position at {fmt.tokens(cases[0].seqlen)}"
        yield section(title, model.answers_by_position(cases), folded=True)
    for group in groups_of_run:
        if group.calls > 1:
            title = f"of each layer {group.where}"
            yield section(f"Speed {title}", calls.speed_by_layer(group), folded=True)
            yield section(f"Accuracy {title}", *calls.errors_by_layer(group), folded=True)


# --- of ssdprof tune


def of_tuning(report: Report) -> Document:
    """The document of a report of `ssdprof tune`: a table for each search and each of its inputs,
    then the searches without a result.
    """
    cases_of_tables = grouped(report.cases, lambda case: (case.case_key, case.precision)).values()
    left_out = (f"{cell.case_key}: left out: {cell.reason}." for cell in report.left_out)
    tables = (_search(report, cases) for cases in cases_of_tables)
    results = section("Searches", *tables, (*report.remarks, *left_out), _TUNING_READING)
    return Document(
        title=f"ssdprof tune: {report.target}", version=report.ssdprof_version, sections=(results,)
    )


def _search(report: Report, cases: Sequence[Case]) -> Table:
    """The fastest configurations and the committed one, then those that were not timed.

    cases: all cases of one search on the same inputs, one of them with the committed configuration.
    """
    committed = next(case for case in cases if case.implementation == report.baseline)
    timed = sorted((case for case in cases if case.device_us), key=device_time)
    shown = [
        case
        for position, case in enumerate(timed)
        if position < _MOST_CANDIDATES or case is committed
    ]
    untimed = [case for case in cases if not case.device_us]
    rows = []
    for case in (*shown, *untimed):
        verdict: str = report.faster(case) or case.result
        if case is committed and case.device_us:
            verdict = ""  # it is what the others are compared with
        rows.append(
            {
                "candidate": case.implementation,
                "device": fmt.duration(case.device_us and case.device_us.value),
                "ratio": fmt.speedup(report.speedup(case)),
                "verdict": ": ".join(filter(None, (verdict, case.why))),
            }
        )
    intermediates = intermediates_of(committed.precision)
    return table(
        f"{committed.case_key}, {intermediates}: {committed.variant} kernel",
        rows,
        ("candidate", "verdict"),
        wraps="verdict",
        note=f"Committed: {committed.plan}.  {fmt.plural(len(cases) - 1, 'other')} tried.",
    )
