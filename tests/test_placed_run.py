"""`run` with weights that do not all fit, through the command line and without a GPU."""

import json

import pytest
from command_line import Answer, passing

from ssdprof.core.outcome import Outcome
from ssdprof.jobs import limits
from ssdprof.jobs.options import ServedModelOptions
from ssdprof.jobs.plan import Chooser
from ssdprof.jobs.target import find
from ssdprof.report import html
from ssdprof.store import reports

PLAIN = "run demo --seq 24 --dtypes exact --states fp32"


@pytest.fixture(autouse=True)
def little_memory(in_empty_folder: None, monkeypatch):
    """An empty folder, and memory for the computation and 60 % of the demo's weights."""
    request = ServedModelOptions(model="demo", seqlens=(24,))
    target = find(request)
    free = Chooser(target).least_bytes_beside_weights() + int(0.6 * target.weight_bytes)
    monkeypatch.setattr(limits, "free_bytes", lambda: free)


def test_a_run_says_where_the_weights_are_and_what_that_costs():
    planned = passing(f"{PLAIN} --dry-run")
    for words in (
        "disk-offload:",
        "in main memory",
        "on the disk",
        "is read once, in",
        "GB/s",
        "peak on cpu",
    ):
        assert words in planned.shown
    answer = passing(f"{PLAIN} --out a")
    assert "on the disk; a layer of" in answer.err
    _, report = reports.load("a")
    assert Outcome(report).passed
    assert (report.placement.kind, report.placement.device) == ("disk-offload", "cpu")
    assert report.placement.bytes_per_s is not None
    streamed = report.placement.allocated["disk"].layers
    assert any(f"layer by layer ({streamed} from the disk)" in note for note in report.remarks)
    assert "layer by layer" in html.render(report)
    planned = json.loads(Answer(f"{PLAIN} --dry-run --json").out)
    assert planned["placement"]["kind"] == "disk-offload"
