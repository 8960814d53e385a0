"""Compares published claims and numbers with measured values: inside, outside, other GPU, or not measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reproducing.published import COMPARISON, Claim, Numbers, Published, is_number, names_in

HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}
INSIDE, OUTSIDE, OTHER_GPU, NOT_MEASURED = "inside", "outside", "other GPU", "not measured"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim or number, in words.  reason: why it does not hold."""

    claim: str
    quoted: str
    measured: str
    verdict: str
    note: str = ""
    reason: str = ""


def number(value: float) -> str:
    """Four significant digits; percents of matches need five."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}" if abs(value) >= 10 else f"{value:.4g}"


def claims(document: Published, values: Mapping[str, float], gpu: str) -> list[Verdict]:
    """gpu: torch's name of the GPU of the measurement."""
    units = {one.name: one.unit for one in document.value}
    return [_claim(one, values, units, is_other(one.gpu or document.gpu, gpu)) for one in document.claim]


def numbers(document: Published, values: Mapping[str, float], gpu: str) -> list[tuple[Numbers, list[Verdict]]]:
    """The quoted numbers group by group."""
    other = is_other(document.gpu, gpu)
    return [
        (group, [_number(group, key, quoted, values, other) for key, quoted in group.quoted.items()])
        for group in document.numbers
    ]


def is_other(quoted_gpus: str, gpu: str) -> bool:
    """Whether a GPU differs from those of the source, such as "A100, H100"."""
    return not any(name.strip() in gpu for name in quoted_gpus.split(","))


def _claim(claim: Claim, values: Mapping[str, float], units: Mapping[str, str], other: bool) -> Verdict:
    names = names_in(claim)
    absent = [name for name in names if name not in values]
    if claim.why or absent:
        measured, verdict = claim.why or f"missing: {'; '.join(map(_words, absent))}", NOT_MEASURED
    else:
        held = all(
            HOLDS[sign](values[left], float(right) if is_number(right) else values[right])
            for left, sign, right in COMPARISON.findall(claim.holds)
        )
        shown = {name: (number(values[name]), units.get(name.partition("[")[0], "")) for name in names}
        alone = len(shown) == 1 and all(unit for _, unit in shown.values())  # a runner's names contain their units
        measured = "; ".join(
            f"{'' if alone else f'{_words(name)}:'} {one} {unit}".strip() for name, (one, unit) in shown.items()
        )
        verdict = _worded(held, other, claim.absolute)
    reason = claim.reason if verdict.startswith(OUTSIDE) else ""
    return Verdict(
        claim=claim.words, quoted=claim.quoted, measured=measured, verdict=verdict, note=claim.note, reason=reason
    )


def _words(name: str) -> str:
    """ "published_call, 1 x 1,024" of a value's name."""
    return name.replace("[", ", ").rstrip("]")


def _number(group: Numbers, key: str, quoted: float, values: Mapping[str, float], other: bool) -> Verdict:
    measured = values.get(f"{group.value}[{key}]")
    if measured is None:
        return Verdict(claim=key, quoted=number(quoted), measured="", verdict=NOT_MEASURED)
    inside = abs(measured - quoted) <= abs(quoted) * group.within_pct / 100
    verdict = _worded(inside, other, group.absolute)
    return Verdict(claim=key, quoted=number(quoted), measured=number(measured), verdict=verdict)


def _worded(inside: bool, other: bool, absolute: bool) -> str:
    """Ratios can be compared between GPUs, and are inside or outside.  Times cannot."""
    if other and absolute:
        return OTHER_GPU
    return f"{INSIDE if inside else OUTSIDE}{f' ({OTHER_GPU})' if other else ''}"
