"""Folders of captured operator inputs: a safetensors file for each call, and a manifest.

Files and the manifest are written atomically, each file before its entry in the manifest.  The
manifest has `complete: false` until the writer closes without an error.  All of its entries are
valid at any time: a writer that replaces a complete capture gives its files other names, and writes
its manifest only at the end.
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
    BROKEN_OFF,
    CAPTURE_HINT,
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

_SERVED = ("served.out", "served.final_states")  # names of the server's outputs in a file


def default_folder(
    checkpoint: CheckpointRef, prompts: Sequence[Prompt], layers: Sequence[LayerRef]
) -> Path:
    """The folder for captures if there is no --out: in the assets cache of huggingface_hub, named
    by model, revision, prompts, modes of serving and layers.  It need not exist.
    """
    prompt_keys = [
        (prompt.token_sha256, prompt.batch, prompt.serving.model_dump(mode="json"))
        for prompt in prompts
    ]
    key = [checkpoint.revision, prompt_keys, [layer.index for layer in layers]]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    lengths = "-".join(str(prompt.seqlen) for prompt in prompts)
    return cached_assets_path(
        "ssdprof", namespace=checkpoint.repo_id, subfolder=f"{lengths}-{digest}"
    )


def check_folder(out: Path | None, *, overwrite: bool) -> None:
    """Raise the error of `CaptureWriter` in advance if it would refuse the folder or cannot write
    there.  A folder that another process writes to is not refused.

    out: None for the default folder.  Its name depends on the prompts' tokens, which are not known
        yet, so only whether the cache that contains it can be written is tested.
    overwrite: replace a complete capture in the folder.
    """
    check_writable(Path(constants.HF_ASSETS_CACHE) if out is None else out)
    if out is not None:
        _refuse(out, overwrite=overwrite)


def _refuse(folder: Path, *, overwrite: bool) -> None:
    """Raise BadInputError if the folder has another program's manifest; without `overwrite`, also
    if it has a complete capture, or a manifest that is damaged or of another version, and
    MissingCapabilityError if it has one that may not be read.
    """
    if not is_capture(folder) or (overwrite and not is_foreign(folder)):
        return
    manifest = read_manifest(folder)
    if manifest.complete:
        raise BadInputError(
            f"{folder} holds a complete capture of {manifest.checkpoint.repo_id} already.",
            "Name another folder, or give --force.",
        )


def _complete_files(folder: Path) -> set[str]:
    """Names of the files of the complete capture in the folder; empty if there is none, or if its
    manifest cannot be read.
    """
    with suppress(SsdprofError):
        manifest = read_manifest(folder)
        if manifest.complete:
            return {capture.file for capture in manifest.layers}
    return set()


class CaptureWriter:
    """A context manager that writes a folder of captures.

    The manifest becomes complete when the context closes without an error.  An earlier complete
    capture stays until then.

    kept: names of the files of an earlier complete capture, until the context closes; then those of
        this one, if it is complete.
    manifest: the manifest so far.

    Entering raises BadInputError if another process writes there, or if `_refuse` refuses the
    folder.  Entering, `add` and closing raise MissingCapabilityError if the disk is full or not
    writable.
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
        """Touches no file; entering the context does.

        segment_length: tokens per forward call.
        """
        self.folder, self._overwrite = folder, overwrite
        self.kept: set[str] = set()
        self.manifest = CaptureManifest(
            version=VERSION,
            checkpoint=checkpoint,
            prompts=tuple(prompts),
            segment_length=segment_length,
            layers=(),
            complete=False,
        )

    def __enter__(self) -> CaptureWriter:
        with ExitStack() as lock:
            hint = "Wait for it, or name another folder."
            lock.enter_context(
                locked(self.folder / LOCK, "Another capture is being written to", hint)
            )
            _refuse(self.folder, overwrite=self._overwrite)
            self.kept = _complete_files(self.folder)
            self._write_manifest(self.manifest)
            self._remove_all_but(self.kept)
            self._lock = lock.pop_all()  # nothing failed: it stays locked until the context closes
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock, uninterrupted():
            if kind is None:
                self._write_manifest(self.manifest.model_copy(update={"complete": True}))
                self.kept = {capture.file for capture in self.manifest.layers}
            if self.kept:
                self._remove_all_but(self.kept)

    def add(self, captured: CapturedLayer) -> LayerCapture:
        """Store one call of a layer, then add it to the manifest.  Returns its entry.

        Raises ValueError if the manifest has it already.
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
        """Remove files of captures, also those that a killed process left, except for those named
        in `kept`, and temporary files of the manifest.
        """
        for pattern in (
            "layer_*_seqlen_*.safetensors",
            ".layer_*_seqlen_*.tmp",
            f".{MANIFEST}.*.tmp",
        ):
            for file in self.folder.glob(pattern):
                if file.name not in kept:
                    file.unlink(missing_ok=True)

    def _write_manifest(self, manifest: CaptureManifest) -> None:
        """Set `manifest`, and write it to the folder, unless it is incomplete and the folder has an
        earlier complete capture.
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

    Raises the errors of `read_manifest`.
    """
    return read_manifest(folder), partial(read_layer, folder)


def check(folder: Path, manifest: CaptureManifest, chosen: Sequence[LayerCapture]) -> None:
    """Raise the error of a run of these captures in advance.

    BadInputError if one of `chosen` is damaged; SsdprofError if the capture was interrupted.
    """
    for capture in chosen:
        read_layer(folder, capture)
    if not manifest.complete:
        raise SsdprofError(BROKEN_OFF, CAPTURE_HINT, ExitCode.GATE_FAILED)


def read_layer(
    folder: Path, capture: LayerCapture, device: torch.device | str = "cpu"
) -> CapturedLayer:
    """Load an entry of the manifest in `folder` to `device`.

    Raises the errors of `_checked_tensors`, and BadInputError if the scalars are not those that
    were written, or if the operator does not accept the inputs.
    """
    device = torch.device(device)
    tensors = _checked_tensors(folder, capture)
    served = [tensors.pop(name).to(device) for name in _SERVED if name in capture.served]
    if capture.scalars_sha256 != scalars_hash(capture.scalars):
        raise BadInputError(
            f"{folder / MANIFEST}: the scalars of {capture.layer.name} are not those that were "
            "written.",
            CAPTURE_HINT,
        )
    try:
        inputs = operators.get(capture.layer.operator).inputs(**tensors, **capture.scalars)
        if inputs.length != capture.seqlen:
            raise ValueError(f"it does not have {capture.seqlen:,} tokens")
        # checks cu_seqlens, which kernels do not: they would read out of bounds
        spans_of(inputs)
    except (TypeError, ValueError) as error:
        raise BadInputError(
            f"{folder / MANIFEST} is damaged: {capture.layer.name}: {error}.", CAPTURE_HINT
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
    """The tensors in the file of a call, inputs and served outputs by name.

    Raises BadInputError if the file is missing, or if they are not those that were written, and
    MissingCapabilityError if the file may not be read.
    """
    if not re.fullmatch(r"[\w.-]+\.safetensors", capture.file):
        raise BadInputError(
            f"{folder / MANIFEST} names the file {capture.file!r}, which does not belong to it.",
            CAPTURE_HINT,
        )
    path = folder / capture.file
    records = capture.tensors | capture.served
    if not os.path.isfile(path):
        raise BadInputError(f"{path} is missing.", CAPTURE_HINT)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            differing = records.keys() ^ set(file.keys())
            if differing:
                raise BadInputError(
                    f"{path} and the manifest differ in tensor {', '.join(sorted(differing))}.",
                    CAPTURE_HINT,
                )
            tensors = {name: file.get_tensor(name) for name in records}
    except OSError as error:
        raise unreadable(str(path), error, CAPTURE_HINT) from error
    except SafetensorError as error:
        raise BadInputError(f"{path} is damaged: {error}.", CAPTURE_HINT) from error
    for name, record in records.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != record.shape or tensor.dtype != dtype_named(record.dtype):
            raise BadInputError(
                f"{path}: {name} does not have the shape or dtype that the manifest says.",
                CAPTURE_HINT,
            )
        if _sha256(tensor) != record.sha256:
            raise BadInputError(
                f"{path}: the bytes of {name} are not those that were written.", CAPTURE_HINT
            )
    return tensors


def _file_words(call: CallRef | None, seqlen: int) -> str:
    """The prompt and the call in the name of a file: "seqlen_512_chunk_003", or "seqlen_512" for a
    whole prompt.
    """
    if call is None:
        return f"seqlen_{seqlen}"
    return f"seqlen_{call.prompt_seqlen}_{call.kind}_{call.number:03d}"


def _sha256(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's bytes in row-major order."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """`files.put`.  Its errors become MissingCapabilityError with a hint for captures."""
    try:
        put(path, write)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MissingCapabilityError(
            f"{path} cannot be written: {reason}.",
            "Free some space or name a folder on another disk.  The layers that the manifest names "
            "are complete.",
        ) from error
