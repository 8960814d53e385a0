"""Published comparisons: values of reports, verdicts, what is missing, pages, and the words of every document."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import reproduce
import small_gdn_cases
import typer
import within
from report.make import failed, make_report
from reproducing import judging, measuring, rendering, reports, seeds
from reproducing import published as documents
from reproducing.published import Claim, Published
from reproducing.result import Result, load, typed, understood
from reproducing.values import values

from ssdprof import cli
from ssdprof.bench.schema import BenchCase, BenchReport, ChunkTrial, LeftOut, dump
from ssdprof.bench.schema import load as load_bench
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError
from ssdprof.schema import Asked, Interval, LayerRef, Participant, PrecisionRecord, Spread
from ssdprof.schema.prefill import CallTime, PartTime, Prefill, PrefillCase, PrefillLength, PrefillReport
from ssdprof.schema.stalls import KernelStalls, Resources, Stage, StallReport, Throughput

RECORDED = Path(reproduce.HERE) / "results" / "bench-ssd-h200-published-mamba2-2.7b.json"
H200 = "NVIDIA H200"
DOCUMENT: dict[str, Any] = {
    "title": "A test",
    "source": "A source.",
    "gpu": "H200",
    "choices": ["One."],
    "measure": [{"name": "kernels", "reads": "bench", "commands": ["ssdprof bench ssd --out {out} --budget {budget}"]}],
    "value": [
        {"name": "speedup", "measure": "kernels", "kind": "time", "of": "fused", "over": "published relaxed fp16"},
        {"name": "least", "measure": "kernels", "kind": "time", "of": "fused", "over": "unfused", "pick": "least"},
    ],
    "numbers": [{"words": "Numbers", "value": "speedup", "quoted": {"1 x 1,024": 1.0, "1 x 999": 2.0}}],
    "figure": {"values": ["speedup"], "axis": "times as fast"},
    "claim": [
        {"words": "It is faster", "quoted": "1x", "holds": "least > 0", "note": "It says so."},
        {"words": "Another", "quoted": "2x", "why": "nobody can"},
    ],
}


def document(**changes: Any) -> Published:
    return Published.model_validate(DOCUMENT | changes)


@pytest.fixture
def recorded() -> BenchReport:
    return load_bench(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, recorded: BenchReport) -> dict[str, BenchReport]:
    """A machine that measures "kernels": the report that its command writes; with an empty one, no GPU."""
    machine = {"kernels": recorded}

    def run(words: list[str], _seconds: float) -> int:
        if "kernels" not in machine:
            return ExitCode.MISSING_CAPABILITY
        Path(words[words.index("--out") + 1]).write_text(dump(machine["kernels"]), encoding="utf-8")
        return ExitCode.OK

    monkeypatch.setattr(measuring, "run_within", run)
    return machine


def means(folder: Path, *, seconds: float = 60, published: Path | None = None) -> measuring.Means:
    return measuring.Means(seconds=seconds, published=published, folder=folder, recorded={})


# --- verdicts


@pytest.mark.parametrize(
    ("holds", "verdict"),
    [
        ("a < 2.5", "inside"), ("a < 2", "outside"), ("a <= 2", "inside"), ("a <= 1.99", "outside"),
        ("a > 1.5", "inside"), ("a > 2", "outside"), ("a >= 2", "inside"), ("a >= 2.01", "outside"),
        ("a == 2", "inside"), ("a == 3", "outside"), ("a > b", "inside"), ("b > a", "outside"),
        ("a >= 1 and a <= 3", "inside"), ("a >= 1 and a <= 1.5", "outside"), 
        ("c[this and that, 1 x 4,096] > -1", "inside"),
        ("a > 1 and absent > 1", "not measured"), ("a > absent", "not measured"),
    ],
)  # fmt: skip
def test_every_kind_of_predicate(holds: str, verdict: str) -> None:
    found = {"a": 2.0, "b": 1.0, "c[this and that, 1 x 4,096]": 0.0}
    claim = {"words": "W", "quoted": "Q", "holds": holds}
    stated = document(runner="studies/x.py", measure=[], value=[], numbers=[], figure=None, claim=[claim])
    (one,) = judging.claims(stated, found, H200)
    assert one.verdict == verdict
    assert ("absent" in one.measured) == (verdict == "not measured")


def test_a_measured_number_has_its_unit_or_its_name() -> None:
    """A runner's values have units in their names."""
    one, *_ = judging.claims(document(), {"least": 2.0}, H200)
    assert one.measured == "2 x"
    claim = {"words": "W", "quoted": "Q", "holds": "least > 0 and speedup[a] > 0"}
    (both,) = judging.claims(document(claim=[claim]), {"least": 2.0, "speedup[a]": 3.0}, H200)
    assert both.measured == "least 2 x, speedup[a] 3 x"
    claim = {"words": "W", "quoted": "Q", "holds": "time_us > 0"}
    stated = document(runner="studies/x.py", measure=[], value=[], numbers=[], figure=None, claim=[claim])
    (own,) = judging.claims(stated, {"time_us": 2.5}, H200)
    assert own.measured == "time_us 2.5"


