"""The document about stalls: shares add up, stages have words, nothing is invented."""

import re
from xml.etree import ElementTree

import pytest
from report.shown import printed
from stalls import synthetic

from ssdprof.core.stalls import StallReport
from ssdprof.jobs import documents
from ssdprof.operators.operator import AHEAD
from ssdprof.operators.ssd import STAGES
from ssdprof.report import plots, stalls, terminal
from ssdprof.report.stalls import Share, by_stage, side_by_side
from ssdprof.report.stalls import kernel_groups as groups
from ssdprof.report.table import Table
from ssdprof.stalls.attribute import IDLE_WARPS
from ssdprof.stalls.facts import ADVICE, analyse, stalls_of
from ssdprof.stalls.read import Point, RawKernel

PRODUCTS = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
FLOPS = {
    "dram__bytes_read.sum": 1e6, "dram__bytes_write.sum": 1e6, PRODUCTS: 4e8,
    f"{PRODUCTS}.pct_of_peak_sustained_elapsed": 20.0,
    f"{PRODUCTS}.peak_sustained_elapsed.per_second": 2e15,
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": 40.0,
    "dram__bytes.sum.peak_sustained": 1504.0, "dram__cycles_elapsed.avg.per_second": 3.2e9,
}  # fmt: skip


def kernel(name: str, us: float, *points: Point) -> RawKernel:
    source = synthetic.SOURCE.replace("_kernel", name)
    samples = sum(sum(point.samples.values()) for point in points)
    metrics = FLOPS | {"gpu__time_duration.sum": us * 1e3, "smsp__pcsamp_sample_count": samples}
    return synthetic.kernel(
        points=points, function=name, metrics=metrics, sources={synthetic.FILE: source}
    )


@pytest.fixture
def both() -> StallReport:
    """Two kernels of one implementation, 30 and 10 us, and one of the other."""
    scan = Point(0x10, synthetic.FILE, 9, "", {"wait": 10})
    load = Point(0x20, synthetic.FILE, 6, "", {"barrier": 30})
    unfused = kernel("_chunk_state_kernel", 30.0, scan), kernel("_bmm_chunk_kernel", 10.0, load)
    fused = synthetic.report(kernel("_fused_kernel", 5.0, scan, load), name="f.ncu-rep")
    return analyse([synthetic.report(*unfused, name="u.ncu-rep"), fused])


def of(**changes) -> StallReport:
    return analyse([synthetic.report(synthetic.kernel(**changes))])


def shown(report: StallReport) -> str:
    return printed(terminal.render(stalls.compose(report)), 140)


def there(report: StallReport, title: str) -> Table:
    blocks = (block for section in stalls.compose(report).sections for block in section.blocks)
    return next(block for block in blocks if isinstance(block, Table) and block.title == title)


def pct(share: Share) -> float:
    return sum(share.values())


def test_kernels_of_a_design_are_weighed_by_their_time(both: StallReport):
    unfused, fused = groups(both)
    assert (unfused.name, unfused.duration_us, unfused.us(75.0)) == ("unfused", 40.0, 30.0)
    assert unfused.stages == {"chunk_scan.current": {"wait": 75.0}, "loads": {"barrier": 25.0}}
    assert fused.stages == {"loads": {"barrier": 75.0}, "chunk_scan.current": {"wait": 25.0}}
    table = side_by_side({"unfused": unfused, "fused": fused})
    assert {row[0]: row[1:] for row in table.rows} == {
        "loads": ("10.0 µs", "25.0%", "3.75 µs", "75.0%"),
        "chunk_scan": ("30.0 µs", "75.0%", "1.25 µs", "25.0%"),
        "all": ("40.0 µs", "100.0%", "5.00 µs", "100.0%"),
    }
    assert table.rows[-1][0] == "all"


def test_idle_warps_are_kept_apart_and_without_durations_samples_weigh():
    for report, time in ((of(), "2.00 µs"), (of(metrics={}), "-")):
        (group,) = groups(report)
        assert group.idle == {"ahead": 11.0, "idle warps": 25.0}
        assert not set(group.stages) & {IDLE_WARPS, AHEAD}
        assert pct(group.all) == pytest.approx(100.0)
        table = by_stage(group)
        assert "idle warps 25.0%" in table.note
        assert not any("idle" in row[0] for row in table.rows)
        assert table.rows[-1][:3] == ("all", "100.0%", time)


