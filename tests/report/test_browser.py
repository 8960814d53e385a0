"""The page in a real browser: no console messages, no network requests, nothing wider than a
telephone.

Skipped without Chromium; tests/report/test_html.py reads the same pages with a parser.
"""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from cases import answers, bench, cell, prefill, report
from report.test_html import STALLS, broken

from ssdprof.core import pairs
from ssdprof.core.stalls import StallReport
from ssdprof.report import comparison, html, stalls

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HEADLESS = (CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


KERNELS = StallReport.model_validate_json(
    Path("benchmarks/results/h200-qwen3.5-9b-128k-stalls/stalls.json").read_text()
)
PAGES = {
    "stalls": lambda: html.render(report(), STALLS),
    "lengths": lambda: html.render(report(seqlens=(1024, 131_072), layers=range(0, 36, 3))),
    "broken": lambda: html.render(report(change=broken, complete=False)),
    "cpu": lambda: html.render(report(gpu=False)),
    "bench": lambda: html.render(bench(*cell())),
    "prefill": lambda: html.render(prefill()),
    "answers": lambda: html.render(answers()),
    "compare": lambda: html.of_document(
        comparison.compose(
            pairs.compare(("a", report()), ("b", report()), smallest_difference=0.01),
            all_cases=True,
        )
    ),
    "kernels": lambda: html.of_document(stalls.compose(KERNELS), KERNELS),
    "stalls alone": lambda: html.of_document(stalls.compose(STALLS), STALLS),
}


class Visit:
    """dom: after the page's scripts ran.  console: lines of errors.  asked: network addresses that
    it requested.
    """

    def __init__(self, folder, text, script=""):
        page = folder / "page.html"
        log = folder / "net.json"
        page.write_text(
            text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8"
        )
        command = [
            *HEADLESS,
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-component-update",
            "--enable-logging=stderr",
            "--dump-dom",
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}",
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        self.dom = done.stdout
        self.console = re.findall(r"CONSOLE[^\n]*", done.stderr)
        self.asked = _asked(log)


def _asked(log):
    """Network addresses in the net log that the page requested, not the browser."""
    found = set()
    for event in json.loads(log.read_text())["events"]:
        params = event.get("params", {})
        if (
            params.get("url", "").startswith(("http", "ws"))
            and params.get("initiator", "not an origin") != "not an origin"
        ):
            found.add(params["url"])
    return found


WIDTHS = (360, 900, 1600)
MEASURE = """
  const root = document.documentElement, found = {};
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const width of [360, 900, 1600]) {
    root.style.width = width + "px";  // the least window of a headless Chromium is 500 pixels wide
    fit();
    const all = [...document.body.querySelectorAll("*")];
    // beside a first column that stays, the others may scroll, but not on a phone
    const stays = (one) => width > 600 && one.closest(".scroll")
      && getComputedStyle(one.closest(".scroll").querySelector("td")).position === "sticky";
    const wide = all.filter((one) => one.getBoundingClientRect().right > width + 1 && !stays(one));
    const scrolls = all.filter((one) => one.scrollWidth > one.clientWidth + 1
      && getComputedStyle(one).overflowX === "auto" && !stays(one));
    const shown = [...document.querySelectorAll("svg text")].filter(
      (text) => text.textContent.trim());
    const sizes = shown.map((text) => parseFloat(getComputedStyle(text).fontSize)
      * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b));
    found[width] = {
      beyond: [...wide, ...scrolls].map((one) => one.outerHTML.slice(0, 90)).slice(0, 3),
      text: Math.min(99, ...sizes),
      cards: document.querySelectorAll(".stacked").length,
    };
  }
  document.body.dataset.found = JSON.stringify(found);
"""


@pytest.mark.parametrize(
    "name",
    ["stalls", *(pytest.param(name, marks=pytest.mark.slow) for name in PAGES if name != "stalls")],
)
def test_a_page_opens_quietly_and_no_page_scrolls_sideways_or_is_too_small_to_read(name, tmp_path):
    visit = Visit(tmp_path, PAGES[name](), MEASURE)
    assert visit.console == []
    assert visit.asked == set()
    assert "</footer>" in visit.dom
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', visit.dom)[1]))
    for width in WIDTHS:
        assert found[str(width)]["beyond"] == [], width
        assert found[str(width)]["text"] >= 11, width
    assert [found[str(width)]["cards"] > 0 for width in WIDTHS[1:]] == [False, False]
    assert found["360"]["cards"] or name == "cpu"
    if folder := os.environ.get("SSDPROF_SCREENSHOTS"):  # CI keeps them as artefacts
        (tmp_path / "plain.html").write_text(PAGES[name]())
        screenshots(tmp_path / "plain.html", Path(folder), name)


WHOLE = """
  const paper = 703;  // pixels: A4 without its margins
  document.documentElement.style.width = `${paper}px`;
  fit();
  const cells = [...document.querySelectorAll("td")].filter((cell) => cell.checkVisibility());
  // Chromium shrinks a page that is at most half as wide again as the paper
  const lost = cells.filter((cell) => cell.getBoundingClientRect().right > 1.5 * paper);
  const cut = lost.map((cell) => cell.textContent);
  for (const cell of cells) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), range = new Range();
    while (walker.nextNode())
      for (const word of walker.currentNode.data.matchAll(/[A-Za-z]+/g)) {
        range.setStart(walker.currentNode, word.index);
        range.setEnd(walker.currentNode, word.index + word[0].length);
        if (range.getClientRects().length > 1) cut.push(word[0]);
      }
  }
  document.body.dataset.cut = cut.join("|");
"""


def test_on_paper_every_column_is_there_and_no_word_is_broken(tmp_path):
    printed = PAGES["kernels"]().replace("@media print", "@media all")
    visit = Visit(tmp_path, printed.replace("@media screen", "@media not all"), WHOLE)
    assert re.search(r'data-cut="([^"]*)"', visit.dom)[1] == ""


@pytest.mark.parametrize("name", [pytest.param("lengths", marks=pytest.mark.slow), "stalls"])
def test_a_printed_run_has_its_columns_on_at_most_five_pages(name, tmp_path):
    page = tmp_path / "page.html"
    printed = tmp_path / "page.pdf"
    page.write_text(PAGES[name]())
    command = [*HEADLESS, "--no-pdf-header-footer"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    subprocess.run(
        [*command, profile, f"--print-to-pdf={printed}", page.as_uri()], check=True, timeout=120
    )
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) <= 5


def screenshots(page, folder, name):
    """Of a page at each width, in a frame, because a window is at least 500 pixels wide."""
    folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        frame = page.with_name("frame.html")
        frame.write_text(
            '<body style="margin:0"><iframe src="plain.html" '
            f'style="width:{width}px;height:3000px;border:0">'
        )
        command = [*HEADLESS, f"--window-size={max(width, 500)},3000"]
        subprocess.run(
            [*command, f"--screenshot={folder / f'{name}-{width}.png'}", frame.as_uri()],
            check=True,
            timeout=120,
        )


def test_a_click_sorts_by_number_and_a_second_one_the_other_way(tmp_path):
    script = """
      const tables = [...document.querySelectorAll("table.sortable")];
      const table = tables.find((one) => one.textContent.includes("device time"));
      const button = [...table.querySelectorAll("button")].find(
        (one) => one.textContent === "device time");
      const column = button.closest("th").cellIndex;
      const read = () => [...table.tBodies[0].rows].map(
        (row) => row.cells[column].textContent).join("|");
      button.click();
      document.body.dataset.up = read();
      button.click();
      document.body.dataset.down = read();
    """
    visit = Visit(tmp_path, html.render(report(seqlens=(256,), layers=(9,))), script)
    assert visit.console == []
    up, down = (
        unescape(re.search(rf'data-{way}="([^"]*)"', visit.dom)[1]).split("|")
        for way in ("up", "down")
    )
    microseconds = [float(text.split()[0]) * {"µs": 1, "ms": 1000}[text.split()[1]] for text in up]
    assert len(set(up)) > 2
    assert microseconds == sorted(microseconds)
    assert down[0] == up[-1]


def test_a_link_to_a_folded_section_opens_it(tmp_path):
    text = html.render(report())
    visit = Visit(tmp_path, text, 'location.hash = "kernels-as-they-were-launched"; openTarget();')
    assert re.search(r'<details id="kernels-as-they-were-launched" open', visit.dom)
    assert '<details id="kernels-as-they-were-launched">' in text


def test_the_browser_would_say_what_is_wrong(tmp_path):
    """The checks above detect a page that breaks these rules."""
    bad = (
        "<!DOCTYPE html><body><img "
        "src='http://127.0.0.1:9/x.png'><script>nothing.there</script></body>"
    )
    visit = Visit(tmp_path, bad)
    assert any("nothing is not defined" in line for line in visit.console)
    assert visit.asked == {"http://127.0.0.1:9/x.png"}
