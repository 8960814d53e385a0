"""Problems of `ssdprof tune` on the CPU, and a kernel and a timer with invented times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch

from ssdprof.core.subject import Environment, Gpu
from ssdprof.core.tuned import KernelSettings, SearchOutcome, Trial, TunedCalls, TunedConfig
from ssdprof.environment.machine import installed_version
from ssdprof.jobs.tune import Problem
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.first_run import Run
from ssdprof.measure.timing import CaptureError, Recording
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.operators.ssd import GENERATOR, draw
from ssdprof.operators.ssd import OPERATOR as SSD
from ssdprof.operators.tuning import Config

GPU = Gpu(
    name="NVIDIA Test", compute_capability="9.0", sm_count=132, memory_bytes=1, l2_bytes=1, driver="1", cuda="13.0"
)
COMMITTED_SEGMENT = 10
COMMITTED = {
    "hopper": SSDHopperConfig(segment=COMMITTED_SEGMENT, reason="the model"),
    "portable": SSDPortableConfig(chunk=32, block_p=16, reason="the table"),
}


def cell(seqlen: int, shape: str = "2x16x16x1", sequences: int = 1) -> Cell:
    found = GENERATOR.parse(shape)
    assert found is not None
    return Cell(shape=found, dtype="bf16", layout="contiguous", tokens=Tokens(sequences=sequences, seqlen=seqlen))


def ssd_inputs(seqlen: int, shape: str = "2x16x16x1") -> SSDInputs:
    return draw(cell(seqlen, shape), torch.device("cpu"))


def ssd_problem(kernel: str, *seqlens: int) -> Problem:
    """Of the Hopper kernel with 1,280 positions: 20 chunks, and the committed configuration has two segments."""
    inputs = tuple(ssd_inputs(seqlen) for seqlen in seqlens)
    return Problem(
        operator=SSD, shape="tiny", tokens="some", inputs=inputs, precision=Precision(),
        calls=SSD.tunable.calls(inputs[-1], "exact", kernel), committed=COMMITTED[kernel],
    )  # fmt: skip


@dataclass
class FakeTimer:
    """cost(config, tokens): microseconds.  spoilt(config, tokens): whether the output is wrong.  noise: factors.
    faulty(config): whether timing it fails."""

    device = torch.device("cpu")
    cost: Callable[[Any, int], float]
    spoilt: Callable[[Any, int], bool] = lambda _config, _tokens: False
    refused: Callable[[Any], bool] = lambda _config: False
    uncapturable: Callable[[Any], bool] = lambda _config: False
    faulty: Callable[[Any], bool] = lambda _config: False
    noise: Iterator[float] = field(default_factory=lambda: cycle((0.999, 1.001)))
    ran: list[tuple[Config, int]] = field(default_factory=list)
    _right: dict[tuple[object, ...], SSDOutput] = field(default_factory=dict)

    def run(self, inputs: SSDInputs, config: Config) -> SSDOutput:
        if self.refused(config):
            raise RuntimeError("out of resources: shared memory\nand more")
        tokens = inputs.x.shape[1]
        self.ran.append((config, tokens))
        key = (tokens, inputs.cu_seqlens is not None)
        if key not in self._right:
            exact = ssd_chunked(inputs, torch.float64)
            self._right[key] = SSDOutput(exact.out.to(inputs.x.dtype), exact.final_states.float())
        out, final_states = self._right[key]
        return SSDOutput(out * 2 if self.spoilt(config, tokens) else out, final_states)

    def reallocate(self, _generator: np.random.Generator) -> None:
        """Does nothing: there is no memory to move."""

    def record(self, run: Run) -> Recording:
        output = run()
        if self.uncapturable(self.ran[-1][0]):
            raise CaptureError("it synchronises")
        return Recording(graph=self.ran[-1], output=output)

    def device_us(self, recording: Recording) -> float:
        if self.faulty(recording.graph[0]):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.cost(*recording.graph) * next(self.noise)

    def call_us(self, _run: Run) -> float:
        raise AssertionError("nobody asks for call times")


def outcome(nchunks: int = 16, segment: int | None = 4) -> SearchOutcome:
    """The outcome of a search for mamba2-2.7b.  segment: of the find, or None without a find."""
    sizes = dict(nheads=80, headdim=64, dstate=128, ngroups=1, dtype="bf16", gate=False, sequences=1, nchunks=nchunks)
    calls = TunedCalls(operator="ssd", kernel="hopper", intermediates="exact", sizes=sizes)
    values = dict(
        segment=segment or 1, long_count=0, long_segment=0, recompute=False, shares=0, ring=3, score_ring=2,
        unit_registers=192, other_registers=24,
    )  # fmt: skip
    settings = KernelSettings(kernel="hopper", values=values)
    interval = (1.09, 1.11)
    committed = Trial(change="", settings=settings, verdict="committed", device_us=100.0)
    faster = Trial(
        change="ring 2", settings=settings.changed(values=values | {"ring": 2}), verdict="faster", device_us=90.9,
        device_ratio=1.1, device_interval=interval,
    )  # fmt: skip
    broken = Trial(change="ring 5", settings=settings, verdict="does not run", why="out of shared memory")
    created = "2026-11-20T12:00:00+00:00"
    find = TunedConfig(
        calls=calls, settings=faster.settings, device_ratio=1.1, device_interval=interval, created=created
    )
    return SearchOutcome(
        shape="mamba2-2.7b", tokens="1 x 1,024", calls=calls, committed=settings,
        trials=(committed, faster, broken) if segment else (committed,), find=find if segment else None,
        why="" if segment else "no candidate was faster",
    )  # fmt: skip


def environment(gpu: Gpu = GPU, triton: str | None = None) -> Environment:
    packages = {"triton": triton or installed_version("triton") or ""}
    return Environment(gpu=gpu, cpu="a processor", platform="Linux", python="3.11", packages=packages)
