"""Problems on the CPU, and a kernel and a stopwatch with invented times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch

from ssdprof import schema
from ssdprof.bench.shapes import parse_shapes
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.ssd.config import SSDPortableConfig
from ssdprof.kernels.ssd.hopper.config import SSDHopperConfig
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.bench import CaptureError, Recording
from ssdprof.measure.call import Run
from ssdprof.operators.drawing import Cell, Tokens
from ssdprof.operators.ssd.drawing import draw
from ssdprof.operators.ssd.operator import OPERATOR as SSD
from ssdprof.operators.tuning import Calls, Config, Settings
from ssdprof.tuning.records import Find, Outcome
from ssdprof.tuning.search import Problem

GPU = schema.Gpu(
    name="NVIDIA Test", compute_capability="9.0", sm_count=132, memory_bytes=1, l2_bytes=1, driver="1", cuda="13.0"
)
COMMITTED_SEGMENT = 10


def inputs_of(seqlen: int, shape: str = "2x16x16x1") -> SSDInputs:
    cell = Cell(
        shape=parse_shapes(SSD.drawing, shape)[0],
        dtype="bf16",
        layout="contiguous",
        tokens=Tokens(sequences=1, seqlen=seqlen),
    )
    return draw(cell, torch.device("cpu"))


def hopper_problem(seqlen: int = 1280) -> Problem:
    """20 chunks; the committed configuration has two segments."""
    inputs = inputs_of(seqlen)
    return Problem(
        operator=SSD,
        shape="tiny",
        intermediates="exact",
        tokens=f"1 x {seqlen:,}",
        calls=SSD.tunable.calls(inputs, "exact", "hopper"),
        inputs=(inputs,),
        precision=Precision(),
        committed=SSDHopperConfig(segment=COMMITTED_SEGMENT, reason="the model"),
    )


def portable_problem(*seqlens: int) -> Problem:
    inputs = tuple(inputs_of(seqlen) for seqlen in seqlens)
    return Problem(
        operator=SSD,
        shape="tiny",
        intermediates="exact",
        tokens="some",
        calls=SSD.tunable.calls(inputs[-1], "exact", "portable"),
        inputs=inputs,
        precision=Precision(),
        committed=SSDPortableConfig(chunk=32, block_p=16, reason="the table"),
    )


@dataclass
class Fake:
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

    def relocate(self, _generator: np.random.Generator) -> None:
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


def outcome(sequences: int = 1, nchunks: int = 16, segment: int | None = 4, created: str = "2026-11-20") -> Outcome:
    """The outcome of a search for mamba2-2.7b.  segment: of the find, or None without a find."""
    calls = Calls(
        operator="ssd",
        kernel="hopper",
        intermediates="exact",
        sizes={
            "nheads": 80,
            "headdim": 64,
            "dstate": 128,
            "ngroups": 1,
            "dtype": "bf16",
            "gate": False,
            "sequences": sequences,
            "nchunks": nchunks,
        },
    )
    settings = Settings(
        kernel="hopper",
        values={
            "segment": segment or 1,
            "long_count": 0,
            "long_segment": 0,
            "recompute": False,
            "shares": 0,
            "ring": 3,
            "score_ring": 2,
            "unit_registers": 192,
            "other_registers": 24,
        },
    )
    find = Find(
        calls=calls,
        settings=settings,
        device_ratio=1.1,
        device_interval=schema.Interval(low=1.09, high=1.11),
        created=f"{created}T12:00:00+00:00",
    )
    return Outcome(
        shape="mamba2-2.7b",
        tokens="1 x 1,024",
        calls=calls,
        committed=settings,
        trials=(),
        find=find if segment else None,
        why="",
    )


def environment(gpu: schema.Gpu = GPU, triton: str | None = None) -> schema.Environment:
    from ssdprof.environment.machine import installed_version

    packages = {"triton": triton or installed_version("triton") or ""}
    return schema.Environment(gpu=gpu, cpu="a processor", platform="Linux", python="3.11", packages=packages)
