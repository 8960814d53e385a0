"""Folders of captured operator inputs: a safetensors file per call, and a manifest.

Files and the manifest are written atomically, a file before its entry.  The manifest has `complete:
false` until the writer closes without an error, and all of its entries are valid at any time: an
earlier complete capture is replaced with the last manifest, by files of other names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from huggingface_hub import cached_assets_path, constants
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ssdprof import operators
from ssdprof.capture.layers import CapturedLayer, token_major
from ssdprof.capture.manifest import (
    AGAIN,
    BROKEN_OFF,
    MANIFEST,
    is_capture,
    is_foreign,
    read_manifest,
)
from ssdprof.core.base import VERSION
from ssdprof.core.target import (
    CallRef,
    CaptureManifest,
    CheckpointRef,
    LayerCapture,
    LayerRef,
    Prompt,
    TensorRecord,
    scalars_hash,
)
from ssdprof.errors import BadInputError, ExitCode, MissingCapabilityError, SsdprofError, unreadable
from ssdprof.files import LOCK, check_writable, locked, put, uninterrupted
from ssdprof.kernels.oracle import spans_of
from ssdprof.operators.tensors import dtype_named, stored_dtype_name

_SERVED = ("served.out", "served.final_states")  # in a file, besides the inputs


def default_folder(
    checkpoint: CheckpointRef, prompts: Sequence[Prompt], layers: Sequence[LayerRef]
) -> Path:
    """The folder of captures without --out: in the assets cache of huggingface_hub, by model,
    layers, prompt and serving mode.
    """
    served = [
        (prompt.token_sha256, prompt.batch, prompt.serving.model_dump(mode="json"))
        for prompt in prompts
    ]
    key = [checkpoint.revision, served, [layer.index for layer in layers]]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    lengths = "-".join(str(prompt.seqlen) for prompt in prompts)
    return cached_assets_path(
        "ssdprof", namespace=checkpoint.repo_id, subfolder=f"{lengths}-{digest}"
    )


def check_folder(out: Path | None, *, overwrite: bool) -> None:
    """Raise in advance if `CaptureWriter` would refuse the folder.  out: None for the default
    one.
    """
    check_writable(Path(constants.HF_ASSETS_CACHE) if out is None else out)
    if out is not None:
        _refuse(out, overwrite)


def _refuse(folder: Path, overwrite: bool) -> None:
    """Raise for a complete or unreadable capture that may not be replaced, and for the manifest of
    something else.
    """
    if not is_capture(folder) or (overwrite and not is_foreign(folder)):
        return
    before = read_manifest(folder)
    if before.complete:
        raise BadInputError(
            f"{folder} holds a complete capture of {before.checkpoint.repo_id} already.",
            "Name another folder, or give --force.",
        )


def _complete_files(folder: Path) -> set[str]:
    """The files of a complete capture; empty if there is none."""
    with suppress(SsdprofError):
        manifest = read_manifest(folder)
        if manifest.complete:
            return {capture.file for capture in manifest.layers}
    return set()


class CaptureWriter:
    """Writes a folder of captures; a context manager.  The manifest is complete unless the context
    raises.

    An earlier complete capture stays until then.

    Raises BadInputError if another process writes there, or if the folder holds a complete capture
    and `overwrite` is not set; MissingCapabilityError if the disk is full or not writable.
    """

    def __init__(
        self,
        folder: Path,
        *,
        checkpoint: CheckpointRef,
        prompts: Sequence[Prompt],
        segment_length: int,
        overwrite: bool = False,
    ) -> None:
        """Touches no file before the context is entered.  segment_length: see `capture_layers`."""
        self.folder, self._overwrite = folder, overwrite
        self.kept: set[str] = set()  # files of an earlier complete capture, until the end
        self.manifest = CaptureManifest(
            version=VERSION,
            checkpoint=checkpoint,
            prompts=tuple(prompts),
            segment_length=segment_length,
            layers=(),
            complete=False,
        )

    def __enter__(self) -> CaptureWriter:
        with ExitStack() as held:
            hint = "Wait for it, or name another folder."
            held.enter_context(
                locked(self.folder / LOCK, "Another capture is being written to", hint)
            )
            _refuse(self.folder, self._overwrite)
            self.kept = _complete_files(self.folder)
            self._write_manifest(self.manifest)
            self._remove_all_but(self.kept)
            self._held = held.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._held, uninterrupted():
            if kind is None:
                self._write_manifest(self.manifest.model_copy(update={"complete": True}))
                self.kept = {capture.file for capture in self.manifest.layers}
            if self.kept:
                self._remove_all_but(self.kept)

    def add(self, captured: CapturedLayer) -> LayerCapture:
        """Store one call of a layer, then name it in the manifest.  ValueError if it is in the
        manifest already.
        """
        served = dict(zip(_SERVED, captured.served or (), strict=False))
        tensors = captured.inputs.tensors | served
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        seqlen = captured.inputs.length
        records = {
            name: TensorRecord(
                shape=tuple(tensor.shape),
                dtype=stored_dtype_name(tensor.dtype),
                sha256=_sha256(tensor),
            )
            for name, tensor in stored.items()
        }
        stem = f"layer_{captured.layer.index:03d}_{_file_words(captured.call, seqlen)}"
        file = f"{stem}.safetensors"
        if file in self.kept:
            file = f"{stem}_again.safetensors"
        if file in {capture.file for capture in self.manifest.layers}:
            raise ValueError(f"{file} is in the manifest already")
        scalars = captured.inputs.scalars
        capture = LayerCapture(
            layer=captured.layer,
            seqlen=seqlen,
            call=captured.call,
            file=file,
            tensors={name: record for name, record in records.items() if name not in served},
            served={name: records[name] for name in served},
            remark=captured.remark,
            slots=captured.slots,
            gap=captured.gap,
            scalars=scalars,
            scalars_sha256=scalars_hash(scalars),
        )
        _put(self.folder / file, lambda temporary: save_file(stored, temporary))
        self._write_manifest(
            self.manifest.model_copy(update={"layers": (*self.manifest.layers, capture)})
        )
        return capture

    def _remove_all_but(self, kept: set[str]) -> None:
        """Remove the files of other captures, and what a killed process left."""
        for pattern in (
            "layer_*_seqlen_*.safetensors",
            ".layer_*_seqlen_*.tmp",
            f".{MANIFEST}.*.tmp",
        ):
            for file in self.folder.glob(pattern):
                if file.name not in kept:
                    file.unlink(missing_ok=True)

    def _write_manifest(self, manifest: CaptureManifest) -> None:
        """Into the folder unless an earlier complete capture is there and this one is not
        complete.
        """
        text = manifest.model_dump_json(indent=1) + "\n"
        if manifest.complete or not self.kept:
            _put(
                self.folder / MANIFEST,
                lambda temporary: temporary.write_text(text, encoding="utf-8"),
            )
        self.manifest = manifest


def load(folder: Path) -> tuple[CaptureManifest, Callable[..., CapturedLayer]]:
    """The manifest of a folder of captures, and `read_layer` for this folder.

    Raises BadInputError, naming the file, for a manifest that is missing, unreadable or of another
    schema version.
    """
    return read_manifest(folder), partial(read_layer, folder)


def check(folder: Path, manifest: CaptureManifest, chosen: Sequence[LayerCapture]) -> None:
    """Raise what a run of these captures would raise; an interrupted capture fails it."""
    for capture in chosen:
        read_layer(folder, capture)
    if not manifest.complete:
        raise SsdprofError(BROKEN_OFF, AGAIN, ExitCode.GATE_FAILED)


def read_layer(
    folder: Path, capture: LayerCapture, device: torch.device | str = "cpu"
) -> CapturedLayer:
    """One layer of the manifest in `folder`, on `device`.  Checks every byte; raises
    BadInputError.
    """
    device = torch.device(device)
    tensors = _checked_tensors(folder, capture)
    served = [tensors.pop(name).to(device) for name in _SERVED if name in capture.served]
    if capture.scalars_sha256 != scalars_hash(capture.scalars):
        raise BadInputError(
            f"{folder / MANIFEST}: the scalars of {capture.layer.name} are not those that were "
            "written.",
            AGAIN,
        )
    try:
        inputs = operators.get(capture.layer.operator).inputs(**tensors, **capture.scalars)
        if inputs.length != capture.seqlen:
            raise ValueError(f"it does not have {capture.seqlen:,} tokens")
        # kernels do not check the values, and would read out of bounds
        spans_of(inputs)
    except (TypeError, ValueError) as error:
        raise BadInputError(
            f"{folder / MANIFEST} is damaged: {capture.layer.name}: {error}.", AGAIN
        ) from error
    return CapturedLayer(
        layer=capture.layer,
        inputs=token_major(inputs, device),
        remark=capture.remark,
        slots=capture.slots,
        gap=capture.gap,
        call=capture.call,
        served=(served[0], served[1]) if len(served) == 2 else None,
    )


def _checked_tensors(folder: Path, capture: LayerCapture) -> dict[str, torch.Tensor]:
    """What the file of a call holds, inputs and served outputs by name, all as it was written."""
    if not re.fullmatch(r"[\w.-]+\.safetensors", capture.file):
        raise BadInputError(
            f"{folder / MANIFEST} names the file {capture.file!r}, which does not belong to it.",
            AGAIN,
        )
    path, records = folder / capture.file, capture.tensors | capture.served
    if not os.path.isfile(path):
        raise BadInputError(f"{path} is missing.", AGAIN)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if other := records.keys() ^ set(file.keys()):
                raise BadInputError(
                    f"{path} and the manifest differ in tensor {', '.join(sorted(other))}.", AGAIN
                )
            tensors = {name: file.get_tensor(name) for name in records}
    except OSError as error:
        raise unreadable(str(path), error, AGAIN) from error
    except SafetensorError as error:
        raise BadInputError(f"{path} is damaged: {error}.", AGAIN) from error
    for name, record in records.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != record.shape or tensor.dtype != dtype_named(record.dtype):
            raise BadInputError(
                f"{path}: {name} does not have the shape or dtype that the manifest says.", AGAIN
            )
        if _sha256(tensor) != record.sha256:
            raise BadInputError(
                f"{path}: the bytes of {name} are not those that were written.", AGAIN
            )
    return tensors


def _file_words(call: CallRef | None, seqlen: int) -> str:
    """ "seqlen_512", "seqlen_512_chunk_003": identifies the prompt and the call."""
    return (
        f"seqlen_{seqlen}"
        if call is None
        else f"seqlen_{call.prompt_seqlen}_{call.kind}_{call.number:03d}"
    )


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """`files.put`, with errors for captures."""
    try:
        put(path, write)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MissingCapabilityError(
            f"{path} cannot be written: {reason}.",
            "Free some space or name a folder on another disk.  The layers that the manifest names "
            "are complete.",
        ) from error
