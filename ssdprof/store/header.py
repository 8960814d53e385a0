"""The header of a report: the request, the model, the machine, and notes for the reader."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ssdprof import __version__
from ssdprof.core.base import VERSION
from ssdprof.core.report import Report
from ssdprof.core.target import DECODED_ON_LOAD, CheckpointRef, Placement


def draft(*, command: tuple[str, ...] = (), **fields: Any) -> Report:
    """The header of a report that is about to start.  If it has a model, it also gets notes on the
    model, on its inputs, and on where its weights are.

    The id is empty until `reports.opened` sets it.

    fields: further fields of `Report`, at least kind, target, environment and baseline.
    """
    report = Report(
        version=VERSION,
        id="",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        commit=_commit(),
        ssdprof_version=__version__,
        **fields,
    )
    if report.model is None:
        return report
    return report.changed(notes=(*report.notes, *_notes(report, report.model)))


def _commit() -> str:
    """The commit that is checked out in the working directory, with "-dirty" after it if files have
    changed since; empty without a repository or without git.
    """
    # without tags, which are all excluded, git describes a commit by its hash
    words = ("git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10")
    with suppress(OSError):
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _notes(report: Report, ref: CheckpointRef) -> Iterator[str]:
    """The notes that follow from the request.  `report.statements.caveats` adds those that follow
    from the results.
    """
    yield from _on_model(ref)
    yield from _on_inputs(report, ref)
    if report.placement:
        yield from _on_placement(report.placement)


def _on_model(ref: CheckpointRef) -> Iterator[str]:
    """Notes on the choice of the model, and on its weights."""
    if ref.siblings:
        yield (
            f"{ref.requested} is a family of models; {ref.repo_id} was taken.  Its siblings: "
            f"{', '.join(ref.siblings)}."
        )
    if ref.random_weights:
        yield (
            "The weights are random: good for speed, which depends on shapes, but the accuracy "
            "says little about any trained model, and the model's answers mean nothing."
        )
    if ref.quantization is not None:
        decoded = ""
        if ref.quantization in DECODED_ON_LOAD:
            decoded = " and was decoded to 16 bit as it was loaded"
        yield (
            f"The checkpoint is quantised ({ref.quantization}){decoded}: the error of its "
            "projections is part of the values that were replayed."
        )


def _on_inputs(report: Report, ref: CheckpointRef) -> Iterator[str]:
    """Notes on why the replayed inputs may differ from those of the model in use."""
    lengths = [
        max(prompt.serving.packed, default=prompt.seqlen) + prompt.serving.decode
        for prompt in report.prompts
    ]
    longest = max(lengths, default=0)
    if ref.trained_context is not None and longest > ref.trained_context:
        yield (
            f"The model was trained on {ref.trained_context:,} tokens and ran on {longest:,}: its "
            "activations beyond that may be unlike those in use."
        )
    if any(prompt.kind == "random" for prompt in report.prompts):
        yield (
            "The prompt is random tokens: good for speed, but no text has such statistics, so "
            "decays, states and accuracy may be unlike those in use."
        )
    if report.tensor_parallel > 1:
        yield (
            f"What was replayed is the share of the first of {report.tensor_parallel} "
            "tensor-parallel ranks: its heads alone, with their groups or key heads; a single "
            "group is on every rank.  The model itself ran undivided."
        )
    if report.cast:
        source, to = report.cast
        yield (
            f"The captured inputs were {report.cast_words}: times, matches and errors are those of "
            f"{to} inputs, and the model itself ran in {source}.  Parameters, states and gates "
            "that the model keeps in fp32 were not cast."
        )


def _on_placement(placement: Placement) -> Iterator[str]:
    """A note on where the weights were; none for `one-gpu`, which has them all on one device."""
    kind = placement.kind
    device = placement.device
    if kind == "one-gpu":
        return
    names = {"cpu": "main memory", "disk": "the disk"}
    streamed = " and ".join(
        f"{part.layers} from {names[source]}"
        for source, part in placement.allocated.items()
        if source in names and source != device
    )
    if kind == "all-gpus":
        weights = "were divided among the GPUs"
    elif streamed:
        weights = f"were brought to {device} layer by layer ({streamed})"
    else:
        weights = f"fit on {device}"
    yield f"Placement {kind}: the model's weights {weights}; layers were replayed on {device}."
