"""Hold results of `ssdprof bench` against what the kernels are held to, bars.toml.

    python benchmarks/check_bars.py benchmarks/results/bench-ssd-h200*.json

Prints a table in Markdown, and below it every cell that missed or was not measured.  Exit code 1 unless all that must
hold holds, and 2 for results of several GPUs.  If several results measured the same thing, the least counts, so that no
bar holds because another library was slow once.  A case that ran and was not timed (wrong or refused) has missed.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ssdprof.bench.schema import BenchCase, BenchCell, BenchReport, load
from ssdprof.report import format as fmt
from ssdprof.report import markdown
from ssdprof.report.tables.table import Table, columns

BARS = Path(__file__).with_name("bars.toml")
Key = tuple[str, str, str]  # shape, tokens, dtype
Cells = Mapping[Key, Sequence[BenchCell]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How many times as fast; None where that was not measured, 0 where what is to be fast failed."""

    cell: str
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A bar and what was measured for it.  must, goal: least ratios."""

    name: str
    what: str
    must: float
    goal: float | None
    readings: tuple[Reading, ...]

    @property
    def unmeasured(self) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.ratio is None)

    @property
    def missed(self) -> tuple[Reading, ...]:
        return tuple(reading for reading in self.readings if reading.ratio is not None and reading.ratio < self.must)

    @property
    def holds(self) -> bool:
        return not self.missed and not self.unmeasured

    @property
    def least(self) -> Reading | None:
        return min(
            (one for one in self.readings if one.ratio is not None), key=lambda one: one.ratio or 0, default=None
        )

    @property
    def at_goal(self) -> int:
        return sum(reading.ratio is not None and reading.ratio >= (self.goal or 0) for reading in self.readings)


def by_cell(reports: Iterable[BenchReport]) -> dict[Key, list[BenchCell]]:
    """Every measurement of a cell."""
    found: dict[Key, list[BenchCell]] = {}
    for report in reports:
        for cell in report.cells:
            found.setdefault((cell.shape, cell.tokens, cell.dims.dtype), []).append(cell)
    return found


def findings(bars: Mapping[str, Any], cells: Cells) -> Iterator[Finding]:
    """One for each time that a bar speaks of."""
    for bar in bars["bar"]:
        for time in ("device", "call"):
            if time in bar:
                yield Finding(
                    name=bar["name"],
                    what=f"as {bar['over']}, {time}",
                    must=bar[time]["must"],
                    goal=bar[time].get("goal"),
                    readings=tuple(_readings(bar, time, cells)),
                )


def _readings(bar: Mapping[str, Any], time: str, cells: Cells) -> Iterator[Reading]:
    for shape, tokens in product(bar["shapes"], bar["tokens"]):
        measured = cells.get((shape, tokens, bar.get("dtype", "bf16")), ())
        ratios = [_ratio(cell, bar["of"], bar["over"], time) for cell in measured]
        least = min((ratio for ratio in ratios if ratio is not None), default=None)
        yield Reading(cell=f"{shape}, {tokens}", ratio=least)


def _ratio(cell: BenchCell, of: str, over: str, time: str) -> float | None:
    own, others = _times(cell, of, time), _times(cell, over, time)
    if math.inf in own:
        return 0.0
    other = min(others, default=math.inf)
    return other / min(own) if own and other < math.inf else None


def _times(cell: BenchCell, words: str, time: str) -> list[float]:
    """Microseconds of each case that the words describe, "fused exact fp32"; infinite for one without a time."""
    wanted = words.split()
    return [_time(case, time) for case in cell.cases if _words(case)[: len(wanted)] == wanted]


def _words(case: BenchCase) -> list[str]:
    return [case.implementation, case.precision.intermediates, case.precision.state_dtype]


def _time(case: BenchCase, time: str) -> float:
    if case.timing is None:
        return math.inf
    return case.timing.device_median_us if time == "device" else case.timing.call_median_us


def first_calls(rule: Mapping[str, Any], reports: Iterable[BenchReport]) -> Finding:
    """Every kernel of ours that a first call had to compile; the ratio is of the seconds allowed to those it took."""
    readings = [
        Reading(cell=f"{one.kernel} for {cell.shape}, {cell.tokens}", ratio=rule["seconds"] / one.seconds)
        for report in reports
        for cell in report.cells
        for case in cell.cases
        if case.implementation in rule["of"]
        for first in {case.first_call, *(trial.first_call for trial in case.trials)}
        if first is not None
        for one in first.compiled
    ]
    return Finding(
        name=rule["name"],
        what=f"as {rule['seconds']:g} s, compiling",
        must=1.0,
        goal=None,
        readings=tuple(readings) or (Reading(cell="no kernel had to be compiled", ratio=None),),
    )


def summary(found: Sequence[Finding]) -> Table:
    return Table(
        title="Bars",
        headers=("bar", "times as fast", "must", "least", "where", "verdict", "goal", "reached"),
        rows=tuple(_row(one) for one in found),
        align=(*columns(2, 2), *columns(2, 2)),
    )


def _row(one: Finding) -> tuple[str, ...]:
    least, number = one.least, len(one.readings)
    parts = [
        f"{what} {len(readings)} of {number}"
        for what, readings in (("missed in", one.missed), ("not measured:", one.unmeasured))
        if readings
    ]
    return (
        one.name,
        one.what,
        fmt.ratio(one.must),
        fmt.ratio(least.ratio if least else None),
        least.cell if least else fmt.MISSING,
        ", ".join(parts) or "held",
        fmt.ratio(one.goal),
        f"{one.at_goal} of {number}" if one.goal else fmt.MISSING,
    )


def remarks(found: Iterable[Finding]) -> Iterator[str]:
    """What does not hold, cell by cell."""
    for one in found:
        for reading in one.missed:
            ratio = reading.ratio or 0
            short = f"{fmt.ratio(ratio)}, {100 * (1 - ratio / one.must):.0f} % short of {fmt.ratio(one.must)}"
            yield f"{one.name} ({one.what}): {reading.cell}: {short if ratio else 'failed'}"
        if one.unmeasured:
            cells = "; ".join(reading.cell for reading in one.unmeasured)
            yield f"{one.name} ({one.what}): not measured: {cells}"


def check(bars: Mapping[str, Any], reports: Sequence[BenchReport]) -> tuple[Finding, ...]:
    return (*findings(bars, by_cell(reports)), first_calls(bars["first_call"], reports))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON that ssdprof bench wrote")
    parser.add_argument("--bars", type=Path, default=BARS)
    options = parser.parse_args()
    bars = tomllib.loads(options.bars.read_text(encoding="utf-8"))
    reports = [load(file.read_text(encoding="utf-8")) for file in options.results]
    gpus = {report.environment.gpu.name if report.environment.gpu else "no GPU" for report in reports}
    if len(gpus) > 1:
        parser.error(f"bars are those of one GPU, and the results are of {fmt.words(sorted(gpus))}")
    found = check(bars, reports)
    print(markdown.draw(summary(found)))
    short = list(remarks(found))
    if short:
        print("\n" + "\n".join(f"- {line}" for line in short))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
