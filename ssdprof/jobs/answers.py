"""Compares the answers of a whole model between implementations of its operators.

locate -> fetch -> build prompts -> load all of the model
reference -> noise -> every implementation and precision -> every layer alone, if requested
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ssdprof import operators
from ssdprof.capture.forward import PromptRun, greedy, hidden_states, logits
from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.core.base import EXACT_FP32, DType
from ssdprof.core.case import DECODER, Answers, Case
from ssdprof.core.report import Report
from ssdprof.environment.machine import collect
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.jobs import limits
from ssdprof.jobs.options import AnswersOptions
from ssdprof.jobs.plan import Loaded, load, sources
from ssdprof.jobs.states import precision_of
from ssdprof.jobs.substitute import Compute, by_layer, decoded, implemented
from ssdprof.jobs.target import Target
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.answers import bands, compare_logits, first_nonfinite, joined, rows_that_fit
from ssdprof.measure.first_run import first_line, forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import while_it_runs
from ssdprof.operators.implementations import own_precisions, required, resolve, resolver
from ssdprof.operators.tensors import requested_precisions
from ssdprof.progress import Watcher
from ssdprof.store.reports import Writer, opened
from ssdprof.store.reports import load as load_report
from ssdprof.store.tuned import use_saved

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def answers(request: AnswersOptions, target: Target, watcher: Watcher) -> tuple[Path, Report]:
    """Compare the answers of a whole model on each prompt.

    target: the whole model.

    Returns the report's folder and the report.  Raises what `checked_implementations`, `plan.load`,
    `opened` and `compare_answers` raise.
    """
    implementations = checked_implementations(request, target)
    if not request.no_tuned:
        use_saved(watcher.say)
    loaded = load(target, watcher)
    with opened(
        request.out,
        watcher,
        sources=partial(sources, target, implementations),
        kind="answers",
        command=request.command,
        environment=collect(),
        conditions=request.conditions,
        baseline="unfused",
        **loaded.header,
    ) as writer:
        compare_answers(loaded, request, watcher, writer)
    return load_report(writer.folder)


def checked_implementations(request: AnswersOptions, target: Target) -> list[Implementation]:
    """The implementations that are compared, of each operator of the model.

    Loads no model; `--dry-run` calls it for its errors.  Raises MissingCapabilityError if this
    machine cannot run them or prompts of these lengths, and BadInputError for an unknown name.
    """
    resolve_here = resolver(limits.device())
    limits.check_replay(target.seqlens)
    compared: list[Implementation] = []
    for operator in dict.fromkeys(layer.operator for layer in target.layers):
        compared += [required(resolve_here(operator, name)) for name in request.implementations]
    return compared


def compare_answers(
    loaded: Loaded, request: AnswersOptions, watcher: Watcher, writer: Writer
) -> None:
    """Compare the answers on every prompt of a whole model, and write the cases.

    Prompts of which an interrupted comparison has written all cases are left out, and so are single
    cases that it has written.  An error of a case is recorded in the case.  The time is added to
    `seconds` of the report's process.

    Raises the errors of the reference: BadInputError if its logits are not finite, and
    MissingCapabilityError if memory runs out.  Raises MissingCapabilityError, too, if a fault in a
    case made the GPU unusable.
    """
    with limits.memory_errors():
        for prompt, record in zip(loaded.prompt_runs(), loaded.prompts, strict=True):
            variants = list(_variants(prompt, loaded.dtype, request, record.token_sha256))
            if all(case.name in writer.earlier for case, *_ in variants):
                continue
            comparison = _AnswersComparison(prompt, loaded.whole, request, watcher, variants)
            comparison.run(variants, writer)


# A case to compare; the function that computes its operators; the indices of the layers in which it
# does so.  The reference computes the operators of all other layers.
AnswersVariant = tuple[Case, Compute, frozenset[int]]


def _variants(
    prompt: PromptRun, dtype: DType, request: AnswersOptions, token_sha256: str
) -> Iterator[AnswersVariant]:
    """The variants that are compared with the reference: first noise, then each implementation and
    each format of decoded states in all selected layers together; then, with --per-layer, each of
    them in one layer at a time.

    dtype: dtype of the model.  token_sha256: hash of the prompt's tokens.
    """
    mixers = prompt.mixers
    layers = frozenset(prompt.wanted)

    def variant(
        name: str, precision: str, compute: Compute, *, change: str = "", alone: int | None = None
    ) -> AnswersVariant:
        """The variant of an implementation, or of noise.

        change: what the noise changes, in words; empty for an implementation.  alone: index of the
        only layer whose operator `compute` computes; None: it computes those of all selected
        layers.
        """
        task = Answers(
            kind="answers",
            reference="",  # known once the reference has run
            weights=dtype,
            own_weights=request.weights != "fp32",
            layers=tuple(sorted(layers)),
            segment_length=prompt.segment_length,
            change=change,
            alone=alone,
        )
        case = Case(
            task=task,
            batch=1,
            seqlen=prompt.ids.shape[1],
            inputs=token_sha256,
            implementation=name,
            precision=precision,
            status="ran",
        )
        computed = layers if alone is None else frozenset({alone})
        return case, compute, computed

    operator = operators.get(mixers[0].operator)  # a model has one kind of operator
    # The default dtype of states at relaxed precisions: not fp32, also with --weights fp32, because
    # a served model has 16-bit activations.
    relaxed = "bf16" if dtype == "fp32" else dtype
    wanted = requested_precisions(relaxed, request.intermediates, request.states)
    exact = implemented(operator.baseline, Precision(), mixers)
    for change, compute in (
        ("last bit of its inputs moved", with_moved_bits(exact)),
        ("in chunks of half the length", in_other_chunks(exact)),
    ):
        yield variant(operator.baseline, EXACT_FP32, compute, change=change)
    computes: dict[tuple[str, str], Compute] = {}
    for word in request.implementations:
        known = resolve(operator, word)
        for allowed in own_precisions(known, dtype, wanted):
            computes[known.name, str(allowed)] = implemented(word, allowed, mixers)
    for state_format in request.decode_states or ():
        computes[DECODER, precision_of(state_format)] = decoded(state_format)
    for (name, precision), compute in computes.items():
        yield variant(name, precision, compute)
    for layer in sorted(layers) if request.per_layer else ():
        for (name, precision), compute in computes.items():
            yield variant(name, precision, compute, alone=layer)


class _AnswersComparison:
    """Compares a model's answers on one prompt with those of a reference, which runs first."""

    def __init__(
        self,
        prompt: PromptRun,
        whole: PreTrainedModel,
        request: AnswersOptions,
        watcher: Watcher,
        variants: Sequence[AnswersVariant],
    ) -> None:
        """Run the reference.  Raises BadInputError if its logits are not finite.

        whole: the model with its language-model head.
        variants: all that will be compared, from which the time of the reference is estimated.
        """
        self._prompt = prompt
        self._whole = whole
        self._request = request
        self._watcher = watcher
        self._began = time.monotonic()
        forget_peak(prompt.ids.device)
        # The reference runs once for the logits, once more to generate tokens, and in each variant
        # for the fraction of the layers in which the variant does not compute.  It is not counted
        # that variants run once more to generate tokens.
        layer_count = len({mixer.layer_index for mixer in prompt.mixers})
        reference_runs = 2.0 if request.generate else 1.0
        for *_, layers in variants:
            reference_runs += 1 - len(layers) / layer_count
        with watcher.step("Running the reference"):
            self._reference, self._reference_name, self._remark = choose_reference(
                request.reference, prompt, reference_runs
            )
            self._reference_hidden = hidden_states(prompt, self._reference)
            _check_finite(whole, self._reference_hidden)
            self._reference_tokens = self._generated(self._reference)

    def run(self, variants: Sequence[AnswersVariant], writer: Writer) -> None:
        """Compare, and write, every case that an interrupted comparison has not written."""
        with self._watcher.step("Comparing answers", len(variants), unit="cases") as advance:
            for variant in variants:
                case, *_ = variant
                if case.name not in writer.earlier:
                    writer.case(self._compared(variant))
                    now = time.monotonic()
                    writer.update(seconds=writer.report.first.seconds + now - self._began)
                    self._began = now
                    writer.peaked(peak_bytes(self._prompt.ids.device))
                advance(1)

    def _compared(self, variant: AnswersVariant) -> Case:
        """The variant's case with its answers, or with its fault.

        Raises MissingCapabilityError if the fault made the GPU unusable.
        """
        case, compute, layers = variant
        assert isinstance(case.task, Answers)
        answers = case.task.changed(reference=self._reference_name, remark=self._remark)
        case = case.changed(task=answers)
        try:
            with while_it_runs(case):
                differences = self._differences(compute, layers, answers)
                return case.changed(task=answers.changed(**differences))
        except MissingCapabilityError as error:  # of `PromptRun.run`, if memory runs out
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return case.changed(status="out of memory", reason=first_line(error.__cause__))
        except Exception as error:
            status, reason = status_of(error, self._prompt.ids.device, case.implementation)
            return case.changed(status=status, reason=reason)

    def _differences(
        self, compute: Compute, layers: frozenset[int], answers: Answers
    ) -> dict[str, object]:
        """The fields of `answers` that hold the comparison with the reference: only `nonfinite` if
        there is a distribution that is not finite.  Greedy tokens are compared if they are
        requested, and not in a variant of one layer alone.

        compute, layers: see `_handler`.

        Logits are computed and compared for a block of positions at a time.
        """
        prompt = self._prompt
        whole = self._whole
        hidden = hidden_states(prompt, self._handler(compute, layers))
        next_tokens = prompt.ids[0, 1:]
        blocks = []
        for positions in _blocks(whole, hidden):
            reference_logits = logits(whole, self._reference_hidden[:, positions])[0]
            other_logits = logits(whole, hidden[:, positions])[0]
            blocks.append(compare_logits(reference_logits, other_logits, next_tokens[positions]))
        divergence = joined(blocks)
        position = first_nonfinite(divergence)
        if position is not None:
            return {"nonfinite": position}
        fields: dict[str, object] = {"bands": bands(divergence)}
        if self._request.generate and answers.alone is None:
            tokens = self._generated(compute, layers)
            fields["generated"] = len(tokens)
            fields["first_difference"] = _first_difference(self._reference_tokens, tokens)
        return fields

    def _generated(self, compute: Compute, layers: frozenset[int] | None = None) -> Sequence[int]:
        """The ids of the greedy tokens after the prompt; none unless --generate is given.

        compute, layers: see `_handler`; they compute the operators on the prompt.  For each later
        token, the model runs its own step function.
        """
        if not self._request.generate:
            return ()
        prompt = self._prompt
        with intercept(prompt.mixers, self._handler(compute, layers)):
            return greedy(self._whole, prompt.ids, self._request.generate, prompt.segment_length)

    def _handler(self, compute: Compute, layers: frozenset[int] | None) -> Compute:
        """A handler that calls `compute` in `layers`, or in all layers if that is None, and the
        reference in the others.
        """
        return by_layer(self._prompt.mixers, compute, layers=layers, elsewhere=self._reference)


