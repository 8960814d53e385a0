"""What follows from a request before layers run: where weights go, what a dry run tells, the loaded
model, the notes.

The placement of the weights and its cost are predicted from shapes, before anything is downloaded
or loaded.
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
from ssdprof.capture.manifest import AGAIN, BROKEN_OFF
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
from ssdprof.environment.child import started
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
KINDS: tuple[PlacementKind, ...] = ("one-gpu", "all-gpus", "cpu-offload", "disk-offload")
_WHOLE = (
    "Take a smaller model.  Without --decode and --answers, a run loads no layer after the "
    "deepest wanted one."
)
_NOTHING = "Not one layer of it fits: take a smaller model."
_FITTING = "Leave out --placement, use a shorter --seq, or --layers first:N with fewer layers."
MOST_BYTES = 10 * 10**9  # of a download that needs --yes
_LEAST_LENGTH = 1024  # tokens of the shortest prompt that is proposed
_LEAST_TEMPORARY_BYTES = 2**20  # what compilers and processes write to the temporary folder


@dataclass(frozen=True, kw_only=True)
class ChosenPlacement:
    """A placement, with the arguments for loading.

    device_map: None: all of the model is on one device.
    segment_lengths: tokens per forward call, for each prompt.
    rewritten_bytes: weights that transformers converts on loading and writes to a temporary folder.
    remark: see `Chooser`.
    """

    record: Placement
    device_map: DeviceMap | None = None
    segment_lengths: tuple[int, ...] = ()
    rewritten_bytes: int = 0
    remark: str = ""

    def check_disk(self) -> None:
        """MissingCapabilityError unless the temporary folder has room for what compilers and
        transformers write, the latter for each rank.
        """
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < _LEAST_TEMPORARY_BYTES:
            raise MissingCapabilityError(
                f"The temporary folder has room for {size_words(free)} only.",
                "Make room there, or set TMPDIR to another folder.",
            )
        needed = self.rewritten_bytes * started()
        if needed > free:
            raise MissingCapabilityError(
                f"transformers would write {size_words(needed)} of converted weights to the "
                f"temporary folder, which has room for {size_words(free)}.",
                "Set TMPDIR to a folder on a larger disk, or use --layers first:N with fewer "
                "layers.",
            )

    def priced(self, weights: Path | None) -> Placement:
        """The placement with the measured speed of streaming its weights.  weights: a file of them,
        if there is one.
        """
        record = self.record
        seconds_per_byte = 0.0
        if not record.streamed_layer_bytes:
            return record
        if "disk" in record.allocated:
            speed = read_bytes_per_s(weights) if weights else None
            if speed is None:
                return record
            seconds_per_byte += 1 / speed
        if (device := torch.device(record.device)).type == "cuda":
            seconds_per_byte += 1 / copy_bytes_per_s(device, record.streamed_layer_bytes)
        return record.model_copy(update={"bytes_per_s": 1 / seconds_per_byte})


def choose(target: Target, copies: int = 1) -> ChosenPlacement:
    """The placement that the request names, or else the fastest one that fits.  Downloads and loads
    nothing.

    copies: of each prompt, side by side.  MissingCapabilityError if none fits, BadInputError for a
    checkpoint that does not support the requested one.
    """
    wanted = target.request.placement
    only_whole = ""
    if target.located.original:
        only_whole = "its weights are not in transformers' format"
    elif (method := target.ref.quantization) not in (None, *DECODED_ON_LOAD):
        only_whole = f"its weights stay quantised ({method}) once loaded"
    if only_whole:
        if wanted not in (None, "one-gpu"):
            raise BadInputError(
                f"{target.ref.repo_id} supports only --placement one-gpu: {only_whole}.",
                "Leave it out.",
            )
        wanted = "one-gpu"
    chooser = Chooser(target, copies)
    if wanted is not None and (lacking := chooser.lacks(wanted)):
        raise MissingCapabilityError(
            f"--placement {wanted} needs {lacking}; {len(chooser.gpus)} can be used here.",
            "Leave out --placement.",
        )
    kinds = [wanted] if wanted else [kind for kind in KINDS if not chooser.lacks(kind)]
    for kind in kinds:
        chosen = chooser.choice(kind)
        if chosen is not None:
            return chosen
    # a user who names the length of the segments may try it with less memory than is predicted
    if wanted in (None, "one-gpu") and chooser.fixed and target.weight_bytes <= limits.free_bytes():
        return chooser.at("one-gpu", {"": chooser.main}, chooser.fixed, 0)
    raise chooser.too_large(wanted or "disk-offload")


class Chooser:
    """Chooses a placement, with the memory that is free now.

    remark: why the memory of the computation is not known, and counted as 0; empty if it is.
    """

    def __init__(self, target: Target, copies: int = 1) -> None:
        """Builds the model on the meta device, whose shapes say what each placement takes."""
        self._target = target
        self._batch = target.batch * copies
        self.remark = ""
        self._model: PreTrainedModel = target.located.cut_on_meta(
            deepest_layer=target.deepest_layer, head=target.head, dtype=target.dtype
        )
        self._seqlen = max(target.seqlens)
        self.main: Device = limits.device().index if limits.device().type == "cuda" else "cpu"
        self.fixed = target.serving.chunk or target.request.segment_length
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def least_beside(self, seqlen: int | None = None) -> int:
        """Bytes that must be free in addition to the weights, with the longest or shortest allowed
        segments.
        """
        lengths = self._lengths(seqlen or self._seqlen)
        return min(
            self._beside(seqlen or self._seqlen, length) for length in (lengths[0], lengths[-1])
        )

    def lacks(self, kind: PlacementKind) -> str:
        """What this machine lacks for `kind`; empty if it has its devices."""
        if kind == "all-gpus":
            return "" if len(self.gpus) > 1 else "two NVIDIA GPUs"
        return "an NVIDIA GPU" if kind == "cpu-offload" and self.main == "cpu" else ""

    def choice(self, kind: PlacementKind) -> ChosenPlacement | None:
        """The placement with the longest segments that leave room for the weights, which each
        segment streams.
        """
        free = limits.free_bytes() - self._target.weight_bytes
        for length in self._lengths(self._seqlen):
            beside = self._beside(self._seqlen, length)
            if kind == "one-gpu":
                mapped: DeviceMap | None = {"": self.main} if beside <= free else None
            else:
                mapped = infer_devices(self._model, dict(self._room(kind, beside)))
            if mapped is not None:
                return self.at(kind, mapped, length, max(beside, free))
        return None

    def at(self, kind: PlacementKind, mapped: DeviceMap, length: int, free: int) -> ChosenPlacement:
        """A placement.  length: of the longest prompt's segments.  free: bytes for the computation
        of the others.
        """
        several = kind != "one-gpu"
        return ChosenPlacement(
            record=self._record(kind, mapped, length),
            device_map=mapped if several else None,
            segment_lengths=tuple(
                self._longest(seqlen, length, free) for seqlen in self._target.seqlens
            ),
            rewritten_bytes=self._rewritten(mapped) if several else 0,
            remark=self.remark,
        )

    def too_large(self, kind: PlacementKind) -> MissingCapabilityError:
        """The error for a device that has no room for all weights at once, or for one layer and the
        token embedding at a time; else for this kind.
        """
        target = self._target
        free = limits.free_bytes()
        computed = self.least_beside()
        takes = f"what is computed for {self._seqlen:,} tokens takes {size_words(computed)}"
        weights = f"its weights take {size_words(target.weight_bytes)}"
        layer, embedding = self._streamed_parts()
        if kind == "one-gpu":
            least = target.weight_bytes
            how = ""
        elif layer + embedding + computed <= free:
            room = (
                f"{size_words(size)} on {_device_name(at)}"
                for at, size in self._room(kind, 0)
                if at != "disk"
            )
            return MissingCapabilityError(
                f"{target.ref.repo_id} does not fit with --placement {kind}: {weights}, {takes}, "
                f"and there is room for {' and '.join(room)}.",
                _FITTING,
            )
        else:
            least = layer + embedding
            how = " layer by layer"
            weights = (
                f"its largest layer has {size_words(layer)} of weights, its token embedding "
                f"{size_words(embedding)}"
            )
        hint = _WHOLE if target.whole else _NOTHING
        if fits := list(self._what_fits(least, computed, free)):
            hint = f"What fits: {' or '.join(fits)}."
        return MissingCapabilityError(
            f"{target.ref.repo_id} does not fit on {_device_name(self.main)}{how}: {weights}, "
            f"{takes}, and {size_words(free)} are free.",
            hint,
        )

    def _streamed_parts(self) -> tuple[int, int]:
        """Bytes of the largest decoder layer, and of the token embedding."""
        of_layers: Counter[int | None] = Counter()
        for name, parameter in self._model.named_parameters():
            of_layers[layer_index(name)] += parameter.nbytes
        layer = max(size for index, size in of_layers.items() if index is not None)
        return layer, self._model.get_input_embeddings().weight.nbytes

    def _what_fits(self, weights: int, computed: int, free: int) -> Iterator[str]:
        """Options and models for this memory: "--seq 8192", "--layers first:3", "org/smaller".

        weights: bytes that must be there at once.  computed: bytes for the longest prompt.
        """
        target = self._target
        length = 1 << (self._seqlen - 1).bit_length() >> 1  # the next shorter power of two
        while length >= _LEAST_LENGTH and not target.serving.packed:
            if weights + self.least_beside(length) <= free:
                yield f"--seq {length}"
                break
            length //= 2
        if not target.whole:
            sizes = (
                target.located.weight_bytes(layer.index, dtype=target.dtype)
                for layer in target.ref.layers
            )
            number = sum(size + computed <= free for size in sizes)
            if number:
                yield f"--layers first:{number}"
        yield from (known.repo for known in siblings_that_fit(target.ref.repo_id, free - computed))

    def _lengths(self, seqlen: int) -> tuple[int, ...]:
        """Allowed lengths of segments, the longest first."""
        longest = min(seqlen, max(self._target.serving.packed, default=seqlen))
        if self.fixed:
            return (min(self.fixed, longest),)
        return (longest, *(length for length in memory.SEGMENT_LENGTHS if length < longest))

    def _longest(self, seqlen: int, at_most: int, free: int) -> int:
        """The longest segments of a prompt that fit into `free` bytes, else those of the longest
        prompt.
        """
        lengths = self._lengths(seqlen)
        if seqlen != self._seqlen:
            for length in lengths:
                if self._beside(seqlen, length) <= free:
                    return length
        return min(at_most, lengths[0])

    def _beside(self, seqlen: int, length: int) -> int:
        """Bytes that must be free in addition to the weights, with replaying; 0 if unknown."""
        _, with_replaying = self._predicted(seqlen, length) or (0, 0)
        return with_replaying

    def _predicted(self, seqlen: int, length: int) -> tuple[int, int] | None:
        """Bytes needed in addition to the weights with segments of this length: without and with
        replaying.  None if they cannot be predicted: the first error is the `remark`, and after it
        no other prediction is tried.
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
                why = library_message(error)
                self.remark = (
                    "The memory that is needed besides the weights is not known, "
                    f"because of an error: {why}."
                )
        return self._known.get((seqlen, length))

    @cached_property
    def gpus(self) -> Mapping[int, int]:
        """Free bytes of the GPUs of this process, the computing one first; only that one if there
        are other ranks.

        A GPU that CUDA cannot start, because another process has it exclusively, is left out.
        """
        if self.main == "cpu":
            return {}
        free = {int(self.main): limits.free_bytes()}
        for index in range(torch.cuda.device_count()) if started() == 1 else ():
            if index != self.main:
                with suppress(MissingCapabilityError):
                    free[index] = free_memory(torch.device("cuda", index))
        return free

    def _room(self, kind: PlacementKind, beside: int) -> Iterator[tuple[Device, int]]:
        """Bytes available for weights on each device, after activations."""
        if self.main == "cpu":
            yield "cpu", limits.free_bytes() - beside
        for index, free in self.gpus.items():
            if index == self.main or free > beside:  # others may be filled by other processes
                yield index, free - beside
        if kind == "cpu-offload":
            # Segments, but not chunks, collect inputs in main memory, which may be half of what is
            # left then.
            wanted = {layer.index for layer in self._target.layers}
            mixers = (
                mixer
                for mixer in find_mixers(self._model.base_model)
                if mixer.layer_index in wanted
            )
            layer = self._batch * self._seqlen * max(map(capture_bytes_per_token, mixers))
            yield "cpu", host_memory() - (0 if self._target.serving.chunk else 2 * layer)
        if kind == "disk-offload":
            yield "disk", 0

    def _record(self, kind: PlacementKind, mapped: DeviceMap, length: int) -> Placement:
        """The placement as reports store it.  length: of the longest prompt's segments."""
        serving = self._target.serving
        by_device = weights_by_device(self._model, mapped)
        layer, module = largest_streamed(self._model, mapped, self.main)
        seqlens = serving.packed or (self._seqlen,)
        calls = sum(len(split_prompt(seqlen, length)) for seqlen in seqlens)
        predicted = self._predicted(self._seqlen, length)
        peak = None
        if predicted is not None:
            without_replaying, _ = predicted
            peak = module + without_replaying
            if self.main in by_device:
                peak += by_device[self.main].bytes
        return Placement(
            kind=kind,
            device=_device_name(self.main),
            allocated={_device_name(device): part for device, part in by_device.items()},
            predicted_peak_bytes=peak,
            streamed_layer_bytes=layer,
            forward_calls=calls + serving.decode,
        )

    def _rewritten(self, mapped: DeviceMap) -> int:
        """Bytes that transformers writes to a temporary folder: streamed weights that it assembles
        or decodes.
        """
        located = self._target.located
        weights = located.part(self._target.deepest_layer, head=self._target.head)
        stored = {tuple(tensor.shape) for tensor in weights.tensors.values()}
        decoded = self._target.ref.quantization in DECODED_ON_LOAD
        return sum(
            parameter.nbytes
            for name, parameter in self._model.named_parameters()
            if device_of(name, mapped) == "disk"
            and (decoded or tuple(parameter.shape) not in stored)
        )


