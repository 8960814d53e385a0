"""The recorded results of `ssdprof bench`: a line per bench and per case in results/<gpu>.jsonl.

    python benchmarks/recorded.py [NAME=]REPORT ...

Adds a report of `ssdprof bench`, a folder or a JSON document, to the file of its GPU, under NAME or
its own name, and
removes what it supersedes: older cells with the same inputs whose cases were all measured again,
with newer kernels.  Other scripts and the tests read these files.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from pydantic import Field

from ssdprof.core.accuracy import Deviation
from ssdprof.core.base import Clock, Record, intermediates_of, states_of
from ssdprof.core.case import Case, Generated, Launch
from ssdprof.core.report import Report
from ssdprof.core.statistics import Estimate
from ssdprof.core.target import Ceilings, Clocks, Environment
from ssdprof.files import write_text
from ssdprof.store.reports import load

RESULTS = Path(__file__).parent / "results"
ERROR_DIGITS, TIME_DIGITS = 4, 6
CLOCKS: tuple[Clock, ...] = ("device", "call")
Triple = tuple[float, float, float]  # the value, then its 95 % interval


class RecordedBench(Record):
    """What belongs to all cases of a bench.  name: the cases refer to it.  kernels: the hash of
    their sources.
    libraries: other libraries and their versions.  matched_with: every output is compared with that
    of this one.
    """

    kind: Literal["bench"]
    name: str
    operator: str
    created: str
    command: tuple[str, ...]
    ssdprof: str
    kernels: str = ""
    state: Literal["complete", "partial"] = "complete"
    seconds: float
    ranks: int = 1
    environment: Environment
    clocks: Clocks | None = None
    ceilings: Ceilings | None = None
    libraries: dict[str, str] = Field(default_factory=dict)
    absent: tuple[str, ...] = ()
    baseline: str
    matched_with: str = ""
    left_out: dict[str, str] = Field(default_factory=dict)

    @property
    def gpu(self) -> str:
        return self.environment.gpu.name if self.environment.gpu else "no GPU"

    @property
    def fixed(self) -> bool:
        """Whether it is of a published comparison: these fix the chunk sizes and take no tuned
        configuration.
        """
        return self.name.startswith("published/")


class Error(Record):
    """The error of one tensor against the fp64 oracle.  floor: that of the rounded oracle.

    matches: percent of the elements that match at the tolerances 0, 1e-3 and 1e-2, with the output
    of `RecordedBench.matched_with` and with fp64; absent in older benches.
    """

    rms_ratio: float
    floor: float
    max_abs: float | None = None
    matches: Triple | None = None
    matches_fp64: Triple | None = None


class Speedup(Record):
    """How many times as fast the case is."""

    device: Triple
    call: Triple


class RecordedCase(Record):
    """One implementation at one precision ("exact fp32": intermediates, states) in one cell.

    tokens: of all sequences, in words: "8 x 4,096".  seqlen: of one sequence.  ways: words of
    --draw.
    checked: tokens of a sequence that were compared, if not all.  version: of another library.
    outside_budget: why another library's output is not within the error budget, if it was timed all
    the same.
    floor_us: least time for its bytes and arithmetic.  chunk_sizes: device times at each tried
    chunk size.
    compiled: seconds for each kernel that its first call compiled.
    over: implementation -> speedup over its fastest case in the cell.
    """

    kind: Literal["case"]
    bench: str
    operator: str
    shape: str
    sizes: dict[str, int]
    batch: int
    seqlen: int
    sequences: int
    tokens: str
    layout: Literal["contiguous", "views", "transposed"] = "contiguous"
    packed: bool = False
    ways: tuple[str, ...] = ()
    dtype: str
    checked: int | None = None
    implementation: str
    variant: str
    version: str = ""
    precision: str
    chunk_size: int | None = None
    status: str
    reason: str = ""
    outside_budget: str = ""
    plan: str = ""
    launches: tuple[Launch, ...] = ()
    workspace_bytes: int | None = None
    errors: dict[str, Error] = Field(default_factory=dict)
    device_us: Triple | None = None
    call_us: Triple | None = None
    floor_us: float | None = None
    chunk_sizes: dict[int, float] = Field(default_factory=dict)
    compiled: dict[str, float] = Field(default_factory=dict)
    over: dict[str, Speedup] = Field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return [self.implementation, *self.precision.split()]

    def fits(self, words: str) -> bool:
        """Whether the words describe it: "fused", "fused exact fp32"."""
        wanted = words.split()
        return self.words[: len(wanted)] == wanted


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The cases that were measured in turns, on the same inputs."""

    bench: RecordedBench
    cases: tuple[RecordedCase, ...]

    @property
    def one(self) -> RecordedCase:
        """A case, for what all have in common."""
        return self.cases[0]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same inputs."""
        return _inputs(self.one)

    def fastest(self, words: str) -> RecordedCase | None:
        timed = [case for case in self.cases if case.fits(words) and case.device_us]
        return min(timed, key=lambda case: case.device_us or (), default=None)


def _inputs(case: RecordedCase) -> tuple[object, ...]:
    return case.operator, case.shape, case.tokens, case.dtype, case.layout, case.ways


def cells_of(text: str) -> list[Cell]:
    """The cells of a JSONL file, in its order."""
    benches: dict[str, RecordedBench] = {}
    cases: list[RecordedCase] = []
    for line in text.splitlines():
        if line.startswith('{"kind":"bench"'):
            one = RecordedBench.model_validate_json(line)
            benches[one.name] = one
        else:
            cases.append(RecordedCase.model_validate_json(line))
    groups = groupby(cases, key=lambda case: (case.bench, _inputs(case)))
    return [Cell(bench=benches[name], cases=tuple(own)) for (name, _), own in groups]


def read(file: Path) -> list[Cell]:
    """The cells of a JSONL file, or of a report of `ssdprof bench`."""
    if file.suffix == ".jsonl":
        return cells_of(file.read_text(encoding="utf-8"))
    return recorded(file.stem, load(file, "bench")[1])


def committed(gpu: str = "*") -> list[Cell]:
    """The recorded cells of a GPU ("h200"), or of all."""
    return [cell for file in sorted(RESULTS.glob(f"{gpu}.jsonl")) for cell in read(file)]


def text_of(cells: Sequence[Cell]) -> str:
    """The contents of a JSONL file."""
    records: list[Record] = []
    for one, own in groupby(cells, key=lambda cell: cell.bench):
        records += [one, *(case for cell in own for case in cell.cases)]
    return "".join(f"{one.model_dump_json(exclude_defaults=True)}\n" for one in records)


def recorded(name: str, report: Report) -> list[Cell]:
    """The cells of a report, in the form of the archive."""
    of_all = RecordedBench(
        kind="bench",
        name=name,
        operator=report.target,
        ssdprof=report.ssdprof_version,
        state="complete" if report.complete else "partial",
        libraries={
            case.implementation: case.version for case in report.cases if case.kind == "library"
        },
        left_out={one.case_key: one.reason for one in report.left_out},
        **{
            field: getattr(report, field)
            for field in (
                "created",
                "command",
                "kernels",
                "seconds",
                "ranks",
                "environment",
                "clocks",
                "ceilings",
                "absent",
                "baseline",
                "matched_with",
            )
        },
    )
    places: dict[str, list[RecordedCase]] = {}
    for case in report.cases:
        places.setdefault(case.case_key, []).append(_case(of_all, report, case))
    return [Cell(bench=of_all, cases=tuple(own)) for own in places.values()]


def _case(of_all: RecordedBench, report: Report, case: Case) -> RecordedCase:
    task = case.task
    assert isinstance(task, Generated)
    first, floor_us = case.first_call, case.floor_us(report.ceilings)
    return RecordedCase(
        kind="case",
        bench=of_all.name,
        operator=task.dims.operator,
        sizes=task.dims.sizes,
        dtype=task.dims.dtype,
        ways=task.ways,
        precision=f"{intermediates_of(case.precision)} {states_of(case.precision)}",
        status=case.result,
        reason=case.why if case.result != "passed" else "",
        outside_budget=case.accuracy_faults if case.result == "passed" else "",
        errors=dict(_errors(case)),
        device_us=case.device_us and _times(case.device_us),
        call_us=case.call_us and _times(case.call_us),
        floor_us=floor_us and _digits(floor_us, TIME_DIGITS),
        chunk_sizes={
            chunk_size: _digits(us, TIME_DIGITS)
            for chunk_size, us in case.trials.items()
            if us and len(case.trials) > 1
        },
        compiled={name: round(seconds, 3) for name, seconds in first.compiled.items()}
        if first
        else {},
        over=dict(_over(report, case)),
        **{
            name: getattr(task, name)
            for name in ("shape", "sequences", "tokens", "layout", "packed", "checked")
        },
        **{
            name: getattr(case, name)
            for name in (
                "batch",
                "seqlen",
                "implementation",
                "variant",
                "version",
                "chunk_size",
                "plan",
                "launches",
                "workspace_bytes",
            )
        },
    )


def _over(report: Report, case: Case) -> Iterator[tuple[str, Speedup]]:
    """The speedups over the fastest case of each other implementation in the cell."""
    for name in dict.fromkeys(
        one.implementation for one in report.cases if one.case_key == case.case_key
    ):
        device, call = (report.speedup(case, clock, name) for clock in CLOCKS)
        if device and call:
            yield name, Speedup(device=_times(device), call=_times(call))


def _errors(case: Case) -> Iterator[tuple[str, Error]]:
    """The errors of out and final_states."""
    for one in case.accuracy:
        ratio, floor = one.vs_oracle.rms_ratio, one.floor.rms_ratio
        if ratio is not None and floor is not None:
            yield (
                one.tensor,
                Error(
                    rms_ratio=_digits(ratio, ERROR_DIGITS),
                    floor=_digits(floor, ERROR_DIGITS),
                    max_abs=_digits(one.vs_oracle.max_abs, ERROR_DIGITS),
                    matches=one.vs_baseline and _matches(one.vs_baseline),
                    matches_fp64=_matches(one.vs_oracle),
                ),
            )


def _matches(deviation: Deviation) -> Triple:
    zero, small, large = (_digits(one, TIME_DIGITS) for one in deviation.matches)
    return zero, small, large


def _times(found: Estimate) -> Triple:
    return (
        _digits(found.value, TIME_DIGITS),
        _digits(found.low, TIME_DIGITS),
        _digits(found.high, TIME_DIGITS),
    )


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def current(cells: Iterable[Cell]) -> list[Cell]:
    """Without superseded cells: all their cases were measured later, on the same inputs, with newer
    kernels.
    """
    kept: list[Cell] = []
    newer: dict[tuple[object, ...], list[tuple[str, set[str]]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.bench.created, reverse=True):
        measured = newer.setdefault((*cell.key, cell.bench.fixed, cell.one.checked), [])
        cases = {" ".join(case.words) for case in cell.cases}
        if not any(
            cases <= others for kernels, others in measured if kernels != cell.bench.kernels
        ):
            kept.append(cell)
        measured.append((cell.bench.kernels, cases))
    return sorted(kept, key=lambda cell: (cell.bench.name, cell.bench.created))


def file_of(gpu: str) -> Path:
    """ "NVIDIA H100 80GB HBM3" -> h100.jsonl."""
    return RESULTS / f"{gpu.removeprefix('NVIDIA ').split()[0].lower()}.jsonl"


def main(words: Sequence[str]) -> None:
    for word in words:
        name, _, file = word.rpartition("=")
        name = name or Path(file).stem
        new = recorded(name, load(file, "bench")[1])
        target = file_of(new[0].bench.gpu)
        before = read(target) if target.is_file() else []
        write_text(
            target, text_of(current([*(cell for cell in before if cell.bench.name != name), *new]))
        )
        print(f"{target}: {len(new)} cells of {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