def test_what_was_not_collected_is_said(both: StallReport):
    table = there(both, "Kernels")
    assert "Not collected: " in table.note
    assert "l2_hit_pct" in table.note
    assert table.rows[0][table.headers.index("L2\nhits")] == "-"
    assert "not checked" in shown(both)


def test_failed_checks_are_caveats_and_what_holds_is_one_row_that_names_it_all():
    report = of(metrics=synthetic.METRICS | {"smsp__pcsamp_sample_count": 201})
    assert any("200 of 201" in caveat for caveat in stalls.compose(report).caveats)
    rows = there(report, "Self-checks").rows
    assert [row[1] for row in rows if row[2] == "NO"] == ["reasons add up to the samples"]
    (row,) = [row for row in there(of(), "Self-checks").rows if row[0] == "_kernel"]
    assert stalls_of(synthetic.kernel()).checks.keys() == set(row[1].split("; "))
    assert row[2] == "ok"
    assert row[3].startswith("200 samples, 12.0% of them on lines without a stage")
    bare = there(of(metrics={}, totals={}, points=()), "Self-checks")
    assert [row[2:] for row in bare.rows if row[0] == "_kernel"] == [
        ("not checked", "not collected")
    ]


def test_every_stage_part_and_reason_has_words():
    assert {stage for stage in STAGES.order if "." in stage} <= set(STAGES.words)
    assert set(ADVICE) <= set(stalls.REASONS)


def test_averages_of_kernels_stand_side_by_side():
    name = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    two = {name.format("wait"): 3.0, name.format("gmma"): 1.0}
    one = {name.format("barrier"): 2.0}
    pages = [
        synthetic.kernel(function=f, metrics=of, totals={}, points=())
        for f, of in (("_a", two), ("_b", one))
    ]
    table = there(analyse([synthetic.report(*pages)]), "Stall reasons, without samples")
    assert [row[:-1] for row in table.rows] == [
        ("wait", "75.0%", "0.0%"),
        ("warpgroup_arrive", "25.0%", "0.0%"),
        ("barrier", "0.0%", "100.0%"),
    ]
    assert "without samples" not in shown(of())


# --- pictures


def test_pictures_are_svg_the_same_every_time_and_a_reason_has_one_colour_in_all(both: StallReport):
    """`barrier` is the smaller reason in the unfused kernels and the larger reason in the fused
    kernel.
    """
    pictures = documents.pictures(both)
    assert set(pictures) == {"unfused", "fused", "roofline"}
    assert pictures == documents.pictures(both)
    for _, svg in pictures.values():
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert "dc:date" not in svg
    assert "chunk_scan: current chunk" in pictures["unfused"][1]
    for name in (">chunk_state_kernel: ", ">bmm_chunk_kernel: ", ">fused_kernel: "):
        assert name in pictures["roofline"][1]
    legends = []
    for name in ("unfused", "fused"):
        svg = pictures[name][1]
        legends.append(
            re.findall(
                r"<g id=\"patch_\d+\">\s*<path[^>]*fill: (#\w+)[^>]*>\s*</g>\s*<g id=\"text", svg
            )
        )
        assert re.findall(r">(wait|barrier)<", svg) == ["barrier", "wait"]
    assert legends[0] == legends[1]
    assert len(legends[0]) == 2


def test_a_bar_is_as_long_as_its_stage_and_more_reasons_than_colours_share_one():
    bars = {"a": {"wait": 30.0, "barrier": 10.0}, "b": {"wait": 60.0}}
    svg, numbers = plots.stacked(bars, ["wait", "barrier"], "{:.1f}%".format, "x")
    assert numbers.rows == (("a", "30.0%", "10.0%"), ("b", "60.0%", "0.0%"))
    assert re.findall(r">\s*(\d+\.\d)%<", svg) == ["60.0", "40.0"]
    reasons = [f"reason{i}" for i in range(12)]
    bars = {"a": {reason: 10.0 - i / 10 for i, reason in enumerate(reasons)}}
    svg, _ = plots.stacked(bars, reasons, "{:.1f}%".format, "x")
    assert "reason0" in svg
    assert "reason11" not in svg
    assert ">other<" in svg


def test_a_kernel_without_arithmetic_or_that_only_idled_breaks_nothing():
    assert plots.stall_roofline(of()) is None
    report = of(points=(Point(0x110, synthetic.FILE, 14, "BAR.SYNC", {"barrier": 50}),))
    (group,) = groups(report)
    assert not group.is_sampled
    assert "stages and stall reasons" not in shown(report)
