"""The output of `ssdprof compare`: two reports of a kind, the change first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ssdprof.core import words as fmt
from ssdprof.core.base import short_precision
from ssdprof.core.case import Case
from ssdprof.core.pairs import Comparison, Pair, Side, Total, subject, unfinished
from ssdprof.report.calls import PRECISION
from ssdprof.report.facts import gpu_name
from ssdprof.report.stalls import StageChange
from ssdprof.report.table import (
    Column,
    Document,
    Section,
    Table,
    VerdictLine,
    section,
    shortened,
    strings,
    table,
)
from ssdprof.report.table import text as words

READING = (
    "Ratios are BASE's time over NEW's: above 1, NEW is faster.  Time: by device, of a prefill "
    "by call.  Speedups are "
    "over the baseline, and compare across machines; their ratio is NEW's over BASE's.  In "
    "brackets: 95 % intervals of "
    "the spread within each of the two; what differs from run to run, such as clocks and "
    "temperature, is not in them."
)
_MOST_OFFENDERS = 3  # the others are on stderr, and in the tables
_NAMES: tuple[Column[Pair], ...] = (
    words("case", lambda pair: pair.case.place),
    words("implementation", lambda pair: pair.case.implementation),
    words(PRECISION, lambda pair: short_precision(pair.case.precision)),
)
_TOTALS: tuple[Column[Total], ...] = (
    words("implementation", lambda one: one.implementation),
    words(PRECISION, lambda one: short_precision(one.precision)),
    words("where", lambda one: one.where),
    words("verdict", lambda one: one.verdict),
    Column("BASE / NEW", lambda one: fmt.speedup(one.change, by_call=one.by.startswith("call"))),
    words("by", lambda one: one.by),
    words("mean of", lambda one: fmt.plural(one.cases, one.over)),
)
_STALLS: tuple[Column[StageChange], ...] = (
    words("implementation", lambda one: one[0]),
    words("stage", lambda one: one[1]),
    Column("share,\nBASE", lambda one: fmt.share(one[2], 1)),
    Column("share,\nNEW", lambda one: fmt.share(one[3], 1)),
    Column("time,\nBASE", lambda one: fmt.duration(one[4])),
    Column("time,\nNEW", lambda one: fmt.duration(one[5])),
)


def _digest(text: str) -> str:
    """For a comparison of configurations, which are too long for a table."""
    return sha256(text.encode()).hexdigest()[:6] if text else fmt.MISSING


# title -> what the columns BASE and NEW show of a case, which must not be the same in both
_Value = tuple[str, Callable[[Any], str], Callable[[Case], Any]]
_VALUES: dict[str, tuple[_Value, ...]] = {
    "Accuracy of the output": (
        ("match @ 1e-3", fmt.percent, lambda case: case.match_pct(1e-3)),
        ("rms error", fmt.small, lambda case: case.error and case.error.rms_ratio),
        ("largest error", fmt.small, lambda case: case.error and case.error.max_abs),
    ),
    "Answers of the model": (
        ("mean KL [nats]", fmt.small, lambda case: case.band and case.band.kl_mean),
        ("same top token", fmt.percent, lambda case: case.band and case.band.top1_pct),
        ("perplexity", fmt.small, lambda case: case.band and case.band.perplexity),
    ),
    "Kernels and memory": (
        (
            "kernel",
            str,
            lambda case: " ".join(filter(None, (case.variant, case.version))) or fmt.MISSING,
        ),
        (
            "configuration",
            _digest,
            lambda case: " ".join(f"{one.kernel} {one.digest}" for one in case.launches),
        ),
        ("kernels", fmt.count, lambda case: case.kernels),
        ("extra memory", fmt.size_words, lambda case: case.workspace_bytes),
    ),
}


def compose(
    comparison: Comparison, stalls: Sequence[StageChange] = (), *, every: bool = False
) -> Document:
    """every: also cases that did not change."""
    base, new = (str(side[0]) for side in (comparison.base, comparison.new))
    short = Path(base).name, Path(new).name
    names = short if short[0] != short[1] else (base, new)
    return Document(
        title=f"ssdprof compare: BASE {names[0]}, NEW {names[1]}",
        verdict=tuple(_verdict(comparison)),
        caveats=tuple(_caveats(comparison)),
        sections=tuple(_sections(comparison, stalls, every)),
    )


def _verdict(comparison: Comparison) -> Iterator[VerdictLine]:
    for change, verdicts in comparison.verdicts.items():
        if verdicts:
            offenders = [": ".join(filter(None, (one.case, one.actual))) for one in verdicts]
            yield VerdictLine(f"FAILED: {change}: {shortened(offenders, _MOST_OFFENDERS)}.", False)
    if held := [change for change, verdicts in comparison.verdicts.items() if not verdicts]:
        yield VerdictLine(f"PASSED: no case violates {fmt.words(held, 'or')}.", True)
    counts = Counter(pair.verdict for pair in comparison.pairs)
    said = {
        "no difference": (
            f"no difference within {fmt.share(100 * comparison.smallest_difference, 1)}"
        )
    }
    found = ", ".join(
        f"{number} {said.get(verdict, verdict)}" for verdict, number in counts.most_common()
    )
    if why := comparison.nothing_compared:
        yield VerdictLine(
            f"FAILED: nothing was compared: {why}{f' ({found})' if found else ''}.", False
        )
    else:
        yield VerdictLine(f"Compared {fmt.plural(len(comparison.pairs), 'case')}: {found}.", True)


def _caveats(comparison: Comparison) -> Iterator[str]:
    reasons = dict.fromkeys(comparison.machine)
    reasons |= dict.fromkeys(
        why for pair in comparison.pairs if pair.over_baseline for why in pair.incomparable
    )
    if reasons:
        speedups = "Speedups over the baseline, each measured under the same conditions, are."
        yield (
            f"The conditions differ ({'; '.join(reasons)}), so absolute times are not "
            f"compared.  {speedups}"
        )
    for name, (_, report) in (("BASE", comparison.base), ("NEW", comparison.new)):
        if why := unfinished(report):
            yield f"{name} is not complete: {why}."
    for reason in dict.fromkeys(
        pair.other_inputs for pair in comparison.pairs if pair.other_inputs
    ):
        yield f"Errors cannot be compared: {reason}."


def _sections(
    comparison: Comparison, stalls: Sequence[StageChange], every: bool
) -> Iterator[Section]:
    both = [pair for pair in comparison.pairs if pair.base and pair.new]

    def speedup(side: Side, case: Case | None) -> str:
        found = side[1].speedup(case) if case else None
        return fmt.ratio(found and found.value)

    columns: tuple[Column[Pair], ...] = (
        *_NAMES,
        words("verdict", lambda pair: pair.verdict),
        Column(
            "time,\nBASE / NEW",
            lambda pair: fmt.speedup(pair.time, by_call=pair.case.clock == "call"),
        ),
        Column("call time,\nBASE / NEW", lambda pair: fmt.speedup(pair.call, by_call=True)),
        Column(
            "speedup,\nNEW / BASE",
            lambda pair: fmt.speedup(pair.over_baseline, by_call=pair.case.clock == "call"),
        ),
        *_of_both("time", fmt.duration, lambda case: case.time_us and case.time_us.value),
        Column("speedup,\nBASE", lambda pair: speedup(comparison.base, pair.base)),
        Column("speedup,\nNEW", lambda pair: speedup(comparison.new, pair.new)),
    )
    changed = [
        pair for pair in both if pair.verdict in ("faster", "slower", *(["no difference"] * every))
    ]
    totals = table("Change of all cases together", _TOTALS, comparison.totals, keys=3)
    yield section(
        "Speed",
        totals,
        table("Speed of NEW against BASE", columns, changed, keys=3),
        reading=READING,
    )
    for title, values in _VALUES.items():
        yield section(title, _side_by_side(title, both, values, every))
    note = "Times under ncu cannot be compared with those of a run."
    shares = table("Busy warp samples of each stage, by ncu", _STALLS, stalls, keys=2, note=note)
    yield section("Stalls by stage", shares)
    yield section("Not compared", _unpaired(comparison.pairs))
    yield section("What ran", _facts(comparison))


def _of_both(
    header: str, show: Callable[[Any], str], of: Callable[[Case], Any]
) -> tuple[Column[Pair], Column[Pair]]:
    def cell(case: Case | None) -> str:
        return show(of(case)) if case else fmt.MISSING

    base: Column[Pair] = Column(f"{header},\nBASE", lambda pair: cell(pair.base))
    return base, Column(f"{header},\nNEW", lambda pair: cell(pair.new))


def _side_by_side(
    title: str, pairs: Sequence[Pair], values: Sequence[_Value], every: bool
) -> Table | None:
    """The cells of BASE and NEW; without `every` only cases with another cell, and columns that
    differ.
    """
    columns = [_of_both(*one) for one in values]

    def differs(pair: Pair, base: Column[Pair], new: Column[Pair]) -> bool:
        return base.of(pair) != new.of(pair)

    def is_shown(pair: Pair) -> bool:
        return any(
            differs(pair, *both) or (every and both[0].of(pair) not in ("", fmt.MISSING))
            for both in columns
        )

    rows = [*filter(is_shown, pairs)]
    shown = (
        one
        for both in columns
        if every or any(differs(pair, *both) for pair in rows)
        for one in both
    )
    note = "" if every else "Only cases that changed; all of them with --format markdown."
    return table(f"{title}, side by side", (*_NAMES, *shown), rows, keys=3, note=note)


def _unpaired(pairs: Sequence[Pair]) -> Table | None:
    """Cases without a verdict, except those that passed in both and were timed in neither."""

    def results(pair: Pair) -> str:
        found = {
            name: case.result for name, case in (("BASE", pair.base), ("NEW", pair.new)) if case
        }
        return ", ".join(f"{name} {result}" for name, result in found.items())

    said = ("not timed", "BASE passed, NEW passed")
    unjudged = [pair for pair in pairs if pair.verdict.startswith(("only", "not"))]
    left = [pair for pair in unjudged if (pair.verdict, results(pair)) != said]
    why: Column[Pair] = words("why", lambda pair: pair.verdict)
    more: Column[Pair] = words("more", lambda pair: "; ".join(pair.incomparable) or results(pair))
    return table("Cases without a verdict on speed", (*_NAMES, why, more), left, keys=3)


def _facts(comparison: Comparison) -> Table | None:
    reports = [report for _, report in (comparison.base, comparison.new)]
    environments = [report.environment for report in reports]
    rows = {
        "what": [f"{report.kind}: {subject(report)}" for report in reports],
        "started": [report.created for report in reports],
        "commit": [report.commit or fmt.MISSING for report in reports],
        "GPU": [gpu_name(one) for one in environments],
        "driver": [one.gpu.driver if one.gpu else fmt.MISSING for one in environments],
        "ssdprof": [report.ssdprof_version for report in reports],
    }
    for name in ("triton", "torch", "transformers"):
        rows[name] = [one.packages.get(name, fmt.MISSING) for one in environments]
    headers = ("", f"BASE: {comparison.base[0]}", f"NEW: {comparison.new[0]}")
    return strings("What ran", headers, ((name, *values) for name, values in rows.items()), "lll")
