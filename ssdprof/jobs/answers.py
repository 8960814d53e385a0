"""Compares the answers of a whole model between implementations of its operators.

locate -> fetch -> build prompts -> load all of the model
reference -> noise -> every implementation and precision -> every layer alone, if requested
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ssdprof import operators
from ssdprof.capture.forward import PromptRun, check_ids, greedy, hidden_states, logits
from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.checkpoint.meta import Mixer, find_mixers, match_layers
from ssdprof.core.base import EXACT_FP32, PrecisionRecord
from ssdprof.core.case import Answers, Case, Generated
from ssdprof.core.report import Report
from ssdprof.environment.machine import collect
from ssdprof.errors import MissingCapabilityError
from ssdprof.jobs import limits
from ssdprof.jobs.plan import Loaded, load, notes
from ssdprof.jobs.request import AnswersRequest, CaptureRequest
from ssdprof.jobs.subject import Subject
from ssdprof.jobs.substitute import Compute, by_layer, implemented, precisions_of, substituted
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.answers import Divergence, bands, compare_logits, first_nonfinite, joined, rows_that_fit
from ssdprof.measure.first_run import first_line, forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import while_it_runs
from ssdprof.operators import tensors
from ssdprof.operators.dtypes import dtype_name
from ssdprof.operators.implementations import ImplementationCache, required
from ssdprof.progress import Watcher
from ssdprof.store.reports import Writer, draft, opened
from ssdprof.store.reports import load as load_report


def answers(request: CaptureRequest, wanted: AnswersRequest, watcher: Watcher, subject: Subject) -> tuple[Path, Report]:
    """Compare the answers of a whole model on each prompt.

    subject: the whole model, the result of `loaded_as`.  Returns the report's folder and the report.
    """
    wanted = replace(wanted, weights=_weights(wanted))
    check(subject, wanted)
    loaded = load(request, subject, watcher)
    header = draft(
        "answers",
        subject.ref.repo_id,
        wanted.command,
        model=subject.ref,
        environment=collect(),
        conditions=wanted.conditions,
        baseline="unfused",
        prompts=loaded.prompts,
        segment_length=max(loaded.segment_lengths),
        placement=loaded.placement,
        notes=notes(subject.ref, loaded.prompts, placement=loaded.placement),
    )
    with opened(wanted.out, header, watcher) as writer:
        compare_answers(loaded, subject, wanted, watcher, writer)
    return load_report(writer.folder)


def loaded_as(subject: Subject, wanted: AnswersRequest) -> Subject:
    """The subject in the dtype that its weights are loaded in."""
    return replace(subject, dtype="float32") if _weights(wanted) == "fp32" else subject


def check(subject: Subject, wanted: AnswersRequest) -> None:
    """Raise the reason if this machine cannot compare the answers.  Loads nothing; `--dry-run` calls it too."""
    cache = ImplementationCache(limits.device())
    for operator in {layer.operator for layer in subject.layers}:
        for name in wanted.implementations:
            required(cache.get(operators.get(operator), name))
    limits.check_replay(subject.seqlens)


def _weights(wanted: AnswersRequest) -> Literal["own", "fp32"]:
    """fp32 without a GPU, because no model is served in 16 bit there: only the operators' error remains."""
    if wanted.weights == "auto":
        return "own" if limits.device().type == "cuda" else "fp32"
    return wanted.weights


def compare_answers(
    loaded: Loaded, subject: Subject, request: AnswersRequest, watcher: Watcher, writer: Writer
) -> None:
    """Compare the answers on every prompt of a whole model.

    Raises the errors of the reference; errors of a case are recorded in the case.
    """
    with (
        limits.memory_errors(),
        np.errstate(invalid="ignore", over="ignore"),  # from masked lanes, in Triton's interpreter
    ):
        for ids, segment_length, prompt in zip(loaded.ids, loaded.segment_lengths, loaded.prompts, strict=True):
            check_ids(loaded.model.get_input_embeddings().num_embeddings, ids)
            sites = find_mixers(loaded.model)
            match_layers(sites, subject.layers, subject.ref.model_type)
            run = PromptRun(loaded.model, ids.to(loaded.model.device), segment_length, sites, subject.ref.model_type)
            layers = frozenset(layer.index for layer in subject.layers)
            PromptAnswers(run, loaded.whole, layers, request, watcher, writer, prompt.token_sha256).run()


@dataclass(frozen=True, kw_only=True)
class ChangedModel:
    """The model with its operators replaced by `compute` in `layers`; the other fields are those of `Answers`."""

    implementation: str
    precision: PrecisionRecord
    compute: Compute
    layers: frozenset[int]
    change: str = ""
    alone: int | None = None


