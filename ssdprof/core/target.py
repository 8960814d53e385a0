"""Records of what a report measures: the model, its layers, calls and prompts, and the machine.

The records of stored captures and of dry runs are here, too.
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

# quantisations whose weights transformers decodes to 16 bit on loading
DECODED_ON_LOAD = frozenset({"fp8", "mxfp8"})


class LayerRef(Record):
    """A decoder layer with an operator."""

    index: Annotated[int, Field(ge=0, lt=1 << 16)]  # position among the model's decoder layers
    name: Text  # module path in the full model, "model.layers.3.mamba"
    operator: Text  # its name: see ssdprof.operators


class Dims(Record):
    """The sizes of one call.

    chunk_size: positions per chunk of the model's algorithm; None if it has no chunks.
    dtype: of the model's activations, such as x or q.  Other inputs may be in fp32.
    sizes: the operator's name of a size, such as "nheads" -> the size.
    words: the sizes for people: "80 heads x 64, state 128".
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
    """One of several calls of a layer's operator on a prompt, or a call that several sequences
    share.

    kind: one of these words.
        "packed": sequences that are packed one after another.  A server's recording has a call for
            each forward pass; sequences of equally many drafted tokens are then a batch.
        "chunk": a piece of a chunked prefill, which begins with the states of the previous piece.
        "decode": one token of each sequence, after the prompt.
        "verify": the last tokens of the prompt, as if they had been drafted.
    number: the number of the call among the `count` calls of its kind, from 1.
    prompt_seqlen: the tokens of each sequence's prompt; if packed, of all sequences together.
    sequences: the number of independent sequences in the call.
    rank: the rank of the server's process that made the call; None if it is not known.
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
    def pass_and_rank_suffix(self) -> str:
        """The forward pass and the rank of a recorded call, after a comma: ", pass 2 of 5, rank 1".

        The pass is left out if there is only one, the rank if it is not known; empty without both.
        """
        forward_pass = "" if self.count == 1 else f", pass {self.number:,} of {self.count:,}"
        return forward_pass if self.rank is None else f"{forward_pass}, rank {self.rank}"

    def __str__(self) -> str:
        """The call in words, such as:

        chunk 2 of 5 of 40 tokens
        decode step 1 of 4 after 40 tokens
        drafted at the end of 40 tokens
        in 3 packed sequences, pass 2 of 5, rank 1
        """
        if self.kind == "packed":
            noun = "sequence" if self.sequences == 1 else "sequences"
            return f"in {self.sequences:,} packed {noun}{self.pass_and_rank_suffix}"
        prompt = tokens(self.prompt_seqlen, self.sequences)
        if self.kind == "verify":
            return f"drafted at the end of {prompt}"
        if self.kind == "chunk":
            return f"chunk {self.number:,} of {self.count:,} of {prompt}"
        return f"decode step {self.number:,} of {self.count:,} after {prompt}"


class Serving(Record):
    """How the model runs prompts.

    By default every operator is called once on a whole prompt, and nothing is decoded.

    packed: the lengths of sequences that are packed into one call; empty for a batch of equally
        long sequences.
    chunk: the tokens per call of a chunked prefill; None if the prefill is not chunked.
    decode: the number of tokens that the model generates after the prompt.  Each takes one call of
        every operator.
    """

    packed: tuple[Length, ...] = ()
    chunk: Annotated[int, Field(ge=2, le=LONGEST_SEQLEN)] | None = None
    decode: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0

    def calls(self, seqlen: int, batch: int = 1) -> tuple[CallRef | None, ...]:
        """The calls of one layer's operator on a prompt of `seqlen` tokens, without that of
        `drafted_call`.

        None stands for a call on the whole prompt.
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
    """The size of a prompt in words: "131,072 tokens", "32 x 1,024 tokens"."""
    noun = "token" if seqlen == 1 else "tokens"
    return f"{seqlen:,} {noun}" if batch == 1 else f"{batch} x {seqlen:,} {noun}"


