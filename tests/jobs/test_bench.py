"""A whole bench without a GPU: implementations that compute the exact output, and a timer with
invented numbers.
"""

import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import task_of, value
from command_line import passing
from fakes import CELL, RAN, FakeTimer, needs_interpreter, note_runs, pretend_gpu
from generated_inputs import cell_of, generated

from ssdprof import kernels, operators
from ssdprof.core.case import Generated
from ssdprof.core.report import Report
from ssdprof.core.statistics import SPREAD
from ssdprof.environment.machine import kernels_hash
from ssdprof.jobs import bench as job
from ssdprof.jobs import compare, sample
from ssdprof.jobs.bench import bench, sampling_seconds
from ssdprof.jobs.options import BenchOptions
from ssdprof.kernels import registry
from ssdprof.kernels.gdn.reference import gdn_recurrence
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.kernels.ssd.reference import ssd_recurrence
from ssdprof.measure import isolate
from ssdprof.measure.first_run import Call
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.implementations import resolve
from ssdprof.operators.ssd import OPERATOR as SSD
from ssdprof.progress import Watcher
from ssdprof.report import exports
from ssdprof.store import reports
from ssdprof.store.reports import load

pytestmark = needs_interpreter


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch, users_folder: Path):
    pretend_gpu(monkeypatch)
    RAN.clear()


NAMES = ("unfused", "fused")


def cells(*tokens: Tokens | int) -> tuple[Cell, ...]:
    return tuple(
        replace(CELL, tokens=one if isinstance(one, Tokens) else Tokens(sequences=1, seqlen=one))
        for one in tokens
    )


def request_for(*of: Cell, operator=SSD, names: tuple[str, ...] = NAMES, **fields) -> BenchOptions:
    request = {
        "operator": operator.name,
        "measured": of,
        "compared": tuple(resolve(operator, name) for name in names),
        "chunk_sizes": (16,) if operator is SSD else (),
        "baseline": "unfused",
        "match_with": "unfused",
    }
    return BenchOptions(**(request | fields))


def benched(*of: Cell, operator=SSD, **fields) -> Report:
    folder, report = bench(request_for(*of, operator=operator, **fields), operator, Watcher())
    assert load(folder)[1] == report
    return report


def results(report: Report) -> list[tuple[str, str]]:
    return [(case.implementation, case.result) for case in report.cases]


def test_every_cell_is_measured_and_kept():
    report = benched(*cells(40, 50))
    assert (report.complete, report.baseline, report.matched_with, report.missing) == (
        True,
        "unfused",
        "unfused",
        (),
    )
    assert report.kernels == kernels_hash("ssd")
    assert [case.size for case in report.cases] == ["1 x 40", "1 x 40", "1 x 50", "1 x 50"]
    for unfused, fused in (report.cases[:2], report.cases[2:]):
        assert (unfused.chunk_size, fused.chunk_size, fused.variant) == (16, None, "interpreter")
        assert value(report.speedup(fused)) == 3
        assert (task_of(fused, Generated).checked, bool(fused.plan), fused.flops is None) == (
            None,
            True,
            False,
        )


def test_outputs_are_matched_with_another_one_than_the_baseline():
    report = benched(*cells(40), match_with="fused")
    assert (report.baseline, report.matched_with) == ("unfused", "fused")
    against = [
        case.accuracy[0].vs_baseline and case.accuracy[0].vs_baseline.against
        for case in report.cases
    ]
    assert against == ["fused exact, fp32 states", None]


@pytest.mark.parametrize("sizes", [(16,), (16, 32)])
def test_short_checks_are_shared_and_named(monkeypatch, sizes):
    monkeypatch.setattr(job, "CHECKED_SEQLEN", 16)
    compared = []
    whole = job.Comparer.compare

    def counting(self, entries, label: str, verdicts=None):
        compared.append((entries[0].call.inputs.x.shape[1], verdicts is None))
        return whole(self, entries, label, verdicts)

    monkeypatch.setattr(job.Comparer, "compare", counting)
    report = benched(*cells(36, 40), check="short", chunk_sizes=sizes)
    assert compared == [(16, True), (36, False), (40, False)]
    assert [task_of(case, Generated).checked for case in report.cases] == [16] * 4
    assert {result for _, result in results(report)} == {"passed"}
    assert all(case.samples for case in report.cases)


