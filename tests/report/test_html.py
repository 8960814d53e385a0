"""The report as a page: complete, self-contained, and consistent with the records."""

from pathlib import Path

import pytest
from report.make import (
    ALL_PRECISIONS,
    RELAXED_FP16,
    failed,
    in_calls,
    make_checkpoint,
    make_report,
    with_scale,
    with_steps,
)
from report.pages import Page

from ssdprof import runs
from ssdprof.jobs import stall_files
from ssdprof.report import html
from ssdprof.report.groups import groups
from ssdprof.report.html.cells import sort_key, view
from ssdprof.report.html.heat import heat_map
from ssdprof.report.html.svg import inline
from ssdprof.report.origin import origin
from ssdprof.report.plots import run as plots
from ssdprof.report.tables import run, speed
from ssdprof.report.verdict import verdict_lines
from ssdprof.schema import EXACT_FP32

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TWO = (EXACT_FP32, RELAXED_FP16)


def broken(case):
    if case.implementation != "fused":
        return case
    status = {0: "passed", 9: "inaccurate", 18: "nonfinite", 27: "refused"}[case.layer.index]
    return case if status == "passed" else failed(case, status, f"layer {case.layer.index} <is> & broken")


def of_gdn(case):
    dims = case.dims.model_copy(update={"operator": "gdn", "chunk_size": 64, "words": "16 key heads x 128"})
    return case.model_copy(update={"dims": dims, "layer": case.layer.model_copy(update={"operator": "gdn"})})


REPORTS = {
    "gpu": lambda: make_report(),
    "lengths": lambda: make_report(seqlens=(1024, 8192, 131_072), precisions=ALL_PRECISIONS, change=with_scale),
    "gdn": lambda: make_report(change=of_gdn),
    "cpu": lambda: make_report(gpu=False),
    "one layer": lambda: make_report(layers=(9,), precisions=(EXACT_FP32,)),
    "broken": lambda: make_report(change=broken, state="partial"),
    "nothing": lambda: make_report(state="partial", cases=(), captured_layers=()),
}


@pytest.fixture(scope="module")
def rendered():
    """Renders every page once."""
    texts = {name: html.render(make()) for name, make in REPORTS.items()}
    for name in ("h200-granite-4.0-h-1b-128k", "h200-mamba2-2.7b-128k"):
        stalls = RESULTS / f"{name}-stalls" / "stalls.json"
        texts[name] = html.render(runs.read(RESULTS / name)[1], stall_files.load(stalls) if stalls.exists() else None)
    return texts


def test_no_line_of_the_summary_ends_within_a_number(rendered):
    assert 'within <span class="unbroken">1e-3</span>' in rendered["one layer"]


def test_a_page_is_whole_and_alone(rendered):
    for name, text in rendered.items():
        page = Page(text)
        assert page.asked == ["data:,"], name  # for the icon, which a browser would otherwise request
        assert not page.unclosed, name
        assert len(page.ids) == len(set(page.ids)), name
        assert set(page.anchors) <= set(page.ids), name


def test_the_verdict_comes_first_then_weights_gpu_and_time(rendered):
    words = Page(rendered["gpu"]).words
    order = (
        "PASSED: all",
        "weights from the hub, revision 0123456789ab",
        "GPU NVIDIA H200",
        "when 2026-01-02 03:04 UTC",
    )
    places = [words.index(one) for one in (*order, "faster than unfused", "Speed at 131,072")]
    assert places == sorted(places)
    assert "weights random" in Page(html.render(make_report(checkpoint=make_checkpoint(random_weights=True)))).words


