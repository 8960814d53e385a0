"""Tables of the whole model: changes of its answers, and its prefill times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssdprof.core import words as fmt
from ssdprof.core.base import grouped
from ssdprof.core.case import AnswerBand, Answers, Case, Prefill
from ssdprof.core.report import Report
from ssdprof.report.calls import PRECISION
from ssdprof.report.statements import full_name
from ssdprof.report.table import Column, Note, Section, Table, lifted, section, strings, table, text

ANSWERS_READING = Note(
    "KL: the divergence of the next token's distribution from the reference's, in nats.  Flips: positions with another "
    "most likely token; margin: by how much the reference preferred its own, in nats.  In brackets: 95 % intervals, "
    'from blocks of positions.  Rows that begin with "noise" show differences that no implementation causes: an '
    "implementation whose differences are no larger cannot be distinguished from the reference."
)
_READING = (
    "Call: from an idle GPU to the first token, through Python.  Speedup: over {0} with the same convolution and "
    "norm.  Predicted: by Amdahl's law, from the operator's device time in one layer alone.  Convolution and norm: "
    "those around the operator, the model's own or the bundled kernels.  Logits: rms of the difference of "
    "the first token's logits to {0}'s, over rms of those.  GPU idle: the rest of the call, in which the GPU "
    "waited for the host; negative where the profiled prefill took longer than the timed ones."
)
_AGREE = 0.1  # relative difference of prediction and measurement above which the report explains it
_WORTH = 0.02  # share of the difference from which a part is named
_NAME = 60  # characters of a kernel's name


# --- answers

_Band = tuple[Case, Answers, AnswerBand | None]
_ANSWERING: tuple[Column[_Band], ...] = (
    text(
        "implementation",
        lambda row: f"noise: {row[0].implementation}, {row[1].change}" if row[1].change else row[0].implementation,
    ),
    text(PRECISION, lambda row: row[0].precision.short),
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
        Column("margin\nmedian", lambda band: fmt.small(band.flip_margin_median)),
        Column("margin\nlargest", lambda band: fmt.small(band.worst_flip.margin if band.worst_flip else None)),
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
        f"{'+' if percent > 0 else ''}{fmt.small(percent)}%" for percent in (increase, interval.low, interval.high)
    )
    return f"{value} [{low}, {high}]"


def prompts(report: Report) -> list[list[Case]]:
    """The cases of answers of each prompt."""
    return list(grouped(report.of_answers, lambda case: (case.seqlen, case.inputs)).values())


def answers(cases: Sequence[Case]) -> Table | None:
    """Every case of a prompt over all positions; None if there is none."""
    rows: list[_Band] = [(case, one, case.band) for case in cases if (one := case.answers) and one.alone is None]
    generated = max((one.generated.tokens for _, one, _ in rows if one.generated), default=0)

    def first(row: _Band) -> str:
        if (found := row[1].generated) is None:
            return fmt.MISSING
        return "none" if found.first_difference is None else fmt.count(found.first_difference + 1)

    weights = ""
    for _, one, _ in rows[:1]:
        words = "not in its own dtype: the differences are the operators' own errors"
        weights = f"  The model ran in {one.weights}, {'its own dtype' if one.own_weights else words}."
    differs: tuple[Column[_Band], ...] = (Column(f"first of {generated}\nthat differs", first),) if generated else ()
    title = f"Answers at {fmt.tokens(cases[0].seqlen)}"
    return table(title, (*_ANSWERING, *_BANDS, *differs), rows, note=_reference(cases) + weights, keys=2)


def answers_by_position(cases: Sequence[Case]) -> Table | None:
    """Every case in bands of positions; None for a prompt with a single band."""
    positions: Column[_Band] = text(
        "positions", lambda row: f"{row[2].start:,} to {row[2].stop - 1:,}" if row[2] else ""
    )
    rows: list[_Band] = [
        (case, one, band) for case in cases if (one := case.answers) and one.alone is None for band in one.bands[1:]
    ]
    title = f"Answers by position at {fmt.tokens(cases[0].seqlen)}"
    return table(title, (*_ANSWERING, positions, *_BANDS), rows, note=_reference(cases), keys=3)


def answers_by_layer(cases: Sequence[Case]) -> Table | None:
    """The mean divergence with one layer at a time, the largest first; None without --per-layer."""
    found = [(one.alone, case) for case in cases if (one := case.answers) and one.alone is not None]
    alone = {layer: [case for _, case in own] for layer, own in grouped(found, lambda one: one[0]).items()}

    def of_label(label: str, case: Case) -> Column[int]:
        def kl(layer: int) -> str:
            own = next((case for case in alone[layer] if case.label == label), None)
            if own is None:
                return fmt.MISSING
            return fmt.small(own.band.kl_mean) if own.band else own.result

        return Column(f"{case.implementation}\n{case.precision.short}", kl)

    def worst(layer: int) -> tuple[float, int]:
        return -max((case.band.kl_mean for case in alone[layer] if case.band), default=0.0), layer

    kinds = {case.label: case for own in alone.values() for case in own}
    return table(
        f"Mean KL with one layer at a time, {fmt.tokens(cases[0].seqlen)}",
        (text("layer", str), *(of_label(label, case) for label, case in kinds.items())),
        sorted(alone, key=worst),
        note="In every other layer the reference computes.  The layer with the largest divergence comes first.",
    )


def _reference(cases: Sequence[Case]) -> str:
    found = cases[0].answers
    return f"Reference: {found.reference}.{f'  {found.remark}' if found.remark else ''}" if found else ""


# --- prefills

_Row = tuple[Case, Prefill]


def prefill_sections(report: Report) -> Iterator[Section]:
    """The time of the whole model, and the share of its parts."""
    yield section("Prefill time", prefill_times(report), reading=Note(_READING.format(report.baseline)))
    yield section("Prefills not timed, and predictions", *prefill_failures(report), *_differences(report))
    yield section("Where the time of a prefill goes", *map(_parts, _lengths(report)))
    yield section("Kernels of a prefill", _kernels(report), depth="detail")
    steps = table(
        "Wall clock of each step",
        (text("step", lambda step: step.what), Column("seconds", lambda step: f"{step.seconds:.1f}")),
        report.first.steps,
        note="Compilation, and what other libraries tune themselves for, are in the first call of an operator.",
    )
    yield section("Steps of the prefill times", steps, depth="detail")


def prefill_times(report: Report) -> Table | None:
    """One row for each length, convolution and norm, and implementation."""

    def interval(row: _Row) -> str:
        found = row[0].call_us
        return f"{fmt.duration(found.low)} to {fmt.duration(found.high)}" if found else fmt.MISSING

    def share(case: Case, found: Prefill) -> float | None:
        """The share of the operators in the call, in percent, from the device time of one layer alone."""
        if found.alone_us is None or case.call_us is None:
            return None
        return 100 * found.operator_calls * found.alone_us / case.call_us.value

    columns: tuple[Column[_Row], ...] = (
        text("tokens", lambda row: _size(row[0]).removesuffix(" tokens")),
        text("convolution\nand norm", lambda row: row[1].conv_and_norm),
        text("implementation", lambda row: full_name(row[0])),
        Column("call", lambda row: fmt.duration(row[0].call_us.value) if row[0].call_us else _untimed(row[0])),
        Column("95 % interval", interval),
        Column("speedup", lambda row: fmt.speedup(report.speedup(row[0]))),
        Column("verdict", lambda row: report.faster(row[0]) or fmt.MISSING),
        Column("predicted", lambda row: fmt.ratio(report.predicted(row[0]) if report.speedup(row[0]) else None)),
        Column("operator's\nshare", lambda row: fmt.share(share(*row), 1)),
        Column("operator,\none layer", lambda row: fmt.duration(row[1].alone_us)),
        Column("peak\nmemory", lambda row: fmt.size(row[1].peak_bytes)),
        Column("logits", lambda row: fmt.small(row[1].logits_rms)),
    )
    rows = [row for own in _lengths(report) for row in own]
    return table(f"Prefill time, {_layers(rows[0][1])}" if rows else "", columns, rows, keys=3)


def _lengths(report: Report) -> list[list[_Row]]:
    found = ((case, case.prefill) for case in report.cases if case.prefill)
    return list(grouped(found, lambda row: (row[0].seqlen, row[0].batch)).values())


def _parts(rows: Sequence[_Row]) -> Table | None:
    """The time of each part of the prefill; a column adds up to its call time."""
    timed = [(case, found) for case, found in rows if found.parts and case.call_us]

    def of_case(case: Case, found: Prefill) -> Column[str]:
        whole = case.call_us.value if case.call_us else 0.0
        times = _times(case) | {"call": whole}

        def cell(part: str) -> str:
            us = times.get(part, 0.0)
            return f"{'-' * (us < 0)}{fmt.duration(abs(us))} ({100 * us / whole:.1f}%)"

        return Column(f"{full_name(case)},\n{found.conv_and_norm}", cell)

    names = [*dict.fromkeys(part.name for _, found in timed for part in found.parts), "GPU idle", "call"]
    title = f"Where the time goes at {_size(rows[0][0])}, {_layers(rows[0][1])}"
    return table(title, (text("part", str), *(of_case(*row) for row in timed)), names if timed else ())


def _kernels(report: Report) -> Table | None:
    """The kernels of each part: those with the longest times, for the baseline with each convolution and norm."""
    found = [row for own in _lengths(report)[-1:] for row in own if row[0].implementation == report.baseline]
    rows = [
        (
            prefill.conv_and_norm,
            part.name,
            fmt.cut(kernel.name, _NAME),
            fmt.duration(kernel.gpu_us),
            str(kernel.launches),
        )
        for _, prefill in found
        for part in prefill.parts
        for kernel in part.kernels
    ]
    if not rows:
        return None
    case, prefill = found[0]
    return strings(
        f"Kernels with {report.baseline} at {_size(case)}",
        ("convolution\nand norm", "part", "kernel", "GPU time", "launches"),
        rows,
        "lllrr",
        keys=2,
        wraps=2,
        note=f"The model's own convolution: {prefill.convolution}.  Its attention: {prefill.attention or 'none'}.",
    )


def prefill_failures(report: Report) -> Iterator[str]:
    """Prefills that were not timed, with the reasons."""
    for case, found in (row for own in _lengths(report) for row in own):
        if case.result != "passed" or case.reason:
            kind = f"{found.conv_and_norm} convolution and norm"
            yield f"{full_name(case)} with {kind} at {_size(case)}: {_untimed(case)}: {case.why}."
        for left in found.left_to_model:
            yield f"{full_name(case)} at {_size(case)}: the model itself computed {left}."
    for out in report.left_out:
        who = f"{fmt.words(out.implementations)} " if out.implementations else ""
        _, kind, at = out.place.split(", ", 2)
        yield f"{who}with {kind} at {at}: left out: {out.reason}."


def _differences(report: Report) -> Iterator[str]:
    """Sentences on predictions that differ from the measurement by more than 10 %, with the parts responsible."""
    for case, prefill in (row for own in _lengths(report) for row in own):
        base, found, predicted = report.rival(case), report.speedup(case), report.predicted(case)
        if base is None or found is None or predicted is None:
            continue
        if abs(predicted - found.value) > _AGREE * found.value:
            where = _where(case, base)
            yield (
                f"{full_name(case)} with {prefill.conv_and_norm} convolution and norm at {_size(case)}: "
                f"Amdahl's law predicts {fmt.ratio(predicted)}, measured is {fmt.ratio(found.value)}"
                f"{f'.  The difference: {where}' if where else ', and no profile says why'}."
            )


def _where(case: Case, base: Case) -> str:
    """The gain of each part beyond the prediction.  The gains of parts and idle GPU add up to that of the call."""
    ours, theirs = case.prefill, base.prefill
    if not (ours and theirs and ours.parts and theirs.parts) or ours.alone_us is None or theirs.alone_us is None:
        return ""
    now, before = _times(case), _times(base)
    gained = {f"the {name}": before.get(name, 0.0) - now.get(name, 0.0) for name in (before | now)}
    gained = {
        "the operator in the model": gained.pop("the operator", 0.0)
        - ours.operator_calls * (theirs.alone_us - ours.alone_us),
        **gained,
    }
    total = sum(map(abs, gained.values()))
    said = [
        f"{fmt.duration(abs(us))} {'less' if us > 0 else 'more'} in {name.replace('GPU idle', 'idle GPU')}"
        for name, us in sorted(gained.items(), key=lambda item: -abs(item[1]))
        if total and abs(us) > _WORTH * total
    ]
    return fmt.words(said) if said else ""


def _times(case: Case) -> dict[str, float]:
    """Microseconds of each part, and of the idle GPU in the call: below 0 if the profiled prefill was slower than the
    timed ones."""
    found = case.prefill
    assert found
    parts: dict[str, float] = {}
    for part in found.parts:
        parts[part.name] = parts.get(part.name, 0.0) + part.gpu_us
    return parts | {"GPU idle": case.call_us.value - found.busy_us if case.call_us and parts else 0.0}


def _size(case: Case) -> str:
    return fmt.tokens(case.seqlen, case.batch)


def _untimed(case: Case) -> str:
    return "not timed" if case.result == "passed" else case.result


def _layers(found: Prefill) -> str:
    if found.layers == found.layer_count:
        return f"all {fmt.plural(found.layers, 'layer')}"
    return f"only {found.layers} of {fmt.plural(found.layer_count, 'layer')}"
