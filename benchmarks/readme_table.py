"""Write the README's tables of speeds, and the pages behind them, from the committed results of `ssdprof bench`.

    python benchmarks/readme_table.py

It reads every benchmarks/results/bench-<operator>-*.json.  An operator's tables in the README, one for each GPU, are
between two marks.  Its page next to the results has a selection for each GPU, and then all tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdprof.bench.render import as_markdown
from ssdprof.bench.schema import BenchCase, BenchCell, BenchReport, load
from ssdprof.bench.tables import baseline_of
from ssdprof.report import format as fmt
from ssdprof.report import markdown
from ssdprof.report.tables.table import Table, columns

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
LAYOUTS = (
    "1 x 1,024", "1 x 4,096", "1 x 8,192", "1 x 16,384", "1 x 32,768", "1 x 65,536", "1 x 131,072", "1 x 262,144",
    "32 x 1,024", "8 x 4,096",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The contents of the tables of one operator.

    library: baseline of the speedups.  models: columns, by the names of their shapes.  in_readme: layouts of tokens.
    sizes: heading of a shape's sizes.  published: whether the published fused kernel has separate tables.
    """

    name: str
    title: str
    library: str
    models: tuple[str, ...]
    in_readme: tuple[str, ...]
    sizes: str
    published: bool = False

    @property
    def page(self) -> Path:
        return RESULTS / f"bench-{self.name}.md"

    @property
    def marks(self) -> tuple[str, str]:
        """The marks around the README's table."""
        return f"<!-- bench-{self.name}:start -->\n", f"<!-- bench-{self.name}:end -->"


SSD = Operator(
    name="ssd", title="SSD", library="mamba_ssm", published=True, sizes="heads x P, N, groups",
    models=("mamba2-2.7b", "granite-4.0-h-small", "nemotron-3-nano"),
    in_readme=("1 x 1,024", "1 x 4,096", "1 x 16,384", "1 x 131,072", "32 x 1,024"),
)  # fmt: skip
GDN = Operator(
    name="gdn", title="GDN", library="fla", sizes="key/value heads, K, V",
    models=("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-397b", "olmo-hybrid-7b"),
    in_readme=("1 x 1,024", "1 x 8,192", "1 x 65,536", "1 x 131,072", "8 x 4,096"),
)  # fmt: skip
DAGGER = "\u2020"
WRONG = f"{DAGGER} Another setting of that kernel gave wrong results in that run, and does not count."
Reports = Mapping[str, BenchReport]  # by file name


def committed(of: Operator) -> dict[str, BenchReport]:
    files = sorted(RESULTS.glob(f"bench-{of.name}-*.json"))
    return {file.name: load(file.read_text(encoding="utf-8")) for file in files}


def write_section(readme: Path, of: Operator, made: str) -> None:
    """Replace the text between the operator's marks."""
    start, end = of.marks
    text = readme.read_text(encoding="utf-8")
    head, _, rest = text.partition(start)
    _, _, tail = rest.partition(end)
    readme.write_text(f"{head}{start}{made}{end}{tail}", encoding="utf-8")


def current(readme: Path, of: Operator) -> str:
    """The text between the operator's marks."""
    start, end = of.marks
    return readme.read_text(encoding="utf-8").partition(start)[2].partition(end)[0]


def section(reports: Reports, of: Operator = SSD) -> str:
    """The section of the README: one table for each GPU, and a link to the others."""
    tables = "".join(_of_one_gpu(gpu, theirs, of) for gpu, theirs in _by_gpu(reports).items())
    return (
        f"\nSpeedup of `fused` over `{of.library}` for one layer's operator, by device time / by call time, with bf16 "
        f"inputs.  `fused` runs at its most accurate precision: intermediates and states in fp32.\n\n{tables}"
        "Device time is the time on the GPU alone.  Call time is that of a Python call on an idle GPU, launches "
        "included.  Other shapes and libraries, times and errors: "
        f"[{of.page.name}]({of.page.relative_to(ROOT)}).\n\n"
    )


