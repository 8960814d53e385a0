"""The input of the export formats, made from a run, a bench or prefill times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ssdprof.report import markdown
from ssdprof.report.caveats import caveats
from ssdprof.report.tables import answers
from ssdprof.report.verdict import shortcomings, verdict_lines
from ssdprof.schema import Environment, Gates, RunReport
from ssdprof.schema.gating import Broken, gate_names
from ssdprof.schema.outcome import RunOutcome, outcome
from ssdprof.schema.rows import Row, of_answers, of_run


@dataclass(frozen=True, kw_only=True)
class Exported:
    """identity: unique among results of its kind.  subject: the model, or the operator of a bench.
    place: names of the columns that identify a row.  places: their values, for each row.
    excused: indices of rows whose failure does not count, such as those of another library.
    verdict, errors, caveats: lines; `errors` are the reasons why it did not pass.
    answer_gates: names of the limits of a model's answers.
    incomplete: why it is incomplete; empty if it is complete.
    markdown: (limit in bytes) -> the report.
    """

    kind: Literal["run", "bench", "prefill"]
    identity: str
    subject: str
    created: str  # ISO 8601, UTC
    ssdprof_version: str
    environment: Environment
    gates: Gates
    answer_gates: tuple[str, ...] = ()
    rows: tuple[Row, ...]
    place: tuple[str, ...]
    places: tuple[tuple[object, ...], ...]
    excused: frozenset[int] = field(default_factory=frozenset)
    passed: bool
    broken: tuple[Broken, ...]
    incomplete: str
    verdict: tuple[str, ...]
    errors: tuple[str, ...]
    caveats: tuple[str, ...]
    markdown: Callable[[int], str]

    @property
    def gate_names(self) -> tuple[str, ...]:
        """As in `Broken.gate`."""
        return (*gate_names(self.gates), *self.answer_gates)

    @property
    def gpu(self) -> str:
        return self.environment.gpu.name if self.environment.gpu else "none"


def from_run(report: RunReport) -> Exported:
    found, gpu = outcome(report), report.environment.gpu
    errors = list(shortcomings(found))
    if found.answers_failed:
        errors += answers.verdict(report.answers, found.answers_failed)
    if not (found.judged or found.answers):
        errors.append("Nothing was compared.")
    of_model = (report.run_id, report.checkpoint.repo_id, gpu.name if gpu else "none")
    return Exported(
        kind="run",
        identity=report.run_id,
        subject=report.checkpoint.repo_id,
        created=report.created,
        ssdprof_version=report.ssdprof_version,
        environment=report.environment,
        gates=report.gates,
        answer_gates=tuple(dict.fromkeys(name for one in report.answers for name in one.gate.names)),
        rows=(*of_run(report), *of_answers(report)),
        place=("run", "model", "GPU", "layer", "call", "tokens", "batch", "dimensions"),
        places=(
            *(
                (*of_model, case.layer.index, case.call or "", case.dims.seqlen, case.dims.batch, str(case.dims))
                for case in report.cases
            ),
            *((*of_model, "all", "", one.seqlen, 1, "") for one in report.answers for _ in one.judged),
        ),
        excused=frozenset(
            number for number, case in enumerate(report.cases) if case.status == "refused" and case not in found.refused
        ),
        passed=found.passed,
        broken=(*found.broken, *_broken_answers(report)),
        incomplete=_incomplete(report, found),
        verdict=verdict_lines(report),
        errors=tuple(errors),
        caveats=caveats(report),
        markdown=lambda limit: markdown.render(report, limit_bytes=limit),
    )


def _broken_answers(report: RunReport) -> Iterator[Broken]:
    judged = ((one.gate, case) for one in report.answers for case in one.judged)
    for row, (gate, case) in zip(of_answers(report), judged, strict=True):
        for name, found in gate.objections(case) if case.bands else ():
            yield Broken(gate=name, row=row.name, found=found)


def _incomplete(report: RunReport, found: RunOutcome) -> str:
    if not (report.cases or found.answers):
        return "Nothing was compared."
    return found.broken_off or (f"{found.missing} cases are missing" if found.missing else "")