def split_prompt(seqlen: int, segment_length: int) -> list[tuple[int, int]]:
    """(start, stop) of each segment of a prompt.

    If the last segment would have a single token, that token joins the segment before it, because
    models call a different function for one token.
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
    """The machine and the versions behind a number.

    It contains no name of a host or a user, no path, and no access token.
    """

    gpu: Gpu | None
    cpu: Text
    platform: Text
    python: Text
    packages: dict[Text, Text]  # distribution name -> version, for those installed


class Clocks(Record):
    """Readings of NVML before and after the region that was timed."""

    sm_mhz: tuple[Count, Count]
    memory_mhz: tuple[Count, Count]
    temperature_c: tuple[int, int]
    throttle_reasons: tuple[Text, ...]  # empty: not throttled

    def until(self, later: Clocks) -> Clocks:
        """The clocks of a region that begins with this one and ends with a later one."""
        return Clocks(
            sm_mhz=(self.sm_mhz[0], later.sm_mhz[1]),
            memory_mhz=(self.memory_mhz[0], later.memory_mhz[1]),
            temperature_c=(self.temperature_c[0], later.temperature_c[1]),
            throttle_reasons=tuple(dict.fromkeys(self.throttle_reasons + later.throttle_reasons)),
        )


class Ceilings(Record):
    """The ceilings of a roofline, measured on the same GPU in the same run."""

    copy_gb_per_s: Annotated[float, Field(gt=0)]  # bytes read + written
    matmul_tflops: Annotated[float, Field(gt=0)]


class Allocation(Record):
    """The part of a model that a GPU, main memory or the disk holds.

    layers: the number of decoder layers whose first weights are there.
    bytes: of all weights there.
    """

    layers: Count
    bytes: Count


class Placement(Record):
    """Where a model's weights are while it runs.

    device: the device on which the model computes; the first one if there are several.
    allocated: "cuda:0", "cpu" or "disk" -> the part of the model that is there.
    predicted_peak_bytes: the memory on `device` while the model runs and inputs are captured,
        without replaying, as predicted before loading.  None if the model's code does not run on
        the meta device.
    streamed_layer_bytes: the weights of the largest decoder layer that is copied to `device` for
        each forward call; 0 if no layer is.
    bytes_per_s: the measured speed of these copies; None if there are none, or before the download.
    forward_calls: the number of forward calls for the longest prompt: its segments, packed
        sequences and decode steps.
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
        """The time for copying the largest streamed layer in each forward call; None if nothing is
        streamed, or if the speed is not known.
        """
        return self.streamed_layer_bytes / self.bytes_per_s if self.bytes_per_s else None


# --- the model and the prompt


class CheckpointRef(Record):
    """The checkpoint of a report."""

    requested: Text  # what the user typed
    source: Literal["hub", "local", "demo", "recorded"]
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
        """The repository with its revision: "ibm-granite/granite-4.0-h-small@1234567890ab"."""
        return f"{self.repo_id}@{self.revision[:12]}" if self.revision else self.repo_id


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


# an infinite limit is the string "Infinity" in JSON
_Limit = Annotated[float, Field(allow_inf_nan=True), WithJsonSchema({"type": ["number", "string"]})]


class LayerCapture(Record):
    """The stored inputs of one call of a layer's operator.

    seqlen: the length of the call.
    call: which of the layer's calls; None for a call on the whole prompt.
    file: the safetensors file, in the folder of the manifest.
    remark: a sentence for the report if the inputs differ from the model's call or its config.
    scalars: the arguments that are not tensors: chunk_size, dt_softplus, dt_limit, ...
    scalars_sha256: see `scalars_hash`.
    served: the output that a server recorded, in the same file as "served.out" and
        "served.final_states".
    slots: the slots of the sequences in the server's pool of states; empty if they are not known.
    gap: whether calls of the layer may be missing before this one.
    """

    layer: LayerRef
    seqlen: Length
    call: CallRef | None = None
    file: Text
    tensors: dict[Text, TensorRecord]
    remark: Text = ""
    scalars: dict[Text, int | float | bool | Text | tuple[_Limit, ...] | None]
    scalars_sha256: Text
    served: dict[Text, TensorRecord] = Field(default_factory=dict)
    slots: tuple[int, ...] = ()
    gap: bool = False

    @property
    def whole(self) -> bool:
        """Whether the call is on a whole prompt or on packed sequences, and no chunk or decode step
        of a model, and not on its drafted tokens.  All calls that a server recorded count as
        packed, also those on a batch of drafted tokens.
        """
        return self.call is None or self.call.kind == "packed"


class CaptureManifest(Record):
    """The contents of a folder of captures."""

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
    """The SHA-256 of the scalars' names, types and values, so that 1, 1.0 and true differ.

    The order of the scalars does not matter.
    """
    return hashlib.sha256(json.dumps(dict(scalars), sort_keys=True).encode()).hexdigest()


# --- dry runs


class PlannedFile(Record):
    """A file that a model needs."""

    name: Text
    size_bytes: int
    cached: bool  # whether it is in the cache, so that it need not be downloaded


class DryRun(Record):
    """What a run would download and load.

    batch, serving: of each prompt.
    tensor_parallel: as in `Report`.
    weight_bytes: of the loaded model.
    free_bytes: the free memory of `device` at present.
    placement: None for stored captures, and if no placement fits.
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