def test_pictures_belong_to_what_was_recorded(rendered):
    captions = {
        "gpu": ("Speedup", "Roofline of the operator", "Largest error of each layer"),
        "lengths": ("Speedup", "Device time", "Error along the prompt, worst layer, 1,024 tokens"),
        "cpu": ("Largest error of each layer",),
        "broken": ("Speedup", "Largest error of each layer"),
        "h200-granite-4.0-h-1b-128k": ("Warp stalls", "fused: stages and stall reasons", "Roofline"),
    }
    for name, wanted in captions.items():
        words = Page(rendered[name]).words
        assert all(caption in words for caption in wanted), name
    profiled = "Profiled 2026-11-20 21:10 UTC: ssdprof stalls, granite-4.0-h-1b, model.layers.0.mamba"
    assert profiled in Page(rendered["h200-granite-4.0-h-1b-128k"]).words
    for absent in ("Speedup", "Roofline", "Error along the prompt"):
        assert absent not in Page(rendered["cpu"]).words
    assert "svg" not in Page(rendered["nothing"]).tags
    assert "Nothing was compared." in Page(rendered["nothing"]).words


def test_text_of_records_stays_text(rendered):
    assert "layer 9 <is> & broken" in Page(rendered["broken"]).words
    assert "<is>" not in rendered["broken"]


def test_all_tables_of_the_report_are_there(rendered):
    words = Page(rendered["gpu"]).words
    group = groups(make_report())[0]
    for table in (speed.total(group), speed.per_layer(group)):
        assert table.title in words
        for row in table.rows:
            assert all(cell in words for cell in row)


# --- tables


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("12.4 ms", 12400.0),
        ("187 µs", 187.0),
        ("2.10 s", 2.1e6),
        ("944 MiB", 944 * 2.0**20),
        ("3.54x [3.53, 3.54]", 3.54),
        ("93.707%", 93.707),
        ("<0.001%", 0.001),
        ("1.81e-3", 1.81e-3),
        ("131,072", 131072.0),
        ("-0.5", -0.5),
    ],
)
def test_a_cell_sorts_by_its_number_in_one_unit(text, key):
    assert float(sort_key(text)) == key


@pytest.mark.parametrize("text", ["-", "", "faster", "exact, fp32", "(0, 131044, 79, 63)", "4 of 4", "NaN", "0-3, 9"])
def test_a_cell_without_a_number_has_no_key(text):
    assert sort_key(text) == ""


def test_a_table_under_headings_keeps_its_order():
    from ssdprof.report.tables import accuracy

    group = groups(make_report())[0]
    assert not view(accuracy.match(group, "fused", "out")).sortable
    assert view(speed.total(group)).sortable
    assert not view(run.facts(make_report())).sortable  # no column of numbers


# --- heat map


def test_heat_is_the_error_and_hover_names_the_worst_head():
    group = groups(make_report(precisions=TWO, change=with_scale))[0]
    found = heat_map(group, "fused")
    assert [row.layer for row in found.rows] == ["0", "9", "18", "27"]
    assert found.columns == ("exact, fp32 states", "relaxed, fp16 states")
    errors = [
        case.accuracy[0].vs_oracle.rms_ratio
        for case in sorted(group.cases, key=lambda case: case.layer.index)
        if case.implementation == "fused"
    ]
    cells = [cell for row in found.rows for cell in row.cells]
    assert [float(cell.text) for cell in cells] == pytest.approx(errors, rel=5e-3)
    by_error = [cell.heat for _, cell in sorted(zip(errors, cells, strict=True), key=lambda pair: pair[0])]
    assert by_error == sorted(by_error)
    assert by_error[0] == 0
    assert cells[0].hover == (
        "layer 0, exact, fp32 states: worst head 79; largest error 0.031 of values up to 41.5 at (0, 131071, 79, 63)"
    )


def test_what_failed_is_marked_and_what_did_not_run_says_why():
    found = heat_map(groups(make_report(change=broken, precisions=(EXACT_FP32,)))[0], "fused")
    passed, inaccurate, nonfinite, refused = (row.cells[0] for row in found.rows)
    assert (passed.failed, inaccurate.failed, nonfinite.failed, refused.failed) == (False, True, True, False)
    assert (nonfinite.text, nonfinite.heat) == ("NaN", 1.0)
    assert (refused.text, refused.hover) == ("refused", "layer 27 <is> & broken")


