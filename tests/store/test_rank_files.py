"""Ranks share a report by files: what is kept for every order in which they end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import cases
import pytest
from cases import case, layer
from test_reports import header, writing
from torch.distributed import HashStore

from ssdprof.core.report import Report
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.store.header import draft
from ssdprof.store.ranks import Ranks, first_tells, follows, join, rank_count
from ssdprof.store.reports import Writer, load

pytestmark = pytest.mark.usefixtures("in_empty_folder")
Pair = tuple[Ranks, Ranks]
Writers = tuple[tuple[ExitStack, Writer], ...]
OF_TORCHRUN = {  # its variables for the first of two ranks
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
MADE = [case(layer=layer(index)) for index in range(4)]


@pytest.fixture
def two(monkeypatch) -> Pair:
    monkeypatch.setattr(Ranks, "divided", False)
    store = HashStore()
    for rank in range(2):
        store.set(f"{rank}/process", str(os.getpid()))
    return Ranks(0, 2, store), Ranks(1, 2, store)


def dead_process() -> str:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return str(process.pid)


@pytest.fixture
def writers(two: Pair) -> Iterator[Writers]:
    """Both ranks, in this process.  The value has the end of each one's context."""
    requested = tuple(map(cases.requested, MADE))
    stacks = ExitStack(), ExitStack()
    made = [
        stack.enter_context(writing("run", ranks, requested=requested))
        for stack, ranks in zip(stacks, two, strict=True)
    ]
    yield tuple(zip(stacks, made, strict=True))
    for stack in stacks:
        stack.close()


def kept() -> Report:
    return load("run")[1]


def indices(report: Report) -> list[int]:
    return [one.layer.index for one in report.cases if one.layer]


def interrupt(stack: ExitStack) -> str:
    """The message of a rank that is interrupted now."""
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        assert not stack.__exit__(KeyboardInterrupt, error, None)
        raise error
    return str(caught.value)


def test_two_ranks_write_one_report(writers: Writers):
    (first, one), (second, other) = writers
    other.case(MADE[1])
    one.case(MADE[0])
    other.case(MADE[3])
    one.case(MADE[2])
    other.peaked(9)
    one.peaked(5)
    other.note("Each key head was taken once.")
    second.close()
    assert not kept().complete
    first.close()
    report = kept()
    assert (report.complete, report.ranks, indices(report), report.missing) == (
        True,
        2,
        [0, 1, 2, 3],
        (),
    )
    assert (report.peak_bytes, report.remarks[-1]) == (9, "Each key head was taken once.")
    assert len({line.process for line in report.processes}) == 2
    assert sorted(file.name for file in Path("run").iterdir()) == [
        "cases.0.jsonl",
        "cases.1.jsonl",
        "run.json",
    ]


def test_the_first_rank_waits_for_the_others(writers: Writers, monkeypatch):
    """The other one ends while the first one waits."""
    (first, one), (second, other) = writers
    one.case(MADE[0])
    other.case(MADE[1])
    monkeypatch.setattr(time, "sleep", lambda _: second.close())
    first.close()
    assert kept().complete


def test_a_rank_that_was_interrupted_is_named_by_the_first(writers: Writers):
    (first, one), (second, other) = writers
    other.case(MADE[1])
    assert interrupt(second).startswith("What was done is kept in ")
    one.case(MADE[0])
    with pytest.raises(MissingCapabilityError, match=r"^Rank 1 of 2 ended: interrupted\."):
        first.close()
    assert (kept().complete, indices(kept()), kept().missing[0][0]) == (
        False,
        [0, 1],
        MADE[2].case_key,
    )


def test_a_first_rank_without_a_case_does_not_remove_those_of_others(writers: Writers):
    (first, _), (_, other) = writers
    other.case(MADE[1])
    assert interrupt(first) == "Nothing had been compared yet, and no report is kept."
    other.case(MADE[3])
    assert indices(kept()) == [1, 3]


