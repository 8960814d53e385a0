"""Records of the target of a report: its model, layers, calls, prompts, and the machine that it
ran on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema, computed_field, model_validator

from ssdprof.core.base import (
    LONGEST_SEQLEN,
    MOST_STEPS,
    VERSION,
    Count,
    DType,
    Length,
    PlacementKind,
    Record,
    Size,
    StoredDType,
    Text,
    check_unique,
)

# Quantisations whose weights transformers decodes to 16 bit on loading.
DECODED_ON_LOAD = frozenset({"fp8", "mxfp8"})


class LayerRef(Record):
    """A decoder layer with an operator."""

    index: Annotated[int, Field(ge=0, lt=1 << 16)]  # position among the model's decoder layers
    name: Text  # module path in the full model, "model.layers.3.mamba"
    operator: Text  # its name: see ssdprof.operators


class Dims(Record):
    """The sizes of one call.

    sizes: by the operator's own names, such as "nheads".  words: the same for people, "80 heads x
    64, state 128".
    chunk_size: positions per chunk of the model's algorithm; None if it has no chunks.
    dtype: of the inputs with a position axis.
    """

    operator: Text
    batch: Length
    seqlen: Length
    chunk_size: Length | None
    dtype: DType
    sizes: dict[Text, Size]
    words: Text

    def __str__(self) -> str:
        chunk = "" if self.chunk_size is None else f", chunk {self.chunk_size}"
        return f"{self.words}{chunk}, {self.dtype}"


class CallRef(Record):
    """One call of a layer's operator, if a prompt makes several calls or several sequences share
    one.

    kind: "packed": packed sequences; of several forward passes, if a server recorded them; and then
        side by side if they are equally many drafted tokens.
        "chunk": a piece of a chunked prefill, which begins with the states of the previous piece.
        "decode": one token of each sequence, after the prompt.  "verify": the last tokens of the
        prompt, as if they had been drafted.
    number: of the call among the `count` calls of its kind, from 1.
    prompt_seqlen: tokens of each sequence's prompt; of all sequences together if packed.
    sequences: independent sequences in the call.
    rank: of the server's process that made the call; None if it is not known.
    """

    kind: Literal["packed", "chunk", "decode", "verify"]
    number: Size
    count: Length
    prompt_seqlen: Length
    sequences: Length
    rank: Count | None = None

    @model_validator(mode="after")
    def _within(self) -> CallRef:
        if self.number > self.count:
            raise ValueError(f"there is no call {self.number} of {self.count}")
        return self

    @property
    def of_server(self) -> str:
        """ ", pass 2 of 5, rank 1", as far as it is known."""
        among = "" if self.count == 1 else f", pass {self.number:,} of {self.count:,}"
        return among if self.rank is None else f"{among}, rank {self.rank}"

    def __str__(self) -> str:
        """ "chunk 2 of 5 of 40 tokens", "decode step 1 of 4 after 40 tokens", "in 3 packed
        sequences".
        """
        if self.kind == "packed":
            noun = "sequence" if self.sequences == 1 else "sequences"
            return f"in {self.sequences:,} packed {noun}{self.of_server}"
        prompt = tokens(self.prompt_seqlen, self.sequences)
        if self.kind == "verify":
            return f"drafted at the end of {prompt}"
        if self.kind == "chunk":
            return f"chunk {self.number:,} of {self.count:,} of {prompt}"
        return f"decode step {self.number:,} of {self.count:,} after {prompt}"


class Serving(Record):
    """How the model runs prompts.  The default: all of a prompt in one call of every operator, and
    no decoding.

    packed: lengths of sequences that are packed into one call; empty: a batch of equal lengths.
    chunk: tokens per call of a chunked prefill; None: no chunked prefill.
    decode: tokens that the model generates after the prompt, one call of every operator for each.
    """

    packed: tuple[Length, ...] = ()
    chunk: Annotated[int, Field(ge=2, le=LONGEST_SEQLEN)] | None = None
    decode: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0

    def calls(self, seqlen: int, batch: int = 1) -> tuple[CallRef | None, ...]:
        """Every call of one layer's operator on a prompt of `seqlen` tokens; None: the whole prompt
        in one call.
        """

        def numbered(
            kind: Literal["packed", "chunk", "decode"], count: int, sequences: int = batch
        ) -> list[CallRef]:
            return [
                CallRef(
                    kind=kind, number=number, count=count, prompt_seqlen=seqlen, sequences=sequences
                )
                for number in range(1, count + 1)
            ]

        of_prompt: Sequence[CallRef | None] = [None]
        if self.packed:
            of_prompt = numbered("packed", 1, len(self.packed))
        elif self.chunk is not None:
            of_prompt = numbered("chunk", len(split_prompt(seqlen, self.chunk)))
        return (*of_prompt, *numbered("decode", self.decode))


def drafted_call(seqlen: int, batch: int) -> CallRef:
    """The only call of `run --verify` on a prompt."""
    return CallRef(kind="verify", number=1, count=1, prompt_seqlen=seqlen, sequences=batch)


def tokens(seqlen: int, batch: int = 1) -> str:
    """ "131,072 tokens", "32 x 1,024 tokens", as in the tables of a report."""
    noun = "token" if seqlen == 1 else "tokens"
    return f"{seqlen:,} {noun}" if batch == 1 else f"{batch} x {seqlen:,} {noun}"


def split_prompt(seqlen: int, segment_length: int) -> list[tuple[int, int]]:
    """Start and stop of each segment.

    A last segment of a single token joins the one before it, because models call a different
    function for one token.
    """
    starts = list(range(0, seqlen, segment_length))
    if len(starts) > 1 and seqlen - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], seqlen], strict=True))


# --- the machine


class Gpu(Record):
    """The GPU on which a report was made."""

    name: Text
    compute_capability: Text  # "9.0"
    sm_count: Size
    memory_bytes: Size
    l2_bytes: Count
    driver: Text
    cuda: Text


class Environment(Record):
    """The machine and the versions behind a number.  Holds no host name, user name, path or
    token.
    """

    gpu: Gpu | None
    cpu: Text
    platform: Text
    python: Text
    packages: dict[Text, Text]  # distribution name -> version, for those installed


class Clocks(Record):
    """Readings of NVML before and after the timed region."""

    sm_mhz: tuple[Count, Count]
    memory_mhz: tuple[Count, Count]
    temperature_c: tuple[int, int]
    throttle_reasons: tuple[Text, ...]  # empty: not throttled

    def until(self, later: Clocks) -> Clocks:
        """The readings before these and after the later ones."""
        names = ("sm_mhz", "memory_mhz", "temperature_c")
        pairs = {name: (getattr(self, name)[0], getattr(later, name)[1]) for name in names}
        return Clocks(
            **pairs,
            throttle_reasons=tuple(dict.fromkeys(self.throttle_reasons + later.throttle_reasons)),
        )


class Ceilings(Record):
    """Measured on the same GPU in the same run."""

    copy_gb_per_s: Annotated[float, Field(gt=0)]  # bytes read + written
    matmul_tflops: Annotated[float, Field(gt=0)]


class Allocation(Record):
    """What a device, or main memory or the disk, holds of a model: decoder layers that begin there,
    and bytes of all weights.
    """

    layers: Count
    bytes: Count


class Placement(Record):
    """Where a model's weights are while it runs.

    device: where the model computes, the first one of several.  allocated: all weights, by device:
    "cuda:0", "cpu", "disk".
    predicted_peak_bytes: memory on `device` while the model runs and inputs are captured, predicted
        before loading, without replaying.  None if the model's code does not run on the meta
        device.
    streamed_layer_bytes: weights of the largest decoder layer that is brought to `device` for each
        forward call; 0 if none is.
    bytes_per_s: measured speed of streaming; None if nothing is streamed, or before the download.
    forward_calls: of the model, for the longest prompt: its segments, packed sequences and decode
    steps.
    """

    kind: PlacementKind
    device: Text
    allocated: dict[Text, Allocation]
    predicted_peak_bytes: Count | None
    streamed_layer_bytes: Count = 0
    bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    forward_calls: Count = 1

    @property
    def seconds_per_layer(self) -> float | None:
        """Streaming time of the largest layer in each forward call; None if unknown, or if nothing
        is streamed.
        """
        return self.streamed_layer_bytes / self.bytes_per_s if self.bytes_per_s else None


# --- the model and the prompt


class CheckpointRef(Record):
    """The checkpoint of a report."""

    requested: Text  # what the user typed
    source: Literal["hub", "local", "demo"]
    repo_id: Text  # hub id, folder name, or the name of a demo
    revision: Text | None  # commit hash on the hub
    model_type: Text
    layers: tuple[LayerRef, ...]  # those with an operator that ssdprof knows
    layer_count: Size  # all decoder layers
    siblings: tuple[Text, ...] = ()  # other members when `requested` was a family name
    quantization: Text | None = None  # quant_method; its error is then part of the captured values
    trained_context: Size | None = None
    random_weights: bool = False  # according to the config

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointRef:
        check_unique("a layer", [layer.index for layer in self.layers])
        if any(layer.index >= self.layer_count for layer in self.layers):
            raise ValueError(f"there are only {self.layer_count} layers")
        return self

    def __str__(self) -> str:
        """ "ibm-granite/granite-4.0-h-small@1234567890ab"."""
        return f"{self.repo_id}{f'@{self.revision[:12]}' if self.revision else ''}"


class Prompt(Record):
    """A prompt, without its text."""

    kind: Literal["default", "file", "random", "recorded"]  # the last: by a server
    source: Text  # the text, in words, without a path
    tokenizer: Text
    seqlen: Length  # of each sequence; of all packed sequences together
    batch: Length = 1
    token_sha256: Text  # of the little-endian int64 ids, or of a recording's metadata
    serving: Serving = Serving()

    @model_validator(mode="after")
    def _consistent(self) -> Prompt:
        if self.seqlen * self.batch > LONGEST_SEQLEN:
            raise ValueError(f"a prompt has at most {LONGEST_SEQLEN:,} tokens")
        if self.serving.packed and sum(self.serving.packed) != self.seqlen:
            raise ValueError("packed sequences have the tokens of the prompt")
        return self


# --- captures


class TensorRecord(Record):
    """A stored tensor."""

    shape: tuple[Count, ...]
    dtype: StoredDType
    sha256: Text  # of the stored bytes


# an infinite one is the string "Infinity" in JSON
_Limit = Annotated[float, Field(allow_inf_nan=True), WithJsonSchema({"type": ["number", "string"]})]


class LayerCapture(Record):
    """The stored inputs of one call of a layer's operator.

    call: which one; None: the whole of a prompt.
    remark: a sentence for the report if the inputs differ from the model's call or its config.
    scalars: arguments that are not tensors: chunk_size, dt_softplus, dt_limit, ...
    scalars_sha256: of their JSON, in the order of names.
    served: the output that a server recorded, in the same file as "served.out" and
    "served.final_states".
    slots: of the sequences, in the server's pool of states; empty if they are not known.
    gap: whether calls of the layer may be missing before this one.
    """

    layer: LayerRef
    seqlen: Length  # of the call
    call: CallRef | None = None
    file: Text  # safetensors file in the manifest's folder
    tensors: dict[Text, TensorRecord]
    remark: Text = ""
    scalars: dict[Text, int | float | bool | Text | tuple[_Limit, ...] | None]
    scalars_sha256: Text
    served: dict[Text, TensorRecord] = Field(default_factory=dict)
    slots: tuple[int, ...] = ()
    gap: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is of whole sequences: no chunk, and no decode step."""
        return self.call is None or self.call.kind == "packed"


