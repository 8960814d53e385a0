"""`ssdprof answers`: measures how a model's answers change with each implementation.

locate -> fetch -> build prompts -> load all of the model -> compare its answers -> record
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from ssdprof import operators, runs
from ssdprof.operators.named import Roster
from ssdprof.pipeline import limits
from ssdprof.pipeline.answers_request import AnswersRequest
from ssdprof.pipeline.compare_answers import compare_answers
from ssdprof.pipeline.model import load
from ssdprof.pipeline.request import CaptureRequest, Keep
from ssdprof.pipeline.subject import Subject
from ssdprof.progress import Watcher
from ssdprof.runs.record import Recorder, draft, recorded
from ssdprof.schema import Asked, RunReport  # TODO


def answers(
    request: CaptureRequest, wanted: AnswersRequest, keep: Keep, watcher: Watcher, subject: Subject
) -> tuple[Path, RunReport]:
    """Compare the answers of a whole model on each prompt.

    subject: the whole model, the result of `loaded_as`.  Returns the run's folder and its report.
    """
    wanted = replace(wanted, weights=_weights(wanted))
    with runs.opened(keep.out, request.model.model) as folder:
        check(subject, wanted)
        loaded = load(request, subject, watcher)
        report = draft(
            folder,
            keep.command,
            subject.ref,
            loaded.prompts,
            max(loaded.segment_lengths),
            asked=Asked(implementations=(), precisions=(), layers=()),
            placement=loaded.placement,
        )
        with recorded(Recorder(folder, report), watcher) as recorder:
            compare_answers(loaded, subject, wanted, watcher, recorder.answered)
    return folder.path, recorder.report


def loaded_as(subject: Subject, wanted: AnswersRequest) -> Subject:
    """The subject in the dtype that its weights are loaded in."""
    return replace(subject, dtype="float32") if _weights(wanted) == "fp32" else subject


def check(subject: Subject, wanted: AnswersRequest) -> None:
    """Raise the reason if this machine cannot compare the answers.  Loads nothing; `--dry-run` calls it too."""
    roster = Roster(limits.device())
    for operator in {layer.operator for layer in subject.layers}:
        for name in wanted.implementations:
            _ = roster.get(operators.get(operator), name).present
    limits.check_replay(subject.seqlens)


def _weights(wanted: AnswersRequest) -> Literal["own", "fp32"]:
    """fp32 without a GPU, because no model is served in 16 bit there: only the operators' error remains."""
    if wanted.weights == "auto":
        return "own" if limits.device().type == "cuda" else "fp32"
    return wanted.weights