@pytest.mark.parametrize("holds", ["a", "a > ", "a >= 1 or a <= 2", "a >= 1, a <= 2", "a => 1", "1 < a"])
def test_what_is_no_predicate_is_refused(holds: str) -> None:
    with pytest.raises(ValueError, match="is not comparisons"):
        Claim(words="W", quoted="Q", holds=holds)


@pytest.mark.parametrize(
    ("gpu", "absolute", "verdict"),
    [
        (H200, False, "inside"),
        (H200, True, "inside"),
        ("NVIDIA H100 80GB HBM3", False, "inside (other GPU)"),
        ("NVIDIA H100 80GB HBM3", True, "other GPU"),
    ],
)
def test_a_time_of_another_gpu_says_nothing(gpu: str, absolute: bool, verdict: str) -> None:
    claim = {"words": "W", "quoted": "Q", "holds": "least > 0", "absolute": absolute}
    numbers = [{"words": "N", "value": "speedup", "quoted": {"k": 2.0}, "absolute": absolute}]
    stated, found = document(gpu="A100, H200", claim=[claim], numbers=numbers), {"least": 1.0, "speedup[k]": 2.1}
    assert [one.verdict for one in judging.claims(stated, found, gpu)] == [verdict]
    ((_, (number,)),) = judging.numbers(stated, found, gpu)
    assert number.verdict == verdict


@pytest.mark.parametrize(("value", "verdict"), [(2.2, "inside"), (1.8, "inside"), (2.21, "outside"), (1.79, "outside")])
def test_a_number_is_inside_within_its_percent(value: float, verdict: str) -> None:
    stated = document(numbers=[{"words": "N", "value": "speedup", "within_pct": 10.001, "quoted": {"k": 2.0, "l": 1}}])
    ((_, found),) = judging.numbers(stated, {"speedup[k]": value}, H200)
    assert [one.verdict for one in found] == [verdict, "not measured"]


# --- values


def value(kind: str, report: reports.Report, **fields: Any) -> dict[str, float]:
    one = {"name": "v", "measure": "kernels", "kind": kind, **fields}
    claim = {"words": "W", "quoted": "Q", "holds": "v > 0"}
    return values(document(value=[one], claim=[claim], numbers=[], figure=None), {"kernels": report})


def test_times_are_those_of_the_fastest_case(recorded: BenchReport) -> None:
    def least(cell: int, name: str, state: str = "") -> float:
        return min(
            case.timing.device_median_us
            for case in recorded.cells[cell].cases
            if case.implementation == name and case.timing and state in str(case.precision.state_dtype)
        )

    found = value("time", recorded, of="fused", over="published relaxed fp16")
    assert list(found) == [f"v[{cell.tokens}]" for cell in recorded.cells]
    first = recorded.cells[0].tokens
    assert found[f"v[{first}]"] == least(0, "published", "fp16") / least(0, "fused")
    assert value("time", recorded, of="fused", cells=[first]) == {"v": least(0, "fused")}
    assert value("time", recorded, of="fused", over="published relaxed fp16", pick="greatest") == {
        "v": max(found.values())
    }
    assert value("time", recorded, of="nobody", pick="least") == {}


