"""The output of `ssdprof compare`: two reports of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ssdprof.core import words as fmt
from ssdprof.core.accuracy import Deviation
from ssdprof.core.case import AnswerBand, Case
from ssdprof.core.pairs import Comparison, Pair, Total, TotalBy
from ssdprof.core.statistics import Estimate
from ssdprof.report.calls import PRECISION
from ssdprof.report.facts import gpu_name
from ssdprof.report.stalls import StageChange
from ssdprof.report.table import (
    Column,
    Document,
    Note,
    Section,
    Statement,
    Table,
    VerdictLine,
    section,
    shortened,
    table,
    text,
)

READING = Note(
    "Ratios are BASE's time over NEW's: above 1, NEW is faster.  In brackets: 95 % intervals of the spread within each "
    "of the two; what differs from run to run, such as clocks and temperature, is not in them."
)
READING_PREFILLS = Note(
    "Call: from an idle GPU to the first token; the ratio is BASE's time over NEW's.  It exists only if GPU, driver, "
    "versions and model are the same.  Speedups are over the baseline with the same convolution and norm; their ratio, "
    "NEW's over BASE's, compares across machines.  In brackets: 95 % intervals of the spread within each of the two."
)
_MOST_OFFENDERS = 20
_BY: dict[TotalBy, str] = {
    "device time": "by device time",
    "call time": "by call time",
    "speedup": "by the speedup over the baseline",
}
_NAMES: tuple[Column[Pair], ...] = (
    text("case", lambda pair: pair.case.place),
    text("implementation", lambda pair: pair.case.implementation),
    text(PRECISION, lambda pair: pair.case.precision.short),
)


def compose(comparison: Comparison, stalls: Sequence[StageChange] = ()) -> Document:
    base, new = comparison.base, comparison.new
    return Document(
        title=f"ssdprof compare: BASE {base.name}, NEW {new.name}",
        name=new.name,
        verdict=tuple(_verdict(comparison)),
        summary=tuple(_statement(total) for total in comparison.totals),
        caveats=tuple(_caveats(comparison)),
        sections=tuple(one for one in _sections(comparison, stalls) if one.blocks),
    )


def _verdict(comparison: Comparison) -> Iterator[VerdictLine]:
    for condition, verdicts in comparison.verdicts.items():
        if verdicts:
            offenders = [": ".join(filter(None, (one.case, one.found))) for one in verdicts]
            yield VerdictLine(f"FAILED: {condition.spelling}: {shortened(offenders, _MOST_OFFENDERS)}.", False)
    if held := [condition.spelling for condition, verdicts in comparison.verdicts.items() if not verdicts]:
        yield VerdictLine(f"PASSED: no case violates {fmt.words(held, 'or')}.", True)
    counts = Counter(pair.verdict for pair in comparison.pairs)
    words = {"no difference": f"no difference within {fmt.share(100 * comparison.smallest_difference, 1)}"}
    found = ", ".join(f"{number} {words.get(verdict, verdict)}" for verdict, number in counts.most_common())
    if why := comparison.nothing_compared:
        yield VerdictLine(f"FAILED: nothing was compared: {why}{f' ({found})' if found else ''}.", False)
    else:
        yield VerdictLine(f"Compared {fmt.plural(len(comparison.pairs), 'case')}: {found}.", True)


def _statement(total: Total) -> Statement:
    of = f"geometric mean of {fmt.plural(total.cases, total.over)}" if total.cases > 1 else f"one {total.over}"
    return Statement(
        f"{total.implementation}, {total.precision}, {total.where}:",
        f"{total.verdict}, {fmt.speedup(total.change)} {_BY[total.by]}, {of}.",
    )


def _caveats(comparison: Comparison) -> Iterator[str]:
    machine = [str(one) for one in comparison.machine]
    if machine:
        yield (
            f"The machines differ ({'; '.join(machine)}), so absolute times are not compared.  Speedups over the "
            "baseline, each measured on one machine, are."
        )
    prefills = (pair for pair in comparison.pairs if pair.case.prefill and pair.over_baseline)
    if reasons := [
        why for why in dict.fromkeys(why for one in prefills for why in one.incomparable) if why not in machine
    ]:
        yield (
            f"The conditions of the prefills differ ({'; '.join(reasons)}), so their absolute times are not compared.  "
            "Their speedups over the baseline are."
        )
    for name, side in (("BASE", comparison.base), ("NEW", comparison.new)):
        if side.unfinished:
            yield f"{name} is not complete: {side.unfinished}."
    for reason in dict.fromkeys(pair.other_inputs for pair in comparison.pairs if pair.other_inputs):
        yield f"Errors cannot be compared: {reason}."


def _sections(comparison: Comparison, stalls: Sequence[StageChange]) -> Iterator[Section]:
    pairs = [pair for pair in comparison.pairs if pair.base and pair.new]
    timed = [pair for pair in pairs if pair.verdict != "not timed"]
    speed = _speed(comparison, [pair for pair in timed if not pair.case.prefill])
    prefills = _prefills(comparison, [pair for pair in timed if pair.case.prefill])
    yield section("Speed", speed, READING if speed else None)
    yield section("Prefill time of the model", prefills, READING_PREFILLS if prefills else None)
    yield section("Accuracy", _accuracy([pair for pair in pairs if _any(pair, _out)]))
    yield section("Answers of the model", _answers([pair for pair in pairs if _any(pair, _band)]))
    known = [pair for pair in pairs if _any(pair, lambda case: case.launches or case.memory)]
    yield section("Launches and memory", _resources(known))
    yield section("Stalls by stage", _stalls(stalls))
    yield section("Not compared", _unpaired(comparison.pairs))
    yield section("What ran", _facts(comparison))


# --- tables: a row for each pair, and columns of both sides


def _both(header: str, cell: Callable[[Case], str]) -> tuple[Column[Pair], Column[Pair]]:
    """The cell of BASE and that of NEW."""
    return (
        Column(f"{header},\nBASE", lambda pair: cell(pair.base) if pair.base else fmt.MISSING),
        Column(f"{header},\nNEW", lambda pair: cell(pair.new) if pair.new else fmt.MISSING),
    )


def _speedups(comparison: Comparison) -> tuple[Column[Pair], Column[Pair]]:
    def cell(pair: Pair, case: Case | None) -> str:
        report = (comparison.base if case is pair.base else comparison.new).report
        found = report.speedup(case) if case else None
        return fmt.ratio(found.value if found else None)

    return (
        Column("speedup,\nBASE", lambda pair: cell(pair, pair.base)),
        Column("speedup,\nNEW", lambda pair: cell(pair, pair.new)),
    )


_RATIO: Column[Pair] = Column("speedup,\nNEW / BASE", lambda pair: fmt.speedup(pair.over_baseline))
_VERDICT: Column[Pair] = text("verdict", lambda pair: pair.verdict)
_CALL: Column[Pair] = Column("call time,\nBASE / NEW", lambda pair: fmt.speedup(pair.call))


def _speed(comparison: Comparison, pairs: Sequence[Pair]) -> Table | None:
    columns = (
        *_NAMES,
        _VERDICT,
        Column[Pair]("device time,\nBASE / NEW", lambda pair: fmt.speedup(pair.time)),
        _CALL,
        _RATIO,
        *_both("device", lambda case: _us(case.device_us)),
        *_speedups(comparison),
    )
    return table("Speed of NEW against BASE", columns, pairs, keys=3)


def _prefills(comparison: Comparison, pairs: Sequence[Pair]) -> Table | None:
    """Call times of the whole model, and the implementations' speedups in it."""

    def kernel(pair: Pair) -> str:
        kernels = (" ".join(filter(None, (case.variant, case.version))) for case in (pair.base, pair.new) if case)
        return ", now ".join(dict.fromkeys(one or fmt.MISSING for one in kernels))

    columns = (
        *_NAMES,
        text("kernel", kernel),
        _VERDICT,
        _CALL,
        _RATIO,
        *_both("call", lambda case: _us(case.call_us)),
        *_speedups(comparison),
    )
    return table("Prefill time of NEW against BASE", columns, pairs, keys=3)


