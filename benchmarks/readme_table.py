"""Write the README's table of speeds from a result of `ssdprof bench`.

    python benchmarks/readme_table.py benchmarks/results/bench-ssd-h200.json

The table stands between two marks, and names the result that it was made from.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ssdprof.bench.schema import BenchReport, load
from ssdprof.bench.tables import fastest
from ssdprof.report import format as fmt
from ssdprof.report import markdown
from ssdprof.report.tables.table import Table, columns

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- bench:start -->\n", "<!-- bench:end -->"


def update(readme: Path, result: Path) -> None:
    """Replace what is between the marks."""
    text = readme.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    made = section(result, _relative(result))
    readme.write_text(f"{head}{START}{made}{END}{tail}", encoding="utf-8")


def section(result: Path, name: str) -> str:
    """A sentence and the table; `name` is the link to the result."""
    report = load(result.read_text(encoding="utf-8"))
    gpu = report.environment.gpu
    return (
        f"\nMeasured side by side on {f'one {gpu.name}' if gpu else 'no GPU'}, medians; device is the GPU's own time, "
        f"call what a Python caller waits for ([{name}]({name})):\n\n{markdown.draw(_table(report))}\n\n"
    )


def current(readme: Path) -> str:
    """What is between the marks."""
    return readme.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]


def source_of(readme: Path) -> str | None:
    """The result that the table was made from; None if there is no table yet."""
    found = re.search(r"\]\(([^)]+\.json)\)", current(readme))
    return found[1] if found else None


def _table(report: BenchReport) -> Table:
    """The fused kernel with exact intermediates and fp32 states, over the baseline."""
    rows = []
    for cell in report.cells:
        baseline = fastest(cell, report.baseline)
        for case in cell.cases:
            exact = case.precision.intermediates == "exact" and case.precision.state_dtype == "fp32"
            over = case.over(report.baseline)
            if case.implementation != "fused" or not exact:
                continue
            if case.timing is None or over is None or baseline is None or baseline.timing is None:
                raise SystemExit(f"{cell.shape}, {cell.tokens}: there is no speedup of fused over {report.baseline}")
            rows.append(
                (
                    cell.shape,
                    cell.tokens,
                    cell.dims.dtype,
                    fmt.duration(baseline.timing.device_median_us),
                    fmt.duration(case.timing.device_median_us),
                    fmt.ratio(over.device_ratio),
                    fmt.ratio(over.call_ratio),
                    fmt.percent(case.roofline.floor_pct if case.roofline else None, 0),
                )
            )
    return Table(
        title=f"Fused, exact intermediates and fp32 states, over {report.baseline}",
        headers=(
            "shape", "sequences x tokens", "inputs", report.baseline, "fused", "speedup, device", "speedup, call",
            "of floor",
        ),
        rows=tuple(rows),
        align=columns(3, 5),
    )  # fmt: skip


def _relative(result: Path) -> str:
    resolved = result.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else result.name


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    update(ROOT / "README.md", Path(sys.argv[1]))
