"""Tables of prefill times: of the whole model and of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from ssdprof.core import words as fmt
from ssdprof.report.tables.table import Note, Table, columns
from ssdprof.schema.base import kernel_name
from ssdprof.schema.prefill import Prefill, PrefillCase, PrefillLength

READING = Note(
    "Call: from an idle GPU to the first token, through Python.  Speedup: over {baseline} with the same surroundings.  "
    "Predicted: by Amdahl's law, from the operator's device time in one layer alone.  Surroundings: the convolution "
    "and the gated norm around the operator, the model's own or the bundled kernels.  Logits: rms of the difference of "
    "the first token's logits to {baseline}'s, over rms of those.  GPU idle: the rest of the call, in which the GPU "
    "waited for the host; negative where the profiled prefill took longer than the timed ones."
)
_IDLE = "GPU idle"
_AGREE = 0.1  # relative difference of prediction and measurement above which the report explains it
_WORTH = 0.02  # share of the difference from which a part is named
_NAME = 60  # characters of a kernel's name


def reading(prefill: Prefill) -> Note:
    return Note(READING.text.format(baseline=prefill.baseline))


def times(prefill: Prefill) -> Table | None:
    """One row for each length, surroundings and implementation."""
    rows = []
    for length in prefill.lengths:
        for case in length.cases:
            speedup = case.speedup
            rows.append(
                (
                    fmt.tokens(length.seqlen, length.batch).removesuffix(" tokens"),
                    case.surroundings,
                    name(case),
                    fmt.duration(case.call.median_us) if case.call else _untimed(case),
                    _interval(case),
                    fmt.speedup(speedup.ratio, speedup.interval) if speedup else fmt.MISSING,
                    speedup.verdict if speedup else fmt.MISSING,
                    fmt.ratio(speedup.predicted) if speedup else fmt.MISSING,
                    fmt.share(operator_share(length, case), 1),
                    fmt.duration(case.alone_us),
                    fmt.size(case.peak_bytes),
                    fmt.small(case.logits_rms),
                )
            )
    if not rows:
        return None
    return Table(
        title=f"Prefill time, {_layers(prefill)}",
        headers=(
            "tokens",
            "surroundings",
            "implementation",
            "call",
            "95 % interval",
            "speedup",
            "verdict",
            "predicted",
            "operator's\nshare",
            "operator,\none layer",
            "peak\nmemory",
            "logits",
        ),
        rows=tuple(rows),
        align=columns(3, 9),
        keys=3,
    )


def parts(prefill: Prefill, length: PrefillLength) -> Table | None:
    """The time of each part of the prefill; a column adds up to its call time."""
    cases = [case for case in length.cases if case.parts and case.call]
    if not cases:
        return None
    names = dict.fromkeys(part.name for case in cases for part in case.parts)
    rows = [(one, *(_cell(case, case.part_us(one)) for case in cases)) for one in names]
    rows.append((_IDLE, *(_cell(case, case.idle_us or 0.0) for case in cases)))
    rows.append(("call", *(_cell(case, case.call.median_us if case.call else 0.0) for case in cases)))
    return Table(
        title=f"Where the time goes at {fmt.tokens(length.seqlen, length.batch)}, {_layers(prefill)}",
        headers=("part", *(f"{name(case)},\n{case.surroundings}" for case in cases)),
        rows=tuple(rows),
        align=columns(1, len(cases)),
    )


def ran(prefill: Prefill) -> Table | None:
    """The kernels of each part: those with the longest times, for each surroundings of the baseline."""
    rows = []
    for length in prefill.lengths[-1:]:
        for case in length.cases:
            if case.implementation == prefill.baseline:
                for part in case.parts:
                    rows += [
                        (
                            case.surroundings,
                            part.name,
                            _short(kernel.name),
                            fmt.duration(kernel.gpu_us),
                            str(kernel.launches),
                        )
                        for kernel in part.kernels
                    ]
    if not rows:
        return None
    return Table(
        title=f"Kernels with {prefill.baseline} at {fmt.tokens(length.seqlen, length.batch)}",
        headers=("surroundings", "part", "kernel", "GPU time", "launches"),
        rows=tuple(rows),
        align=columns(3, 2),
        keys=2,
        wraps=2,
        note=f"The model's own convolution: {prefill.convolution}.  Its attention: {prefill.attention or 'none'}.",
    )


def failures(prefill: Prefill) -> Iterator[str]:
    """Prefills that were not timed, with the reasons."""
    for length in prefill.lengths:
        for case in length.cases:
            at = fmt.tokens(length.seqlen, length.batch)
            if case.status != "passed" or case.reason:
                yield f"{name(case)} with {case.surroundings} surroundings at {at}: {_untimed(case)}: {case.reason}."
            for left in case.left_to_model:
                yield f"{name(case)} at {at}: the model itself computed {left}."
    for left_out in prefill.left_out:
        who = f"{fmt.words(left_out.implementations)} " if left_out.implementations else ""
        surroundings = f"with {left_out.surroundings} surroundings " if left_out.surroundings else ""
        at = f"{who}{surroundings}at " if who or surroundings else ""
        yield f"{at}{fmt.tokens(left_out.seqlen)}: left out: {left_out.reason}."


def steps(prefill: Prefill) -> Table | None:
    """The time of each step of the command."""
    if not prefill.steps:
        return None
    return Table(
        title="Wall clock of each step",
        headers=("step", "seconds"),
        rows=tuple((step.what, f"{step.seconds:.1f}") for step in prefill.steps),
        align=columns(1, 1),
        note="Compilation, and what other libraries tune themselves for, are in the first call of an operator.",
    )


def differences(prefill: Prefill) -> Iterator[str]:
    """Sentences on predictions that differ from the measurement by more than 10 %, with the parts responsible."""
    for length in prefill.lengths:
        for case in length.cases:
            base = length.baseline_of(case, prefill.baseline)
            if case.speedup is None or case.speedup.predicted is None or base is None or not case.call or not base.call:
                continue
            predicted, measured = case.speedup.predicted, case.speedup.ratio
            if abs(predicted - measured) <= _AGREE * measured:
                continue
            where = _where(length, case, base)
            yield (
                f"{name(case)} with {case.surroundings} surroundings at {fmt.tokens(length.seqlen, length.batch)}: "
                f"Amdahl's law predicts {fmt.ratio(predicted)}, measured is {fmt.ratio(measured)}"
                f"{f'.  The difference: {where}' if where else ', and no profile says why'}."
            )


def _where(length: PrefillLength, case: PrefillCase, base: PrefillCase) -> str:
    """The gain of each part beyond the prediction.  The gains of parts and idle GPU add up to that of the call."""
    if not case.parts or not base.parts or case.alone_us is None or base.alone_us is None:
        return ""
    expected = length.operator_calls * (base.alone_us - case.alone_us)
    found = {"the operator in the model": base.part_us("operator") - case.part_us("operator") - expected}
    for one in dict.fromkeys(part.name for part in (*base.parts, *case.parts) if part.name != "operator"):
        found[f"the {one}"] = base.part_us(one) - case.part_us(one)
    found["the idle GPU"] = (base.idle_us or 0.0) - (case.idle_us or 0.0)
    total = sum(abs(us) for us in found.values())
    said = [
        f"{fmt.duration(abs(us))} {'less' if us > 0 else 'more'} in {one}"
        for one, us in sorted(found.items(), key=lambda item: -abs(item[1]))
        if total and abs(us) > _WORTH * total
    ]
    return fmt.words(said) if said else ""


def operator_share(length: PrefillLength, case: PrefillCase) -> float | None:
    """Share of the operators in the call, in percent, from the device time of one layer alone."""
    if case.alone_us is None or case.call is None:
        return None
    return 100 * length.operator_calls * case.alone_us / case.call.median_us


def name(case: PrefillCase) -> str:
    """ "fused hopper", "mamba_ssm 2.3"."""
    return f"{case.implementation} {case.version}" if case.version else kernel_name(case.implementation, case.variant)


def _cell(case: PrefillCase, us: float) -> str:
    assert case.call is not None
    shown = fmt.duration(us) if us >= 0 else f"-{fmt.duration(-us)}"
    return f"{shown} ({100 * us / case.call.median_us:.1f}%)"


def _untimed(case: PrefillCase) -> str:
    return "not timed" if case.status == "passed" else case.status


def _interval(case: PrefillCase) -> str:
    if case.call is None:
        return fmt.MISSING
    return f"{fmt.duration(case.call.interval_us.low)} to {fmt.duration(case.call.interval_us.high)}"


def _layers(prefill: Prefill) -> str:
    if prefill.layers == prefill.layer_count:
        return f"all {fmt.plural(prefill.layers, 'layer')}"
    return f"only {prefill.layers} of {fmt.plural(prefill.layer_count, 'layer')}"


def _short(kernel: str) -> str:
    return kernel if len(kernel) <= _NAME else f"{kernel[: _NAME - 3]}..."
