"""The output of `ssdprof compare`: two reports of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ssdprof.core import words as fmt
from ssdprof.core.case import Case
from ssdprof.core.pairs import Comparison, Pair, Side, TotalBy
from ssdprof.core.statistics import Estimate
from ssdprof.report.calls import PRECISION
from ssdprof.report.facts import gpu_name
from ssdprof.report.stalls import StageChange
from ssdprof.report.table import (
    Column,
    Document,
    Note,
    Section,
    Table,
    VerdictLine,
    section,
    shortened,
    strings,
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
    summary = []
    for total in comparison.totals:
        mean = f"geometric mean of {fmt.plural(total.cases, total.over)}" if total.cases > 1 else f"one {total.over}"
        said = f"{total.verdict}, {fmt.speedup(total.change)} {_BY[total.by]}, {mean}."
        summary.append((f"{total.implementation}, {total.precision}, {total.where}:", said))
    return Document(
        title=f"ssdprof compare: BASE {base.name}, NEW {new.name}",
        name=new.name,
        verdict=tuple(_verdict(comparison)),
        summary=tuple(summary),
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


def _caveats(comparison: Comparison) -> Iterator[str]:
    if machine := [str(one) for one in comparison.machine]:
        yield (
            f"The machines differ ({'; '.join(machine)}), so absolute times are not compared.  Speedups over the "
            "baseline, each measured on one machine, are."
        )
    prefills = (pair for pair in comparison.pairs if pair.case.prefill and pair.over_baseline)
    reasons = dict.fromkeys(why for one in prefills for why in one.incomparable if why not in machine)
    if reasons:
        yield (
            f"The conditions of the prefills differ ({'; '.join(reasons)}), so their absolute times are not compared.  "
            "Their speedups over the baseline are."
        )
    for name, side in (("BASE", comparison.base), ("NEW", comparison.new)):
        if side.unfinished:
            yield f"{name} is not complete: {side.unfinished}."
    for reason in dict.fromkeys(pair.other_inputs for pair in comparison.pairs if pair.other_inputs):
        yield f"Errors cannot be compared: {reason}."


def _both(header: str, cell: Callable[[Case], str]) -> tuple[Column[Pair], Column[Pair]]:
    """The cell of BASE and that of NEW."""
    return (
        Column(f"{header},\nBASE", lambda pair: cell(pair.base) if pair.base else fmt.MISSING),
        Column(f"{header},\nNEW", lambda pair: cell(pair.new) if pair.new else fmt.MISSING),
    )


def _numbers(
    header: str, show: Callable[[Any], str], value: Callable[[Case], Any]
) -> tuple[Column[Pair], Column[Pair]]:
    return _both(header, lambda case: show(value(case)))


_RATIO: Column[Pair] = Column("speedup,\nNEW / BASE", lambda pair: fmt.speedup(pair.over_baseline))
_VERDICT: Column[Pair] = text("verdict", lambda pair: pair.verdict)
_CALL: Column[Pair] = Column("call time,\nBASE / NEW", lambda pair: fmt.speedup(pair.call))
_DEVICE: Column[Pair] = Column("device time,\nBASE / NEW", lambda pair: fmt.speedup(pair.time))
_STALLS: tuple[Column[StageChange], ...] = (
    text("implementation", lambda one: one[0]),
    text("stage", lambda one: one[1]),
    Column("share,\nBASE", lambda one: fmt.share(one[2], 1)),
    Column("share,\nNEW", lambda one: fmt.share(one[3], 1)),
    Column("time,\nBASE", lambda one: fmt.duration(one[4])),
    Column("time,\nNEW", lambda one: fmt.duration(one[5])),
)


def _sections(comparison: Comparison, stalls: Sequence[StageChange]) -> Iterator[Section]:
    pairs = [pair for pair in comparison.pairs if pair.base and pair.new]

    def where(known: Callable[[Case], Any]) -> list[Pair]:
        return [pair for pair in pairs if any(case and known(case) for case in (pair.base, pair.new))]

    def speedup(side: Side, case: Case | None) -> str:
        found = side.report.speedup(case) if case else None
        return fmt.ratio(found.value if found else None)

    def kernel(pair: Pair) -> str:
        kernels = (" ".join(filter(None, (case.variant, case.version))) for case in (pair.base, pair.new) if case)
        return ", now ".join(dict.fromkeys(one or fmt.MISSING for one in kernels))

    def launched(case: Case | None) -> list[Any]:
        return [(launch.kernel, launch.config) for launch in case.launches] if case else []

    configuration: Column[Pair] = text(
        "configuration", lambda pair: "the same" if launched(pair.base) == launched(pair.new) else "another"
    )
    speedups: tuple[Column[Pair], ...] = (
        Column("speedup,\nBASE", lambda pair: speedup(comparison.base, pair.base)),
        Column("speedup,\nNEW", lambda pair: speedup(comparison.new, pair.new)),
    )
    timed = [pair for pair in pairs if pair.verdict != "not timed"]
    tables: tuple[tuple[str, str, list[Pair], Note | None, tuple[Column[Pair], ...]], ...] = (
        (
            "Speed", "Speed of NEW against BASE", [pair for pair in timed if not pair.case.prefill], READING,
            (_VERDICT, _DEVICE, _CALL, _RATIO, *_numbers("device", _us, lambda case: case.device_us), *speedups),
        ),
        (
            "Prefill time of the model", "Prefill time of NEW against BASE",
            [pair for pair in timed if pair.case.prefill], READING_PREFILLS,
            (
                text("kernel", kernel), _VERDICT, _CALL, _RATIO,
                *_numbers("call", _us, lambda case: case.call_us), *speedups,
            ),
        ),
        (
            "Accuracy", "Accuracy of the output, side by side", where(lambda case: case.error), None,
            (
                *_numbers("match @ 1e-3", fmt.percent, lambda case: case.match_pct(1e-3)),
                *_numbers("rms error", fmt.small, lambda case: case.error and case.error.rms_ratio),
                *_numbers("largest error", fmt.small, lambda case: case.error and case.error.max_abs),
            ),
        ),
        (
            "Answers of the model", "Answers of the model, side by side", where(lambda case: case.band), None,
            (
                *_numbers("mean KL [nats]", fmt.small, lambda case: case.band and case.band.kl_mean),
                *_numbers("same top token", fmt.percent, lambda case: case.band and case.band.top1_pct),
                *_numbers("perplexity", fmt.small, lambda case: case.band and case.band.perplexity),
            ),
        ),
        (
            "Launches and memory", "Kernels and memory", where(lambda case: case.launches or case.memory), None,
            (
                *(one._replace(align="left") for one in _both("kernel", lambda case: case.variant or fmt.MISSING)),
                configuration,
                *_numbers("kernels", fmt.count, lambda case: case.kernels),
                *_numbers("extra memory", fmt.size, lambda case: case.memory and case.memory.workspace_bytes),
            ),
        ),
    )  # fmt: skip
    for title, name, own, reading, columns in tables:
        yield section(title, table(name, (*_NAMES, *columns), own, keys=3), reading=reading)
    note = "Times under ncu cannot be compared with those of a run."
    yield section(
        "Stalls by stage", table("Busy warp samples of each stage, by ncu", _STALLS, stalls, keys=2, note=note)
    )
    yield section("Not compared", _unpaired(comparison.pairs))
    yield section("What ran", _facts(comparison))


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
    more: Column[Pair] = text("more", lambda pair: "; ".join(pair.incomparable) or results(pair))
    columns = (*_NAMES, _VERDICT._replace(header="why"), more)
    return table("Cases without a verdict on speed", columns, left, keys=3)


def _facts(comparison: Comparison) -> Table | None:
    sides = (comparison.base, comparison.new)
    environments = [side.report.environment for side in sides]
    packages = {"Triton": "triton", "PyTorch": "torch", "transformers": "transformers"}
    rows = {
        "what": [f"{side.report.kind}: {side.subject}" for side in sides],
        "started": [side.report.created for side in sides],
        "GPU": [gpu_name(one) for one in environments],
        "driver": [one.gpu.driver if one.gpu else fmt.MISSING for one in environments],
        "ssdprof": [side.report.ssdprof_version for side in sides],
        **{name: [one.packages.get(key, fmt.MISSING) for one in environments] for name, key in packages.items()},
    }
    headers = ("", f"BASE: {sides[0].name}", f"NEW: {sides[1].name}")
    return strings("What ran", headers, ((name, *values) for name, values in rows.items()), "lll")


def _us(found: Estimate | None) -> str:
    return fmt.duration(found.value if found else None)
