"""Chooses the placement of a model's weights, and predicts its cost, from shapes before anything is loaded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ssdprof.capture.memory import SEGMENT_LENGTHS, MemoryEstimate, decoder_layer_bytes, estimate_memory, predict_memory
from ssdprof.checkpoint.load import LocalCheckpoint
from ssdprof.checkpoint.meta import (
    DeviceMap,
    Place,
    infer,
    largest_streamed,
    meta_model,
    place_of,
    quiet_transformers,
    weights_by_place,
)
from ssdprof.core.base import PlacementKind
from ssdprof.core.subject import DECODED_ON_LOAD, Held, Placement, split_prompt
from ssdprof.core.words import size_words
from ssdprof.environment.child import started
from ssdprof.environment.machine import copy_bytes_per_s, free_memory, host_memory, read_bytes_per_s
from ssdprof.errors import BadInputError, MissingCapabilityError
from ssdprof.jobs import limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ssdprof.jobs.request import CaptureRequest
    from ssdprof.jobs.subject import Subject

KINDS: tuple[PlacementKind, ...] = ("one-gpu", "all-gpus", "cpu-offload", "disk-offload")  # the fastest first
_FITTING = "Leave out --placement, use a shorter --seq, or --layers first:N with fewer layers."


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A placement, with the arguments for loading.

    device_map: None: all of the model is on one device.
    segment_length: tokens per forward call that fit with this placement; None: decided after loading.
    rewritten_bytes: weights that transformers converts on loading and writes to a temporary folder.
    """

    record: Placement
    device_map: Mapping[str, Place] | None = None
    segment_length: int | None = None
    rewritten_bytes: int = 0


def choose(request: CaptureRequest, subject: Subject) -> Placed:
    """The placement that the request names, or else the fastest one that fits.  Downloads and loads nothing.

    MissingCapabilityError if none fits, BadInputError for a checkpoint that does not support the requested one.
    """
    wanted = request.placement
    if why := _only_whole(subject):
        if wanted not in (None, "one-gpu"):
            raise BadInputError(f"{subject.ref.repo_id} supports only --placement one-gpu: {why}.", "Leave it out.")
        wanted = "one-gpu"
    chooser = _Chooser(request, subject)
    if wanted == "one-gpu":
        limits.check_weights(subject)
        return chooser.one_gpu()
    if wanted is not None:
        chooser.refuse_impossible(wanted)
        if (placed := chooser.placed(wanted)) is None:
            raise chooser.layer_too_large() or chooser.too_large(wanted)
        return placed
    if chooser.fits_one_gpu():
        return chooser.one_gpu()
    for kind in KINDS[1:]:
        if chooser.possible(kind) and (placed := chooser.placed(kind)) is not None:
            return placed
    # The estimate leaves no room for activations.  Only weights are checked here; the loaded model may still refuse.
    try:
        limits.check_weights(subject)
    except MissingCapabilityError as error:
        raise chooser.layer_too_large() or error from None
    return chooser.one_gpu()


def bytes_beside_weights(request: CaptureRequest, subject: Subject) -> int:
    """Bytes that must be free on the device in addition to the weights, for the shortest allowed segments."""
    return _Chooser(request, subject).least_beside()


def priced(placed: Placed, weights: Path | None) -> Placement:
    """The placement with the measured speed of streaming its weights.

    weights: a weights file on this machine, if there is one.
    """
    record = placed.record
    if not record.streamed_layer_bytes:
        return record
    seconds_per_byte = 0.0
    if any(held.place == "disk" for held in record.held):
        speed = read_bytes_per_s(weights) if weights else None
        if speed is None:
            return record
        seconds_per_byte += 1 / speed
    if (device := torch.device(record.device)).type == "cuda":
        seconds_per_byte += 1 / copy_bytes_per_s(device, record.streamed_layer_bytes)
    return record.model_copy(update={"bytes_per_s": 1 / seconds_per_byte})


def check_disk(placed: Placed) -> None:
    """MissingCapabilityError unless the temporary folder has room for what transformers writes there, for each rank."""
    free, needed = shutil.disk_usage(tempfile.gettempdir()).free, placed.rewritten_bytes * started()
    if needed > free:
        raise MissingCapabilityError(
            f"transformers would write {size_words(needed)} of converted weights to the temporary folder, which has "
            f"room for {size_words(free)}.",
            "Set TMPDIR to a folder on a larger disk, or use --layers first:N with fewer layers.",
        )


