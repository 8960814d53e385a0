"""How often a verdict is wrong, and how often a real difference is found, on a simulated GPU.

The simulated times have the effects observed on a real GPU: an error from a recording's place in
memory, common to all of its rounds; an advantage for the first sample of a round; noise of rounds
with interruptions; and a common drift.
"""

import math
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from ssdprof.core.statistics import ratio as ratio_of
from ssdprof.kernels.ssd.inputs import SSDOutput
from ssdprof.measure.first_run import Run
from ssdprof.measure.sampling import Name, Sampler, SamplingPlan, sample_in_turns
from ssdprof.measure.timing import time_in_turns

PLACEMENT = 0.003  # standard deviation per recording
FIRST = 0.004  # advantage of the first sample of a round
DRIFT = 0.02  # over a comparison
DEVICE_NOISE, CALL_NOISE = 0.01, 0.06  # standard deviations per round
INTERRUPTED = 0.03  # the share of calls that take up to twice as long


class Work:
    def __init__(self, us: float):
        self.us = us

    def __call__(self) -> SSDOutput:
        return SSDOutput(torch.empty(0), torch.empty(0))


class SimulatedGpu:
    device = torch.device("cpu")

    def __init__(self, seed: int):
        self._draw = np.random.default_rng(seed)
        self._samples = 0
        self._call_placement: dict[int, float] = {}

    def reallocate(self, _generator: np.random.Generator):
        self._call_placement = {}

    def record(self, run: Run) -> tuple[Any, Any]:
        self._call_placement[id(run)] = self._draw.normal(0, PLACEMENT)
        return (run, self._draw.normal(0, PLACEMENT)), run()

    def device_us(self, graph) -> float:
        run, placement = graph
        return self._time(run, placement, DEVICE_NOISE)

    def unseen(self, *_: object) -> str:
        return ""

    def call_us(self, run: Run) -> float:
        interrupted = self._draw.random() < INTERRUPTED
        us = self._time(run, self._call_placement[id(run)], CALL_NOISE)
        return us * (1 + self._draw.random()) if interrupted else us

    def _time(self, run: Run, placement: float, noise: float) -> float:
        is_first = self._samples % 2 == 0
        self._samples += 1
        drift = DRIFT * math.sin(self._samples / 100)
        us: float = run.us  # type: ignore[attr-defined]
        return us * math.exp(placement + drift - FIRST * is_first + self._draw.normal(0, noise))


@cache
def compared(seed: int, ratio: float) -> dict[str, str]:
    """The verdict by each clock on a call of 100 us and one of 100 / ratio us, as `ssdprof run`
    does.
    """
    plan = SamplingPlan(seconds=math.inf)
    runs = {"slow": Work(100), "fast": Work(100 / ratio)}
    found = time_in_turns(runs, SimulatedGpu(seed), plan, check=lambda _key, _run: "")
    pairs = zip(found["slow"]["samples"], found["fast"]["samples"], strict=True)
    return {
        slow.clock: ratio_of(slow.us, fast.us).verdict(plan.smallest_difference)
        for slow, fast in pairs
    }


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["device", "call"])
def test_the_same_kernel_is_hardly_ever_faster_than_itself(clock):
    verdicts = [compared(seed, ratio=1.0)[clock] for seed in range(60)]
    assert verdicts.count("no difference") >= 59


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "expected"), [(1.03, "faster"), (1 / 1.03, "slower")])
def test_a_true_difference_of_3_percent_is_found(ratio, expected):
    found = [compared(seed, ratio) for seed in range(40)]
    assert [verdicts["device"] for verdicts in found].count(expected) >= 39
    assert [verdicts["call"] for verdicts in found].count(expected) >= 38


@pytest.mark.slow
@pytest.mark.parametrize("placement", [0.01, 0.02, 0.04])
def test_looking_after_every_recording_hardly_adds_false_verdicts(placement):
    """If recordings of equal times differ much, the interval is likely to lie beyond the limit
    after some recording.
    """
    draw = np.random.default_rng(0)
    verdicts = []

    def set_up(_generator: np.random.Generator) -> dict[Name, Sampler]:
        places = 100 * np.exp(draw.normal(0, placement, 2))
        return {
            ("device", str(number)): partial(float, place) for number, place in enumerate(places)
        }

    for _ in range(300):
        one, other = sample_in_turns(set_up, SamplingPlan(seconds=math.inf)).values()
        verdicts.append(ratio_of(one, other).verdict(SamplingPlan().smallest_difference))
    assert verdicts.count("no difference") >= 294


def test_one_recording_would_be_wrong_often():
    """The simulated GPU is hard enough: intervals from the rounds of a single place in memory are
    too narrow.
    """
    wrong = 0
    for seed in range(100):
        gpu = SimulatedGpu(seed)
        (slow, _), (fast, _) = (gpu.record(Work(100)) for _ in range(2))
        rounds = np.array([(gpu.device_us(slow), gpu.device_us(fast)) for _ in range(40)])
        logs = np.log(rounds[:, 0] / rounds[:, 1])
        wrong += abs(np.mean(logs)) > 1.96 * np.std(logs) / math.sqrt(len(logs))
    assert wrong > 25
