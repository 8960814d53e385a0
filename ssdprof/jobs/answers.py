"""Compares the answers of a whole model between implementations of its operators.

locate -> fetch -> build prompts -> load all of the model
reference -> noise -> every implementation and precision -> every layer alone, if requested
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ssdprof import operators
from ssdprof.capture.forward import PromptRun, check_ids, greedy, hidden_states, logits
from ssdprof.capture.intercept import OperatorCall, Result, intercept
from ssdprof.checkpoint.meta import find_mixers
from ssdprof.core.base import DType
from ssdprof.core.case import Answers, Case
from ssdprof.core.report import Report
from ssdprof.environment.machine import collect
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.jobs import limits
from ssdprof.jobs.options import AnswersOptions
from ssdprof.jobs.plan import Loaded, load, sources
from ssdprof.jobs.subject import Subject
from ssdprof.jobs.substitute import Compute, by_layer, implemented
from ssdprof.kernels.precision import Precision
from ssdprof.kernels.registry import Implementation
from ssdprof.measure.accuracy import oracle_output
from ssdprof.measure.answers import bands, compare_logits, first_nonfinite, joined, rows_that_fit
from ssdprof.measure.first_run import first_line, forget_peak, peak_bytes, status_of
from ssdprof.measure.isolate import while_it_runs
from ssdprof.operators.implementations import own_precisions, required, resolve, resolver
from ssdprof.operators.tensors import dtype_name, requested_precisions
from ssdprof.progress import Watcher
from ssdprof.store.reports import Writer, opened
from ssdprof.store.reports import load as load_report

Precisions = Callable[[DType], tuple[Precision, ...]]


def answers(subject: Subject, wanted: AnswersOptions, watcher: Watcher) -> tuple[Path, Report]:
    """Compare the answers of a whole model on each prompt.

    subject: the whole model, the result of `loaded_as`.  Returns the report's folder and the
    report.
    """

    def precisions(dtype: DType) -> tuple[Precision, ...]:
        return requested_precisions(
            "bf16" if dtype == "fp32" else dtype, wanted.intermediates, wanted.states
        )

    wanted = replace(wanted, weights=_weights(wanted))
    implementations = check(subject, wanted)
    loaded = load(subject, watcher)
    with opened(
        wanted.out,
        watcher,
        sources=partial(sources, subject, implementations),
        kind="answers",
        subject=subject.ref.repo_id,
        command=wanted.command,
        model=subject.ref,
        environment=collect(),
        prompts=loaded.prompts,
        notes=tuple(subject.located.caveats),
        conditions=wanted.conditions,
        baseline="unfused",
        segment_length=max(loaded.segment_lengths),
        placement=loaded.placement,
    ) as writer:
        compare_answers(loaded, wanted, precisions, watcher, writer)
    return load_report(writer.folder)


def loaded_as(subject: Subject, wanted: AnswersOptions) -> Subject:
    """The subject in the dtype that its weights are loaded in."""
    return replace(subject, dtype="float32") if _weights(wanted) == "fp32" else subject


def check(subject: Subject, wanted: AnswersOptions) -> list[Implementation]:
    """Those that it compares.  Raise the reason if this machine cannot.  Loads nothing; `--dry-run`
    calls it too.
    """
    get, of = resolver(limits.device()), {layer.operator for layer in subject.layers}
    limits.check_replay(subject.seqlens)
    return [required(get(operator, name)) for operator in of for name in wanted.implementations]


def _weights(wanted: AnswersOptions) -> Literal["own", "fp32"]:
    """fp32 without a GPU, because no model is served in 16 bit there: only the operators' error
    remains.
    """
    if wanted.weights == "auto":
        return "own" if limits.device().type == "cuda" else "fp32"
    return wanted.weights


def compare_answers(
    loaded: Loaded,
    request: AnswersOptions,
    precisions: Precisions,
    watcher: Watcher,
    writer: Writer,
) -> None:
    """Compare the answers on every prompt of a whole model.

    precisions: of implementations, by the dtype of the model.

    Raises the errors of the reference; errors of a case are recorded in the case.
    """
    mixers, ref = find_mixers(loaded.model), loaded.subject.ref
    with (
        limits.memory_errors(),
        np.errstate(invalid="ignore", over="ignore"),  # from masked lanes, in Triton's interpreter
    ):
        for ids, segment_length, prompt in zip(
            loaded.ids, loaded.segment_lengths, loaded.prompts, strict=True
        ):
            check_ids(loaded.model.get_input_embeddings().num_embeddings, ids)
            ids, layers = ids.to(loaded.model.device), loaded.subject.layers
            run = PromptRun(loaded.model, ids, segment_length, mixers, ref.model_type, layers)
            models = list(
                _models(
                    run, dtype_name(loaded.whole.dtype), request, precisions, prompt.token_sha256
                )
            )
            if not all(case.name in writer.earlier for case, _, _ in models):
                _compare(run, models, loaded.whole, request, watcher, writer)


def _models(
    prompt: PromptRun, dtype: DType, request: AnswersOptions, precisions: Precisions, inputs: str
) -> Iterator[tuple[Case, Compute, frozenset[int]]]:
    """First noise, then all layers together, then each layer alone: what computes the operators of
    which layers.

    dtype: of the model.  inputs: of the cases.
    """
    mixers, layers = prompt.mixers, frozenset(prompt.wanted)

    def case(
        name: str, precision: Precision, *, change: str = "", alone: int | None = None
    ) -> Case:
        return Case(
            task=Answers(
                kind="answers",
                reference="",
                weights=dtype,
                own_weights=request.weights != "fp32",
                layers=tuple(sorted(layers)),
                segment_length=prompt.segment_length,
                change=change,
                alone=alone,
            ),
            batch=1,
            seqlen=prompt.ids.shape[1],
            inputs=inputs,
            implementation=name,
            precision=str(precision),
            status="ran",
        )

    operator = operators.get(mixers[0].operator)  # a model has one kind of operator
    baseline, noises = operator.baseline, (with_moved_bits, in_other_chunks)
    for change, noise in zip(
        ("last bit of its inputs moved", "in chunks of half the length"), noises, strict=True
    ):
        moved = noise(implemented(baseline, Precision(), mixers))
        yield case(baseline, Precision(), change=change), moved, layers
    computes = {
        (name, one): implemented(name, one, mixers)
        for name in request.implementations
        for one in own_precisions(resolve(operator, name), dtype, precisions(dtype))
    }
    for wanted, compute in computes.items():
        yield case(*wanted), compute, layers
    for layer in sorted(layers) if request.per_layer else ():
        for wanted, compute in computes.items():
            yield case(*wanted, alone=layer), compute, frozenset({layer})


def _compare(
    prompt: PromptRun,
    models: Sequence[tuple[Case, Compute, frozenset[int]]],
    whole: Any,
    request: AnswersOptions,
    watcher: Watcher,
    writer: Writer,
) -> None:
    """whole: the model with its head.  The cases of an interrupted comparison are there already."""
    device, began = prompt.ids.device, time.monotonic()
    if device.type == "cuda":
        forget_peak(device)

    def generated(compute: Compute, layers: frozenset[int] | None) -> Sequence[int]:
        """Greedy tokens.  The operator computes the prompt; the model's own step computes each
        token after it.
        """
        if not request.generate:
            return ()
        with intercept(
            prompt.mixers, by_layer(prompt.mixers, compute, layers=layers, elsewhere=reference)
        ):
            return greedy(whole, prompt.ids, request.generate, prompt.segment_length)

    def answers_of(alone: int | None, compute: Compute, layers: frozenset[int]) -> dict[str, Any]:
        """Compares the logits with the reference's, a block of positions at a time."""
        hidden = hidden_states(
            prompt, by_layer(prompt.mixers, compute, layers=layers, elsewhere=reference)
        )
        blocks, length = [], rows_that_fit(whole.get_input_embeddings().num_embeddings)
        for start in range(0, hidden.shape[1], length):
            rows = slice(start, start + length)
            high, low = (logits(whole, states[:, rows])[0] for states in (exact, hidden))
            blocks.append(compare_logits(high, low, prompt.ids[0, 1:][rows]))
        divergence = joined(blocks)
        if (position := first_nonfinite(divergence)) is not None:
            return {"nonfinite": position}
        found: dict[str, Any] = {"bands": bands(divergence)}
        if request.generate and alone is None:
            tokens = generated(compute, layers)
            differing = (
                number
                for number, (one, other) in enumerate(zip(first, tokens, strict=True))
                if one != other
            )
            found |= {"generated": len(tokens), "first_difference": next(differing, None)}
        return found

    count = len({mixer.layer_index for mixer in prompt.mixers})
    # with the reference: its own runs, and for each case the share of the layers that are left to
    # it
    runs = 1 + bool(request.generate) + sum(1 - len(layers) / count for _, _, layers in models)
    with watcher.step("Running the reference"):
        reference, name, remark = choose_reference(request.reference, prompt, runs)
        exact = hidden_states(prompt, reference)
        _check_finite(whole, exact)
        first = generated(reference, None)
    with watcher.step("Comparing answers", len(models), unit="cases") as advance:
        for case, compute, layers in models:
            if case.name not in writer.earlier:
                assert isinstance(case.task, Answers)
                answers = case.task.changed(reference=name, remark=remark)
                case = case.changed(task=answers)
                try:
                    with while_it_runs(case):
                        case = case.changed(
                            task=answers.changed(**answers_of(answers.alone, compute, layers))
                        )
                except MissingCapabilityError as error:
                    if not isinstance(error.__cause__, torch.OutOfMemoryError):
                        raise
                    case = case.changed(status="out of memory", reason=first_line(error.__cause__))
                except Exception as error:
                    status, reason = status_of(error, device, case.implementation)
                    case = case.changed(status=status, reason=reason)
                writer.case(case)
                writer.update(seconds=writer.report.first.seconds + time.monotonic() - began)
                began = time.monotonic()
                if device.type == "cuda":
                    writer.peaked(peak_bytes(device))
            advance(1)