def test_other_statistics_than_the_median_are_those_of_the_samples(recorded: BenchReport) -> None:
    def spread(case: BenchCase) -> BenchCase:
        low = 10.0 if case.implementation == "fused" else 30.0
        own = Spread(samples=20, min_us=low, p95_us=low + 5, max_us=low + 10)
        timing = case.timing and case.timing.model_copy(update={"call_spread": own})
        return case.model_copy(update={"timing": timing})

    cell = recorded.cells[0]
    cell = cell.model_copy(update={"cases": tuple(map(spread, cell.cases))})
    report = recorded.model_copy(update={"cells": (cell,)})
    fields = {"of": "fused", "over": "unfused", "clock": "call", "pick": "least"}
    for statistic, expected in (("min", 3.0), ("p95", 35 / 15), ("max", 2.0)):
        assert value("time", report, **fields, statistic=statistic) == {"v": pytest.approx(expected)}
    assert value("time", report, **fields | {"clock": "device"}, statistic="max") == {}  # as in older reports
    assert value("time", report, **fields) == value("time", recorded, **fields, cells=[cell.tokens])


def test_a_chunk_size_that_was_not_the_fastest_has_its_time(recorded: BenchReport) -> None:
    trials = (
        ChunkTrial(chunk_size=64, status="passed", device_us=0.5),
        ChunkTrial(chunk_size=128, status="passed", device_us=50.0),
        ChunkTrial(chunk_size=256, status="refused"),
    )
    cell = recorded.cells[0]
    case = next(one for one in cell.cases if one.implementation == "unfused").model_copy(
        update={"trials": trials, "chunk_size": 128}
    )
    report = recorded.model_copy(update={"cells": (cell.model_copy(update={"cases": (case,)}),)})
    assert case.timing is not None
    assert value("time", report, of="unfused exact @64", pick="least") == {"v": 0.5}
    for of in ("unfused", "unfused exact @128"):  # a trial's few replays are no time of the fastest
        assert value("time", report, of=of, pick="least") == {"v": case.timing.device_median_us}
    assert value("time", report, of="unfused @256", pick="least") == {}


def test_each_makes_a_value_of_every_combination() -> None:
    one = {"name": "v_{a}", "measure": "kernels", "kind": "match", "of": "fused {a} {b}", "tolerance": "{t}"}
    each = {"a": ["exact", "relaxed"], "b": ["fp32"], "t": ["0", "0.001"]}
    made = document(value=[*DOCUMENT["value"], one | {"each": each}]).value[2:]
    assert [(each.name, each.key, each.of) for each in made] == [
        ("v_exact", "fp32 0", "fused exact fp32"),
        ("v_exact", "fp32 0.001", "fused exact fp32"),
        ("v_relaxed", "fp32 0", "fused relaxed fp32"),
        ("v_relaxed", "fp32 0.001", "fused relaxed fp32"),
    ]


def stalled() -> StallReport:
    def stage(name: str, idle: bool = False, **samples: int) -> Stage:
        return Stage(name=name, samples=samples, idle=idle)

    stages = (
        stage("state_passing", barrier=10, wait=5),
        stage("state_passing.wait", long_scoreboard=5),
        stage("chunk_scan.current", long_scoreboard=30, barrier=50),
        stage("ahead", idle=True, barrier=900),
    )
    kernel = KernelStalls(
        kernel="k", implementation="fused", resources=Resources(occupancy_pct=25.0), stages=stages, lines=(),
        throughput=Throughput(duration_us=9.0, compute_pct=45.0), sample_count=1000, samples={},
    )  # fmt: skip
    return StallReport(ssdprof_version="0", sources={}, gpu=H200, kernels=(kernel,))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stages": ["state_passing"]}, 20.0),
        ({"stages": ["state_passing"], "without": ["state_passing.wait"]}, 15.0),
        ({"stages": ["chunk_scan"], "reasons": ["long_scoreboard"]}, 30.0),
        ({"reasons": ["barrier"]}, 60.0),
        ({"resource": "compute_pct"}, 45.0),
        ({"resource": "occupancy_pct"}, 25.0),
        ({"stages": ["ticket"]}, None),
        ({"of": "published"}, None),
    ],
)
def test_shares_of_stalls(fields: dict[str, Any], expected: float | None) -> None:
    found = value("stalls", stalled(), **({"of": "fused"} | fields))
    assert found == ({} if expected is None else {"v": expected})