def _accuracy(pairs: Sequence[Pair]) -> Table | None:
    def match(case: Case) -> float | None:
        found = case.tensor("out")
        return found.vs_baseline.match_pct(1e-3) if found and found.vs_baseline else None

    columns = (
        *_NAMES,
        *_both("match @ 1e-3", lambda case: fmt.percent(match(case))),
        *_both("rms error", lambda case: fmt.small(found.rms_ratio if (found := _out(case)) else None)),
        *_both("largest error", lambda case: fmt.small(found.max_abs if (found := _out(case)) else None)),
    )
    return table("Accuracy of the output, side by side", columns, pairs, keys=3)


def _answers(pairs: Sequence[Pair]) -> Table | None:
    columns = (
        *_NAMES,
        *_both("mean KL [nats]", lambda case: fmt.small(found.kl_mean if (found := _band(case)) else None)),
        *_both("same top token", lambda case: fmt.percent(found.top1_pct if (found := _band(case)) else None)),
        *_both("perplexity", lambda case: fmt.small(found.perplexity if (found := _band(case)) else None)),
    )
    return table("Answers of the model, side by side", columns, pairs, keys=3)


def _resources(pairs: Sequence[Pair]) -> Table | None:
    def configuration(pair: Pair) -> str:
        sides = [case.launches if case else () for case in (pair.base, pair.new)]
        before, now = ([(launch.kernel, launch.config) for launch in launches] for launches in sides)
        return "the same" if before == now else "another"

    columns = (
        *_NAMES,
        *(one._replace(align="left") for one in _both("kernel", lambda case: case.variant or fmt.MISSING)),
        text("configuration", configuration),
        *_both("kernels", lambda case: fmt.count(case.kernels)),
        *_both("extra memory", lambda case: fmt.size(case.memory.workspace_bytes if case.memory else None)),
    )
    return table("Kernels and memory", columns, pairs, keys=3)


