"""Several processes of torchrun share the work of a command: there is one report, even if processes
fail.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import ending
from fakes import needs_interpreter, needs_two_gpus
from torch.distributed import HashStore
from torchrun import MODULE, Start, ranks_of, starting, wait_for

from ssdprof.core.report import Report
from ssdprof.errors import BadInputError
from ssdprof.jobs.options import RunOptions
from ssdprof.jobs.run import check
from ssdprof.jobs.target import find_to_replay
from ssdprof.store import reports
from ssdprof.store.ranks import Ranks

TESTS = Path(__file__).parent
FAST = "--dtypes exact --states fp32"
MEASURED = ("samples", "first_call", "trials")


def test_a_world_size_that_is_no_number_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert ending(2, "run demo").err == (
        "error: WORLD_SIZE='two' is not a number of processes. hint: Run: unset WORLD_SIZE"
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        *(
            (f"{name} demo", f"ssdprof {name}")
            for name in ("capture", "answers", "prefill", "stalls")
        ),
        ("tune ssd", "ssdprof tune"),
        ("run demo --save-captures", "--save-captures"),
        ("run demo --answers --prefill", "--answers and --prefill"),
    ],
)
def test_what_ranks_cannot_share_is_refused(words, what, monkeypatch, tmp_path):
    """Otherwise each rank would do all of the work, two of them on one GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        ending(2, words).err
        == f"error: 2 ranks cannot share {what}. hint: Start a single process, without torchrun."
    )


def test_more_ranks_than_layers_are_refused():
    one, two = (RunOptions(model="demo", layers=f"first:{n}") for n in (1, 2))
    with pytest.raises(BadInputError, match=r"^2 ranks cannot share 1 layer\."):
        check(one, find_to_replay(one), Ranks(0, 2, HashStore()))
    check(one, find_to_replay(one), None)
    check(two, find_to_replay(two), Ranks(0, 2, HashStore()))


@pytest.mark.parametrize("words", ["run demo --seq much", "run demo --sek 64"])
@pytest.mark.parametrize("ended", [True, False])
def test_what_is_wrong_in_every_rank_is_told_by_the_first(words, ended, monkeypatch):
    """ended: torchrun ends the other ranks, because the first one ended.  Otherwise the other ranks
    print the error.
    """

    def sleep(_: float):
        if ended:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(Ranks, "divided", False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in ((0, True), (1, not ended)):
        monkeypatch.setenv("RANK", str(rank))
        answer = ending(2, words)
        assert bool(answer.err) == told


# --- whole runs


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


@pytest.mark.slow
def test_torchrun_shows_a_wrong_option_once(start: Start):
    """torchrun ends the other rank, which may be slower and may not have found the error yet."""
    process = start("run demo --layers 99")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert err.count("Layer 99 has no SSD, GDN or KDA operator") == 1
    assert "exitcode  : 2 " in err


def same(report: Report, *measured: str) -> dict[str, Any]:
    """The equal parts of two runs of the same command.  measured: fields of cases that may
    differ.
    """
    header = {"id", "created", "command", "ranks", "samplers", "placement", "processes", "cases"}
    cases = sorted((case.model_dump(exclude=set(measured)) for case in report.cases), key=str)
    remarks = sorted(report.remarks)
    return report.model_dump(exclude=header) | {
        "cases": cases,
        "remarks": remarks,
        "captured": report.captured,
    }


def ran(folder: Path, command: str, program: tuple[str, ...] = MODULE) -> tuple[Report, Report]:
    """The reports of one process and of two ranks."""
    with starting(folder, program) as start:
        for name, ranks in (("one", False), ("two", True)):
            process = start(f"{command} --out {name}", ranks=ranks)
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            assert out if command.startswith("bench") else out.count("PASSED") == 1, out
    one, two = (reports.load(folder / name)[1] for name in ("one", "two"))
    assert (one.ranks, two.ranks, two.complete, two.missing) == (1, 2, True, ())
    return one, two


@pytest.mark.slow
def test_two_ranks_write_the_report_of_one_process(tmp_path):
    one, two = ran(tmp_path, f"run demo --seq 16,24 --layers first:3 --decode 1 {FAST}")
    assert len(one.cases) == 2 * 3 * 4
    assert same(one) == same(two)


@pytest.mark.slow
@needs_interpreter
def test_two_ranks_write_the_bench_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (TESTS.parent, TESTS))))
    words = "bench ssd --shape 1x16x16x1 --chunk-size 128 --seq 40,50,60 --cells 2x40"
    one, two = ran(tmp_path, words, program=(str(TESTS / "bench_without_gpu.py"),))
    assert len({case.case_key for case in one.cases}) == 4
    assert all(case.samples for case in (*one.cases, *two.cases))
    assert same(one, *MEASURED) == same(two, *MEASURED)


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize(
    "words",
    [
        f"run demo --seq 4k --layers first:2 --smallest-difference 50% {FAST}",
        "bench gdn --shape qwen3.5-9b --seq 1k,4k --impl unfused,fused",
    ],
)
def test_two_gpus_write_the_report_of_one_but_for_times(words, tmp_path):
    """Captures and therefore accuracies have equal bits; kernels and launches are equal too.

    Each rank tests the laws at the first of its own layers; a bench of ranks has no further
    processes.
    """
    one, two = ran(tmp_path, words)
    assert all(case.samples for case in (*one.cases, *two.cases))
    assert {case.name for case in one.cases if case.probes} <= {
        case.name for case in two.cases if case.probes
    }
    assert same(one, "probes", *MEASURED) == same(two, "probes", *MEASURED)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_ends_the_run_and_is_named(start: Start, tmp_path, killed):
    process = start("run demo --seq 256 --out run")
    file = tmp_path / "run" / f"cases.{killed}.jsonl"
    ranks = wait_for(
        lambda: ranks_of(process.pid) if file.exists() and b'"case"' in file.read_bytes() else None
    )
    os.kill(ranks[killed], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    report = reports.load(tmp_path / "run")[1]
    assert not report.complete
    if killed == 1:
        assert "Rank 1 of 2 died before its share was done." in err
