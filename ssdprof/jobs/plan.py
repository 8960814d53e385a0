"""The plan of a job that runs a model: where the weights go, the dry run, and the loaded model.

The placement of the weights and the memory that it needs are predicted from shapes, before anything
is downloaded or loaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ssdprof import operators
from ssdprof.capture import memory, store
from ssdprof.capture.forward import PromptRun, check_ids, logits
from ssdprof.capture.layers import OnLayer, capture_bytes_per_token, capture_layers
from ssdprof.capture.manifest import BROKEN_OFF, CAPTURE_HINT
from ssdprof.capture.prompt import build_prompt
from ssdprof.checkpoint import transformers
from ssdprof.checkpoint.load import (
    Device,
    DeviceMap,
    LocalCheckpoint,
    check_fetch,
    device_of,
    fetch,
    fetch_tokenizer,
    infer_devices,
    largest_streamed,
    load_model,
    weights_by_device,
)
from ssdprof.checkpoint.meta import quiet_transformers
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.checkpoint.names import siblings_that_fit
from ssdprof.checkpoint.weights import layer_index
from ssdprof.core.base import DType, PlacementKind
from ssdprof.core.target import (
    DECODED_ON_LOAD,
    Dims,
    DryRun,
    LayerCapture,
    Placement,
    PlannedFile,
    Prompt,
    split_prompt,
)
from ssdprof.core.words import placement_words, size_words
from ssdprof.environment.child import rank_count
from ssdprof.environment.machine import copy_bytes_per_s, free_memory, host_memory, read_bytes_per_s
from ssdprof.errors import BadInputError, MissingCapabilityError, library_message
from ssdprof.files import why
from ssdprof.jobs import limits
from ssdprof.jobs.target import Stored, Target
from ssdprof.kernels.registry import Implementation
from ssdprof.operators.implementations import source_files
from ssdprof.operators.tensors import dtype_name, dtype_named
from ssdprof.progress import Watcher
from ssdprof.store.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# the fastest first
PLACEMENT_KINDS: tuple[PlacementKind, ...] = ("one-gpu", "all-gpus", "cpu-offload", "disk-offload")
# Hints for models that do not fit.  The first: all layers are needed.  The second: not one layer
# fits.  The third: the placement does not fit, although the largest layer does.
_SMALLER_MODEL_HINT = (
    "Take a smaller model.  Without --decode and --answers, a run loads no layer after the "
    "deepest wanted one."
)
_NO_LAYER_HINT = "Not one layer of it fits: take a smaller model."
_FIT_HINT = "Leave out --placement, use a shorter --seq, or --layers first:N with fewer layers."
MOST_DOWNLOAD_BYTES = 10 * 10**9  # the largest download that does not need --yes
_LEAST_LENGTH = 1024  # tokens of the shortest prompt that a hint proposes
# room in the temporary folder without which compilers and child processes cannot write their files
_LEAST_TEMPORARY_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class ChosenPlacement:
    """A placement, with the arguments for loading the model.

    record: the placement as reports store it.
    device_map: the device of each module; None: the whole model is on `limits.device()`.
    segment_lengths: tokens per forward call, for each prompt.
    rewritten_bytes: bytes of the weights on the disk that transformers converts on loading, and
        writes to a temporary folder.
    remark: see `Chooser`.
    """

    record: Placement
    device_map: DeviceMap | None = None
    segment_lengths: tuple[int, ...] = ()
    rewritten_bytes: int = 0
    remark: str = ""

    def check_disk(self) -> None:
        """Raises MissingCapabilityError unless the temporary folder has room for the files of
        compilers, and for the weights that transformers converts in each rank.
        """
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < _LEAST_TEMPORARY_BYTES:
            raise MissingCapabilityError(
                f"The temporary folder has room for {size_words(free)} only.",
                "Make room there, or set TMPDIR to another folder.",
            )
        needed = self.rewritten_bytes * rank_count()
        if needed > free:
            raise MissingCapabilityError(
                f"transformers would write {size_words(needed)} of converted weights to the "
                f"temporary folder, which has room for {size_words(free)}.",
                "Set TMPDIR to a folder on a larger disk, or use --layers first:N with fewer "
                "layers.",
            )

    def priced(self, weights_file: Path | None) -> Placement:
        """The placement with the measured speed at which its weights are streamed, in bytes per
        second; without a speed if nothing is streamed or the disk cannot be measured.

        If some weights are on the disk and others in main memory, it is the speed of those on the
        disk.

        weights_file: on this machine, to measure the disk; None: there is none.
        """
        record = self.record
        if not record.streamed_layer_bytes:
            return record
        seconds_per_byte = 0.0
        if "disk" in record.allocated:
            speed = read_bytes_per_s(weights_file) if weights_file else None
            if speed is None:
                return record
            seconds_per_byte += 1 / speed
        device = torch.device(record.device)
        if device.type == "cuda":
            seconds_per_byte += 1 / copy_bytes_per_s(device, record.streamed_layer_bytes)
        return record.model_copy(update={"bytes_per_s": 1 / seconds_per_byte})


def choose(target: Target, copies: int = 1) -> ChosenPlacement:
    """The placement that the request names, or else the fastest one that fits.  Loads no weights.

    If none fits by the predicted memory, but the user gave the tokens per forward call and one GPU
    (without a GPU, main memory) has room for the weights, it is "one-gpu" all the same, unless
    another one is requested.

    copies: number of copies of each prompt, side by side in a batch.

    Raises MissingCapabilityError if no placement fits or this machine lacks the devices of the
    requested one, and BadInputError if the checkpoint does not support the requested one.
    """
    wanted = target.request.placement
    method = target.ref.quantization
    one_gpu_reason = ""  # why the model cannot be divided between devices
    if target.located.original:
        one_gpu_reason = "its weights are not in transformers' format"
    elif method not in (None, *DECODED_ON_LOAD):
        one_gpu_reason = f"its weights stay quantised ({method}) once loaded"
    if one_gpu_reason:
        if wanted not in (None, "one-gpu"):
            raise BadInputError(
                f"{target.ref.repo_id} supports only --placement one-gpu: {one_gpu_reason}.",
                "Leave it out.",
            )
        wanted = "one-gpu"
    chooser = Chooser(target, copies)
    lacking = chooser.lacks(wanted) if wanted else ""
    if lacking:
        raise MissingCapabilityError(
            f"--placement {wanted} needs {lacking}; {len(chooser.gpus)} can be used here.",
            "Leave out --placement.",
        )
    kinds = [wanted] if wanted else [kind for kind in PLACEMENT_KINDS if not chooser.lacks(kind)]
    for kind in kinds:
        chosen = chooser.choice(kind)
        if chosen is not None:
            return chosen
    # A user who gives the length of the segments may try it with less memory than is predicted.
    has_room = target.weight_bytes <= limits.free_bytes()
    if wanted in (None, "one-gpu") and chooser.requested_length and has_room:
        return chooser.at("one-gpu", {"": chooser.main}, chooser.requested_length, 0)
    raise chooser.too_large(wanted or "disk-offload")


class Chooser:
    """Chooses a placement, with the memory that is free now.

    main: the device of the first layers: the index of the current GPU, or "cpu".
    requested_length: tokens per segment, that is, per forward call, as --segment or
        --chunked-prefill say; None: the chooser takes the longest segments that fit.
    remark: a sentence that says why the memory of the computation is not known, and counted as 0;
        empty if it is known.
    """

    def __init__(self, target: Target, copies: int = 1) -> None:
        """Builds the model on the meta device, whose shapes say how much memory it takes."""
        self._target = target
        self._batch = target.batch * copies
        self.remark = ""
        self._model: PreTrainedModel = target.located.cut_on_meta(
            deepest_layer=target.deepest_layer, head=target.head, dtype=target.dtype
        )
        self._seqlen = max(target.seqlens)
        device = limits.device()
        self.main: Device = device.index if device.type == "cuda" else "cpu"
        self.requested_length = target.serving.chunk or target.request.segment_length
        # (seqlen, segment length) -> the bytes that `_predicted` returns, unless it returns None
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def least_bytes_beside_weights(self, seqlen: int | None = None) -> int:
        """The least bytes that must be free in addition to the weights, with the longest or the
        shortest of the allowed segments; 0 if either is unknown.

        seqlen: tokens of the prompt; None: the longest prompt.
        """
        seqlen = seqlen or self._seqlen
        lengths = self._lengths(seqlen)
        return min(
            self._bytes_beside_weights(seqlen, length) for length in (lengths[0], lengths[-1])
        )

    def lacks(self, kind: PlacementKind) -> str:
        """What this machine lacks for `kind`, in words; empty if it has the devices.

        Without a GPU, "one-gpu" is main memory, and "disk-offload" the disk beside it.
        """
        if kind == "all-gpus":
            return "" if len(self.gpus) > 1 else "two NVIDIA GPUs"
        return "an NVIDIA GPU" if kind == "cpu-offload" and self.main == "cpu" else ""

    def choice(self, kind: PlacementKind) -> ChosenPlacement | None:
        """The placement of this kind with the longest segments that leave room for the weights;
        None if it does not fit.

        Long segments are better, because every segment streams the weights again.
        """
        beside_all_weights = limits.free_bytes() - self._target.weight_bytes
        for length in self._lengths(self._seqlen):
            bytes_beside_weights = self._bytes_beside_weights(self._seqlen, length)
            if kind == "one-gpu":
                fits = bytes_beside_weights <= beside_all_weights
                mapped: DeviceMap | None = {"": self.main} if fits else None
            else:
                mapped = infer_devices(self._model, dict(self._room(kind, bytes_beside_weights)))
            if mapped is not None:
                # More is free if other devices have a part of the weights: at least what the
                # longest prompt needs.
                free = max(bytes_beside_weights, beside_all_weights)
                return self.at(kind, mapped, length, free)
        return None

    def at(self, kind: PlacementKind, mapped: DeviceMap, length: int, free: int) -> ChosenPlacement:
        """A placement of this kind.

        mapped: the device of each module.  length: tokens per segment of the longest prompt.
        free: bytes that the computation of shorter prompts may take.
        """
        divided = kind != "one-gpu"
        segment_lengths = [
            self._segment_length(seqlen, length, free) for seqlen in self._target.seqlens
        ]
        return ChosenPlacement(
            record=self._record(kind, mapped, length),
            device_map=mapped if divided else None,
            segment_lengths=tuple(segment_lengths),
            rewritten_bytes=self._rewritten(mapped) if divided else 0,
            remark=self.remark,
        )

    def too_large(self, kind: PlacementKind) -> MissingCapabilityError:
        """The error for a model that does not fit with a placement of this kind.

        If the largest layer and the embedding fit, so that the weights could be streamed layer by
        layer, the message says how much room this placement has.  Otherwise, and for "one-gpu", the
        hint names a shorter prompt, fewer layers and smaller models that fit, if there are any.
        """
        target = self._target
        free = limits.free_bytes()
        computed = self.least_bytes_beside_weights()
        computed_words = (
            f"what is computed for {self._seqlen:,} tokens takes {size_words(computed)}"
        )
        weights_words = f"its weights take {size_words(target.weight_bytes)}"
        layer, embedding = self._streamed_parts()
        if kind == "one-gpu":
            least_weights = target.weight_bytes
            how = ""
        elif layer + embedding + computed <= free:
            rooms = [
                f"{size_words(size)} on {_device_name(device)}"
                for device, size in self._room(kind, 0)
                if device != "disk"
            ]
            return MissingCapabilityError(
                f"{target.ref.repo_id} does not fit with --placement {kind}: {weights_words}, "
                f"{computed_words}, and there is room for {' and '.join(rooms)}.",
                _FIT_HINT,
            )
        else:
            least_weights = layer + embedding
            how = " layer by layer"
            weights_words = (
                f"its largest layer has {size_words(layer)} of weights, its token embedding "
                f"{size_words(embedding)}"
            )
        hint = _SMALLER_MODEL_HINT if target.whole else _NO_LAYER_HINT
        if fits := list(self._what_fits(least_weights, computed, free)):
            hint = f"What fits: {' or '.join(fits)}."
        return MissingCapabilityError(
            f"{target.ref.repo_id} does not fit on {_device_name(self.main)}{how}: "
            f"{weights_words}, {computed_words}, and {size_words(free)} are free.",
            hint,
        )

    def _streamed_parts(self) -> tuple[int, int]:
        """Bytes of the largest decoder layer, and of the token embedding."""
        layer_bytes: Counter[int | None] = Counter()  # by layer; None: outside of layers
        for name, parameter in self._model.named_parameters():
            layer_bytes[layer_index(name)] += parameter.nbytes
        del layer_bytes[None]
        return max(layer_bytes.values()), self._model.get_input_embeddings().weight.nbytes

    def _what_fits(self, least_weights: int, computed: int, free: int) -> Iterator[str]:
        """Options and models that fit in `free` bytes: "--seq 8192", "--layers first:3",
        "org/smaller".

        Each is proposed on its own: a shorter prompt, of a power of two of tokens; or fewer layers,
        or another model, with the longest prompt and with all of their weights in memory.

        least_weights: bytes of this model's weights that must be in memory at once.
        computed: bytes that the computation of the longest prompt takes.
        """
        target = self._target
        length = (1 << (self._seqlen - 1).bit_length()) // 2  # the next shorter power of two
        while length >= _LEAST_LENGTH and not target.serving.packed:
            if least_weights + self.least_bytes_beside_weights(length) <= free:
                yield f"--seq {length}"
                break
            length //= 2
        if not target.whole:
            fitting = [
                layer
                for layer in target.ref.layers
                if target.located.weight_bytes(layer.index, head=target.head, dtype=target.dtype)
                + computed
                <= free
            ]
            if fitting:
                yield f"--layers first:{len(fitting)}"
        yield from (known.repo for known in siblings_that_fit(target.ref.repo_id, free - computed))

    def _lengths(self, seqlen: int) -> tuple[int, ...]:
        """Allowed tokens per segment for a prompt of `seqlen` tokens, the most first."""
        longest = min(seqlen, max(self._target.serving.packed, default=seqlen))
        if self.requested_length:
            return (min(self.requested_length, longest),)
        return (longest, *(length for length in memory.SEGMENT_LENGTHS if length < longest))

    def _segment_length(self, seqlen: int, of_longest: int, free: int) -> int:
        """Tokens per segment of a prompt of `seqlen` tokens: if it is not the longest prompt, the
        most with which its computation fits in `free` bytes.

        of_longest: the number for the longest prompt.  A shorter one gets it, too, if none fits.
        """
        lengths = self._lengths(seqlen)
        if seqlen != self._seqlen:
            for length in lengths:
                if self._bytes_beside_weights(seqlen, length) <= free:
                    return length
        return min(of_longest, lengths[0])

    def _bytes_beside_weights(self, seqlen: int, length: int) -> int:
        """Bytes that must be free in addition to the weights to run a prompt of `seqlen` tokens in
        segments of `length`, and to replay its calls; 0 if unknown.
        """
        _, with_replaying = self._predicted(seqlen, length) or (0, 0)
        return with_replaying

    def _predicted(self, seqlen: int, length: int) -> tuple[int, int] | None:
        """Bytes needed in addition to the weights with segments of this length: without and with
        replaying the calls.

        None if they cannot be predicted.  The first error becomes the `remark`, and after it no
        other prediction is tried.
        """
        if (seqlen, length) not in self._known and not self.remark:
            try:
                with quiet_transformers():
                    self._known[seqlen, length] = memory.predict_memory(
                        self._model.base_model,
                        {layer.index for layer in self._target.layers},
                        seqlen=seqlen,
                        segment_length=length,
                        batch=self._batch,
                        on_gpu=self.main != "cpu",
                        serving=self._target.serving,
                    )
            # the model's code may raise any error; a real run reports it
            except Exception as error:
                self.remark = (
                    "The memory that is needed besides the weights is not known, "
                    f"because of an error: {library_message(error)}."
                )
        return self._known.get((seqlen, length))

    @cached_property
    def gpus(self) -> Mapping[int, int]:
        """The free bytes of each GPU that this process may use, `main` first.

        With other ranks, each uses its own GPU only.  A GPU that CUDA cannot start, because another
        process has it exclusively, is left out.
        """
        if self.main == "cpu":
            return {}
        free = {int(self.main): limits.free_bytes()}
        if rank_count() > 1:
            return free
        for index in range(torch.cuda.device_count()):
            if index != self.main:
                with suppress(MissingCapabilityError):
                    free[index] = free_memory(torch.device("cuda", index))
        return free

    def _room(self, kind: PlacementKind, bytes_beside_weights: int) -> Iterator[tuple[Device, int]]:
        """Each device, and the bytes that it has for weights, perhaps fewer than 0; 0 for the disk,
        which takes what is left.

        bytes_beside_weights: bytes that the computation takes on `main` and on each other GPU.
        """
        if self.main == "cpu":
            yield "cpu", limits.free_bytes() - bytes_beside_weights
        for index, free in self.gpus.items():
            # another GPU may be full, with the memory of other processes
            if index == self.main or free > bytes_beside_weights:
                yield index, free - bytes_beside_weights
        if kind == "cpu-offload":
            yield "cpu", host_memory() - self._collected_bytes()
        if kind == "disk-offload":
            yield "disk", 0

    def _collected_bytes(self) -> int:
        """Bytes of main memory to leave free for the inputs of a layer: twice their size.

        The segments of a prompt are collected there until they are complete.  Chunks are replayed
        one by one.
        """
        if self._target.serving.chunk:
            return 0
        wanted = {layer.index for layer in self._target.layers}
        mixers = find_mixers(self._model.base_model)
        per_token = max(
            capture_bytes_per_token(mixer) for mixer in mixers if mixer.layer_index in wanted
        )
        return 2 * self._batch * self._seqlen * per_token

    def _record(self, kind: PlacementKind, mapped: DeviceMap, length: int) -> Placement:
        """The placement as reports store it.

        mapped: the device of each module.  length: tokens per segment of the longest prompt.
        """
        serving = self._target.serving
        by_device = weights_by_device(self._model, mapped)
        layer_bytes, module_bytes = largest_streamed(self._model, mapped, self.main)
        seqlens = serving.packed or (self._seqlen,)
        calls = sum(len(split_prompt(seqlen, length)) for seqlen in seqlens)
        predicted = self._predicted(self._seqlen, length)
        peak = None
        if predicted is not None:
            without_replaying, _ = predicted
            peak = module_bytes + without_replaying
            if self.main in by_device:
                peak += by_device[self.main].bytes
        return Placement(
            kind=kind,
            device=_device_name(self.main),
            allocated={_device_name(device): weights for device, weights in by_device.items()},
            predicted_peak_bytes=peak,
            streamed_layer_bytes=layer_bytes,
            forward_calls=calls + serving.decode,
        )

    def _rewritten(self, mapped: DeviceMap) -> int:
        """Bytes of the weights on the disk that transformers writes to a temporary folder, because
        it decodes them or assembles them from stored tensors of other shapes.
        """
        located = self._target.located
        weights = located.part(self._target.deepest_layer, head=self._target.head)
        stored_shapes = {tuple(tensor.shape) for tensor in weights.tensors.values()}
        decoded = self._target.ref.quantization in DECODED_ON_LOAD
        rewritten = 0
        for name, parameter in self._model.named_parameters():
            if device_of(name, mapped) != "disk":
                continue
            if decoded or tuple(parameter.shape) not in stored_shapes:
                rewritten += parameter.nbytes
        return rewritten


def _device_name(device: Device) -> str:
    """The device in words: "cuda:0" or "cpu", as torch names it, or "disk"."""
    return f"cuda:{device}" if isinstance(device, int) else device


# --- a dry run


def plan(target: Target | Stored, *, tensor_parallel: int = 1) -> DryRun:
    """The plan of `run`, `capture` or `answers`: downloads and memory.

    tensor_parallel: number of ranks among which a run divides the heads.

    If no placement fits, or if the temporary folder is full, the plan has no placement.  For stored
    captures it has none either.  Raises BadInputError for a config that transformers cannot use,
    for a placement that the checkpoint does not support, and for a missing file of a capture.
    """
    dry_run = partial(
        DryRun,
        checkpoint=target.ref,
        layers=target.layers,
        seqlens=target.seqlens,
        batch=target.batch,
        serving=target.serving,
        tensor_parallel=tensor_parallel,
        device=str(limits.device()),
        free_bytes=limits.free_bytes(),
    )
    if isinstance(target, Stored):
        sizes = {capture.file: _size(target.folder / capture.file) for capture in target.chosen}
        return dry_run(
            dims=stored_dims(target.chosen[0]).words,
            files=tuple(
                PlannedFile(name=name, size_bytes=size, cached=True) for name, size in sizes.items()
            ),
            weight_bytes=0,
            notes=() if target.manifest.complete else (BROKEN_OFF,),
        )
    files = target.located.files(target.deepest_layer, head=target.head)
    placement, remark = _placement(target)
    return dry_run(
        dims=target.located.size_words(target.layers[0]),
        files=files,
        weight_bytes=target.weight_bytes,
        placement=placement,
        notes=(*target.located.notes, *target.located.caveats, *filter(None, [remark])),
    )


def check_start(planned: DryRun, target: Target | Stored) -> None:
    """Raise the error that a run of the plan would raise before it loads the model: no placement
    fits, the temporary folder is full, a prompt cannot be built, the weights cannot be fetched,
    their headers do not fit the config, or stored captures are damaged or were interrupted.  That a
    large download needs --yes is no error here, because the plan shows its size.
    """
    if isinstance(target, Stored):
        store.check(target.folder, target.manifest, target.chosen)
        return
    if planned.placement is None:
        choose(target).check_disk()
    build_prompts(target)
    check_fetch(target.located, target.deepest_layer, head=target.head)


def _placement(target: Target) -> tuple[Placement | None, str]:
    """The placement, and the remark of `Chooser`.

    None, and no remark, if no placement fits or the temporary folder is full.  Then the dry run
    shows the rest of the plan, and `check_start` raises the error.
    """
    try:
        chosen = choose(target)
        chosen.check_disk()
    except MissingCapabilityError:
        return None, ""
    return chosen.priced(_weights_file(target)), chosen.remark


def _weights_file(target: Target) -> Path | None:
    """A file of the needed weights that is on this machine; None if all must be downloaded."""
    source = target.located.source
    for name in target.located.part(target.deepest_layer, head=target.head).files:
        if source.cached(name):
            return source.path(name)
    return None


def _size(file: Path) -> int:
    """The size in bytes of a file of a capture.  Raises BadInputError if there is no such file."""
    try:
        return file.stat().st_size
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {why(error)}.", "Capture again.") from error


def stored_dims(capture: LayerCapture) -> Dims:
    """The sizes of a captured call, from the shapes in its record.

    Raises BadInputError if the operator cannot have inputs of these shapes and dtypes.
    """
    operator = operators.get(capture.layer.operator)
    try:
        tensors = {
            name: torch.empty(record.shape, dtype=dtype_named(record.dtype), device="meta")
            for name, record in capture.tensors.items()
        }
        inputs = operator.inputs(**tensors, **capture.scalars)
        return operator.oracle.dims(inputs)
    except (TypeError, ValueError, RuntimeError) as error:
        message = library_message(error)
        raise BadInputError(
            f"The stored {capture.layer.name} cannot be replayed: {message}.", CAPTURE_HINT
        ) from error


# --- the model


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its device, and its prompts.

    target: what was loaded, and the layers to capture.
    model: the base model, without the language-model head.
    whole: the model with its language-model head; None if only the base model was requested.
    ids: the token ids of each prompt, (b, l) int64.
    prompts: the record of each prompt.
    segment_lengths: tokens per forward call, for each prompt.
    placement: where the model's weights are.
    files: the checkpoint in a temporary folder, which exists as long as this object does; streamed
        weights are read from it.
    """

    target: Target
    model: Any
    ids: tuple[torch.Tensor, ...]
    prompts: tuple[Prompt, ...]
    segment_lengths: tuple[int, ...]
    placement: Placement
    files: LocalCheckpoint
    whole: Any = None

    @property
    def dtype(self) -> DType:
        """The dtype of the model's weights."""
        return dtype_name(self.model.dtype)

    @property
    def header(self) -> dict[str, Any]:
        """The fields of a report's header that the plan determines."""
        located = self.target.located
        return {
            "target": located.ref.repo_id,
            "model": located.ref,
            "prompts": self.prompts,
            "segment_length": max(self.segment_lengths),
            "placement": self.placement,
            "notes": tuple(located.caveats),
        }

    def take_share(self, ranks: Ranks) -> Loaded:
        """The same model, with this rank's share of the layers as its target.  Sets
        `Ranks.divided`.
        """
        layers = ranks.share(self.target.layers)
        return replace(self, target=replace(self.target, layers=layers))

    def prompt_runs(self) -> Iterator[PromptRun]:
        """What `capture.forward` needs to run the model on each prompt, in the order of
        `prompts`.
        """
        target = self.target
        for ids, segment_length in zip(self.ids, self.segment_lengths, strict=True):
            yield PromptRun(
                model=self.model,
                ids=ids.to(self.model.device),
                segment_length=segment_length,
                model_type=target.ref.model_type,
                layers=target.layers,
                serving=target.serving,
                head=partial(logits, self.whole) if target.serving.decode else None,
            )

    def run(self, on_layer: OnLayer) -> None:
        """Run the model on every prompt; `on_layer` sees each call of each layer."""
        for prompt in self.prompt_runs():
            capture_layers(prompt, on_layer)

    def stored_in(self, folder: Path, *, overwrite: bool) -> store.CaptureWriter:
        """A writer that stores captures of this model in `folder`.

        overwrite: replace a complete capture there.
        """
        return store.CaptureWriter(
            folder,
            checkpoint=self.target.ref,
            prompts=self.prompts,
            segment_length=max(self.segment_lengths),
            overwrite=overwrite,
        )