def weights_file(local: LocalCheckpoint) -> Path | None:
    """The largest file of a fetched checkpoint's weights."""
    files = local.folder.rglob("*.safetensors")
    return max(files, key=lambda file: file.stat().st_size, default=None)


def _only_whole(subject: Subject) -> str:
    """The reason why the weights must be on one device; empty if they need not."""
    if subject.located.original:
        return "its weights are not in transformers' format"
    if (method := subject.ref.quantization) not in (None, *DECODED_ON_LOAD):
        return f"its weights stay quantised ({method}) once loaded"
    return ""


class _Chooser:
    """Chooses a placement for one request, with the memory that is free now."""

    def __init__(self, request: CaptureRequest, subject: Subject) -> None:
        self._subject = subject
        self._model: PreTrainedModel = meta_model(
            subject.located, deepest_layer=subject.deepest_layer, head=subject.head, dtype=subject.dtype
        )
        self._wanted = {layer.index for layer in subject.layers}
        self._need: MemoryEstimate = estimate_memory(self._model.base_model, self._wanted, depth=max(self._wanted))
        self._seqlen = max(subject.seqlens)
        longest = max(subject.serving.packed, default=self._seqlen)
        fixed = subject.serving.chunk or request.segment_length
        shorter = [length for length in SEGMENT_LENGTHS if length < longest]
        self._lengths = (min(fixed, longest),) if fixed else (longest, *shorter)
        self._main: Place = limits.device().index if limits.device().type == "cuda" else "cpu"

    def least_beside(self) -> int:
        return min(self._beside(length) for length in self._lengths)

    def fits_one_gpu(self) -> bool:
        return limits.free_bytes() - self._subject.weight_bytes >= self.least_beside()

    def one_gpu(self) -> Placed:
        beside = limits.free_bytes() - self._subject.weight_bytes
        length = next((length for length in self._lengths if self._beside(length) <= beside), self._lengths[-1])
        return Placed(record=self._record("one-gpu", {"": self._main}, length))

    def possible(self, kind: PlacementKind) -> bool:
        """Whether this machine has the places of `kind` at all."""
        if kind == "all-gpus":
            return len(self._gpus) > 1
        return kind != "cpu-offload" or self._main != "cpu"

    def refuse_impossible(self, kind: PlacementKind) -> None:
        if not self.possible(kind):
            gpus = len(self._gpus)
            needed = "two NVIDIA GPUs" if kind == "all-gpus" else "an NVIDIA GPU"
            raise MissingCapabilityError(
                f"--placement {kind} needs {needed}; {gpus} can be used here.", "Leave out --placement."
            )

    def placed(self, kind: PlacementKind) -> Placed | None:
        """The placement with the longest segments that leave room for the weights, which each segment streams."""
        for length in self._lengths:
            room = dict(self._room(kind, self._beside(length)))
            if (mapped := infer(self._model, room)) is not None:
                return Placed(
                    record=self._record(kind, mapped, length),
                    device_map=mapped,
                    segment_length=length,
                    rewritten_bytes=self._rewritten(mapped),
                )
        return None

    def too_large(self, kind: PlacementKind) -> MissingCapabilityError:
        places = [f"{size_words(free)} on {_name(place)}" for place, free in self._room(kind, 0) if place != "disk"]
        return MissingCapabilityError(
            f"{self._subject.ref.repo_id} does not fit with --placement {kind}: its weights are "
            f"{size_words(self._subject.weight_bytes)}, what it computes takes {size_words(self.least_beside())}, and "
            f"there is room for {' and '.join(places)}.",
            _FITTING,
        )

    def layer_too_large(self) -> MissingCapabilityError | None:
        """The error for a device that cannot hold one layer and the token embedding at a time; None if it can."""
        subject, free, computed = self._subject, limits.free_bytes(), self.least_beside()
        layer = max(decoder_layer_bytes(self._model).values())
        embedding = self._model.get_input_embeddings().weight.nbytes
        if layer + embedding + computed <= free:
            return None
        fits = limits.what_fits(subject, free - computed)
        shortest = self._needed(SEGMENT_LENGTHS[-1], SEGMENT_LENGTHS[-1])
        return MissingCapabilityError(
            f"{subject.ref.repo_id} does not fit on {_name(self._main)} layer by layer: its largest layer has "
            f"{size_words(layer)} of weights, its token embedding {size_words(embedding)}, what is computed takes "
            f"{size_words(computed)}, and {size_words(free)} are free.",
            f"Use a shorter --seq.  {fits}" if layer + embedding + shortest <= free else fits,
        )

    def _beside(self, length: int) -> int:
        """Bytes needed in addition to the weights with segments of this length, replaying included."""
        return self._needed(self._seqlen, length)

    def _needed(self, seqlen: int, segment_length: int) -> int:
        serving = self._subject.serving
        if serving.chunk is not None or (serving.decode and segment_length >= seqlen):  # with a cache in both cases
            return self._subject.batch * self._need.chunked(seqlen, min(segment_length, seqlen))
        return self._subject.batch * self._need.least(seqlen, (segment_length,))

    @cached_property
    def _gpus(self) -> Mapping[int, int]:
        """Free bytes of the GPUs of this process, the computing one first; only that one if there are other ranks.

        A GPU that CUDA cannot start, because another process has it exclusively, is left out.
        """
        if self._main == "cpu":
            return {}
        found = {int(self._main): limits.free_bytes()}
        for index in range(torch.cuda.device_count()) if started() == 1 else ():
            if index != self._main:
                with suppress(MissingCapabilityError):
                    found[index] = free_memory(torch.device("cuda", index))
        return found

    def _room(self, kind: PlacementKind, beside: int) -> Iterator[tuple[Place, int]]:
        """Bytes available for weights at each place, after activations."""
        if self._main == "cpu":
            yield "cpu", limits.free_bytes() - beside
        for index, free in self._gpus.items():
            if index == self._main or free > beside:  # others may be filled by other processes
                yield index, free - beside
        if kind == "cpu-offload":
            # Segments, but not chunks, collect inputs in main memory, which may be half of what is left then.
            collected = 0 if self._subject.serving.chunk else self._subject.batch * self._seqlen
            inputs = 2 * collected * self._need.capture
            yield "cpu", host_memory() - inputs
        if kind == "disk-offload":
            yield "disk", 0

    def _record(self, kind: PlacementKind, mapped: DeviceMap, length: int) -> Placement:
        sequences = self._subject.serving.packed or (self._seqlen,)
        found = weights_by_place(self._model, mapped)
        layer, module = largest_streamed(self._model, mapped, self._main)
        resident = found.get(self._main, (0, 0))[1]
        activations = self._rehearsed(length)
        return Placement(
            kind=kind,
            device=_name(self._main),
            held=tuple(Held(place=_name(place), layers=n, weight_bytes=size) for place, (n, size) in found.items()),
            predicted_peak_bytes=None if activations is None else resident + module + activations,
            streamed_layer_bytes=layer,
            forward_calls=sum(len(split_prompt(tokens, length)) for tokens in sequences) + self._subject.serving.decode,
        )

    def _rehearsed(self, length: int) -> int | None:
        try:
            with quiet_transformers():
                return predict_memory(
                    self._model.base_model,
                    self._wanted,
                    seqlen=self._seqlen,
                    segment_length=length,
                    batch=self._subject.batch,
                    on_gpu=self._main != "cpu",
                    serving=self._subject.serving,
                )
        except Exception:  # the model's code may raise any error here; a real run reports it
            return None

    def _rewritten(self, mapped: DeviceMap) -> int:
        """Bytes of weights that transformers writes to a temporary folder.

        It reads a streamed weight from the checkpoint if the stored form is the used one.  A weight that it assembles
        from several, such as all experts of a layer, has a shape that is not in the files.  It writes all weights of a
        checkpoint that it decodes.
        """
        located = self._subject.located
        depth = located.depth(self._subject.deepest_layer)
        stored = {tensor.shape for tensor in located.weights.tensors(depth, head=self._subject.head).values()}
        decoded = self._subject.ref.quantization in DECODED_ON_LOAD
        return sum(
            parameter.nbytes
            for name, parameter in self._model.named_parameters()
            if place_of(name, mapped) == "disk" and (decoded or tuple(parameter.shape) not in stored)
        )


def _name(place: Place) -> str:
    return f"cuda:{place}" if isinstance(place, int) else place
