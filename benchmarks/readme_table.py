"""Write the tables of speeds of results/README.md from the recorded results, between two marks for
each operator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import recorded
from recorded import Cell, RecordedCase

from ssdprof.core import words as fmt
from ssdprof.report import markdown
from ssdprof.report.table import Table, strings

ROOT = Path(__file__).resolve().parent.parent
PAGE = recorded.RESULTS / "README.md"
LAYOUTS = (
    "1 x 1,024",
    "1 x 4,096",
    "1 x 8,192",
    "1 x 16,384",
    "1 x 32,768",
    "1 x 65,536",
    "1 x 131,072",
    "1 x 262,144",
    "32 x 1,024",
    "8 x 4,096",
)
DAGGER = "\u2020"
WRONG = (
    f"{DAGGER} Another setting of that kernel gave wrong results in that run, and does not count."
)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The contents of the tables of one operator.

    library: baseline of the speedups.  models: columns, by the names of their shapes.
    sizes: heading of a shape's sizes.  published: whether the published fused kernel has separate
    tables.
    """

    name: str
    library: str
    models: tuple[str, ...]
    sizes: str
    published: bool = False

    @property
    def marks(self) -> tuple[str, str]:
        return f"<!-- bench-{self.name}:start -->\n", f"<!-- bench-{self.name}:end -->"


SSD = Operator(
    name="ssd",
    library="mamba_ssm",
    published=True,
    sizes="heads x P, N, groups",
    models=("mamba2-2.7b", "granite-4.0-h-small", "nemotron-3-nano"),
)
GDN = Operator(
    name="gdn",
    library="fla",
    sizes="key/value heads, K, V",
    models=("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-397b", "olmo-hybrid-7b"),
)


def committed(of: Operator) -> list[Cell]:
    return [
        cell
        for cell in recorded.committed()
        if cell.bench.operator == of.name and not cell.bench.fixed
    ]


def write(file: Path, of: Operator, made: str) -> None:
    """Replace the text between the operator's marks."""
    start, end = of.marks
    head, _, rest = file.read_text(encoding="utf-8").partition(start)
    file.write_text(f"{head}{start}{made}{end}{rest.partition(end)[2]}", encoding="utf-8")


def current(file: Path, of: Operator) -> str:
    """The text between the operator's marks."""
    start, end = of.marks
    return file.read_text(encoding="utf-8").partition(start)[2].partition(end)[0]


def selection(cells: Sequence[Cell], of: Operator = SSD) -> str:
    """The section of results/README.md: the models over the library and over the published kernel;
    other shapes.
    """
    tables = [table for gpu, theirs in _by_gpu(cells).items() for table in _tables(of, gpu, theirs)]
    return "\n" + "\n\n".join(markdown.draw(table) for table in tables if table.rows) + "\n\n"


def _by_gpu(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The GPU with the most cells comes first."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.bench.gpu, []).append(cell)
    return dict(sorted(groups.items(), key=lambda one: -len(one[1])))


def _tables(of: Operator, gpu: str, cells: Sequence[Cell]) -> tuple[Table, ...]:
    library, published = _measured(cells, of.library, "bf16"), _measured(cells, "published", "fp16")
    over_published = "over the published kernel, in the faster of its settings, fp16 inputs"
    return (
        _by_layout(of, f"{gpu}: over {of.library}, bf16 inputs", library, of.library),
        *(
            [_by_layout(of, f"{gpu}: {over_published}", published, "published")]
            if of.published
            else ()
        ),
        _by_shape(of, f"{gpu}: other shapes, over {of.library}, bf16 inputs", library),
    )


def _measured(cells: Sequence[Cell], baseline: str, dtype: str) -> list[Cell]:
    """Cells with the exact fused kernel, this dtype and the default draw, from benches with this
    baseline.  Each comes once, from its newest bench.
    """
    found: dict[tuple[str, str], Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.bench.created, reverse=True):
        one = cell.one
        if cell.bench.baseline == baseline and _exact(cell) and one.dtype == dtype and not one.ways:
            found.setdefault((one.shape, one.tokens), cell)
    return list(found.values())


def _exact(cell: Cell) -> RecordedCase | None:
    return next((case for case in cell.cases if case.fits("fused exact fp32")), None)


def _in_table(cell: Cell, of: Operator) -> bool:
    return cell.one.shape in of.models and not cell.one.packed


def _by_layout(of: Operator, title: str, cells: Sequence[Cell], baseline: str) -> Table:
    """A row for each measured layout of tokens, a column for each measured model."""
    found = {(cell.one.tokens, cell.one.shape): _speedup(cell, baseline) for cell in cells}
    models = tuple(
        model for model in of.models if any((layout, model) in found for layout in LAYOUTS)
    )
    rows = [
        (layout, *(found.get((layout, model), fmt.MISSING) for model in models))
        for layout in LAYOUTS
    ]
    return strings(
        title=title,
        headers=("sequences x tokens", *models),
        rows=tuple(row for row in rows if set(row[1:]) - {fmt.MISSING}),
        note=WRONG if any(DAGGER in ratio for ratio in found.values()) else "",
    )


def _by_shape(of: Operator, title: str, cells: Sequence[Cell]) -> Table:
    """A row for each packed shape and each shape of no model above; a column for each layout of
    tokens.
    """
    others = [cell for cell in cells if not _in_table(cell, of)]
    layouts = {
        cell.one.tokens: cell
        for cell in sorted(others, key=lambda cell: (cell.one.packed, cell.one.seqlen))
    }
    found = {
        (cell.one.shape, cell.one.tokens): _speedup(cell, _baseline_of(cell, of)) for cell in others
    }
    return strings(
        title=title,
        headers=("shape", of.sizes, *(_heading(of, cell) for cell in layouts.values())),
        rows=tuple(
            (
                shape,
                _sizes(cell.one),
                *(found.get((shape, tokens), fmt.MISSING) for tokens in layouts),
            )
            for shape, cell in {cell.one.shape: cell for cell in others}.items()
        ),
        texts=(0, 1),
    )


def _baseline_of(cell: Cell, of: Operator) -> str:
    """The library; `unfused` if only that was timed."""
    return of.library if cell.fastest(of.library) or not cell.fastest("unfused") else "unfused"


def _heading(of: Operator, cell: Cell) -> str:
    baseline = _baseline_of(cell, of)
    return cell.one.tokens if baseline == of.library else f"{cell.one.tokens}, over {baseline}"


def _sizes(case: RecordedCase) -> str:
    """The sizes in the order of `Operator.sizes`."""
    one, two, three, four = case.sizes.values()
    return (
        f"{one}/{two}, {three}, {four}"
        if case.operator == "gdn"
        else f"{one} x {two}, {three}, {four}"
    )


def _speedup(cell: Cell, baseline: str) -> str:
    """ "4.11x / 3.68x", or the reason why there is none."""
    case = _exact(cell)
    if case is None or case.device_us is None:
        return fmt.MISSING if case is None else case.status
    over = case.over.get(baseline)
    wrong = any(
        one.implementation == baseline and one.status in ("inaccurate", "nonfinite")
        for one in cell.cases
    )
    mark = f" {DAGGER}" if wrong else ""
    return f"{fmt.ratio(over.device[0])} / {fmt.ratio(over.call[0])}{mark}" if over else fmt.MISSING


if __name__ == "__main__":
    for operator in (SSD, GDN):
        write(PAGE, operator, selection(committed(operator), operator))
