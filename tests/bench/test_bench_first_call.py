"""The time of a first call, and the result if it takes too long."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import triton
from fakes import CELL, contender, measured

from ssdprof.measure.first_run import Deadline, TimeIsUp
# TODO ssdprof.bench.first_call: first_call, slower
from ssdprof.jobs.compare import BudgetSpent
# TODO ssdprof.bench.judge: judge
from ssdprof.core.case import FirstCall
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.operators.ssd import draw
from ssdprof.operators.ssd import OPERATOR as SSD

CPU = torch.device("cpu")


def sleepy(output: SSDOutput) -> SSDOutput:
    """Takes many short steps, as a compiler does."""
    for _ in range(500):
        time.sleep(0.01)
    return output


def compile_one(name: str, microseconds: int, *, cache_hit: bool) -> None:
    """Sends the report of Triton's compiler to the listener."""
    times = triton.knobs.CompileTimes(ir_initialization=microseconds, lowering_stages=[("ptx", 0)], store_results=0)
    listener = triton.knobs.compilation.listener
    assert listener is not None
    source = type("Source", (), {"name": name})()
    listener(src=source, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_what_was_compiled_in_a_first_call_and_for_how_long() -> None:
    done = SSDOutput(torch.zeros(1), torch.zeros(1))

    def run() -> SSDOutput:
        compile_one("scan", 1_500_000, cache_hit=False)
        compile_one("known", 9_000, cache_hit=True)
        time.sleep(0.02)
        return done

    output, first = first_call(run, CPU, Deadline())
    assert output is done
    assert [(one.kernel, one.seconds) for one in first.compiled] == [("scan", 1.5)]
    assert 0.02 <= first.seconds < 1
    assert triton.knobs.compilation.listener is None


def test_a_first_call_that_takes_too_long_is_broken_off() -> None:
    began = time.monotonic()
    with pytest.raises(TimeIsUp):
        first_call(lambda: sleepy(SSDOutput(torch.zeros(1), torch.zeros(1))), CPU, Deadline(most=0.05))
    assert time.monotonic() - began < 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert triton.knobs.compilation.listener is None


def test_its_cell_goes_on_without_it() -> None:
    slow, fast = contender("slow", lambda _: 1.0, ours=False, spoil=sleepy), contender("fast", lambda _: 1.0)
    entries = [entry for one in (slow, fast) for entry in one.entries(SSD, draw(CELL, CPU))]
    broken, done = judge(entries, patience=Deadline(most=0.5))
    assert (broken.verdict.status, broken.verdict.reason) == ("failed", "its first call was stopped after 0.5 s")
    assert broken.first_call is None
    assert done.verdict.status == "passed"
    assert done.first_call is not None


def test_the_end_of_the_bench_is_the_end_of_a_first_call() -> None:
    slow = contender("slow", lambda _: 1.0, ours=False, spoil=sleepy)
    with pytest.raises(BudgetSpent, match="in the first call of slow exact, fp32 states"):
        judge(slow.entries(SSD, draw(CELL, CPU)), patience=Deadline(until=time.monotonic() + 0.05))


def test_a_case_says_what_its_first_call_took() -> None:
    calls = []

    def slow_once(output: SSDOutput) -> SSDOutput:
        calls.append(1)
        time.sleep(0.05 if len(calls) == 1 else 0)
        return output

    (peer,) = measured(contender("peer", lambda _: 1.0, ours=False, spoil=slow_once))
    assert peer.first_call is not None
    assert peer.first_call.seconds >= 0.05
    assert len(calls) > 1


def test_the_first_of_two_first_calls_is_the_one_that_compiled() -> None:
    short, long = FirstCall(seconds=0.1), FirstCall(seconds=2.0)
    assert slower(short, long) is slower(long, short) is slower(None, long) is long
    assert slower(None, None) is None