def load(target: Target, watcher: Watcher, copies: int = 1) -> Loaded:
    """Choose the placement, build the prompts, download the weights, then load the model.

    A wrong prompt is found before the download of the weights.

    copies: number of copies of each prompt, side by side, for which the placement leaves memory.

    Raises what `choose`, `check_disk`, `build_prompts`, `refuse_large_download`, `fetch` and
    `load_model` raise, and MissingCapabilityError if memory runs out.
    """
    # transformers warns about slow fallbacks of functions that capture replaces
    transformers.logging.set_verbosity_error()
    getLogger("accelerate").setLevel(ERROR)
    chosen = choose(target, copies)
    for note in (*target.located.notes, *target.located.caveats, *filter(None, [chosen.remark])):
        watcher.say(note)
    chosen.check_disk()
    built = build_prompts(target)
    refuse_large_download(target)
    local = fetch(
        target.located, deepest_layer=target.deepest_layer, head=target.head, progress=watcher.say
    )
    chosen.check_disk()  # again: the download may have filled the disk
    placement = chosen.priced(_weights_file(target))
    if placement.kind != "one-gpu":
        watcher.say(placement_words(placement))
    with (
        limits.memory_errors(),
        watcher.step(f"Loading {target.ref.repo_id}"),
        quiet_transformers(),
    ):
        loaded = load_model(
            local,
            device=limits.device(),
            dtype="auto" if target.dtype is None else getattr(torch, target.dtype),
            device_map=chosen.device_map,
        )
    return Loaded(
        target=target,
        model=loaded.base_model,  # is `loaded` itself if that has no head
        ids=tuple(ids for ids, _ in built),
        prompts=tuple(prompt for _, prompt in built),
        segment_lengths=chosen.segment_lengths,
        placement=placement,
        files=local,
        whole=loaded if target.head else None,
    )


