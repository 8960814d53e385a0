"""Tables of the whole model: changes of its answers, and its prefill times."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from ssdprof.core import words as fmt
from ssdprof.core.base import distinct, grouped, short_precision
from ssdprof.core.case import AnswerBand, Answers, Case, Prefill
from ssdprof.core.report import Report
from ssdprof.report.calls import NAMES, untimed
from ssdprof.report.table import PRECISION, Section, Table, TableRow, section, strings, table

_ANSWERS_MEANINGS = {  # heading of a column -> the sentence that explains it
    "KL\nmean": (
        "KL: the divergence of the next token's distribution from the reference's, in nats."
    ),
    "flips": "Flips: positions with another most likely token.",
    "largest\nmargin": (
        "Margin: by how much the reference preferred its own token at a flip, in nats."
    ),
    "change of\nperplexity": "In brackets: 95 % intervals, from blocks of positions.",
}
_NOISE_MEANING = (
    'Rows that begin with "noise" show differences that no implementation causes: an '
    "implementation whose differences are no larger cannot be distinguished from the reference."
)
PARTS = "Where the time of a prefill goes"  # the title of a section
_READING = (
    "Call: from an idle GPU to the first token, through Python.  Speedup: over {0} with the same "
    "convolution and norm.  Predicted: by Amdahl's law, from the operator's device time in one "
    "layer alone.  Convolution and norm: those around the operator, the model's own or the bundled "
    "kernels.  Logits: rms of the difference of the first token's logits to {0}'s, over rms of "
    "those.  GPU idle: the rest of the call, in which the GPU waited for the host; negative where "
    "the profiled prefill took longer than the timed ones."
)


# --- answers

_Answer = tuple[Case, Answers]  # a case and its task


def _names(case: Case, answers: Answers) -> TableRow:
    """The cells of `NAMES`.  For a case of noise, the first one also names what was changed."""
    noise = f"noise: {case.implementation}, {answers.change}"
    return {
        "implementation": noise if answers.change else case.implementation,
        PRECISION: short_precision(case.precision),
    }


def _differences(case: Case, band: AnswerBand | None) -> TableRow:
    """The differences in a band of positions.  Without a band, the case's result alone, in place of
    the mean KL.
    """
    if band is None:
        return {"KL\nmean": case.result}
    return {
        "KL\nmean": fmt.small(band.kl_mean),
        "KL\np99": fmt.small(band.kl_p99),
        "KL\nmax": fmt.small(band.kl_max),
        "at\nposition": fmt.count(band.kl_max_position),
        "same\ntop token": fmt.percent(band.top1_pct, 2),
        "flips": fmt.count(band.flips),
        "largest\nmargin": fmt.small(band.flip_margin_max),
        "perplexity": fmt.small(band.perplexity),
        "change of\nperplexity": _change(band),
    }


def _change(band: AnswerBand) -> str:
    """The change of perplexity and its interval: "+0.0123% [-0.001%, +0.024%]"."""
    increase = band.perplexity_increase_pct
    interval = band.perplexity_interval_pct
    if increase is None or interval is None:
        return fmt.MISSING
    low, high = interval
    return f"{_signed(increase)} [{_signed(low)}, {_signed(high)}]"


def _signed(percent: float) -> str:
    """A percentage with its sign: "+0.0123%", "-0.001%", "0%"."""
    sign = "+" if percent > 0 else ""
    return f"{sign}{fmt.small(percent)}%"


def prompts(report: Report) -> list[list[Case]]:
    """The cases of answers, in a list for each prompt."""
    return list(grouped(report.of_answers, lambda case: (case.seqlen, case.inputs)).values())


def _rows(cases: Sequence[Case], *, alone: bool = False) -> list[_Answer]:
    """Some of the cases of answers, each with its task.

    alone: True for the cases in which the implementation computed a single layer, False for those
        in which it computed all of them.
    """
    answers = ((case, case.task) for case in cases if isinstance(case.task, Answers))
    return [(case, task) for case, task in answers if (task.alone is not None) == alone]


def answers(cases: Sequence[Case]) -> Table:
    """A row for each case of a prompt, over all its positions.

    cases: all cases of the prompt, at least one; those of single layers are left out.
    """
    of_all_layers = _rows(cases)
    generated = max((task.generated for _, task in of_all_layers), default=0)
    rows = []
    for case, task in of_all_layers:
        row = _names(case, task) | _differences(case, case.band)
        if generated:
            row[f"first of {generated}\nthat differs"] = _first_difference(task)
        rows.append(row)
    title = f"Answers at {fmt.tokens(cases[0].seqlen)}"
    note = _reference(cases)
    if of_all_layers:
        _, task = of_all_layers[0]
        which = "its own dtype"
        if not task.own_weights:
            which = "not in its own dtype: the differences are the operators' own errors"
        note += f"  The model ran in {task.weights}, {which}."
    return table(title, rows, NAMES, note=note, keys=2).without_empty_columns()


def _first_difference(answers: Answers) -> str:
    """The number of the first generated token that differs from the reference's, from 1; "none" if
    none differs, a dash if none was generated.
    """
    if not answers.generated:
        return fmt.MISSING
    if answers.first_difference is None:
        return "none"
    return fmt.count(answers.first_difference + 1)


def answers_reading(tables: Sequence[Table]) -> str:
    """The explanations of the columns and rows that these tables have."""
    headings = set(chain.from_iterable(table.headers for table in tables if table))
    words = [meaning for heading, meaning in _ANSWERS_MEANINGS.items() if heading in headings]
    rows = chain.from_iterable(table.rows for table in tables)
    if any(cell.startswith("noise: ") for cell in chain.from_iterable(rows)):
        words.append(_NOISE_MEANING)
    return "  ".join(words)


def answers_by_position(cases: Sequence[Case]) -> Table:
    """A row for each case and band of positions.  A prompt with a single band has no rows."""
    rows = []
    for case, task in _rows(cases):
        for band in task.bands[1:]:  # the first band is the whole prompt
            positions = {"positions": f"{band.start:,} to {band.stop - 1:,}"}
            rows.append(_names(case, task) | positions | _differences(case, band))
    title = f"Answers by position at {fmt.tokens(cases[0].seqlen)}"
    text_headings = (*NAMES, "positions")
    return table(
        title, rows, text_headings, note=_reference(cases), keys=len(NAMES) + 1
    ).without_empty_columns()


def answers_by_layer(cases: Sequence[Case]) -> Table:
    """A row for each case in which a single layer was computed, the largest divergence first, and
    those without one last.

    There are such cases only if `--per-layer` was given.
    """
    single_layers = sorted(_rows(cases, alone=True), key=_negative_divergence)
    rows = [
        {"layer": str(task.alone)} | _names(case, task) | _differences(case, case.band)
        for case, task in single_layers
    ]
    title = f"One layer at a time, {fmt.tokens(cases[0].seqlen)}"
    note = "In every other layer the reference computes."
    text_headings = ("layer", *NAMES)
    return table(
        title, rows, text_headings, keys=len(text_headings), note=note
    ).without_empty_columns()


def _negative_divergence(answer: _Answer) -> float:
    case, _ = answer
    return -case.band.kl_mean if case.band else 0.0


def _reference(cases: Sequence[Case]) -> str:
    """A sentence on the reference of the cases, which have it in common, and why it is that."""
    answers = cases[0].task
    assert isinstance(answers, Answers)
    remark = f"  {answers.remark}" if answers.remark else ""
    return f"Reference: {answers.reference}.{remark}"


# --- prefills

_CaseOfPrefill = tuple[Case, Prefill]  # a case and its task


def prefill_sections(report: Report) -> Iterator[Section]:
    """The sections of prefills: their times, what was left to the model, and the shares of the
    model's parts.
    """
    all_prefills = prefills(report)
    times = _times(report, all_prefills)
    yield section("Prefill time", times, reading=_READING.format(report.baseline))
    sentences = []
    for case, task in all_prefills:
        where = f"{_name(case)} at {_size(case)}"
        sentences += [f"{where}: the model itself computed {part}." for part in task.left_to_model]
    yield section("Left to the model", tuple(sentences))
    yield section(PARTS, *map(_parts, by_length(all_prefills).values()))


def prefills(report: Report) -> list[_CaseOfPrefill]:
    """The cases that are prefills, each with its task."""
    return [(case, case.task) for case in report.cases if isinstance(case.task, Prefill)]


def by_length(prefills: Sequence[_CaseOfPrefill]) -> dict[str, list[_CaseOfPrefill]]:
    """The size of a prompt, in words -> its prefills."""
    return grouped(prefills, lambda row: _size(row[0]))


def _times(report: Report, prefills: Sequence[_CaseOfPrefill]) -> Table:
    """A row for each length, convolution and norm, and implementation."""
    rows = []
    for case, task in prefills:
        speedup = report.speedup(case)
        rows.append(
            {
                "tokens": _size(case).removesuffix(" tokens"),
                "convolution\nand norm": task.conv_and_norm,
                "implementation": _name(case),
                "call": fmt.duration(case.call_us.value) if case.call_us else untimed(case),
                "speedup": fmt.speedup(speedup, by_call=True),
                "verdict": report.faster(case) or fmt.MISSING,
                "predicted": fmt.ratio(report.predicted(case) if speedup else None),
                "operator's\nshare": fmt.share(operators_share(case, task), 1),
                "operator,\none layer": fmt.duration(task.alone_us),
                "peak\nmemory": fmt.size_words(task.peak_bytes),
                "logits": fmt.small(task.logits_rms),
            }
        )
    title = f"Prefill time, {_layers(prefills[0][1])}" if prefills else ""
    return table(title, rows, ("tokens", "convolution\nand norm", "implementation"), keys=3)


def operators_share(case: Case, task: Prefill) -> float | None:
    """The percentage of the call that the operators of all layers take.

    It is estimated from the device time of one layer's operator alone; None if that or the call was
    not timed.
    """
    if task.alone_us is None or case.call_us is None:
        return None
    return 100 * task.operator_calls * task.alone_us / case.call_us.value


def _parts(prefills: Sequence[_CaseOfPrefill]) -> Table:
    """A column for each profiled prefill, with the times of its parts, and their sum, which is its
    call time.

    prefills: at least one, of the same size.
    """
    columns = {}
    for name, part_us in parts_of_prefills(prefills).items():
        columns[name.replace(", ", ",\n")] = part_us | {"call": math.fsum(part_us.values())}
    rows = []
    for part in distinct(columns.values()):
        cells = (_time_and_share(us_of[part], us_of["call"]) for us_of in columns.values())
        rows.append((part, *cells))
    first_case, first_prefill = prefills[0]
    title = f"Where the time goes at {_size(first_case)}, {_layers(first_prefill)}"
    return strings(title, ("part", *columns), rows)


def parts_of_prefills(prefills: Sequence[_CaseOfPrefill]) -> dict[str, dict[str, float]]:
    """Prefill -> part -> microseconds.  The parts of a prefill add up to its call time.

    "GPU idle" is the call time minus the other parts.  All prefills have the same parts, with 0 for
    a part that they lack.  Prefills that were not profiled or not timed are left out.
    """
    names = distinct(task.parts for _, task in prefills)
    columns = {}
    for case, task in prefills:
        if task.parts and case.call_us:
            us = dict.fromkeys(map(str, names), 0.0) | task.part_us
            us["GPU idle"] = case.call_us.value - math.fsum(us.values())
            columns[f"{_name(case)}, {task.conv_and_norm}"] = us
    return columns


def _time_and_share(us: float, whole_us: float) -> str:
    """A time and its share of the whole: "1.93 ms (12.0%)".  GPU idle time may be negative."""
    sign = "-" if us < 0 else ""
    return f"{sign}{fmt.duration(abs(us))} ({100 * us / whole_us:.1f}%)"


def _name(case: Case) -> str:
    """The implementation with its version, or with its variant if it has none: "mamba_ssm 2.3",
    "fused hopper".
    """
    return f"{case.implementation} {case.version}" if case.version else case.kernel


def _size(case: Case) -> str:
    return fmt.tokens(case.seqlen, case.batch)


def _layers(prefill: Prefill) -> str:
    """How much of the model was loaded: "all 32 layers", "only 4 of 32 layers"."""
    if prefill.layers == prefill.layer_count:
        return f"all {fmt.plural(prefill.layers, 'layer')}"
    return f"only {prefill.layers} of {fmt.plural(prefill.layer_count, 'layer')}"
