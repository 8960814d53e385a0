"""Finds the subject of a request.  Runs before torch is imported, so that a wrong name or layer is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ssdprof import operators
from ssdprof.capture.manifest import AGAIN, is_capture, read_manifest
from ssdprof.checkpoint.model import Model, open_model
from ssdprof.checkpoint.names import select_indices
from ssdprof.core.base import LONGEST_SEQLEN
from ssdprof.core.subject import CaptureManifest, CheckpointRef, LayerCapture, LayerRef, Serving
from ssdprof.errors import BadInputError
from ssdprof.jobs.request import CaptureRequest
from ssdprof.operators.generate import boundaries

SEED = 0  # of the lengths of packed sequences
_WITHOUT_OPERATOR = ("attention", "full_attention", "sliding_attention", "mlp", "moe")  # of a config's layer_types


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a request: a checkpoint, its selected layers, and the prompt lengths.

    seqlens: tokens of each row of a prompt; of all sequences together if they are packed.
    whole: the whole model is needed, with its language-model head; else only the layers up to the last selected one.
    head: the language-model head is needed; it is, if `whole`.
    dtype: in which the weights are loaded, named as in torch; None: the checkpoint's own.
    """

    request: CaptureRequest
    located: Model
    layers: tuple[LayerRef, ...]
    seqlens: tuple[int, ...]
    serving: Serving = field(default_factory=Serving)
    whole: bool = False
    head: bool = False
    dtype: str | None = None

    @property
    def ref(self) -> CheckpointRef:
        return self.located.ref

    @property
    def batch(self) -> int:
        return self.request.batch

    @property
    def deepest_layer(self) -> int | None:
        return None if self.whole else max(layer.index for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the needed weights, once loaded."""
        return self.located.weight_bytes(self.deepest_layer, head=self.head, dtype=self.dtype)

    @property
    def calls(self) -> int:
        """Expected number of captures: all layers on all prompts."""
        return len(self.layers) * sum(len(self.serving.calls(seqlen, self.batch)) for seqlen in self.seqlens)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The subject of a request for stored captures: the selected layers of each prompt."""

    request: CaptureRequest
    folder: Path
    manifest: CaptureManifest
    chosen: tuple[LayerCapture, ...]

    @property
    def ref(self) -> CheckpointRef:
        return self.manifest.checkpoint

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        return tuple(dict.fromkeys(capture.layer for capture in self.chosen))

    @property
    def seqlens(self) -> tuple[int, ...]:
        """The distinct lengths of the prompts in tokens."""
        found = (capture.call.prompt_seqlen if capture.call else capture.seqlen for capture in self.chosen)
        return tuple(dict.fromkeys(found))

    @property
    def batch(self) -> int:
        return self.manifest.prompts[0].batch

    @property
    def serving(self) -> Serving:
        """How each prompt is served; it is the same for all."""
        return self.manifest.prompts[0].serving


def captures_of(request: CaptureRequest) -> Path | None:
    """The folder of stored captures, if the request names one."""
    folder = Path(request.model).expanduser()
    return folder if is_capture(folder) else None


def find(request: CaptureRequest, *, whole: bool = False, head: bool = False) -> Subject:
    """Locate the model and select its layers; downloads small files.  whole, head: see `Subject`."""
    located = open_model(request.model, revision=request.revision, tokenizer=request.tokenizer)
    kinds = located.config.get("layer_types")
    if isinstance(kinds, list) and {"mamba", "linear_attention"} & set(map(str, kinds)):
        # a wrong layer is refused before torch is imported
        select_indices(request.layers, [i for i, kind in enumerate(kinds) if kind not in _WITHOUT_OPERATOR])
    chosen = select_indices(request.layers, [layer.index for layer in located.layers])
    layers = tuple(layer for layer in located.layers if layer.index in chosen)
    from ssdprof.jobs import limits  # imports torch, so after all other checks

    whole = whole or request.decode > 0  # a model that generates tokens
    lengths: tuple[int, ...] = ()
    if request.packed is not None:
        _refuse_too_many(request.packed.at_least)  # drawing a million lengths takes seconds
        lengths = tuple(stop - start for start, stop in pairwise(boundaries(request.packed, SEED)))
    seqlens = (sum(lengths),) if lengths else request.seqlens or limits.default_seqlens()
    _refuse_too_many(request.batch * max(seqlens))
    serving = Serving(packed=lengths, chunk=request.chunk, decode=request.decode)
    return Subject(
        request=request, located=located, layers=layers, seqlens=seqlens, serving=serving, whole=whole,
        head=whole or head,
    )  # fmt: skip


def _refuse_too_many(tokens: int) -> None:
    if tokens > LONGEST_SEQLEN:
        raise BadInputError(
            f"{tokens:,} tokens are too many for one call.",
            f"Give fewer or shorter sequences, of {LONGEST_SEQLEN:,} tokens together.",
        )


def find_to_replay(request: CaptureRequest, *, save_captures: bool = False, whole: bool = False) -> Subject | Stored:
    """As `find`, or the wanted layers of stored captures.

    BadInputError for options that do not apply to stored captures, and for a model whose layers are too large for
    every implementation.
    """
    folder = captures_of(request)
    if folder is None:
        subject = find(request, whole=whole)
        refuse_large(subject)
        return subject
    if whole:
        raise BadInputError(f"{folder} holds stored captures, and answers need the model.", "Name the model.")
    if request != CaptureRequest(model=request.model, layers=request.layers) or save_captures:
        raise BadInputError(
            f"{folder} holds stored captures: their model, prompt and segments cannot be changed.",
            "--layers is the only model option that applies to stored captures.",
        )
    manifest = read_manifest(folder)
    if not manifest.prompts:
        raise BadInputError(f"The manifest in {folder} is damaged: it names no prompt.", AGAIN)
    indices = select_indices(request.layers, tuple(dict.fromkeys(stored.layer.index for stored in manifest.layers)))
    chosen = tuple(stored for stored in manifest.layers if stored.layer.index in indices)
    if not chosen:
        raise BadInputError(f"{folder} holds no layer: its capture was interrupted.", "Capture again.")
    return Stored(request=request, folder=folder, manifest=manifest, chosen=chosen)


def refuse_large(subject: Subject) -> None:
    """BadInputError for layers that are too large for bundled implementations (`largest` of the operator's outline)."""
    for layer, mixer in zip(subject.located.layers, subject.located.mixers, strict=True):
        if layer in subject.layers:
            refuse_larger(subject.ref, layer, mixer.sizes)


def refuse_larger(ref: CheckpointRef, layer: LayerRef, sizes: Mapping[str, int]) -> None:
    """BadInputError for a layer with a size above the maximum of the bundled implementations."""
    for name, most in operators.get(layer.operator).largest.items():
        if sizes[name] > most:
            raise BadInputError(
                f"{ref.repo_id} has {name} = {sizes[name]} in layer {layer.index}; kernels take at most {most}.",
                "Choose a model with smaller layers.",
            )