def _device_name(device: Device) -> str:
    return f"cuda:{device}" if isinstance(device, int) else device


# --- a dry run


def plan(found: Target | Stored, *, tensor_parallel: int = 1) -> DryRun:
    """The plan of `run` or `capture`: downloads and memory.

    tensor_parallel: ranks among which a run divides the heads.
    BadInputError for a config that transformers cannot use, and for a missing file of a capture.
    """
    of = partial(
        DryRun,
        checkpoint=found.ref,
        layers=found.layers,
        seqlens=found.seqlens,
        batch=found.batch,
        serving=found.serving,
        tensor_parallel=tensor_parallel,
        device=str(limits.device()),
        free_bytes=limits.free_bytes(),
    )
    if isinstance(found, Stored):
        sizes = {capture.file: _size(found.folder / capture.file) for capture in found.chosen}
        return of(
            dims=stored_dims(found.chosen[0]).words,
            files=tuple(
                PlannedFile(name=name, size_bytes=size, cached=True) for name, size in sizes.items()
            ),
            weight_bytes=0,
            notes=() if found.manifest.complete else (BROKEN_OFF,),
        )
    files = found.located.files(found.deepest_layer, head=found.whole)
    placement, remark = _placement(found)
    return of(
        dims=found.located.size_words(found.layers[0]),
        files=files,
        weight_bytes=found.weight_bytes,
        placement=placement,
        notes=(*found.located.notes, *found.located.caveats, *filter(None, [remark])),
    )