def _first_difference(reference_tokens: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The index of the first token that differs; None if all are equal.  There are equally many."""
    for index, (reference_token, token) in enumerate(zip(reference_tokens, tokens, strict=True)):
        if reference_token != token:
            return index
    return None


def _blocks(whole: PreTrainedModel, hidden: torch.Tensor) -> Iterator[slice]:
    """The positions of `hidden`, (1, seqlen, width), in blocks whose logits fit in memory.  The
    slice of the last block may reach beyond the end.
    """
    length = rows_that_fit(whole.get_input_embeddings().num_embeddings)
    for start in range(0, hidden.shape[1], length):
        yield slice(start, start + length)


def _check_finite(whole: PreTrainedModel, hidden: torch.Tensor) -> None:
    """Raises BadInputError if the logits of the reference have NaN or infinity, because no
    implementation could be compared with them.

    hidden: the reference's hidden states, (1, seqlen, width).
    """
    for positions in _blocks(whole, hidden):
        block = hidden[:, positions]
        finite = logits(whole, block)[0].isfinite().all(-1)  # (positions of the block)
        if not bool(finite.all()):
            source = "head, lm_head, gives" if bool(block.isfinite().all()) else "layers give"
            position = positions.start + int((~finite).int().argmax())  # the first one
            raise BadInputError(
                f"The model's {source} NaN or infinity at position "
                f"{position:,} with the reference itself: it is not the implementations.",
                "Weights of the checkpoint hold NaN or infinity, or overflow; fetch it again.",
            )


# --- the reference, and noise

# Seconds that all runs of the fp64 oracle on one prompt may take, unless --reference requests it.
LONGEST_S = 300.0
# Tokens at the start of a prompt from which the oracle's time is estimated.  The estimate itself
# runs them twice, so it is made for prompts of more than twice as many.
PIECE = 2048
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes


def oracle_compute(call: OperatorCall) -> Result:
    """The output of the fp64 oracle, rounded once to the dtypes of the operator's outputs."""
    return oracle_output(call.inputs)


def choose_reference(
    wanted: Literal["auto", "oracle", "unfused"], prompt: PromptRun, runs: float
) -> tuple[Compute, str, str]:
    """The function that computes the reference, its name, and a remark.

    The reference is the oracle, and the remark is empty.  If "unfused" is wanted, or if "auto" is
    and the oracle would take longer than `LONGEST_S` on a prompt of more than twice `PIECE` tokens,
    it is the exact baseline, and the remark is a sentence with the reason.

    runs: number of runs of the model with the reference; a run with the reference in some of the
    layers counts as that fraction.
    """
    remark = ""
    if wanted == "unfused":
        remark = "--reference names it."
    elif wanted == "auto" and prompt.ids.shape[1] > 2 * PIECE:
        seconds = runs * _oracle_seconds(prompt)
        if seconds > LONGEST_S:
            remark = (
                f"The fp64 oracle would take about {seconds / 60:.0f} min, estimated from "
                f"{PIECE:,} tokens; --reference oracle uses it anyway."
            )
    if not remark:
        return oracle_compute, "fp64 oracle", ""
    name = operators.get(prompt.mixers[0].operator).baseline
    return implemented(name, Precision(), prompt.mixers), f"{name} {Precision()}", remark


def _oracle_seconds(prompt: PromptRun) -> float:
    """Seconds of one run of the model with the oracle on the prompt: those of its first `PIECE`
    tokens, of which it has at least as many, times the ratio of the lengths.
    """
    piece = replace(prompt, ids=prompt.ids[:, :PIECE], segment_length=PIECE)
    for _ in range(2):  # the first run warms up, and the second one counts
        began = time.monotonic()
        hidden_states(piece, oracle_compute).cpu()  # waits for the device
        seconds = time.monotonic() - began
    return seconds * prompt.ids.shape[1] / PIECE


def with_moved_bits(compute: Compute) -> Compute:
    """`compute` on inputs with the last bit of each element but zeros flipped.

    This changes the inputs that are views of one tensor of the model: x, B and C of SSD; q, k and v
    of GDN and KDA.  About half of the numbers become larger and the others smaller, by one unit in
    the last place, as after a different rounding before the operator.  Zeros are not changed: a
    zero with its last bit set is the smallest subnormal number.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(_INTEGERS[tensor.element_size()])
        return torch.where(tensor == 0, tensor, (bits ^ 1).view(tensor.dtype))

    def run(call: OperatorCall) -> Result:
        changed = {
            name: moved(tensor)
            for name, tensor in call.inputs.tensors.items()
            if name in call.operator.binding.views
        }
        return compute(replace(call, inputs=replace(call.inputs, **changed)))

    return run


def in_other_chunks(compute: Compute) -> Compute:
    """`compute` on inputs with half the chunk size.  The inputs stay as they are if those of their
    operator have no chunk size, or if it is below 32, since no kernel takes less than 16.
    """

    def run(call: OperatorCall) -> Result:
        chunk = getattr(call.inputs, "chunk_size", 0)
        if chunk < 32:
            return compute(call)
        return compute(replace(call, inputs=replace(call.inputs, chunk_size=chunk // 2)))

    return run