def _of_one_gpu(gpu: str, reports: Reports, of: Operator) -> str:
    """The table of a GPU, with the kernels and dates of its results; empty without results."""
    found = _measured(reports, of.library, "bf16")
    table = _by_layout(of, "", [cell for cell, _ in found], of.library, of.in_readme)
    if not table.rows:
        return ""
    shown = {one.created: one for cell, one in found if cell.shape in of.models and cell.tokens in of.in_readme}
    sources = [shown[created] for created in sorted(shown)]
    days = dict.fromkeys(one.created[:10] for one in sources)
    kernels = dict.fromkeys(one.kernels[:12] for one in sources if one.kernels)
    of_kernels = f" with kernels {fmt.words(kernels)}" if kernels else ""
    return f"One {gpu}, measured on {fmt.words(days)}{of_kernels}:\n\n{markdown.draw(table)}\n\n"


def page(reports: Reports, of: Operator = SSD) -> str:
    """A selection for each GPU, then every table of every result."""
    groups = _by_gpu(reports)
    tables = [
        table for gpu, theirs in groups.items() for table in _tables(of, _dated(of, gpu, theirs, reports), theirs)
    ]
    machines = fmt.words(f"one {gpu}" for gpu in groups)
    head = (
        f"# The {of.title} kernels alone\n\nWritten by `benchmarks/readme_table.py` from the JSON in this folder.  The "
        f"first tables are a selection, measured side by side on {machines}: how many times as fast `fused` is, with "
        "exact intermediates and fp32 states, by device time / by call time.\n"
    )
    selection = "\n\n".join(markdown.draw(table) for table in tables if table.rows)
    newest, older = _newest(reports, of), "Measured with an older kernel than the newest results here.\n\n"
    parts = (
        f"## [{name}]({name})\n\n{older if _is_older(report, newest) else ''}{as_markdown(report)}"
        for name, report in reports.items()
    )
    return "\n".join([head, f"{selection}\n", *parts])


def _by_gpu(reports: Reports) -> dict[str, Reports]:
    """The reports by GPU.  The GPU with the most cells comes first."""
    groups: dict[str, dict[str, BenchReport]] = {}
    for name, report in reports.items():
        gpu = report.environment.gpu
        groups.setdefault(gpu.name if gpu else "GPU without a name", {})[name] = report
    cells = {gpu: sum(len(report.cells) for report in theirs.values()) for gpu, theirs in groups.items()}
    return {gpu: groups[gpu] for gpu in sorted(groups, key=lambda gpu: -cells[gpu])}


def _dated(of: Operator, gpu: str, theirs: Reports, reports: Reports) -> str:
    """The GPU's name, and the date of its newest results if other GPUs have results of a newer kernel."""
    own = _newest(theirs, of)
    return f"{gpu}, an older kernel ({own.created[:10]})" if _is_older(own, _newest(reports, of)) else gpu


def _newest(reports: Reports, of: Operator) -> BenchReport:
    """The newest report.  Results over the library have priority, because the tables show them."""
    return max(reports.values(), key=lambda report: (report.baseline == of.library, report.created))


def _is_older(report: BenchReport, newest: BenchReport) -> bool:
    return report.created < newest.created and _kernel(report) != _kernel(newest)


def _kernel(report: BenchReport) -> str:
    """Equal for results of one kernel.  Results from before the hash of its sources was recorded have their day."""
    return report.kernels or report.created[:10]


def _tables(of: Operator, gpu: str, reports: Reports) -> tuple[Table, ...]:
    """The tables of one GPU: the models over the library and over the published kernel; other shapes."""
    library, published = (
        [cell for cell, _ in _measured(reports, baseline, dtype)]
        for baseline, dtype in ((of.library, "bf16"), ("published", "fp16"))
    )
    over_published = "over the published kernel, in the faster of its settings, fp16 inputs"
    return (
        _by_layout(of, f"{gpu}: over {of.library}, bf16 inputs", library, of.library),
        *([_by_layout(of, f"{gpu}: {over_published}", published, "published")] if of.published else ()),
        _by_shape(of, f"{gpu}: other shapes, over {of.library}, bf16 inputs", library),
    )


