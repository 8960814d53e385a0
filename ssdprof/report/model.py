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

_ANSWERS_WORDS = {  # heading -> what it means
    "KL\nmean": (
        "KL: the divergence of the next token's distribution from the reference's, in nats."
    ),
    "flips": "Flips: positions with another most likely token.",
    "largest\nmargin": (
        "Margin: by how much the reference preferred its own token at a flip, in nats."
    ),
    "change of\nperplexity": "In brackets: 95 % intervals, from blocks of positions.",
}
_NOISE_WORDS = (
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

_Answer = tuple[Case, Answers]


def _names(case: Case, answers: Answers) -> TableRow:
    noise = f"noise: {case.implementation}, {answers.change}"
    return {
        "implementation": noise if answers.change else case.implementation,
        PRECISION: short_precision(case.precision),
    }


def _differences(case: Case, band: AnswerBand | None) -> TableRow:
    """The distances of a band of positions; without one only the case's result."""
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
    """ "+0.0123% [-0.001%, +0.024%]"."""
    increase = band.perplexity_increase_pct
    interval = band.perplexity_interval_pct
    if increase is None or interval is None:
        return fmt.MISSING
    value, low, high = (
        f"{'+' if percent > 0 else ''}{fmt.small(percent)}%" for percent in (increase, *interval)
    )
    return f"{value} [{low}, {high}]"


def prompts(report: Report) -> list[list[Case]]:
    """The cases of answers of each prompt."""
    return list(grouped(report.of_answers, lambda case: (case.seqlen, case.inputs)).values())


def _rows(cases: Sequence[Case], *, alone: bool = False) -> list[_Answer]:
    """The cases of answers, each with its task.  alone: those in which a single layer was
    computed.
    """
    answers = ((case, case.task) for case in cases if isinstance(case.task, Answers))
    return [(case, task) for case, task in answers if (task.alone is not None) == alone]


def answers(cases: Sequence[Case]) -> Table:
    """Every case of a prompt over all positions; without rows if there is none."""
    answered = _rows(cases)
    generated = max((task.generated for _, task in answered), default=0)
    rows = []
    for case, task in answered:
        row = _names(case, task) | _differences(case, case.band)
        if generated:
            row[f"first of {generated}\nthat differs"] = _first_difference(task)
        rows.append(row)
    title = f"Answers at {fmt.tokens(cases[0].seqlen)}"
    note = _reference(cases)
    if answered:
        _, task = answered[0]
        words = "not in its own dtype: the differences are the operators' own errors"
        note += (
            f"  The model ran in {task.weights}, {'its own dtype' if task.own_weights else words}."
        )
    return table(title, rows, NAMES, note=note, keys=2).without_empty_columns()


def _first_difference(answers: Answers) -> str:
    """The number of the first generated token that differs from the reference's."""
    if not answers.generated:
        return fmt.MISSING
    if answers.first_difference is None:
        return "none"
    return fmt.count(answers.first_difference + 1)


def answers_reading(tables: Sequence[Table]) -> str:
    """The words that the tables use."""
    headings = set(chain.from_iterable(table.headers for table in tables if table))
    words = [meaning for heading, meaning in _ANSWERS_WORDS.items() if heading in headings]
    names = chain.from_iterable(chain.from_iterable(table.rows) for table in tables)
    if any(name.startswith("noise: ") for name in names):
        words.append(_NOISE_WORDS)
    return "  ".join(words)


def answers_by_position(cases: Sequence[Case]) -> Table:
    """Every case in bands of positions; without rows for a prompt with a single band."""
    rows = []
    for case, task in _rows(cases):
        for band in task.bands[1:]:
            positions = {"positions": f"{band.start:,} to {band.stop - 1:,}"}
            rows.append(_names(case, task) | positions | _differences(case, band))
    title = f"Answers by position at {fmt.tokens(cases[0].seqlen)}"
    words = (*NAMES, "positions")
    return table(title, rows, words, note=_reference(cases), keys=3).without_empty_columns()


def answers_by_layer(cases: Sequence[Case]) -> Table:
    """Each layer alone, the largest divergence first; without rows unless --per-layer was given."""
    alone = _rows(cases, alone=True)
    alone.sort(key=_negative_divergence)
    rows = [
        {"layer": str(task.alone)} | _names(case, task) | _differences(case, case.band)
        for case, task in alone
    ]
    title = f"One layer at a time, {fmt.tokens(cases[0].seqlen)}"
    note = "In every other layer the reference computes."
    words = ("layer", *NAMES)
    return table(title, rows, words, keys=3, note=note).without_empty_columns()


def _negative_divergence(answer: _Answer) -> float:
    case, _ = answer
    return -case.band.kl_mean if case.band else 0.0


def _reference(cases: Sequence[Case]) -> str:
    answers = cases[0].task
    assert isinstance(answers, Answers)
    remark = f"  {answers.remark}" if answers.remark else ""
    return f"Reference: {answers.reference}.{remark}"


# --- prefills

_TimedPrefill = tuple[Case, Prefill]


def prefill_sections(report: Report) -> Iterator[Section]:
    """The time of the whole model, and the share of its parts."""
    timed = prefills(report)
    yield section("Prefill time", _times(report, timed), reading=_READING.format(report.baseline))
    left = []
    for case, task in timed:
        where = f"{_name(case)} at {_size(case)}"
        left += [f"{where}: the model itself computed {part}." for part in task.left_to_model]
    yield section("Left to the model", tuple(left))
    yield section(PARTS, *map(_parts, by_length(timed).values()))


def prefills(report: Report) -> list[_TimedPrefill]:
    return [(case, case.task) for case in report.cases if isinstance(case.task, Prefill)]


def by_length(timed: Sequence[_TimedPrefill]) -> dict[str, list[_TimedPrefill]]:
    """Tokens -> the prefills of so many."""
    return grouped(timed, lambda row: _size(row[0]))


def _times(report: Report, prefills: Sequence[_TimedPrefill]) -> Table:
    """One row for each length, convolution and norm, and implementation."""
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
    """The share of the operators in the call, in percent, from the device time of one layer
    alone.
    """
    if task.alone_us is None or case.call_us is None:
        return None
    return 100 * task.operator_calls * task.alone_us / case.call_us.value


def _parts(prefills: Sequence[_TimedPrefill]) -> Table:
    """The time of each part of the prefill; a column adds up to its call time."""
    columns = parts_of_prefills(prefills)
    headers = ["part"]
    cells = []
    for name, us in columns.items():
        whole = math.fsum(us.values())
        headers.append(name.replace(", ", ",\n"))
        cells.append([_time_and_share(part_us, whole) for part_us in (*us.values(), whole)])
    parts = [*next(iter(columns.values())), "call"] if columns else []
    rows = zip(parts, *cells, strict=True)
    title = f"Where the time goes at {_size(prefills[0][0])}, {_layers(prefills[0][1])}"
    return strings(title, headers, rows)


def parts_of_prefills(prefills: Sequence[_TimedPrefill]) -> dict[str, dict[str, float]]:
    """The name and the us of each part of every timed prefill, which add up to its call."""
    names = distinct(task.parts for _, task in prefills)
    columns = {}
    for case, task in prefills:
        if task.parts and case.call_us:
            us = dict.fromkeys(map(str, names), 0.0) | task.part_us
            us["GPU idle"] = case.call_us.value - math.fsum(us.values())
            columns[f"{_name(case)}, {task.conv_and_norm}"] = us
    return columns


def _time_and_share(us: float, whole_us: float) -> str:
    """ "1.93 ms (12.0%)"; a time may be below zero."""
    sign = "-" if us < 0 else ""
    return f"{sign}{fmt.duration(abs(us))} ({100 * us / whole_us:.1f}%)"


def _name(case: Case) -> str:
    """ "fused hopper", "mamba_ssm 2.3"."""
    return f"{case.implementation} {case.version}" if case.version else case.kernel


def _size(case: Case) -> str:
    return fmt.tokens(case.seqlen, case.batch)


def _layers(prefill: Prefill) -> str:
    if prefill.layers == prefill.layer_count:
        return f"all {fmt.plural(prefill.layers, 'layer')}"
    return f"only {prefill.layers} of {fmt.plural(prefill.layer_count, 'layer')}"