def test_a_rank_that_is_killed_is_named_and_nothing_is_lost(two: Pair):
    """Its lock is free, and its line says nothing of its end."""
    ranks, other = two
    with (
        pytest.raises(
            MissingCapabilityError, match=r"^Rank 1 of 2 died before its share was done\."
        ) as caught,
        writing("run", ranks) as writer,
    ):
        writer.case(MADE[0])
        other.tell("1/open")
        lines = Path("run/cases.1.jsonl").open("wb")  # noqa: SIM115
        killed = Writer(Path("run"), draft(**header()), lines)
        killed.case(MADE[1])
    assert "main memory" in caught.value.hint
    assert (kept().complete, indices(kept())) == (False, [0, 1])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_other_ranks_name_a_first_rank_that_died(two: Pair, error: type[BaseException]):
    """torchrun interrupts them then."""
    Path("run").mkdir()
    Path("run/run.json").write_text(draft(**header(ranks=2)).model_dump_json())
    two[0].tell("folder", "run")
    with (
        pytest.raises(
            MissingCapabilityError, match=r"^Rank 0 of 2 died before its share was done\."
        ),
        writing(None, two[1]) as writer,
    ):
        writer.case(MADE[1])
        two[1].store.set("0/process", dead_process())
        raise error
    assert indices(kept()) == [1]
    assert [line.ended for line in kept().processes] == [
        "Rank 0 of 2 died before its share was done"
    ]


def test_a_rank_that_died_before_it_opened_its_file_is_named(two: Pair):
    two[0].store.set("1/process", dead_process())
    with (
        pytest.raises(MissingCapabilityError, match=r"^Rank 1 of 2 died"),
        writing("run", two[0]) as writer,
    ):
        writer.case(MADE[0])
    assert indices(kept()) == [0]


def test_other_ranks_wait_for_the_folder_of_the_first_unless_it_died(two: Pair):
    two[1].store.set("0/process", dead_process())
    with pytest.raises(MissingCapabilityError, match=r"^Rank 0 of 2 died"), writing(None, two[1]):
        pytest.fail("there is no folder")
    two[0].tell("folder", "x")
    assert two[1].told("folder", 0) == "x"


# --- torchrun


def test_a_zombie_does_not_live(two: Pair, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", ""])
    two[0].store.set("1/process", str(process.pid))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its exit code is not read
    with pytest.raises(MissingCapabilityError, match="Rank 1 of 2 died"):
        two[0].told("anything", 1)
    process.wait()
    two[0].store.set("1/process", str(os.getpid()))
    assert two[0].alive(1)

    def gone(_: Path) -> str:
        raise ProcessLookupError

    monkeypatch.setattr(Path, "read_text", gone)
    assert not two[0].alive(1)


def test_a_process_alone_joins_nobody():
    assert join({}) is None
    assert join({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert rank_count({"WORLD_SIZE": ""}) == 1
    assert Ranks(0, 2, HashStore()).alive(1)  # one that has not joined lives


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "several machines"),
        # containers of a cluster may set the first variable without the others
        *(
            ({name: ""}, f"asks for 2 ranks, but {name} is not set")
            for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        ),
        *(
            ({"WORLD_SIZE": word}, f"^WORLD_SIZE='{word}' is not a number of processes")
            for word in ("two", "0", "-2", "1.5")
        ),
        *(
            ({name: word}, f"^{name}='{word}' is not a number")
            for name, word in (
                ("RANK", "abc"),
                ("RANK", "2"),
                ("LOCAL_RANK", "-1"),
                ("MASTER_PORT", "70000"),
            )
        ),
    ],
)
def test_variables_that_torchrun_does_not_set_are_refused(given, words):
    with pytest.raises(BadInputError, match=words) as caught:
        join(OF_TORCHRUN | given)
    assert "asks for" not in words or "unset WORLD_SIZE" in caught.value.hint


def test_there_are_never_two_ranks_on_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(MissingCapabilityError, match="2 ranks need 2 GPUs") as caught:
        join(OF_TORCHRUN)
    assert "--nproc-per-node 1" in caught.value.hint


def test_before_work_is_divided_the_first_rank_tells_what_is_wrong(two: Pair, monkeypatch):
    """torchrun ends the others meanwhile.  If it does not, only they have the error."""

    def interrupted(_: float):
        raise KeyboardInterrupt

    first, second = ({"WORLD_SIZE": "2", "RANK": rank} for rank in "01")
    monkeypatch.setattr(time, "sleep", interrupted)
    unset = {"WORLD_SIZE": "2", "RANK": ""}
    assert list(map(follows, (first, second, {}, unset))) == [False, True, False, False]
    assert (first_tells(first), first_tells(second)) == (False, True)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert not first_tells(second)
    monkeypatch.setattr(time, "sleep", interrupted)
    assert [ranks.share("abcde") for ranks in two] == [("a", "c", "e"), ("b", "d")]
    assert (follows(second), first_tells(second)) == (False, False), "now every rank tells its own"
    assert not first_tells(second)