def test_an_end_to_end_speedup_and_the_parts_of_a_prefill(recorded: BenchReport) -> None:
    def case(name: str, us: float, *parts: PartTime) -> PrefillCase:
        return PrefillCase(
            implementation=name, surroundings="bundled", status="passed", parts=parts,
            precision=PrecisionRecord(intermediates="exact", state_dtype="fp32"),
            call=CallTime(median_us=us, interval_us=Interval(low=us, high=us), recordings=1, samples=1),
        )  # fmt: skip

    parts = (PartTime(name="operator", gpu_us=20.0, launches=1), PartTime(name="rest", gpu_us=5.0, launches=1))
    length = PrefillLength(
        seqlen=1024, batch=1, segment_length=1024, operator_calls=64,
        cases=(case("unfused", 120.0), case("fused", 100.0, *parts)), layer=LayerRef(index=0, name="l", operator="ssd"),
    )  # fmt: skip
    prefill = Prefill.model_construct(lengths=(length,), left_out=())
    report = PrefillReport.model_construct(prefill=prefill, environment=recorded.environment)
    assert value("prefill", report, of="fused", over="unfused", seqlen=1024) == {"v": pytest.approx(20.0)}
    assert value("prefill", report, of="fused", over="unfused", seqlen=2048) == {}
    assert value("prefill", report, of="fused", over="mamba_ssm", seqlen=1024) == {}
    for part, expected in (("call", 0.1), ("operator", 0.02), ("idle", 75.0)):
        assert value("prefill", report, of="fused", part=part, seqlen=1024) == {"v": pytest.approx(expected)}
    assert value("prefill", report, of="unfused", part="call", seqlen=1024) == {"v": pytest.approx(0.12)}
    for part in ("operator", "idle"):  # not profiled
        assert value("prefill", report, of="unfused", part=part, seqlen=1024) == {}


# --- measuring


