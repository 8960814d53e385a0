"""The document about stalls: shares add up, stages have words, nothing is invented."""

import re
from xml.etree import ElementTree

import pytest
from rich.console import Console
from stalls import synthetic
from stalls.test_facts import launched

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.stalls import StallReport
from ssdprof.jobs import stall_files
from ssdprof.operators.ssd import STAGES
from ssdprof.report import markdown, plots, stalls, terminal
from ssdprof.report.stalls import by_stage, side_by_side
from ssdprof.report.stalls import kernel_groups as groups
from ssdprof.report.table import Table
from ssdprof.stalls.attribute import IDLE_WARPS
from ssdprof.stalls.facts import analyse, stalls_of
from ssdprof.stalls.hints import ADVICE
from ssdprof.stalls.read import Point, RawKernel

PRODUCTS = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
FLOPS = {
    "dram__bytes_read.sum": 1e6, "dram__bytes_write.sum": 1e6, PRODUCTS: 4e8,
    f"{PRODUCTS}.pct_of_peak_sustained_elapsed": 20.0, f"{PRODUCTS}.peak_sustained_elapsed.per_second": 2e15,
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": 40.0,
    "dram__bytes.sum.peak_sustained": 1504.0, "dram__cycles_elapsed.avg.per_second": 3.2e9,
}  # fmt: skip


def kernel(name: str, us: float, *points: Point) -> RawKernel:
    source = synthetic.SOURCE.replace("_kernel", name)
    samples = sum(sum(point.samples.values()) for point in points)
    metrics = FLOPS | {"gpu__time_duration.sum": us * 1e3, "smsp__pcsamp_sample_count": samples}
    return synthetic.kernel(points=points, function=name, metrics=metrics, sources={synthetic.FILE: source})


@pytest.fixture
def both() -> StallReport:
    """Two kernels of one implementation, 30 and 10 us, and one of the other."""
    scan, load = Point(0x10, synthetic.FILE, 9, "", {"wait": 10}), Point(0x20, synthetic.FILE, 6, "", {"barrier": 30})
    unfused = kernel("_chunk_state_kernel", 30.0, scan), kernel("_bmm_chunk_kernel", 10.0, load)
    fused = synthetic.report(kernel("_fused_kernel", 5.0, scan, load), name="f.ncu-rep")
    return analyse([synthetic.report(*unfused, name="u.ncu-rep"), fused])


def shown(report: StallReport, width: int = 140) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(terminal.render(stalls.compose(report)))
    return captured.get()


def there(report: StallReport, title: str) -> Table:
    blocks = (block for section in stalls.compose(report).sections for block in section.blocks)
    return next(block for block in blocks if isinstance(block, Table) and block.title == title)


def test_kernels_of_a_design_are_weighed_by_their_time(both: StallReport) -> None:
    unfused, fused = groups(both)
    assert (unfused.name, unfused.duration_us) == ("unfused", 40.0)
    assert {name: share.pct for name, share in unfused.stages.items()} == {"chunk_scan.current": 75.0, "loads": 25.0}
    assert unfused.us(unfused.stages["chunk_scan.current"]) == 30.0
    assert {name: share.pct for name, share in fused.stages.items()} == {"loads": 75.0, "chunk_scan.current": 25.0}
    assert all(group.all().pct == pytest.approx(100.0) for group in groups(both))


def test_idle_warps_are_kept_apart() -> None:
    (group,) = groups(analyse([synthetic.report(synthetic.kernel())]))
    assert group.idle == {"ahead": 11.0, "idle warps": 25.0}
    assert not set(group.stages) & {IDLE_WARPS, *STAGES.ahead}
    assert group.all().pct == pytest.approx(100.0)
    table = by_stage(group)
    assert table is not None
    assert "idle warps 25.0%" in table.note
    assert not any("idle" in row[0] for row in table.rows)


def test_without_durations_samples_weigh() -> None:
    report = analyse([synthetic.report(synthetic.kernel(metrics={}))])
    (group,) = groups(report)
    assert group.duration_us is None
    assert group.all().pct == pytest.approx(100.0)
    table = by_stage(group)
    assert table is not None
    assert {row[2] for row in table.rows} == {"-"}


def test_stages_stand_side_by_side(both: StallReport) -> None:
    table = side_by_side(groups(both))
    assert table is not None
    assert dict((row[0], row[1:]) for row in table.rows) == {
        "loads": ("10.0 µs", "25.0%", "3.75 µs", "75.0%"),
        "chunk_scan": ("30.0 µs", "75.0%", "1.25 µs", "25.0%"),
        "all": ("40.0 µs", "100.0%", "5.00 µs", "100.0%"),
    }


def test_the_summary_speaks_of_every_stage(both: StallReport) -> None:
    said = set(map(" ".join, stalls.compose(both).summary))
    assert "unfused, chunk_scan: 75%: 75% current chunk (wait 75%)." in said
    assert "fused, loads: 75% (barrier 75%)." in said


def test_a_report_can_be_read_on_a_terminal_and_in_markdown(both: StallReport) -> None:
    for text in (shown(both), markdown.render(stalls.compose(both))):
        assert "unfused: 40.0 µs in 2 kernels." in text
        assert "return exp2(x)" in text.replace("\\", "")
        assert "Self-checks" in text
    assert "not checked" in shown(both)