def check_start(planned: DryRun, found: Target | Stored) -> None:
    """Raise if it would not run: no placement fits, a prompt cannot be built, the weights cannot be
    fetched, their headers do not fit the config, or stored captures are damaged.
    """
    if isinstance(found, Stored):
        store.check(found.folder, found.manifest, found.chosen)
        return
    if planned.placement is None:
        choose(found).check_disk()
    build_prompts(found)
    check_fetch(found.located, found.deepest_layer, head=found.head)


def _placement(target: Target) -> tuple[Placement | None, str]:
    """The placement, with a remark; None if none fits, and then `check_start` raises after the plan
    is shown.
    """
    try:
        chosen = choose(target)
        chosen.check_disk()
    except MissingCapabilityError:
        return None, ""
    return chosen.priced(_weights_file(target)), chosen.remark


def _weights_file(target: Target) -> Path | None:
    """A file of the weights that is on this machine, if there is one."""
    located = target.located
    weights = located.part(target.deepest_layer, head=target.head)
    name = next(filter(located.source.cached, weights.files), None)
    return located.source.path(name) if name else None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {why(error)}.", "Capture again.") from error


def stored_dims(capture: LayerCapture) -> Dims:
    """The sizes from the operator's cost, on meta tensors.  BadInputError for an invalid record."""
    operator = operators.get(capture.layer.operator)
    try:
        tensors = {
            name: torch.empty(record.shape, dtype=dtype_named(record.dtype), device="meta")
            for name, record in capture.tensors.items()
        }
        inputs = operator.inputs(**tensors, **capture.scalars)
        return operator.oracle.dims(inputs)
    except (TypeError, ValueError, RuntimeError) as error:
        why_not = library_message(error)
        raise BadInputError(
            f"The stored {capture.layer.name} cannot be replayed: {why_not}.", AGAIN
        ) from error


