"""Check results of `ssdprof bench` against the bars in bars-ssd.toml and bars-gdn.toml.

    python benchmarks/check_bars.py
    python benchmarks/check_bars.py new/*.json

It reads the recorded results of the H200, or the named files.  Prints a table in Markdown for each
operator, and below it every cell that missed or was not measured.  Exit code 1 if a bar does not
hold, and 2 for results of several GPUs.  `bars.py` judges.
"""

import argparse
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import recorded
from bars import Finding, check

from ssdprof.core import words as fmt
from ssdprof.report import markdown
from ssdprof.report.table import Table, strings

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        help="what ssdprof bench wrote; without: results/h200.jsonl",
    )
    parser.add_argument("--bars", type=Path, help="instead of bars-OPERATOR.toml")
    options = parser.parse_args()
    read_from = options.results or [recorded.RESULTS / "h200.jsonl"]
    cells = [cell for file in read_from for cell in recorded.read(file) if not cell.bench.fixed]
    gpus = {cell.bench.gpu for cell in cells}
    if len(gpus) > 1:
        parser.error(f"bars are those of one GPU, and the results are of {fmt.words(sorted(gpus))}")
    all_hold = True
    for operator in dict.fromkeys(cell.bench.operator for cell in cells):
        file = options.bars or HERE / f"bars-{operator}.toml"
        own = [cell for cell in cells if cell.bench.operator == operator]
        found = check(tomllib.loads(file.read_text(encoding="utf-8")), own)
        print(markdown.draw(summary(found, operator)), end="\n\n")
        for line in remarks(found):
            print(f"- {line}")
        all_hold = all_hold and all(one.holds for one in found)
    if not all_hold:
        raise SystemExit(1)


def summary(found: Sequence[Finding], operator: str) -> Table:
    return strings(
        title=f"Bars of {operator}",
        headers=("bar", "times as fast", "must", "least", "where", "verdict", "goal", "reached"),
        rows=tuple(_row(one) for one in found),
        texts=(0, 1, 4, 5),
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
        fmt.ratio(one.must or None),
        fmt.ratio(least.ratio if least else None),
        least.cell if least else fmt.MISSING,
        ", ".join(parts) or "held",
        fmt.ratio(one.goal),
        f"{one.at_goal} of {number}" if one.goal else fmt.MISSING,
    )


def remarks(found: Iterable[Finding]) -> Iterator[str]:
    """The bars that do not hold, cell by cell."""
    for one in found:
        for reading in one.missed:
            ratio = reading.ratio or 0
            short = (
                f"{fmt.ratio(ratio)}, {100 * (1 - ratio / one.must):.0f} % short of "
                f"{fmt.ratio(one.must)}"
            )
            yield f"{one.name} ({one.what}): {reading.cell}: {short if ratio else 'failed'}"
        if one.unmeasured:
            cells = "; ".join(reading.cell for reading in one.unmeasured)
            yield f"{one.name} ({one.what}): not measured: {cells}"


if __name__ == "__main__":
    main()