class CaptureManifest(Record):
    """What a folder of captures holds."""

    version: Literal[4] = VERSION
    checkpoint: CheckpointRef
    prompts: tuple[Prompt, ...]
    segment_length: Size  # tokens per forward call of the model
    layers: tuple[LayerCapture, ...]
    complete: bool

    @model_validator(mode="after")
    def _consistent(self) -> CaptureManifest:
        check_unique("a prompt", [prompt.seqlen for prompt in self.prompts])
        check_unique("a file", [stored.file for stored in self.layers])
        check_unique("a call", [(call.layer.index, call.seqlen, call.call) for call in self.layers])
        if any(call.layer.index >= self.checkpoint.layer_count for call in self.layers):
            raise ValueError(f"there are only {self.checkpoint.layer_count} layers")
        return self


def scalars_hash(scalars: Mapping[str, object]) -> str:
    """SHA-256 of names, types and values, in the order of names: 1, 1.0 and true differ."""
    return hashlib.sha256(json.dumps(dict(scalars), sort_keys=True).encode()).hexdigest()


# --- dry runs


class PlannedFile(Record):
    """A file that a model needs."""

    name: Text
    size_bytes: int
    cached: bool  # it need not be downloaded


class DryRun(Record):
    """What a run would download and load.

    weight_bytes: once loaded.  free_bytes: memory of `device` now.
    placement: None for stored captures, and if no placement fits.
    batch, serving: of each prompt.  tensor_parallel: as in a report.
    """

    checkpoint: CheckpointRef
    layers: tuple[LayerRef, ...]
    dims: Text
    seqlens: tuple[int, ...]
    batch: int = 1
    serving: Serving = Serving()
    tensor_parallel: int = 1
    files: tuple[PlannedFile, ...]
    weight_bytes: int
    device: Text
    free_bytes: int
    placement: Placement | None = None
    notes: tuple[Text, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def download_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files if not file.cached)