def test_a_result_is_written_and_rendered_again(
    tmp_path: Path, measured: dict[str, BenchReport], capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = LeftOut(cell="mamba2-2.7b, 1 x 9", reason="the budget of 5 s was spent")
    measured["kernels"] = measured["kernels"].model_copy(update={"left_out": (left_out,)})
    assert reproduce.reproduce("test", document(), budget=60, out=tmp_path) == ExitCode.OK
    page = (tmp_path / "test.md").read_text(encoding="utf-8")
    for words in (
        f"Quoted from H200; measured on {H200}.",
        "| It is faster |",
        "- It is faster: It says so.",
        "nobody can",
        "kernels: mamba2-2.7b, 1 x 9: the budget of 5 s was spent",
    ):
        assert words in page
    assert re.search(r"\| 1 x 999 +\| +\| 2 +\| not measured", page)
    assert "times as fast" in (tmp_path / "test.svg").read_text(encoding="utf-8")
    file = tmp_path / "test.json"
    assert reproduce.again("test", document(), file, check=True) == ExitCode.OK
    (tmp_path / "test.md").write_text("old", encoding="utf-8")
    assert reproduce.again("test", document(), file, check=True) == ExitCode.GATE_FAILED
    assert "test.md is not what its result says" in capsys.readouterr().err
    assert reproduce.again("test", document(), file, check=False) == ExitCode.OK
    assert (tmp_path / "test.md").read_text(encoding="utf-8") == page


def test_a_claim_that_does_not_hold_is_a_result(tmp_path: Path, measured: dict[str, BenchReport]) -> None:
    assert measured
    claim = {"words": "W", "quoted": "Q", "holds": "least > 1000"}
    assert reproduce.reproduce("test", document(claim=[claim]), budget=60, out=tmp_path) == ExitCode.OK
    assert json.loads((tmp_path / "test.json").read_text())["claims"][0]["verdict"] == "outside"


@pytest.mark.parametrize(("status", "code"), [("inaccurate", 1), ("nonfinite", 1), ("failed", 1), ("refused", 0)])
@pytest.mark.parametrize("implementation", ["fused", "published"])
def test_exit_code_1_is_for_wrong_outputs_of_ours(
    tmp_path: Path, measured: dict[str, BenchReport], status: str, code: int, implementation: str
) -> None:
    report = measured["kernels"]
    changed = {"status": status, "reason": "off by 7", "timing": None, "speedups": (), "over_exact": None}
    first = report.cells[0]
    cases = tuple(one.model_copy(update=changed if one.implementation == implementation else {}) for one in first.cases)
    cells = (first.model_copy(update={"cases": cases}), *report.cells[1:])
    measured["kernels"] = report.model_copy(update={"cells": cells, "peers": {"published": "1"}})
    expected = code if implementation == "fused" else ExitCode.OK
    assert reproduce.reproduce("test", document(), budget=60, out=tmp_path) == expected
    page = (tmp_path / "test.md").read_text(encoding="utf-8")
    assert ("## Wrong outputs" in page) == bool(expected)
    assert "off by 7" in page
    assert reproduce.again("test", document(), tmp_path / "test.json", check=False) == expected


@pytest.mark.parametrize("kind", ["library", "own"])
def test_a_library_that_fails_as_the_baseline_of_a_run_is_no_wrong_output(kind: Literal["library", "own"]) -> None:
    """The run fails by it, because nothing can be compared with it; this exit code is about our outputs."""
    report = make_report()
    first, second, *rest = report.cases
    theirs = failed(first, "failed", "not ours").model_copy(update={"implementation": "theirs"})
    other = Participant(name="theirs", kind=kind, source="1", precisions=(first.precision,))
    asked = Asked(implementations=(), precisions=(), layers=(), others=(other,))
    cases = (theirs, failed(second, "inaccurate", "off by 7"), *rest)
    report = report.model_copy(update={"cases": cases, "asked": asked, "baseline": "theirs"})
    wrong = [one.rpartition(": ")[2] for one in reports.wrong(report)]
    assert wrong == (["off by 7"] if kind == "library" else ["not ours", "off by 7"])
    assert list(reports.missing(report).values()) == ["failed: not ours", "inaccurate: off by 7"]


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, measured: dict[str, BenchReport]) -> None:
    measured.clear()
    with pytest.raises(MissingCapabilityError, match="exit code 3"):
        reproduce.reproduce("test", document(), budget=60, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_the_budget_does_not_reach_is_named(
    monkeypatch: pytest.MonkeyPatch, recorded: BenchReport, tmp_path: Path
) -> None:
    now, given = [0.0], []

    def run(words: list[str], seconds: float) -> int:
        now[0] += 30.0
        given.append(seconds)
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        return ExitCode.OK

    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: now[0]))
    measures = [DOCUMENT["measure"][0] | {"name": name, "share": 0.5} for name in ("kernels", "second", "third")]
    *_, (found, missing) = measuring.measure(document(measure=measures), means(tmp_path, seconds=65), run)
    assert given == [32.5, 17.5]
    assert list(found) == ["kernels", "second"]
    assert missing == {"measurement third": "the budget of 65 s was spent"}


def test_the_published_kernel_needs_a_checkout(recorded: BenchReport, tmp_path: Path) -> None:
    def run(words: list[str], _seconds: float) -> int:
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        return ExitCode.GATE_FAILED

    stated = document(
        measure=[DOCUMENT["measure"][0] | {"commands": ["ssdprof bench ssd --impl published --out {out}"]}]
    )
    *_, (found, missing) = measuring.measure(stated, means(tmp_path), run)
    assert (list(found), missing) == (["kernels"], {"the published kernel": "--published names no checkout of it"})
    *_, (found, missing) = measuring.measure(stated, means(tmp_path, published=tmp_path), run)
    assert (list(found), missing) == (["kernels"], {})


