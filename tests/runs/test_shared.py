"""The results that are kept of a run that ranks share, for every order in which they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from report.make import layer, make_case, make_report
from ssdprof.environment.ranks import POLL_S, Ranks
from ssdprof.runs.record import Recorder, recorded
from ssdprof.runs.shared import opened_by_first, recorder_of
from ssdprof.schema import EXACT_FP32, Asked, RunReport
from torch.distributed import HashStore

from ssdprof import runs
from ssdprof.errors import MissingCapabilityError
from ssdprof.progress import Unwatched

pytestmark = pytest.mark.usefixtures("in_empty_folder")

DIED = "Rank 0 of 2 died before its share was done."


class Shared:
    """A run of four layers that two ranks share.  Both ranks are this process."""

    def __init__(self, folders: ExitStack) -> None:
        store = HashStore()
        for rank in range(2):
            store.set(f"{rank}/process", str(os.getpid()))
        self.ranks = Ranks(0, 2, store), Ranks(1, 2, store)
        asked = Asked(implementations=("fused",), precisions=(EXACT_FP32,), layers=tuple(map(layer, range(4))))
        report = make_report(state="partial", cases=(), captured_layers=(), asked=asked, ranks=2, model_peak_bytes=None)
        self.first, self.second = (
            recorder_of(folders.enter_context(opened_by_first(Path("run"), "demo", ranks)), report, ranks)
            for ranks in self.ranks
        )

    def kill_first(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        self.ranks[0].store.set("0/process", str(process.pid))

    @property
    def report(self) -> RunReport:
        return runs.read("run")[1]

    @property
    def kept(self) -> list[int]:
        """Layers of the report's cases."""
        return sorted(case.layer.index for case in self.report.cases)


@pytest.fixture
def shared() -> Iterator[Shared]:
    with ExitStack() as folders:
        yield Shared(folders)


def run(recorder: Recorder, *layers: int, then: Callable[[], None] = lambda: None) -> None:
    """Runs a rank's part of the run, and then `then`, which may end it early."""
    with recorded(recorder, Unwatched()):
        replay(recorder, *layers)
        then()


def interrupt() -> None:
    raise KeyboardInterrupt


def replay(recorder: Recorder, *layers: int) -> None:
    for index in layers:
        recorder.captured(layer(index))
        recorder.finished(make_case(index, 1024, "fused", EXACT_FP32))


def test_a_first_rank_that_dies_last_is_named_and_nothing_is_lost(shared: Shared) -> None:
    """The second rank has finished its share, but the first one has not read its results yet."""
    replay(shared.first, 0)
    with pytest.raises(MissingCapabilityError, match=DIED):
        run(shared.second, 1, 3, then=shared.kill_first)
    assert shared.report.state == "partial"
    assert DIED in shared.report.notes
    assert shared.kept == [0, 1, 3]
    assert [one.index for one in shared.report.captured_layers] == [0, 1, 3]


def test_a_first_rank_that_dies_before_its_first_case_is_no_reason_to_lose_others(shared: Shared) -> None:
    shared.kill_first()
    with pytest.raises(MissingCapabilityError, match=DIED):
        run(shared.second, 1)
    assert (shared.report.run_id, shared.report.state) == ("run", "partial")
    assert DIED in shared.report.notes
    assert shared.kept == [1]


def test_an_interrupt_does_not_keep_a_rank_that_died_from_being_named(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sends an interrupt to the other ranks while they save their results."""
    replay(shared.second, 1)
    shared.kill_first()
    kept = shared.second.broken_off

    def interrupted(error: BaseException) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        kept(error)

    monkeypatch.setattr(shared.second, "broken_off", interrupted)
    with pytest.raises(MissingCapabilityError, match=DIED):
        run(shared.second, 3)
    assert shared.kept == [1, 3]
    assert DIED in shared.report.notes


def test_an_interrupted_rank_says_that_the_first_died_before_a_case(shared: Shared) -> None:
    """torchrun interrupts the other ranks as soon as one dies."""
    shared.kill_first()
    with pytest.raises(KeyboardInterrupt, match=f"^{DIED}  Nothing had been compared yet, and no report is kept.$"):
        run(shared.second, then=interrupt)


def test_what_was_read_already_is_kept_once(shared: Shared) -> None:
    replay(shared.second, 1)
    replay(shared.first, 0)
    assert shared.kept == [0, 1]
    shared.kill_first()
    kept = r"What was done is kept in .*run, marked as partial: 2 cases of 2 layers\."
    with pytest.raises(KeyboardInterrupt, match=rf"^{DIED}  {kept}$"):
        run(shared.second, then=interrupt)
    assert shared.kept == [0, 1]
    assert DIED in shared.report.notes


def test_an_interrupt_of_both_keeps_what_the_second_sends_last(shared: Shared) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"What was done is kept in run, .*: 1 case of 1 layer"):
        run(shared.first, 0, then=interrupt)
    shared.kill_first()
    for layers in ((), (1,)):
        with pytest.raises(KeyboardInterrupt, match=r"^Rank 1 of 2 has sent its results to the first one\.$"):
            run(shared.second, *layers, then=interrupt)
    assert shared.kept == [0, 1]
    assert DIED not in shared.report.notes


def test_a_rank_that_is_done_ends_when_the_report_is_written(shared: Shared) -> None:
    with ThreadPoolExecutor() as threads:
        replay(shared.second, 1)
        second = threads.submit(shared.second.complete)
        with pytest.raises(TimeoutError):
            second.result(timeout=3 * POLL_S)
        run(shared.first, 0)
        second.result(timeout=30)
    assert (shared.report.state, shared.kept) == ("complete", [0, 1])


def test_the_peak_is_that_of_the_rank_that_took_most(shared: Shared) -> None:
    """Even if the peak arrives with a rank's last layer, before the peak of the first rank."""
    replay(shared.second, 1)
    shared.second.peaked(9)
    shared.ranks[1].end()
    replay(shared.first, 0)
    shared.first.peaked(5)
    shared.first.complete()
    assert shared.report.model_peak_bytes == 9
