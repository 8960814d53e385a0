"""A stopwatch without a GPU, implementations with known costs, and a report of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ssdprof import kernels, schema
from ssdprof.jobs.run import run as bench_run
# TODO ssdprof.bench.cell: Stopwatch, time_cell
# TODO ssdprof.bench.contenders: Contender
# TODO ssdprof.bench.judge: judge
# TODO ssdprof.bench.schema: BenchCase, BenchCell, BenchReport
from ssdprof.kernels import registry
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.timing import CaptureError, Recording
from ssdprof.measure.first_run import Run
from ssdprof.measure.roofline import SMLimits
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.operators.generate import Cell, Tokens
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.ssd import draw
from ssdprof.operators.ssd import OPERATOR as SSD
from ssdprof.operators.ssd import SSDShape
from ssdprof.schema import EXACT_FP32

SHAPE = SSDShape(name="tiny", nheads=2, headdim=16, dstate=16, ngroups=1)
CELL = Cell(shape=SHAPE, dtype="bf16", layout="contiguous", tokens=Tokens(sequences=1, seqlen=40))
CEILINGS = schema.Ceilings(copy_gb_per_s=4000.0, matmul_tflops=800.0)
RAN: list[tuple[str, float]] = []  # every implementation that ran, and its cost
HOPPER = SMLimits(warps=64, blocks=32, shared_bytes=233_472)


@dataclass
class FakeBench:
    """Device time: the cost of the implementation that ran.  A call costs 10 us more."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    uncapturable: frozenset[str] = frozenset()
    recorded: list[str] = field(default_factory=list)
    costs: dict[Run, float] = field(default_factory=dict)

    def relocate(self, _generator: np.random.Generator) -> None:
        """Does nothing: there is no memory to move."""

    def record(self, run: Run) -> Recording:
        output = run()
        name, cost = RAN[-1]
        if name in self.uncapturable:
            raise CaptureError("it synchronises")
        self.recorded.append(name)
        self.costs[run] = cost
        return Recording(graph=cost, output=output)

    def device_us(self, recording: Recording) -> float:
        return float(recording.graph)

    def call_us(self, run: Run) -> float:
        return self.costs[run] + 10

    def warm_us(self, run: Run) -> float:
        return self.costs[run] / 2


class CudaFakeBench(FakeBench):
    """Replaces `CudaBench`."""

    def __init__(self, _device: torch.device) -> None:
        super().__init__()


class UnreadClocks:
    """Replaces `ClockWatch` on a machine without readable clocks."""

    clocks = None

    def __enter__(self) -> UnreadClocks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def poll(self) -> None: ...


def noting(name: str, cost: float, operator: str = "ssd") -> Implementation:
    """The bundled implementation, which also records its run for the stopwatch."""
    plain = kernels.get(operator, name)

    def run(inputs: Any, precision: Precision) -> Any:
        RAN.append((name, cost))
        return plain.run(inputs, precision)

    return replace(plain, run=run)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ssdprof bench ssd` runs without a GPU: kernels in the interpreter, and a stopwatch with invented numbers."""
    for name, cost in (("unfused", 300.0), ("fused", 100.0)):
        monkeypatch.setitem(registry._implementations, ("ssd", name), noting(name, cost))
    monkeypatch.setattr("ssdprof.environment.present.require_gpu", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(bench_run, "require_gpu", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr(bench_run, "CudaBench", CudaFakeBench)
    monkeypatch.setattr(bench_run, "SamplingPlan", partial(SamplingPlan, min_recordings=2, max_recordings=2))
    monkeypatch.setattr(bench_run, "ClockWatch", UnreadClocks)
    monkeypatch.setattr(bench_run.SMLimits, "of", lambda _: HOPPER)


def contender(
    name: str,
    cost: Callable[[int | None], float],
    *,
    chunk_sizes: tuple[int, ...] = (),
    ours: bool = True,
    precision: schema.PrecisionRecord = EXACT_FP32,
    spoil: Callable[[SSDOutput], SSDOutput] = lambda output: output,
    wrong_chunk: int = 0,
) -> Contender:
    """A contender with the right output, changed by `spoil`, that takes `cost(chunk_size)` microseconds."""

    def run(inputs: SSDInputs, _precision: Precision) -> SSDOutput:
        RAN.append((name, cost(inputs.chunk_size if chunk_sizes else None)))
        exact = ssd_chunked(inputs, torch.float64)
        out = exact.out * 2 if inputs.chunk_size == wrong_chunk else exact.out
        return spoil(SSDOutput(out.to(inputs.x.dtype), exact.final_states.float()))

    def plan(_inputs: SSDInputs, _precision: Precision) -> Plan:
        return Plan(variant=name, launches=1)

    implementation = Implementation(operator="ssd", name=name, run=run, plan=plan)
    named = Implementation(name=name, kind="bundled" if ours else "library", implementation=implementation)
    return Contender(named=named, precision=precision, chunk_sizes=chunk_sizes)


def measured(
    *contenders: Contender,
    bench: FakeBench | None = None,
    cell: Cell = CELL,
    match_with: str = "unfused",
    warm: bool = False,
) -> tuple[BenchCase, ...]:
    """The cases of a cell, judged by the real comparator and timed by a fake stopwatch."""
    inputs = draw(cell, torch.device("cpu"))
    judged = judge([entry for one in contenders for entry in one.entries(SSD, inputs)], match_with=match_with)
    plan = SamplingPlan(min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3, warm=warm)
    watch = Stopwatch(bench=bench or FakeBench(), sampling=plan, ceilings=CEILINGS, limits=HOPPER)
    return time_cell(inputs, contenders, judged, watch)


def report(*cases: BenchCase, **fields: Any) -> BenchReport:
    """A report of one cell."""
    cell = BenchCell(
        shape="tiny",
        sizes=str(SHAPE),
        dims=SSD.costed.dims(draw(CELL, torch.device("cpu"))),
        sequences=1,
        layout="contiguous",
        packed=False,
        tokens="1 x 40",
        cases=cases,
    )
    made: dict[str, Any] = {
        "operator": "ssd",
        "ssdprof_version": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "command": ("ssdprof", "bench", "ssd"),
        "state": "complete",
        "environment": schema.Environment(gpu=None, cpu="a processor", platform="Linux", python="3.11", packages={}),
        "peers": {"mamba_ssm": "2.3"},
        "baseline": "mamba_ssm",
        "ceilings": CEILINGS,
        "cells": (cell,),
    }
    return BenchReport(**(made | fields))


def gated(done: BenchReport, **limits: object) -> BenchReport:
    return done.model_copy(update={"gates": schema.Gates.model_validate(limits)})