def _check_finite(whole: Any, hidden: torch.Tensor) -> None:
    """BadInputError if the model's head gives NaN or infinity on the reference's own hidden states,
    (batch, seqlen, width): then no implementation can be told from another.
    """
    length = rows_that_fit(whole.get_input_embeddings().num_embeddings)
    for start in range(0, hidden.shape[1], length):
        block = hidden[:, start : start + length]
        finite = logits(whole, block)[0].isfinite().all(-1)
        if not bool(finite.all()):
            part = "head, lm_head," if bool(block.isfinite().all()) else "layers"
            raise BadInputError(
                f"The model's {part} give NaN or infinity at position "
                f"{start + int((~finite).int().argmax()):,} with the reference itself: it is "
                "not the implementations.",
                "Weights of the checkpoint hold NaN or infinity, or overflow; fetch it again.",
            )


# --- the reference, and noise

LONGEST_S = 300.0  # limit of the oracle's time for all runs of a prompt, estimated from a piece
PIECE = 2048  # tokens from which the estimate is made
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def oracle_compute(call: OperatorCall) -> Result:
    """The fp64 oracle, rounded once to the dtypes of the operator's output."""
    return oracle_output(call.inputs)


def choose_reference(
    wanted: Literal["auto", "oracle", "unfused"], prompt: PromptRun, runs: float
) -> tuple[Compute, str, str]:
    """The oracle, or the exact baseline if requested or if the oracle would take longer than
    `LONGEST_S`.

    runs: number of runs of the model on the reference; a run with it in some layers counts as a
    fraction.  With its name, and the reason of the choice in a sentence, which is empty for the
    oracle.
    """
    remark = "--reference names it." if wanted == "unfused" else ""
    if (
        wanted == "auto"
        and prompt.ids.shape[1] > 2 * PIECE
        and (seconds := runs * _oracle_seconds(prompt)) > LONGEST_S
    ):
        remark = (
            f"The fp64 oracle would take about {seconds / 60:.0f} min, estimated from {PIECE:,} "
            "tokens; "
            "--reference oracle uses it anyway."
        )
    if not remark:
        return oracle_compute, "fp64 oracle", ""
    name = operators.get(prompt.mixers[0].operator).baseline
    return implemented(name, Precision(), prompt.mixers), f"{name} {Precision()}", remark


