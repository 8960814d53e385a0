"""Cases, layers and precisions as text for sentences."""

from __future__ import annotations

from collections.abc import Iterable

from ssdprof.core import words as fmt
from ssdprof.report.groups import Series
from ssdprof.schema import CaseResult, PrecisionRecord
from ssdprof.schema.outcome import exact_answer_is_finite

_STATUSES = {"nonfinite": "not finite"}  # the other statuses are used as they are
_NO_ANSWER = "without a finite exact answer"


def case_words(cases: Iterable[CaseResult]) -> str:
    """ "fused (relaxed, bf16 states) inaccurate in layers 9, 18; ..." """
    found: dict[str, list[int]] = {}
    for case in cases:
        status = "" if case.status == "refused" else f" {status_words(case)}"
        found.setdefault(f"{case.implementation} ({case.precision}){status}", []).append(case.layer.index)
    return "; ".join(f"{name} in {layer_words(layers)}" for name, layers in found.items())


def trouble_words(series: Series) -> str:
    """The reason why a series did not pass: "not finite in layer 9"."""
    found: dict[str, list[int]] = {}
    for case in series.cases:
        if case.status != "passed":
            found.setdefault(status_words(case), []).append(case.layer.index)
        elif not all(one.passed for one in case.accuracy):
            found.setdefault("outside the error budget", []).append(case.layer.index)
    return fmt.words(f"{status} in {layer_words(layers)}" for status, layers in found.items())


def status_words(case: CaseResult) -> str:
    """ "not finite"; distinguishes cases whose exact answer is not finite either."""
    return _STATUSES.get(case.status, case.status) if exact_answer_is_finite(case) else _NO_ANSWER


def precision_words(precision: PrecisionRecord) -> str:
    """ "exact with fp32 states"."""
    return f"{precision.intermediates} with {precision.state_dtype} states"


def layer_words(indices: list[int]) -> str:
    """ "layer 9", "layers 9, 18"."""
    return f"{'layer' if len(set(indices)) == 1 else 'layers'} {fmt.indices(indices)}"
