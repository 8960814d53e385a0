"""The outcome of a run, from which its headline and the exit codes of `run`, `accuracy` and `export` follow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product

from ssdprof.schema.base import PrecisionRecord
from ssdprof.schema.gating import Broken, broken
from ssdprof.schema.rows import of_run
from ssdprof.schema.run import Asked, CaseResult, RunReport
from ssdprof.schema.serving import CallRef


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """broken_off: why the run is incomplete, in a sentence; empty if it is complete.
    judged: number of cases that were compared or failed, without those of other libraries.
    failed: the judged cases that did not pass.
    refused: requested cases that an implementation does not support, except other libraries.
    missing: number of requested cases that are not in the report.
    broken: gates that do not hold, each with its row.
    answers: number of judged cases of the model's answers.  answers_failed: a sentence for each failed one.
    """

    broken_off: str
    judged: int
    failed: tuple[CaseResult, ...]
    refused: tuple[CaseResult, ...]
    missing: int
    broken: tuple[Broken, ...] = ()
    answers: int = 0
    answers_failed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all requested cases were compared and passed, and all gates hold.  False if nothing was compared."""
        failed = self.failed or self.refused or self.missing or self.broken or self.answers_failed
        return self.judged + self.answers > 0 and not (self.broken_off or failed)


def outcome(report: RunReport) -> RunOutcome:
    cases = [case for case in report.cases if case.implementation not in report.libraries]
    refused = tuple(case for case in cases if case.status == "refused")
    asked = report.asked
    return RunOutcome(
        broken_off=_broken_off(report),
        judged=len(cases) - len(refused),
        failed=tuple(case for case in cases if case.status not in ("passed", "refused")),
        refused=tuple(
            case
            for case in refused
            if asked is None or any(case.implementation == name for name, _ in _compared(asked, case.call))
        ),
        missing=_missing(report),
        broken=broken(of_run(report), report.gates),
        answers=sum(len(answers.judged) for answers in report.answers),
        answers_failed=tuple(why for answers in report.answers for why in answers.failures()),
    )


def at_precisions(report: RunReport, precisions: Collection[PrecisionRecord]) -> RunReport:
    """The report as if only these precisions had been requested, and no answers."""
    asked = report.asked
    if asked is not None:
        kept = tuple(precision for precision in asked.precisions if precision in precisions)
        steps = asked.steps
        if steps is not None:
            there = tuple(precision for precision in steps.precisions if precision in precisions)
            steps = steps.model_copy(update={"precisions": there})
        others = (
            one.model_copy(update={"precisions": tuple(own for own in one.precisions if own in precisions)})
            for one in asked.others
        )
        asked = asked.model_copy(update={"precisions": kept, "steps": steps, "others": tuple(others)})
    cases = tuple(case for case in report.cases if case.precision in precisions)
    return report.model_copy(update={"cases": cases, "asked": asked, "answers": ()})


def of_implementations(report: RunReport, names: Collection[str]) -> RunReport:
    """The report as if only these implementations had been requested, and no answers.  The baseline stays."""
    asked = report.asked
    if asked is not None:
        steps = asked.steps
        if steps is not None:
            there = tuple(name for name in steps.implementations if name in names)
            steps = steps.model_copy(update={"implementations": there})
        fields = {
            "implementations": tuple(name for name in asked.implementations if name in names),
            "others": tuple(one for one in asked.others if one.name in {report.baseline, *names}),
            "steps": steps,
        }
        asked = asked.model_copy(update=fields)
    kept = {report.baseline, *names, *((asked.steps.baseline,) if asked and asked.steps else ())}
    cases = tuple(case for case in report.cases if case.implementation in kept)
    return report.model_copy(update={"cases": cases, "asked": asked, "answers": ()})


def exact_answer_is_finite(case: CaseResult) -> bool:
    """Whether the fp64 oracle, rounded to the output's dtype, is finite.  If not, no kernel's output can be."""
    return not any(tensor.floor.nonfinite for tensor in case.accuracy)


def _broken_off(report: RunReport) -> str:
    if report.state == "partial":
        return "this run did not reach its end"
    if not report.capture_complete:
        return "the replayed capture was interrupted and may lack layers or prompts"
    return ""


def _missing(report: RunReport) -> int:
    if report.asked is None:
        return 0
    there = {(case.layer, case.call or case.dims.seqlen, case.implementation, case.precision) for case in report.cases}
    missing = 0
    for prompt in report.prompts:
        for call in prompt.serving.calls(prompt.seqlen, prompt.batch):
            wanted = product(report.asked.layers, [call or prompt.seqlen], _compared(report.asked, call))
            missing += sum((layer, place, *compared) not in there for layer, place, compared in wanted)
    return missing


def _compared(asked: Asked, call: CallRef | None) -> tuple[tuple[str, PrecisionRecord], ...]:
    """(implementation, precision) pairs that a run was to compare in a call."""
    if call is not None and call.kind == "decode":
        return tuple(product(asked.steps.implementations, asked.steps.precisions)) if asked.steps else ()
    others = ((one.name, precision) for one in asked.others for precision in one.precisions)
    return (*product(asked.implementations, asked.precisions), *others)
