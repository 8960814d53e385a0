"""Tables of the whole model: changes of its answers, and its prefill times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ssdprof.core import words as fmt
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

_Band = tuple[Case, AnswerBand | None]
_ANSWERING: tuple[Column[_Band], ...] = (
    text(
        "implementation",
        lambda row: (
            f"noise: {row[0].implementation}, {change}"
            if (change := _answers(row[0]).change)
            else row[0].implementation
        ),
    ),
    text(PRECISION, lambda row: row[0].precision.short),
)


def _band(row: _Band) -> AnswerBand | None:
    return row[1]


_BANDS: tuple[Column[_Band], ...] = (
    Column("KL\nmean", lambda row: fmt.small(row[1].kl_mean) if row[1] else row[0].result),
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


def answers(cases: Sequence[Case]) -> Table | None:
    """Every case of a prompt over all positions; None if there is none."""
    found = [case for case in cases if _answers(case).alone is None]
    generated = max((one.tokens for case in found if (one := _answers(case).generated)), default=0)
    first: Column[_Band] = Column(f"first of {generated}\nthat differs", lambda row: _first_difference(row[0]))
    return table(
        f"Answers at {_at(cases)}",
        (*_ANSWERING, *_BANDS, *((first,) if generated else ())),
        [(case, _answers(case).bands[0] if _answers(case).bands else None) for case in found],
        note=f"{_reference(cases)}{_weights(cases)}",
        keys=2,
    )


def answers_by_position(cases: Sequence[Case]) -> Table | None:
    """Every case in bands of positions; None for a prompt with a single band."""
    together = [case for case in cases if _answers(case).alone is None]
    positions: Column[_Band] = text(
        "positions", lambda row: f"{row[1].start:,} to {row[1].stop - 1:,}" if row[1] else ""
    )
    rows: list[_Band] = [(case, band) for case in together for band in _answers(case).bands[1:]]
    return table(
        f"Answers by position at {_at(cases)}", (*_ANSWERING, positions, *_BANDS), rows, note=_reference(cases), keys=3
    )


def answers_by_layer(cases: Sequence[Case]) -> Table | None:
    """The mean divergence with one layer at a time, the largest first; None without --per-layer."""
    alone: dict[int, list[Case]] = {}
    for case in cases:
        if (layer := _answers(case).alone) is not None:
            alone.setdefault(layer, []).append(case)

    def kl(layer: int, label: str) -> str:
        case = next((case for case in alone[layer] if case.label == label), None)
        if case is None:
            return fmt.MISSING
        return fmt.small(_answers(case).bands[0].kl_mean) if _answers(case).bands else case.result

    def worst(layer: int) -> tuple[float, int]:
        found = (_answers(case).bands[0].kl_mean for case in alone[layer] if _answers(case).bands)
        return -max(found, default=0.0), layer

    kinds = {case.label: case for own in alone.values() for case in own}
    columns: list[Column[int]] = [text("layer", str)]
    for label, case in kinds.items():
        header = f"{case.implementation}\n{case.precision.short}"
        columns.append(Column(header, lambda layer, label=label: kl(layer, label)))  # type: ignore[misc]
    return table(
        f"Mean KL with one layer at a time, {_at(cases)}",
        columns,
        sorted(alone, key=worst),
        note="In every other layer the reference computes.  The layer with the largest divergence comes first.",
    )


def prompts(report: Report) -> list[list[Case]]:
    """The cases of answers of each prompt."""
    found: dict[tuple[int, str], list[Case]] = {}
    for case in report.of_answers:
        found.setdefault((case.seqlen, case.inputs), []).append(case)
    return list(found.values())


def _answers(case: Case) -> Answers:
    assert case.answers
    return case.answers


def _at(cases: Sequence[Case]) -> str:
    return fmt.tokens(cases[0].seqlen)


def _change(band: AnswerBand) -> str:
    """ "+0.0123% [-0.001%, +0.024%]"."""
    if band.perplexity_increase_pct is None or band.perplexity_interval_pct is None:
        return fmt.MISSING
    interval = band.perplexity_interval_pct
    low, high = _signed(interval.low), _signed(interval.high)
    return f"{_signed(band.perplexity_increase_pct)} [{low}, {high}]"


def _signed(percent: float) -> str:
    return f"{'+' if percent > 0 else ''}{fmt.small(percent)}%"


def _first_difference(case: Case) -> str:
    generated = _answers(case).generated
    if generated is None:
        return fmt.MISSING
    return "none" if generated.first_difference is None else fmt.count(generated.first_difference + 1)


def _reference(cases: Sequence[Case]) -> str:
    found = _answers(cases[0])
    return f"Reference: {found.reference}." + (f"  {found.remark}" if found.remark else "")


def _weights(cases: Sequence[Case]) -> str:
    found = _answers(cases[0])
    if found.own_weights:
        return f"  The model ran in {found.weights}, its own dtype."
    return f"  The model ran in {found.weights}, not in its own dtype: the differences are the operators' own errors."


# --- prefills


def prefill_sections(report: Report) -> Iterator[Section]:
    """The time of the whole model, and the share of its parts."""
    times = prefill_times(report)
    yield section("Prefill time", times, Note(_READING.format(report.baseline)) if times else None)
    yield section("Prefills not timed, and predictions", *prefill_failures(report), *_differences(report))
    yield section("Where the time of a prefill goes", *(_parts(cases) for cases in _lengths(report)))
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

    def call(case: Case) -> str:
        return fmt.duration(case.call_us.value) if case.call_us else _untimed(case)

    def interval(case: Case) -> str:
        found = case.call_us
        return f"{fmt.duration(found.low)} to {fmt.duration(found.high)}" if found else fmt.MISSING

    def predicted(case: Case) -> float | None:
        return report.predicted(case) if report.speedup(case) else None

    def share(case: Case) -> float | None:
        """The share of the operators in the call, in percent, from the device time of one layer alone."""
        found = _prefill(case)
        if found.alone_us is None or case.call_us is None:
            return None
        return 100 * found.operator_calls * found.alone_us / case.call_us.value

    columns: tuple[Column[Case], ...] = (
        text("tokens", lambda case: fmt.tokens(case.seqlen, case.batch).removesuffix(" tokens")),
        text("convolution\nand norm", lambda case: _prefill(case).conv_and_norm),
        text("implementation", full_name),
        Column("call", call),
        Column("95 % interval", interval),
        Column("speedup", lambda case: fmt.speedup(report.speedup(case))),
        Column("verdict", lambda case: report.faster(case) or fmt.MISSING),
        Column("predicted", lambda case: fmt.ratio(predicted(case))),
        Column("operator's\nshare", lambda case: fmt.share(share(case), 1)),
        Column("operator,\none layer", lambda case: fmt.duration(_prefill(case).alone_us)),
        Column("peak\nmemory", lambda case: fmt.size(_prefill(case).peak_bytes)),
        Column("logits", lambda case: fmt.small(_prefill(case).logits_rms)),
    )
    cases = [case for own in _lengths(report) for case in own]
    return table(f"Prefill time, {_layers(cases)}" if cases else "", columns, cases, keys=3)


def _lengths(report: Report) -> list[list[Case]]:
    found: dict[tuple[int, int], list[Case]] = {}
    for case in report.of_prefill:
        found.setdefault((case.seqlen, case.batch), []).append(case)
    return list(found.values())


def _parts(cases: Sequence[Case]) -> Table | None:
    """The time of each part of the prefill; a column adds up to its call time."""
    timed = [case for case in cases if _prefill(case).parts and case.call_us]
    names = list(dict.fromkeys(part.name for case in timed for part in _prefill(case).parts))

    def cell(case: Case, part: str) -> str:
        whole = case.call_us.value if case.call_us else 0.0
        us = whole if part == "call" else _idle_us(case) if part == "GPU idle" else _part_us(case, part)
        return f"{fmt.duration(us) if us >= 0 else f'-{fmt.duration(-us)}'} ({100 * us / whole:.1f}%)"

    columns: list[Column[str]] = [text("part", str)]
    for case in timed:
        header = f"{full_name(case)},\n{_prefill(case).conv_and_norm}"
        columns.append(Column(header, lambda part, case=case: cell(case, part)))  # type: ignore[misc]
    at = fmt.tokens(cases[0].seqlen, cases[0].batch)
    return table(
        f"Where the time goes at {at}, {_layers(cases)}", columns, [*names, "GPU idle", "call"] if timed else ()
    )


def _kernels(report: Report) -> Table | None:
    """The kernels of each part: those with the longest times, for the baseline with each convolution and norm."""
    cases = [case for own in _lengths(report)[-1:] for case in own if case.implementation == report.baseline]
    rows = [
        (
            _prefill(case).conv_and_norm,
            part.name,
            kernel.name if len(kernel.name) <= _NAME else f"{kernel.name[: _NAME - 3]}...",
            fmt.duration(kernel.gpu_us),
            str(kernel.launches),
        )
        for case in cases
        for part in _prefill(case).parts
        for kernel in part.kernels
    ]
    if not rows:
        return None
    found = _prefill(cases[0])
    return strings(
        f"Kernels with {report.baseline} at {fmt.tokens(cases[0].seqlen, cases[0].batch)}",
        ("convolution\nand norm", "part", "kernel", "GPU time", "launches"),
        rows,
        "lllrr",
        keys=2,
        wraps=2,
        note=f"The model's own convolution: {found.convolution}.  Its attention: {found.attention or 'none'}.",
    )


def prefill_failures(report: Report) -> Iterator[str]:
    """Prefills that were not timed, with the reasons."""
    for cases in _lengths(report):
        for case in cases:
            found, at = _prefill(case), fmt.tokens(case.seqlen, case.batch)
            if case.result != "passed" or case.reason:
                kind = f"{found.conv_and_norm} convolution and norm"
                yield f"{full_name(case)} with {kind} at {at}: {_untimed(case)}: {case.why}."
            for left in found.left_to_model:
                yield f"{full_name(case)} at {at}: the model itself computed {left}."
    for out in report.left_out:
        who = f"{fmt.words(out.implementations)} " if out.implementations else ""
        _, kind, at = out.place.split(", ", 2)
        yield f"{who}with {kind} at {at}: left out: {out.reason}."


def _differences(report: Report) -> Iterator[str]:
    """Sentences on predictions that differ from the measurement by more than 10 %, with the parts responsible."""
    for cases in _lengths(report):
        for case in cases:
            base, found, predicted = report.rival(case), report.speedup(case), report.predicted(case)
            if base is None or found is None or predicted is None:
                continue
            if abs(predicted - found.value) > _AGREE * found.value:
                where = _where(case, base)
                yield (
                    f"{full_name(case)} with {_prefill(case).conv_and_norm} convolution and norm at "
                    f"{fmt.tokens(case.seqlen, case.batch)}: "
                    f"Amdahl's law predicts {fmt.ratio(predicted)}, measured is {fmt.ratio(found.value)}"
                    f"{f'.  The difference: {where}' if where else ', and no profile says why'}."
                )


def _where(case: Case, base: Case) -> str:
    """The gain of each part beyond the prediction.  The gains of parts and idle GPU add up to that of the call."""
    ours, theirs = _prefill(case), _prefill(base)
    if not ours.parts or not theirs.parts or ours.alone_us is None or theirs.alone_us is None:
        return ""
    expected = ours.operator_calls * (theirs.alone_us - ours.alone_us)
    gained = _part_us(base, "operator") - _part_us(case, "operator") - expected
    found = {"the operator in the model": gained}
    for name in dict.fromkeys(part.name for part in (*theirs.parts, *ours.parts) if part.name != "operator"):
        found[f"the {name}"] = _part_us(base, name) - _part_us(case, name)
    found["the idle GPU"] = _idle_us(base) - _idle_us(case)
    total = sum(map(abs, found.values()))
    said = [
        f"{fmt.duration(abs(us))} {'less' if us > 0 else 'more'} in {one}"
        for one, us in sorted(found.items(), key=lambda item: -abs(item[1]))
        if total and abs(us) > _WORTH * total
    ]
    return fmt.words(said) if said else ""


def _prefill(case: Case) -> Prefill:
    assert case.prefill
    return case.prefill


def _part_us(case: Case, name: str) -> float:
    return sum(part.gpu_us for part in _prefill(case).parts if part.name == name)


def _idle_us(case: Case) -> float:
    """The GPU's idle time in the call; below 0 if the profiled prefill was slower than the timed ones."""
    return case.call_us.value - _prefill(case).busy_us if case.call_us and _prefill(case).parts else 0.0


def _untimed(case: Case) -> str:
    return "not timed" if case.result == "passed" else case.result


def _layers(cases: Sequence[Case]) -> str:
    found = _prefill(cases[0])
    if found.layers == found.layer_count:
        return f"all {fmt.plural(found.layers, 'layer')}"
    return f"only {found.layers} of {fmt.plural(found.layer_count, 'layer')}"
