"""The output of `ssdprof compare`: two runs, benches or prefill results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ssdprof.core import words as fmt
from ssdprof.report.document import Document, Section
from ssdprof.report.statements import Statement
from ssdprof.report.tables import Note, Table
from ssdprof.report.tables import comparison as tables
from ssdprof.schema.comparison import Comparison, Condition, Total, TotalBy

GOOD = ("PASSED", "Compared")  # prefixes of lines without a failure
_MOST_OFFENDERS = 20
_BY: dict[TotalBy, str] = {
    "device time": "by device time",
    "call time": "by call time",
    "speedup": "by the speedup over the baseline",
}


def compose(comparison: Comparison) -> Document:
    base, new = comparison.base, comparison.new
    return Document(
        title=f"ssdprof compare: BASE {base.name}, NEW {new.name}",
        verdict=tuple(_verdict(comparison)),
        failed=not comparison.passed,
        summary=tuple(_statement(total) for total in comparison.totals),
        caveats=tuple(_caveats(comparison)),
        sections=tuple(section for section in _sections(comparison) if section.blocks),
        run_id=new.name,
    )


def _verdict(comparison: Comparison) -> Iterator[str]:
    for condition in comparison.conditions:
        if condition.offenders:
            yield f"FAILED: {_offences(condition)}."
    if held := [condition.text for condition in comparison.conditions if not condition.offenders]:
        yield f"PASSED: no case violates {fmt.words(held, 'or')}."
    counts = Counter(pair.verdict for pair in comparison.pairs)
    words = {"no difference": f"no difference within {fmt.share(100 * comparison.smallest_difference, 1)}"}
    found = ", ".join(f"{number} {words.get(verdict, verdict)}" for verdict, number in counts.most_common())
    if why := comparison.nothing_compared:
        yield f"FAILED: nothing was compared: {why}{f' ({found})' if found else ''}."
    else:
        yield f"Compared {fmt.plural(len(comparison.pairs), 'case')}: {found}."


def _offences(condition: Condition) -> str:
    """ "slower:3%: ROW: 1.05 times BASE's time; ROW: ..." """
    lines = [": ".join(part for part in (one.row, one.found) if part) for one in condition.offenders]
    more = len(lines) - _MOST_OFFENDERS
    rest = f"; and {fmt.plural(more, 'case')} more" if more > 0 else ""
    return f"{condition.text}: {'; '.join(lines[:_MOST_OFFENDERS])}{rest}"


def _statement(total: Total) -> Statement:
    of = f"geometric mean of {fmt.plural(total.cases, total.over)}" if total.cases > 1 else f"one {total.over}"
    return Statement(
        f"{total.implementation}, {total.precision}, {total.where}:",
        f"{total.change.verdict}, {tables.ratio(total.change)} {_BY[total.by]}, {of}.",
    )


def _caveats(comparison: Comparison) -> Iterator[str]:
    if comparison.machine:
        differences = "; ".join(map(str, comparison.machine))
        yield (
            f"The machines differ ({differences}), so absolute times are not compared.  Speedups over the baseline, "
            "each measured on one machine, are."
        )
    if reasons := _of_prefills(comparison):
        yield (
            f"The conditions of the prefills differ ({'; '.join(reasons)}), so their absolute times are not compared.  "
            "Their speedups over the baseline are."
        )
    for name, side in (("BASE", comparison.base), ("NEW", comparison.new)):
        if side.unfinished:
            yield f"{name} is not complete: {side.unfinished}."
    for reason in dict.fromkeys(pair.other_inputs for pair in comparison.pairs if pair.other_inputs):
        yield f"Errors cannot be compared: {reason}."


def _of_prefills(comparison: Comparison) -> list[str]:
    """Reasons other than the machine why absolute times of prefills cannot be compared, although speedups can."""
    machine = set(map(str, comparison.machine))
    compared = (pair for pair in comparison.pairs if pair.row.prefill and pair.over_baseline)
    return [why for why in dict.fromkeys(why for pair in compared for why in pair.incomparable) if why not in machine]


def _sections(comparison: Comparison) -> Iterator[Section]:
    pairs = [pair for pair in comparison.pairs if pair.base and pair.new]
    speed, prefills = tables.speed(pairs), tables.prefills(pairs)
    yield _section("Speed", speed, tables.READING if speed else None)
    yield _section("Prefill time of the model", prefills, tables.READING_PREFILLS if prefills else None)
    yield _section("Accuracy", tables.accuracy(pairs))
    yield _section("Answers of the model", tables.answers(pairs))
    yield _section("Launches and memory", tables.resources(pairs))
    yield _section("Stalls by stage", tables.stalls(comparison))
    yield _section("Not compared", tables.unpaired(comparison.pairs))
    yield _section("What ran", tables.facts(comparison))


def _section(title: str, *blocks: Table | Note | None) -> Section:
    return Section(title=title, depth="main", blocks=tuple(block for block in blocks if block))
