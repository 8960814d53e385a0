"""The page in a real browser: no console messages, no network requests, nothing wider than a telephone.

Skipped without Chromium; tests/report/test_html.py reads the same pages with a parser.
"""

import json
import re
import shutil
import subprocess

import pytest
from report.make import ALL_PRECISIONS, make_report, with_scale
from report.test_html import RESULTS, broken

from ssdprof import runs
from ssdprof.jobs import stall_files
from ssdprof.report import html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


def recorded():
    name = "h200-granite-4.0-h-1b-128k"
    stalls = stall_files.load(RESULTS / f"{name}-stalls" / "stalls.json")
    return html.render(runs.read(RESULTS / name)[1], stalls)


PAGES = {
    "recorded": recorded,
    "lengths": lambda: html.render(
        make_report(seqlens=(1024, 131_072), precisions=ALL_PRECISIONS, change=with_scale, layers=range(0, 36, 3))
    ),
    "broken": lambda: html.render(make_report(change=broken, state="partial")),
    "cpu": lambda: html.render(make_report(gpu=False)),
}


class Visit:
    """dom: after the page's scripts ran.  console: lines of errors.  asked: network addresses that it requested."""

    def __init__(self, folder, text, script=""):
        page, log = folder / "page.html", folder / "net.json"
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--dump-dom",
            f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", page.as_uri(),
        ]  # fmt: skip
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


WIDER = """
  document.documentElement.style.width = "400px";  // the least window of a headless Chromium is 500 pixels wide
  const wide = [...document.body.querySelectorAll("*")].filter(
    (one) => one.getBoundingClientRect().right > 400 && !one.parentElement.closest(".scroll"));
  document.body.dataset.wider = wide.map((one) => one.outerHTML.slice(0, 60)).join(" ") || "nothing";
"""


@pytest.mark.parametrize(
    "name", ["recorded", "broken", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lengths", "cpu"))]
)
def test_a_page_opens_quietly_and_is_no_wider_than_a_telephone(name, tmp_path):
    visit = Visit(tmp_path, PAGES[name](), WIDER)
    assert visit.console == []
    assert visit.asked == set()
    assert re.search(r'data-wider="([^"]*)"', visit.dom)[1] == "nothing"
    assert "</footer>" in visit.dom


def test_a_click_sorts_by_number_and_a_second_one_the_other_way(tmp_path):
    script = """
      const tables = [...document.querySelectorAll("table.sortable")];
      const table = tables.find((one) => one.textContent.includes("device time"));
      const button = [...table.querySelectorAll("button")].find((one) => one.textContent === "device time");
      const column = button.closest("th").cellIndex;
      const read = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent).join("|");
      button.click();
      document.body.dataset.up = read();
      button.click();
      document.body.dataset.down = read();
    """
    visit = Visit(tmp_path, html.render(make_report(seqlens=(256,), layers=(9,))), script)
    assert visit.console == []
    up, down = (re.search(rf'data-{way}="([^"]*)"', visit.dom)[1].split("|") for way in ("up", "down"))
    microseconds = [float(text.split()[0]) * {"µs": 1, "ms": 1000}[text.split()[1]] for text in up]
    assert len(set(up)) > 2
    assert microseconds == sorted(microseconds)
    assert down[0] == up[-1]


def test_a_link_to_a_folded_section_opens_it(tmp_path):
    text = html.render(make_report())
    visit = Visit(tmp_path, text, 'location.hash = "kernels-as-they-were-launched"; openTarget();')
    assert re.search(r'<details id="kernels-as-they-were-launched" open', visit.dom)
    assert '<details id="kernels-as-they-were-launched">' in text


def test_the_browser_would_say_what_is_wrong(tmp_path):
    """The checks above detect a page that breaks these rules."""
    bad = "<!DOCTYPE html><body><img src='http://127.0.0.1:9/x.png'><script>nothing.there</script></body>"
    visit = Visit(tmp_path, bad)
    assert any("nothing is not defined" in line for line in visit.console)
    assert visit.asked == {"http://127.0.0.1:9/x.png"}