def test_what_was_not_collected_is_said(both: StallReport) -> None:
    table = there(both, "Kernels")
    assert "Not collected: " in table.note
    assert "l2_hit_pct" in table.note
    assert table.rows[0][table.headers.index("L2\nhits")] == "-"


def test_failed_checks_are_caveats_and_the_table_shows_them() -> None:
    metrics = synthetic.METRICS | {"smsp__pcsamp_sample_count": 201}
    report = analyse([synthetic.report(synthetic.kernel(metrics=metrics))])
    document, table = stalls.compose(report), there(report, "Self-checks")
    assert any("200 of 201" in caveat for caveat in document.caveats)
    assert [row[1] for row in table.rows if row[2] == "NO"] == ["reasons add up to the samples"]


def test_what_holds_of_a_kernel_is_one_row_that_names_it_all() -> None:
    table = there(analyse([synthetic.report(synthetic.kernel())]), "Self-checks")
    (row,) = [row for row in table.rows if row[0] == "_kernel"]
    assert {check.name for check in stalls_of(synthetic.kernel()).checks} == set(row[1].split("; "))
    assert row[2] == "ok"
    assert row[3].startswith("200 samples, 12.0% of them on lines without a stage")
    bare = there(analyse([synthetic.report(synthetic.kernel(metrics={}, totals={}, points=()))]), "Self-checks")
    assert [row[2:] for row in bare.rows if row[0] == "_kernel"] == [("not checked", "not collected")]


def test_a_report_from_elsewhere_names_its_files_and_no_machine(both: StallReport) -> None:
    rows = dict(there(both, "What was profiled").rows)
    assert set(rows) == {"versions", "reports"}
    assert rows["reports"].startswith("u.ncu-rep (sha256 000000000000...), f.ncu-rep (")


def test_a_missing_profile_shows_what_triton_knows() -> None:
    report = analyse([], launched("_fused_kernel"), missing="ncu is not on this machine.", precision=EXACT_FP32)
    text = shown(report)
    assert "No stalls: ncu is not on this machine." in text
    assert "_fused_kernel" in text
    assert "Resources of the kernels, from Triton" in text


def test_every_stage_part_and_reason_has_words() -> None:
    assert {stage for stage in STAGES.order if "." in stage} <= set(STAGES.words)
    assert set(ADVICE) <= set(stalls.REASONS)


def test_averages_of_kernels_stand_side_by_side() -> None:
    name = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    two, one = {name.format("wait"): 3.0, name.format("gmma"): 1.0}, {name.format("barrier"): 2.0}
    pages = [synthetic.kernel(function=f, metrics=of, totals={}, points=()) for f, of in (("_a", two), ("_b", one))]
    table = there(analyse([synthetic.report(*pages)]), "Stall reasons, without samples")
    assert [row[:-1] for row in table.rows] == [
        ("wait", "75.0%", "0.0%"), ("warpgroup_arrive", "25.0%", "0.0%"), ("barrier", "0.0%", "100.0%"),
    ]  # fmt: skip
    assert "without samples" not in shown(analyse([synthetic.report(synthetic.kernel())]))


# --- pictures


def test_pictures_are_svg_and_the_same_every_time(both: StallReport) -> None:
    pictures = stall_files.pictures(both)
    assert set(pictures) == {"unfused", "fused", "roofline"}
    assert pictures == stall_files.pictures(both)
    for _, svg in pictures.values():
        root = ElementTree.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "dc:date" not in svg
    assert "chunk_scan: current chunk" in pictures["unfused"][1]
    for name in (">chunk_state_kernel: ", ">bmm_chunk_kernel: ", ">fused_kernel: "):
        assert name in pictures["roofline"][1]


def test_a_bar_is_as_long_as_its_stage() -> None:
    svg = plots.stages({"a": {"wait": 30.0, "barrier": 10.0}, "b": {"wait": 60.0}}, "t", ["wait", "barrier"])
    assert re.findall(r">(\d+\.\d) %<", svg) == ["60.0", "40.0"]


def test_a_reason_has_one_colour_in_all_pictures(both: StallReport) -> None:
    """`barrier` is the smaller reason in the unfused kernels and the larger reason in the fused kernel."""
    legends = []
    for name in ("unfused", "fused"):
        svg = stall_files.pictures(both)[name][1]
        legends.append(re.findall(r"<g id=\"patch_\d+\">\s*<path[^>]*fill: (#\w+)[^>]*>\s*</g>\s*<g id=\"text", svg))
        assert re.findall(r">(wait|barrier)<", svg) == ["barrier", "wait"]
    assert legends[0] == legends[1]
    assert len(legends[0]) == 2


def test_more_reasons_than_colours_share_one() -> None:
    reasons = [f"reason{i}" for i in range(12)]
    svg = plots.stages({"a": {reason: 10.0 - i / 10 for i, reason in enumerate(reasons)}}, "t", reasons)
    assert "reason0" in svg
    assert "reason11" not in svg
    assert ">other<" in svg


def test_no_roofline_without_arithmetic() -> None:
    assert plots.stall_roofline(analyse([synthetic.report(synthetic.kernel())])) is None


def test_a_kernel_that_only_idled_breaks_nothing() -> None:
    idle = (Point(0x110, synthetic.FILE, 14, "BAR.SYNC", {"barrier": 50}),)
    report = analyse([synthetic.report(synthetic.kernel(points=idle))])
    (group,) = groups(report)
    assert not group.is_sampled
    assert "stages and stall reasons" not in shown(report)