def _oracle_seconds(prompt: PromptRun) -> float:
    """Seconds of a run of the model on the oracle, from a piece of the prompt.  The first run is a
    warm-up.
    """
    piece = replace(prompt, ids=prompt.ids[:, :PIECE], segment_length=PIECE)
    for _ in range(2):
        began = time.monotonic()
        hidden_states(piece, oracle_compute).cpu()  # waits for the device
        seconds = time.monotonic() - began
    return seconds * prompt.ids.shape[1] / PIECE


def with_moved_bits(compute: Compute) -> Compute:
    """`compute` on inputs with the last bit of each element flipped.

    This changes the tensors that a model writes into one tensor (x, B and C of SSD, q, k and v of
    GDN).  Half of the numbers become larger and the others smaller, by half to one unit in the last
    place, as after a different rounding before the operator.  Zeros are not changed, because their
    last bit is a number of another magnitude.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(_INTEGERS[tensor.element_size()])
        return torch.where(tensor == 0, tensor, (bits ^ 1).view(tensor.dtype))

    def run(call: OperatorCall) -> Result:
        views = call.operator.binding.views
        changed = {
            name: moved(tensor) for name, tensor in call.inputs.tensors.items() if name in views
        }
        return compute(replace(call, inputs=replace(call.inputs, **changed)))

    return run


def in_other_chunks(compute: Compute) -> Compute:
    """`compute` with chunks of half the length, if the operator's inputs have a chunk size that can
    be halved.
    """

    def run(call: OperatorCall) -> Result:
        chunk = getattr(call.inputs, "chunk_size", 0)
        if chunk < 32:
            return compute(call)
        return compute(replace(call, inputs=replace(call.inputs, chunk_size=chunk // 2)))

    return run
