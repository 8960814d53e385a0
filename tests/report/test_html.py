"""The report as a page: complete, self-contained, and consistent with the cases."""

import re

import pytest
from cases import answers, bench, checkpoint, failed, in_calls, prefill, report
from report.pages import Page
from report.test_contents import steps

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Case
from ssdprof.core.stalls import KernelStalls, StallReport
from ssdprof.report import html, plots
from ssdprof.report.groups import Group, groups
from ssdprof.report.html import inline, sort_key

STALLS = StallReport(
    ssdprof_version="0.1.0",
    sources={"a.ncu-rep": "ab" * 32},
    gpu="NVIDIA H200",
    created="2026-01-02T03:04:05Z",
    kernels=(
        KernelStalls(
            kernel="_k",
            implementation="fused",
            duration_us=10.0,
            samples={"wait": 3, "barrier": 1},
            stages={"scores": {"wait": 3}, "state": {"barrier": 1}},
        ),
    ),
)


def broken(case: Case) -> Case:
    """Layer 0 passed; 9, 18 and 27 did not."""
    word = {9: "inaccurate", 18: "nonfinite", 27: "refused"}.get(case.layer.index)
    if case.implementation != "fused" or word is None:
        return case
    return failed(case, word).changed(reason=f"layer {case.layer.index} <is> & broken")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page, rendered once."""
    reports = {
        "lengths": report(seqlens=(1024, 8192, 131_072)),
        "cpu": report(gpu=False, model=checkpoint(random_weights=True)),
        "broken": report(change=broken, complete=False),
        "nothing": report(complete=False, cases=(), captured=()),
        "bench": bench(),
        "prefill": prefill(),
        "answers": answers(),
    }
    return {name: html.render(found) for name, found in reports.items()} | {
        "stalls": html.render(report(), STALLS)
    }


def test_a_page_is_whole_and_alone(pages: dict[str, str]):
    for name, text in pages.items():
        page = Page(text)
        # for the icon, which a browser would otherwise request
        assert page.asked == ["data:,"], name
        assert not page.unclosed, name
        assert len(page.ids) == len(set(page.ids)), name
        assert set(page.anchors) <= set(page.ids), name


def test_a_page_has_what_was_measured_and_text_stays_text(pages: dict[str, str]):
    """The goldens hold the tables and captions of whole pages."""
    words = {name: Page(text).words for name, text in pages.items()}
    assert "weights random" in words["cpu"]
    assert "ms of a prefill" in words["prefill"]
    assert "KL of the next token, nats" in words["answers"]
    assert "times as fast as the baseline" in words["bench"]
    assert html.unbroken("a < b `c < d`") == "a &lt; b <code>c &lt; d</code>"
    assert not any(absent in words["cpu"] for absent in ("Roofline", "times as fast"))
    assert "svg" not in Page(pages["nothing"]).tags
    assert "Nothing was compared." in words["nothing"]
    assert "layer 9 <is> & broken" in words["broken"]
    assert "<is>" not in pages["broken"]


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
        ("1.2 M", 1.2e6),
        ("+4.01e-3% [-0.02%, +0.03%]", 4.01e-3),
    ],
)
def test_a_cell_sorts_by_its_number_in_one_unit(text, key):
    assert float(sort_key(text)) == key


@pytest.mark.parametrize(
    "text", ["-", "", "faster", "exact, fp32", "(0, 131044, 79, 63)", "4 of 4", "NaN", "0-3, 9"]
)
def test_a_cell_without_a_number_has_no_key(text):
    assert sort_key(text) == ""


# --- pictures


def test_ids_of_a_picture_are_its_own_and_its_black_is_the_pages_text():
    drawing = plots.speedups(groups(report()))
    svg, numbers = drawing
    assert numbers.rows[0] == ("fused, exact, fp32", "2.00x [1.98, 2.02]")
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


def test_pictures_need_what_they_show():
    found = report()
    timed = groups(found)
    untimed = groups(report(gpu=False))
    assert plots.speedups(untimed) is None
    assert plots.roofline(found.changed(processes=()), timed) is None
    assert plots.roofline(found, untimed) is None

    def along(*errors: float | None) -> plots.Drawing | None:
        def change(case: Case) -> Case:
            return case.changed(
                accuracy=tuple(
                    one.changed(vs_oracle=one.vs_oracle.changed(along=errors))
                    for one in case.accuracy
                )
            )

        return plots.along_positions(groups(report(change=change))[0])

    assert along() is None
    _, numbers = along(None, 1e-3)
    assert numbers.rows[0][1] == "inf"


def test_chunks_and_decode_steps_are_no_lengths_of_a_prompt():
    """Their times are sums over calls, and their speedups have two baselines."""
    both: tuple[Group, ...] = groups(
        steps(report(layers=(0,), seqlens=(8,), precisions=(EXACT_FP32,)))
    )
    words = Page((plots.speedups(both) or [""])[0]).words
    assert "times as fast as the baseline, by device time" in words
    assert "decode steps after 8 tokens" in words
    assert "recurrent, exact, fp32" in words
    assert plots.along_positions(both[1]) is None
    (chunks,) = groups(in_calls(report(seqlens=(24,))))
    assert "position, tokens" in Page((plots.along_positions(chunks) or [""])[0]).words


def test_lines_that_coincide_are_one_labelled_line():
    group = groups(report())[0]
    words = Page((plots.along_positions(group) or [""])[0]).words
    assert "fused, exact, fp32, and 1 equal" in words
    assert "fused, relaxed, fp32, and 1 equal" in words
    assert "fp16" not in words
    assert "floor" in words


def test_the_x_axis_of_a_roofline_has_ticks():
    """More than one, although its ends are less than a power of ten apart."""
    drawing = plots.roofline(report(), groups(report()))
    ticks = re.findall(r'id="xtick_\d+".*?<text[^>]*>([^<]*)</text>', drawing[0], re.S)
    assert len([tick for tick in ticks if tick.strip()]) >= 2