def sources(target: Target | Stored, implementations: Iterable[Implementation]) -> list[Path]:
    """Files on this machine on which a report depends: those of a local checkpoint or of captures,
    and those of the user's kernels.  Files of a checkpoint of the hub do not change.
    """
    files = source_files(implementations)
    if isinstance(target, Stored):
        folder = target.folder
    elif target.ref.source == "local":
        folder = target.located.source.folder
    else:
        return files
    return [*filter(Path.is_file, folder.iterdir()), *files]


def refuse_large_download(target: Target) -> None:
    """Raise BadInputError for a download above `MOST_DOWNLOAD_BYTES`, unless --yes is given.

    The hint names --layers, unless all layers are needed whatever that says.
    """
    files = target.located.files(target.deepest_layer, head=target.head)
    size = sum(file.size_bytes for file in files if not file.cached)
    if size > MOST_DOWNLOAD_BYTES and not target.request.yes:
        part = "" if target.deepest_layer is None else "--layers first:2 for a part of it, "
        raise BadInputError(
            f"{target.ref.repo_id} is a download of {size_words(size)}.",
            f"Give --yes to start it, {part}or --dry-run to see the files.",
        )


def build_prompts(target: Target) -> list[tuple[torch.Tensor, Prompt]]:
    """The token ids, (b, l) int64, and the record of each prompt.

    Downloads the tokenizer.  Raises what `build_prompt` raises, and BadInputError for ids that the
    model does not have.
    """
    tokenizer = fetch_tokenizer(target.located)
    vocab_size = target.located.vocab_size
    request = target.request
    built = []
    for seqlen in target.seqlens:
        ids, prompt = build_prompt(
            tokenizer.folder if tokenizer else None,
            seqlen,
            kind="file" if request.prompt_file else request.prompt,
            file=request.prompt_file,
            vocab_size=vocab_size,
            batch=target.batch,
            packed=target.serving.packed,
            unread=target.located.source.unread_tokenizer(),
        )
        if vocab_size is not None:
            check_ids(vocab_size, ids)
        changes: dict[str, object] = {"serving": target.serving}
        if tokenizer:
            changes["tokenizer"] = f"{tokenizer.label}: {prompt.tokenizer}"
        built.append((ids, prompt.model_copy(update=changes)))
    return built
