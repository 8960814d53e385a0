"""Problems of `ssdprof tune` on the CPU, and a kernel and a timer with invented times."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import cases
import fakes
import torch
from generated_inputs import generated

from ssdprof.core.base import EXACT_FP32
from ssdprof.core.case import Case, LayerCall
from ssdprof.core.target import Environment, Gpu
from ssdprof.core.tuned import TunedCalls, TunedConfig
from ssdprof.environment.machine import installed_version
from ssdprof.jobs.tune import Problem
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.first_run import Run
from ssdprof.measure.timing import CallError
from ssdprof.operators.ssd import OPERATOR as SSD
from ssdprof.operators.tuning import Config
from ssdprof.store import tuned as store

GPU = cases.environment(name="NVIDIA Test").gpu
COMMITTED_SEGMENT = 10
COMMITTED = {
    "hopper": SSDHopperConfig(segment=COMMITTED_SEGMENT, reason="the model"),
    "portable": SSDPortableConfig(chunk=32, block_p=16, reason="the table"),
}


def ssd_inputs(seqlen: int, sizes: str = "2x16x16x1"):
    return generated("ssd", sizes, seqlen, layout="contiguous")


def ssd_problem(kernel: str, *seqlens: int) -> Problem:
    """Of the Hopper kernel with 1,280 positions: 20 chunks, and the committed configuration has two
    segments.
    """
    inputs = tuple(ssd_inputs(seqlen) for seqlen in seqlens)
    of = dict(implementation="committed", precision=EXACT_FP32, status="ran", batch=1)
    calls_of = [
        LayerCall(kind="layer", layer=cases.layer(), dims=SSD.oracle.dims(one)) for one in inputs
    ]
    of_each = tuple(Case(task=task, seqlen=task.dims.seqlen, **of) for task in calls_of)
    calls = SSD.tunable.calls(inputs[-1], "exact", kernel)
    return Problem(
        operator=SSD,
        calls=calls,
        inputs=inputs,
        cases=of_each,
        precision=Precision(),
        committed=COMMITTED[kernel],
    )


@dataclass
class FakeTimer(fakes.FakeTimer):
    """cost(config, tokens): microseconds.  spoilt(config, tokens): whether the output is wrong.
    noise: factors.
    refused, unrecorded, faulty(config): whether it raises, cannot be captured, or fails while it is
    timed.
    """

    cost: Callable[[Any, int], float] = lambda *_: 100.0
    spoilt: Callable[[Any, int], bool] = lambda _config, _tokens: False
    refused: Callable[[Any], bool] = lambda _config: False
    unrecorded: Callable[[Any], bool] = lambda _config: False
    faulty: Callable[[Any], bool] = lambda _config: False
    noise: Iterator[float] = field(default_factory=lambda: cycle((0.999, 1.001)))
    ran: list[tuple[Config, int]] = field(default_factory=list)
    _right: dict[tuple[object, ...], tuple[SSDOutput, torch.Tensor]] = field(default_factory=dict)

    def run(self, inputs: SSDInputs, config: Config) -> SSDOutput:
        if self.refused(config):
            raise RuntimeError("out of resources: shared memory\nand more")
        tokens = inputs.x.shape[1]
        self.ran.append((config, tokens))
        key = (tokens, inputs.cu_seqlens is not None)
        if key not in self._right:
            exact = ssd_chunked(inputs, torch.float64)
            output = SSDOutput(exact.out.to(inputs.x.dtype), exact.final_states.float())
            self._right[key] = output, inputs.x.abs().max()
        (out, final_states), largest = self._right[key]
        factor = inputs.x.abs().max() / largest  # the inputs are scaled from call to call
        return SSDOutput(
            out * factor * (2 if self.spoilt(config, tokens) else 1), final_states * factor
        )

    def record(self, run: Run) -> tuple[Any, Any]:
        output = run()
        config, tokens = self.ran[-1]
        if self.unrecorded(config):
            raise CallError("it synchronises")
        return (config, self.cost(config, tokens), run, output), output

    def device_us(self, graph) -> float:
        if self.faulty(graph[0]):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().device_us(graph) * next(self.noise)

    def call_us(self, _run: Run) -> float:
        return 100.0


def finding(nchunks: int = 16, segment: int | None = 4) -> tuple[TunedCalls, TunedConfig | None]:
    """What a search for mamba2-2.7b found.  segment: of the find, or None without a find."""
    sizes = dict(
        nheads=80,
        headdim=64,
        dstate=128,
        ngroups=1,
        dtype="bf16",
        gate=False,
        sequences=1,
        nchunks=nchunks,
    )
    calls: TunedCalls = {"operator": "ssd", "kernel": "hopper", "intermediates": "exact", **sizes}
    values = dict(
        segment=segment or 1,
        long_count=0,
        long_segment=0,
        recompute=False,
        shares=0,
        ring=2,
        score_ring=2,
        unit_registers=192,
        other_registers=24,
    )
    created = "2026-11-20T12:00:00+00:00"
    find = TunedConfig(
        calls=calls,
        settings=values,
        device_ratio=1.1,
        device_interval=(1.09, 1.11),
        created=created,
    )
    return calls, find if segment else None


def kept(*given: Environment, nchunks: int = 16, segment: int | None = 4) -> Path:
    """The file in which what a search found is stored."""
    return store.keep(given[0] if given else environment(), *finding(nchunks, segment))


def environment(gpu: Gpu = GPU, triton: str | None = None) -> Environment:
    packages = {"triton": triton or installed_version("triton") or ""}
    return Environment(
        gpu=gpu, cpu="a processor", platform="Linux", python="3.11", packages=packages
    )
