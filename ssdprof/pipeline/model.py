"""From a request to a loaded model, and from that to the captured inputs of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssdprof.capture import CapturedLayer, capture_layers, choose_segment_length, store
from ssdprof.capture.prompt import build_prompt
from ssdprof.checkpoint import LocalCheckpoint, fetch, load_model
from ssdprof.checkpoint.load import DType
from ssdprof.pipeline import limits
from ssdprof.pipeline.request import CaptureRequest, PromptRequest
from ssdprof.pipeline.subject import Subject
from ssdprof.progress import Watcher
from ssdprof.schema import Prompt

OnLayer = Callable[[CapturedLayer], object]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its device, with the prompts that it will run on.

    model: the base model.  whole: the model with its language-model head, whose base model that is; None if only the
    base model was wanted.
    ids: each (1, l) int64.  segment_lengths: tokens per forward call, for each prompt.
    """

    model: Any
    ids: tuple[torch.Tensor, ...]
    prompts: tuple[Prompt, ...]
    segment_lengths: tuple[int, ...]
    whole: Any = None


def load(request: CaptureRequest, subject: Subject, watcher: Watcher, *, dtype: DType = "auto") -> Loaded:
    """Download, build the prompts, then load the model: a wrong prompt is found before the model is in memory.

    dtype: of the weights; "auto" is the checkpoint's own.
    """
    for note in subject.located.notes:
        watcher.say(note)
    limits.check_weights(subject.located, subject.layers, whole=subject.whole)
    local = fetch(subject.located, deepest_layer=subject.deepest_layer, head=subject.whole, progress=watcher.say)
    built = [_prompt(local, request.prompt, seqlen) for seqlen in subject.seqlens]
    _quiet_transformers()
    with limits.memory_errors(), watcher.step(f"Loading {subject.ref.repo_id}"):
        loaded = load_model(local, device=limits.device(), dtype=dtype)
    model: Any = loaded.base_model  # itself, if it has no head
    lengths = [
        min(request.segment_length or choose_segment_length(model, seqlen, subject.layers), seqlen)
        for seqlen in subject.seqlens
    ]
    return Loaded(
        model=model,
        ids=tuple(ids for ids, _ in built),
        prompts=tuple(prompt for _, prompt in built),
        segment_lengths=tuple(lengths),
        whole=loaded if subject.whole else None,
    )


def _quiet_transformers() -> None:
    """Its bars are not ours, and it warns of slow fallbacks that capture replaces."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _prompt(local: LocalCheckpoint, wanted: PromptRequest, seqlen: int) -> tuple[torch.Tensor, Prompt]:
    if local.tokenizer_name is None and wanted.text == "random":
        return build_prompt(None, seqlen, kind="random", vocab_size=local.description.vocab_size)
    folder = local.tokenizer_folder
    if isinstance(wanted.text, Path):
        ids, prompt = build_prompt(folder, seqlen, kind="file", file=wanted.text)
    else:
        ids, prompt = build_prompt(folder, seqlen, kind=wanted.text)
    return ids, prompt.model_copy(update={"tokenizer": f"{local.tokenizer_name}: {prompt.tokenizer}"})


def run_model(subject: Subject, loaded: Loaded, *handlers: OnLayer) -> None:
    """Run the model on every prompt; each handler sees each wanted layer."""

    def on_layer(captured: CapturedLayer) -> None:
        for handle in handlers:
            handle(captured)

    for ids, segment_length in zip(loaded.ids, loaded.segment_lengths, strict=True):
        capture_layers(
            loaded.model, ids, subject.layers, ref=subject.ref, segment_length=segment_length, on_layer=on_layer
        )


def store_in(folder: Path, subject: Subject, loaded: Loaded, *, overwrite: bool = False) -> store.CaptureWriter:
    return store.CaptureWriter(
        folder,
        checkpoint=subject.ref,
        prompts=loaded.prompts,
        segment_length=max(loaded.segment_lengths),
        overwrite=overwrite,
    )
