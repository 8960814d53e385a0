"""Loads the model of a request, and captures the inputs of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from ssdprof.capture import store
from ssdprof.capture.forward import check_ids, logits
from ssdprof.capture.layers import capture_layers
from ssdprof.capture.memory import choose_segment_length
from ssdprof.capture.store import CapturedLayer
from ssdprof.capture.tokenizer import build_prompt
from ssdprof.checkpoint.hub import Source
from ssdprof.checkpoint.load import DType, LocalCheckpoint, fetch, fetch_tokenizer, load_model
from ssdprof.core.subject import Placement, Prompt
from ssdprof.core.words import placement_words
from ssdprof.jobs import limits, placement
from ssdprof.jobs.request import CaptureRequest, PromptRequest
from ssdprof.jobs.subject import Subject
from ssdprof.progress import Watcher

OnLayer = Callable[[CapturedLayer], object]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its device, and its prompts.

    model: the base model.  whole: the model with its language-model head; None if only the
    base model was requested.
    ids: each (b, l) int64.  segment_lengths: tokens per forward call, for each prompt.
    placement: where the model's weights are.  files: the source of weights on the disk.
    """

    model: Any
    ids: tuple[torch.Tensor, ...]
    prompts: tuple[Prompt, ...]
    segment_lengths: tuple[int, ...]
    placement: Placement
    files: LocalCheckpoint
    whole: Any = None


def load(request: CaptureRequest, subject: Subject, watcher: Watcher) -> Loaded:
    """Build the prompts, download the weights, then load the model: a wrong prompt is found before the download."""
    for note in subject.located.notes:
        watcher.say(note)
    _quiet_transformers()
    placed = placement.choose(request, subject)
    placement.check_disk(placed)
    built = build_prompts(request, subject)
    local = fetch(subject.located, deepest_layer=subject.deepest_layer, head=subject.head, progress=watcher.say)
    placement.check_disk(placed)  # again: the download may have filled the disk
    record = placement.priced(placed, placement.weights_file(local))
    if record.kind != "one-gpu":
        watcher.say(placement_words(record))
    with limits.memory_errors(), watcher.step(f"Loading {subject.ref.repo_id}"):
        dtype: DType = "auto" if subject.dtype is None else getattr(torch, subject.dtype)
        loaded = load_model(local, device=limits.device(), dtype=dtype, device_map=placed.device_map)
    model: Any = loaded.base_model  # the model itself, if it has no head
    wanted = request.segment_length or placed.segment_length
    lengths = [_segment_length(wanted, subject, model, seqlen) for seqlen in subject.seqlens]
    return Loaded(
        model=model,
        ids=tuple(ids for ids, _ in built),
        prompts=tuple(prompt for _, prompt in built),
        segment_lengths=tuple(lengths),
        placement=record,
        files=local,
        whole=loaded if subject.head else None,
    )


def build_prompts(request: CaptureRequest, subject: Subject) -> list[tuple[torch.Tensor, Prompt]]:
    """Token ids and their record, for each length.  Downloads the tokenizer.  Raises what `build_prompt` raises."""
    tokenizer = fetch_tokenizer(subject.located)
    return [_prompt(tokenizer, request.prompt, subject, seqlen) for seqlen in subject.seqlens]


def _segment_length(wanted: int | None, subject: Subject, model: Any, seqlen: int) -> int:
    """Tokens per forward call for a prompt.  wanted: None lets capture decide."""
    serving = subject.serving
    longest = max(serving.packed, default=seqlen)
    if (fixed := serving.chunk or wanted) is not None:
        return min(fixed, longest)
    return min(choose_segment_length(model, seqlen, subject.layers, batch=subject.batch), longest)


def _quiet_transformers() -> None:
    """Silence transformers' progress bars and warnings of fallbacks that capture replaces, and those of accelerate."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("accelerate").setLevel(ERROR)


def _prompt(
    tokenizer: Source | None, wanted: PromptRequest, subject: Subject, seqlen: int
) -> tuple[torch.Tensor, Prompt]:
    build = partial(
        build_prompt,
        tokenizer.folder if tokenizer else None,
        seqlen,
        vocab_size=subject.located.vocab_size,
        batch=subject.batch,
        packed=subject.serving.packed,
    )
    if isinstance(wanted.text, Path):
        ids, prompt = build(kind="file", file=wanted.text)
    else:
        ids, prompt = build(kind=wanted.text)
    if (vocabulary := subject.located.vocab_size) is not None:
        check_ids(vocabulary, ids)
    words = f"{tokenizer.label}: {prompt.tokenizer}" if tokenizer else prompt.tokenizer
    return ids, prompt.model_copy(update={"tokenizer": words, "serving": subject.serving})


def run_model(subject: Subject, loaded: Loaded, *handlers: OnLayer) -> None:
    """Run the model on every prompt; each handler sees each wanted layer."""

    def on_layer(captured: CapturedLayer) -> None:
        for handle in handlers:
            handle(captured)

    for ids, segment_length in zip(loaded.ids, loaded.segment_lengths, strict=True):
        capture_layers(
            loaded.model,
            ids,
            subject.layers,
            ref=subject.ref,
            segment_length=segment_length,
            on_layer=on_layer,
            serving=subject.serving,
            head=partial(logits, loaded.whole) if subject.serving.decode else None,
        )


def store_in(folder: Path, subject: Subject, loaded: Loaded, *, overwrite: bool = False) -> store.CaptureWriter:
    return store.CaptureWriter(
        folder,
        checkpoint=subject.ref,
        prompts=loaded.prompts,
        segment_length=max(loaded.segment_lengths),
        overwrite=overwrite,
    )
