"""What a request is about.  Judged before torch is imported: a wrong name or layer is answered at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssdprof import operators
from ssdprof.capture.manifest import is_capture, read_manifest
from ssdprof.capture.select import select_layers
from ssdprof.checkpoint import Located, locate
from ssdprof.errors import BadInputError
from ssdprof.pipeline.request import CaptureRequest
from ssdprof.schema import CheckpointRef, LayerRef


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a request came to: a checkpoint that is found, its wanted layers, and lengths that suit this machine."""

    located: Located
    layers: tuple[LayerRef, ...]
    seqlens: tuple[int, ...]

    @property
    def ref(self) -> CheckpointRef:
        return self.located.ref

    @property
    def deepest_layer(self) -> int:
        return max(layer.index for layer in self.layers)


def captures_of(request: CaptureRequest) -> Path | None:
    """The folder, if the request names one of stored captures."""
    folder = Path(request.model.model).expanduser()
    return folder if is_capture(folder) else None


def find(request: CaptureRequest) -> Subject:
    """Locate the model and choose its layers; small files are downloaded.  Raises what they raise."""
    model = request.model
    located = locate(model.model, revision=model.revision, tokenizer=model.tokenizer)
    layers = select_layers(request.layers, located.ref.layers)
    from ssdprof.pipeline import limits  # imports torch, after all that needs none

    return Subject(located=located, layers=layers, seqlens=request.prompt.seqlens or limits.default_seqlens())


def find_to_replay(request: CaptureRequest) -> Subject | None:
    """As `find`, and None for stored captures, of which the manifest and the wanted layers are checked.

    BadInputError for a model whose layers are larger than any implementation takes.
    """
    folder = captures_of(request)
    if folder is not None:
        select_layers(request.layers, tuple(dict.fromkeys(stored.layer for stored in read_manifest(folder).layers)))
        return None
    subject = find(request)
    refuse_large(subject)
    return subject


def refuse_large(subject: Subject) -> None:
    """BadInputError for layers of sizes that no bundled implementation takes: `largest` of the operator's outline."""
    for layer in subject.layers:
        dims = subject.located.dims(layer)
        for name, most in operators.outline(layer.operator).largest.items():
            size = getattr(dims, name)
            if size > most:
                raise BadInputError(
                    f"{subject.ref.repo_id} has {name} = {size} in layer {layer.index}; kernels take at most {most}.",
                    "Its inputs can be stored with 'ssdprof capture'.",
                )
