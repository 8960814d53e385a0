"""Compares the answers of a whole model between implementations of its operators.

reference -> noise -> every implementation and precision -> every layer alone, if requested
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ssdprof.capture.forward import PromptRun, check_ids, greedy, hidden_states, logits
from ssdprof.checkpoint.meta import find_mixers, match_layers
from ssdprof.errors import MissingCapabilityError
from ssdprof.measure.answers import Comparison, bands, compare_logits, first_nonfinite, joined, rows_that_fit
from ssdprof.measure.faults import first_line, status_of
from ssdprof.measure.memory import forget_peak, peak_bytes
from ssdprof.operators.dtypes import dtype_name
from ssdprof.pipeline import limits, reference
from ssdprof.pipeline.answers_request import AnswersRequest
from ssdprof.pipeline.model import Loaded
from ssdprof.pipeline.subject import Subject
from ssdprof.pipeline.substitute import Compute, by_layer, implemented, precisions_of, substituted
from ssdprof.progress import Watcher
from ssdprof.schema import EXACT_FP32, PrecisionRecord
from ssdprof.schema.answers import AnswerCase, Answers, AnswerStatus, Generated

OnAnswers = Callable[[Answers], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case to compare, with fields of `AnswerCase`.  layers: those in which `compute` replaces the operator."""

    implementation: str
    precision: PrecisionRecord
    compute: Compute
    layers: frozenset[int]
    change: str = ""
    layer: int | None = None


def compare_answers(
    loaded: Loaded, subject: Subject, request: AnswersRequest, watcher: Watcher, on_answers: OnAnswers
) -> None:
    """Compare the answers on every prompt of a whole model.

    on_answers: called with the results of a prompt after each of its cases.
    Raises the errors of the reference; errors of a case are recorded in the case.
    """
    with (
        limits.memory_errors(),
        np.errstate(invalid="ignore", over="ignore"),  # from masked lanes, in Triton's interpreter
    ):
        for ids, segment_length in zip(loaded.ids, loaded.segment_lengths, strict=True):
            check_ids(loaded.model.get_input_embeddings().num_embeddings, ids)
            sites = find_mixers(loaded.model)
            match_layers(sites, subject.layers, subject.ref.model_type)
            prompt = PromptRun(loaded.model, ids.to(loaded.model.device), segment_length, sites, subject.ref.model_type)
            layers = frozenset(layer.index for layer in subject.layers)
            PromptAnswers(prompt, loaded.whole, layers, request, watcher, on_answers).run()


class PromptAnswers:
    """The comparison on one prompt, with the results so far."""

    def __init__(
        self,
        prompt: PromptRun,
        model: Any,
        layers: frozenset[int],
        request: AnswersRequest,
        watcher: Watcher,
        on_answers: OnAnswers,
    ) -> None:
        self._prompt, self._model, self._layers = prompt, model, layers
        self._request, self._watcher, self._on_answers = request, watcher, on_answers
        self._began = time.monotonic()
        self._rows = rows_that_fit(model.get_input_embeddings().num_embeddings)

    def run(self) -> Answers:
        device = self._prompt.ids.device
        if device.type == "cuda":
            forget_peak(device)
        cases = list(self._cases())
        with self._watcher.step("Running the reference"):
            self._reference = reference.choose(self._request.reference, self._prompt, self._reference_runs(cases))
            self._hidden = hidden_states(self._prompt, self._reference.compute)
            self._tokens = self._greedy(self._reference.compute, None)
        answers = Answers(
            seqlen=self._prompt.ids.shape[1],
            reference=self._reference.name,
            remark=self._reference.remark,
            weights=dtype_name(self._model.dtype),
            own_weights=self._request.weights != "fp32",
            layers=tuple(sorted(self._layers)),
            segment_length=self._prompt.segment_length,
            gate=self._request.gate,
        )
        with self._watcher.step("Comparing answers", len(cases), unit="cases") as advance:
            for case in cases:
                done = self._compare(case)
                answers = answers.model_copy(
                    update={
                        "cases": (*answers.cases, done),
                        "seconds": time.monotonic() - self._began,
                        "peak_bytes": peak_bytes(device) if device.type == "cuda" else None,
                    }
                )
                self._on_answers(answers)
                advance(1)
        return answers

    def _cases(self) -> Iterator[Case]:
        """The cases: first noise, then all layers together, then each layer alone."""
        sites = self._prompt.mixers
        noises = {
            "last bit of its inputs moved": reference.with_moved_bits,
            "in chunks of half the length": reference.in_other_chunks,
        }
        for change, moved in noises.items():
            yield Case(
                implementation=reference.baseline_name(sites),
                precision=EXACT_FP32,
                compute=moved(reference.baseline(sites)),
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
            yield Case(implementation=name, precision=precision, compute=compute, layers=self._layers)
        for layer in sorted(self._layers) if self._request.per_layer else ():
            for (name, precision), compute in computes.items():
                yield Case(
                    implementation=name, precision=precision, compute=compute, layers=frozenset({layer}), layer=layer
                )

    def _reference_runs(self, cases: Sequence[Case]) -> float:
        """Runs of the model on the reference: its own, and for each case the share of layers left to the reference."""
        layers = len({site.layer_index for site in self._prompt.mixers})
        return 1 + bool(self._request.generate) + sum(1 - len(case.layers) / layers for case in cases)

    def _compare(self, case: Case) -> AnswerCase:
        def result(status: AnswerStatus, reason: str = "", **fields: Any) -> AnswerCase:
            return AnswerCase(
                implementation=case.implementation,
                precision=case.precision,
                change=case.change,
                layer=case.layer,
                status=status,
                reason=reason,
                **fields,
            )

        try:
            handler = by_layer(self._prompt.mixers, case.compute, layers=case.layers, elsewhere=self._reference.compute)
            found = self._comparison(hidden_states(self._prompt, handler))
            if (position := first_nonfinite(found)) is not None:
                return result("nonfinite", f"the distribution at position {position:,} is not finite")
            generated = None if case.layer is not None else self._generated(case)
        except MissingCapabilityError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return result("out of memory", first_line(error.__cause__))
        except Exception as error:
            return result(*status_of(error, self._prompt.ids.device, case.implementation))
        return result("compared", bands=bands(found), generated=generated)

    def _comparison(self, hidden: torch.Tensor) -> Comparison:
        """Compares the logits after `hidden` (1, l, hidden) with the reference's, a block of positions at a time."""
        next_tokens = self._prompt.ids[0, 1:]
        blocks = []
        for start in range(0, hidden.shape[1], self._rows):
            rows = slice(start, start + self._rows)
            high, low = (logits(self._model, states[:, rows])[0] for states in (self._hidden, hidden))
            blocks.append(compare_logits(high, low, next_tokens[rows]))
        return joined(blocks)

    def _generated(self, case: Case) -> Generated | None:
        if not self._request.generate:
            return None
        tokens = self._greedy(case.compute, case.layers)
        differing = (i for i, (one, other) in enumerate(zip(self._tokens, tokens, strict=True)) if one != other)
        return Generated(tokens=len(tokens), first_difference=next(differing, None))

    def _greedy(self, compute: Compute, layers: frozenset[int] | None) -> Sequence[int]:
        """Greedy tokens.  The operator computes the prompt; the model's own step computes each token after it."""
        if not self._request.generate:
            return ()
        prompt = self._prompt
        with substituted(prompt.mixers, compute, layers=layers, elsewhere=self._reference.compute):
            return greedy(self._model, prompt.ids, self._request.generate, prompt.segment_length)
