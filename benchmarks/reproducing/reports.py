"""Reads the data for values from reports of ssdprof: cases, the GPU, wrong outputs, and missing cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdprof.bench.rows import of_bench
from ssdprof.bench.schema import BenchCell, BenchReport
from ssdprof.bench.schema import load as load_bench
from ssdprof.errors import unreadable
from ssdprof.jobs import stall_files
from ssdprof.runs import document, prefill_file
from ssdprof.schema.outcome import outcome
from ssdprof.schema.prefill import PrefillReport
from ssdprof.schema.rows import Errors, Row, of_run
from ssdprof.schema.run import RunReport
from ssdprof.schema.speed import Timing
from ssdprof.schema.stalls import StallReport

Report = BenchReport | RunReport | StallReport | PrefillReport
RIGHT = ("passed", "refused", "out of memory")  # statuses without a wrong output; any other status of ours is one


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation in one cell.  words: its description, as in `of` of a document.  us: by clock and statistic.

    trial: whether this is a chunk size with which the implementation was not fastest.
    """

    cell: str
    words: tuple[str, ...]
    us: Mapping[tuple[str, str], float]
    out: Errors | None = None
    trial: bool = False

    def fits(self, words: str) -> bool:
        """Whether the words describe it: an implementation, then intermediates and states, then "@128"."""
        *wanted, last = words.split()
        chunk = last if last.startswith("@") else ""
        own = [word for word in self.words if not word.startswith("@")]
        wanted = wanted if chunk else [*wanted, last]
        return own[: len(wanted)] == wanted and (chunk in self.words if chunk else not self.trial)


def read(kind: str, file: Path) -> Report:
    """Raises BadInputError for a file that ssdprof did not write."""
    if kind == "stalls":
        return stall_files.load(file)
    if kind == "prefill":
        return prefill_file.read(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(str(file), error, f"Name a result of ssdprof {kind}.") from error
    return load_bench(text) if kind == "bench" else document.load(text)


def again(kind: str, stored: Any) -> Report:
    """The part of a report that a result stores."""
    records: dict[str, type[Report]] = {
        "bench": BenchReport,
        "run": RunReport,
        "stalls": StallReport,
        "prefill": PrefillReport,
    }
    return records[kind].model_validate_json(json.dumps(stored))


def cases(report: Report) -> list[Case]:
    """The cases of a bench or a run with a correct output; only these have numbers."""
    if isinstance(report, BenchReport):
        return list(_of_bench(report))
    if isinstance(report, RunReport):
        rows = of_run(report)
        alone = len({row.where for row in rows}) == 1
        return [_case(row, row.tokens if alone else row.place) for row in rows if row.status == "passed"]
    return []


def _of_bench(report: BenchReport) -> Iterator[Case]:
    label = _labels(report)
    rows = iter(of_bench(report))
    for cell in report.cells:
        for case, row in zip(cell.cases, rows, strict=False):
            if case.status != "passed":
                continue
            yield _case(row, label(cell), case.chunk_size)
            for trial in case.trials:
                if trial.chunk_size != case.chunk_size and trial.status == "passed" and trial.device_us:
                    words = (*_words(row), f"@{trial.chunk_size}")
                    yield Case(cell=label(cell), words=words, us={("device", "median"): trial.device_us}, trial=True)


def _labels(report: BenchReport) -> Callable[[BenchCell], str]:
    """Labels that distinguish the cells: their tokens, their shapes, or both."""
    shapes = [cell.shape for cell in report.cells]
    if len(set(shapes)) == 1:
        return lambda cell: cell.tokens
    if len(set(shapes)) == len(shapes):
        return lambda cell: cell.shape
    return lambda cell: f"{cell.shape}, {cell.tokens}"


def _words(row: Row) -> tuple[str, ...]:
    return row.implementation, row.precision.intermediates, row.precision.state_dtype


def _case(row: Row, cell: str, chunk_size: int | None = None) -> Case:
    chunk = () if chunk_size is None else (f"@{chunk_size}",)
    return Case(cell=cell, words=(*_words(row), *chunk), us=_times(row.timing), out=row.out)


def _times(timing: Timing | None) -> dict[tuple[str, str], float]:
    if timing is None:
        return {}
    found = {("device", "median"): timing.device_median_us, ("call", "median"): timing.call_median_us}
    for clock, spread in (("device", timing.device_spread), ("call", timing.call_spread)):
        if spread is not None:
            found |= {(clock, "min"): spread.min_us, (clock, "p95"): spread.p95_us, (clock, "max"): spread.max_us}
    return found


def gpu(report: Report) -> str:
    """torch's name of the GPU; "no GPU" if there was none."""
    if isinstance(report, StallReport):
        return report.gpu or "no GPU"
    return report.environment.gpu.name if report.environment.gpu else "no GPU"


def created(report: Report) -> str:
    """ISO 8601; "" for stalls, which do not record it."""
    return "" if isinstance(report, StallReport) else report.created


def subjects(report: Report) -> set[str]:
    """The measured subjects, as in `subject` of a document; empty for a run and for stalls."""
    if isinstance(report, BenchReport):
        return {f"{cell.shape}, {cell.dims.dtype}" for cell in report.cells}
    return {report.checkpoint.requested} if isinstance(report, PrefillReport) else set()


def kernels(report: Report) -> str:
    """The hash of the kernels' sources; "" if the report does not have it."""
    return report.kernels if isinstance(report, BenchReport) else ""


def wrong(report: Report) -> list[str]:
    """One sentence for each wrong output of ours."""
    if isinstance(report, BenchReport):
        return [
            f"{cell.shape}, {cell.tokens}: {case.name}: {case.status}: {case.reason}"
            for cell in report.cells
            for case in cell.cases
            if case.implementation not in report.peers and case.status not in RIGHT
        ]
    if isinstance(report, RunReport):
        others = {one.name for one in report.asked.others if one.kind == "library"} if report.asked else set()
        return [
            f"{case.layer.name}: {case.implementation}, {case.precision}: {case.status}: {case.reason}"
            for case in outcome(report).failed
            if case.status not in RIGHT and case.implementation not in others  # a baseline can be a library's too
        ]
    if isinstance(report, PrefillReport):
        return [
            f"{case.implementation}, {case.precision}: {case.status}: {case.reason}"
            for case in report.prefill.failed
            if case.status not in RIGHT
        ]
    return []


def missing(report: Report) -> dict[str, str]:
    """Requested cases that were not measured, with the reasons."""
    if isinstance(report, BenchReport):
        found = {one.cell: one.reason for one in report.left_out}
        for cell in report.cells:
            for case in cell.cases:
                if case.timing is None:
                    found[f"{cell.tokens}: {case.name}"] = f"{case.status}: {case.reason}".rstrip(": ")
        return found | {sentence: "" for sentence in getattr(report, "absent", ())}
    if isinstance(report, RunReport):
        left = [case for case in report.cases if case.timing is None]
        return {f"{one.implementation}, {one.precision}": f"{one.status}: {one.reason}".rstrip(": ") for one in left}
    if isinstance(report, PrefillReport):
        return {f"{one.seqlen:,} tokens": one.reason for one in report.prefill.left_out}
    if isinstance(report, StallReport):
        return {"warp stalls": report.missing} if report.missing else {}
    return {}
