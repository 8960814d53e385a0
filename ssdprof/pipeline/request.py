"""What a user asked for, as plain values.  Words are checked here; models and machines are not known yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ssdprof.errors import BadInputError
from ssdprof.schema import NO_GATES, Asked, DType, Gates, LayerRef, PrecisionRecord, precisions_for

Dtypes = Literal["exact", "relaxed", "all"]
IMPLEMENTATIONS = ("unfused", "fused")
STATE_DTYPES: tuple[DType, ...] = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """model: hub id, folder, family name, "demo" or "demo-gdn".  revision, tokenizer: None takes the model's own."""

    model: str
    revision: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """text: "default", "random" or a file.  seqlens: tokens of each prompt; None lets the machine decide."""

    text: Path | Literal["default", "random"] = "default"
    seqlens: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """Which layers' inputs to take, from which model, on which prompt.

    layers: "all", "first:N", "3,7" or "every:K".  segment_length: tokens per forward call; None lets capture decide.
    """

    model: ModelRequest
    prompt: PromptRequest = field(default_factory=PromptRequest)
    layers: str = "all"
    segment_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """What to compare, and what must hold.  smallest_difference: of two times that counts, relative.

    states: dtypes of the inter-chunk states; None takes the usual ones of `schema.precisions_for`.
    """

    intermediates: Dtypes = "all"
    states: tuple[DType, ...] | None = None
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    smallest_difference: float = 0.01
    gates: Gates = NO_GATES

    def precisions(self, dtype: DType) -> tuple[PrecisionRecord, ...]:
        """dtype: of the operators' inputs."""
        return precisions_for(dtype, self.intermediates, self.states)

    def asked(self, layers: tuple[LayerRef, ...], dtype: DType) -> Asked:
        """For the report of a run of these layers, whose inputs have this dtype."""
        return Asked(implementations=self.implementations, precisions=self.precisions(dtype), layers=layers)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How a run is kept.  out: its folder; None makes one under runs/.  command: as typed."""

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


def parse_implementations(words: str) -> tuple[str, ...]:
    """ "fused,unfused" -> names, each once.  Which there are depends on the operator and is not checked here."""
    names = tuple(dict.fromkeys(word.strip() for word in words.split(",")))
    if "" in names:
        raise BadInputError(
            f"--implementations has an empty name: {words!r}.", f"Give one or more of {', '.join(IMPLEMENTATIONS)}."
        )
    return names


def parse_percent(option: str, text: str, *, whole: bool = False) -> float:
    """ "1%" -> 0.01, of an option that is called `option`.  whole: 100% is one, too."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not (0 <= value < 100 or (whole and value == 100)):
        raise BadInputError(f"{option} is not a percentage: {text!r}.", "Give 1%, 0.5%, 0%.")
    return value / 100
