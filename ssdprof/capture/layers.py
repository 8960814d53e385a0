"""Runs a model on a prompt and passes on the operator inputs of the wanted layers, one layer at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ssdprof.capture.forward import Head, PromptRun, check_ids
from ssdprof.capture.intercept import OperatorCall, Result
from ssdprof.capture.memory import capture_bytes_per_token, choose_segment_length
from ssdprof.capture.store import CapturedLayer, OnLayer, PromptBuffer, packed, strides, token_major
from ssdprof.checkpoint.meta import find_mixers, match_layers
from ssdprof.core.subject import CallRef, CheckpointRef, LayerRef, Serving
from ssdprof.core.words import size_words
from ssdprof.environment.child import started
from ssdprof.environment.machine import host_memory
from ssdprof.errors import BadInputError, MissingCapabilityError


@dataclass(frozen=True, kw_only=True)
class CaptureSummary:
    segment_length: int  # tokens per forward call of the model
    segments: int
    prefills: int  # how often the model ran on the prompt
    operator_calls: int


def capture_layers(
    model: Any,
    ids: torch.Tensor,
    layers: Sequence[LayerRef],
    *,
    ref: CheckpointRef,
    segment_length: int | None,
    on_layer: OnLayer,
    host_budget_bytes: int | None = None,
    serving: Serving = Serving(),  # noqa: B008
    head: Head | None = None,
) -> CaptureSummary:
    """Run `model` on ids (b, l) and call `on_layer` for each of `layers` and each of its calls (`Serving.calls`).

    model: a transformers base model in eval mode; its operators are computed by ours, exact, with fp32 states
    segment_length: tokens per forward call; None: the whole prompt if it fits in memory, else segments.
        With one segment, on_layer is called while that layer runs.  With several, the layers' inputs are collected in
        main memory, and after the prompt each layer's are moved to the model's device for on_layer.
    host_budget_bytes: main memory for collected inputs (half of the available memory if None).  If the layers need
        more, they are captured in groups, each with its own prefill.  If a single layer needs more, the disk is used.
    serving: the model runs packed sequences one by one, so that nothing passes from one to the next, and their inputs
        are concatenated.  Chunks are segments that are passed on immediately, with their initial states.  The model
        itself computes decode steps; their inputs are passed on immediately.
    head: computes logits of the next token, for decode steps.

    Never more than one layer's inputs are on the model's device.  Whatever ends the capture (an exception of on_layer,
    Ctrl-C), the model is left as it was.  Raises BadInputError if part of the model bypasses its operator or a token id
    is beyond the vocabulary, MissingCapabilityError if memory is too small.
    """
    check_ids(model.get_input_embeddings().num_embeddings, ids)
    mixers = find_mixers(model)
    wanted = match_layers(mixers, layers, ref.model_type)
    if not wanted:
        raise BadInputError("No layer was selected.")
    batch, seqlen = ids.shape
    if serving.chunk is not None:
        segment_length = serving.chunk
    elif segment_length is None:
        segment_length = choose_segment_length(model, seqlen, layers, batch=batch)
    prompt = PromptRun(model, ids.to(model.device), segment_length, mixers, ref.model_type, serving, head)
    if serving.chunk is not None or (prompt.segments == 1 and not serving.packed):
        calls = _capture_on_the_way(prompt, wanted, on_layer)
        prefills = 1
    else:
        budget = host_memory() // 2 if host_budget_bytes is None else host_budget_bytes
        kept = (mixer for mixer in mixers if mixer.layer_index in wanted)  # in the order in which they run
        sizes = {mixer.layer_index: ids.numel() * capture_bytes_per_token(mixer) for mixer in kept}
        if on_disk := max(sizes.values()) > budget:
            budget = shutil.disk_usage(tempfile.gettempdir()).free // started()
        groups = list(_groups(prompt, wanted, sizes, budget))
        calls = sum(_capture_together(prompt, group, on_layer, on_disk=on_disk) for group in groups)
        prefills = len(groups)
    return CaptureSummary(
        segment_length=min(segment_length, seqlen), segments=prompt.segments, prefills=prefills, operator_calls=calls
    )


def _capture_on_the_way(prompt: PromptRun, wanted: dict[int, LayerRef], on_layer: OnLayer) -> int:
    """Pass on every call while its layer runs."""
    upcoming = {index: iter(prompt.calls(decode=False)) for index in wanted}

    def handler(call: OperatorCall) -> Result:
        layer = wanted.get(call.mixer.layer_index)
        if layer is not None:
            on_layer(_taken(prompt, call, layer, next(upcoming[layer.index], None)))
        return call.replacement()

    return prompt.run(handler, _on_step(prompt, wanted, on_layer))


def _capture_together(prompt: PromptRun, wanted: dict[int, LayerRef], on_layer: OnLayer, *, on_disk: bool) -> int:
    """Concatenate the inputs of all segments, and of all packed sequences, and pass them on at the end."""
    host = torch.device("cpu")
    buffers: dict[int, PromptBuffer] = {}
    model_strides: dict[int, dict[str, tuple[int, ...]]] = {}
    remarks: dict[int, str] = {}
    filled = dict.fromkeys(wanted, 0)

    def handler(call: OperatorCall) -> Result:
        index = call.mixer.layer_index
        if index in wanted:
            if index not in buffers:
                buffers[index] = PromptBuffer(call.inputs, prompt.ids.shape[1], host, on_disk=on_disk)
                model_strides[index] = strides(call.inputs)
                remarks[index] = call.remark
            filled[index] += buffers[index].write(call.inputs, filled[index])
        return call.replacement()

    calls = prompt.run(handler, _on_step(prompt, wanted, on_layer))
    (whole,) = prompt.calls(decode=False)
    for index, layer in wanted.items():
        inputs = buffers.pop(index).inputs(prompt.model.device)
        if prompt.serving.packed:
            inputs = packed(inputs, prompt.serving.packed)
        captured = CapturedLayer(
            layer=layer,
            inputs=inputs,
            model_strides=strides(inputs) | model_strides.pop(index),  # bounds of a pack are not the model's
            remark=" ".join(part for part in (remarks[index], prompt.remark) if part),
            call=whole,
        )
        del inputs
        on_layer(captured)
        del captured
    return calls


def _on_step(
    prompt: PromptRun, wanted: dict[int, LayerRef], on_layer: OnLayer
) -> Callable[[OperatorCall], None] | None:
    """The handler of decode steps; None if there are none."""
    if not prompt.serving.decode:
        return None
    upcoming = {index: iter(prompt.calls(decode=True)) for index in wanted}

    def observe(call: OperatorCall) -> None:
        layer = wanted.get(call.mixer.layer_index)
        if layer is not None and (which := next(upcoming[layer.index], None)):
            on_layer(_taken(prompt, call, layer, which))

    return observe


def _taken(prompt: PromptRun, call: OperatorCall, layer: LayerRef, which: CallRef | None) -> CapturedLayer:
    """A copy, where the model begins: what the model does next may overwrite it, and may be on another GPU."""
    return CapturedLayer(
        layer=layer,
        inputs=token_major(call.inputs, prompt.ids.device),
        model_strides=strides(call.inputs),
        remark=call.remark,
        call=which,
    )


def _groups(
    prompt: PromptRun, wanted: dict[int, LayerRef], sizes: dict[int, int], budget: int
) -> Iterator[dict[int, LayerRef]]:
    """`wanted` in groups whose inputs take at most `budget` bytes.  sizes: bytes of each layer's inputs."""
    group: dict[int, LayerRef] = {}
    used = 0
    for index, size in sizes.items():
        if size > budget:
            raise MissingCapabilityError(
                f"The inputs of layer {index} for {prompt.ids.shape[1]:,} tokens take {size_words(size)}, which "
                f"does not fit in main memory, and the disk of the temporary folder has room for {size_words(budget)}.",
                "Use a shorter --seq, or set TMPDIR to a folder on a larger disk.",
            )
        if used + size > budget:
            yield group
            group, used = {}, 0
        group[index] = wanted[index]
        used += size
    yield group