# --- the model


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its device, and its prompts.

    target: the layers to capture, and how.
    model: the base model.  whole: the model with its language-model head; None if only the base
    model was requested.
    ids: each (b, l) int64.  segment_lengths: tokens per forward call, for each prompt.
    placement: where the model's weights are.  files: of weights on the disk, which go with this
    object.
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

    def shared(self, ranks: Ranks) -> Loaded:
        """With the layers of this rank."""
        layers = ranks.share(self.target.layers)
        return replace(self, target=replace(self.target, layers=layers))

    def prompt_runs(self) -> Iterator[PromptRun]:
        """The prompts, in the order of `prompts`, for the model."""
        target = self.target
        for ids, segment_length in zip(self.ids, self.segment_lengths, strict=True):
            yield PromptRun(
                self.model,
                ids.to(self.model.device),
                target.serving.chunk or segment_length,
                target.ref.model_type,
                target.layers,
                target.serving,
                partial(logits, self.whole) if target.serving.decode else None,
            )

    def run(self, on_layer: OnLayer) -> None:
        """Run the model on every prompt; `on_layer` sees each call of each layer."""
        for prompt in self.prompt_runs():
            capture_layers(prompt, on_layer)

    def stored_in(self, folder: Path, *, overwrite: bool = False) -> store.CaptureWriter:
        return store.CaptureWriter(
            folder,
            checkpoint=self.target.ref,
            prompts=self.prompts,
            segment_length=max(self.segment_lengths),
            overwrite=overwrite,
        )


