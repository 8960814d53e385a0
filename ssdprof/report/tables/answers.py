"""Changes of a model's answers: over all positions, in bands of positions, and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.core import words as fmt
from ssdprof.report.tables.table import Note, Table, columns
from ssdprof.schema import AnswerCase, Answers, Interval
from ssdprof.schema.answers import AnswerBand

_PRECISION = "intermediates,\nstates"
_HEADERS = (
    "KL\nmean",
    "KL\np99",
    "KL\nmax",
    "at\nposition",
    "same\ntop token",
    "flips",
    "margin\nmedian",
    "margin\nlargest",
    "perplexity",
    "change of\nperplexity",
)
READING = Note(
    "KL: the divergence of the next token's distribution from the reference's, in nats.  Flips: positions with another "
    "most likely token; margin: by how much the reference preferred its own, in nats.  In brackets: 95 % intervals, "
    'from blocks of positions.  Rows that begin with "noise" show differences that no implementation causes: an '
    "implementation whose differences are no larger cannot be distinguished from the reference."
)


def total(answers: Answers) -> Table | None:
    """Every case over all positions; None if there is none."""
    found = [case for case in answers.cases if case.layer is None]
    generated = max((case.generated.tokens for case in found if case.generated), default=0)
    more = (f"first of {generated}\nthat differs",) if generated else ()
    rows = [(*_names(case), *_cells(case, 0), *((_first_difference(case),) if more else ())) for case in found]
    if not rows:
        return None
    return Table(
        title=f"Answers at {fmt.tokens(answers.seqlen)}",
        headers=("implementation", _PRECISION, *_HEADERS, *more),
        rows=tuple(rows),
        align=columns(2, len(_HEADERS) + len(more)),
        note=f"{_reference(answers)}{_weights(answers)}",
        keys=2,
    )


def by_position(answers: Answers) -> Table | None:
    """Every case in bands of positions; None for a prompt with a single band."""
    rows = []
    for case in answers.cases:
        if case.layer is None:
            for number, band in enumerate(case.bands[1:], start=1):
                rows.append((*_names(case), f"{band.start:,} to {band.stop - 1:,}", *_cells(case, number)))
    if not rows:
        return None
    return Table(
        title=f"Answers by position at {fmt.tokens(answers.seqlen)}",
        headers=("implementation", _PRECISION, "positions", *_HEADERS),
        rows=tuple(rows),
        align=columns(3, len(_HEADERS)),
        note=_reference(answers),
        keys=3,
    )


def by_layer(answers: Answers) -> Table | None:
    """The mean divergence with one layer at a time, the largest first; None without --per-layer."""
    alone = [case for case in answers.cases if case.layer is not None]
    if not alone:
        return None
    kinds = list(dict.fromkeys((case.implementation, case.precision) for case in alone))
    cells = {(case.layer, case.implementation, case.precision): case for case in alone}
    layers = sorted(
        {layer for layer, _, _ in cells if layer is not None}, key=lambda layer: (-_worst(alone, layer), layer)
    )
    return Table(
        title=f"Mean KL with one layer at a time, {fmt.tokens(answers.seqlen)}",
        headers=("layer", *(f"{name}\n{precision.short}" for name, precision in kinds)),
        rows=tuple((str(layer), *(_kl(cells.get((layer, *kind))) for kind in kinds)) for layer in layers),
        align=("left", *columns(0, len(kinds))),
        note="In every other layer the reference computes.  The layer with the largest divergence comes first.",
    )


def facts(answers: Answers) -> Iterator[tuple[str, str]]:
    """Rows for the table "What ran"."""
    used = "" if answers.peak_bytes is None else f", peak memory {fmt.size(answers.peak_bytes)} of the GPU"
    took = fmt.duration(answers.seconds * 1e6)
    yield (
        f"answers, {fmt.tokens(answers.seqlen)}",
        f"{fmt.plural(len(answers.cases), 'case')} against {answers.reference}, layers {fmt.indices(answers.layers)}, "
        f"model in {answers.weights}, segments of {answers.segment_length:,}, {took}{used}",
    )


def verdict(answers: tuple[Answers, ...], failures: tuple[str, ...]) -> Iterator[str]:
    """One line for each failure, or one line if all passed."""
    for why in failures:
        yield f"FAILED: the answers of {why}."
    judged = sum(len(one.judged) for one in answers)
    if judged and not failures:
        limits = "no limit was given" if all(one.gate.empty for one in answers) else "they are within the limits"
        yield f"Answers of {fmt.plural(judged, 'case')} were compared: {limits}."


def _names(case: AnswerCase) -> tuple[str, str]:
    if case.change:
        return f"noise: {case.implementation}, {case.change}", case.precision.short
    return case.implementation, case.precision.short


def _cells(case: AnswerCase, number: int) -> tuple[str, ...]:
    if not case.bands:
        return (case.status, *(fmt.MISSING,) * (len(_HEADERS) - 1))
    band = case.bands[number]
    worst = band.worst_flip
    return (
        fmt.small(band.kl_mean),
        fmt.small(band.kl_p99),
        fmt.small(band.kl_max),
        fmt.count(band.kl_max_position),
        fmt.percent(band.top1_pct, 2),
        fmt.count(band.flips),
        fmt.small(band.flip_margin_median),
        fmt.small(worst.margin if worst else None),
        fmt.small(band.perplexity),
        _change(band),
    )


def _change(band: AnswerBand) -> str:
    """ "+0.0123% [-0.001%, +0.024%]"."""
    interval: Interval | None = band.perplexity_interval_pct
    if band.perplexity_increase_pct is None or interval is None:
        return fmt.MISSING
    return f"{_signed(band.perplexity_increase_pct)} [{_signed(interval.low)}, {_signed(interval.high)}]"


def _signed(percent: float) -> str:
    return f"{'+' if percent > 0 else ''}{fmt.small(percent)}%"


def _first_difference(case: AnswerCase) -> str:
    if case.generated is None:
        return fmt.MISSING
    first = case.generated.first_difference
    return "none" if first is None else fmt.count(first + 1)


def _reference(answers: Answers) -> str:
    return f"Reference: {answers.reference}." + (f"  {answers.remark}" if answers.remark else "")


def _weights(answers: Answers) -> str:
    if answers.own_weights:
        return f"  The model ran in {answers.weights}, its own dtype."
    return f"  The model ran in {answers.weights}, not in its own dtype: the differences are the operators' own errors."


def _worst(cases: list[AnswerCase], layer: int) -> float:
    return max((case.bands[0].kl_mean for case in cases if case.layer == layer and case.bands), default=0.0)


def _kl(case: AnswerCase | None) -> str:
    if case is None:
        return fmt.MISSING
    return fmt.small(case.bands[0].kl_mean) if case.bands else case.status