def test_an_interrupted_bench_leaves_what_it_has(monkeypatch):
    measured = job.CellBench.measured

    def interrupted(bench, cell: Cell, *rest):
        if cell.tokens.seqlen == 40:
            raise KeyboardInterrupt
        return measured(bench, cell, *rest)

    monkeypatch.setattr(job.CellBench, "measured", interrupted)
    with pytest.raises(
        KeyboardInterrupt, match=r"What was done is kept in result, marked as partial: 2 cases\."
    ):
        benched(*cells(36, 40), out=Path("result"))
    report = load("result")[1]
    assert (report.complete, len(report.cases), len(report.missing)) == (False, 2, 2)
    again = []

    def noted(bench, cell: Cell, *rest):
        again.append(cell.tokens.seqlen)
        return measured(bench, cell, *rest)

    monkeypatch.setattr(job.CellBench, "measured", noted)
    whole = benched(*cells(36, 40), out=Path("result"))
    assert (again, whole.complete, whole.missing, whole.cases[:2]) == ([40], True, (), report.cases)


@pytest.fixture
def sampled_here(monkeypatch):
    """Further processes are calls in this one."""

    def run_sampler(folder: Path, number: int):
        monkeypatch.setattr("sys.argv", ["sample", str(folder), str(number)])
        sample.main()

    monkeypatch.setattr(reports, "run_sampler", run_sampler)


