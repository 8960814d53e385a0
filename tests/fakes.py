"""A timer without a GPU, and implementations with known costs."""

import errno
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cases import layer

from ssdprof import kernels
from ssdprof.core.case import Case, LayerCall
from ssdprof.core.target import Ceilings
from ssdprof.jobs import bench as bench_job
from ssdprof.jobs.compare import Comparer, Entry
from ssdprof.kernels import registry
from ssdprof.kernels.device import INTERPRETED
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation, Plan
from ssdprof.kernels.ssd.inputs import SSDInputs, SSDOutput
from ssdprof.kernels.ssd.reference import ssd_chunked
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.first_run import Call, Run
from ssdprof.measure.sampling import SamplingPlan
from ssdprof.measure.timing import CallError, CudaTimer
from ssdprof.operators.generate import Cell, Shape, Tokens
from ssdprof.operators.ssd import OPERATOR as SSD

SHAPE = Shape("tiny", "2x16, N 16, G 1", {"nheads": 2, "headdim": 16, "dstate": 16, "ngroups": 1})
CELL = Cell(shape=SHAPE, dtype="bf16", layout="contiguous", tokens=Tokens(sequences=1, seqlen=40))
RAN: list[tuple[str, float]] = []  # every implementation that ran, and its cost
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="only the interpreter's kernels run on a CPU"
)
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
QUICK = SamplingPlan(
    warmup_rounds=0, min_recordings=2, max_recordings=2, min_rounds=3, max_rounds=3
)


@dataclass
class FakeTimer(CudaTimer):
    """Device time: the cost of the implementation that ran.  A call costs 10 us more.

    uncapturable: names.  stop_at: the number of the call that is interrupted.  spoil: what happens
    to the output of a replay.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    uncapturable: frozenset[str] = frozenset()
    stop_at: int | None = None
    spoil: Callable[[str, Any], object] = lambda _name, _output: None
    recorded: list[str] = field(default_factory=list)
    calls: int = 0
    known: dict[Run, tuple[str, float]] = field(default_factory=dict)

    def reallocate(self, _generator: np.random.Generator):
        """Does nothing: there is no memory to move."""

    def record(self, run: Run) -> tuple[Any, Any]:
        output = run()
        name, cost = RAN[-1]
        if name in self.uncapturable:
            raise CallError("it synchronises")
        self.recorded.append(name)
        self.known[run] = name, cost
        return (name, cost, run, output), output

    def device_us(self, graph) -> float:
        name, cost, run, output = graph
        if output[0].numel() and bool(
            output[0].isnan().all()
        ):  # poisoned: only then can it be told that nothing was computed
            for own, new in zip(output, run(), strict=True):
                own.copy_(new)
        self.spoil(name, output)
        return float(cost)

    def unseen(self, *_: object) -> str:
        return ""

    def call_us(self, run: Run) -> float:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        return self.known[run][1] + 10


def put(monkeypatch, name: str, **members):
    """Installs a module of this name with `members`."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def denied(*_, **__):
    """Takes the place of a function that the system does not permit."""
    raise PermissionError(errno.EACCES, "Permission denied")


def right(inputs: SSDInputs) -> SSDOutput:
    exact = ssd_chunked(inputs)
    return SSDOutput(exact.out.to(inputs.x.dtype), exact.final_states.float())


def noisy(amount: float) -> Callable[[SSDOutput], SSDOutput]:
    """Multiplies the output by random numbers near 1."""

    def spoil(output: SSDOutput) -> SSDOutput:
        noise = torch.randn(output.out.shape, generator=torch.Generator().manual_seed(0))
        return SSDOutput(
            (output.out.float() * (1 + amount * noise)).to(output.out.dtype), output.final_states
        )

    return spoil


def inputs() -> SSDInputs:
    made = SSD.generated.draw(CELL, torch.device("cpu"))
    assert isinstance(made, SSDInputs)
    return made