def _stalls(changes: Sequence[StageChange]) -> Table | None:
    columns: tuple[Column[StageChange], ...] = (
        text("implementation", lambda one: one[0]),
        text("stage", lambda one: one[1]),
        Column("share,\nBASE", lambda one: fmt.share(one[2], 1)),
        Column("share,\nNEW", lambda one: fmt.share(one[3], 1)),
        Column("time,\nBASE", lambda one: fmt.duration(one[4])),
        Column("time,\nNEW", lambda one: fmt.duration(one[5])),
    )
    note = "Times under ncu cannot be compared with those of a run."
    return table("Busy warp samples of each stage, by ncu", columns, changes, keys=2, note=note)


def _unpaired(pairs: Sequence[Pair]) -> Table | None:
    """Cases without a verdict, except those that passed in both and were timed in neither."""

    def results(pair: Pair) -> str:
        found = {name: case.result for name, case in (("BASE", pair.base), ("NEW", pair.new)) if case}
        return ", ".join(f"{name} {result}" for name, result in found.items())

    left = [
        pair
        for pair in pairs
        if pair.verdict.startswith(("only", "not"))
        and not (pair.verdict == "not timed" and results(pair) == "BASE passed, NEW passed")
    ]
    columns: tuple[Column[Pair], ...] = (
        *_NAMES,
        text("why", lambda pair: pair.verdict),
        text("more", lambda pair: "; ".join(pair.incomparable) or results(pair)),
    )
    return table("Cases without a verdict on speed", columns, left, keys=3)


def _facts(comparison: Comparison) -> Table:
    sides = (comparison.base, comparison.new)
    environments = [side.report.environment for side in sides]
    rows = {
        "what": [f"{side.report.kind}: {side.subject}" for side in sides],
        "started": [side.report.created for side in sides],
        "GPU": [gpu_name(one) for one in environments],
        "driver": [one.gpu.driver if one.gpu else fmt.MISSING for one in environments],
        "ssdprof": [side.report.ssdprof_version for side in sides],
        **{
            name: [one.packages.get(package, fmt.MISSING) for one in environments]
            for name, package in {"Triton": "triton", "PyTorch": "torch", "transformers": "transformers"}.items()
        },
    }
    return Table(
        title="What ran",
        headers=("", f"BASE: {sides[0].name}", f"NEW: {sides[1].name}"),
        rows=tuple((name, *values) for name, values in rows.items()),
        align=("left", "left", "left"),
    )


def _any(pair: Pair, of: Callable[[Case], Any]) -> bool:
    return any(case and of(case) for case in (pair.base, pair.new))


def _out(case: Case) -> Deviation | None:
    found = case.tensor("out")
    return found.vs_oracle if found else None


def _band(case: Case) -> AnswerBand | None:
    return case.answers.bands[0] if case.answers and case.answers.bands else None


def _us(found: Estimate | None) -> str:
    return fmt.duration(found.value if found else None)
