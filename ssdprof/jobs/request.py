"""The user's request, as plain values.  Options are checked here, without knowledge of models and machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ssdprof.capture.prompt import parse_packed, parse_seq
from ssdprof.core.base import EXACT_FP32, SMALLEST_DIFFERENCE, DType, PlacementKind, PrecisionRecord, precisions_for
from ssdprof.core.report import Condition
from ssdprof.core.subject import Cast
from ssdprof.errors import BadInputError
from ssdprof.operators.generate import Tokens

Dtypes = Literal["exact", "relaxed", "all"]
COMPARED = ("unfused", "fused")  # implementations; the first is the baseline
STATE_DTYPES: tuple[DType, ...] = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What is compared in a call.  precisions: empty: the requested ones."""

    implementations: tuple[str, ...]
    precisions: tuple[PrecisionRecord, ...]
    baseline: str


# A step is computed in fp32 throughout, whatever the precision of the prompt.
STEPS = Compared(implementations=("unfused_step", "recurrent"), precisions=(EXACT_FP32,), baseline="unfused_step")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """model: hub id, folder, family name, "demo" or "demo-gdn".  revision, tokenizer: None takes the model's own."""

    model: str
    revision: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServingRequest:
    """How prompts are run, as in a server: see `docs/serving.md`.

    batch: number of prompts.  packed: packed sequences of random lengths, instead of prompts.
    chunk: tokens per call of a chunked prefill.  decode: tokens to generate after each prompt.
    """

    batch: int = 1
    packed: Tokens | None = None
    chunk: int | None = None
    decode: int = 0


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """text: "default", "random" or a file.  seqlens: tokens of each prompt; None: depends on the machine."""

    text: Path | Literal["default", "random"] = "default"
    seqlens: tuple[int, ...] | None = None
    serving: ServingRequest = field(default_factory=ServingRequest)


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """The layers to capture, the model and the prompt.

    layers: "all", "first:N", "3,7" or "every:K".  segment_length: tokens per forward call; None: chosen by capture.
    placement: where the weights are; None: depends on the machine.
    """

    model: ModelRequest
    prompt: PromptRequest = field(default_factory=PromptRequest)
    layers: str = "all"
    segment_length: int | None = None
    placement: PlacementKind | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """What to compare, and the conditions on it.

    smallest_difference: the smallest relative difference of times that counts.
    cast: the dtype in which captured inputs are replayed; None: the model's own.
    tensor_parallel: ranks among which the heads are divided; the first one's share is replayed.

    states: dtypes of the inter-chunk states; None: the defaults of `core.base.precisions_for`.
    implementations, baseline: names, as `operators.implementations` resolves them.
    first_call_s: time limit of the first call of a user's kernel.
    """

    intermediates: Dtypes = "all"
    states: tuple[DType, ...] | None = None
    implementations: tuple[str, ...] = COMPARED
    baseline: str = COMPARED[0]
    first_call_s: float = 180.0
    smallest_difference: float = SMALLEST_DIFFERENCE
    cast: DType | None = None
    tensor_parallel: int = 1
    conditions: tuple[Condition, ...] = ()

    def cast_from(self, dtype: DType) -> Cast | None:
        """The cast of inputs of this dtype; None if there is none."""
        return Cast(source=dtype, to=self.cast) if self.cast not in (None, dtype) else None

    def precisions(self, dtype: DType) -> tuple[PrecisionRecord, ...]:
        """dtype: of the operators' inputs."""
        return precisions_for(dtype, self.intermediates, self.states)


Reference = Literal["auto", "oracle", "unfused"]
Weights = Literal["auto", "own", "fp32"]


@dataclass(frozen=True, kw_only=True)
class AnswersRequest:
    """The implementations that replace a model's operators, and their reference.

    precisions: the requested ones, by dtype of the model.
    reference: "auto" is the fp64 oracle unless it takes too long, then unfused exact.
    weights: the dtype that the model runs in; "auto" is its own on a GPU and fp32 without one.
    per_layer: each layer alone, too.  generate: greedy tokens after the prompt.
    """

    precisions: Callable[[DType], tuple[PrecisionRecord, ...]]
    implementations: tuple[str, ...] = COMPARED
    reference: Reference = "auto"
    weights: Weights = "auto"
    per_layer: bool = False
    generate: int = 0
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How a run is stored.  out: its folder; None: a new one under runs/.  command: as typed."""

    out: Path | None = None
    save_captures: bool = False
    command: tuple[str, ...] = ()


def parse_states(states: str) -> tuple[DType, ...]:
    """ "fp32,bf16" -> ("fp32", "bf16"); "all" is every one."""
    if states == "all":
        return STATE_DTYPES
    chosen: list[DType] = []
    for word in states.split(","):
        match = [dtype for dtype in STATE_DTYPES if dtype == word.strip()]
        if not match:
            raise BadInputError(
                f"--states does not know {word.strip()!r}.",
                f"Give one or more of {', '.join(STATE_DTYPES)}, separated by commas, or all.",
            )
        chosen += [dtype for dtype in match if dtype not in chosen]
    return tuple(chosen)


def parse_implementations(option: str, words: str) -> tuple[str, ...]:
    """ "fused,unfused" -> names without duplicates.  option: for messages.

    Whether they exist depends on the operator, and is not checked here.
    """
    names = tuple(dict.fromkeys(word.strip() for word in words.split(",")))
    if "" in names:
        raise BadInputError(f"{option} has an empty name: {words!r}.", f"Give one or more of {', '.join(COMPARED)}.")
    return names


def parse_serving(
    batch: int, packed: str | None, chunk: str | None, decode: int, *, seq: str | None, segment: str | None
) -> ServingRequest:
    """Parse the options of serving.  Raises BadInputError for invalid ones and for invalid combinations."""
    if packed is not None:
        for option, given in (
            ("--seq", seq is not None),
            ("--batch", batch > 1),
            ("--chunked-prefill", chunk is not None),
            ("--decode", decode > 0),
        ):
            if given:
                raise BadInputError(
                    f"--packed and {option} cannot be combined: packed sequences are one call of their own lengths.",
                    f"Leave out {option}, or give --batch instead of --packed.",
                )
    if chunk is not None and segment is not None:
        raise BadInputError(
            "--chunked-prefill and --segment cannot be combined: the chunks are the segments.", "Leave out --segment."
        )
    length = None if chunk is None else parse_seq(chunk)
    if length == 1:
        raise BadInputError(
            "--chunked-prefill 1 would be decoding: models compute single tokens by another function.",
            "Give 2 or more tokens, such as 8k, or use --decode.",
        )
    return ServingRequest(
        batch=batch, packed=None if packed is None else parse_packed(packed), chunk=length, decode=decode
    )
