"""Tables of the whole model: changes of its answers, and its prefill times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped, short_precision
from ssdprof.core.case import AnswerBand, Answers, Case, Prefill
from ssdprof.core.report import Report
from ssdprof.report.calls import PRECISION, untimed
from ssdprof.report.table import Column, Section, Table, filled, lifted, section, table, text

ANSWERS_READING = (
    "KL: the divergence of the next token's distribution from the reference's, in nats.  Flips: "
    "positions with another "
    "most likely token; margin: by how much the reference preferred its own, in nats.  In "
    "brackets: 95 % intervals, "
    'from blocks of positions.  Rows that begin with "noise" show differences that no '
    "implementation causes: an "
    "implementation whose differences are no larger cannot be distinguished from the reference."
)
_READING = (
    "Call: from an idle GPU to the first token, through Python.  Speedup: over {0} with the same "
    "convolution and "
    "norm.  Predicted: by Amdahl's law, from the operator's device time in one layer alone.  "
    "Convolution and norm: "
    "those around the operator, the model's own or the bundled kernels.  Logits: rms of the "
    "difference of "
    "the first token's logits to {0}'s, over rms of those.  GPU idle: the rest of the call, in "
    "which the GPU "
    "waited for the host; negative where the profiled prefill took longer than the timed ones."
)


# --- answers

_Band = tuple[Case, Answers, AnswerBand | None]
_ANSWERING: tuple[Column[_Band], ...] = (
    text(
        "implementation",
        lambda row: (
            f"noise: {row[0].implementation}, {row[1].change}"
            if row[1].change
            else row[0].implementation
        ),
    ),
    text(PRECISION, lambda row: short_precision(row[0].precision)),
)


def _band(row: _Band) -> AnswerBand | None:
    return row[2]


_BANDS: tuple[Column[_Band], ...] = (
    Column("KL\nmean", lambda row: fmt.small(row[2].kl_mean) if row[2] else row[0].result),
    *lifted(
        _band,
        Column("KL\np99", lambda band: fmt.small(band.kl_p99)),
        Column("KL\nmax", lambda band: fmt.small(band.kl_max)),
        Column("at\nposition", lambda band: fmt.count(band.kl_max_position)),
        Column("same\ntop token", lambda band: fmt.percent(band.top1_pct, 2)),
        Column("flips", lambda band: fmt.count(band.flips)),
        Column("largest\nmargin", lambda band: fmt.small(band.flip_margin_max)),
        Column("perplexity", lambda band: fmt.small(band.perplexity)),
        Column("change of\nperplexity", lambda band: _change(band)),
    ),
)


def _change(band: AnswerBand) -> str:
    """ "+0.0123% [-0.001%, +0.024%]"."""
    increase, interval = band.perplexity_increase_pct, band.perplexity_interval_pct
    if increase is None or interval is None:
        return fmt.MISSING
    value, low, high = (
        f"{'+' if percent > 0 else ''}{fmt.small(percent)}%" for percent in (increase, *interval)
    )
    return f"{value} [{low}, {high}]"


def prompts(report: Report) -> list[list[Case]]:
    """The cases of answers of each prompt."""
    return list(grouped(report.of_answers, lambda case: (case.seqlen, case.inputs)).values())


def _rows(cases: Sequence[Case], *, alone: bool = False) -> list[_Band]:
    """Over all positions.  alone: those in which a single layer was computed."""
    return [
        (case, one, case.band)
        for case in cases
        if isinstance(one := case.task, Answers) and (one.alone is not None) == alone
    ]


def answers(cases: Sequence[Case]) -> Table | None:
    """Every case of a prompt over all positions; None if there is none."""
    rows = _rows(cases)
    generated = max((one.generated for _, one, _ in rows), default=0)

    def first(row: _Band) -> str:
        if not row[1].generated:
            return fmt.MISSING
        return "none" if row[1].first_difference is None else fmt.count(row[1].first_difference + 1)

    weights = ""
    for _, one, _ in rows[:1]:
        words = "not in its own dtype: the differences are the operators' own errors"
        weights = (
            f"  The model ran in {one.weights}, {'its own dtype' if one.own_weights else words}."
        )
    differs: tuple[Column[_Band], ...] = (
        (Column(f"first of {generated}\nthat differs", first),) if generated else ()
    )
    title = f"Answers at {fmt.tokens(cases[0].seqlen)}"
    return filled(
        table(
            title, (*_ANSWERING, *_BANDS, *differs), rows, note=_reference(cases) + weights, keys=2
        )
    )


def answers_by_position(cases: Sequence[Case]) -> Table | None:
    """Every case in bands of positions; None for a prompt with a single band."""
    positions: Column[_Band] = text(
        "positions", lambda row: f"{row[2].start:,} to {row[2].stop - 1:,}" if row[2] else ""
    )
    rows: list[_Band] = [
        (case, one, band) for case, one, _ in _rows(cases) for band in one.bands[1:]
    ]
    title = f"Answers by position at {fmt.tokens(cases[0].seqlen)}"
    return table(title, (*_ANSWERING, positions, *_BANDS), rows, note=_reference(cases), keys=3)


def answers_by_layer(cases: Sequence[Case]) -> Table | None:
    """Each layer alone, the largest divergence first; None without --per-layer."""
    layer: Column[_Band] = text("layer", lambda row: str(row[1].alone))
    rows = sorted(_rows(cases, alone=True), key=lambda row: -row[2].kl_mean if row[2] else 0.0)
    title = f"One layer at a time, {fmt.tokens(cases[0].seqlen)}"
    note = "In every other layer the reference computes."
    return table(title, (layer, *_ANSWERING, *_BANDS), rows, keys=3, note=note)


def _reference(cases: Sequence[Case]) -> str:
    answers = cases[0].task
    assert isinstance(answers, Answers)
    remark = f"  {answers.remark}" if answers.remark else ""
    return f"Reference: {answers.reference}.{remark}"


# --- prefills

_Row = tuple[Case, Prefill]


def prefill_sections(report: Report) -> Iterator[Section]:
    """The time of the whole model, and the share of its parts."""
    rows = [(case, case.task) for case in report.cases if isinstance(case.task, Prefill)]
    lengths = grouped(rows, lambda row: (row[0].seqlen, row[0].batch)).values()
    yield section("Prefill time", _times(report, rows), reading=_READING.format(report.baseline))
    left = (
        f"{_name(case)} at {_size(case)}: the model itself computed {what}."
        for case, found in rows
        for what in found.left_to_model
    )
    yield section("Left to the model", tuple(left))
    yield section("Where the time of a prefill goes", *map(_parts, lengths))


def _times(report: Report, rows: Sequence[_Row]) -> Table | None:
    """One row for each length, convolution and norm, and implementation."""

    def share(case: Case, found: Prefill) -> float | None:
        """The share of the operators in the call, in percent, from the device time of one layer
        alone.
        """
        if found.alone_us is None or case.call_us is None:
            return None
        return 100 * found.operator_calls * found.alone_us / case.call_us.value

    columns: tuple[Column[_Row], ...] = (
        text("tokens", lambda row: _size(row[0]).removesuffix(" tokens")),
        text("convolution\nand norm", lambda row: row[1].conv_and_norm),
        text("implementation", lambda row: _name(row[0])),
        Column(
            "call",
            lambda row: fmt.duration(row[0].call_us.value) if row[0].call_us else untimed(row[0]),
        ),
        Column("speedup", lambda row: fmt.speedup(report.speedup(row[0]), by_call=True)),
        Column("verdict", lambda row: report.faster(row[0]) or fmt.MISSING),
        Column(
            "predicted",
            lambda row: fmt.ratio(report.predicted(row[0]) if report.speedup(row[0]) else None),
        ),
        Column("operator's\nshare", lambda row: fmt.share(share(*row), 1)),
        Column("operator,\none layer", lambda row: fmt.duration(row[1].alone_us)),
        Column("peak\nmemory", lambda row: fmt.size_words(row[1].peak_bytes)),
        Column("logits", lambda row: fmt.small(row[1].logits_rms)),
    )
    return table(f"Prefill time, {_layers(rows[0][1])}" if rows else "", columns, rows, keys=3)


def _parts(rows: Sequence[_Row]) -> Table | None:
    """The time of each part of the prefill; a column adds up to its call time."""
    timed = [(case, found) for case, found in rows if found.parts and case.call_us]

    def of_case(case: Case, found: Prefill) -> Column[str]:
        whole = case.call_us.value if case.call_us else 0.0
        us = found.part_us | {"call": whole}
        us["GPU idle"] = whole - sum(found.part_us.values())

        def cell(part: str) -> str:
            own = us.get(part, 0.0)
            return f"{'-' * (own < 0)}{fmt.duration(abs(own))} ({100 * own / whole:.1f}%)"

        return Column(f"{_name(case)},\n{found.conv_and_norm}", cell)

    names = [*dict.fromkeys(part for _, found in timed for part in found.parts), "GPU idle", "call"]
    title = f"Where the time goes at {_size(rows[0][0])}, {_layers(rows[0][1])}"
    return table(
        title, (text("part", str), *(of_case(*row) for row in timed)), names if timed else ()
    )


def _name(case: Case) -> str:
    """ "fused hopper", "mamba_ssm 2.3"."""
    return f"{case.implementation} {case.version}" if case.version else case.kernel


def _size(case: Case) -> str:
    return fmt.tokens(case.seqlen, case.batch)


def _layers(found: Prefill) -> str:
    if found.layers == found.layer_count:
        return f"all {fmt.plural(found.layers, 'layer')}"
    return f"only {found.layers} of {fmt.plural(found.layer_count, 'layer')}"