def test_of_the_chunks_of_a_layer_the_worst_is_shown():
    """A failed chunk is not hidden by the first one."""
    report = in_calls(make_report(layers=(0, 9), seqlens=(8,), precisions=(EXACT_FP32,)), count=3)

    def change(case):
        if case.layer.index != 9 or case.call.number != 2:
            return case
        (out, *others) = case.accuracy
        worse = out.vs_oracle.model_copy(update={"rms_ratio": 0.5})
        return case.model_copy(update={"accuracy": (out.model_copy(update={"vs_oracle": worse}), *others)})

    (group,) = groups(report.model_copy(update={"cases": tuple(map(change, report.cases))}))
    cell = heat_map(group, "fused").rows[1].cells[0]
    assert cell.text == "0.5"
    assert "chunk 2 of 3 of 24 tokens" in cell.hover
    wrong = tuple(failed(case, "out of memory", "why") if case.call.number == 2 else case for case in report.cases)
    (group,) = groups(report.model_copy(update={"cases": wrong}))
    assert all(row.cells[0].failed for row in heat_map(group, "fused").rows)


def test_nothing_compared_has_no_heat_map():
    report = make_report(change=lambda case: failed(case, "refused", "no"))
    assert heat_map(groups(report)[0], "fused") is None


# --- pictures


def test_ids_of_a_picture_are_its_own_and_its_black_is_the_pages_text():
    svg = plots.speedups(groups(make_report()))
    first, second = (Page(inline(svg, prefix, "Speed & more")) for prefix in ("a-", "b-"))
    assert first.ids
    assert not set(first.ids) & set(second.ids)
    assert set(first.anchors) <= set(first.ids)
    text = inline(svg, "a-", "Speed & more")
    assert "#000000" not in text
    assert "currentColor" in text
    assert "<title>Speed &amp; more</title>" in text
    assert "fused, relaxed, fp16" in first.words  # as text, not as paths
    assert "http" not in text


def test_pictures_are_the_same_every_time():
    assert html.render(make_report(change=with_scale)) == html.render(make_report(change=with_scale))


def test_pictures_need_what_they_show():
    timed, untimed = groups(make_report()), groups(make_report(gpu=False))
    assert plots.speedups(untimed) is None
    assert plots.device_times(timed) is None  # a single length
    assert plots.roofline(timed, None) is None
    assert plots.roofline(untimed, make_report().ceilings) is None
    assert plots.along_positions(timed[0]) is None
    assert plots.along_positions(groups(make_report(change=with_scale))[0])


def test_chunks_and_decode_steps_are_no_lengths_of_a_prompt():
    """Their times are sums over calls, and their speedups have two baselines."""
    report = with_steps(make_report(layers=(0,), seqlens=(8,), precisions=(EXACT_FP32,), change=with_scale))
    prompt, steps = groups(report)
    svg = plots.speedups((prompt, steps))
    words = Page(svg).words
    assert "times as fast as the baseline, by device time" in words
    assert "recurrent, exact, fp32, decode steps after 8 tokens" in words
    assert plots.device_times((prompt, steps)) is None
    assert plots.largest_errors(steps) is None
    assert plots.along_positions(steps) is None
    (chunks,) = groups(in_calls(make_report(seqlens=(8,), change=with_scale)))
    assert "position in the chunk, tokens" in Page(plots.along_positions(chunks)).words


@pytest.mark.parametrize(
    "folder", sorted(file.parent for file in RESULTS.glob("*/report.json")), ids=lambda one: one.name
)
def test_the_pages_of_recorded_runs_are_of_their_runs(folder):
    record = folder.with_name(f"{folder.name}-stalls") / "stalls.json"
    _, report = runs.read(folder)
    page = Page(html.render(report, stall_files.load(record) if record.is_file() else None))
    assert page.asked == ["data:,"]
    for words in (*verdict_lines(report), *(value for _, value in origin(report)), *report.notes):
        assert " ".join(words.split()) in page.words