def load(target: Target, watcher: Watcher, copies: int = 1) -> Loaded:
    """Build the prompts, download the weights, then load the model: a wrong prompt is found before
    the download.

    copies: of each prompt, side by side, for which memory is needed.
    """
    # no warnings of fallbacks that capture replaces
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
    record = chosen.priced(_weights_file(target))
    if record.kind != "one-gpu":
        watcher.say(placement_words(record))
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
        model=loaded.base_model,  # the model itself, if it has no head
        ids=tuple(ids for ids, _ in built),
        prompts=tuple(prompt for _, prompt in built),
        segment_lengths=chosen.segment_lengths,
        placement=record,
        files=local,
        whole=loaded if target.head else None,
    )


def sources(found: Target | Stored, several: Iterable[Implementation]) -> list[Path]:
    """The files of a local checkpoint or of captures, and of the user's kernels."""
    files = source_files(several)
    if isinstance(found, Stored):
        folder = found.folder
    elif found.ref.source == "local":
        folder = found.located.source.folder
    else:
        return files
    return [*filter(Path.is_file, folder.iterdir()), *files]


def refuse_large_download(target: Target) -> None:
    """BadInputError for a download above `MOST_BYTES`, unless --yes is given."""
    files = target.located.files(target.deepest_layer, head=target.head)
    size = sum(file.size_bytes for file in files if not file.cached)
    if size > MOST_BYTES and not target.request.yes:
        raise BadInputError(
            f"{target.ref.repo_id} is a download of {size_words(size)}.",
            "Give --yes to start it, --layers first:2 for a part of it, or --dry-run to see "
            "the files.",
        )


def build_prompts(target: Target) -> list[tuple[torch.Tensor, Prompt]]:
    """Token ids and their record, for each length.  Downloads the tokenizer.  Raises what
    `build_prompt` raises.
    """
    tokenizer = fetch_tokenizer(target.located)
    vocabulary = target.located.vocab_size
    request = target.request
    built = []
    for seqlen in target.seqlens:
        ids, prompt = build_prompt(
            tokenizer.folder if tokenizer else None,
            seqlen,
            kind="file" if request.prompt_file else request.prompt,
            file=request.prompt_file,
            vocab_size=vocabulary,
            batch=target.batch,
            packed=target.serving.packed,
            unread=target.located.source.unread_tokenizer(),
        )
        if vocabulary is not None:
            check_ids(vocabulary, ids)
        words = f"{tokenizer.label}: {prompt.tokenizer}" if tokenizer else prompt.tokenizer
        built.append(
            (ids, prompt.model_copy(update={"tokenizer": words, "serving": target.serving}))
        )
    return built