def test_a_script_that_fails_ends_its_measurement(tmp_path: Path) -> None:
    """Its exit code 1 is no verdict."""
    ran: list[list[str]] = []

    def run(words: list[str], _seconds: float) -> int:
        ran.append(words)
        return ExitCode.GATE_FAILED

    commands = ["python make_random_checkpoint.py x {scratch}/x", "ssdprof run {scratch}/x"]
    stated = document(measure=[DOCUMENT["measure"][0] | {"commands": commands}])
    with pytest.raises(MissingCapabilityError, match=r"make_random_checkpoint\.py .* ended with exit code 1"):
        list(measuring.measure(stated, means(tmp_path), run))
    assert len(ran) == 1


def test_a_command_that_fails_does_not_take_the_others_with_it(recorded: BenchReport, tmp_path: Path) -> None:
    """Nor the report that it wrote before."""

    def run(words: list[str], _seconds: float) -> int:
        if "--broken" in words:
            return ExitCode.BAD_INPUT
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        return cli.INTERRUPTED if "--half" in words else ExitCode.OK

    base = DOCUMENT["measure"][0]
    measures = [
        base,
        base | {"name": "broken", "commands": ["ssdprof bench ssd --broken"]},
        base | {"name": "half", "commands": ["ssdprof bench ssd --half --out {out}"]},
    ]
    *_, (found, missing) = measuring.measure(document(measure=measures), means(tmp_path), run)
    assert list(found) == ["kernels", "half"]
    assert missing == {
        "measurement broken": "`ssdprof bench ssd --broken` ended with exit code 2",
        "measurement half": "`ssdprof bench ssd --half --out {out}` ended with exit code 130",
    }


def test_commands_get_their_words(tmp_path: Path) -> None:
    places = {"out": "o.json", "budget": "60", "scratch": "s", "folder": "f"}
    words = measuring.words_of("ssdprof bench ssd --impl fused,published --out {out}", places, tmp_path)
    assert words[:3] == [sys.executable, "-m", "ssdprof"]
    assert words[5:] == ["--impl", f"fused,published={tmp_path}", "--out", "o.json"]
    assert measuring.words_of("python a.py {scratch}/x", places, None) == [
        sys.executable,
        str(reproduce.HERE / "a.py"),
        "s/x",
    ]
    assert measuring.words_of("ssdprof bench ssd --impl fused,published", places, None)[5:] == ["--impl", "fused"]
    with pytest.raises(BadInputError, match="no program"):
        measuring.words_of("rm -r {scratch}", places, None)


def test_what_was_measured_before_an_interruption_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: BenchReport
) -> None:
    """The report of the interrupted measurement too, and nothing is begun after it."""
    ran = []

    def run(words: list[str], _seconds: float) -> int:
        ran.append(words)
        Path(words[words.index("--out") + 1]).write_text(dump(recorded), encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "run_within", run)
    second = DOCUMENT["measure"][0] | {"name": "second"}
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce("test", document(measure=[*DOCUMENT["measure"], second]), budget=60, out=tmp_path)
    content = json.loads((tmp_path / "test.json").read_text())
    assert (list(content["reports"]), len(ran)) == (["kernels"], 1)
    assert content["missing"] == dict.fromkeys(("measurement kernels", "measurement second"), measuring.INTERRUPTED)
    assert {file.name for file in tmp_path.iterdir()} == {"test.json", "test.md", "test.svg"}


def test_an_interruption_reaches_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one of this process alone; the command's last words are waited for."""
    monkeypatch.setattr(within, "TO_NOTICE_S", 0.1)
    ready, kept = tmp_path / "ready", tmp_path / "kept"
    script = (
        "import time, pathlib, sys\n"
        "try:\n    pathlib.Path(sys.argv[1]).touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[2]).touch()\n"
    )

    def interrupt() -> None:
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        within.run_within([sys.executable, "-c", script, str(ready), str(kept)], 60)
    assert kept.exists()