class PromptAnswers:
    """The comparison on one prompt.  inputs: of its cases."""

    def __init__(
        self,
        prompt: PromptRun,
        model: Any,
        layers: frozenset[int],
        request: AnswersRequest,
        watcher: Watcher,
        writer: Writer,
        inputs: str,
    ) -> None:
        self._prompt, self._model, self._layers = prompt, model, layers
        self._request, self._watcher, self._writer, self._inputs = request, watcher, writer, inputs
        self._rows = rows_that_fit(model.get_input_embeddings().num_embeddings)

    def run(self) -> None:
        device, began = self._prompt.ids.device, time.monotonic()
        if device.type == "cuda":
            forget_peak(device)
        models = list(self._models())
        with self._watcher.step("Running the reference"):
            self._reference = choose_reference(self._request.reference, self._prompt, self._reference_runs(models))
            self._hidden = hidden_states(self._prompt, self._reference.compute)
            self._tokens = self._greedy(self._reference.compute, None)
        with self._watcher.step("Comparing answers", len(models), unit="cases") as advance:
            for changed in models:
                self._writer.case(self._compare(changed))
                self._writer.update(seconds=self._writer.report.first.seconds + time.monotonic() - began)
                began = time.monotonic()
                if device.type == "cuda":
                    self._writer.peaked(peak_bytes(device))
                advance(1)

    def _models(self) -> Iterator[ChangedModel]:
        """First noise, then all layers together, then each layer alone."""
        sites = self._prompt.mixers
        noises = {"last bit of its inputs moved": with_moved_bits, "in chunks of half the length": in_other_chunks}
        for change, moved in noises.items():
            yield ChangedModel(
                implementation=baseline_name(sites),
                precision=EXACT_FP32,
                compute=moved(baseline_compute(sites)),
                layers=self._layers,
                change=change,
            )
        dtype = dtype_name(self._model.dtype)
        wanted = [
            (name, one)
            for name in self._request.implementations
            for one in precisions_of(name, sites, dtype, self._request.precisions(dtype))
        ]
        computes = {(name, one): implemented(name, one, sites) for name, one in wanted}
        for (name, precision), compute in computes.items():
            yield ChangedModel(implementation=name, precision=precision, compute=compute, layers=self._layers)
        for layer in sorted(self._layers) if self._request.per_layer else ():
            for (name, precision), compute in computes.items():
                yield ChangedModel(
                    implementation=name, precision=precision, compute=compute, layers=frozenset({layer}), alone=layer
                )

    def _reference_runs(self, models: Sequence[ChangedModel]) -> float:
        """Runs of the model on the reference: its own, and for each case the share of layers left to the reference."""
        layers = len({site.layer_index for site in self._prompt.mixers})
        return 1 + bool(self._request.generate) + sum(1 - len(one.layers) / layers for one in models)

    def _compare(self, changed: ChangedModel) -> Case:
        seqlen = self._prompt.ids.shape[1]
        found = Answers(
            reference=self._reference.name,
            remark=self._reference.remark,
            weights=dtype_name(self._model.dtype),
            own_weights=self._request.weights != "fp32",
            layers=tuple(sorted(self._layers)),
            segment_length=self._prompt.segment_length,
            change=changed.change,
            alone=changed.alone,
        )
        case = Case(
            answers=found,
            batch=1,
            seqlen=seqlen,
            inputs=self._inputs,
            implementation=changed.implementation,
            precision=changed.precision,
            status="ran",
        )
        try:
            handler = by_layer(
                self._prompt.mixers, changed.compute, layers=changed.layers, elsewhere=self._reference.compute
            )
            with while_it_runs(case):
                divergence = self._divergence(hidden_states(self._prompt, handler))
                if (position := first_nonfinite(divergence)) is not None:
                    return case.changed(answers=found.changed(nonfinite=position))
                generated = None if changed.alone is not None else self._generated(changed)
        except MissingCapabilityError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return case.changed(status="out of memory", reason=first_line(error.__cause__))
        except Exception as error:
            status, reason = status_of(error, self._prompt.ids.device, changed.implementation)
            return case.changed(status=status, reason=reason)
        return case.changed(answers=found.changed(bands=bands(divergence), generated=generated))

    def _divergence(self, hidden: torch.Tensor) -> Divergence:
        """Compares the logits after `hidden` (1, l, hidden) with the reference's, a block of positions at a time."""
        next_tokens = self._prompt.ids[0, 1:]
        blocks = []
        for start in range(0, hidden.shape[1], self._rows):
            rows = slice(start, start + self._rows)
            high, low = (logits(self._model, states[:, rows])[0] for states in (self._hidden, hidden))
            blocks.append(compare_logits(high, low, next_tokens[rows]))
        return joined(blocks)

    def _generated(self, changed: ChangedModel) -> Generated | None:
        if not self._request.generate:
            return None
        tokens = self._greedy(changed.compute, changed.layers)
        differing = (i for i, (one, other) in enumerate(zip(self._tokens, tokens, strict=True)) if one != other)
        return Generated(tokens=len(tokens), first_difference=next(differing, None))

    def _greedy(self, compute: Compute, layers: frozenset[int] | None) -> Sequence[int]:
        """Greedy tokens.  The operator computes the prompt; the model's own step computes each token after it."""
        if not self._request.generate:
            return ()
        prompt = self._prompt
        with substituted(prompt.mixers, compute, layers=layers, elsewhere=self._reference.compute):
            return greedy(self._model, prompt.ids, self._request.generate, prompt.segment_length)