@pytest.mark.usefixtures("sampled_here")
def test_a_further_process_repeats_the_command_of_the_report(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = "bench ssd --shape 4x16x16x1 --seq 36 --dtype fp32"
    passing(f"{words} --processes 2 --out kept")
    report = load("kept")[1]
    assert (report.complete, len(report.processes), report.missing) == (True, 2, ())
    assert all(len({one.process for one in case.samples}) == 2 for case in report.cases)


@pytest.mark.usefixtures("sampled_here")
def test_a_further_process_that_fails_leaves_the_report_incomplete(capsys):
    command = ("ssdprof", "bench", "ssd", "--shape", "4x16x16x1", "--seq", "nothing")
    report = benched(*cells(36), processes=2, command=command)
    assert "error: 'nothing' is not a possible number of tokens" in capsys.readouterr().err
    assert (report.complete, {case.result for case in report.cases}) == (False, {"passed"})


@pytest.mark.parametrize("fault", ["", "slow", "wrong"])
def test_further_processes_only_add_samples_and_say_nothing(fault, monkeypatch, capsys):
    verified = []
    whole = compare.Comparer._accuracies

    def noted(self, outputs, label: str):
        verified.append(label)
        return whole(self, outputs, label)

    usual = FakeTimer.device_us

    def run_sampler(folder: Path, number: int):
        with pytest.MonkeyPatch.context() as patch:
            if fault == "slow":
                patch.setattr(
                    FakeTimer, "device_us", lambda timer, of: usual(timer, of) + 7.0 * number
                )
            if fault == "wrong":
                patch.setattr(FakeTimer, "unseen", lambda *_: "it cheats")
            bench(replace(request, out=folder, sampler=number), SSD, Watcher())
        assert len(verified) == 2

    request = request_for(*cells(36, 40), processes=3)
    monkeypatch.setattr(compare.Comparer, "_accuracies", noted)
    monkeypatch.setattr(reports, "run_sampler", run_sampler)
    report = bench(replace(request, out=Path("result")), SSD, Watcher())[1]
    assert (report.complete, len(report.processes), report.samplers, report.missing) == (
        True,
        3,
        3,
        (),
    )
    assert capsys.readouterr() == ("", "")
    if fault == "wrong":
        assert {case.result for case in report.cases} == {"inaccurate"}
        assert all("it cheats" in case.why and not case.samples for case in report.cases)
        return
    assert {case.result for case in report.cases} == {"passed"}
    assert all(len({one.process for one in case.samples}) == 3 for case in report.cases)
    found = report.speedup(report.cases[1])
    of_equal_times = 2.447 * math.sqrt(4 / 6 * SPREAD["device"] ** 2 / 3)
    assert (math.log(found.high / found.value) == pytest.approx(of_equal_times)) == (fault == "")
    assert found.low < found.value < found.high
    rows = exports.records(report)
    assert all(row["call time, low [µs]"] for row in rows)


def test_what_does_not_fit_is_left_out_and_said(monkeypatch):
    """Also if the oracle alone lacks memory, and if an output was compared before."""
    whole = compare.compare_with_oracle
    passes = []

    def full(*given, **rest):
        passes.append(None)
        if len(passes) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return whole(*given, **rest)

    monkeypatch.setattr(compare, "compare_with_oracle", full)
    monkeypatch.setattr(Call, "outputs_that_fit", 1)
    report = benched(*cells(36))
    assert (report.cases, report.missing) == ((), ())
    assert [one.reason for one in report.left_out] == ["out of memory: CUDA out of memory."]


def test_a_spent_budget_leaves_cells_out(monkeypatch):
    clock = [0.0]
    measured = job.CellBench.measured

    def slowly(*given):
        found = measured(*given)
        clock[0] += 100
        return found

    monkeypatch.setattr(job.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(job.CellBench, "measured", slowly)
    report = benched(*cells(36, 40, 60), budget=150)
    assert [case.size for case in report.cases] == ["1 x 36"] * 2 + ["1 x 40"] * 2
    assert [(one.case_key, one.reason) for one in report.left_out] == [
        ("tiny, bf16, 1 x 60", "the budget of 150 s was spent")
    ]
    assert report.missing == ()


def test_a_first_call_that_takes_too_long_fails_or_takes_the_budget(monkeypatch):
    clock = [0.0]

    def compiling(*_):
        clock[0] += 200
        signal.raise_signal(signal.SIGALRM)  # the end of its time

    monkeypatch.setattr(job.time, "monotonic", lambda: clock[0])
    slow = replace(kernels.get("ssd", "fused"), run=compiling)
    monkeypatch.setitem(registry._implementations, ("ssd", "fused"), slow)
    report = benched(*cells(40), first_call_s=100)
    assert results(report) == [("unfused", "passed"), ("fused", "failed")]
    assert report.cases[1].why == "its first call was stopped after 100 s"
    alone = dict.fromkeys(("baseline", "match_with"), "fused")
    (cell,) = benched(*cells(36), names=("fused",), **alone, budget=150).left_out
    assert (
        cell.reason == "the budget of 150 s was spent in the first call of fused exact, fp32 states"
    )


def test_own_kernels_are_timed_beside_ours_and_a_wrong_one_has_no_time(
    monkeypatch, users_folder: Path
):
    monkeypatch.setattr(isolate, "_tried", lambda *_: ("ran", ""))
    (users_folder / "own_kernels.py").write_text(
        "from fakes import RAN\n"
        "from ssdprof.measure.accuracy import oracle_output\n"
        "def quick(inputs):\n    RAN.append(('quick', 50.0))\n    return oracle_output(inputs)\n"
        "def wrong(inputs):\n    out, states = quick(inputs)\n    return 2 * out, states\n"
    )
    report = benched(*cells(40), names=("unfused", "own_kernels:quick", "own_kernels:wrong"))
    assert sorted(results(report)) == [
        ("own_kernels:quick", "passed"),
        ("own_kernels:wrong", "inaccurate"),
        ("unfused", "passed"),
    ]
    quick, wrong = (
        next(one for one in report.cases if one.implementation.endswith(name))
        for name in ("quick", "wrong")
    )
    assert (quick.kind, quick.chunk_size, quick.version) == ("own", None, "own_kernels:quick")
    assert value(report.speedup(quick)) == 6
    assert wrong.samples == ()
    other = benched(*cells(40), names=("fused", "own_kernels:quick"), baseline="own_kernels:quick")
    assert (
        value(other.speedup(next(one for one in other.cases if one.implementation == "fused")))
        == 0.5
    )


SIZES = {"ssd": "2x16x16x1", "gdn": "1/2x16x16"}


def library(operator: str) -> Implementation:
    """Another library, which computes the recurrence in 65 us."""

    def run(inputs, _precision):
        RAN.append(("library", 65.0))
        exact = ssd_recurrence(inputs) if operator == "ssd" else gdn_recurrence(inputs)
        kind = inputs.x.dtype if operator == "ssd" else inputs.v.dtype
        return type(exact)(exact.out.to(kind), exact.final_states.float())

    of = dict(
        name="library",
        run=run,
        kind="library",
        version="9.9",
        precisions=lambda _dtype: (Precision(),),
    )
    return replace(kernels.get(operator, "reference"), **of)


@pytest.mark.parametrize("name", ["ssd", "gdn"])
def test_where_sequences_are_a_few_tokens_long_the_kernel_that_goes_token_by_token_takes_part(
    name, monkeypatch
):
    note_runs(monkeypatch, name, unfused=300.0, fused=100.0, recurrent=50.0)
    operator = operators.get(name)
    short, longer = (cell_of(name, SIZES[name], seqlen, sequences=3) for seqlen in (1, 33))
    states = generated(name, SIZES[name], 1, sequences=3).initial
    assert states.abs().sum() > 0, "a step begins with a state"
    of = (library(name), *(resolve(operator, one) for one in ("unfused", "fused")))
    report = benched(short, longer, operator=operator, compared=of, baseline="library")
    assert report.kernels == kernels_hash(name)
    assert {case.result for case in report.cases} == {"passed"}, [case.why for case in report.cases]
    assert [case.implementation for case in report.cases] == [
        "library",
        "unfused",
        "fused",
        "recurrent",
        "library",
        "unfused",
        "fused",
    ]
    theirs, _, fused, by_token = report.cases[:4]
    assert (theirs.version, fused.variant) == ("9.9", "recurrent"), "fused takes that kernel too"
    for other, ratio in (("", 65 / 50), ("unfused", 6)):
        assert value(report.speedup(by_token, over=other)) == pytest.approx(ratio)
    assert report.speedup(theirs) is None


def test_drawn_ways_and_forms_stand_in_the_report(monkeypatch):
    operator = operators.get("gdn")
    note_runs(monkeypatch, "gdn", unfused=300.0, fused_portable=150.0)
    cell = cell_of("gdn", SIZES["gdn"], 40, ways=("normalised", "quarter-ungated"))
    report = benched(cell, names=("unfused", "fused_portable"), operator=operator)
    assert results(report) == [("unfused", "passed"), ("fused_portable", "passed")]
    assert all(task_of(case, Generated).ways == cell.ways for case in report.cases)
    assert value(report.speedup(report.cases[1])) == 2


def test_the_budget_is_shared_by_the_cells_that_are_left():
    assert sampling_seconds(math.inf, 1) == 1.5
    assert sampling_seconds(300, 100) == pytest.approx(1.0)
    assert sampling_seconds(1, 100) == 0.1
    assert sampling_seconds(300, 1) == 1.5


def test_an_alternative_form_runs_once():
    names = ("unfused", "fused", "recurrent_in_place")
    request = BenchOptions(
        operator="ssd", intermediates="all", compared=tuple(resolve(SSD, name) for name in names)
    )
    of = [(one.name, precision) for one, precision in job.compared(request, SSD, CELL)]
    assert [precision for name, precision in of if name == "recurrent_in_place"] == [Precision()]
    assert len([name for name, _ in of if name == "fused"]) == 2
    relaxed = Precision.named("relaxed, bf16 states")
    assert ("unfused", relaxed) not in of