def test_a_report_that_cannot_be_read_does_not_take_the_others_with_it(recorded: BenchReport, tmp_path: Path) -> None:
    def run(words: list[str], _seconds: float) -> int:
        broken = "--broken" in words
        Path(words[words.index("--out") + 1]).write_text("{" if broken else dump(recorded), encoding="utf-8")
        return ExitCode.OK

    broken = DOCUMENT["measure"][0] | {"name": "broken", "commands": ["ssdprof bench ssd --broken --out {out}"]}
    *_, (found, missing) = measuring.measure(document(measure=[broken, *DOCUMENT["measure"]]), means(tmp_path), run)
    assert list(found) == ["kernels"]
    assert "is not a result of ssdprof bench" in missing["measurement broken"]


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MissingCapabilityError, match="file cannot be written to"):
        reproduce.reproduce("test", document(), budget=60, out=tmp_path / "file")


@pytest.mark.parametrize("hash_of", ["", "abc"])
def test_a_recorded_report_takes_the_place_of_a_measurement(
    tmp_path: Path, recorded: BenchReport, hash_of: str
) -> None:
    file = tmp_path / "old.json"
    own = "f" * 64 if not hash_of else ""
    file.write_text(dump(recorded.model_copy(update={"kernels": own})), encoding="utf-8")
    out = tmp_path / "out"
    records = reproduce.recorded(document(), [f"kernels={file}"], hash_of)
    assert reproduce.reproduce("test", document(), budget=60, out=out, records=records) == ExitCode.OK
    page = (out / "test.md").read_text(encoding="utf-8")
    assert f"is the record `old.json` of {recorded.created}, kernels {hash_of or own[:12]}" in page
    assert ("does not hold their hash" in page) == bool(hash_of)
    assert "Measured 2" not in page
    assert reproduce.again("test", document(), out / "test.json", check=True) == ExitCode.OK
    found = load("test", document(), out / "test.json")
    assert found.values == values(document(), {"kernels": recorded})


@pytest.mark.parametrize("words", ["kernels", "other=x.json"])
def test_what_names_no_measurement_is_refused(words: str) -> None:
    with pytest.raises(BadInputError, match="names no measurement"):
        reproduce.recorded(document(), [words], "")


@pytest.mark.parametrize(
    ("word", "plain"),
    [
        ("/tmp/a b/x.json", "x.json"), ("--out=/tmp/x/y", "--out=y"), ("published=/root/mamba", "published=mamba"),
        ("fused,published=/a/b,unfused", "fused,published=b,unfused"), ("results/x.json", "results/x.json"),
        ("/tmp/x/", "x/"), ("1x128k", "1x128k"),
    ],
)  # fmt: skip
def test_commands_are_stored_without_the_folders_of_the_machine(word: str, plain: str) -> None:
    assert shlex.split(typed(["python", word])) == ["python", plain]


# --- documents


def test_an_unknown_name_has_the_nearest_one() -> None:
    with pytest.raises(BadInputError, match="'fig910' is not a published comparison") as error:
        documents.load("fig910")
    assert error.value.hint.startswith("Did you mean fig9-10?")
    assert "table2" in error.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = ", "is not TOML"),
        ("title = 'x'", "source"),
        ("title = 'x'\nsource = 'y'\ngpu = 'z'\nclaim = []\nclaims = 1\nrunner = 'a.py'", "claims"),
        ("title = 'x'\nsource = 'y'\ngpu = 'z'\nclaim = []", "either a runner or measurements"),
    ],
)
def test_a_document_that_is_not_in_the_format_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=words):
        documents.load("bad", tmp_path)


def test_a_claim_about_no_value_is_refused() -> None:
    with pytest.raises(ValueError, match="'speed' is none of"):
        document(claim=[{"words": "W", "quoted": "Q", "holds": "speed > 1"}])


@pytest.mark.parametrize("name", documents.known())
def test_every_document_can_be_measured(name: str) -> None:
    """Its commands are understood, its scripts are there."""
    stated = documents.load(name)
    places = {"out": "o.json", "budget": "60", "scratch": "s", "folder": "f"}
    commands = typer.main.get_command(cli.app)
    for measure in stated.measure:
        for command in measure.commands:
            words = measuring.words_of(command, places, None)
            if words[1] == "-m":
                commands.commands[words[3]].make_context(words[3], words[4:])  # type: ignore[attr-defined]
            else:
                assert Path(words[1]).is_file()
    if stated.runner:
        assert (reproduce.HERE / stated.runner).is_file()