# --- the reference, and noise

LONGEST_S = 300.0  # limit of the oracle's time for all runs of a prompt, estimated from a piece
PIECE = 2048  # tokens from which the estimate is made
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """name: for the report.  remark: the reason of the choice, in a sentence; empty for the oracle."""

    compute: Compute
    name: str
    remark: str = ""


def oracle_compute(call: OperatorCall) -> Result:
    """The fp64 oracle, rounded once to the dtypes of the operator's output."""
    return oracle_output(call.inputs)


def baseline_compute(sites: Sequence[Mixer]) -> Compute:
    """The operator's baseline implementation, exact, with fp32 states."""
    return implemented(baseline_name(sites), EXACT_FP32, sites)


def baseline_name(sites: Sequence[Mixer]) -> str:
    """The name of the baseline: a model has one kind of operator."""
    return operators.get(sites[0].operator).baseline


def choose_reference(wanted: Literal["auto", "oracle", "unfused"], prompt: PromptRun, runs: float) -> ReferenceModel:
    """The oracle, or the baseline if requested or if the oracle would take longer than `LONGEST_S`.

    runs: number of runs of the model on the reference; a run with it in some layers counts as a fraction.
    """
    if wanted == "unfused":
        return _baseline_reference(prompt, "--reference names it.")
    if wanted == "auto" and prompt.ids.shape[1] > 2 * PIECE:
        seconds = runs * _oracle_seconds(prompt)
        if seconds > LONGEST_S:
            return _baseline_reference(
                prompt,
                f"The fp64 oracle would take about {seconds / 60:.0f} min, estimated from {PIECE:,} tokens; "
                "--reference oracle uses it anyway.",
            )
    return ReferenceModel(compute=oracle_compute, name="fp64 oracle")


def _baseline_reference(prompt: PromptRun, remark: str) -> ReferenceModel:
    return ReferenceModel(
        compute=baseline_compute(prompt.mixers), name=f"{baseline_name(prompt.mixers)} {EXACT_FP32}", remark=remark
    )


def _oracle_seconds(prompt: PromptRun) -> float:
    """Seconds of a run of the model on the oracle, from a piece of the prompt.  The first run is a warm-up."""
    piece = replace(prompt, ids=prompt.ids[:, :PIECE], segment_length=PIECE)
    for _ in range(2):
        began = time.monotonic()
        hidden_states(piece, oracle_compute).cpu()  # waits for the device
        seconds = time.monotonic() - began
    return seconds * prompt.ids.shape[1] / PIECE


def with_moved_bits(compute: Compute) -> Compute:
    """`compute` on inputs with the last bit of each element flipped.

    This changes the tensors that a model writes into one tensor (x, B and C of SSD, q, k and v of GDN).  Half of the
    numbers become larger and the others smaller, by half to one unit in the last place, as after a different rounding
    before the operator.  Zeros are not changed, because their last bit is a number of another magnitude.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(_INTEGERS[tensor.element_size()])
        return torch.where(tensor == 0, tensor, (bits ^ 1).view(tensor.dtype))

    def run(call: OperatorCall) -> Result:
        views = operators.get(call.mixer.operator).binding.views
        changed = {name: moved(tensor) for name, tensor in tensors.tensors(call.inputs).items() if name in views}
        return compute(replace(call, inputs=replace(call.inputs, **changed)))

    return run


def in_other_chunks(compute: Compute) -> Compute:
    """`compute` with chunks of half the length, if the operator's inputs have a chunk size that can be halved."""

    def run(call: OperatorCall) -> Result:
        chunk = getattr(call.inputs, "chunk_size", 0)
        if chunk < 32:
            return compute(call)
        return compute(replace(call, inputs=replace(call.inputs, chunk_size=chunk // 2)))

    return run