def _measured(reports: Reports, baseline: str, dtype: str) -> list[tuple[BenchCell, BenchReport]]:
    """Cells with the exact fused kernel, this dtype and the default draw, from reports with this baseline.  Each cell
    comes once, from its newest report."""
    found: dict[tuple[str, str], tuple[BenchCell, BenchReport]] = {}
    for report in sorted(reports.values(), key=lambda report: report.created, reverse=True):
        for cell in report.cells if report.baseline == baseline else ():
            if _exact(cell) is not None and cell.dims.dtype == dtype and not cell.drawn:
                found.setdefault((cell.shape, cell.tokens), (cell, report))
    return list(found.values())


def _exact(cell: BenchCell) -> BenchCase | None:
    """`fused` with exact intermediates and fp32 states."""
    for case in cell.cases:
        precise = case.precision.intermediates == "exact" and case.precision.state_dtype == "fp32"
        if case.implementation == "fused" and precise:
            return case
    return None


def _by_layout(
    of: Operator, title: str, cells: Sequence[BenchCell], baseline: str, layouts: Sequence[str] = LAYOUTS
) -> Table:
    """A row for each measured layout of tokens, a column for each measured model."""
    found = {(cell.tokens, cell.shape): _speedup(cell, baseline) for cell in cells}
    models = tuple(model for model in of.models if any((layout, model) in found for layout in layouts))
    rows = [(layout, *(found.get((layout, model), fmt.MISSING) for model in models)) for layout in layouts]
    return Table(
        title=title,
        headers=("sequences x tokens", *models),
        rows=tuple(row for row in rows if set(row[1:]) - {fmt.MISSING}),
        align=columns(1, len(models)),
        note=WRONG if any(DAGGER in ratio for ratio in found.values()) else "",
    )


def _by_shape(of: Operator, title: str, cells: Sequence[BenchCell]) -> Table:
    """A row for each packed shape and each shape of no model above; a column for each layout of tokens."""
    others = [cell for cell in cells if cell.shape not in of.models or cell.packed]
    layouts = {cell.tokens: cell for cell in sorted(others, key=lambda cell: (cell.packed, cell.dims.seqlen))}
    found = {(cell.shape, cell.tokens): _speedup(cell, baseline_of(cell, of.library)) for cell in others}
    return Table(
        title=title,
        headers=("shape", of.sizes, *(_heading(of, cell) for cell in layouts.values())),
        rows=tuple(
            (shape, _sizes(cell), *(found.get((shape, tokens), fmt.MISSING) for tokens in layouts))
            for shape, cell in {cell.shape: cell for cell in others}.items()
        ),
        align=columns(2, len(layouts)),
    )


def _heading(of: Operator, cell: BenchCell) -> str:
    baseline = baseline_of(cell, of.library)
    return cell.tokens if baseline == of.library else f"{cell.tokens}, over {baseline}"


def _sizes(cell: BenchCell) -> str:
    """The sizes in the order of `Operator.sizes`."""
    one, two, three, four = cell.dims.sizes.values()
    return f"{one}/{two}, {three}, {four}" if cell.dims.operator == "gdn" else f"{one} x {two}, {three}, {four}"


def _speedup(cell: BenchCell, baseline: str) -> str:
    """ "4.11x / 3.68x", or the reason why there is none."""
    case = _exact(cell)
    if case is None or case.timing is None:
        return fmt.MISSING if case is None else case.status
    over = case.over(baseline)
    wrong = any(one.implementation == baseline and one.status in ("inaccurate", "nonfinite") for one in cell.cases)
    mark = f" {DAGGER}" if wrong else ""
    return f"{fmt.ratio(over.device_ratio)} / {fmt.ratio(over.call_ratio)}{mark}" if over else fmt.MISSING


if __name__ == "__main__":
    for operator in (SSD, GDN):
        if found := committed(operator):
            write_section(README, operator, section(found, operator))
            operator.page.write_text(page(found, operator), encoding="utf-8")