def entries(
    name: str,
    cost: float | Callable[[int | None], float] = 100.0,
    *,
    precision: Precision = Precision(),  # noqa: B008
    kind="bundled",
    chunk_sizes: Sequence[int | None] = (None,),
    baseline: Entry | None = None,
    turns=None,
    spoil: Callable[[SSDOutput], SSDOutput] = lambda output: output,
    wrong_chunk: int = 0,
    **call,
) -> list[Entry]:
    """An entry for each chunk size, with the right output, changed by `spoil`, that takes `cost`
    microseconds.

    call: fields of its calls.
    """
    given = inputs()
    made = []
    for size in chunk_sizes:
        own = given if size is None else replace(given, chunk_size=size)

        def run(inputs: SSDInputs, _precision: Precision, size: int | None = size) -> SSDOutput:
            RAN.append((name, cost(size) if callable(cost) else cost))
            output = right(inputs)
            return spoil(
                SSDOutput(output.out * 2, output.final_states) if size == wrong_chunk else output
            )

        implementation = Implementation(
            operator="ssd",
            name=name,
            run=run,
            plan=lambda *_: Plan(variant=name, launches=1),
            kind=kind,
        )
        label = f"{name} {precision}{'' if size is None else f', chunk {size}'}"
        case = Case(
            task=LayerCall(kind="layer", layer=layer(3), dims=SSD.oracle.dims(own)),
            batch=1,
            seqlen=40,
            implementation=name,
            kind=kind,
            precision=str(precision),
            baseline=baseline.case.implementation if baseline else "",
            status="ran",
            chunk_size=size,
        )
        bound = Call(
            implementation=implementation, inputs=own, precision=precision, label=label, **call
        )
        made.append(Entry(case=case, call=bound, baseline=baseline, turns=turns))
    return made


def compared(
    *of: list[Entry], timer: FakeTimer | None = None, seen: list[Case] | None = None, **fields
) -> dict[str, Case]:
    """The last case of each label, compared by the real comparator and timed by a fake timer.

    seen: gets all of them, also those before an error.  fields: of the comparer.
    """
    comparer = Comparer(timer=timer, sampling=QUICK, process="one", **fields)
    seen = [] if seen is None else seen
    for case in comparer.compare([entry for some in of for entry in some], "layer 3"):
        seen.append(case)
    return {
        case.label if case.precision != str(Precision()) else case.implementation: case
        for case in seen
    }


def noting(name: str, cost: float, operator: str, *, real: bool) -> Implementation:
    """The bundled implementation, which also records its run for the timer.  real: its kernels run,
    which takes longer than the exact output; once for the same numbers.
    """
    plain = kernels.get(operator, name)
    known = {}

    def run(inputs, precision: Precision):
        RAN.append((name, cost))
        if not real:
            return oracle_output(inputs)
        numbers = (
            one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for one in inputs.tensors.values()
        )
        key = (precision, inputs.form, *numbers)
        if key not in known:
            known[key] = plain.run(inputs, precision)
        return tuple(one.clone() for one in known[key])

    return replace(plain, run=run)


def note_runs(monkeypatch, operator: str = "ssd", *, real: bool = False, **costs: float):
    """Implementations note their runs for the timer, with these costs."""
    for name, cost in costs.items():
        one = noting(name, cost, operator, real=real)
        monkeypatch.setitem(registry._implementations, (operator, name), one)


def pretend_gpu(monkeypatch, *, real: bool = False):
    """`bench` runs without a GPU, and a timer has invented numbers.  real: kernels run in the
    interpreter.
    """
    note_runs(monkeypatch, real=real, unfused=300.0, fused=100.0)
    ceilings = Ceilings(copy_gb_per_s=4000.0, matmul_tflops=800.0)
    monkeypatch.setattr(bench_job, "require_gpu", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(bench_job, "measure_ceilings", lambda _: ceilings)
    monkeypatch.setattr(bench_job, "CudaTimer", lambda _: FakeTimer())
    monkeypatch.setattr(
        bench_job, "SamplingPlan", partial(SamplingPlan, min_recordings=2, max_recordings=2)
    )
    monkeypatch.setattr(bench_job, "read_clocks", lambda: None)
    monkeypatch.setattr(bench_job, "PROCESSES", 1)
    monkeypatch.setattr(Call, "outputs_that_fit", 100)


def flip_a_bit(file: Path):
    """In the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@contextmanager
def disk_with_room_for(size: int) -> Iterator[None]:
    """Writing past `size` bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
