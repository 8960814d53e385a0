"""The figures of README.md and docs/ are those of the recorded results.

Tables are read cell by cell and looked up in the results.  A figure with a unit in a sentence is a
number of the results (`held`), or stands in the laboratory log or in results/README.md, or is
listed in `OTHER`.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
import recorded
from cases import task_of
from recorded import RESULTS, Cell

from ssdprof.core.base import intermediates_of
from ssdprof.core.case import Prefill
from ssdprof.core.report import Report
from ssdprof.store.reports import load

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SHAPES = {
    "16/16": "qwen3.5-0.8b",
    "16/32": "qwen3.5-9b",
    "16/48": "qwen3.5-27b",
    "16/64": "qwen3.5-397b",
    "2/8": "qwen3.5-397b-tp8",
}
LIBRARIES = {"FlashInfer": "flashinfer", "FlashQLA 0.1.3": "flash_qla", "fla 0.6.0": "fla"}
Row = dict[str, str]


def tables(document: str) -> Iterator[list[Row]]:
    """The Markdown tables of a document, a dictionary per row."""
    text = (DOCS / document).read_text()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        yield [dict(zip(head, row, strict=True)) for row in rows]


def table_with(document: str, *heads: str) -> list[Row]:
    (found,) = [rows for rows in tables(document) if set(heads) <= rows[0].keys()]
    return found


def shown(value: float, like: str) -> str:
    """A number with as many decimals as `like`: "1,646", "0.98"."""
    return f"{value:,.{len(like.partition('.')[2])}f}"


def number(cell: str) -> str:
    found = re.match(r"[\d.,]+", cell)
    assert found, cell
    return found[0]


@cache
def cells(gpu: str = "h200") -> list[Cell]:
    return recorded.committed(gpu)


def cell_of(bench: str, shape: str, tokens: str, cell_ways: tuple[str, ...] = ()) -> list[Cell]:
    """Measurements of a cell in benches whose names begin with `bench`."""
    return [
        cell
        for cell in cells()
        if cell.bench.name.startswith(bench)
        and (cell.one.shape, cell.one.tokens, cell.one.ways) == (shape, tokens, cell_ways)
    ]


def only_cell_of(bench: str, shape: str, tokens: str) -> Cell:
    """In the bench with this whole name."""
    (cell,) = [one for one in cell_of(bench, shape, tokens) if one.bench.name == bench]
    return cell


def named_benches(document: str, *heads: str) -> set[str]:
    """The benches that the paragraph above a table names."""
    text = (DOCS / document).read_text()
    row = r"\| " + r"[^\n]*".join(map(re.escape, heads))
    above = re.search(rf"((?:[^\n]+\n)+)\n{row}", text)
    assert above, heads
    return {*re.findall(r"`((?:gdn|ssd|kda)[\w-]*)`", above[1])}


def device_us(cell: Cell, name: str) -> float:
    case = cell.fastest(f"{name} exact" if name in ("fused", "unfused") else name)
    return case.device_us[0] if case and case.device_us else 0.0


def microseconds(cell: Cell, row: Row, columns: dict[str, str]) -> bool:
    """Whether the times of a row are those of a cell.  columns: heading -> implementation."""
    return all(
        row[head] == "-" or number(row[head]) == shown(device_us(cell, name), number(row[head]))
        for head, name in columns.items()
    )


def over(cell: Cell, row: Row, head: str, names: tuple[str, ...]) -> bool:
    """Whether the ratio in a column is the time of the fastest of `names` by that of fused."""
    fastest = min(us for name in names if (us := device_us(cell, name)))
    return number(row[head]) == shown(fastest / device_us(cell, "fused"), number(row[head]))


def test_the_speeds_of_the_readme():
    """Each is of the newest bench that compared a cell with one of the kernels that the heading
    names.
    """
    newest = sorted(cells(), key=lambda cell: cell.bench.created, reverse=True)
    columns = {
        "over `mamba_ssm` or `fla`": ("mamba_ssm", "fla"),
        "over the published kernel or FlashInfer": ("published", "flashinfer"),
    }
    for row in table_with("../README.md", *columns):
        tokens, slow, _ = row["sequences x tokens"].partition(", every head slow")
        cell_ways = ("slow",) if slow else ()
        place = (row["operator, model"].split(", ")[1], tokens, cell_ways)
        for head, names in ((head, names) for head, names in columns.items() if row[head] != "-"):
            found = (
                case.over[name].device[0]
                for cell in newest
                if (cell.one.shape, cell.one.tokens, cell.one.ways) == place
                and not cell.bench.fixed
                for name in names
                if cell.one.dtype == ("fp16" if name == "published" else "bf16")
                if (case := cell.fastest("fused exact")) and name in case.over
            )
            assert row[head] == f"{next(found):.2f}x", (row, head)


DELTA = "kernels.md"
KDA = {"12": "kimi-k3-tp8", "32": "kimi-linear-48b", "96": "kimi-k3"}
CELL_WAYS = {"slow": ("slow",), "a quarter slow": ("quarter-slow",)}
# a document, a heading that one of its tables alone has, the bench, and of columns the
# implementation; a ratio is over the fastest of the libraries
TIMES: list[tuple[str, str, str, dict[str, str], str]] = [
    (
        DELTA,
        "unfused",
        "gdn",
        {"fused": "fused", "unfused": "unfused", "fla 0.6.0": "fla"},
        "over fla",
    ),
    (DELTA, "FlashQLA 0.1.3", "gdn-libraries", {"fused": "fused", **LIBRARIES}, "over the fastest"),
    (
        DELTA,
        "over FlashInfer",
        "gdn-flashinfer",
        {"fused": "fused", "FlashInfer": "flashinfer"},
        "over FlashInfer",
    ),
    (
        DELTA,
        "over its `mtp`",
        "gdn-ver",
        {"`recurrent`": "fused", "FlashInfer": "flashinfer_mtp"},
        "over its `mtp`",
    ),
    ("kda-mathematics.md", "over fla", "kda", {"fused": "fused", "fla": "fla"}, "over fla"),
    (
        "kda-mathematics.md",
        "over fla",
        "kda",
        {"fused": "fused", "fla": "fla_recurrent"},
        "over fla",
    ),
]


def test_the_times_of_gated_delta_rules():
    for document, heading in dict.fromkeys(one[:2] for one in TIMES):
        ways = [one[2:] for one in TIMES if one[:2] == (document, heading)]
        for row in table_with(document, heading, "heads", ways[0][-1]):
            tokens = row.get("tokens", row.get("sequences x tokens", ""))
            cell_ways = CELL_WAYS.get(row.get("gates", ""), ())
            right = [
                cell
                for bench, columns, head in ways
                for cell in cell_of(bench, (SHAPES | KDA)[row["heads"]], tokens, cell_ways)
                if microseconds(cell, row, columns)
                and over(cell, row, head, tuple({*columns.values()} - {"fused", "unfused"}))
            ]
            assert right, row
            fused = [case for case in right[0].cases if case.fits("fused exact")]
            assert "launches" not in row or {len(case.launches) for case in fused} == {
                int(row["launches"])
            }


def test_the_benches_that_a_table_names_have_its_cells():
    """Where the time goes: every row is of the benches that the text above it names, and each of
    these has a row.
    """
    benches = named_benches(DELTA, "tokens", "heads", "launches", "fused", "unfused")
    columns = TIMES[0][3]
    used = {
        next(
            cell.bench.name
            for cell in cell_of("gdn", SHAPES[row["heads"]], row["tokens"])
            if cell.bench.name in benches and microseconds(cell, row, columns)
        )
        for row in table_with(DELTA, "unfused", "heads", "over fla")
    }
    assert used == benches == {"gdn", "gdn-8k"}


def test_the_times_of_ssd():
    columns = {"fused": "fused", "`mamba_ssm`": "mamba_ssm"}
    for row in table_with("kernels.md", "share of the floor"):
        rounded = {head: number(row[head]).replace(",", "") for head in columns}
        (cell,) = [
            cell
            for cell in cell_of("ssd", "mamba2-2.7b", row["tokens, mamba2-2.7b"])
            if cell.bench.name == "ssd"
        ]
        for head, name in columns.items():
            assert float(rounded[head]) == float(f"{device_us(cell, name):.3g}"), (row, head)
        case = cell.fastest("fused exact fp32")
        assert (
            row["share of the floor"] == f"{100 * case.floor_us / device_us(cell, 'fused'):.0f} %"
        ), row


def test_the_times_of_prefills():
    file = library = ""
    for row in table_with("whole-models.md", "Amdahl over unfused"):
        if link := re.search(r"\(\.\./(benchmarks/results/.*\.json)\)", row["model"]):
            file = Path(link[1]).stem
            library = row["over the library"].split("`")[1]
        us = prefill(file, int(row["tokens"].replace(",", "")))
        value, unit = row["fused"].split()
        assert float(value) == float(f"{us['fused'] / {'ms': 1e3, 's': 1e6}[unit]:.3g}"), row
        for head, name in (("over unfused", "unfused"), ("over the library", library)):
            assert number(row[head]) == shown(us[name] / us["fused"], "0.00"), (row, head)


# --- figures in sentences

FIGURE = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)(?: (?:to|and|or) (\d[\d,]*(?:\.\d+)?))?\s?(?:x\b(?! "
    r"\d)|times as|µs|ms\b|s\b|%)"
)
# definitions, limits, options, examples of a report, and what others state
OTHER = {
    "docs/benchmarking.md": "180 1 1.5",
    "docs/ci.md": "95",
    "docs/demo-model.md": "98",
    "docs/kernels.md": "0.85 1.6 2 1.3 3 1 95 11 1.5 0.4",
    "docs/large-models.md": "1 15",
    "docs/measuring.md": "99.7 12.4 3.52 3.51 0 0.8 1 2 1.5 3 0.5 4 1.2 95",
    "docs/reading-stalls.md": "1.1 15.7 20 2 25 0 2.2 84 22 4 5 3 1.04 13 0.90 26 6 7",
    "docs/reading-the-report.md": "1.03 95 100 20 64 100.000 99.999 0.001 92 99.7 99.9",
    "docs/whole-models.md": "10",
    "docs/your-own-kernel.md": "1 600",
}


def sentences(document: str) -> str:
    """Without code, tables and the tables of speeds between marks."""
    text = (ROOT / document).read_text()
    text = re.sub(r"<!-- bench-.*?:end -->|```.*?```|`[^`]*`", "", text, flags=re.S)
    return re.sub(r"^\|.*$", "", text, flags=re.M)


def figures(document: str) -> set[str]:
    return {one for pair in FIGURE.findall(sentences(document)) for one in pair if one}


def portable_ratios() -> list[float]:
    """Of the exact fused kernel, where it is the portable one, over `unfused`, in cells of sizes of
    GDN.
    """
    found = []
    for cell in cells():
        case = cell.fastest("fused exact")
        us = device_us(cell, "unfused")
        usual = cell.bench.name.startswith("gdn-sizes") and not cell.one.ways
        if usual and us and case and case.variant == "portable":
            found.append(us / device_us(cell, "fused"))
    return found


def call_us(cell: Cell, name: str) -> float:
    case = cell.fastest(f"{name} exact")
    return case.call_us[0] if case and case.call_us else 0.0


def floor_us(cell: Cell) -> float:
    case = cell.fastest("fused exact")
    return (case and case.floor_us) or 0.0


def result(file: str):
    return json.loads((RESULTS / file).read_text())


def run(file: str) -> Report:
    return load(RESULTS / file)[1]


def prefill(model: str, seqlen: int, origin: str = "bundled") -> dict[str, float]:
    """Microseconds of each implementation."""
    own = [case for case in run(f"h200-prefill/{model}.json").cases if case.seqlen == seqlen]
    return {
        case.implementation: case.call_us.value
        for case in own
        if task_of(case, Prefill).conv_and_norm == origin
    }


def capture_s(gpu: str) -> dict[str, float]:
    return {
        kind: run["capture_s"] for kind, run in result(f"placement-2-{gpu}.json")["runs"].items()
    }


def match_pct(name: str) -> float:
    """Mean match of relaxed outputs within 1e-3."""
    return fmean(
        case.tensor("out").vs_baseline.match_pct(1e-3)
        for case in run(f"{name}/report.json").of_calls
        if case.implementation == "fused" and intermediates_of(case.precision) == "relaxed"
    )


def held() -> dict[tuple[str, str], float]:
    """(document, figure as written) -> the number of the results that it rounds."""
    kernels, large, measuring = (
        f"docs/{name}.md" for name in ("kernels", "large-models", "measuring")
    )
    sizes = portable_ratios()
    long = prefill("mamba2-2.7b", 131_072)
    qwen = prefill("qwen3.5-9b", 131_072)
    whole = only_cell_of("ssd", "mamba2-2.7b", "1 x 131,072")
    short = only_cell_of("ssd-1k", "mamba2-2.7b", "1 x 1,024")
    layer = only_cell_of("gdn", "qwen3.5-9b", "1 x 131,072")
    h200 = capture_s("h200")
    return {
        ("README.md", "1.04"): qwen["fla"] / qwen["fused"],
        ("README.md", "1.20"): long["mamba_ssm"] / long["fused"],
        ("README.md", "1.69"): (brief := prefill("mamba2-2.7b", 1024))["mamba_ssm"]
        / brief["fused"],
        (kernels, "0.76"): floor_us(layer) / 1e3,
        (kernels, "1.05"): min(sizes),
        (kernels, "2.5"): max(sizes),
        (kernels, "0.65"): floor_us(whole) / 1e3,
        (kernels, "1.36"): device_us(whole, "fused") / 1e3,
        (kernels, "6.13"): device_us(whole, "mamba_ssm") / 1e3,
        (kernels, "22"): device_us(short, "fused"),
        (kernels, "76"): call_us(short, "fused"),
        (measuring, "92.6"): match_pct("h200-granite-4.0-h-1b-128k"),
        (measuring, "91.5"): match_pct("h200-mamba2-2.7b-128k"),
        (large, "4.9"): h200["one-gpu"],
        (large, "6.4"): h200["disk-offload"],
    }


def test_figures_in_sentences_are_numbers_of_the_results():
    wrong = {place: value for place, value in held().items() if place[1] != shown(value, place[1])}
    assert wrong == {}
    unsaid = [place for place in held() if place[1] not in figures(place[0])]
    assert unsaid == [], "a figure that was removed from a document is removed from `held`, too"


@pytest.mark.parametrize(
    "document", ["README.md", *sorted(f"docs/{file.name}" for file in DOCS.glob("*.md"))]
)
def test_no_figure_is_of_unknown_origin(document):
    log = "".join(file.read_text() for file in (ROOT / "benchmarks" / "log").glob("*.md"))
    log += (RESULTS / "README.md").read_text()
    known = {figure for place, figure in held() if place == document} | set(
        OTHER.get(document, "").split()
    )
    unknown = [
        one
        for one in figures(document) - known
        if not re.search(rf"(?<![\d.,]){re.escape(one)}(?![\d]|[.,]\d)", log)
    ]
    assert unknown == []


def test_the_figures_of_verdicts():
    compared = result("verdicts-h100.json")

    def counts(kind: str, verdict: str, clock: str = "device") -> list[int]:
        """Of SSD and of GDN."""
        return [
            sum(
                row["operator"] == operator and row[clock]["verdict"] == verdict
                for row in compared[kind]
            )
            for operator in ("ssd", "gdn")
        ]

    same, longer = (
        [sum(row["operator"] == operator for row in compared[kind]) for operator in ("ssd", "gdn")]
        for kind in ("same", "different")
    )
    for clock in ("device", "call"):
        assert counts("same", "no difference", clock) == same
    faster, by_call_time = (counts("different", "faster", clock) for clock in ("device", "call"))
    for file, phrase in (
        (
            RESULTS / "README.md",
            f"in {sum(same)} comparisons of a kernel with itself, {same[0]} of SSD and {same[1]} "
            "of GDN",
        ),
        (
            RESULTS / "README.md",
            f"in {faster[0]} of {longer[0]} comparisons (SSD) and {faster[1]} of {longer[1]} (GDN)",
        ),
        (RESULTS / "README.md", f"in {by_call_time[0]} and {by_call_time[1]} by call time"),
        (
            DOCS / "measuring.md",
            f"none of {sum(same)} comparisons of a kernel with itself was called different, "
            f"and {sum(faster)} of {sum(longer)} with",
        ),
    ):
        assert phrase in " ".join(file.read_text().split())


def test_the_figures_of_repeated_benches():
    cells = result("repeated-benches-h200.json")["cells"]

    def disjoint(clock: str, *operators: str) -> str:
        rows = [row for row in cells if row["clock"] == clock and row["operator"] in operators]
        return (
            f"{sum(row['disjoint_pairs'] for row in rows)} of {sum(row['pairs'] for row in rows)}"
        )

    assert disjoint("device", "ssd", "gdn").startswith("0 of ")
    said = f"{disjoint('call', 'ssd')} pairs of SSD and {disjoint('call', 'gdn')} of GDN"
    assert said in " ".join((RESULTS / "README.md").read_text().split())


def test_a_wrong_figure_is_found():
    row = table_with(DELTA, "unfused", "over fla")[0]
    (cell, *_) = cell_of("gdn", SHAPES[row["heads"]], row["tokens"])
    assert not microseconds(cell, row | {"fused": "40.5 µs"}, {"fused": "fused"})
    assert not over(cell, row | {"over fla": "2.4x"}, "over fla", ("fla",))
    assert FIGURE.findall("It is 1.3 to 2.1 times as fast, takes 5 µs, or 1 x 64K") == [
        ("1.3", "2.1"),
        ("5", ""),
    ]