def test_the_quoted_cases_of_gdn_are_the_measured_ones() -> None:
    names = [cell.shape.name for cell in small_gdn_cases.cells()]
    for group in documents.load("gdn-004").numbers:
        assert list(group.quoted) == names


def test_quoted_keys_of_table_2_are_values() -> None:
    stated = documents.load("table2")
    made = {f"{one.name}[{one.key}]" for one in stated.value}
    for group in stated.numbers:
        assert {f"{group.value}[{key}]" for key in group.quoted} <= made


# --- results and the page


def test_a_file_that_is_no_result_has_its_sentence(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for text, words in (("{", "is not JSON"), ("{}", "is no result"), ('{"study": "other"}', "is a result of other")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(BadInputError, match=words):
            load("test", document(), file)
    with pytest.raises(BadInputError, match="cannot be read"):
        load("test", document(), tmp_path / "none.json")


def test_a_runner_writes_its_pages_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And a wrong output in the result has its exit code."""
    script, file = tmp_path / "x.py", tmp_path / "test.json"
    script.write_text("import sys; print(*sys.argv[1:])", encoding="utf-8")
    stated = document(runner=str(script), measure=[], value=[], numbers=[], figure=None, claim=DOCUMENT["claim"])
    content = {"study": "test", "environment": {"gpu": {"name": H200}}, "values": {"least": 2.0}, "missing": {}}
    for wrong, code in (([], ExitCode.OK), (["one is wrong"], ExitCode.GATE_FAILED)):
        file.write_text(json.dumps({**content, "wrong": wrong}), encoding="utf-8")
        assert reproduce.again("test", stated, file, check=False) == code
        assert f"--from {file}" in capfd.readouterr().err
    with pytest.raises(BadInputError, match="has a runner"):
        reproduce.again("test", stated, file, check=True)


def test_the_page_tells_what_holds_and_why(recorded: BenchReport) -> None:
    content = {"missing": {}, "reports": {"kernels": json.loads(dump(recorded))}}
    stated = document(claim=[*DOCUMENT["claim"], {"words": "Thrice", "quoted": "3x", "holds": "least > 1000"}])
    result = understood("test", stated, content)
    text = seeds.page([("test", stated, [result]), ("later", document(title="Later"), [])])
    assert f"| test | {H200} | 1 | 1 | 1 |" in text
    places = [f"**{words}**" for _, words in seeds.GROUPS]
    order = [places[0], "It is faster: quoted 1x", places[1], "Thrice: quoted 3x", places[2], "nobody can"]
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)
    assert "It says so." in text
    assert "Not measured yet: `python benchmarks/reproduce.py later`." in text


def test_values_without_a_quoted_number_stand_beside() -> None:
    numbers = [{"words": "N", "value": "speedup", "beside": ["least"], "quoted": {"a": 1.5}}]
    found = {"speedup[a]": 1.0, "least[a]": 7.25}
    page = rendering.as_markdown(document(numbers=numbers), Result(name="t", gpu=H200, values=found, missing={}))
    assert re.search(r"\| a +\| 1 +\| 1.5 +\| outside +\| 7.25", page)


def test_crosses_are_quoted_numbers() -> None:
    result = Result(name="test", gpu=H200, values={"speedup[a]": 1.0, "speedup[b]": 2.0}, missing={})
    stated = document(numbers=[{"words": "N", "value": "speedup", "quoted": {"a": 1.5}}])
    picture = rendering.as_picture(stated, result)
    assert picture is not None
    assert "speedup, quoted" in picture
    nothing = Result(name="test", gpu=H200, values={}, missing={})
    assert rendering.as_picture(stated, nothing) is None
    assert "test.svg" not in rendering.as_markdown(stated, nothing)
    assert "(test.svg)" in rendering.as_markdown(stated, result)
